"""index.html: one file for people, without network, scripts optional; verdict first, then why, then everything else.

`view` turns the report, the logs and the metrics into plain values (pure but for reading them), page.html.j2 lays them
out with autoescape on. The page stays below one megabyte: logs and curves share a budget and are cut further where the
first attempt is too large. No time of rendering is in it: the same report gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks import refit
from tasks.reason import Verdict
from tasks.report import answer, facts, pages, summary
from tasks.report.curves import curves, number
from tasks.report.text import clean, one_line, read_around, read_tail

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MAX_BYTES = 950_000  # of the page; the promise is 1 MB for 50 cases
_ICON = {Verdict.PASS: "✓", Verdict.FAIL: "✕", Verdict.BLOCKED: "◆", Verdict.SKIPPED: "○"}


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of the volatile parts goes in: bytes of all logs, points a curve, characters of one string."""

    log_bytes: int
    points: int
    string: int


# Each with the number of cases from which on the ones before it are not even tried: a try reads logs and metrics.
_BUDGETS = (
    (0, Budget(320_000, 120, 2000)),
    (16, Budget(160_000, 60, 2000)),
    (40, Budget(80_000, 30, 1000)),
    (100, Budget(20_000, 12, 300)),
    (200, Budget(0, 0, 120)),
)


def render(report: Mapping[str, Any], root: Path) -> str:
    """Return index.html for `report`; logs and metrics are read below `root`, the workspace folder."""
    template = pages.template("page.html.j2")
    page = ""
    cases = len(facts.rows(report.get("cases")))
    first = max(n for n, (least, _) in enumerate(_BUDGETS) if cases >= least)
    for _, budget in _BUDGETS[first:]:
        page = template.render(view(report, root, budget)) + "\n"
        if len(page.encode()) <= MAX_BYTES:
            break
    return page


def view(report: Mapping[str, Any], root: Path, budget: Budget) -> dict[str, Any]:
    """Return what the template shows, every string cleaned and cut."""
    tidy = facts.table(_tidy(dict(report), budget.string))
    verdict, sentence = answer.headline(report)
    every = facts.deliverables(tidy)
    anchors = {d.id: f"d{n}" for n, d in enumerate(every)}
    loud = [d for d in every if d.verdict in {Verdict.FAIL, Verdict.BLOCKED} and facts.log_path(d.item)]
    share = budget.log_bytes // max(len(loud), 8)
    demo = bool(report.get("demo"))
    shown = [_deliverable(d, root, anchors, budget, share) | {"commands": _commands(d, demo=demo)} for d in every]
    cases = [s for s in shown if s["kind"] == "case"]
    if len(cases) == 1:
        cases[0]["open"] = True
    roots = [s for s in shown if s["verdict"] in {"Fail", "Blocked"} and not s["dependent"] and not s["quarantined"]]
    return {
        "result": verdict.value,
        "icon": _ICON[verdict],
        "sentence": one_line(sentence),
        "demo": demo,
        "workspace": one_line(report.get("workspace") or ""),
        "requested": [one_line(x) for x in report.get("requested") or ()],
        "why": [s for s in roots if not s["not_run"]],
        "waiting": sum(s["dependent"] for s in shown),
        "not_run": sum(s["not_run"] for s in shown),
        "excused": sum(s["quarantined"] for s in shown),
        "counts": [(v.value, sum(d.verdict is v for d in every)) for v in Verdict],
        "named": [(name, text.replace("`", "")) for name, text in summary.named_deliverables(tidy)],
        "rows": shown,
        "stages": _stages(tidy, every),
        "provenance": _provenance(tidy),
        "limitations": summary.limitations(tidy),
        "follow_ups": summary.follow_ups(tidy),
    }


def _deliverable(
    d: facts.Deliverable, root: Path, anchors: Mapping[str, str], budget: Budget, share: int
) -> dict[str, Any]:
    item, case = d.item, d.kind == "case"
    labels = [
        text
        for text, holds in (
            ("cached", d.cached),
            ("rehearsal", d.rehearsal),
            ("baseline", d.id.startswith("baseline.")),
            ("flaky", bool(item.get("flaky"))),
            ("quarantined", d.quarantined),
        )
        if holds
    ]
    steps = facts.table(item.get("steps"))
    loud = d.verdict in {Verdict.FAIL, Verdict.BLOCKED} and not d.not_run and not d.dependent
    log = _log(item, root, share if loud else min(share, 3000)) if budget.log_bytes else None
    blames = d.verdict is Verdict.BLOCKED and case and not d.dependent and not d.not_run
    return {
        "anchor": anchors[d.id],
        "kind": d.kind,
        "id": d.id,
        "verdict": d.verdict.value,
        "icon": _ICON[d.verdict],
        "title": one_line(item.get("title") or ""),
        "proves": one_line(item.get("proves") or ""),
        "model": one_line(item.get("model") or ""),
        "reasons": facts.reason_texts(item),
        "reason": "" if d.verdict is Verdict.PASS else d.reason,
        "chain": [one_line(x) for x in item.get("chain") or ()],
        "labels": labels,
        "dependent": d.dependent,
        "not_run": d.not_run,
        "quarantined": d.quarantined,
        "quarantine": facts.quarantine_text(item) if item.get("quarantine") else "",
        "cached_text": facts.cached_text(item) if d.cached else "",
        "no_blame": blames and facts.before_construction(item),
        "open": loud and not d.quarantined,
        "asked": steps.get("requested"),
        "reached": steps.get("reached") if steps.get("reached") is not None else 0,
        "progress": _progress(steps),
        "tests": _tests(item) if d.kind == "suite" else "",
        "failed_tests": [
            {"name": t.get("name", "?"), "text": t.get("text") or t.get("message") or "failed without a message"}
            for t in facts.rows(item.get("failed_tests"))[:20]
        ],
        "checks": _checks(item),
        "refit": refit.cells(item.get("refit")),
        "refit_text": refit.sentence(item.get("refit")),
        "curves": curves(item, root, max_points=budget.points) if case else [],
        "log": log,
        "log_path": facts.log_path(item),
        "error": _error(item, f"{anchors[d.id]}-L" if log and log["around"] else ""),
        "attempts": [
            {
                "id": a.get("id", "?"),
                "rc": "none" if a.get("rc") is None else a["rc"],
                "started": facts.stamp(when) if (when := facts.started(a)) else "unknown",
                "duration": duration(facts.seconds(a.get("duration_s"))),
                "gpus": facts.gpu_text(a.get("gpus")) or "none",
                "path": a.get("path") or "",
            }
            for a in facts.attempts(item)
        ],
        "duration": duration(facts.duration(item) if case else facts.seconds(item.get("duration_s"))),
        "baseline": _baseline(item),
    }


def _checks(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the checks with the bar of each: value against limit on one scale that contains zero."""
    judged = facts.verdict_of(item) in {Verdict.PASS, Verdict.FAIL}
    before = {c.get("expr"): c for c in facts.rows(facts.table(item.get("baseline")).get("checks"))}
    return [
        {
            "expr": one_line(c.get("expr") or c.get("name") or "?"),
            "verdict": facts.verdict_of(c).value if judged or c.get("value") is not None else "Skipped",
            "word": facts.verdict_of(c).value if judged or c.get("value") is not None else "not evaluated",
            "value": number(c.get("value")) if c.get("value") is not None else "none",
            "limit": number(c.get("limit")) if c.get("limit") is not None else "none",
            "text": one_line(c.get("text") or ""),
            "margin": _margin(c),
            "bar": bar(c.get("value"), c.get("limit"), c.get("earlier")),
            "history": _history(c),
            "baseline": number(before[c.get("expr")].get("value")) if c.get("expr") in before else "",
        }
        for c in facts.rows(item.get("checks"))
    ]


def bar(value: object, limit: object, earlier: object = None) -> dict[str, Any] | None:
    """Return where bar, limit and earlier values lie, in percent of the track; None without two numbers to compare.

    The scale is that of value and limit, zero included: an earlier value beyond it is at its end.
    """
    got, bound = facts.finite(value), facts.finite(limit)
    if got is None or bound is None:
        return None
    low, high = min(0.0, got, bound), max(0.0, got, bound)
    span = (high - low) * 1.06 or 1.0
    low -= (high - low) * 0.03 if low < 0 else 0.0
    before = [x for x in map(facts.finite, _list(earlier)) if x is not None]
    zero, at, *marks = ((x - low) / span * 100 for x in (0.0, got, *before))
    return {
        "left": f"{min(zero, at):.2f}",
        "width": f"{max(abs(at - zero), 0.4):.2f}",
        "limit": f"{(bound - low) / span * 100:.2f}",
        "earlier": list(dict.fromkeys(f"{min(100.0, max(0.0, mark)):.1f}" for mark in marks)),
    }


def _history(check: Mapping[str, Any]) -> str:
    """Return how the value compares with earlier ones, or those where they are too few for that."""
    earlier = ", ".join(map(number, _list(check.get("earlier"))))
    return one_line(check.get("history") or (f"earlier: {earlier}" if earlier else ""))


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _margin(check: Mapping[str, Any]) -> str:
    """Return how far the value is from the limit in percent of it, negative where the check is false."""
    given, got, bound = (facts.finite(check.get(k)) for k in ("margin_percent", "value", "limit"))
    if given is None:
        if got is None or not bound:
            return ""
        given = abs(got - bound) / abs(bound) * 100
        given = given if facts.verdict_of(check) is Verdict.PASS else -given
    return f"{given:+.3g} %"


def _progress(steps: Mapping[str, Any]) -> int:
    asked, reached = facts.finite(steps.get("requested")), facts.finite(steps.get("reached"))
    return round(100 * min(1.0, max(0.0, (reached or 0.0) / asked))) if asked else 0


def _error(item: Mapping[str, Any], anchor: str) -> dict[str, str]:
    """Return text and place of the root error, and the id of its line where the page shows it."""
    error = facts.table(item.get("first_error"))
    line = error.get("line")
    place = one_line(error.get("file") or "run.log") + (f":{line}" if line is not None else "")
    return {"text": one_line(error.get("text") or ""), "place": place, "line": anchor and f"{anchor}{line}"}


def _tests(item: Mapping[str, Any]) -> str:
    return ", ".join(f"{item[k]} {k}" for k in ("tests", "failed", "errors", "skipped") if item.get(k) is not None)


def duration(spent: float) -> str:
    """Return seconds as people say them."""
    if spent < 60:
        return f"{spent:.1f} s"
    minutes, left = divmod(round(spent), 60)
    return f"{minutes} min {left:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _baseline(item: Mapping[str, Any]) -> dict[str, str] | None:
    found = facts.table(item.get("baseline"))
    if not found:
        return None
    kind, text = facts.baseline_words(item)
    return {
        "verdict": facts.verdict_of(found).value,
        "kind": kind,
        "sha": one_line(found.get("sha") or ""),
        "text": text,
    }


def _commands(d: facts.Deliverable, *, demo: bool) -> list[tuple[str, str]]:
    """Return what a reader copies: the exact command, how to run it again, why it is stale, where the log is."""
    name = f"unit:{d.id.removeprefix('unit.')}" if d.kind == "suite" else d.id
    name = f"proof:{d.id.removeprefix('proof.')}" if d.kind == "proof" else name
    for prefix, task in (("repeat.", "repeat:"), ("rehearse.", "rehearse:"), ("baseline.", "baseline:")):
        name = task + name.removeprefix(prefix) if name.startswith(prefix) else name
    # The demo's checkouts are known to its own command only.
    again = [("Run again", f"./doitw {name} fresh=1"), ("Explain", f"./doitw why {name}")]
    found = [("Run again", "./doitw demo fresh=1")] if demo else again
    if d.item.get("command"):
        found.insert(0, ("Exact command", facts.command_line(d.item["command"])))
    return found


def _log(case: Mapping[str, Any], root: Path, max_bytes: int) -> dict[str, Any] | None:
    """Return the lines around the first error with their numbers, and the end of run.log, the error marked."""
    path = facts.inside(root, facts.log_path(case))
    tail = read_tail(path, max_lines=160, max_bytes=max_bytes) if path and max_bytes > 0 else None
    if path is None or tail is None:
        return None
    error = facts.table(case.get("first_error"))
    text, line = one_line(error.get("text") or ""), error.get("line")
    around = read_around(path, line, before=3, after=8) if isinstance(line, int) else ()
    return {
        "around": [(n, row[:400], n == line) for n, row in around],
        "line": line,
        "tail": [(row, bool(text) and text in " ".join(row.split())) for row in tail.lines],
        "cut": tail.cut,
        "size": f"{tail.size_bytes / 1e6:.1f} MB" if tail.size_bytes >= 1e6 else f"{tail.size_bytes / 1e3:.1f} kB",
    }


def _stages(report: Mapping[str, Any], every: Sequence[facts.Deliverable]) -> list[tuple[str, list[dict[str, str]]]]:
    """Return columns of what ran, was reused or did not run, and why; from `stages`, else from the deliverables."""
    given = facts.rows(report.get("stages"))
    if not given:  # a report of an older version
        names = {"suite": "unit:", "proof": "proof:", "case": "run:", "probe": ""}
        given = [
            {
                "name": names[d.kind] + (d.id if d.kind in {"case", "probe"} else d.id.partition(".")[2]),
                "state": "reused" if d.cached else "not run" if d.not_run or d.dependent else "ran",
                "why": f"record of {facts.cached_text(d.item)}" if d.cached else d.reason,
            }
            for d in every
            if d.verdict is not Verdict.SKIPPED
        ]
    columns: dict[str, list[dict[str, str]]] = {}
    for stage in given:
        name = one_line(stage.get("name") or "?")
        state = one_line(stage.get("state") or "?")
        needs = ", ".join(one_line(n) for n in stage.get("needs") or ())
        why = one_line(stage.get("why") or "")
        columns.setdefault(name.partition(":")[0], []).append(
            {"name": name, "state": state, "why": why, "needs": needs}
        )
    return list(columns.items())


def _provenance(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    source = facts.table(report.get("provenance"))
    found = []
    for key, title in (("bridge", "Bridge"), ("mcore", "Megatron-LM"), ("nemo_rl", "NeMo-RL")):
        tree = facts.table(source.get(key))
        if tree:
            fields = [(k, one_line(tree[k])) for k in ("sha", "digest", "path") if tree.get(k)]
            dirty = tree.get("dirty")
            dirty = [one_line(x) for x in dirty[:40]] if isinstance(dirty, list) else []
            found.append({"title": title, "fields": fields, "dirty": dirty, "tree": True})
    for key, title in (("image", "Image"), ("runner", "Runner")):
        fields = [(k, one_line(v)) for k, v in sorted(facts.table(source.get(key)).items()) if v]
        if fields:
            found.append({"title": title, "fields": fields, "dirty": [], "tree": False})
    machine = [("host", one_line(source.get("host") or "")), ("GPUs", facts.gpu_text(source.get("gpus")) or "none")]
    found.append({"title": "Machine", "fields": [m for m in machine if m[1]], "dirty": [], "tree": False})
    return found


def _tidy(value: Any, most: int) -> Any:
    """Return `value` with every string cleaned and cut to `most` characters."""
    if isinstance(value, str):
        text = clean(value)
        return text if len(text) <= most else text[: most - 1] + "…"
    if isinstance(value, dict):
        return {_tidy(str(k), most): _tidy(v, most) for k, v in value.items()}
    return [_tidy(v, most) for v in value] if isinstance(value, (list, tuple)) else value
