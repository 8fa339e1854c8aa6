"""Attention under Transformer Engine's name: Core's own, and what Core leaves to Transformer Engine.

That is packed sequences, values of another size than keys, and context parallelism. With it a rank holds two of
2 x ranks equal parts of every packed sequence, its own from the front and its own from the back, so that all ranks have
the same work (the layout of Transformer Engine, for which NeMo-RL and Core cut their batches). Each rank gathers keys
and values of all, brings them back into order and lets its own queries look at what lies before them.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any


def own_positions(edges: list[int], rank: int, size: int) -> list[int]:
    """Return where the tokens of `rank` lie in the whole pack; ValueError where a sequence cannot be cut so."""
    found: list[int] = []
    for first, last in itertools.pairwise(edges):
        part, left = divmod(last - first, 2 * size)
        if left:
            msg = f"a packed sequence of {last - first} tokens cannot be cut into {2 * size} parts"
            raise ValueError(msg)
        for number in (rank, 2 * size - 1 - rank):
            found.extend(range(first + number * part, first + (number + 1) * part))
    return found


def gather(part: Any, group: Any) -> Any:
    """Return the ranks' parts one after another; the gradient of each part is the sum over ranks."""
    import torch
    import torch.distributed as dist

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, part: Any) -> Any:
            parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
            dist.all_gather(parts, part.contiguous(), group=group)
            return torch.cat(parts)

        @staticmethod
        def backward(_: Any, grad: Any) -> Any:
            total = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
            return total.chunk(group.size())[group.rank()]

    return Gather.apply(part)


def packed(query: Any, key: Any, value: Any, edges: list[int], scale: float, group: Any) -> Any:
    """Causal attention within each packed sequence; (tokens of this rank, heads, size) in, (tokens, heads * size) out.

    `edges`: where the sequences begin in the whole pack, and its end. `group`: ranks among which it is cut, or None.
    """
    import torch
    from torch.nn import functional

    size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    own = torch.arange(len(query))
    if size > 1:
        own = torch.tensor(own_positions(edges, rank, size))
        if len(own) != len(query):
            msg = f"{len(query)} tokens on a rank that holds {len(own)} of the packed sequences"
            raise ValueError(msg)
        order = torch.tensor([p for r in range(size) for p in own_positions(edges, r, size)]).argsort()
        key, value = gather(key, group)[order], gather(value, group)[order]
    out = torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype)
    groups = query.shape[1] // key.shape[1]
    for first, last in itertools.pairwise(edges):
        rows = ((own >= first) & (own < last)).nonzero()[:, 0]
        if not len(rows):
            continue
        k, v = (t[first:last].transpose(0, 1).repeat_interleave(groups, 0) for t in (key, value))
        seen = torch.arange(first, last)[None] <= own[rows][:, None]
        block = functional.scaled_dot_product_attention(query[rows].transpose(0, 1), k, v, attn_mask=seen, scale=scale)
        out[rows] = block.transpose(0, 1)
    return out.reshape(out.shape[0], -1)


def layer() -> type:
    """Return TEDotProductAttention."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from .megatron_layers import refuse

    class TEDotProductAttention(DotProductAttention):  # type: ignore[misc]
        def __init__(
            self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None,
            num_splits: int | None = None, name: str | None = None, **kwargs: Any,
        ) -> None:  # fmt: skip
            undivided = copy.copy(config)  # Core's layer refuses context parallelism, which is added here
            undivided.context_parallel_size = 1
            super().__init__(undivided, *args, **kwargs)
            self.config = config
            if v_channels is not None:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
            if k_channels is not None and kwargs.get("softmax_scale") is None:
                self.softmax_scale = k_channels**-0.5

        def forward(
            self,
            query: Any,
            key: Any,
            value: Any,
            attention_mask: Any = None,
            attn_mask_type: Any = None,
            attention_bias: Any = None,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> Any:
            """Unpacked: Core's. Packed: (tokens, heads, size), one causal block after another."""
            config = self.config
            if packed_seq_params is None:
                if config.context_parallel_size > 1:
                    refuse(context_parallel_size=config.context_parallel_size, packed_sequences=False)
                return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, **kwargs)
            if attention_bias is not None or config.window_size:
                refuse(packed_sequences=True, attention_bias=attention_bias, window_size=config.window_size)
            if config.softmax_type != "vanilla":
                refuse(softmax_type=config.softmax_type)
            if config.context_parallel_size > 1 and getattr(packed_seq_params, "cp_group", None) is not None:
                refuse(context_parallel_group="of the batch")
            bounds = packed_seq_params.cu_seqlens_q_padded
            if bounds is None:
                bounds = packed_seq_params.cu_seqlens_q
            group = self.pg_collection.cp if config.context_parallel_size > 1 else None
            return packed(query, key, value, bounds.tolist(), self.softmax_scale, group)

    return TEDotProductAttention
