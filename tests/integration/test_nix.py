"""The flake with Nix itself, without a network: everything evaluates, the archives are the same bits, the runner runs.

nixpkgs is replaced by nix/stub (nix/README.md says what that shows and what it cannot show). Without Nix these tests are
skipped and say so; with CI=true they fail instead. Builds need `sandbox = false`, which a Nix daemon may refuse.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import run_git
from tests.integration.conftest import ROOT, lacking

if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEMS = ("aarch64-linux", "x86_64-linux")
SETTINGS = """sandbox = false
build-users-group =
substituters =
experimental-features = nix-command flakes
"""


class Flake:
    """A copy of this project, without what git ignores, and Nix on it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / "project"  # Nix 2.8 refuses a blank in a path
        self.stub = ("--override-input", "nixpkgs", f"path:{self.folder / 'nix' / 'stub'}")
        listed = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        run_git(self.folder, "init", "-q", "-b", "main")
        run_git(self.folder, "add", "-A")
        run_git(self.folder, "commit", "-q", "-m", "one")  # a clean tree: Nix warns about every other

    def nix(self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            ["nix", *words], cwd=cwd or self.folder, capture_output=True, text=True, check=False, timeout=300,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "NIX_CONFIG": SETTINGS, "XDG_CACHE_HOME": str(self.home / "cache"), **(env or {})},
        )  # fmt: skip
        assert done.returncode == 0, f"nix {' '.join(words)}: rc {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def build(self, name: str, *words: str) -> Path:
        link = self.home / f"result-{name}"
        self.nix("build", f".#{name}", "--out-link", str(link), *words)
        return link.resolve()


@pytest.fixture(scope="module")
def flake(tmp_path_factory: pytest.TempPathFactory) -> Flake:
    if not shutil.which("nix"):
        lacking("no `nix` on PATH (Debian: apt-get install --no-install-recommends nix-bin)")
    if not (ROOT / ".git").exists():
        lacking("not a git checkout: what belongs to the flake is what git lists")
    return Flake(tmp_path_factory.mktemp("nix"))


@pytest.fixture(scope="module")
def builder(flake: Flake) -> Flake:
    if Path("/nix/var/nix/daemon-socket/socket").exists() or not os.access("/nix", os.W_OK):
        lacking("builds with the host's tools need `sandbox = false` and a store that this user owns")
    return flake


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_output_evaluates_for_both_systems(flake: Flake) -> None:
    flake.nix("flake", "check", "--no-build", *flake.stub)
    shown = json.loads(flake.nix("flake", "show", "--json", *flake.stub))
    packages = {"agent", "agent-host", "default", "demo-repos", "demo-repos-host", "image"}
    assert {system: set(shown["packages"][system]) for system in SYSTEMS} == dict.fromkeys(SYSTEMS, packages)
    for kind, names in (
        ("checks", {"agent", "demo-repos", "unit"}), ("apps", {"default"}), ("devShells", {"default"}),
    ):  # fmt: skip
        assert {system: set(shown[kind][system]) for system in SYSTEMS} == dict.fromkeys(SYSTEMS, names)


def test_nix_reads_the_names_that_pip_reads(flake: Flake) -> None:
    from tests.test_pins import DEV, RUN, RUN_LOCK

    read = 'f: { inherit (f) run dev; doit = f.version "doit"; }'
    seen = json.loads(flake.nix("eval", "--json", "--file", "nix/requirements.nix", "--apply", read))
    assert (set(seen["run"]), set(seen["dev"]), seen["doit"]) == (RUN.keys(), DEV.keys(), RUN_LOCK["doit"][0])


def test_a_requirement_that_nixpkgs_is_not_known_to_have_is_an_error(flake: Flake) -> None:
    changed = flake.home / "changed"
    shutil.copytree(flake.folder, changed)
    with (changed / "requirements" / "run.in").open("a") as file:
        file.write("leftpad\n")
    with pytest.raises(AssertionError, match="attribute 'leftpad' missing"):
        flake.nix("eval", f"path:{changed}#packages.x86_64-linux.default.drvPath", *flake.stub)


def test_the_archives_are_the_same_bits_again_without_nixpkgs_and_with_its_tools(builder: Flake) -> None:
    """The lock file is used as it is and nothing is fetched: no override here, and there is no network in Nix's settings."""
    for name in ("agent", "demo-repos"):
        made = builder.build(f"{name}-host")
        first = sha256(made)
        builder.build(f"{name}-host", "--rebuild")  # rc 1 where a second build differs
        assert sha256(made) == first
        assert sha256(builder.build(name, *builder.stub)) == first
    assert run_git(builder.folder, "status", "--porcelain") == "", "flake.lock disagrees with flake.nix"


def test_the_agent_archive_holds_this_agent(builder: Flake) -> None:
    with tarfile.open(builder.build("agent-host")) as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}  # type: ignore[union-attr]
        assert {(one.uid, one.gid, one.mtime, one.uname) for one in archive} == {(0, 0, 1, "")}
    names = ("agent.py", "probe.py", "origins/sitecustomize.py")
    assert files == {name: (ROOT / "containers" / name).read_bytes() for name in names}


def test_the_demo_archive_holds_the_commits_of_the_demo(builder: Flake, tmp_path: Path) -> None:
    with tarfile.open(builder.build("demo-repos-host")) as archive:
        archive.extractall(tmp_path / "nix", filter="data")
    generate = "import pathlib, sys; from tasks import demo; demo.make(pathlib.Path(sys.argv[1]))"
    ours = tmp_path / "ours"
    subprocess.run([sys.executable, "-c", generate, str(ours)], cwd=builder.folder, check=True, timeout=60)
    for name in ("bridge", "nemo-rl"):
        checkout, theirs = ours / name, tmp_path / "nix" / name
        assert run_git(theirs, "rev-parse", "HEAD") == run_git(checkout, "rev-parse", "HEAD")
        run_git(theirs, "reset", "-q")
        assert run_git(theirs, "status", "--porcelain", "--ignore-submodules=all") == ""


@pytest.fixture(scope="module")
def runner(builder: Flake) -> Path:
    return builder.build("default", *builder.stub) / "bin" / "nemo-rl-e2e"


def test_the_runner_passes_shellcheck(runner: Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on PATH; writeShellApplication of nixpkgs runs it in the build")
    done = subprocess.run(["shellcheck", str(runner)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_nix_run_works_on_the_checkout_that_it_is_called_in(builder: Flake) -> None:
    python = {"E2E_STUB_PYTHON": sys.executable, "E2E_BUILD_DIR": str(builder.home / "build")}
    stated = json.loads(builder.nix("run", *builder.stub, ".#", "--", "levels", "--json", env=python))
    assert stated
    below = builder.folder / "tasks"
    levels = builder.folder / "levels.yaml"
    levels.write_text("levels: 3\n")
    try:
        with pytest.raises(AssertionError, match=r"project/levels\.yaml"):
            builder.nix("run", *builder.stub, "..#", "--", "levels", cwd=below, env=python)
    finally:
        shutil.copy2(ROOT / "levels.yaml", levels)


def test_without_a_checkout_the_packed_sources_run_and_state_lies_with_the_caller(
    builder: Flake, runner: Path, tmp_path: Path
) -> None:
    shutil.copy2(ROOT / "levels.yaml", tmp_path / "mine.yaml")
    packed = Path(re.findall(r"/\S+(?=/tasks/installed\.py)", runner.read_text())[0])
    environment = {**os.environ, "E2E_STUB_PYTHON": sys.executable}
    for name in ("E2E_BUILD_DIR", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    done = subprocess.run(
        [str(runner), "levels", "--json", "levels=mine.yaml"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    builder.nix("store", "verify", "--no-trust", str(packed))  # nothing was written beside the sources
    assert sorted(entry.name for entry in tmp_path.iterdir()) in (["mine.yaml"], ["build", "mine.yaml"])
