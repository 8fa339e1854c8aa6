"""repeat.html: the asserted values of n attempts, each check a curve over the attempts with its limit; no script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.report import pages
from tasks.report.curves import curve, number
from tasks.report.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_POINTS = 200


def render(found: Mapping[str, Any]) -> str:
    """Return the page of a summary of tasks/repeat.py; the same summary gives the same bytes."""
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
    return pages.template("repeat.html.j2").render(found=found, checks=checks, attempts=attempts) + "\n"
