"""The process group backend "nccl" means gloo: the same collectives over TCP, several workers on one CPU.

Workers and Core name "nccl" in init_process_group and new_group, also inside "cpu:gloo,cuda:nccl". `device_id` and
`pg_options` are NCCL's own arguments and are dropped with it. Sizes of all_to_all_single that Core computes on the
device and moves to the host stay tensors here; gloo wants numbers.
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
    dist.all_to_all_single = c10d.all_to_all_single = _with_numbers(dist.all_to_all_single)


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


def _with_numbers(ordinary: Any) -> Any:
    @functools.wraps(ordinary)
    def all_to_all_single(
        output: Any,
        input: Any,  # noqa: A002 - torch's name
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        sizes = [s.tolist() if hasattr(s, "tolist") else s for s in (output_split_sizes, input_split_sizes)]
        return ordinary(output, input, *sizes, **kwargs)

    return all_to_all_single
