"""CUDA IPC handles become the bytes themselves.

NeMo-RL's refit sends `reduce_tensor(buffer)` through ZMQ and rebuilds it with `rebuild_cuda_tensor` in the generation
worker (models/policy/utils.py). Packing, manifest and protocol stay NeMo-RL's; only the handle of a device allocation,
which a CPU does not have, is replaced by its content. Pickling of tensors elsewhere keeps torch's own reductions.
"""

from __future__ import annotations

from typing import Any

HANDLE_FIELDS = 7  # the receiver writes its device number into field 6, as it does into a real handle


def apply(torch: Any) -> None:
    """Replace the two functions in torch.multiprocessing.reductions."""
    from torch.multiprocessing import reductions

    def rebuild(content: bytes, dtype: Any, shape: tuple[int, ...], *_: Any) -> Any:
        return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)

    def reduce(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
        flat = tensor.detach().contiguous()
        content = flat.view(torch.uint8).numpy().tobytes()
        fields = (content, flat.dtype, tuple(flat.shape))
        return rebuild, (*fields, *([None] * (HANDLE_FIELDS - 1 - len(fields))), 0)

    reductions.rebuild_cuda_tensor, reductions.reduce_tensor = rebuild, reduce
