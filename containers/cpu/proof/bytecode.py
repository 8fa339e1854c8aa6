"""Byte code by content: the code of a source file is kept under the SHA-256 of its bytes, wherever the file lies.

Python's own cache goes by path, size and time stamp. Work copies and snapshots differ in path, and a stale file there
could hide an edit; here other bytes are another key. Files below the given roots only; everything else stays Python's.
"""

from __future__ import annotations

import _imp
import hashlib
import importlib.machinery
import marshal
import os
import sys
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path
    from types import CodeType


class ByContent(importlib.machinery.SourceFileLoader):
    """The ordinary loader of a source file, with another cache."""

    kept: Path
    replaced: ClassVar[dict[str, bytes]] = {}  # file -> what is read instead: how mutants.py puts a fault in

    def get_data(self, path: str) -> bytes:
        """Return the bytes of a file, or what replaces them."""
        return self.replaced[path] if path in self.replaced else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, compiled at most once for each content."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        file = self.kept / f"{hashlib.sha256(source).hexdigest()}.{sys.implementation.cache_tag}"
        try:
            digest, _, body = file.read_bytes().partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() == digest:
                code: CodeType = marshal.loads(body)  # noqa: S302 - our own, by its hash
                os.utime(file)  # read today: `doit clean cpu` drops what nobody reads
                _imp._fix_co_filename(code, path)  # type: ignore[attr-defined]  # noqa: SLF001 - as importlib does
                return code
        except OSError:
            pass
        code = self.source_to_code(source, path)
        body = marshal.dumps(code)
        making = file.with_name(f"{file.name}.{os.getpid()}")
        making.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        making.rename(file)
        return code


def install(kept: Path, roots: tuple[str, ...]) -> None:
    """Use `kept` for modules below `roots`; to be called before the first of them is imported."""
    kept.mkdir(parents=True, exist_ok=True)
    loader = type("ByContentHere", (ByContent,), {"kept": kept})
    hook = importlib.machinery.FileFinder.path_hook(
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
        (loader, importlib.machinery.SOURCE_SUFFIXES),
    )

    def below(path: str) -> importlib.machinery.FileFinder:
        if not any(path == root or path.startswith(f"{root}/") for root in roots):
            raise ImportError(path)
        return hook(path)  # type: ignore[return-value]

    sys.path_hooks.insert(0, below)
    sys.path_importer_cache.clear()
