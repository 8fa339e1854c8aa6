"""Names of vLLM that are imported but not used in a rehearsal, and the few small ones that are.

NeMo-RL imports names of vLLM at module level (fp8 layers, executors, parsers) that a rehearsal never calls. Any module
below `vllm.` that has no file here is made on demand; its names are classes which refuse to be built, called or asked.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        msg = f"{name} is not answered by the CPU stand-in of vLLM"
        raise NotImplementedError(msg)

    return refuse


class _Refusing(type):
    """A class whose instances and attributes raise on use; fp8.py keeps EngineCoreProc.run_engine_core at import."""

    def __getattr__(cls, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse(f"{cls.__module__}.{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"{cls.__module__}.{cls.__name__}")(*args, **kwargs)


class _Module(ModuleType):
    """A module in which every public name exists."""

    __path__: list[str] = []  # noqa: RUF012 - a package without a folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Refusing(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class Worker:
    """Base of the worker that NeMo-RL's extension class is mixed into (vllm.v1.worker.gpu_worker)."""


def _init_logger(name: str) -> logging.Logger:
    return logging.getLogger(f"vllm.{name}")


# module -> the names in it that are answered; process_weights_after_loading has nothing to repack for plain torch
_ANSWERED: dict[str, dict[str, Any]] = {
    "vllm.logger": {"init_logger": _init_logger},
    "vllm.config": {"set_current_vllm_config": lambda _: contextlib.nullcontext()},
    "vllm.envs": {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": True},
    "vllm.model_executor.model_loader.utils": {"process_weights_after_loading": lambda *_: None},
    "vllm.v1.metrics.reader": {"get_metrics_snapshot": list},  # no metrics, as LLM.get_metrics
    "vllm.v1.worker.gpu_worker": {"Worker": Worker},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("vllm."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_ANSWERED.get(module.__name__, {}))


def answer(module: str, **names: Any) -> None:
    """Let `names` be found in `module`."""
    _ANSWERED[module] = names


def install() -> None:
    """Make the names importable: last on sys.meta_path, so that files of this package come first."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
