"""CPU answers to what NeMo-RL, Megatron-Bridge and Megatron-Core ask of a GPU machine.

Protocol: `install(mode)` is called once per interpreter by sitecustomize. It registers actions that run right after the
named module was imported; no file of the upstream projects or of transformers is changed, and no Hugging Face code is
used on the Megatron side. A patch that cannot be applied ends the interpreter with a traceback: half a set of patches
would give results that mean nothing.
"""

from __future__ import annotations

from . import after_import, python_names, transformer_engine

# module whose import triggers the action -> "module of this package:function", called with the imported module
_RUN = {
    "torch": "e2e_cpu.torch_patches:apply",
    "pynvml": "e2e_cpu.nvml:apply",
    "megatron.core.extensions.transformer_engine": "e2e_cpu.megatron_layers:apply_extension",
    "megatron.core.models.gpt.gpt_layer_specs": "e2e_cpu.megatron_layers:apply",
    "megatron.core.transformer.transformer_block": "e2e_cpu.megatron_layers:apply_block",
    "megatron.core.transformer.multi_latent_attention": "e2e_cpu.megatron_layers:apply_mla",
    "megatron.core.transformer.moe.moe_utils": "e2e_cpu.megatron_experts:apply_moe",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": "e2e_cpu.megatron_layers:apply_yarn",
    "megatron.core.inference.contexts.fused_kv_append_kernel": "e2e_cpu.inference:drop_append_kernel",
}


def install(mode: str) -> None:
    """Register the patches of `mode` ("import" or "run"); ValueError for another word."""
    if mode not in {"import", "run"}:
        msg = f"E2E_CPU={mode!r}: expected 'import' or 'run'"
        raise ValueError(msg)
    python_names.apply()
    transformer_engine.install()
    if mode == "run":
        after_import.register(_RUN)
