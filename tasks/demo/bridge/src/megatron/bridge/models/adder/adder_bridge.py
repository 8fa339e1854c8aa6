"""The mappings of the adder family."""

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import DirectMapping, GatedMLPMapping, QKVMapping

HF = "model.layers.*."
CORE = "decoder.layers.*."


class AdderBridge(MegatronModelBridge):
    """Names of `AdderForCausalLM` against names of the Core's GPT."""

    def mapping_registry(self):
        return [
            DirectMapping("embedding.word_embeddings.weight", weight="model.embed_tokens.weight"),
            DirectMapping(CORE + "self_attention.linear_qkv.layer_norm_weight", weight=HF + "input_layernorm.weight"),
            QKVMapping(
                CORE + "self_attention.linear_qkv.weight",
                q=HF + "self_attn.q_proj.weight",
                k=HF + "self_attn.k_proj.weight",
                v=HF + "self_attn.v_proj.weight",
            ),
            DirectMapping(CORE + "self_attention.linear_proj.weight", weight=HF + "self_attn.o_proj.weight"),
            DirectMapping(CORE + "mlp.linear_fc1.layer_norm_weight", weight=HF + "post_attention_layernorm.weight"),
            GatedMLPMapping(CORE + "mlp.linear_fc1.weight", gate=HF + "mlp.gate_proj.weight", up=HF + "mlp.up_proj.weight"),
            DirectMapping(CORE + "mlp.linear_fc2.weight", weight=HF + "mlp.down_proj.weight"),
            DirectMapping("decoder.final_layernorm.weight", weight="model.norm.weight"),
            DirectMapping("output_layer.weight", weight="lm_head.weight"),
        ]
