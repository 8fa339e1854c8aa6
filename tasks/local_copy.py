"""Core on the node's own storage: `slurm: {local_copy: /tmp}`, one copy a job and node, proved before it is used.

Core is thousands of small files that every worker imports, compiles and looks for; a shared file system is slow at it.
Its byte code goes beside the copy. NeMo-RL stays where it is, because what it writes below its tree is evidence, and
so does the Bridge, which is hashed again after the run. containers/local_copy.py copies, inside the container.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks import snapshot
from tasks.files import read_json, sha256_file, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.attempts import Tree

LIST, NOTES = "mcore-files.json", "copies"  # in the attempt's folder: what must be copied, which node proved it
SOURCE = "/e2e/mcore"  # where the container sees the frozen tree


def root(place: str, attempt: Path) -> str:
    """Return the folder of an attempt on a node's own storage; it holds `mcore` and `pycache`."""
    return f"{place}/e2e-{attempt.name}"


def prepare(folder: Path, tree: Tree) -> None:
    """Write down which files the copy must have."""
    (folder / NOTES).mkdir(exist_ok=True)
    write_json(folder / LIST, {path: [entry.mode, entry.sha] for path, entry in snapshot.files_of(tree.path).items()})


def arguments(attempt: str, target: str) -> tuple[str, ...]:
    """Return the arguments of containers/local_copy.py, for an attempt's folder as the container sees it."""
    return f"{attempt}/{LIST}", SOURCE, target, f"{attempt}/{NOTES}"


def unproved(folder: Path, nodes: int) -> str | None:
    """Return why an attempt that should have run on copies is not known to have, or None."""
    if not (folder / LIST).exists():
        return None
    wanted = sha256_file(folder / LIST)
    notes = [read_json(path) for path in sorted((folder / NOTES).glob("*.json"))]
    proved = sum(isinstance(note, dict) and note.get("list") == wanted for note in notes)
    if proved == len(notes) == nodes:
        return None
    return f"{proved} of {nodes} nodes proved that their local copy of Core is the tree under test"
