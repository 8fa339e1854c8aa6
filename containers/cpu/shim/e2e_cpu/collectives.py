"""The process group backend "nccl" means gloo: the same collectives over TCP, several workers on one CPU.

Workers and Core name "nccl" in init_process_group and new_group, also inside "cpu:gloo,cuda:nccl". `device_id` and
`pg_options` are NCCL's own arguments and are dropped with it.
"""

from __future__ import annotations

import functools
from typing import Any


def apply() -> None:
    """Wrap both functions under both names that torch gives them."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    for owner in (c10d, dist):
        for name in ("init_process_group", "new_group"):
            setattr(owner, name, _on_gloo(getattr(owner, name)))


def _on_gloo(ordinary: Any) -> Any:
    if getattr(ordinary, "on_gloo", False):
        return ordinary

    @functools.wraps(ordinary)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str) and "nccl" in args[0]:
            args = ("gloo", *args[1:])
        if "nccl" in str(kwargs.get("backend", "")):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return ordinary(*args, **kwargs)

    wrapped.on_gloo = True  # type: ignore[attr-defined]
    return wrapped
