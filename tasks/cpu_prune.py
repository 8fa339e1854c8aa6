"""`doit clean cpu`: drop what the present CPU environment does not use and no running process names.

Every edit of a stand-in makes a new environment and byte code of its own beside earlier ones (tasks/cpu.py); a proof
keeps the byte code of trees by content. Removed are environments, packages, models and byte code of other digests, and
byte code by content that no proof has read for `UNREAD_DAYS`. With `doit clean -n cpu` the names are shown only.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import bytecode, cpu
from tasks.cpu_build import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNREAD_DAYS = 14
_MADE = re.compile(rf"(cpu|venv|models|{bytecode.NAME})-[0-9a-f]{{16}}(\.new)?")


def prune(folder: Path, report: Callable[[str], None], *, dry: bool = False, processes: Path = Path("/proc")) -> None:
    """Remove what is unused below `folder` (build/cpu) and report each path; nothing where nothing is built for us."""
    present = cpu.ready(folder)
    if present is None:
        report("CPU environment: not built for this checkout, nothing is removed (doit cpu builds it)")
        return
    folder = folder.resolve()
    used = {
        f"cpu-{present.digest[:16]}", cpu.compiled(present).name,
        present.python.parent.parent.name, present.data.parent.name,
    }  # fmt: skip
    with locked(folder / "lock", report):
        named = b"\0".join(_environments(processes))
        for path in sorted(folder.iterdir()):
            if path.is_symlink() or not _MADE.fullmatch(path.name) or path.name in used:
                continue
            if os.fsencode(path) in named:
                report(f"in use: {path}")
                continue
            report(f"remove {path}")
            if not dry:
                shutil.rmtree(path)
        since = time.time() - UNREAD_DAYS * 86400
        old = [path for path in _files(folder / bytecode.NAME) if path.stat().st_mtime < since]
        if old:
            report(f"remove {len(old)} files of {folder / bytecode.NAME} that no proof has read for {UNREAD_DAYS} days")
        for path in [] if dry else old:
            path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _environments(processes: Path) -> Iterator[bytes]:
    """Yield the variables and arguments of every process that may be read."""
    for path in [*processes.glob("[0-9]*/environ"), *processes.glob("[0-9]*/cmdline")]:
        try:
            yield path.read_bytes()
        except OSError:  # ended meanwhile, or another user's
            continue
