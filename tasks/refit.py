"""What a run tells of the hand-over of weights from training to generation: its timings, and where it broke.

The hand-over has three parts, and a failure is worth little before it is known in which: the producer (the Bridge
exports names and tensors), the transport (ZMQ, NCCL, reshard), the consumer (the generation engine loads them). The
part is told by the first error's signature (triage/signatures.yaml) alone; where that one is the synchroniser's own
wrapper, or nothing failed, none is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# NeMo-RL 7ea279abf: sync GRPO, async GRPO, sparse transports (algorithms/grpo.py, weight_sync/)
TAGS = ("timing/train/prepare_for_generation/", "timing/train/weight_sync", "refit/")
BOUNDARIES = {
    "producer": ("shape-mismatch", "parallelism-unknown", "architecture-unknown"),
    "transport": ("zmq-timeout", "collective-timeout", "nccl"),
    "consumer": ("weight-names", "refit-worker", "generation-unavailable"),
}
MAX_ROWS = 20


def boundary(signature: str | None) -> str | None:
    """Return "producer", "transport" or "consumer" for a first error's signature; None where it tells none of them."""
    return next((name for name, known in BOUNDARIES.items() if signature in known), None)


def table(series: Mapping[str, Mapping[str, Any]], signature: str | None) -> dict[str, Any] | None:
    """Return {"boundary", "rows": [{"tag", "steps", "mean", "max", "last"}]}; None where the run handed nothing over.

    Timings are in seconds, `refit/*` counts and ratios are in the units of their tags. Step 0 and values that are no
    number are left out.
    """
    rows = []
    for tag, values in sorted(series.items()):
        if not tag.startswith(TAGS):
            continue
        ordered = sorted(values.items(), key=_step)
        found = [float(v) for step, v in ordered if int(step) and isinstance(v, (int, float))]
        if found:
            mean = round(sum(found) / len(found), 6)
            rows.append({"tag": tag, "steps": len(found), "mean": mean, "max": max(found), "last": found[-1]})
    where = boundary(signature)
    return {"boundary": where, "rows": rows[:MAX_ROWS]} if rows or where else None


def sentence(found: Any) -> str:
    """Return the table in one line: where the hand-over broke, else its slowest timing; empty where there is none."""
    if not isinstance(found, dict):
        return ""
    if found.get("boundary"):
        return f"refit broke at the {found['boundary']}"
    timings = [row for row in cells(found) if row[0].startswith("timing/") and "?" not in row]
    if not timings:
        return ""
    tag, _, mean, most, _ = max(timings, key=lambda row: float(row[2]))
    return f"refit {mean} s a step, at most {most} s ({tag})"


def cells(found: Any) -> list[tuple[str, ...]]:
    """Return the rows as texts for a page: tag, steps, mean, max, last; nothing where the report is damaged."""
    rows = found.get("rows") if isinstance(found, dict) else None
    keys = ("steps", "mean", "max", "last")
    return [
        (str(row.get("tag", "?")), *(f"{row[k]:.4g}" if isinstance(row.get(k), (int, float)) else "?" for k in keys))
        for row in rows or ()
        if isinstance(row, dict)
    ]


def _step(item: tuple[Any, Any]) -> int:
    return int(item[0])
