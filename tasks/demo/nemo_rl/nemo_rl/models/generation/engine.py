"""A generation engine in Hugging Face's layout. It starts with dummy weights: what it says comes from the last refit."""

import numpy as np

from nemo_rl.models import huggingface


class GenerationEngine:
    """Weights by name, replaced by `update_weights`; a weight that never arrives stays a dummy, as in a real engine."""

    def __init__(self, model_name):
        self.config = huggingface.read_config(model_name)
        self.weights = huggingface.random_weights(self.config, seed=991)

    def update_weights(self, stream):
        """Take (name, tensor) pairs; KeyError or ValueError for one that does not fit."""
        for name, tensor in stream:
            if name not in self.weights:
                raise KeyError(f"update_weights: unknown weight {name}")
            if tensor.shape != self.weights[name].shape:
                raise ValueError(f"update_weights: {name} has shape {tensor.shape}, not {self.weights[name].shape}")
            self.weights[name] = tensor

    def generate(self, prompts, length, seed):
        """Sample `length` tokens; return tokens [B, T + length] and log-probabilities [B, length]."""
        rng, tokens, logprobs = np.random.default_rng(seed), prompts, []
        for _ in range(length):
            states = huggingface.hidden_states(self.config, self.weights, tokens)[:, -1]
            logits = (states @ self.weights["lm_head.weight"].T).astype(np.float64)
            logp = logits - logits.max(-1, keepdims=True)
            logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
            drawn = (np.exp(logp).cumsum(-1) < rng.random((len(tokens), 1))).sum(-1).clip(max=logits.shape[-1] - 1)
            logprobs.append(np.take_along_axis(logp, drawn[:, None], -1)[:, 0])
            tokens = np.concatenate([tokens, drawn[:, None]], 1)
        return tokens, np.stack(logprobs, 1)
