"""The one answer of a report: Pass, Fail or Blocked and a sentence, decided by pure functions.

Fail if anything failed, else Blocked if anything is blocked, else Pass - and Pass only if something that was asked
for was really shown: nothing executed is not a Pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.reason import Verdict
from tasks.report import facts
from tasks.report.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.report.facts import Deliverable

_SEVERITY = {Verdict.PASS: 0, Verdict.SKIPPED: 0, Verdict.BLOCKED: 1, Verdict.FAIL: 2}
# Requests that are answered without a case of a level.
_STAGES = frozenset(
    {"image", "sync", "cpu", "probe", "probe-cpu", "probe-baseline", "unit", "proof", "roundtrip", "report", "demo"}
)


def overall(report: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Return the verdict of all deliverables of `report` and one sentence that says why."""
    every = facts.deliverables(report)
    failed = [d for d in every if d.verdict is Verdict.FAIL and not d.quarantined]
    blocked = [d for d in every if d.verdict is Verdict.BLOCKED]
    label = "demo workspace: " if report.get("demo") else ""
    if failed:
        first = min(failed, key=lambda d: d.rehearsal)
        return Verdict.FAIL, label + _because(first, "failed", len(failed))
    if blocked:
        first = min(blocked, key=lambda d: (d.not_run, d.dependent))
        if first.not_run:
            return Verdict.BLOCKED, f"{label}{len(blocked)} of {len(every)} deliverables have not run yet"
        sentence = _because(first, "is blocked", len(blocked))
        if first.kind == "case" and facts.before_construction(first.item):
            sentence += f"; {facts.NOT_EVIDENCE}"
        return Verdict.BLOCKED, label + sentence
    passed = [d for d in every if d.verdict is Verdict.PASS]
    if not every:
        return _only_stages(report, label)
    if missing := _unanswered(report, every):
        return Verdict.BLOCKED, label + missing
    cases = [d for d in every if d.kind == "case"]
    if not passed or (cases and not any(d.kind == "case" for d in passed)):
        left = next(d for d in (cases or every) if d.verdict is not Verdict.PASS)
        why = f"quarantined: {facts.quarantine_text(left.item)}" if left.quarantined else left.reason
        return Verdict.BLOCKED, f"{label}nothing that was requested was shown; {left.id}: {why}"
    return Verdict.PASS, label + _praise(passed, every)


def _only_stages(report: Mapping[str, Any], label: str) -> tuple[Verdict, str]:
    """Answer a request of nothing but stages that prove nothing by themselves (`doit sync`): done, or why not."""
    stages = facts.rows(report.get("stages"))
    for stage in stages:
        verdict = facts.verdict_of(stage)
        if verdict is not Verdict.PASS:
            return verdict, f"{label}{one_line(stage.get('name'))}: {facts.reason_texts(stage)[0]}"
    if not stages:
        return Verdict.BLOCKED, f"{label}nothing was executed: the report has no deliverables"
    return Verdict.PASS, f"{label}{', '.join(one_line(s.get('name')) for s in stages)} up to date; nothing was tested"


def headline(report: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Return what the report says of itself, or what its deliverables say where that is worse or nothing is said."""
    verdict, sentence = overall(report)
    try:
        said = Verdict(report.get("result") or "")
    except ValueError:
        return verdict, sentence
    if said is Verdict.SKIPPED or _SEVERITY[said] < _SEVERITY[verdict] or not report.get("sentence"):
        return (verdict, sentence) if _SEVERITY[said] <= _SEVERITY[verdict] else (said, sentence)
    return said, one_line(report["sentence"])


def _because(first: Deliverable, verb: str, count: int) -> str:
    more = f" (and {count - 1} more)" if count > 1 else ""
    kind = " (rehearsal)" if first.rehearsal else ""
    return f"{first.id}{kind} {verb}: {one_line(first.reason, 300)}{more}"


def _praise(passed: Sequence[Deliverable], every: Sequence[Deliverable]) -> str:
    cases = [d for d in passed if d.kind == "case" and not d.rehearsal]
    rehearsals = [d for d in passed if d.rehearsal]
    words = []
    if cases:
        levels = dict.fromkeys(map(facts.group_of, cases))
        words.append(f"{count(len(cases), 'case')} of {', '.join(levels)} passed")
    if rehearsals:
        words.append(
            f"{count(len(rehearsals), 'rehearsal')} passed on stand-ins" + ("" if cases else ", no level was run")
        )
    for kind, noun in (("suite", "unit suite"), ("proof", "CPU proof")):
        if number := sum(d.kind == kind for d in passed):
            words.append(f"{count(number, noun)} passed")
    if not words:
        words.append("NeMo-RL imports the Bridge under test")
    if cached := sum(d.cached for d in passed):
        words.append(f"{cached} of these from earlier records")
    if left := [d.id for d in every if d.verdict is Verdict.SKIPPED]:
        words.append(f"skipped: {one_line(', '.join(left), 80)}")
    if left := [d.id for d in every if d.quarantined]:
        words.append(f"failed in quarantine: {one_line(', '.join(left), 80)}")
    return "; ".join(words)


def count(number: int, noun: str) -> str:
    """Return `1 case`, `2 cases`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _unanswered(report: Mapping[str, Any], every: Sequence[Deliverable]) -> str | None:
    """Return a sentence on the first requested name whose answer is not in the report.

    A level or variant is answered by all its members (`groups`); other names, and older reports, by a case.
    """
    ids = [d.id for d in every if d.kind == "case"]
    asked = report.get("requested")
    groups = facts.table(report.get("groups"))
    for name in asked if isinstance(asked, (list, tuple)) else []:
        stage, _, subject = one_line(name).partition(":")
        if stage in _STAGES:
            continue
        if members := groups.get(name):
            if absent := [one_line(m) for m in members if m not in {d.id for d in every}]:
                return f"{one_line(name)} was requested, but the report has no {absent[0]}"
            continue
        if stage in {"run", "metrics"} and subject not in ids:
            return f"{one_line(name)} records and does not judge: ask for {subject or 'a case'} itself"
        # A rehearsal answers for no level, so its name is looked for with its prefix.
        prefixed = stage in {"rehearse", "baseline", "repeat"}
        wanted = ".".join(filter(None, (stage, subject))) if prefixed else subject or stage
        if not any(i == wanted or i.startswith(f"{wanted}.") for i in ids) and not (stage == "check" and ids):
            return f"{wanted} was requested, but the report has no case of it"
    return None
