"""One digest a checkout: what git would commit of it now, content, mode and links, in 40 ms when nothing changed.

A manifest lists every tracked and every untracked, not ignored file, nested repositories included. Content hashes come
from a stat cache; an entry is trusted only if size, mtime_ns, ctime_ns, inode and mode are equal and the file was quiet
before the cache was written, so a kept or restored mtime (rsync -a, cp -p, tar) cannot hide a change.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

SCHEMA = 2  # raised with COMPONENTS, whose digests are kept
# Files touched within this time before a scan are hashed again at the next one: coarse file systems (NFS, overlay on
# NFS) may give two writes the same time stamp.
RACY_NS = 2_000_000_000
GIT_TIMEOUT_S = 60

# What a stage can reach of a tree; the first matching pattern decides, "!" excludes. Documentation never reaches a run.
COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "bridge": ("src/*", "pyproject.toml"),
    "bridge-tests": ("src/*", "tests/*", "pyproject.toml", "conftest.py"),
    "bridge-work": ("!docs/*", "!.github/*", "!*.md", "*"),  # of a case that works in the Bridge's own tree
    "mcore": ("megatron/*", "pyproject.toml", "setup.py"),
    # unit tests reach no case, but scripts take data from beside them
    "nemo_rl": ("!docs/*", "!.github/*", "!*.md", "!tests/unit/*.py", "*"),
    "nemo_rl-tests": ("!docs/*", "!.github/*", "!*.md", "*"),
    "vendored": ("3rdparty/Megatron-Bridge-workspace/Megatron-Bridge/src/*",),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: git mode ("100644", "100755", "120000", "160000") and hex SHA-256 of content or link target."""

    mode: str
    sha: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A tree at one moment: `digest` names it, `files` maps relative POSIX paths to entries, sorted."""

    kind: str
    root: Path
    digest: str
    files: Mapping[str, Entry]
    components: Mapping[str, str]
    head: str = ""

    def as_dict(self) -> dict[str, list[str]]:
        """Return path -> [mode, sha], the form kept under manifests/ for `doit why`."""
        return {path: [entry.mode, entry.sha] for path, entry in self.files.items()}


def git(repo: Path, *args: str) -> str:
    """Return the output of a read-only git command; optional locks off, so that the checkout is never written.

    Raises UserError when git is missing, hangs for a minute or refuses.
    """
    return _read(_start(repo, *args), repo, args)


def _start(repo: Path, *args: str) -> subprocess.Popen[bytes]:
    argv = ["git", "-C", str(repo), "-c", "core.fsmonitor=false", "-c", "safe.directory=*", *args]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    except FileNotFoundError as error:
        raise UserError("git is not on PATH: install git") from error


def _read(process: subprocess.Popen[bytes], repo: Path, args: Sequence[str]) -> str:
    with process:
        try:
            out, err = process.communicate(timeout=GIT_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise UserError(f"{repo}: git {args[0]} gave no answer within {GIT_TIMEOUT_S} s") from error
    if process.returncode:
        raise UserError(f"{repo}: git {args[0]} failed: {os.fsdecode(err).strip() or process.returncode}")
    return os.fsdecode(out)


def require_repository(repo: Path) -> str:
    """Return the SHA of HEAD; raise UserError unless `repo` is the top of a git work tree with a commit."""
    if not os.path.lexists(repo / ".git"):
        raise UserError(f"{repo}: not the top of a git repository; the report must name a revision (git init, commit)")
    try:
        return git(repo, "rev-parse", "--verify", "-q", "HEAD").strip()
    except UserError as error:
        raise UserError(f"{repo}: no commit yet (unborn HEAD), or not readable: commit once. {error}") from error


def list_files(repo: Path, exclude: Sequence[str] = (), prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, git mode) of tracked and untracked, not ignored files; nested repositories are walked, too.

    A submodule that is not checked out yields its path with mode "160000:<commit>". `exclude` names folders.
    """
    calls = (("ls-files", "-s", "-z"), ("ls-files", "-o", "-z", "--exclude-standard"))
    tracked, untracked = (_start(repo, *call) for call in calls)  # side by side: each takes 5 to 15 ms
    others = _read(untracked, repo, calls[1])
    for line in _read(tracked, repo, calls[0]).split("\0"):
        if not line:
            continue
        meta, path = line.split("\t", 1)
        mode, sha, _ = meta.split(" ")
        yield from _entry(repo, path, f"160000:{sha}" if mode == "160000" else mode, exclude, prefix)
    for path in others.split("\0"):
        if path:
            yield from _entry(repo, path.rstrip("/"), "160000:none" if path.endswith("/") else "", exclude, prefix)


def _entry(repo: Path, path: str, mode: str, exclude: Sequence[str], prefix: str) -> Iterator[tuple[str, str]]:
    full = prefix + path
    if any(full == name or full.startswith(name + "/") for name in exclude):
        return
    if mode.startswith("160000") and os.path.lexists(repo / path / ".git"):
        yield from list_files(repo / path, exclude, full + "/")
    else:
        yield full, mode


def content_hash(path: str, info: os.stat_result) -> str:
    """Return the hex SHA-256 of a file's content, or of a link's target."""
    if stat.S_ISLNK(info.st_mode):
        return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Tell whether the first pattern that matches `path` is one that includes; `*` crosses folders as in fnmatch."""
    for pattern in patterns:
        if fnmatch.fnmatchcase(path, pattern.removeprefix("!")):
            return not pattern.startswith("!")
    return False


def digest_of(files: Mapping[str, Entry], patterns: Iterable[str] = ("*",)) -> str:
    """Return the digest of the files that `patterns` include: order of the listing does not matter."""
    digest = hashlib.sha256(b"nemo-rl-e2e tree 1\0")
    everything = tuple(patterns)
    for path in sorted(files):
        if everything == ("*",) or matches(path, everything):
            digest.update(f"{files[path].mode} {files[path].sha} ".encode() + os.fsencode(path) + b"\0")
    return digest.hexdigest()


def scan(kind: str, root: Path, cache: Path, exclude: Sequence[str] = ()) -> Manifest:
    """Return the manifest of the checkout `root`; `cache` is the stat cache's file and is replaced when it changed.

    Raises UserError for a folder that is not a repository or a file that cannot be read. A file that changes while it
    is read gets the hash of what was read; the snapshot copy compares again.
    """
    head = require_repository(root)
    started_ns = time.time_ns()
    old = read_json(cache) or {}
    known: dict[str, list[object]] = old.get("files", {}) if old.get("schema") == SCHEMA else {}
    trusted_before = int(old.get("scanned_ns", 0)) - RACY_NS
    files: dict[str, Entry] = {}
    stats: dict[str, list[object]] = {}
    fresh = False
    base = os.fspath(root)
    for path, mode in list_files(root, exclude):
        if mode.startswith("160000"):
            files[path] = Entry("160000", mode.partition(":")[2])
            continue
        full = f"{base}/{path}"
        try:
            info = os.lstat(full)
            if stat.S_ISLNK(info.st_mode) and _leaves(path, os.readlink(full)):
                info = _behind(kind, path, full, info)
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted in the work tree: the deletion is part of the digest
        if stat.S_ISDIR(info.st_mode):
            continue
        key = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_mode]
        before = known.get(path)
        if before and before[:5] == key and max(info.st_mtime_ns, info.st_ctime_ns) < trusted_before:
            sha = str(before[5])
        else:
            fresh = True
            try:
                sha = content_hash(full, info)
            except OSError as error:
                raise UserError(f"{full}: cannot be read: {error.strerror}") from error
        git_mode = "120000" if stat.S_ISLNK(info.st_mode) else "100755" if info.st_mode & 0o111 else "100644"
        files[path] = Entry(git_mode, sha)
        stats[path] = [*key, sha]
    # Nested repositories that were not walked have no stat; compare their names, too.
    gitlinks = {p: e.sha for p, e in files.items() if e.mode == "160000"}
    unchanged = not fresh and len(stats) == len(known) and old.get("gitlinks") == gitlinks
    if unchanged and old.get("kind") == kind:
        return Manifest(kind, root, old["digest"], files, old["components"], head)
    digest = digest_of(files)
    components = {
        name: digest_of(files, patterns)
        for name, patterns in COMPONENTS.items()
        if name == kind or name.startswith(kind + "-") or (kind == "nemo_rl" and name == "vendored")
    }
    write_json(
        cache,
        {"schema": SCHEMA, "kind": kind, "scanned_ns": started_ns, "digest": digest, "components": components,
         "gitlinks": gitlinks, "files": stats},
    )  # fmt: skip
    return Manifest(kind, root, digest, files, components, head)


def _leaves(path: str, target: str) -> bool:
    """Tell whether a link at `path` leads out of its tree; an absolute one does: it would miss the snapshot."""
    end = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return os.path.isabs(target) or end == ".." or end.startswith("../")


def _behind(kind: str, path: str, full: str, info: os.stat_result) -> os.stat_result:
    """Return what a link out of the tree counts as: the file behind it, else the link itself.

    Raises UserError for a folder of code behind it, which would be run and not frozen.
    """
    try:
        behind = os.stat(full)
    except OSError:
        return info  # it leads nowhere
    if stat.S_ISDIR(behind.st_mode) and kind in ("bridge", "mcore") and matches(path, COMPONENTS[kind]):
        raise UserError(f"{full}: a link to a folder elsewhere cannot be frozen: put the folder itself there")
    return behind if stat.S_ISREG(behind.st_mode) else info


def difference(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> list[str]:
    """Return "M path", "A path", "D path" lines between two manifests in `as_dict` form, sorted by path."""
    changes = []
    for path in sorted({*old, *new}):
        if path not in old:
            changes.append(f"A {path}")
        elif path not in new:
            changes.append(f"D {path}")
        elif list(old[path]) != list(new[path]):
            changes.append(f"M {path}")
    return changes
