"""Which exact revision a checkout is at: commit, describe and every file that differs from it, nested ones included."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tasks.digests import git

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.digests import Manifest

# A refactoring may touch thousands of files; the digest names them all, the report lists so many.
MAX_DIRTY = 200


@dataclass(frozen=True, slots=True)
class Revision:
    """HEAD of a checkout and what differs from it ("M path", "?? path"; nested repositories with their prefix)."""

    sha: str
    branch: str
    dirty: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the revision as bridge.json and report.json carry it."""
        return {**asdict(self), "dirty": list(self.dirty[:MAX_DIRTY]), "dirty_count": len(self.dirty)}


def head(repo: Path) -> str:
    """Return the full SHA of HEAD."""
    return git(repo, "rev-parse", "HEAD").strip()


def dirty_files(repo: Path, exclude: tuple[str, ...] = (), prefix: str = "") -> list[str]:
    """Return porcelain lines of a checkout and of its nested repositories; untracked files one by one.

    `git diff HEAD` omits untracked files and needs recursion for submodules (cases.md 57), so status is asked of each.
    """
    lines = []
    records = iter(
        git(repo, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--ignore-submodules=none").split("\0")
    )
    for record in records:
        if not record:
            continue
        state, path = record[:2], record[3:]
        origin = f" <- {next(records)}" if "R" in state or "C" in state else ""
        if any(path.rstrip("/") == name or path.startswith(name + "/") for name in exclude):
            continue
        lines.append(f"{state.strip()} {prefix}{path}{origin}")
    for path in nested_repositories(repo):
        if path not in exclude:
            lines += dirty_files(repo / path, (), f"{prefix}{path}/")
    return lines


def gitlink(repo: Path, path: str) -> str | None:
    """Return the commit that HEAD pins for the submodule at `path`; None where it is no submodule."""
    mode, _, rest = git(repo, "ls-tree", "HEAD", "--", path).partition(" ")
    return rest.split()[1] if mode == "160000" else None


def nested_repositories(repo: Path) -> list[str]:
    """Return the paths of the submodules of `repo` that are checked out."""
    gitlinks = (line for line in git(repo, "ls-files", "-s", "-z").split("\0") if line.startswith("160000 "))
    paths = (line.split("\t", 1)[1] for line in gitlinks)
    return [path for path in paths if os.path.lexists(repo / path / ".git")]


def revision(manifest: Manifest, exclude: tuple[str, ...] = ()) -> Revision:
    """Return the revision of the checkout that `manifest` was taken from."""
    branch = git(manifest.root, "rev-parse", "--abbrev-ref", "HEAD").strip()
    return Revision(manifest.head, branch, tuple(dirty_files(manifest.root, exclude)))
