"""The trees of an attempt again, file by file, from whatever still has them; each file is hashed on the way.

A tree is its manifest (path -> [mode, sha256]). Its files may come from a bundle, a snapshot, the commit that the run
named, or the checkout as it is now: where does not matter, the hash does.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tasks.digests import Entry, content_hash, digest_of, git
from tasks.errors import UserError
from tasks.snapshot import copy_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

GITLINK = "160000"


def export(repo: Path, sha: str, into: Path) -> None:
    """Write the files of commit `sha` and of the submodules it names, as far as `repo` has them, below `into`.

    Raises UserError where the commit is not there.
    """
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        git(repo, "archive", "--format=tar", f"--output={archive.name}", sha)
        with tarfile.open(archive.name) as tar:
            tar.extractall(into, filter="tar")
    for line in git(repo, "ls-tree", "-r", "-z", sha).split("\0"):
        meta, _, path = line.partition("\t")
        if meta.startswith(GITLINK) and os.path.lexists(repo / path / ".git"):
            try:
                export(repo / path, meta.split(" ")[2], into / path)
            except UserError:
                continue  # the files of that submodule are looked for elsewhere


def has(folder: Path, path: str, entry: Entry, *, mode: bool = True) -> bool:
    """Tell whether `folder` holds the file as the manifest says; mode=False: a bundle keeps neither modes nor links."""
    place = folder / path
    try:
        info = os.lstat(place)
        now = "120000" if place.is_symlink() else "100755" if info.st_mode & 0o111 else "100644"
        fits = now == entry.mode if mode else entry.mode == "120000" or not place.is_symlink()
        return fits and content_hash(os.fspath(place), info) == entry.sha
    except OSError:
        return False


def entries(files: Mapping[str, Sequence[str]], digest: str) -> dict[str, Entry]:
    """Return the entries of a manifest; UserError unless its paths stay inside and its digest is as said."""
    found = {path: Entry(*entry) for path, entry in files.items()}
    for path in found:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or ".git" in pure.parts:
            raise UserError(f"the manifest names {path!r}, which is not inside its tree")
    if digest_of(found) != digest:
        raise UserError(f"the manifest is not that of tree {digest[:12]}")
    return found


def missing_from(folder: Path, files: Mapping[str, Entry]) -> list[str]:
    """Return the files of a manifest that `folder` does not hold as they are: what a bundle must carry itself."""
    return [path for path, entry in files.items() if entry.mode != GITLINK and not has(folder, path, entry)]


def rebuild(files: Mapping[str, Entry], sources: Iterable[Path], into: Path) -> list[str]:
    """Write the tree below `into` as a git repository with one commit; return the files that no source has."""
    into.mkdir(parents=True)
    places, lost, links = list(sources), [], []
    for path, entry in files.items():
        if entry.mode == GITLINK:
            (into / path).mkdir(parents=True, exist_ok=True)
            links.append((path, entry.sha))
            continue
        source = next((place / path for place in places if has(place, path, entry, mode=False)), None)
        if source is None:
            lost.append(path)
            continue
        target = into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(into.resolve()):
            raise UserError(f"the manifest leads out of its tree through a link: {path}")
        if entry.mode == "120000" and not source.is_symlink():
            target.symlink_to(os.fsdecode(source.read_bytes()))
        else:
            copy_file(os.fspath(source), os.fspath(target), entry)
    git(into, "init", "-q")
    git(into, "add", "--all", "--force")
    for path, sha in links:
        if sha != "none":
            git(into, "update-index", "--add", "--cacheinfo", f"{GITLINK},{sha},{path}")
    author = ("-c", "user.name=nemo-rl-e2e", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
    git(into, *author, "commit", "-q", "--allow-empty", "--no-verify", "-m", "tree of an attempt")
    return lost
