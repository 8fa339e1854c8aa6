"""Triton under the names by which quantization/fp8.py imports it; its kernels are compiled only when called."""

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
