"""Plain-torch layers under the names by which Megatron-Core and Bridge know Transformer Engine's.

Core wraps Transformer Engine in megatron/core/extensions/transformer_engine.py; right after its import the wrappers get
the classes below, and the GPT layer spec gets a provider of them. Names of classes and parameters are Core's
(`TEColumnParallelLinear`, `linear_qkv.layer_norm_weight`, `experts.linear_fc1.weight0`), because these are what
Bridge's mappings and adapters look at: they are exercised as on a GPU. The mathematics is Core's own (its
parallel linear layers and DotProductAttention) and torch's, nothing of Hugging Face. What these layers do not do is
refused when a model is built. `HAVE_TE` stays False: Core takes its own paths everywhere else.
"""

from __future__ import annotations

import functools
from typing import Any

MODE = "{}={!r} is not answered on a CPU"


def refuse(**what: Any) -> None:
    """Raise NotImplementedError that names what is asked for."""
    raise NotImplementedError(", ".join(MODE.format(name, value) for name, value in what.items()))


def apply_extension(module: Any) -> None:
    """Put the plain layers into megatron.core.extensions.transformer_engine; AttributeError where a name is gone."""
    from . import megatron_attention, megatron_experts

    made = [*_linear_layers(), megatron_attention.layer(), *megatron_experts.layers(), _norm()]
    for layer in made:
        getattr(module, layer.__name__)
        setattr(module, layer.__name__, layer)


def apply(module: Any) -> None:
    """Give `gpt_layer_specs` the plain layers as TESpecProvider and TENorm."""
    from functools import partial

    from megatron.core.extensions import transformer_engine as te
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP

    class PlainSpecProvider(LocalSpecProvider):  # type: ignore[misc]
        def linear(self) -> type:
            return te.TELinear  # type: ignore[no-any-return]

        def column_parallel_linear(self) -> type:
            return te.TEColumnParallelLinear  # type: ignore[no-any-return]

        def row_parallel_linear(self) -> type:
            return te.TERowParallelLinear  # type: ignore[no-any-return]

        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return te.TELayerNormColumnParallelLinear  # type: ignore[no-any-return]

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
            return te.TENorm  # type: ignore[no-any-return]

        def core_attention(self) -> type:
            return te.TEDotProductAttention  # type: ignore[no-any-return]

        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
            if moe_use_grouped_gemm:
                grouped = GroupedMLPSubmodules(
                    linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear
                )
                return partial(TEGroupedMLP, submodules=grouped)
            single = MLPSubmodules(linear_fc1=te.TEColumnParallelLinear, linear_fc2=te.TERowParallelLinear)
            return partial(SequentialMLP, submodules=single)

    module.TESpecProvider = PlainSpecProvider
    module.TENorm = te.TENorm


def apply_block(module: Any) -> None:
    """Give the final norm of `transformer_block` Transformer Engine's name, too."""
    from megatron.core.extensions import transformer_engine as te

    if not hasattr(module, "LayerNormImpl"):
        msg = f"{module.__name__} has no LayerNormImpl"
        raise AttributeError(msg)
    module.LayerNormImpl = te.TENorm


def apply_mla(module: Any) -> None:
    """Let multi-latent attention know the linear layers, by which it decides how its down projections are built."""
    from megatron.core.extensions import transformer_engine as te

    for name in ("TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear"):
        getattr(module, name)
        setattr(module, name, getattr(te, name))


def apply_yarn(module: Any) -> None:
    """Let YaRN's table be made on the CPU, Core's own option: attention asks for the current device, a number."""
    ordinary = module.YarnRotaryEmbedding.__init__

    @functools.wraps(ordinary)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("use_cpu_initialization", True)
        ordinary(self, *args, **kwargs)

    module.YarnRotaryEmbedding.__init__ = on_cpu


def normalise(x: Any, weight: Any, bias: Any, eps: float, *, zero_centred: bool) -> Any:
    """Return RMSNorm of `x` over its last axis (LayerNorm where there is a bias); zero centred: weight + 1."""
    from torch.nn import functional

    scale = weight + 1 if zero_centred else weight
    if bias is None:
        return functional.rms_norm(x, (x.shape[-1],), scale, eps)
    return functional.layer_norm(x, (x.shape[-1],), scale, bias, eps)


def _norm() -> type:
    """Return the maker of norms that Core calls TENorm; the modules are called as Transformer Engine's are."""
    import torch

    class RMSNorm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
            super().__init__()
            self.eps, self.zero_centred = eps, config.layernorm_zero_centered_gamma
            first = torch.zeros if self.zero_centred else torch.ones
            self.weight = torch.nn.Parameter(first(hidden_size, dtype=config.params_dtype))
            self.bias: Any = None
            self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, x: Any) -> Any:
            return normalise(x, self.weight, self.bias, self.eps, zero_centred=self.zero_centred)

    class LayerNorm(RMSNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
            super().__init__(config, hidden_size, eps)
            del self.bias
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel

    class TENorm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> Any:
            if has_residual and config.fused_residual_rmsnorm:
                refuse(fused_residual_rmsnorm=True)
            kinds = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
            if config.normalization not in kinds:
                refuse(normalization=config.normalization)
            return kinds[config.normalization](config, hidden_size, eps)

    return TENorm


def _linear_layers() -> tuple[type, ...]:
    """Return the linear layers: replicated, column parallel, row parallel, norm and column parallel."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from torch.nn import functional

    class TELinear(torch.nn.Module):
        """The same on every rank, as Core asks of it in MLA's down projections."""

        def __init__(
            self, input_size: int, output_size: int, *, parallel_mode: str | None, config: Any, init_method: Any,
            bias: bool, skip_bias_add: bool, **kwargs: Any,
        ) -> None:  # fmt: skip
            super().__init__()
            if parallel_mode != "duplicated" or skip_bias_add:
                refuse(parallel_mode=parallel_mode, skip_bias_add=skip_bias_add)
            self.config, self.parallel_mode = config, parallel_mode
            self.in_features, self.out_features = input_size, output_size
            self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
            if config.perform_initialization:
                init_method(self.weight)
            for parameter in self.parameters():
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, x: Any) -> Any:
            return functional.linear(x, self.weight, self.bias), None

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, None, sharded_offsets)

    class TEColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, *args, **kwargs)
            self.in_features, self.out_features = input_size, self.output_size_per_partition

    class TERowParallelLinear(RowParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, *args, **kwargs)
            self.in_features, self.out_features = self.input_size_per_partition, output_size

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        """Norm over the input, then the linear layer; Transformer Engine fuses the two."""

        return_layernorm_output = return_layernorm_output_gathered = False  # set by Bridge's LoRA

        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.in_features, self.out_features = input_size, self.output_size_per_partition
            self._eps, self._zero_centred = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
            if config.normalization not in {"RMSNorm", "LayerNorm"}:
                refuse(normalization=config.normalization)
            first = torch.zeros if self._zero_centred else torch.ones
            self.layer_norm_weight = torch.nn.Parameter(first(input_size, dtype=config.params_dtype))
            self.layer_norm_bias = None
            if config.normalization == "LayerNorm":
                self.layer_norm_bias = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))
            # with sequence parallelism each rank norms its part of the sequence: Core then sums the gradients
            for parameter in self.parameters(recurse=False):
                if parameter is not self.weight and parameter is not self.bias:
                    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, input_: Any, *args: Any, **kwargs: Any) -> Any:
            normed = normalise(
                input_, self.layer_norm_weight, self.layer_norm_bias, self._eps, zero_centred=self._zero_centred
            )
            out, bias = super().forward(normed, *args, **kwargs)
            if not self.return_layernorm_output:
                return out, bias
            if self.return_layernorm_output_gathered:
                refuse(return_layernorm_output_gathered=True)
            return (out, normed), bias

    return TELinear, TEColumnParallelLinear, TERowParallelLinear, TELayerNormColumnParallelLinear
