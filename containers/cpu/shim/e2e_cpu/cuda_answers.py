"""What torch.cuda answers on a machine without a GPU, for the questions that training and inference really ask.

Sources: the CPU runs of NeMo-RL 7ea279abf, Bridge 067f987df, Core 2a75ac12; each entry was added because a run asked.
Answers are constants (a device of 8 GiB, capability 9.0), no-ops, or the CPU generator. A function of torch.cuda that
is not named here still goes to torch's CPU build and raises there.
"""

# ruff: noqa: D102 - the methods are those of torch.cuda.Event and Stream, with their meaning
from __future__ import annotations

import collections
import sys
import time
from typing import Any

DEVICE_BYTES = 8 << 30  # enough for every size heuristic, small enough that none reserves much
DEVICE_COUNT = 8
NAME = "CPU (rehearsal)"

# `torch.cuda.is_available()` stays False: who asks gets the truth. One module refuses to start on False:
# "Megatron requires CUDA." in megatron/bridge/training/initialize.py.
TOLD_AVAILABLE = frozenset({"megatron.bridge.training.initialize"})
# Core's optimizers accept parameters whose type() is one of torch.cuda.*Tensor and no other.
TOLD_CUDA_TYPE = "megatron.core.optimizer"

_CONSTANTS: dict[str, Any] = {
    "device_count": DEVICE_COUNT,
    "get_device_name": NAME,
    "get_device_capability": (9, 0),
    "is_bf16_supported": True,
    "mem_get_info": (DEVICE_BYTES, DEVICE_BYTES),
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "device_memory_used": 0,
    "memory_summary": "",
}
_NOTHING = ("synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect", "init", "_lazy_init")


class Properties:
    """The answer of torch.cuda.get_device_properties."""

    name = NAME
    major, minor = 9, 0
    total_memory = DEVICE_BYTES
    multi_processor_count = 1
    uuid = "00000000-0000-0000-0000-000000000000"


class Event:
    """A point in time; on a CPU all work before it is done. Methods as torch.cuda.Event has them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, *_: Any) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from this event to `other`, as torch.cuda.Event gives them."""
        return (other._seconds - self._seconds) * 1e3


class Stream:
    """A queue of work that is always empty; a context manager too, as torch.cuda.stream(s) is."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:  # noqa: PYI034 - torch annotates it so
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


def _constant(value: Any) -> Any:
    return lambda *_, **__: value


def apply(torch: Any) -> None:
    """Put the answers into torch.cuda, and the two answers that depend on who asks."""
    cuda = torch.cuda
    for name, value in _CONSTANTS.items():
        setattr(cuda, name, _constant(value))
    for name in _NOTHING:
        setattr(cuda, name, _constant(None))
    cuda.get_device_properties = lambda *_, **__: Properties()
    _memory(cuda)
    _current_device(torch)
    _streams(torch)
    _random(torch)
    cuda.profiler.start = cuda.profiler.stop = lambda: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: 0
    cuda.is_available = lambda: sys._getframe(1).f_globals.get("__name__") in TOLD_AVAILABLE  # noqa: SLF001
    _tensor_types(torch)


def _memory(cuda: Any) -> None:
    """Allocator statistics: empty, under both names that torch gives them."""
    cuda.memory_stats = cuda.memory.memory_stats = lambda *_, **__: collections.defaultdict(int)
    cuda.memory_snapshot = cuda.memory.memory_snapshot = lambda *_, **__: []


def _current_device(torch: Any) -> None:
    """Remember set_device and `with device(n)`: MegatronPolicyWorker compares current_device() with LOCAL_RANK."""
    current = 0

    def set_device(device: Any) -> None:
        nonlocal current
        if isinstance(device, torch.device):
            device = device.index
        elif isinstance(device, str):
            device = device.rpartition(":")[2]
        current = int(device or 0)

    def exchange_device(device: int) -> int:
        before = current
        if device >= 0:  # -1: none was asked for
            set_device(device)
        return before

    torch.cuda.set_device = set_device
    torch.cuda.current_device = lambda: current
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = exchange_device  # noqa: SLF001 - of torch.cuda.device


def _streams(torch: Any) -> None:
    only = Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: only
    torch.cuda.stream = lambda *_: only
    torch.Tensor.record_stream = lambda *_: None


def _random(torch: Any) -> None:
    """One generator, the CPU's, for every device; Core saves and restores it through these names."""
    cuda, default = torch.cuda, torch.random.default_generator

    def seed(value: int) -> None:
        default.manual_seed(int(value))

    for owner in (cuda, cuda.random):
        owner.get_rng_state = lambda *_, **__: torch.get_rng_state()
        owner.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        owner.manual_seed = owner.manual_seed_all = seed
        owner._lazy_call = lambda call, **__: call()  # noqa: SLF001 - core/tensor_parallel/random.py calls it
    cuda.initial_seed = torch.initial_seed
    cuda.default_generators = (default,) * 128  # indexed by device number

    generator = torch.Generator

    class _AnyDevice(type(generator)):  # type: ignore[misc]
        """torch.Generator(device=...) on the CPU, and isinstance as before."""

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, generator)

        def __call__(cls, device: Any = None) -> Any:
            return generator()

    torch.Generator = _AnyDevice("Generator", (), {"__module__": "torch"})


def _tensor_types(torch: Any) -> None:
    names = ("FloatTensor", "IntTensor", "LongTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor", "DoubleTensor")
    for name in names:
        setattr(torch.cuda, name, getattr(torch, name))
    ordinary = torch.Tensor.type

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ordinary(self, *args, **kwargs)
        asker = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001
        if not args and not kwargs and asker.startswith(TOLD_CUDA_TYPE):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_
