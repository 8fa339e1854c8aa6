"""Run an action right after a module was imported, whoever imports it.

Protocol: `register({module: "package.module:function"})`. A finder at the head of sys.meta_path recognises the names
and gives the module its ordinary loader, wrapped: once the module's own code has run, the function is called with it.
Asking for the spec alone (transformers looks for torch that way) uses nothing up.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

_pending: dict[str, str] = {}


class _Loader(importlib.abc.Loader):
    """The module's own loader; afterwards the registered action."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        target = _pending.pop(module.__name__, None)
        if target is None:
            return
        owner, _, function = target.partition(":")
        try:
            getattr(importlib.import_module(owner), function)(module)
        except BaseException:
            # callers such as `try: import torch except ImportError` must not turn this into "not installed" unseen
            sys.stderr.write(f"[e2e_cpu] {target} failed after import of {module.__name__}\n{traceback.format_exc()}")
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # resource readers and inspect ask the loader for more


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _pending:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def register(actions: Mapping[str, str]) -> None:
    """Add `actions`; RuntimeError where a module is already imported, because its users hold unpatched names."""
    late = sorted(name for name in actions if name in sys.modules)
    if late:
        msg = f"imported before e2e_cpu could patch it: {', '.join(late)}"
        raise RuntimeError(msg)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _pending.update(actions)
