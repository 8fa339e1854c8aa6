"""Byte code of the trees and the interpreter: compiled once, found by every later attempt.

An attempt has a PYTHONPYCACHEPREFIX of its own, so that no byte code lands in a tree or comes from one. Below it, each
folder of sources that cannot change leads to a shared place: a snapshot's to `bytecode/` beside that snapshot, the
interpreter's packages to one named by the image. Python compares time and size of the source and writes whole files.

What makes it safe: the place is named by the digest of the content; every file that snapshot.py writes has a time that
follows from its content; and a new snapshot takes over only byte code of files with equal content.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.files import read_json
from tasks.runtimes import Mount

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "bytecode"


def share(prefix: Path, places: Mapping[Path, Path]) -> None:
    """Make byte code of sources below each key lie in its value instead of below `prefix`.

    Keys are absolute folders, seen by the run as they are here; one inside another is left out: links do not nest.
    """
    for sources, place in places.items():
        if any(other in sources.parents for other in places):
            continue
        place.mkdir(parents=True, exist_ok=True)
        link = prefix / sources.relative_to("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place)


def mounts(prefix: Path, seen: str, places: Mapping[Path, Path]) -> list[Mount]:
    """Return the same for a container that sees `prefix` at `seen`; links would lead out of it."""
    found = []
    for sources, place in places.items():
        for folder in (place, prefix / sources.relative_to("/")):
            folder.mkdir(parents=True, exist_ok=True)
        found.append(Mount(source=place, target=f"{seen}{sources}", read_only=False))
    return found


def beside(tree: Path) -> tuple[Path, Path] | None:
    """Return (top of the snapshot that holds `tree`, its byte code); None for a folder in no finished snapshot."""
    for top in (tree, *tree.parents):
        if top.name == "tree" and (top.parent / "manifest.json").exists():
            return top, top.parent / NAME
    return None


def take_over(earlier: Path, new: Path) -> None:
    """Link byte code from the snapshot folder `earlier` to `new` for files with equal content, no others."""
    old, now = (read_json(home / "manifest.json")["files"] for home in (earlier, new))
    for base, _, names in os.walk(earlier / NAME):
        folder = Path(base).relative_to(earlier / NAME)
        for name in names:
            source = (folder / f"{name.partition('.')[0]}.py").as_posix()
            if source in now and now[source] == old.get(source):
                target = new / NAME / folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(Path(base, name), target)


def of_interpreter(interpreter: Path, home: Path) -> dict[Path, Path]:
    """Return where byte code of the standard library and the packages of `interpreter` is kept below `home`."""
    roots = {interpreter.parent.parent, interpreter.resolve().parent.parent}
    return {root / "lib": home / root.relative_to("/") / "lib" for root in roots if (root / "lib").is_dir()}
