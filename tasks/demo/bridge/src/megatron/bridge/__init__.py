"""Conversion between Hugging Face and Megatron, providers and training parts: the demo's Megatron-Bridge."""

from megatron.bridge.models.conversion.auto_bridge import AutoBridge

__version__ = "0.0.demo"
__all__ = ["AutoBridge"]
