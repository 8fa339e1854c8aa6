"""What `doit clean cpu` removes: everything of other digests that no process names, and unread byte code; no more."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tasks import cpu
from tasks.cpu_prune import UNREAD_DAYS, prune
from tests.test_cpu import build, make_python, make_source

OTHER = "0123456789abcdef"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, cpu.CpuEnvironment]:
    folder = tmp_path_factory.mktemp("built")
    return folder / "build", build(folder, make_source(folder / "source"), make_python(folder))


@pytest.fixture
def home(built: tuple[Path, cpu.CpuEnvironment], monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, made = built
    monkeypatch.setattr(cpu, "ready", lambda _: made)
    for name in (
        f"cpu-{OTHER}",
        f"venv-{OTHER}",
        f"models-{OTHER}",
        f"bytecode-{OTHER}",
        cpu.compiled(made).name,
    ):
        (folder / name).mkdir(exist_ok=True)
    for name in ("bytecode", "references", "mine-0123456789abcdef"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "bytecode" / "read").touch()
    (folder / "bytecode" / "old").touch()
    past = time.time() - (UNREAD_DAYS + 1) * 86400
    os.utime(folder / "bytecode" / "old", (past, past))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_another_digest_made_goes_and_the_rest_stays(home: Path, tmp_path: Path) -> None:
    before, said = names(home), list[str]()
    prune(home, said.append, processes=tmp_path)
    gone = {f"{kind}-{OTHER}" for kind in ("cpu", "venv", "models", "bytecode")}
    assert before - names(home) == gone
    assert names(home / "bytecode") == {"read"}
    assert len(said) == len(gone) + 1
    made = cpu.ready(home)
    assert made is not None
    assert all(Path(path).exists() for path in (made.python, *made.pythonpath, *made.models.values()))


def test_a_dry_run_only_says(home: Path, tmp_path: Path) -> None:
    before, said = names(home), list[str]()
    prune(home, said.append, dry=True, processes=tmp_path)
    assert names(home) == before
    assert names(home / "bytecode") == {"read", "old"}
    assert len(said) == 5


def test_what_a_running_process_names_stays(home: Path, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(f"A=1\0PYTHONPATH={home.resolve()}/cpu-{OTHER}/shim:/x\0".encode())
    prune(home, lambda _: None, processes=tmp_path)
    assert f"cpu-{OTHER}" in names(home)
    assert f"venv-{OTHER}" not in names(home)


def test_nothing_goes_where_nothing_is_built_for_this_checkout(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "ready", lambda _: None)
    before, said = names(home), list[str]()
    prune(home, said.append)
    assert names(home) == before
    assert "not built for this checkout" in said[0]
