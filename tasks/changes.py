"""What differs between a revision and a working tree, down to the Python definitions whose code is another.

Thin around git (read only, on a copy of the index, since `git diff` rewrites a stale one whatever GIT_OPTIONAL_LOCKS
says; no programs that the checkout names), pure where Python is compared. A rename counts as the old path and the new
one. A Python file whose syntax tree is the same without comments, layout and docstrings cannot run differently; it is
reported with the reason why it calls for nothing. Where that cannot be shown (a syntax error, a file that reads
docstrings at run time, another mode) the file counts as changed.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAINS = ("origin/main", "upstream/main", "main", "origin/master", "master")
"""Where the Bridge's main branch may be, first found counts."""

GIT_TIMEOUT_S = 120.0
_SUBMODULE = "160000"
_FILE_MODES = ("100644", "100755")
_READS_DOCSTRINGS = re.compile(rb"__doc__|getdoc|docstring")  # then a docstring may be code (argparse, auto_docstring)
_NOTED_NESTED = 5  # nested files named for a dirty submodule; the rest is counted


@dataclass(frozen=True, slots=True)
class Change:
    """One changed path, relative to the repository root, with "/".

    `status` is added, deleted, modified, mode, untracked or submodule. `definitions` are the changed functions, classes
    and methods of a Python file, `<module>` for other statements, empty if unknown. `ignored`, if not empty, says why
    the change cannot matter. `detail` is for people.
    """

    path: str
    status: str = "modified"
    definitions: tuple[str, ...] = ()
    ignored: str = ""
    detail: str = ""


def changed(repo: Path, since: str | None = None, until: str | None = None) -> tuple[Change, ...]:
    """Return what differs between `since` (default: merge base with the main branch) and the working tree or `until`.

    Untracked, not ignored files and nested submodules are included. Raises UserError for a folder that is no repository
    of its own, an unborn HEAD, or a revision that is not there.
    """
    top = _git(repo, "rev-parse", "--show-toplevel").strip()
    if os.path.realpath(top) != os.path.realpath(repo):
        raise UserError(f"{repo}: not a git repository of its own (git answers for {top}); name the checkout's root")
    base = _revision(repo, since) if since else merge_base(repo)
    ends = [base, _revision(repo, until)] if until else [base]
    raw = _read(
        repo,
        "diff",
        "--raw",
        "-z",
        "--no-renames",
        "--abbrev=40",
        "--ignore-submodules=none",
        *ends,
        "--",
    )
    fields = raw.split("\0")
    entries = [(*fields[i][1:].split(" "), fields[i + 1]) for i in range(0, len(fields) - 1, 2)]
    blobs = _Blobs(repo, [sha for _, _, old, new, _, path in entries if path.endswith(".py") for sha in (old, new)])
    result = [_change(repo, entry, blobs, work_tree=until is None) for entry in entries]
    if until is None:
        others = _read(repo, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
        result += [Change(path, "untracked") for path in others if path]
    return tuple(sorted(set(result), key=lambda c: (c.path, c.status)))


def merge_base(repo: Path) -> str:
    """Return the commit where the work began: the merge base of HEAD and the main branch."""
    _revision(repo, "HEAD")
    for name in MAINS:
        try:
            return _git(repo, "merge-base", "HEAD", name).strip()
        except UserError:
            continue
    raise UserError(
        f"{repo}: no merge base with {', '.join(MAINS)} (a shallow clone?); say since=REV, or git fetch --unshallow"
    )


def definitions_changed(old: bytes, new: bytes) -> tuple[str, ...] | None:
    """Return the names of the definitions that differ between two versions of a Python file, in order.

    An empty tuple: no code differs. None: cannot be told, so count all of it.
    """
    keep = bool(_READS_DOCSTRINGS.search(old) or _READS_DOCSTRINGS.search(new))
    try:
        before, after = ast.parse(old), ast.parse(new)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not keep:
        _strip_docstrings(before)
        _strip_docstrings(after)
    try:
        if ast.dump(before) == ast.dump(after):
            return ()
        first, second = _parts(before), _parts(after)
    except RecursionError:
        return None
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return tuple(names) or ("<order>",)


def _strip_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                del node.body[0]


def _parts(tree: ast.Module) -> dict[str, list[str]]:
    """Return dotted name -> dumps of what has it: functions, methods, class heads with attributes, other statements."""
    found: dict[str, list[str]] = {}

    def walk(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                name = f"{prefix}{node.name}"
                head = [*node.bases, *node.keywords, *node.decorator_list]
                found.setdefault(name, []).extend(ast.dump(part) for part in head)
                walk(node.body, f"{name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(f"{prefix}{node.name}", []).append(ast.dump(node))
            else:
                found.setdefault(prefix.rstrip(".") or "<module>", []).append(ast.dump(node))

    walk(tree.body, "")
    return found


class _Blobs:
    """The content of blobs, read by one `git cat-file --batch`."""

    def __init__(self, repo: Path, shas: list[str]) -> None:
        self.content: dict[str, bytes] = {}
        wanted = sorted({sha for sha in shas if sha.strip("0")})
        if not wanted:
            return
        out = _run(repo, ["cat-file", "--batch"], "\n".join(wanted).encode() + b"\n")
        at = 0
        for sha in wanted:
            end = out.index(b"\n", at)
            head = out[at:end].split(b" ")
            at = end + 1
            if head[1:2] == [b"blob"]:
                size = int(head[2])
                self.content[sha] = out[at : at + size]
                at += size + 1


def _change(repo: Path, entry: tuple[str, ...], blobs: _Blobs, *, work_tree: bool) -> Change:
    old_mode, new_mode, old, new, letter, path = entry
    if _SUBMODULE in (old_mode, new_mode):
        return Change(
            path, "submodule", detail=_submodule(repo / path, old, new) if work_tree else f"{old[:9]} to {new[:9]}"
        )
    if letter in "AD":
        return Change(path, "added" if letter == "A" else "deleted")
    if old_mode != new_mode:
        return Change(path, "mode", detail=f"{old_mode} to {new_mode}")
    if not path.endswith(".py") or new_mode not in _FILE_MODES:
        return Change(path)
    before, after = blobs.content.get(old), blobs.content.get(new)
    if after is None and work_tree:
        after = (repo / path).read_bytes()
    names = definitions_changed(before, after) if before is not None and after is not None else None
    if names == ():
        return Change(path, ignored="only comments, layout or docstrings differ")
    return Change(path, definitions=names or ())


def _submodule(folder: Path, old: str, new: str) -> str:
    """Return in words what is different about a submodule in a working tree."""
    if not (folder / ".git").exists():
        return "not checked out"
    head = _git(folder, "rev-parse", "HEAD").strip()
    dirty = [p for p in _read(folder, "diff", "--name-only", "-z", "HEAD", "--").split("\0") if p]
    dirty += [p for p in _git(folder, "ls-files", "-z", "--others", "--exclude-standard").split("\0") if p]
    words = [f"{old[:9]} to {head[:9]}"] if head != old else []
    if dirty:
        more = f" and {len(dirty) - _NOTED_NESTED} more" if len(dirty) > _NOTED_NESTED else ""
        words.append("changed inside: " + ", ".join(dirty[:_NOTED_NESTED]) + more)
    return "; ".join(words) or f"{old[:9]} to {new[:9]}"


def _revision(repo: Path, name: str) -> str:
    if name.startswith("-"):
        raise UserError(f"since={name}: not a revision")
    try:
        return _git(repo, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except UserError:
        hint = "; HEAD has no commit yet" if name == "HEAD" else "; git -C REPO fetch, or name a commit that is there"
        raise UserError(f"{repo}: no commit {name!r} in this repository{hint}") from None


def _read(repo: Path, *arguments: str) -> str:
    """Run a git command that looks at the working tree, on a copy of the index."""
    index = repo / _git(repo, "rev-parse", "--git-path", "index").strip()
    with tempfile.TemporaryDirectory(prefix="e2e-index-") as folder:
        copy = Path(folder) / "index"
        if index.exists():
            shutil.copy2(index, copy)  # with its time: git tells a file changed in the same tick by it
        return _run(repo, list(arguments), index=copy).decode("utf-8", "surrogateescape")


def _git(repo: Path, *arguments: str) -> str:
    return _run(repo, list(arguments)).decode("utf-8", "surrogateescape")


def _run(repo: Path, arguments: list[str], stdin: bytes | None = None, index: Path | None = None) -> bytes:
    """Run git without anything that writes to the checkout or starts programs that the checkout names."""
    argv = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", "-C", os.fspath(repo), *arguments]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        env.pop(name, None)
    if index is not None:
        env["GIT_INDEX_FILE"] = os.fspath(index)
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=GIT_TIMEOUT_S, check=False, env=env)
    except FileNotFoundError:
        raise UserError("git is not on PATH; install it") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{repo}: git {arguments[0]} did not answer within {GIT_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise UserError(f"{repo}: git {arguments[0]}: {said[-1] if said else f'exit status {done.returncode}'}")
    return done.stdout
