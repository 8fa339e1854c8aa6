"""What is in flight on a cluster: slurm.json in the attempt's folder, found by input digest from every login node.

    state "submitting" -> "submitted" -> "over"     (written by the runtime; "over" by whoever took the result)

A job is submitted only while no attempt of the same task and key is in one of the first two states; the workspace's
lock keeps two callers from looking at the same time. A killed runner leaves the file as it is: the next call with the
same inputs follows that job instead of submitting another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.errors import UserError
from tasks.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = "slurm.json"
TASK, KEY = "nemo-rl-e2e.task", "nemo-rl-e2e.key"  # labels of a job


class InFlightError(UserError):
    """The job goes on without us; nothing may be collected, judged or cleared away."""


def note(folder: Path, **facts: Any) -> dict[str, Any]:
    """Add `facts` to the attempt's slurm.json and return all of it."""
    known = {**(read_json(folder / FILE) or {}), **facts}
    write_json(folder / FILE, known)
    return known


def is_open(folder: Path) -> bool:
    """Tell whether Slurm has, or may have, a job of this attempt whose result nobody took; a file unread is a yes."""
    known = read_json(folder / FILE)
    return known.get("state") != "over" if isinstance(known, dict) else (folder / FILE).exists()


def close(folder: Path) -> None:
    """Say that the attempt's result was taken, or that there is none; nothing happens where there was no job."""
    if (folder / FILE).exists():
        note(folder, state="over")


def open_attempts(attempts: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield folder and slurm.json of every attempt whose result nobody took, oldest first."""
    for path in sorted(attempts.glob(f"*/*/{FILE}"), key=lambda p: p.parent.name):
        known = read_json(path)
        if isinstance(known, dict) and known.get("state") in ("submitting", "submitted"):
            yield path.parent, known


def find(attempts: Path, task: str, key: str, *, finished: bool = True) -> Path | None:
    """Return the attempt that is in flight for this task and key; without `finished`, only if it has no result yet."""
    for folder, known in open_attempts(attempts):
        if (known.get("task"), known.get("key")) == (task, key) and (finished or not (folder / "exit.json").exists()):
            return folder
    return None


def rows(attempts: Path) -> list[dict[str, str]]:
    """Return what `doit status` shows of each job in flight."""
    return [
        {
            "task": str(known.get("task")),
            "job": str(known.get("job") or "?"),
            "submitted": str(known.get("submitted")),
            "state": "has a result to take" if (folder / "exit.json").exists() else str(known.get("seen") or "?"),
            "folder": str(folder),
        }
        for folder, known in open_attempts(attempts)
    ]
