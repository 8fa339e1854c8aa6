"""The entry point: finds the family by the architecture named in config.json."""

import json
from pathlib import Path

import numpy as np

from megatron.bridge.models.adder.adder_bridge import AdderBridge

FAMILIES = {"AdderForCausalLM": AdderBridge}


class AutoBridge:
    """A family's bridge together with one checkpoint folder (config.json, model.npz)."""

    def __init__(self, bridge, hf_config, folder):
        self.bridge, self.hf_config, self.folder = bridge, hf_config, folder

    @classmethod
    def from_hf_pretrained(cls, folder):
        """Open a checkpoint folder; ValueError for an architecture that no family claims."""
        folder = Path(folder)
        hf_config = json.loads((folder / "config.json").read_text())
        architecture = hf_config["architectures"][0]
        if architecture not in FAMILIES:
            raise ValueError(f"Model architecture '{architecture}' is not yet supported; known: {sorted(FAMILIES)}")
        return cls(FAMILIES[architecture](), hf_config, folder)

    def to_megatron_provider(self):
        """Return the provider that builds this checkpoint's model."""
        return self.bridge.provider_bridge(self.hf_config)

    def load_hf_weights(self, model):
        """Convert the checkpoint's weights into the model."""
        with np.load(self.folder / "model.npz") as hf_weights:
            self.bridge.load_weights_hf_to_megatron(dict(hf_weights), model)

    def export_hf_weights(self, model):
        """Yield (name, tensor) in Hugging Face's layout, for a generation engine."""
        yield from self.bridge.stream_weights_megatron_to_hf(model)
