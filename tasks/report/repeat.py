"""repeat.html: the asserted values of n attempts, each check a curve over the attempts with its limit; no script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.report.curves import curve, number
from tasks.report.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

TEMPLATE = Path(__file__).with_name("repeat.html.j2")
MOST_POINTS = 200


def render(found: Mapping[str, Any]) -> str:
    """Return the page of a summary of tasks/repeat.py; the same summary gives the same bytes."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    checks = []
    for row in found["checks"]:
        values = {str(n): value for n, value in enumerate(row["values"], 1)}
        limits = [] if row["limit"] is None else [row["limit"]]
        names = ("min", "median", "max", "limit", "spread_percent", "margin_percent")
        shown = [number(row[key]) if row[key] is not None else "none" for key in names]
        drawn = curve(one_line(row["expr"]), values, {}, limits, MOST_POINTS)
        checks.append({"expr": one_line(row["expr"]), "passed": row["passed"], "shown": shown, "curve": drawn})
    attempts = [
        {
            "id": one["id"] or "not started",
            "verdict": one["verdict"],
            "path": one["path"] or "",
            "reason": one_line(one["reasons"][0]["text"]) if one["reasons"] else "",
        }
        for one in found["attempts"]
    ]
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(found=found, checks=checks, attempts=attempts) + "\n"
