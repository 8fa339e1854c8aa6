"""Everything that changes in torch, in the order in which it must happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import collectives, cuda_answers, cuda_devices, ipc

if TYPE_CHECKING:
    from types import ModuleType


def apply(torch: ModuleType) -> None:
    """Patch the freshly imported torch; RuntimeError where it is a CUDA build, whose answers are real."""
    loaded: Any = torch
    if loaded.version.cuda is not None:
        msg = f"torch {loaded.__version__} is a CUDA build; E2E_CPU=run wants the CPU build"
        raise RuntimeError(msg)
    cuda_answers.apply(loaded)
    cuda_devices.apply(loaded)
    collectives.apply()
    ipc.apply(loaded)
