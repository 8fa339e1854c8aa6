"""Generated git repositories: the same templates give the same commits on every machine, and no edit of a user is lost.

A generated checkout carries MARKER (committed; the digest of the templates) and, inside .git, RECORD (the commit that
was made). It is untouched while HEAD, refs and work tree, nested repositories included, are as generated. `make`
creates what is absent, renews what is untouched but of older templates, and leaves everything else alone.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKER = ".nemo-rl-e2e-demo"
RECORD = "nemo-rl-e2e-demo-head"
TEMPLATES = Path(__file__).parent
CORE = "3rdparty/Megatron-LM"
VENDORED = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
NESTED = {"bridge": (CORE,), "nemo-rl": (VENDORED, f"{VENDORED}/{CORE}")}
LOCK_WAIT_S = 60.0  # a whole generation takes about one second
GIT_TIMEOUT_S = 60.0
_DOTFILES = frozenset((".gitignore", ".gitmodules"))
_OUTPUTS = frozenset(("__pycache__", "model.npz"))
_WHEN = "2026-01-01T00:00:00+00:00"
_WHO = "nemo-rl-e2e demo"


@dataclass(frozen=True, slots=True)
class Checkouts:
    """Where the two generated checkouts are."""

    bridge: Path
    nemo_rl: Path


def is_demo(checkout: Path) -> bool:
    """Tell whether a checkout was generated here."""
    return (checkout / MARKER).is_file()


def make(folder: Path) -> Checkouts:
    """Return `folder/bridge` and `folder/nemo-rl`, generated where absent or out of date and untouched.

    Raises UserError where one of them exists and is not a generated checkout, or where git is missing or fails.
    """
    made = Checkouts(folder / "bridge", folder / "nemo-rl")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        wanted = [target for target in (made.bridge, made.nemo_rl) if _needs_generation(target)]
        if wanted:
            scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".making-"))
            try:
                _generate(scratch)
                for target in wanted:
                    _put(scratch / target.name, target, scratch)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return made


def committed(checkout: Path, path: str) -> str:
    """Return the text of a file as it was generated."""
    return _git(checkout, "show", f"HEAD:{path}", strip=False)


def set_aside(home: Path, *, edited: bool) -> Path | None:
    """Move `home` out of the way: return its new name if it holds edits, or remove it and return None."""
    if not home.exists():
        return None
    if not edited:
        shutil.rmtree(home)
        return None
    number = 1
    while (moved := home.with_name(f"{home.name}.edited-{number}")).exists():
        number += 1
    return home.rename(moved)


def is_current(checkout: Path) -> bool:
    """Tell whether a checkout is of today's templates."""
    try:
        marker = json.loads((checkout / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("templates") == template_digest()


def edited_files(checkout: Path) -> frozenset[str] | None:
    """Return the paths that differ from what was generated, without ignored ones; None where commits or refs differ."""
    for repository in (checkout, *(checkout / nested for nested in NESTED.get(checkout.name, ()))):
        try:
            head = (repository / ".git" / RECORD).read_text(encoding="ascii").strip()
        except OSError:
            return None
        refs = _git(repository, "for-each-ref", "--format=%(refname) %(objectname)")  # refs/stash is one of them
        if refs != f"refs/heads/main {head}" or _git(repository, "rev-parse", "HEAD") != head:
            return None
    status = _git(checkout, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", strip=False)
    return frozenset(entry[3:] for entry in status.split("\0") if entry)


@functools.cache
def template_digest() -> str:
    """Return the digest of the templates and of this module: what decides a generated commit."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for tree in ("megatron_lm", "bridge", "nemo_rl"):
        for relative in _files(tree):
            content = hashlib.sha256((TEMPLATES / tree / relative).read_bytes())
            digest.update(f"{tree}/{relative}\0{content.hexdigest()}\n".encode())
    return digest.hexdigest()


def _files(tree: str) -> list[str]:
    """Return the files of a template tree, sorted; what tools leave there (caches, outputs) is no part of it."""
    found = []
    for base, folders, names in os.walk(TEMPLATES / tree):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _OUTPUTS]
        kept = [n for n in names if n in _DOTFILES or (not n.startswith(".") and n not in _OUTPUTS)]
        found += [Path(base, name).relative_to(TEMPLATES / tree).as_posix() for name in kept]
    return sorted(found)


def _copy(tree: str, target: Path) -> None:
    """Copy contents, not modes: an installed package may be read-only, or have lost the executable bit."""
    for relative in _files(tree):
        file = target / relative
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((TEMPLATES / tree / relative).read_bytes())
        if file.suffix == ".sh":
            file.chmod(0o755)


def _needs_generation(target: Path) -> bool:
    if not target.exists():
        return True
    if not is_demo(target):
        raise UserError(f"{target} exists and is not a generated demo checkout; move it away or use another build=PATH")
    return not is_current(target) and edited_files(target) == frozenset()


def _put(new: Path, target: Path, scratch: Path) -> None:
    if target.exists():
        target.rename(scratch / f"old-{target.name}")
    new.rename(target)


def _generate(scratch: Path) -> None:
    """Make scratch/bridge (Core nested) and scratch/nemo-rl (a copy of that Bridge vendored)."""
    bridge, nemo_rl = scratch / "bridge", scratch / "nemo-rl"
    _copy("bridge", bridge)
    _copy("megatron_lm", bridge / CORE)
    _commit(bridge / CORE)
    _commit(bridge, CORE)
    _copy("nemo_rl", nemo_rl)
    shutil.copytree(bridge, nemo_rl / VENDORED, symlinks=True)
    _commit(nemo_rl, VENDORED)


def _commit(repository: Path, submodule: str = "") -> None:
    marker = {"schema": 1, "templates": template_digest(), "what": "generated by nemo-rl-e2e, not a real project"}
    (repository / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")
    _git(repository, "init", "-q", "--template=", "--initial-branch=main", "--object-format=sha1")
    if submodule:
        _git(repository, "config", f"submodule.{submodule}.url", f"../{Path(submodule).name}.git")
    _git(repository, "add", "--all")
    _git(repository, "commit", "-q", "--no-verify", "-m", "Generate the demo")
    (repository / ".git" / RECORD).write_text(_git(repository, "rev-parse", "HEAD") + "\n", encoding="ascii")


def _git(repository: Path, *arguments: str, strip: bool = True) -> str:
    """Run git with nothing of the user's configuration in it; return its output. Raises UserError."""
    env = {
        "PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC", "HOME": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": _WHO, "GIT_AUTHOR_EMAIL": "demo@example.invalid", "GIT_AUTHOR_DATE": _WHEN,
        "GIT_COMMITTER_NAME": _WHO, "GIT_COMMITTER_EMAIL": "demo@example.invalid", "GIT_COMMITTER_DATE": _WHEN,
    }  # fmt: skip
    # safe.directory: a container's root may own what the user generates, or the other way round
    command = ["git", "-c", "safe.directory=*", "-c", "advice.addEmbeddedRepo=false", "-c", "core.autocrlf=false"]
    command += ["-c", "gc.auto=0", "-C", os.fspath(repository), *arguments]
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=GIT_TIMEOUT_S, check=False)  # fmt: skip
    except FileNotFoundError:
        raise UserError("git is not on PATH; the demo generates git repositories") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"git {arguments[0]} in {repository} took longer than {GIT_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip()[-500:]
        raise UserError(f"git {arguments[0]} in {repository} failed (rc {done.returncode}): {said}")
    return done.stdout.strip() if strip else done.stdout


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold `folder/.lock`; what an interrupted generation left is removed once the lock is ours."""
    with (folder / ".lock").open("w", encoding="ascii") as lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(f"another call has held {folder / '.lock'} for {LOCK_WAIT_S:.0f} s") from None
                time.sleep(0.05)
        for left in folder.glob(".making-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
