"""Plain-torch layers where Megatron-Core's GPT layer spec wants Transformer Engine's.

Parameter names are Transformer Engine's (`linear_qkv.layer_norm_weight`, `linear_fc1.layer_norm_weight`), because
these are the names that Megatron-Bridge maps: the mappings are exercised as on a GPU. Class names are Transformer
Engine's too: Bridge's AutoMapping looks the parallelism of a weight up by `type(module).__name__`. The mathematics is
Core's own (ColumnParallelLinear, RowParallelLinear, DotProductAttention, WrappedTorchNorm) and torch's norms,
nothing of Hugging Face.
What these layers do not do is refused when a model is built.
"""

from __future__ import annotations

import itertools
from typing import Any


def apply(module: Any) -> None:
    """Give `gpt_layer_specs` the plain layers as TESpecProvider and TENorm."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    column, row, normed = _linear_layers()
    attention = _attention()

    class PlainSpecProvider(LocalSpecProvider):  # type: ignore[misc]
        def linear(self) -> type:
            return column

        def column_parallel_linear(self) -> type:
            return column

        def row_parallel_linear(self) -> type:
            return row

        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return normed

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
            norm: type = WrappedTorchNorm
            return norm

        def core_attention(self) -> type:
            return attention

    module.TESpecProvider = PlainSpecProvider
    module.TENorm = WrappedTorchNorm


def _linear_layers() -> tuple[type, type, type]:
    """Return (column parallel, row parallel, norm and column parallel) under Transformer Engine's names."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from torch.nn import functional

    class TEColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        pass

    class TERowParallelLinear(RowParallelLinear):  # type: ignore[misc]
        pass

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        """Norm over the input, then the linear layer; Transformer Engine fuses the two."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            if config.layernorm_zero_centered_gamma:
                msg = "layernorm_zero_centered_gamma is not answered on a CPU"
                raise NotImplementedError(msg)
            self._eps = config.layernorm_epsilon
            self._rms = config.normalization == "RMSNorm"
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
            if not self._rms:
                self.layer_norm_bias = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))
            # with sequence parallelism each rank norms its part of the sequence: Core then sums the gradients
            for parameter in self.parameters(recurse=False):
                if parameter is not self.weight and parameter is not self.bias:
                    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, input_: Any, *args: Any, **kwargs: Any) -> Any:
            width = (input_.shape[-1],)
            if self._rms:
                normed = functional.rms_norm(input_, width, self.layer_norm_weight, self._eps)
            else:
                normed = functional.layer_norm(input_, width, self.layer_norm_weight, self.layer_norm_bias, self._eps)
            return super().forward(normed, *args, **kwargs)

    return TEColumnParallelLinear, TERowParallelLinear, TELayerNormColumnParallelLinear


def _attention() -> type:
    """Return Core's DotProductAttention with packed sequences, which it refuses and Transformer Engine takes."""
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from torch.nn import functional

    class PlainDotProductAttention(DotProductAttention):  # type: ignore[misc]
        def forward(
            self,
            query: Any,
            key: Any,
            value: Any,
            attention_mask: Any = None,
            attn_mask_type: Any = None,
            attention_bias: Any = None,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> Any:
            """Unpacked: Core's. Packed: (tokens, heads, size), one causal block after another."""
            if packed_seq_params is None:
                return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, **kwargs)
            if attention_bias is not None or self.config.context_parallel_size > 1 or self.config.window_size:
                msg = "packed sequences with a bias, a window or context parallelism are not answered on a CPU"
                raise NotImplementedError(msg)
            bounds = packed_seq_params.cu_seqlens_q_padded
            if bounds is None:
                bounds = packed_seq_params.cu_seqlens_q
            groups = query.shape[1] // key.shape[1]
            out = torch.zeros_like(query)
            edges = bounds.tolist()
            for first, last in itertools.pairwise(edges):
                if last > first:
                    q, k, v = (t[first:last].transpose(0, 1).unsqueeze(0) for t in (query, key, value))
                    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
                    block = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
                    out[first:last] = block[0].transpose(0, 1)
            return out.reshape(out.shape[0], -1)

    return PlainDotProductAttention
