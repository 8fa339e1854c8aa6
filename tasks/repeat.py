"""`doit repeat:CASE n=5`: the same case n times anew, and how far its asserted values spread against their limits.

Each attempt is a run, a metrics and a check record of its own under the name `repeat.CASE`, with a number of its own
among its inputs: nothing is reused, nothing is retried, and no record of the level itself is replaced. The summary is a
record, too, so that the level's report can say what the repeats showed. `summarise` is pure.
"""

from __future__ import annotations

import secrets
import statistics
from typing import TYPE_CHECKING, Any

from tasks import chain, records, runs
from tasks.errors import UserError
from tasks.files import write_bytes, write_json
from tasks.reason import Reason, Verdict
from tasks.stage import Outcome, Stage
from tasks.verdict import is_finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tasks.invocation import Invocation
    from tasks.levels import Case
    from tasks.records import Record

TIMES = 5
PREFIX = "repeat."


def times(arguments: Mapping[str, str]) -> int:
    """Return n of `n=5`; UserError for anything but a whole number of at least 1."""
    text = arguments.get("n", str(TIMES))
    if not text.isdecimal() or not int(text):
        raise UserError(f"n={text}: write how many times, n={TIMES}")
    return int(text)


def perform(now: Invocation, case: Case) -> Outcome:
    """Run `case` n times, write report/repeat.json and repeat.html, and return the outcome: Pass only if all passed."""
    wanted, series = times(now.settings.arguments), f"{records.utc_now()}-{secrets.token_hex(2)}"
    inputs = runs.inputs(now, case)
    tried: list[dict[str, Any]] = []
    for number in range(1, wanted + 1):
        tried.append(_once(now, now.case(PREFIX + case.id), f"{series}-{number}"))
        now.tell("row", f"repeat:{case.id}", text=f"{number} of {wanted}: {tried[-1]['verdict']} {_why(tried[-1])}")
        if now.stop.is_set() or not tried[-1]["id"]:  # stopped, or it cannot run here: the others could not, either
            break
    found = summarise(case.id, wanted, tried)
    record = records.Record(
        "repeat", case.id, {**inputs, "series": series}, found, reusable=False, finished=records.utc_now()
    )
    now.records.save(record)
    folder = now.workspace.report
    write_json(folder / "repeat.json", {**found, "inputs": dict(inputs), "finished": record.finished})
    from tasks.report import repeat as page

    write_bytes(folder / "repeat.html", page.render(found).encode())
    for line in table(found):
        now.tell("row", f"repeat:{case.id}", text=line)
    now.tell("row", f"repeat:{case.id}", text=f"plot: {folder / 'repeat.html'}")
    reasons = tuple(Reason(**r) for r in found["reasons"])
    outcome = Outcome(Verdict(found["verdict"]), reasons, record)
    now.outcomes[f"repeat:{case.id}"] = outcome
    return outcome


def _once(now: Invocation, case: Case, token: str) -> dict[str, Any]:
    """Execute run, metrics and check of one attempt; return what the summary needs of them."""
    run = Stage(
        "run",
        case.id,
        lambda: {**runs.inputs(now, case), "repeat": token},
        lambda: runs.execute(now, case, retries=0),
    )
    stages: list[Stage] = [run, now.metrics(case), now.check(case)]
    outcome = None
    for stage in stages:
        outcome = now.execute(stage)
        if outcome.verdict is not Verdict.PASS:
            break
    run_record, checked = now.outcomes[run.task].record, now.outcomes.get(f"check:{case.id}")
    facts = dict(run_record.artefact["attempts"][-1]) if run_record and run_record.artefact["attempts"] else {}
    judged = checked.record.artefact if facts and checked and checked.record else {}
    reasons = outcome.reasons if outcome else ()
    return {
        **{key: facts.get(key) for key in ("id", "path", "rc", "reason", "started", "duration_s", "gpus")},
        "verdict": str(outcome.verdict) if outcome else "Blocked",
        "reasons": [r.as_dict() for r in reasons],
        "class": judged.get("class"),
        "steps": judged.get("steps"),
        "checks": list(judged.get("checks", [])),
    }


def _why(attempt: Mapping[str, Any]) -> str:
    return str(attempt["reasons"][0]["text"]) if attempt["reasons"] else ""


def summarise(name: str, wanted: int, tried: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the attempts came to: share of passes, and each check's values, spread and distance to its limit."""
    passed = sum(one["verdict"] == "Pass" for one in tried)
    verdict = Verdict.FAIL if any(one["verdict"] == "Fail" for one in tried) else Verdict.BLOCKED
    if passed == wanted == len(tried):
        verdict = Verdict.PASS
    sentence = f"{passed} of {wanted} attempts passed" + (f", {wanted - len(tried)} not run" * (len(tried) < wanted))
    reasons = [Reason("repeat", name, sentence).as_dict()] if verdict is not Verdict.PASS else []
    for number, one in enumerate(tried, 1):
        if one["verdict"] != "Pass":
            first = one["reasons"][0] if one["reasons"] else {"kind": "repeat", "subject": name, "text": "no reason"}
            reasons.append({**first, "text": f"attempt {number} is {one['verdict']}: {first['text']}"})
    checks = dict.fromkeys(c["expr"] for one in tried for c in one["checks"])
    return {
        "schema": 1, "case": name, "n": wanted, "done": len(tried), "passed": passed, "share": passed / wanted,
        "verdict": str(verdict), "sentence": sentence, "reasons": reasons,
        "attempts": [{k: v for k, v in one.items() if k != "checks"} for one in tried],
        "checks": [_spread(expr, tried) for expr in checks],
    }  # fmt: skip


def _spread(expr: str, tried: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one check over all attempts; an attempt that did not come to it has the value None."""
    each: list[dict[str, Any]] = [next((c for c in one["checks"] if c["expr"] == expr), {}) for one in tried]
    values = [c.get("value") for c in each]
    numbers = [float(v) for v in values if v is not None and is_finite(v)]
    limit = next((c["limit"] for c in each if is_finite(c.get("limit"))), None)
    margins = [c["margin_percent"] for c in each if is_finite(c.get("margin_percent"))]
    width = max(numbers) - min(numbers) if numbers else None
    return {
        "expr": expr, "limit": limit, "op": next((c["op"] for c in each if c.get("op")), None),
        "values": values, "passed": sum(c.get("verdict") == "Pass" for c in each),
        "min": min(numbers, default=None), "max": max(numbers, default=None),
        "median": statistics.median(numbers) if numbers else None, "spread": width,
        "spread_percent": 100 * width / abs(limit) if width is not None and limit else None,
        "margin_percent": min(margins, default=None),
    }  # fmt: skip


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table for a terminal."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.6g}"

    yield f"{'MIN':>11} {'MEDIAN':>11} {'MAX':>11} {'LIMIT':>9} {'SPREAD %':>9} {'MARGIN %':>9} {'PASS':>5}  CHECK"
    for row in found["checks"]:
        numbers = (f"{cell(row[key]):>11}" for key in ("min", "median", "max"))
        percents = (f"{cell(row[key]):>9.9}" for key in ("limit", "spread_percent", "margin_percent"))
        yield f"{' '.join(numbers)} {' '.join(percents)} {row['passed']:>3}/{found['done']}  {row['expr']}"
    yield f"{found['case']}: {found['sentence']} ({100 * found['share']:.0f} %)"


def entry(found: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report's entry of a repeat: that of its last attempt, `described`, with the verdict over all."""
    kept = {k: v for k, v in described.items() if k != "quarantine"}  # a known failure is what a repeat is to show
    told = chain.links(found["verdict"], found["reasons"], {}, None)
    return {
        **kept, "verdict": found["verdict"], "reasons": found["reasons"], "attempts": found["attempts"],
        "flaky": False, "repeat": {key: found[key] for key in ("n", "done", "passed", "checks")},
        "chain": [link.text for link in told],
    }  # fmt: skip


def known(now: Invocation, case: Case, run: Record | None) -> list[str]:
    """Return a sentence on the newest repeat of a run's very inputs if not all of it passed: no level may hide it."""
    latest = now.records.latest("repeat", case.id)
    if latest is None or run is None or {k: v for k, v in latest.inputs.items() if k != "series"} != dict(run.inputs):
        return []
    if latest.artefact["passed"] == latest.artefact["n"]:
        return []
    return [f"repeated at {latest.finished}: {latest.artefact['sentence']} (doit repeat:{case.id})"]
