"""flashinfer.sampling in plain torch, as Core's FlashInferSampling calls it: probabilities (rows, vocabulary).

top-k is applied first, then top-p on what is left and renormalised. The generator is passed on, so runs repeat.
"""

from __future__ import annotations

from typing import Any

import torch


def top_k_renorm_probs(probs: Any, top_k: Any) -> Any:
    """Keep the `top_k` (number or one per row) most probable entries of each row; the row sums to 1 again."""
    counts = torch.as_tensor(top_k, device=probs.device).expand(probs.shape[0]).clamp(1, probs.shape[1]).long()
    least = probs.sort(-1, descending=True).values.gather(1, (counts - 1)[:, None])
    kept = torch.where(probs >= least, probs, torch.zeros_like(probs))
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs: Any, top_p: Any) -> Any:
    """Keep the most probable entries that together reach `top_p` (number or one per row)."""
    bound = torch.as_tensor(top_p, device=probs.device, dtype=probs.dtype).expand(probs.shape[0])
    values, order = probs.sort(-1, descending=True)
    inside = values.cumsum(-1) - values < bound[:, None]
    kept = torch.zeros_like(probs).scatter(1, order, torch.where(inside, values, torch.zeros_like(values)))
    return kept / kept.sum(-1, keepdim=True)


def sampling_from_probs(probs: Any, *, deterministic: bool = True, generator: Any = None) -> Any:  # noqa: ARG001
    """Draw one entry per row, int32."""
    return torch.multinomial(probs, 1, generator=generator)[:, 0].int()


def top_p_sampling_from_probs(probs: Any, top_p: Any, **options: Any) -> Any:
    """Draw from the top-p part."""
    return sampling_from_probs(top_p_renorm_probs(probs, top_p), **options)


def top_k_sampling_from_probs(probs: Any, top_k: Any, **options: Any) -> Any:
    """Draw from the top-k part."""
    return sampling_from_probs(top_k_renorm_probs(probs, top_k), **options)


def top_k_top_p_sampling_from_logits(logits: Any, top_k: Any, top_p: Any, **options: Any) -> Any:
    """Draw from the top-p part of the top-k part of softmax(logits)."""
    return sampling_from_probs(top_p_renorm_probs(top_k_renorm_probs(logits.softmax(-1), top_k), top_p), **options)
