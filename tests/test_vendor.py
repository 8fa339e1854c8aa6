"""`doit vendor` writes only where nobody else did, and takes everything back exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import settings, vendor
from tasks.checkouts import VENDORED
from tasks.errors import UserError
from tasks.invocation import Invocation
from tests.conftest import run_git
from tests.miniature import Miniature, write_tree


@pytest.fixture
def mini(tmp_path: Path) -> Miniature:
    made = Miniature(tmp_path)
    write_tree(made.nemo_rl / VENDORED, {"src/megatron/bridge/__init__.py": "# vendored\n", "only_here.txt": "x\n"})
    return made


def call(mini: Miniature, what):
    given = {"bridge": str(mini.bridge), "nemo_rl": str(mini.nemo_rl), "build": str(mini.build), "runtime": "local"}
    return what(Invocation(settings.load(given, environ={})))


def content(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        p.relative_to(folder).as_posix(): (p.read_bytes(), p.stat().st_mode, p.stat().st_mtime_ns)
        for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts
    }  # fmt: skip


def test_the_bridge_is_there_and_undo_restores_every_byte_mode_and_time(mini):
    target = mini.nemo_rl / VENDORED
    before = content(target)
    (mini.bridge / "src/megatron/bridge/new.py").write_text("new\n")
    call(mini, vendor.vendor)
    assert (target / "src/megatron/bridge/new.py").read_text() == "new\n"
    assert (target / "3rdparty/Megatron-LM/megatron/core/__init__.py").exists()
    assert not (target / "only_here.txt").exists()
    call(mini, vendor.undo)
    assert content(target) == before
    assert run_git(target, "status", "--porcelain") == ""


def test_a_second_call_follows_the_bridge(mini):
    call(mini, vendor.vendor)
    (mini.bridge / "src/megatron/bridge/mapping.py").write_text("FACTOR = 2.0\n")
    call(mini, vendor.vendor)
    assert (mini.nemo_rl / VENDORED / "src/megatron/bridge/mapping.py").read_text() == "FACTOR = 2.0\n"
    call(mini, vendor.undo)
    assert (mini.nemo_rl / VENDORED / "only_here.txt").exists()


def test_foreign_changes_are_refused_before_anything_is_touched(mini):
    target = mini.nemo_rl / VENDORED
    (target / "only_here.txt").write_text("my work\n")
    with pytest.raises(UserError, match="not ours"):
        call(mini, vendor.vendor)
    assert (target / "only_here.txt").read_text() == "my work\n"


@pytest.mark.parametrize("work", ["src/megatron/bridge/mapping.py", "src/megatron/bridge/added_by_hand.py"])
def test_work_done_in_the_copy_is_never_lost(mini, work):
    call(mini, vendor.vendor)
    (mini.nemo_rl / VENDORED / work).write_text("by hand\n")
    for what in (vendor.vendor, vendor.undo):
        with pytest.raises(UserError, match="changed or added after"):
            call(mini, what)
    assert (mini.nemo_rl / VENDORED / work).read_text() == "by hand\n"


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_an_interrupted_copy_can_be_undone(mini, monkeypatch, fails_at):
    target = mini.nemo_rl / VENDORED
    before = content(target)
    calls = []
    real = vendor._write

    def interrupted(*args):
        calls.append(1)
        if len(calls) > fails_at:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(vendor, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(mini, vendor.vendor)
    call(mini, vendor.undo)
    assert content(target) == before


def test_undo_without_vendor_says_so(mini):
    with pytest.raises(UserError, match="nothing of this workspace is vendored"):
        call(mini, vendor.undo)
