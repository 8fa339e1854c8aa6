"""The clipped policy-gradient loss with a KL term, its gradient, and the numbers that compare generation with training."""

import numpy as np


def token_logprobs(logits, tokens, prompt_length):
    """Return the log-probabilities [B, R] of the response tokens, and the full distribution [B, R, V] in logs."""
    logits = logits[:, prompt_length - 1 : -1]
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.take_along_axis(logp, tokens[:, prompt_length:, None], -1)[..., 0], logp


def clipped_pg_loss(logits, batch, config):
    """Return loss, its gradient by the logits [B, T, V], and metrics.

    `batch` has tokens [B, T], advantages [B], and [B, R] each: mask of the response, log-probabilities prev, gen, ref.
    """
    tokens, mask = batch["tokens"], batch["mask"]
    start = tokens.shape[1] - mask.shape[1]
    current, logp = token_logprobs(logits, tokens, start)
    count, advantages = max(mask.sum(), 1.0), batch["advantages"][:, None]
    ratio = np.exp(current - batch["prev"])
    low, high = 1.0 - config["ratio_clip_min"], 1.0 + config["ratio_clip_max"]
    clamped = ratio.clip(low, high)
    kl = np.exp(batch["ref"] - current) - (batch["ref"] - current) - 1.0
    beta = config["reference_policy_kl_penalty"]
    inside = ratio * advantages <= clamped * advantages
    loss = ((-np.minimum(ratio * advantages, clamped * advantages) + beta * kl) * mask).sum() / count
    by_logprob = (-advantages * ratio * inside + beta * (1.0 - np.exp(batch["ref"] - current))) * mask / count
    gradient = np.zeros_like(logits)
    chosen = np.eye(logits.shape[-1])[tokens[:, start:]]
    gradient[:, start - 1 : -1] = by_logprob[..., None] * (chosen - np.exp(logp))

    def mean(values):
        return float((values * mask).sum() / count)

    mismatch, kept = batch["gen"] - batch["prev"], mask > 0
    metrics = {
        "loss": float(loss),
        "kl_penalty": mean(kl),
        "approx_entropy": mean(-(np.exp(logp) * logp).sum(-1)),
        "token_mult_prob_error": mean(np.exp(np.abs(mismatch))),
        "gen_kl_error": mean(np.exp(mismatch) - mismatch - 1.0),
        "policy_kl_error": mean(np.exp(-mismatch) + mismatch - 1.0),
        "sampling_importance_ratio": mean(np.exp(-mismatch)),
        "probs_ratio": mean(ratio),
        "probs_ratio_clamped": mean(clamped),
        "probs_ratio_min": float(ratio[kept].min(initial=np.inf)),
        "probs_ratio_max": float(ratio[kept].max(initial=-np.inf)),
        "probs_ratio_clamped_min": float(clamped[kept].min(initial=high)),
        "probs_ratio_clamped_max": float(clamped[kept].max(initial=low)),
    }
    return loss, gradient, metrics
