"""What is measured of one family: each section in a process of its own (or several, one a rank).

Gradients are exported by the Bridge itself, from a model whose weights were replaced by them: export only cuts and
renames, and so an export that copied the checkpoint would be seen. The loss is cross entropy over the true vocabulary.
Not measured: scaled rotary embeddings, context parallelism, Transformer Engine itself, bf16.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from proof.compare import check, close, difference, equal, ratio
from proof.families import BATCH, LENGTH, VOCABULARY
from proof.reference import loss_of, tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANK, ALPHA = 4, 12  # LoRA's, a scale that is not 1


class Run:
    """One rank of one section: where it is, and what its family's reference kept."""

    def __init__(self, family: str, reference: Path, scratch: Path, rank: int, sizes: dict[str, int]) -> None:
        import torch
        from safetensors.torch import load_file

        self.family, self.model, self.scratch, self.rank, self.sizes = family, reference / "model", scratch, rank, sizes
        self.kept = torch.load(reference / "reference.pt", weights_only=True)
        self.provider: dict[str, str] = {}
        self.checkpoint: dict[str, Any] = load_file(self.model / "model.safetensors")
        self.gradients: dict[str, Any] = load_file(reference / "gradients" / "model.safetensors")

    def build(self, *, load_weights: bool = True, hook: Any = None) -> tuple[Any, list[Any]]:
        """Return the AutoBridge of the checkpoint and the Megatron model that it filled, in float32."""
        import torch
        from megatron.bridge import AutoBridge
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        bridge = AutoBridge.from_hf_pretrained(os.fspath(self.model), trust_remote_code=False, dtype=torch.float32)
        provider = bridge.to_megatron_provider(load_weights=load_weights)
        provider.use_cpu_initialization = True
        provider.perform_initialization = False
        provider.bf16 = provider.fp16 = False
        provider.params_dtype = provider.autocast_dtype = torch.float32
        # kernels of CUDA and Apex; none changes what is computed
        provider.persist_layer_norm = False
        for fusion in ("gradient_accumulation", "masked_softmax", "bias_dropout", "bias_activation"):
            setattr(provider, f"{fusion}_fusion", False)
        provider.apply_rope_fusion = False
        provider.moe_permute_fusion = provider.moe_router_fusion = False
        provider.moe_aux_loss_coeff = 0.0  # a term of its own in the gradients, not the reference's
        provider.sequence_parallel = self.sizes.get("tensor", 1) > 1 and bool(provider.num_moe_experts)  # Core wants it
        for name, size in self.sizes.items():
            setattr(provider, f"{name}_model_parallel_size", size)
        self.provider = {
            name: repr(value)[:200] for name, value in vars(provider).items() if " at 0x" not in repr(value)
        }
        provider.finalize()
        if not torch.distributed.is_initialized():
            world = max(self.sizes.values(), default=1)
            store = torch.distributed.FileStore(os.fspath(self.scratch / "store"), world)
            torch.distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=world)
            parallel_state.initialize_model_parallel(
                **{f"{name}_model_parallel_size": size for name, size in self.sizes.items()}
            )
            model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        if hook is not None:
            provider.register_pre_wrap_hook(hook)
        return bridge, provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, bf16=False, fp16=False
        )


def exported(bridge: Any, model: list[Any], **how: Any) -> dict[str, Any]:
    """Return a copy of every tensor that the Bridge exports, by Hugging Face name."""
    return {
        name: weight.detach().clone()
        for name, weight in bridge.export_hf_weights(model, cpu=True, show_progress=False, **how)
    }


def logits_of(model: list[Any]) -> Any:
    """Return the logits of the true vocabulary, (batch, length, VOCABULARY), put together where ranks have parts."""
    import torch
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    positions = torch.arange(LENGTH)[None].expand(BATCH, -1)
    logits = model[0](input_ids=tokens()[0], position_ids=positions, attention_mask=None)
    return gather_from_tensor_model_parallel_region(logits)[..., :VOCABULARY]


def logits_check(name: str, logits: Any, expected: Any) -> dict[str, Any]:
    """Return the check of the largest difference, relative to the largest logit."""
    apart, scale = difference(logits.detach(), expected), expected.abs().max().item()
    return check(name, ratio(apart, scale), f"largest difference {apart:.3g} of {scale:.3g}")


def base(run: Run) -> list[dict[str, Any]]:
    """Export, logits, loss and gradients of one process."""
    import torch

    kept = run.kept
    checks = [check("rotary table", kept["rotary"], "inv_freq of the reference against its definition")]
    bridge, model = run.build()
    checks += equal("export", exported(bridge, model), run.checkpoint)
    model[0].train()  # dropout that the family does not have would be seen
    logits = logits_of(model)
    checks.append(logits_check("logits", logits, kept["logits"]))
    loss = loss_of(logits, tokens()[1])
    here, there = loss.item(), kept["loss"]
    checks.append(check("loss", ratio(abs(here - there), abs(there)), f"{here:.6f}, reference {there:.6f}"))
    loss.backward()
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    checks.append(close("gradients", exported(bridge, model), run.gradients, "gradients"))
    return checks


def save(run: Run) -> list[dict[str, Any]]:
    """Save as a Megatron checkpoint through the Bridge, load it again, and export: equal to the bit."""
    bridge, model = run.build()
    bridge.save_megatron_model(model, run.scratch / "saved")
    again = bridge.load_megatron_model(run.scratch / "saved", wrap_with_ddp=False, use_cpu_initialization=True)
    return equal("reload", exported(bridge, again), run.checkpoint)


def lora(section: str) -> Callable[[Run], list[dict[str, Any]]]:
    """Return the section of adapters: their export explains the merged export, which computes the same without them."""
    return lambda run: _lora(section, run)


def _lora(section: str, run: Run) -> list[dict[str, Any]]:
    import torch
    from megatron.bridge.peft.lora import LoRA

    made = LoRA(dim=RANK, alpha=ALPHA, dropout=0.0)
    bridge, model = run.build(hook=lambda chunks: made(chunks, training=True))
    shared, own = (torch.Generator().manual_seed(seed) for seed in (3, 4 + run.rank))
    adapters = 0
    with torch.no_grad():
        for name, weight in model[0].named_parameters():
            if ".adapter." in name:  # ranks have different parts of what is split, and the same of what is not
                adapters += 1
                source = own if getattr(weight, "tensor_model_parallel", False) else shared
                weight.copy_(torch.randn(weight.shape, generator=source) / weight.shape[-1] ** 0.5)
        model[0].eval()
        logits = logits_of(model)
    merged = exported(bridge, model, merge_adapter_weights=True)
    parts = dict(bridge.export_adapter_weights(model, cpu=True, show_progress=False))
    explained = dict(run.checkpoint)
    for name, down in parts.items():
        if name.endswith(".lora_A.weight"):
            base_name = name.removesuffix(".lora_A.weight").removeprefix("base_model.model.") + ".weight"
            up = parts[name.replace(".lora_A.", ".lora_B.")]
            explained[base_name] = explained[base_name] + ALPHA / RANK * up.double() @ down.double()
    touched = sum(not torch.equal(explained[name], weight) for name, weight in run.checkpoint.items())
    checks = [
        check(
            f"{section} untouched",
            0 if touched and adapters else 1,
            f"{touched} weights changed by {adapters} adapters",
        ),
        close(f"{section} merge", merged, explained, "weights of the merged export against adapters' export"),
    ]
    for parameter in model[0].parameters():
        parameter.requires_grad_(requires_grad=False)
    bridge, plain = run.build(load_weights=False)
    state = _StateOf(bridge, merged)
    bridge.load_hf_weights(plain, hf_path=state.write(run.scratch / f"merged{run.rank}", run.model))
    plain[0].eval()
    with torch.no_grad():
        checks.append(logits_check(f"{section} logits", logits_of(plain), logits))
    return checks


class _StateOf:
    """A checkpoint folder with other weights and the same configuration."""

    def __init__(self, bridge: Any, weights: dict[str, Any]) -> None:
        self.bridge, self.weights = bridge, weights

    def write(self, folder: Path, model: Path) -> str:
        """Write it and return its path."""
        import shutil

        from safetensors.torch import save_file

        folder.mkdir()
        for path in model.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, folder)
        save_file({name: weight.contiguous().clone() for name, weight in self.weights.items()},
                  folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
        return os.fspath(folder)


def parallel(name: str) -> Callable[[Run], list[dict[str, Any]]]:
    """Return the section of two ranks: its export is the checkpoint to the bit, and TP and EP compute the logits."""

    def section(run: Run) -> list[dict[str, Any]]:
        import torch

        bridge, model = run.build()
        checks = equal(name, exported(bridge, model), run.checkpoint)
        if not name.startswith("PP"):
            with torch.no_grad():
                checks.append(logits_check(f"{name} logits", logits_of(model), run.kept["logits"]))
        return checks

    return section


# section -> (what it does, sizes of parallelism)
SECTIONS: dict[str, tuple[Callable[[Run], list[dict[str, Any]]], dict[str, int]]] = {
    "base": (base, {}),
    "lora": (lora("lora"), {}),
    "save": (save, {}),
    "TP=2": (parallel("TP=2"), {"tensor": 2}),
    "PP=2": (parallel("PP=2"), {"pipeline": 2}),
    "EP=2": (parallel("EP=2"), {"expert": 2}),
    "lora TP=2": (lora("lora TP=2"), {"tensor": 2}),
    "lora EP=2": (lora("lora EP=2"), {"expert": 2}),
}
