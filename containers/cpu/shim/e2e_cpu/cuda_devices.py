"""The device "cuda" means the CPU: factories, `.to`, `.cuda`, autocast, torch.load, device meshes.

NeMo-RL and Core name the device in code ("cuda", torch.device("cuda"), the number from current_device()).
Trap, seen and mended: `with torch.device("meta")` recognises factory functions by identity, in a set that torch caches
on first use. That cache is filled with torch's own functions before they are wrapped; otherwise transformers'
from_pretrained leaves garbage in the rotary table (`inv_freq`) and logits are wrong without an error.
"""

from __future__ import annotations

import functools
from typing import Any

_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "as_tensor",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randperm", "linspace",
    "eye", "empty_strided",
)  # fmt: skip
_NEW = ("new_zeros", "new_empty", "new_ones", "new_full", "new_tensor")


def apply(torch: Any) -> None:
    """Wrap the functions; see the module docstring for the order."""
    import torch.utils._device as by_device

    by_device._device_constructors()  # noqa: SLF001 - fills the cache, see above

    def means_cuda(device: Any) -> bool:
        if isinstance(device, str):
            return device == "cuda" or device.startswith("cuda:")
        return isinstance(device, torch.device) and device.type == "cuda"

    def is_number(device: Any) -> bool:
        return type(device) is int  # a bool is a flag, not a device

    def mended(kwargs: dict[str, Any]) -> dict[str, Any]:
        device = kwargs.get("device")
        if means_cuda(device) or is_number(device):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return kwargs

    def wrap_keywords(owner: Any, name: str) -> None:
        ordinary = getattr(owner, name)

        @functools.wraps(ordinary)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return ordinary(*args, **mended(kwargs)) if kwargs else ordinary(*args)

        setattr(owner, name, wrapped)

    def wrap_to(owner: Any) -> None:
        ordinary = owner.to

        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            args = tuple("cpu" if means_cuda(x) or is_number(x) else x for x in args)
            return ordinary(self, *args, **mended(kwargs))

        owner.to = to

    for name in _FACTORIES:
        wrap_keywords(torch, name)
    for name in _NEW:
        wrap_keywords(torch.Tensor, name)
    for owner in (torch.Tensor, torch.nn.Module):
        wrap_to(owner)
        owner.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    _wrap_load(torch, means_cuda)
    _wrap_autocast(torch)
    _wrap_mesh(torch, means_cuda)


def _wrap_load(torch: Any, means_cuda: Any) -> None:
    ordinary = torch.load

    @functools.wraps(ordinary)
    def load(*args: Any, **kwargs: Any) -> Any:
        if means_cuda(kwargs.get("map_location")):
            kwargs["map_location"] = "cpu"
        return ordinary(*args, **kwargs)

    torch.load = load


def _wrap_autocast(torch: Any) -> None:
    """autocast("cuda") is autocast("cpu"); CPU autocast has no float32, which means "off" there."""
    ordinary = torch.autocast

    class autocast(ordinary):  # type: ignore[misc]  # noqa: N801 - torch's name
        def __init__(
            self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
        ) -> None:
            if device_type == "cuda":
                device_type = "cpu"
            if dtype is torch.float32:
                enabled, dtype = False, None
            super().__init__(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    torch.autocast = torch.amp.autocast = autocast


def _wrap_mesh(torch: Any, means_cuda: Any) -> None:
    import torch.distributed.device_mesh as mesh

    ordinary = mesh.init_device_mesh

    @functools.wraps(ordinary)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return ordinary("cpu" if means_cuda(device_type) else device_type, *args, **kwargs)

    mesh.init_device_mesh = torch.distributed.init_device_mesh = init_device_mesh
