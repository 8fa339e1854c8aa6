"""The model that generates: Hugging Face's, built from its config, filled by `load_weights` alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# Megatron pads the vocabulary; vLLM cuts the padding off these two and nothing else.
_VOCABULARY = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
_SEED = 12345
# transformers keeps the experts of a layer in two tensors; checkpoints and the Bridge's export name each expert
_EXPERT = re.compile(r"(?P<owner>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")


def build(name: str, seed: int, dtype: str) -> tuple[Any, Any]:
    """Return (model, config) of the checkpoint `name` with random weights, and a `load_weights` on the model.

    RuntimeError where the rotary table is not what transformers computes: a patch of torch has spoilt it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED + seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype.removeprefix("torch."))).eval()
    table = model.model.rotary_emb.inv_freq
    if table[0] != 1 or not torch.isfinite(table).all():
        msg = f"rotary table of {name} is spoilt: {table.tolist()}"
        raise RuntimeError(msg)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    model.load_weights = lambda weights: _load(model, weights, tied=tied)
    return model, config


def _load(model: Any, weights: Iterable[tuple[str, Any]], *, tied: bool) -> set[str]:
    """Copy `weights` into `model`; return the names that were used.

    KeyError for a name that the model does not have, ValueError for another shape: vLLM refuses both.
    """
    import torch

    parameters = dict(model.named_parameters())
    loaded: set[str] = set()
    for name, weight in weights:
        if tied and name == "lm_head.weight":
            continue  # the embedding under its second name
        parameter = _expert(parameters, name) if _EXPERT.fullmatch(name) else parameters[name]
        rows = min(parameter.shape[0], weight.shape[0]) if name in _VOCABULARY else weight.shape[0]
        if parameter.shape[0] != rows or parameter.shape[1:] != weight.shape[1:]:
            msg = f"{name}: shape {tuple(weight.shape)} does not fit {tuple(parameter.shape)}"
            raise ValueError(msg)
        with torch.no_grad():
            parameter.copy_(weight[:rows])
        loaded.add(name)
    return loaded


def _expert(parameters: dict[str, Any], name: str) -> Any:
    """Return the part of a layer's experts that `name` fills; KeyError where the model has no such expert."""
    found = _EXPERT.fullmatch(name)
    owner, number, part = found["owner"], int(found["number"]), found["part"]  # type: ignore[index]
    every = parameters[f"{owner}.down_proj" if part == "down" else f"{owner}.gate_up_proj"]
    if number >= len(every):
        raise KeyError(name)
    one = every.detach()[number]  # shares the parameter's memory
    return one if part == "down" else one.chunk(2)[part == "up"]
