"""The tiny models: one recipe a family, with awkward sizes and a scale at which every nonlinearity matters.

No two sizes are equal, the vocabulary is no multiple of Core's padding, rotary base and epsilon are no defaults. The
scale is large, about 1.5/sqrt(fan in): with small weights swapped gate and up differ by 2e-5 and go unseen.
"""

from __future__ import annotations

from typing import Any

BATCH, LENGTH, LAYERS, VOCABULARY = 2, 24, 4, 334
ROTARY_BASE = 50021.0
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "rms_norm_eps": 3e-3,  # large enough that a provider which drops it is seen
    "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 52, "norm_topk_prob": True}
_SHARED: dict[str, Any] = {
    "num_key_value_heads": 6, "q_lora_rank": 40, "kv_lora_rank": 36, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 20, "head_dim": 8, "moe_intermediate_size": 52, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7,
}  # fmt: skip
# transformers gives the norms of MLA's low-rank parts 1e-6 whatever the configuration says
_MLA = {**_SHARED, "rms_norm_eps": 1e-6}
# family -> (configuration class, model class, sizes of its own); a head size of 20 makes heads wider than hidden
RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 20}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 20}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 20}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 20, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {
        "head_dim": 20, "tie_word_embeddings": True, "query_pre_attn_scalar": 17, "sliding_window": 9}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {
        "head_dim": 20, "tie_word_embeddings": True, "query_pre_attn_scalar": 17, "sliding_window": 9,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10007.0},
            "full_attention": {"rope_type": "default", "rope_theta": ROTARY_BASE}}}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {
        "norm_eps": 3e-3, "partial_rotary_factor": 0.5, "head_dim": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE, "partial_rotary_factor": 0.5}}),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {
        "head_dim": 20, "sliding_window": 9, "sliding_window_pattern": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_MOE, "head_dim": 20}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {
        **_MOE, "intermediate_size": 52, "num_key_value_heads": 6, "norm_topk_prob": False}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {
        "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 20, "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": ROTARY_BASE, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096}}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {
        **_SHARED, "head_dim": 20, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE, "partial_rotary_factor": 0.5}}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**_MLA, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_MLA, "n_group": 2, "topk_group": 1}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {**_MLA, "n_group": 1, "topk_group": 1}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_MOE, "head_dim": 20}),
    "ernie45_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", {**_MOE, "moe_num_experts": 6, "moe_k": 2}),
    "exaone_moe": ("ExaoneMoeConfig", "ExaoneMoeForCausalLM", {**_MOE, "head_dim": 20}),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {**_MOE, "num_local_experts": 6, "head_dim": 20}),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", {"head_dim": 20}),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", {"head_dim": 20}),
}  # fmt: skip
