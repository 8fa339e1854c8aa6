"""Stand-in for flashinfer: only the sampling functions, which Megatron-Core wants for top_p together with top_k."""

from . import sampling

__version__ = "0.0.0+e2e.cpu"
__all__ = ["sampling"]
