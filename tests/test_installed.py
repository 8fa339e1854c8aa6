"""The wheel and the runner of Nix: the caller's checkout wins; else the packed sources run and state lies with the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tasks import installed

ROOT = Path(__file__).resolve().parent.parent


def checkout(folder: Path) -> Path:
    for mark in installed.MARKS:
        (folder / mark).parent.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()
    return folder


def test_a_checkout_around_the_caller_wins_and_its_words_stay_as_they_are(tmp_path: Path) -> None:
    mine, packed = checkout(tmp_path / "mine"), checkout(tmp_path / "packed")
    below = mine / "tasks"
    root, argv, env = installed.call(["level0", "bridge=../b"], {"A": "1"}, below, packed)
    assert (root, argv[1:], env) == (mine, ["-m", "doit", "level0", "bridge=../b"], {"A": "1"})


@pytest.mark.parametrize(
    ("word", "called"),
    [
        ("bridge=../b", "bridge={here}/../b"), ("levels=~/l.yaml", "levels={home}/l.yaml"), ("build=/x", "build=/x"),
        ("grpo.max_num_steps=2", "grpo.max_num_steps=2"), ("bridge=", "bridge="), ("level0", "level0"),
    ],
)  # fmt: skip
def test_relative_paths_are_the_callers_on_the_packed_sources(tmp_path: Path, word: str, called: str) -> None:
    here, packed = tmp_path / "here", checkout(tmp_path / "packed")
    given = {"BRIDGE_REPO": "b", "NEMO_RL_REPO": "/n", "MCORE_REPO": ""}
    root, argv, env = installed.call([word], given, here, packed)
    assert (root, argv[3:]) == (packed, [called.format(here=here, home=Path.home())])
    paths = {"BRIDGE_REPO": f"{here}/b", "NEMO_RL_REPO": "/n", "E2E_BUILD_DIR": f"{here}/build"}
    assert {name: env[name] for name in paths} == paths


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_program_and_answers_in_an_empty_folder(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    packed, empty = tmp_path / "site", tmp_path / "an empty folder"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packed)
        held = {name.removeprefix("nemo_rl_e2e/") for name in archive.namelist()}
    asked = ["git", "ls-files", "dodo.py", "levels.yaml", "pyproject.toml", "tasks", "containers"]
    listed = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    if not listed:
        pytest.skip("not a git checkout: what belongs to the wheel cannot be listed")
    assert set(listed) - held == {"tasks/installed.py"}  # there as the package itself
    assert "__init__.py" in held
    assert {path.name for path in packed.iterdir()} == {
        "nemo_rl_e2e",
        wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info",
    }
    empty.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("E2E_") and not k.endswith("_REPO")}
    before = {path: path.stat().st_mtime_ns for path in packed.rglob("*")}
    done = subprocess.run(
        [sys.executable, "-c", "import nemo_rl_e2e; nemo_rl_e2e.main()", "levels", "--json"],
        cwd=empty, env={**kept, "PYTHONPATH": str(packed), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "level0" in json.dumps(json.loads(done.stdout))
    assert {path: path.stat().st_mtime_ns for path in packed.rglob("*")} == before
