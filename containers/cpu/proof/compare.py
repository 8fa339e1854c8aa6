"""Differences of tensors and texts as one number with the worst of them first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two tensors; infinite where the shapes differ, NaN where a NaN is."""
    if one.shape != other.shape:
        return math.inf
    found: float = (one.double() - other.double()).abs().max().item()
    return found


def ratio(apart: float, scale: float) -> float:
    """Return `apart` / `scale`, 0 for nothing of nothing (an unused expert); NaN for a scale that is no yardstick."""
    if apart == scale == 0:
        return 0.0
    return apart / scale if scale > 0 and math.isfinite(scale) else math.nan


def check(name: str, value: float, text: str) -> dict[str, Any]:
    """Return one measured value as the answer carries it."""
    return {"name": name, "value": value if math.isfinite(value) else str(value), "text": text}


def equal(name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the three checks of an export that must be `expected` to the bit: missing, extra, unequal."""
    import torch

    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    apart = {
        key: difference(found[key], expected[key])
        for key in sorted(set(found) & set(expected))
        if found[key].dtype != expected[key].dtype or not torch.equal(found[key], expected[key])
    }
    text = f"{len(found)} tensors exported, {len(apart)} differ"
    if apart:
        worst = max(apart, key=lambda key: _order(apart[key]))
        text += f", worst {worst} by {apart[worst]}"
    return [
        check(f"{name} missing", len(missing), _names("not exported", missing)),
        check(f"{name} extra", len(extra), _names("exported, not in the checkpoint", extra)),
        check(f"{name} unequal", len(apart), text),
    ]


def close(name: str, found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the check of the worst relative difference; a tensor that is not there is infinitely wrong."""
    apart = {
        key: ratio(difference(found[key], value), value.abs().max().item()) if key in found else math.inf
        for key, value in expected.items()
    }
    if not apart:
        return check(name, math.nan, f"no {what}")
    worst = max(apart, key=lambda key: _order(apart[key]))
    return check(name, apart[worst], f"{len(apart)} {what}, worst {worst}")


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _names(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{what}: {shown or 'none'}"
