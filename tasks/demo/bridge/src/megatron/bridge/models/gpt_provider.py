"""From the numbers of a model to a Megatron model."""

from dataclasses import dataclass

from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.core.models.gpt import GPTModel, TransformerConfig


@dataclass
class GPTModelProvider(ModelProviderMixin):
    """The shape of a decoder; `provide` checks it and builds the model."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    vocab_size: int
    layernorm_epsilon: float = 1e-6
    seed: int = 0

    def finalize(self):
        """Check the shape and return the configuration of the Core; ValueError where heads do not divide evenly."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(f"{self.num_attention_heads} heads do not fill {self.num_query_groups} query groups")
        head_dim = self.hidden_size // self.num_attention_heads
        return TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            ffn_hidden_size=self.ffn_hidden_size,
            vocab_size=self.vocab_size,
            layernorm_epsilon=self.layernorm_epsilon,
            softmax_scale=head_dim**-0.5,
        )

    def provide(self):
        """Return a model with random weights; a checkpoint replaces them."""
        return GPTModel(self.finalize(), seed=self.seed)
