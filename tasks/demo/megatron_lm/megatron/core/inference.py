"""Generation with the training weights themselves, in float32: what `policy.generation.backend=megatron` uses."""

import numpy as np


def generate(model, prompts, length, rng):
    """Sample `length` tokens after prompts [B, T]; return tokens [B, T + length] and their log-probabilities [B, length]."""
    weights = {n: w.astype(np.float32) for n, w in model.weights().items()}
    tokens, logprobs = prompts, []
    for _ in range(length):
        logits = model.forward(tokens, weights)[0][:, -1].astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        drawn = (np.exp(logp).cumsum(-1) < rng.random((len(tokens), 1))).sum(-1).clip(max=logits.shape[-1] - 1)
        logprobs.append(np.take_along_axis(logp, drawn[:, None], -1)[:, 0])
        tokens = np.concatenate([tokens, drawn[:, None]], 1)
    return tokens, np.stack(logprobs, 1)
