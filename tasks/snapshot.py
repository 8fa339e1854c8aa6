"""A frozen copy of a checkout, named by its digest: what runs is what is named, whatever is edited meanwhile.

A snapshot is copied to a temporary folder, compared with the manifest file by file, and renamed into place; a folder
without a matching `manifest.json` was never finished and is rebuilt. Files of an earlier snapshot with the same content
are linked, not copied: both are immutable, and links to the user's checkout are never made.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import bytecode
from tasks.errors import UserError
from tasks.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.digests import Entry, Manifest

BLOCK = 1 << 20


class TreeChangedError(UserError):
    """Raised when files of the checkout changed between the manifest and the copy: somebody is editing."""


def copy_file(source: str, target: str, entry: Entry) -> bool:
    """Copy one file with its mode bits; return whether its content is what `entry` says. Links stay links."""
    if entry.mode == "120000":
        link = os.readlink(source)
        os.symlink(link, target)
        return hashlib.sha256(os.fsencode(link)).hexdigest() == entry.sha
    digest = hashlib.sha256()
    with open(source, "rb") as src, open(target, "wb") as dst:
        while block := src.read(BLOCK):
            digest.update(block)
            dst.write(block)
    os.chmod(target, 0o755 if entry.mode == "100755" else 0o644)
    # a time that follows from the content, long ago: byte code is compared with it (bytecode.py), and an edit is newer
    seconds = 1_000_000_000 + int(entry.sha[:7], 16)
    os.utime(target, (seconds, seconds))
    return digest.hexdigest() == entry.sha


def _fill(source: Path, target: Path, files: Mapping[str, Entry], earlier: Path | None) -> list[str]:
    """Copy `files` of `source` into `target`; return those whose content was not what the manifest says."""
    wrong = []
    known = (read_json(earlier.parent / "manifest.json") or {}).get("files", {}) if earlier else {}
    made: set[str] = set()
    for path, entry in files.items():
        out = f"{target}/{path}"
        parent = out.rpartition("/")[0]
        if parent not in made:
            os.makedirs(out if entry.mode == "160000" else parent, exist_ok=True)
            made.add(parent)
        if entry.mode == "160000":
            os.makedirs(out, exist_ok=True)
            continue
        try:
            if earlier and known.get(path) == [entry.mode, entry.sha]:
                os.link(f"{earlier}/{path}", out, follow_symlinks=False)
            elif not copy_file(f"{source}/{path}", out, entry):
                wrong.append(path)
        except FileNotFoundError:
            wrong.append(path)
    return wrong


def take(manifest: Manifest, folder: Path, *, verify: bool = True) -> Path:
    """Return the path of the snapshot of `manifest` under `folder`, made if it is not there.

    `verify=False` is for a call that only asks whether results are fresh: it looks for the finished snapshot, not
    into it (6,000 files less to look at). Raises TreeChangedError when the checkout changes meanwhile, UserError when
    the disk is full.
    """
    home = folder / f"{manifest.kind}-{manifest.digest[:20]}"
    tree = home / "tree"
    if is_sound(home, manifest.digest) if verify else (home / "manifest.json").exists():
        return tree
    folder.mkdir(parents=True, exist_ok=True)
    earlier = max(
        (p / "tree" for p in folder.glob(f"{manifest.kind}-*") if (p / "manifest.json").exists() and p != home),
        key=lambda p: p.stat().st_mtime_ns,
        default=None,
    )
    temporary = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=folder))
    temporary.chmod(0o755)
    try:
        (temporary / "tree").mkdir()
        wrong = _fill(manifest.root, temporary / "tree", manifest.files, earlier)
        if wrong:
            raise TreeChangedError(
                f"{manifest.root}: {wrong[0]} changed while the snapshot was taken ({len(wrong)} files): "
                "finish the edit and call again"
            )
        write_json(temporary / "manifest.json", {"digest": manifest.digest, "files": manifest.as_dict()})
        shutil.rmtree(home, ignore_errors=True)  # an unfinished or damaged one of this name is ours
        temporary.rename(home)
        if earlier:
            bytecode.take_over(earlier.parent, home)
    except OSError as error:
        raise UserError(f"{folder}: snapshot of {manifest.root} failed: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return tree


def is_sound(home: Path, digest: str) -> bool:
    """Tell whether `home` is a finished snapshot of `digest` in which no file was changed, added to or lost.

    The check is by size and time against manifest.json, which is written last: whoever edits a snapshot later leaves a
    newer time stamp. Our own runs never write into a snapshot.
    """
    try:
        written_ns = (home / "manifest.json").stat().st_mtime_ns
    except OSError:
        return False
    manifest = read_json(home / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("digest") != digest:
        return False
    for path in manifest["files"]:
        try:
            info = os.lstat(f"{home}/tree/{path}")
        except OSError:
            return False
        if info.st_mtime_ns > written_ns:
            return False
    return True


def files_of(tree: Path) -> dict[str, Entry]:
    """Return what the manifest says of a snapshot's tree, or of a folder inside it (the Bridge that NeMo-RL vendors).

    Raises UserError for a folder that is in no finished snapshot.
    """
    from tasks.digests import Entry

    top = next((p for p in (tree, *tree.parents) if p.name == "tree" and (p.parent / "manifest.json").exists()), None)
    if top is None:
        raise UserError(f"{tree}: not inside a finished snapshot; call again")
    prefix = "" if top == tree else f"{tree.relative_to(top).as_posix()}/"
    listed = read_json(top.parent / "manifest.json")["files"]
    return {path.removeprefix(prefix): Entry(*entry) for path, entry in listed.items() if path.startswith(prefix)}


def work_copy(tree: Path, target: Path) -> None:
    """Copy a frozen tree to `target`, writable and unlinked: what one attempt runs in and may scribble over.

    Every file is hashed on the way; raises UserError if the snapshot is not what its manifest says.
    """
    target.mkdir(parents=True)
    wrong = _fill(tree, target, files_of(tree), None)
    if wrong:
        raise UserError(f"{tree}: {wrong[0]} is not what manifest.json says: remove the snapshot and call again")


def workplace(kind: str, tree: Path, attempt: Path, paths: Mapping[str, str]) -> str:
    """Return the folder, as the run sees it, in which a command of tree `kind` may write: never a frozen tree.

    Core and NeMo-RL are copies of the attempt already; the Bridge is imported from its snapshot, and only a command
    that works in it gets a copy to work in.
    """
    if kind != "bridge":
        return paths[kind]
    if not (attempt / "work/bridge").exists():
        work_copy(tree, attempt / "work/bridge")
    return f"{paths['attempt']}/work/bridge"


def has_content(home: Path) -> bool:
    """Tell whether every file of the snapshot has the hash its manifest says: the strict form of `is_sound`."""
    for path, (mode, sha) in read_json(home / "manifest.json")["files"].items():
        if mode == "160000":
            continue
        name = f"{home}/tree/{path}"
        try:
            if mode == "120000":
                now = hashlib.sha256(os.fsencode(os.readlink(name))).hexdigest()
            else:
                with open(name, "rb") as source:
                    now = hashlib.file_digest(source, "sha256").hexdigest()
        except OSError:
            return False
        if now != sha:
            return False
    return True
