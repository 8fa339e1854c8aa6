"""Metric curves for the page: points of one tag become the numbers of an inline SVG, nothing is guessed between them.

Series are downsampled by keeping the lowest and the highest point of each bucket, so that a spike stays visible; values
that are not finite are kept apart and named, since a gap alone would be overlooked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.report import facts
from tasks.report.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WIDTH, HEIGHT = 320.0, 96.0
PAD = 6.0  # units of the view box around the curve, so that its stroke is not cut
MAX_METRICS_BYTES = 32 << 20  # a metrics.json beyond this is not opened for a page
MAX_CURVES = 12  # a case
_CONTEXT = ("train/loss", "train/reward", "validation/accuracy")

Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One tag ready to draw: `lines` are SVG point lists, `data` the points for the hover text, the rest is words."""

    tag: str
    lines: tuple[str, ...]
    dots: tuple[tuple[str, str], ...]
    baseline: tuple[str, ...]
    limits_y: tuple[str, ...]
    limits: str
    low: str
    high: str
    first_step: int
    last_step: int
    last: str
    count: int
    lost: str
    data: str


def number(value: object) -> str:
    """Return a value of a metric as text of at most six digits."""
    found = facts.finite(value)
    return one_line(value, 40) if found is None else f"{found:.6g}"


def read_series(root: Path, relative: object) -> dict[str, Any]:
    """Return metrics.json as a dict of tag to {step: value}; empty where there is none that can be read."""
    path = facts.inside(root, relative)
    try:
        if path is None or path.stat().st_size > MAX_METRICS_BYTES:
            return {}
        return facts.table(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def curves(case: Mapping[str, Any], root: Path, *, max_points: int) -> list[Curve]:
    """Return the curves of the asserted tags of `case`, then those that give them context."""
    if max_points < 4:
        return []
    series = read_series(root, case.get("metrics"))
    base = read_series(root, facts.table(case.get("baseline")).get("metrics"))
    limits: dict[str, list[float]] = {}
    for check in facts.rows(case.get("checks")):
        tags = facts.check_tags(check)
        for tag in tags:
            known = limits.setdefault(tag, [])
            limit = facts.finite(check.get("limit")) if len(tags) == 1 else None
            known += [limit] if limit is not None and limit not in known else []
    wanted = [*limits, *(t for t in _CONTEXT if t not in limits)]
    made = (
        curve(tag, facts.table(series.get(tag)), facts.table(base.get(tag)), limits.get(tag, []), max_points)
        for tag in wanted[:MAX_CURVES]
    )
    return [c for c in made if c is not None]


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most about `most` points in order: the ends, and of each bucket the lowest and the highest."""
    if len(points) <= most or most < 4:
        return list(points[:most]) if most < 4 else list(points)
    inner = points[1:-1]
    size = -(-2 * len(inner) // (most - 2))
    kept = [points[0]]
    for start in range(0, len(inner), size):
        bucket = inner[start : start + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return [*kept, points[-1]]


def curve(
    tag: str, values: Mapping[str, Any], base: Mapping[str, Any], limits: Sequence[float], most: int
) -> Curve | None:
    """Return {step: value} ready to draw with its baseline and limits; None where there is no point."""
    points, lost = split(values)
    other, _ = split(base)
    if not (points or lost):
        return None
    heights = [y for _, y in points + other] + list(limits)
    steps = [x for x, _ in points + other] + lost
    low, high = (min(heights), max(heights)) if heights else (0.0, 1.0)
    box = (min(steps), max(steps), low, high)
    shown = thin(points, most)
    pieces = _pieces(shown, lost)
    own = [y for _, y in points]
    return Curve(
        tag=tag,
        lines=tuple(_polyline(piece, box) for piece in pieces if len(piece) > 1),
        dots=tuple(_place(piece[0], box) for piece in pieces if len(piece) == 1),
        baseline=(_polyline(thin(other, most), box),) if len(other) > 1 else (),
        limits_y=tuple(_place((box[0], limit), box)[1] for limit in limits),
        limits=" and ".join(map(number, sorted(limits))),
        low=number(min(own)) if own else "none",
        high=number(max(own)) if own else "none",
        first_step=box[0],
        last_step=box[1],
        last=number(points[-1][1]) if points else "none",
        count=len(points) + len(lost),
        lost=", ".join(map(str, lost[:5])) + (" ..." if len(lost) > 5 else ""),
        data=json.dumps([[x, number(y), *map(float, _place((x, y), box))] for x, y in shown], separators=(",", ":")),
    )


def split(values: Mapping[str, Any]) -> tuple[list[Point], list[int]]:
    """Return the finite points of {step: value} by step, and the steps whose value is not a finite number."""
    points: list[Point] = []
    lost: list[int] = []
    for step, value in values.items():
        try:
            at = int(step)
        except ValueError:
            continue
        height = facts.finite(value)
        if height is None:
            lost.append(at)
        else:
            points.append((at, height))
    return sorted(points), sorted(lost)


def _pieces(points: Sequence[Point], lost: Sequence[int]) -> list[list[Point]]:
    """Cut the curve where a value was not finite."""
    made: list[list[Point]] = [[]]
    gaps = list(lost)
    for point in points:
        while gaps and gaps[0] < point[0]:
            gaps.pop(0)
            if made[-1]:
                made.append([])
        made[-1].append(point)
    return [piece for piece in made if piece]


def _place(point: Point, box: tuple[int, int, float, float]) -> tuple[str, str]:
    left, right, low, high = box
    across = (point[0] - left) / (right - left) if right > left else 0.5
    up = (point[1] - low) / (high - low) if high > low else 0.5
    x, y = PAD + across * (WIDTH - 2 * PAD), HEIGHT - PAD - up * (HEIGHT - 2 * PAD)
    return f"{x:.1f}", f"{y:.1f}"


def _polyline(points: Sequence[Point], box: tuple[int, int, float, float]) -> str:
    return " ".join(",".join(_place(p, box)) for p in points)
