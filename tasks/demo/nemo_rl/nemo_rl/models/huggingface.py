"""The model as Hugging Face has it: separate projections, float32. It knows nothing of Megatron or of the Bridge.

This is the independent reference of the demo: the checkpoint is made with it, and generation runs on it.
"""

import json
import os
from pathlib import Path

import numpy as np

from nemo_rl.environments import arithmetic


def shapes(config):
    """Return {name: shape} of a checkpoint."""
    width, ffn, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    narrow = config["num_key_value_heads"] * (width // config["num_attention_heads"])
    found = {"model.embed_tokens.weight": (vocabulary, width)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        found[layer + "input_layernorm.weight"] = found[layer + "post_attention_layernorm.weight"] = (width,)
        found[layer + "self_attn.q_proj.weight"] = found[layer + "self_attn.o_proj.weight"] = (width, width)
        found[layer + "self_attn.k_proj.weight"] = found[layer + "self_attn.v_proj.weight"] = (narrow, width)
        found[layer + "mlp.gate_proj.weight"] = found[layer + "mlp.up_proj.weight"] = (ffn, width)
        found[layer + "mlp.down_proj.weight"] = (width, ffn)
    return {**found, "model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def _norm(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(epsilon)) * weight


def hidden_states(config, weights, tokens):
    """Return the normalised states [B, T, width] that the output layer sees."""
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    batch, length = tokens.shape
    x = weights["model.embed_tokens.weight"][tokens]
    future = np.triu(np.ones((length, length), bool), 1)
    for i in range(config["num_hidden_layers"]):
        w = {name.removesuffix(".weight").split(".")[-1]: weights[name] for name in weights if f".layers.{i}." in name}
        h = _norm(x, w["input_layernorm"], config["rms_norm_eps"])
        q = (h @ w["q_proj"].T).reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
        k, v = (
            np.repeat((h @ w[n].T).reshape(batch, length, shared, -1).transpose(0, 2, 1, 3), heads // shared, axis=1)
            for n in ("k_proj", "v_proj")
        )
        scores = q @ k.transpose(0, 1, 3, 2) / np.float32(np.sqrt(q.shape[-1]))
        p = np.where(future, np.float32(0), np.exp(scores - scores.max(-1, keepdims=True)))
        o = (p / p.sum(-1, keepdims=True)) @ v
        x = x + o.transpose(0, 2, 1, 3).reshape(x.shape) @ w["o_proj"].T
        h = _norm(x, w["post_attention_layernorm"], config["rms_norm_eps"])
        gate = h @ w["gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up_proj"].T)) @ w["down_proj"].T
    return _norm(x, weights["model.norm.weight"], config["rms_norm_eps"])


def random_weights(config, seed, gain=1.5):
    """Return float32 weights, wide enough (gain / sqrt(fan in)) that a swapped pair is plain to see."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(0, gain * shape[-1] ** -0.5, shape) if len(shape) > 1 else rng.normal(1, 0.2, shape)).astype("f4")
        for name, shape in shapes(config).items()
    }


def read_config(folder):
    """Return the config.json of a checkpoint folder."""
    return json.loads((Path(folder) / "config.json").read_text())


def ensure_checkpoint(folder):
    """Make model.npz beside config.json if it is absent: random layers, the output layer fitted to the task.

    The fit (ridge regression on all hundred sums) gives a model that is right often enough for rewards to vary.
    """
    folder = Path(folder)
    config, target = read_config(folder), folder / "model.npz"
    if target.exists():
        return
    weights = random_weights(config, config["seed"])
    a, b = np.divmod(np.arange(100), 10)
    rows = np.stack([a, np.full_like(a, arithmetic.PLUS), b, np.full_like(a, arithmetic.EQUALS), a + b], 1)
    states = hidden_states(config, weights, rows)[:, 3:].reshape(-1, config["hidden_size"]).astype(float)
    wanted = np.eye(config["vocab_size"])[np.stack([a + b, np.full_like(a, arithmetic.END)], 1).reshape(-1)]
    gram = states.T @ states + config["ridge"] * np.eye(config["hidden_size"])
    weights["lm_head.weight"] = (config["sharpness"] * np.linalg.solve(gram, states.T @ wanted).T).astype("f4")
    partial = folder / f".model.{os.getpid()}.npz"
    np.savez(partial, **weights)
    os.replace(partial, target)
