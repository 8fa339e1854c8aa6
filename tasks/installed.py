"""`nemo-rl-e2e ARGS...` from anywhere: doit in the checkout that the caller is in, else on the installed sources.

A checkout wins, so that edits of its dodo.py, levels.yaml or tasks/ count and its build/ is the one of ./doitw.
Otherwise build/ is made in the caller's folder. A wheel has this file as its package, Nix's runner calls it by path:
it imports nothing of ours.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MARKS = ("dodo.py", "levels.yaml", "tasks/invocation.py")
PATHS = ("bridge", "nemo_rl", "mcore", "build", "levels", "python", "reports")
VARIABLES = ("BRIDGE_REPO", "NEMO_RL_REPO", "MCORE_REPO", "E2E_BUILD_DIR", "E2E_LEVELS", "E2E_REPORTS")


def project(start: Path, packed: Path) -> Path:
    """Return the checkout of this project that `start` is in, or `packed`."""
    for folder in (start, *start.parents):
        if all((folder / mark).is_file() for mark in MARKS):
            return folder
    return packed


def call(
    words: Sequence[str], environ: Mapping[str, str], here: Path, packed: Path
) -> tuple[Path, list[str], dict[str, str]]:
    """Return folder, argv and environment of the doit that answers `words` of a caller in `here`.

    doit runs in its project's folder; on the installed sources relative paths are made the caller's first.
    """
    root, env, given = project(here, packed), dict(environ), list(words)
    if root == packed:
        env["PYTHONDONTWRITEBYTECODE"] = "1"  # root could write into the Nix store
        env.setdefault("E2E_BUILD_DIR", "build")
        env |= {name: _absolute(env[name], here) for name in VARIABLES if env.get(name)}
        for at, word in enumerate(given):
            name, equals, value = word.partition("=")
            if equals and value and name in PATHS:
                given[at] = f"{name}={_absolute(value, here)}"
    return root, [sys.executable, "-m", "doit", *given], env


def _absolute(path: str, here: Path) -> str:
    return os.fspath(here / Path(path).expanduser())


def main() -> None:
    """Become doit."""
    inside = Path(__file__).resolve().parent
    packed = inside if (inside / MARKS[0]).is_file() else inside.parent  # the wheel's package, or tasks/ of the sources
    root, argv, env = call(sys.argv[1:], os.environ, Path.cwd(), packed)
    os.chdir(root)
    os.execve(argv[0], argv, env)  # noqa: S606 - no shell, and one process for signals


if __name__ == "__main__":
    main()
