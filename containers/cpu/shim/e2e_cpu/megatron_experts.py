"""Grouped linear layers of experts, one weight an expert: `weight0`, `weight1`, ... as Transformer Engine has them."""

from __future__ import annotations

from typing import Any

_FUSED = (
    "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)  # fmt: skip


def apply_moe(module: Any) -> None:
    """Let a provider that wants fused permutation be built: NeMo-RL converts with it and trains without it.

    None of the fused functions is done here; Core refuses to call them without Transformer Engine.
    """
    for name in _FUSED:
        if getattr(module, name) is None:
            setattr(module, name, _refused(name))


def _refused(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        msg = f"{name} is not answered on a CPU"
        raise NotImplementedError(msg)

    return refuse


def layers() -> tuple[type, type]:
    """Return TEColumnParallelGroupedLinear and TERowParallelGroupedLinear."""
    import torch
    from torch.nn import functional

    class Grouped(torch.nn.Module):
        axis: int  # of a weight, that tensor parallelism cuts

        def __init__(
            self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool,
            skip_bias_add: bool, is_expert: bool, tp_comm_buffer_name: str | None = None, pg_collection: Any = None,
            name: str | None = None,
        ) -> None:  # fmt: skip
            super().__init__()
            if not is_expert or pg_collection is None:
                msg = "grouped linear layers are answered on a CPU for experts only"
                raise NotImplementedError(msg)
            tp_size = pg_collection.expt_tp.size()
            if self.axis:  # the token dispatcher gathers and adds up, as with Core's wrapper
                input_size //= tp_size
            else:
                output_size //= tp_size
            self.config, self.num_gemms, self.use_bias = config, num_gemms, bias
            self.te_return_bias = skip_bias_add and bias
            self.in_features, self.out_features = input_size, output_size
            self.explicit_expert_comm = tp_size > 1 or config.expert_model_parallel_size > 1
            self.parallel_mode = None if self.explicit_expert_comm else ("column", "row")[self.axis]
            self._tp_group, self._expt_dp = pg_collection.expt_tp, pg_collection.expt_dp
            for number in range(num_gemms):
                weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
                if config.perform_initialization:
                    init_method(weight)
                setattr(self, f"weight{number}", weight)
                if bias:
                    zeros = torch.zeros(output_size, dtype=config.params_dtype)
                    setattr(self, f"bias{number}", torch.nn.Parameter(zeros))
            for name_, parameter in self.named_parameters():
                parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
                parameter.partition_dim = self.axis  # type: ignore[attr-defined]
                parameter.tensor_model_parallel = name_.startswith("weight") or not self.axis  # type: ignore[attr-defined]

        def forward(self, x: Any, m_splits: Any) -> Any:
            biases = [getattr(self, f"bias{number}") for number in range(self.num_gemms)] if self.use_bias else None
            added = biases if biases and not self.te_return_bias else [None] * self.num_gemms
            parts = x.split([int(size) for size in m_splits])
            out = [functional.linear(part, getattr(self, f"weight{n}"), added[n]) for n, part in enumerate(parts)]
            return torch.cat(out), biases if self.te_return_bias else None

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            """Return the experts' tensors under the keys of Core's wrapper: one axis of experts before the weight's."""
            from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
            from megatron.core.parallel_state import (
                get_expert_model_parallel_rank,
                get_expert_model_parallel_world_size,
            )
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            if (metadata or {}).get("singleton_local_shards"):
                msg = "singleton_local_shards is not answered on a CPU"
                raise NotImplementedError(msg)
            total = get_expert_model_parallel_world_size() * self.num_gemms
            first, kept = get_expert_model_parallel_rank() * self.num_gemms, {}
            for number in range(self.num_gemms):
                names = ["weight", "bias"] if self.use_bias else ["weight"]
                offsets = (*sharded_offsets, (len(sharded_offsets), first + number, total))
                axes = {f"{number}.weight": self.axis, **({} if self.axis else {f"{number}.bias": 0})}
                part = make_sharded_tensors_for_checkpoint(
                    {f"{number}.{name}": getattr(self, f"{name}{number}") for name in names},
                    "", axes, offsets, tp_group=self._tp_group, dp_cp_group=(metadata or {})["dp_cp_group"],
                )  # fmt: skip
                replace_prefix_for_sharding(part, f"{number}.", prefix)
                kept.update({f"{prefix}{name}{number}": part[f"{number}.{name}"] for name in names})
            for tensor in kept.values():  # each rank has experts of its own: who writes is decided among their copies
                tensor.replica_id = (*tensor.replica_id[:2], self._expt_dp.rank())
            return kept

    class TEColumnParallelGroupedLinear(Grouped):
        axis = 0

    class TERowParallelGroupedLinear(Grouped):
        axis = 1

    return TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
