"""LoRA: a frozen base, and for each target W a trainable product B A that starts at zero."""

from dataclasses import dataclass

import numpy as np

TARGETS = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


@dataclass
class LoRA:
    """Rank `dim`, strength `alpha` (the product is scaled by alpha / dim). Call it on a model to adapt it."""

    dim: int = 8
    alpha: int = 32
    seed: int = 1

    def __call__(self, model):
        """Give the model an adapter and return it."""
        model.adapter = LowRankAdapter(model.parameters, self.dim, self.alpha / self.dim, self.seed)
        return model


class LowRankAdapter:
    """The trainable arrays `<name>.lora_a` [dim, in] and `<name>.lora_b` [out, dim]."""

    def __init__(self, base, dim, scale, seed):
        rng = np.random.default_rng(seed)
        self.scale, self.targets, self.parameters = scale, [n for n in base if n.endswith(TARGETS)], {}
        for name in self.targets:
            rows, columns = base[name].shape
            self.parameters[name + ".lora_a"] = rng.normal(0.0, columns**-0.5, (dim, columns))
            self.parameters[name + ".lora_b"] = np.zeros((rows, dim))

    def merged(self, base):
        """Return the base weights with the products added."""
        merged = dict(base)
        for name in self.targets:
            a, b = self.parameters[name + ".lora_a"], self.parameters[name + ".lora_b"]
            merged[name] = base[name] + self.scale * b @ a
        return merged

    def gradients(self, full):
        """Turn gradients of the merged weights into gradients of the adapter's arrays."""
        out = {}
        for name in self.targets:
            a, b = self.parameters[name + ".lora_a"], self.parameters[name + ".lora_b"]
            out[name + ".lora_a"], out[name + ".lora_b"] = self.scale * b.T @ full[name], self.scale * full[name] @ a.T
        return out
