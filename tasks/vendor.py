"""Copy the Bridge under test into NeMo-RL's vendored path, and take it back exactly: the one change of a checkout.

What was there is moved aside, not overwritten; what is written is listed with its hash, a path that differs from
that list is somebody else's work: then nothing is touched. A `.git` entry stays where it is, so git shows the truth.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import digests, provenance, snapshot
from tasks.checkouts import CORE_IN_BRIDGE, VENDORED
from tasks.digests import Entry
from tasks.errors import UserError
from tasks.files import read_json, write_json

if TYPE_CHECKING:
    from tasks.invocation import Invocation

BYTE_CODE = ("__pycache__", ".pyc")


@dataclass(frozen=True, slots=True)
class Place:
    """The vendored folder, where its own content waits meanwhile, and the list of what was written."""

    target: Path
    kept: Path
    state: Path


def place(now: Invocation) -> Place:
    """Return the places of this workspace; raises UserError if NeMo-RL has no vendored path."""
    target = now.settings.checkout("nemo_rl") / VENDORED
    if not target.is_dir():
        raise UserError(f"{target}: this NeMo-RL has no such folder; older revisions vendor the Bridge elsewhere")
    home = now.workspace.root / "vendor"
    return Place(target, home / "kept", home / "state.json")


def vendor(now: Invocation) -> str:
    """Copy Bridge and Core into the vendored path; return a sentence. Raises UserError before touching foreign work."""
    where = place(now)
    state = read_json(where.state)
    if state is None:
        _refuse_dirty(now, where.target)
    elif state["phase"] != "done":
        undo(now)  # an interrupted call: start from what was there
        state = None
    else:
        _refuse_foreign(where, state)
    files = {path: entry for path, entry in now.manifests["bridge"].files.items() if entry.mode != "160000"}
    core = {f"{CORE_IN_BRIDGE}/{p}": e for p, e in now.manifests["mcore"].files.items() if e.mode != "160000"}
    written = {path: [entry.mode, entry.sha] for path, entry in {**files, **core}.items()}
    sources = (now.sound_trees()["bridge"].path, now.tree("mcore").path)  # frozen before anything is moved
    if state is None:
        where.kept.mkdir(parents=True)
        _note(where, "moving", {})
        for own in sorted(where.target.iterdir()):
            if own.name != ".git":
                shutil.move(own, where.kept / own.name)
        _note(where, "writing", written)
    else:
        _note(where, "writing", {**state["written"], **written})
        _remove_written(where, state)
    for path, entry in files.items():
        _write(sources[0] / path, where.target / path, entry)
    for path, entry in core.items():
        _write(sources[1] / path.removeprefix(f"{CORE_IN_BRIDGE}/"), where.target / path, entry)
    _note(where, "done", written)
    return f"{len(written)} files of {now.settings.bridge} are in {where.target}; doit vendor undo=1 takes them back"


def undo(now: Invocation) -> str:
    """Put back what was there before `vendor`; return a sentence. Raises UserError if somebody changed the copy."""
    where = place(now)
    state = read_json(where.state)
    if state is None:
        raise UserError(f"{where.target}: nothing of this workspace is vendored there")
    if state["phase"] == "done":
        _refuse_foreign(where, state)
    if state["phase"] != "moving":
        _remove_written(where, state)
        _note(where, "moving", {})
    for own in sorted(where.kept.iterdir()):
        shutil.move(own, where.target / own.name)
    where.kept.rmdir()
    where.state.unlink()
    return f"{where.target} is as it was"


def _note(where: Place, phase: str, written: dict[str, list[str]]) -> None:
    """Write down how far it has come, before it goes on: "moving" aside (or back), "writing" the copy, "done"."""
    write_json(where.state, {"target": os.fspath(where.target), "phase": phase, "written": written})


def _write(source: Path, target: Path, entry: Entry) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not snapshot.copy_file(os.fspath(source), os.fspath(target), entry):
        raise UserError(f"{source}: not what its manifest says; remove the snapshot and call again")


def _refuse_dirty(now: Invocation, target: Path) -> None:
    """Raise unless git says that the vendored folder is exactly what NeMo-RL's checkout has committed."""
    if (target / ".git").exists():
        dirty = provenance.dirty_files(target)
    else:
        prefix = f"{VENDORED}/"
        dirty = [line for line in provenance.dirty_files(now.settings.checkout("nemo_rl")) if prefix in line]
    if dirty:
        raise UserError(
            f"{target} has {len(dirty)} changes that are not ours, first {dirty[0]!r}: "
            "commit or stash them, then call again"
        )


def _present(target: Path) -> set[str]:
    found = set()
    for base, folders, names in os.walk(target):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
        links = [name for name in folders if Path(base, name).is_symlink()]
        for name in (*names, *links):
            relative = Path(base, name).relative_to(target).as_posix()
            if relative != ".git" and not relative.endswith(BYTE_CODE):
                found.add(relative)
    return found


def _refuse_foreign(where: Place, state: dict[str, Any]) -> None:
    """Raise if the vendored folder holds a file that `vendor` did not write, or wrote differently."""
    for path in sorted(_present(where.target)):
        entry = state["written"].get(path)
        if entry is None or not _is(where.target / path, Entry(*entry)):
            raise UserError(
                f"{where.target / path}: changed or added after `doit vendor`; move it away, then call again"
            )


def _is(path: Path, entry: Entry) -> bool:
    info = os.lstat(path)
    return digests.content_hash(os.fspath(path), info) == entry.sha


def _remove_written(where: Place, state: dict[str, Any]) -> None:
    """Remove the written files and the folders that are empty then, byte code of them included."""
    for path in state["written"]:
        (where.target / path).unlink(missing_ok=True)
    for base, _, _ in os.walk(where.target, topdown=False):
        folder = Path(base)
        if folder.name == "__pycache__" and ".git" not in folder.parts:
            shutil.rmtree(folder)
        elif folder != where.target and not any(folder.iterdir()) and ".git" not in folder.parts:
            folder.rmdir()
