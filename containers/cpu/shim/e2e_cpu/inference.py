"""Megatron-Core's dynamic inference: the one Triton kernel that it calls without asking."""

from __future__ import annotations

from typing import Any


def drop_append_kernel(module: Any) -> None:
    """Say that there is no Triton kernel; dynamic_context.append_key_value_cache then takes its own torch path.

    AttributeError where Core has renamed it: a rehearsal would otherwise die later, inside Triton.
    """
    if not hasattr(module, "triton_append_key_value_cache"):
        msg = f"{module.__name__} has no triton_append_key_value_cache"
        raise AttributeError(msg)
    module.triton_append_key_value_cache = None
