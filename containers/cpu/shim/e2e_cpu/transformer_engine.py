"""The names of transformer_engine that `import megatron.bridge` needs, visible to the importing modules alone.

Two modules of Megatron-Bridge 067f987df import transformer_engine without a guard:
    megatron/bridge/peft/lora_layers.py                         import transformer_engine.pytorch as te
    megatron/bridge/models/gpt_full_te_layer_autocast_spec.py   from transformer_engine.pytorch import TransformerLayer
and those below megatron/bridge/models ask whether it is there, to choose Core's layer spec, which megatron_layers.py
fills. They get classes that can be named and subclassed; building one raises NotImplementedError. Every other
module is told the truth ("not installed"), so that Megatron-Core takes its own paths without Transformer Engine.
"""

from __future__ import annotations

import builtins
import functools
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ASKERS = frozenset({"megatron.bridge.peft.lora_layers", "megatron.bridge.models.gpt_full_te_layer_autocast_spec"})
FAMILIES = "megatron.bridge.models."
LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer", "DotProductAttention")
NORMS = ("LayerNorm", "RMSNorm")
OPS = ("Sequential", "Linear", "BasicLinear")  # annotations in lora_layers.py name te.ops.Sequential


def _refusing(name: str, owner: str) -> type:
    import torch

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        msg = f"{owner}.{name}: Transformer Engine is not answered on a CPU"
        raise NotImplementedError(msg)

    return type(name, (torch.nn.Module,), {"__init__": refuse, "__module__": owner})


@functools.cache
def _package() -> tuple[types.ModuleType, types.ModuleType]:
    """Return (transformer_engine, transformer_engine.pytorch), made once and never put into sys.modules."""
    top = types.ModuleType("transformer_engine")
    pytorch = types.ModuleType("transformer_engine.pytorch")
    ops = types.ModuleType("transformer_engine.pytorch.ops")
    top.__dict__.update(__version__="0.0.0+e2e.cpu", pytorch=pytorch)
    pytorch.__dict__.update({name: _refusing(name, pytorch.__name__) for name in (*LAYERS, *NORMS)}, ops=ops)
    ops.__dict__.update({name: _refusing(name, ops.__name__) for name in OPS})
    return top, pytorch


def install() -> None:
    """Answer the two askers from now on; with a real transformer_engine on the path nothing is done."""
    import importlib.util

    if "transformer_engine" in sys.modules or importlib.util.find_spec("transformer_engine") is not None:
        return
    ordinary = builtins.__import__

    def answer(
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 - the signature that Python calls it with
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        asked = level == 0 and name in {"transformer_engine", "transformer_engine.pytorch"}
        asker = str((globals or {}).get("__name__"))
        if asked and (asker in ASKERS or asker.startswith(FAMILIES)):
            top, pytorch = _package()
            return pytorch if fromlist and name.endswith(".pytorch") else top
        return ordinary(name, globals, locals, fromlist or (), level)

    builtins.__import__ = answer
