"""Walks a family's mappings: import of a checkpoint into a model, export of a model's weights under Hugging Face names."""

import numpy as np

from megatron.bridge.models.gpt_provider import GPTModelProvider


class MegatronModelBridge:
    """Base of a model family: `mapping_registry()` lists its mappings, `provider_bridge()` reads its config.json."""

    def mapping_registry(self):
        """Return the mappings, patterns included."""
        raise NotImplementedError

    def provider_bridge(self, hf_config):
        """Return the provider for a Hugging Face configuration."""
        return GPTModelProvider(
            num_layers=hf_config["num_hidden_layers"],
            hidden_size=hf_config["hidden_size"],
            num_attention_heads=hf_config["num_attention_heads"],
            num_query_groups=hf_config["num_key_value_heads"],
            ffn_hidden_size=hf_config["intermediate_size"],
            vocab_size=hf_config["vocab_size"],
            layernorm_epsilon=hf_config["rms_norm_eps"],
        )

    def get_conversion_tasks(self, model):
        """Return one resolved mapping per parameter of the model, in the model's order; warn about those without."""
        known = {}
        for mapping in self.mapping_registry():
            for layer in range(model.config.num_layers if "*" in mapping.megatron else 1):
                resolved = mapping.resolve(layer)
                known[resolved.megatron] = resolved
        for name in model.parameters:
            if name not in known:
                print(f"WARNING: No mapping found for megatron_param {name}")
        return [known[name] for name in model.parameters if name in known]

    def load_weights_hf_to_megatron(self, hf_weights, model):
        """Fill the model in place; ValueError where a shape does not fit, a warning where a tensor is absent."""
        for task in self.get_conversion_tasks(model):
            missing = [name for name in task.hf.values() if name not in hf_weights]
            if missing:
                print(f"WARNING: Can't find {missing} in hf_keys")
                continue
            tensors = {role: np.asarray(hf_weights[name], np.float64) for role, name in task.hf.items()}
            weight, target = task.hf_to_megatron(tensors, model.config), model.parameters[task.megatron]
            if weight.shape != target.shape:
                raise ValueError(
                    f"Shape mismatch for megatron param {task.megatron}: expected {target.shape}, got {weight.shape}"
                )
            target[...] = weight

    def stream_weights_megatron_to_hf(self, model):
        """Yield (Hugging Face name, float32 tensor) for every weight, an adapter merged in."""
        weights = model.weights()
        for task in self.get_conversion_tasks(model):
            tensors = task.megatron_to_hf(weights[task.megatron], model.config)
            for role, name in task.hf.items():
                yield name, np.ascontiguousarray(tensors[role], np.float32)
