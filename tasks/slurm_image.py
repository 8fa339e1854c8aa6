"""Which image a Slurm job runs in: something that cannot change behind a record's back, as pyxis names it.

A .sqsh file is known by the hash of its content, a reference by its digest. A tag is refused: each node pulls it by
itself, nothing here would see it move, and records of the old image would go on being believed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.files import read_json, sha256_file, write_json
from tasks.image_pins import Image, load_pins, parse_reference

if TYPE_CHECKING:
    from collections.abc import Callable


def resolve(setting: str | None, cache: Path, *, progress: Callable[[str], None] = lambda _: None) -> tuple[Image, str]:
    """Return the image that `setting` means and the argument of --container-image; UserError as described above.

    `cache` keeps the hashes of squashfs files by size and time of change: 20 GB are not read at every call.
    """
    pin = load_pins().get(setting or "")
    wanted = f"{pin.reference}@{pin.digest}" if pin and pin.reference and pin.digest else setting
    if not wanted:
        raise UserError("runtime=slurm: no image named: image=/shared/nemo-rl.sqsh or image=REPO@sha256:...")
    if wanted.startswith(("/", "./", "~")) or wanted.endswith(".sqsh"):
        path = Path(wanted).expanduser().absolute()
        return Image(os.fspath(path), None, f"sha256:{_hash(path, cache, progress)}", None, None), os.fspath(path)
    reference = parse_reference(wanted)
    if reference.digest is None:
        raise UserError(
            f"image={wanted}: runtime=slurm needs REPO@sha256:... or a .sqsh file: every node pulls a tag by itself, "
            "so that nobody could say which image was tested"
        )
    registry, slash, rest = reference.repo.partition("/")
    has_registry = slash and ("." in registry or ":" in registry)
    name = f"{registry}#{rest}" if has_registry else reference.repo
    known = pin.nemo_rl if pin else None
    return Image(wanted, reference.digest, reference.digest, known, None), f"{name}@{reference.digest}"


def _hash(path: Path, cache: Path, progress: Callable[[str], None]) -> str:
    try:
        stat = path.stat()
        now = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = read_json(cache) or {}
        entry = known.get(os.fspath(path))
        if entry and entry["stat"] == now:
            return str(entry["sha256"])
        if stat.st_size > 1 << 30:
            progress(f"hashing {path}, {stat.st_size >> 30} GiB, once")
        found = sha256_file(path)
    except OSError as error:
        raise UserError(f"image={path}: {error.strerror or error} (runtime=slurm: a .sqsh file)") from error
    write_json(cache, {**known, os.fspath(path): {"stat": now, "sha256": found}})
    return found
