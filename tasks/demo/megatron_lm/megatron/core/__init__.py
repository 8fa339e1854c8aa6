"""The demo's Megatron-Core: NumPy, one process, float64. `megatron` itself is a namespace package, as upstream."""

__version__ = "0.0.demo"
