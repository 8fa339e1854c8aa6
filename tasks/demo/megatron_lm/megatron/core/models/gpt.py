"""A decoder in Megatron's layout, forward and backward by hand.

linear_qkv holds, for each query group in turn, the rows of its queries, then its key, then its value.
linear_fc1 holds the gate's rows, then the up-projection's.
Shapes: B samples, T tokens, G groups, M queries a group, D head width.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TransformerConfig:
    """The numbers that fix the shapes; `softmax_scale` multiplies the attention scores."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    vocab_size: int
    softmax_scale: float
    layernorm_epsilon: float = 1e-6

    @property
    def head_dim(self):
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


def parameter_shapes(config):
    """Return {name: shape} of every parameter, in the order of the forward pass."""
    width, ffn = config.hidden_size, config.ffn_hidden_size
    rows = (config.num_attention_heads + 2 * config.num_query_groups) * config.head_dim
    shapes = {"embedding.word_embeddings.weight": (config.vocab_size, width)}
    for i in range(config.num_layers):
        layer = f"decoder.layers.{i}."
        shapes[layer + "self_attention.linear_qkv.layer_norm_weight"] = (width,)
        shapes[layer + "self_attention.linear_qkv.weight"] = (rows, width)
        shapes[layer + "self_attention.linear_proj.weight"] = (width, width)
        shapes[layer + "mlp.linear_fc1.layer_norm_weight"] = (width,)
        shapes[layer + "mlp.linear_fc1.weight"] = (2 * ffn, width)
        shapes[layer + "mlp.linear_fc2.weight"] = (width, ffn)
    return {**shapes, "decoder.final_layernorm.weight": (width,), "output_layer.weight": (config.vocab_size, width)}


def _norm(x, weight, epsilon):
    inverse = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return x * inverse * weight, (x * inverse, inverse)


def _norm_backward(grad, weight, saved):
    unit, inverse = saved
    inner = grad * weight
    return inverse * (inner - unit * (inner * unit).mean(-1, keepdims=True)), (grad * unit).sum((0, 1))


def _weight_grad(grad, x):
    return grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])


class GPTModel:
    """Parameters by name, a forward pass that keeps what backward needs, and an optional low-rank adapter."""

    def __init__(self, config, seed=0):
        self.config = config
        rng = np.random.default_rng(seed)
        self.parameters = {n: rng.normal(0.0, 0.02, s) for n, s in parameter_shapes(config).items()}
        self.adapter = None

    def trainable(self):
        """Return the arrays that an optimizer may change in place."""
        return self.adapter.parameters if self.adapter else self.parameters

    def weights(self):
        """Return the effective weights: the base, with the adapter added where there is one."""
        return self.adapter.merged(self.parameters) if self.adapter else self.parameters

    def gradients(self, full):
        """Turn gradients of the effective weights into gradients of the trainable arrays."""
        return self.adapter.gradients(full) if self.adapter else full

    def _split(self, qkv):
        c = self.config
        per_group = c.num_attention_heads // c.num_query_groups
        parts = qkv.reshape(*qkv.shape[:2], c.num_query_groups, per_group + 2, c.head_dim)
        return parts[..., :per_group, :], parts[..., per_group, :], parts[..., per_group + 1, :]

    def forward(self, tokens, weights=None):
        """Return logits [B, T, V] for tokens [B, T], and the tape for `backward`."""
        c, w = self.config, weights if weights is not None else self.weights()
        x, tape = w["embedding.word_embeddings.weight"][tokens], []
        hidden = np.triu(np.ones((tokens.shape[1],) * 2, bool), 1)
        for i in range(c.num_layers):
            att, mlp = f"decoder.layers.{i}.self_attention.", f"decoder.layers.{i}.mlp."
            h, saved1 = _norm(x, w[att + "linear_qkv.layer_norm_weight"], c.layernorm_epsilon)
            q, k, v = self._split(h @ w[att + "linear_qkv.weight"].T)
            scores = np.einsum("btgmd,bsgd->bgmts", q, k) * c.softmax_scale
            scores = np.where(hidden, -np.inf, scores)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            o = np.einsum("bgmts,bsgd->btgmd", p, v).reshape(x.shape)
            x = x + o @ w[att + "linear_proj.weight"].T
            h2, saved2 = _norm(x, w[mlp + "linear_fc1.layer_norm_weight"], c.layernorm_epsilon)
            gate, up = np.split(h2 @ w[mlp + "linear_fc1.weight"].T, 2, axis=-1)
            sigma = 1.0 / (1.0 + np.exp(-gate))
            a = gate * sigma * up
            x = x + a @ w[mlp + "linear_fc2.weight"].T
            tape.append((h, saved1, q, k, v, p, o, h2, saved2, gate, up, sigma, a))
        last, saved = _norm(x, w["decoder.final_layernorm.weight"], c.layernorm_epsilon)
        return last @ w["output_layer.weight"].T, (tokens, w, tape, last, saved)

    def backward(self, grad, tape):
        """Return the gradients of the effective weights for d loss / d logits [B, T, V]."""
        tokens, w, layers, last, saved = tape
        out = {"output_layer.weight": _weight_grad(grad, last)}
        dx, out["decoder.final_layernorm.weight"] = _norm_backward(
            grad @ w["output_layer.weight"], w["decoder.final_layernorm.weight"], saved
        )
        for i in reversed(range(self.config.num_layers)):
            att, mlp = f"decoder.layers.{i}.self_attention.", f"decoder.layers.{i}.mlp."
            h, saved1, q, k, v, p, o, h2, saved2, gate, up, sigma, a = layers[i]
            out[mlp + "linear_fc2.weight"] = _weight_grad(dx, a)
            da = dx @ w[mlp + "linear_fc2.weight"]
            dgate = da * up * (sigma + gate * sigma * (1.0 - sigma))
            dfc1 = np.concatenate([dgate, da * gate * sigma], -1)
            out[mlp + "linear_fc1.weight"] = _weight_grad(dfc1, h2)
            dh, out[mlp + "linear_fc1.layer_norm_weight"] = _norm_backward(
                dfc1 @ w[mlp + "linear_fc1.weight"], w[mlp + "linear_fc1.layer_norm_weight"], saved2
            )
            dx = dx + dh
            out[att + "linear_proj.weight"] = _weight_grad(dx, o)
            do = (dx @ w[att + "linear_proj.weight"]).reshape(q.shape)
            dp = np.einsum("btgmd,bsgd->bgmts", do, v)
            ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * self.config.softmax_scale
            dq, dk = np.einsum("bgmts,bsgd->btgmd", ds, k), np.einsum("bgmts,btgmd->bsgd", ds, q)
            dv = np.einsum("bgmts,btgmd->bsgd", p, do)
            dqkv = np.concatenate([dq, dk[..., None, :], dv[..., None, :]], -2).reshape(*h.shape[:2], -1)
            out[att + "linear_qkv.weight"] = _weight_grad(dqkv, h)
            dh, out[att + "linear_qkv.layer_norm_weight"] = _norm_backward(
                dqkv @ w[att + "linear_qkv.weight"], w[att + "linear_qkv.layer_norm_weight"], saved1
            )
            dx = dx + dh
        out["embedding.word_embeddings.weight"] = embedding = np.zeros_like(w["embedding.word_embeddings.weight"])
        np.add.at(embedding, tokens, dx)
        return out
