"""The demo's NeMo-RL. Importing it makes the vendored Bridge available, after everything that PYTHONPATH names."""

import sys
from pathlib import Path

__version__ = "0.0.demo"

_BRIDGE = Path(__file__).resolve().parents[1] / "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
VENDORED = [str(_BRIDGE / "src"), str(_BRIDGE / "3rdparty/Megatron-LM")]
sys.path[:] = [*sys.path, *(path for path in VENDORED if path not in sys.path)]
