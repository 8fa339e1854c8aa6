"""Stand-in for flash-attn 2: the two entry points of Megatron-Core's dynamic inference, in plain torch.

Definition: softmax(scale * q k^T) v over the keys that a query may see, computed in float32. Keys and values have
(tokens, heads, size); fewer key heads than query heads are shared in groups. Options that would change the result and
are not done here raise NotImplementedError.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__version__ = "2.8.1"
_NO_WINDOW = (-1, -1)


def _only(options: dict[str, Any], window_size: tuple[int, int], dropout_p: float = 0.0) -> None:
    """Refuse what `_attend` does not do; options at their neutral value pass."""
    set_ = sorted(name for name, value in options.items() if value not in (None, False, 0, 0.0))
    if set_ or tuple(window_size) != _NO_WINDOW or dropout_p:
        msg = f"flash_attn on a CPU does not do: {', '.join(set_) or 'window_size or dropout_p'}"
        raise NotImplementedError(msg)


def _attend(q: Any, k: Any, v: Any, scale: float, *, position: Any, length: Any, causal: bool) -> Any:
    """Attend q (b, s, h, d) to k, v (b, t, hk, d): keys below `length` (b,), and up to `position` (b, s) if causal."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bshd,bthd->bhst", q.float(), k.float()) * scale
    key = torch.arange(k.shape[1], device=q.device)
    seen = (key[None, None, :] < length[:, None, None]).expand(-1, q.shape[1], -1)
    if causal:
        seen = seen & (key[None, None, :] <= position[:, :, None])
    scores = scores.masked_fill(~seen[:, None], -1e30)  # not -inf: a padded query sees no key at all
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.float()).to(q.dtype)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    cache_seqlens: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    block_table: Any = None,
    **options: Any,
) -> Any:
    """Attend q (b, s, h, d), the last s tokens of each sequence, to a paged cache (blocks, tokens, hk, d)."""
    _only(options, window_size)
    if k is not None or v is not None or block_table is None:
        msg = "flash_attn_with_kvcache on a CPU: only a paged cache that is already filled"
        raise NotImplementedError(msg)
    pages = block_table.long().clamp_min(0)  # -1 marks an unused block; `length` hides it
    length = cache_seqlens.long()
    count = q.shape[1]
    position = length[:, None] - count + torch.arange(count, device=q.device)[None]
    keys, values = k_cache[pages].flatten(1, 2), v_cache[pages].flatten(1, 2)
    return _attend(
        q, keys, values, softmax_scale or q.shape[-1] ** -0.5, position=position, length=length, causal=causal
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,  # noqa: ARG001 - sizes of a launch
    max_seqlen_k: int,  # noqa: ARG001
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    block_table: Any = None,
    **options: Any,
) -> Any:
    """Attend sequences packed one after another, q (tokens, h, d); with `block_table` keys come from a paged cache."""
    _only(options, window_size, dropout_p)
    out = torch.zeros_like(q)
    q_edges, k_edges = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q_edges) - 1):
        first, last = q_edges[i], q_edges[i + 1]
        queries, keys_count = last - first, k_edges[i + 1] - k_edges[i]
        if queries <= 0:
            continue
        if block_table is None:
            keys, values = k[k_edges[i] : k_edges[i + 1]], v[k_edges[i] : k_edges[i + 1]]
        else:
            pages = block_table[i].long().clamp_min(0)
            keys, values = k[pages].flatten(0, 1)[:keys_count], v[pages].flatten(0, 1)[:keys_count]
        position = (keys_count - queries + torch.arange(queries, device=q.device))[None]
        length = torch.tensor([keys_count], device=q.device)
        scale = softmax_scale or q.shape[-1] ** -0.5
        block = q[None, first:last], keys[None], values[None]
        out[first:last] = _attend(*block, scale, position=position, length=length, causal=causal)[0]
    return out


def flash_attn_func(*_: Any, **__: Any) -> NoReturn:
    """Refuse: imported by Core, not used by dynamic inference."""
    msg = "flash_attn_func is not answered on a CPU"
    raise NotImplementedError(msg)
