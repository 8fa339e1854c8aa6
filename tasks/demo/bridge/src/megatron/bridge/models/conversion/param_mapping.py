"""One class per way in which Hugging Face tensors become a Megatron parameter, and back.

A name pattern may hold one `*`, the layer number; it stands for the same number on both sides.
"""

import numpy as np


class MegatronParamMapping:
    """A Megatron parameter and the Hugging Face tensors it is made of, by role."""

    def __init__(self, megatron, **hf):
        self.megatron, self.hf = megatron, hf

    def resolve(self, layer):
        """Return the mapping with `*` replaced by a layer number."""
        filled = {role: name.replace("*", str(layer)) for role, name in self.hf.items()}
        return type(self)(self.megatron.replace("*", str(layer)), **filled)

    def hf_to_megatron(self, tensors, config):
        """Return the Megatron parameter for {role: tensor}."""
        raise NotImplementedError

    def megatron_to_hf(self, weight, config):
        """Return {role: tensor} for a Megatron parameter."""
        raise NotImplementedError


class DirectMapping(MegatronParamMapping):
    """The same tensor under two names."""

    def hf_to_megatron(self, tensors, config):
        return tensors["weight"]

    def megatron_to_hf(self, weight, config):
        return {"weight": weight}


class QKVMapping(MegatronParamMapping):
    """Three projections in one: for each query group its queries, then what ORDER says."""

    ORDER = ("k", "v")

    def hf_to_megatron(self, tensors, config):
        groups = config.num_query_groups
        queries = tensors["q"].reshape(groups, -1, config.head_dim, config.hidden_size)
        rest = [tensors[role].reshape(groups, 1, config.head_dim, config.hidden_size) for role in self.ORDER]
        return np.concatenate([queries, *rest], axis=1).reshape(-1, config.hidden_size)

    def megatron_to_hf(self, weight, config):
        parts = weight.reshape(config.num_query_groups, -1, config.head_dim, config.hidden_size)
        tensors = {"q": parts[:, :-2].reshape(-1, config.hidden_size)}
        for place, role in zip((-2, -1), self.ORDER, strict=True):
            tensors[role] = parts[:, place].reshape(-1, config.hidden_size)
        return tensors


class GatedMLPMapping(MegatronParamMapping):
    """Gate and up-projection, one above the other."""

    def hf_to_megatron(self, tensors, config):
        return np.concatenate([tensors["gate"], tensors["up"]], axis=0)

    def megatron_to_hf(self, weight, config):
        gate, up = np.split(weight, 2, axis=0)
        return {"gate": gate, "up": up}
