"""Durable files: what a crash leaves behind is the old content or the new, never half of one."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` atomically: temporary file in the same folder, fsync, rename.

    Raises OSError as the file system gives it (full disk, read-only); `path` is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with_suppressed_unlink(temporary)
        raise


def with_suppressed_unlink(name: str) -> None:
    """Remove `name` if it is still there."""
    try:
        os.unlink(name)
    except FileNotFoundError:
        return


def json_bytes(value: Any) -> bytes:
    """Return `value` as the JSON of this project: sorted keys, UTF-8, a final newline, no NaN (ValueError)."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def write_json(path: Path, value: Any, *, only_if_changed: bool = False) -> bool:
    """Write `value` to `path` atomically; return whether the bytes changed.

    With `only_if_changed` an equal file is left alone, time stamp included, so that nothing downstream is stale.
    """
    data = json_bytes(value)
    if only_if_changed:
        try:
            if path.read_bytes() == data:
                return False
        except FileNotFoundError:
            pass
    write_bytes(path, data)
    return True


def read_json(path: Path) -> Any:
    """Return the parsed JSON of `path`, or None where it is absent or not JSON (a crash cannot leave half a file)."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's content, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Return the hex SHA-256 of `json_bytes(value)`: the digest of a definition or of a set of inputs."""
    return hashlib.sha256(json_bytes(value)).hexdigest()
