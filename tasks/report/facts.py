"""What the renderers read out of a report: names, verdicts, reasons, times - pure functions over its dict.

A report is data that may be older than this program or half filled in (the skeleton): absent keys are normal, and
whatever cannot be understood counts against a Pass, never for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from tasks.reason import Verdict
from tasks.report.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Case = dict[str, Any]

NOT_EVIDENCE = "not evidence against the Bridge provider"
NO_REASON = "no reason was recorded"
# Reasons that say the case waited for something else: the cause is shown there.
DEPENDENT = "dependency"
NOT_RUN = "not_run"
_TAG = re.compile(r"""data\[\s*(["'])(.+?)\1\s*\]""")


@dataclass(frozen=True, slots=True)
class Deliverable:
    """One thing that was asked for and its answer; `kind` is suite, probe, proof or case."""

    kind: str
    id: str
    verdict: Verdict
    reason: str
    dependent: bool
    not_run: bool
    quarantined: bool
    cached: bool
    rehearsal: bool
    item: Mapping[str, Any]


def group_of(found: Deliverable) -> str:
    """Return the level of a case as its id has it, `rehearse.level0`: the case's own name may have dots."""
    name = one_line(found.item.get("case") or "")
    return found.id.removesuffix(f".{name}") if found.id.endswith(f".{name}") else found.id.rpartition(".")[0]


def rows(value: object) -> list[dict[str, Any]]:
    """Return the dicts of a list, and nothing for anything else."""
    return [x for x in value if isinstance(x, dict)] if isinstance(value, (list, tuple)) else []


def table(value: object) -> dict[str, Any]:
    """Return `value` if it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def verdict_of(item: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a suite, case, check or proof; an unknown or absent word is Blocked."""
    try:
        return Verdict(item.get("verdict") or "")
    except ValueError:
        return Verdict.BLOCKED


def case_id(case: Mapping[str, Any]) -> str:
    """Return `level0.grpo_megatron`, with `rehearse.` or `baseline.` before it where the case says so."""
    if case.get("id"):
        return one_line(case["id"])
    name = one_line(f"{case.get('level', '?')}.{case.get('case', '?')}")
    return f"rehearse.{name}" if case.get("rehearsal") and not name.startswith("rehearse.") else name


def is_rehearsal(case: Mapping[str, Any]) -> bool:
    """Tell whether the case ran with stand-ins on a CPU: evidence, but never a level's Pass."""
    return bool(case.get("rehearsal")) or case_id(case).startswith("rehearse.")


def reason_texts(item: Mapping[str, Any]) -> list[str]:
    """Return every reason as one line; never empty for anything but a Pass."""
    found = [
        one_line(r.get("text") or f"{r.get('kind', '')} {r.get('subject', '')}") for r in rows(item.get("reasons"))
    ]
    found = [text for text in found if text]
    if not found and item.get("text"):
        found = [one_line(item["text"])]
    return found or ([] if verdict_of(item) is Verdict.PASS else [NO_REASON])


def first_kind(item: Mapping[str, Any]) -> str:
    """Return the kind of the first reason, or an empty string."""
    reasons = rows(item.get("reasons"))
    return one_line(reasons[0].get("kind") or "") if reasons else ""


def is_dependent(item: Mapping[str, Any]) -> bool:
    """Tell whether the item is Blocked only because something before it did not pass."""
    kinds = {one_line(r.get("kind", "")) for r in rows(item.get("reasons"))}
    return verdict_of(item) is Verdict.BLOCKED and kinds == {DEPENDENT}


def attempts(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the attempts, oldest first, as the report has them."""
    return rows(case.get("attempts"))


def started(item: Mapping[str, Any]) -> datetime | None:
    """Return `started` as UTC with whole seconds, or None where it is not an ISO 8601 time."""
    try:
        when = datetime.fromisoformat(str(item.get("started")))
    except ValueError:
        return None
    try:
        utc = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except OverflowError:
        return None
    return utc.replace(microsecond=0)


def stamp(when: datetime) -> str:
    """Return a UTC time as `2026-11-29T19:02:11Z`."""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ") if when.year >= 1000 else when.isoformat().replace("+00:00", "Z")


def finite(value: object) -> float | None:
    """Return a number that can be drawn and added up (finite, below 1e300), or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None


def seconds(value: object) -> float:
    """Return a duration in seconds between zero and thirty years: 0.0 for whatever is none."""
    number = finite(value)
    return number if number is not None and 0 <= number < 1e9 else 0.0


def duration(case: Mapping[str, Any]) -> float:
    """Return the seconds of the last attempt."""
    tries = attempts(case)
    return seconds(tries[-1].get("duration_s")) if tries else 0.0


def is_quarantined(case: Mapping[str, Any]) -> bool:
    """Tell whether a Fail of this case is known and excused on the day of its last attempt.

    Without an end, or without a date to compare it with, nothing is excused: an old quarantine must not hide a new
    fault. The day is that of the attempt, not today, so that one report always reads the same.
    """
    quarantine = table(case.get("quarantine"))
    when = next((t for t in (started(a) for a in reversed(attempts(case))) if t), None)
    try:
        until = date.fromisoformat(str(quarantine.get("until"))[:10])
    except ValueError:
        return False
    return verdict_of(case) is Verdict.FAIL and when is not None and when.date() <= until


def quarantine_text(case: Mapping[str, Any]) -> str:
    """Return `reason, owner @x, until 2026-12-31`."""
    quarantine = table(case.get("quarantine"))
    return one_line(
        f"{quarantine.get('reason') or NO_REASON}, owner {quarantine.get('owner') or 'unknown'}, until "
        f"{quarantine.get('until')}"
    )


def deliverables(report: Mapping[str, Any]) -> list[Deliverable]:
    """Return everything the report answers for: the import probe, suites, proofs, cases - in this order."""
    probe = table(report.get("probe"))
    found = [("probe", "probe", probe)] if probe else []
    found += [("suite", f"unit.{one_line(s.get('name', '?'))}", s) for s in rows(report.get("suites"))]
    found += [("proof", f"proof.{one_line(p.get('family', '?'))}", p) for p in rows(report.get("proofs"))]
    found += [("case", case_id(c), c) for c in rows(report.get("cases"))]
    return [
        Deliverable(
            kind=kind,
            id=name,
            verdict=verdict_of(item),
            reason=next(iter(reason_texts(item)), ""),
            dependent=is_dependent(item),
            not_run=first_kind(item) == NOT_RUN,
            quarantined=kind == "case" and is_quarantined(item),
            cached=bool(item.get("cached")),
            rehearsal=kind == "case" and is_rehearsal(item),
            item=item,
        )
        for kind, name, item in found
    ]


def before_construction(case: Mapping[str, Any]) -> bool:
    """Tell whether a Blocked case ended before the Bridge built a model: then it says nothing about the Bridge."""
    reached = table(case.get("steps")).get("reached")
    return (
        verdict_of(case) is Verdict.BLOCKED
        and not table(case.get("evidence")).get("workers_started")
        and not (isinstance(reached, int) and reached > 0)
    )


def cached_text(item: Mapping[str, Any]) -> str:
    """Return `2026-11-28T10:00:00Z on node1, 2 x H200, attempt 0007` for a Pass taken from an earlier record."""
    source = table(item.get("cached_from"))
    last = attempts(item)[-1] if attempts(item) else {}
    when = source.get("when") or last.get("started") or "an earlier run"
    parts = [str(when)]
    if source.get("host"):
        parts[0] += f" on {source['host']}"
    if gpus := gpu_text(source.get("gpus") or last.get("gpus")):
        parts.append(gpus)
    if attempt := source.get("attempt") or last.get("id"):
        parts.append(f"attempt {attempt}")
    return one_line(", ".join(parts))


def gpu_text(gpus: object) -> str:
    """Return a list of GPU names as `2 x NVIDIA H200`, a plain count as `2 GPUs`, anything else as text."""
    if isinstance(gpus, int) and not isinstance(gpus, bool):
        return f"{gpus} GPU{'' if gpus == 1 else 's'}"
    if isinstance(gpus, (list, tuple)):
        names = [one_line(g.get("name") if isinstance(g, dict) else g) for g in gpus]
        return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
    return one_line(gpus) if gpus else ""


def check_tags(check: Mapping[str, Any]) -> list[str]:
    """Return the metric tags a check asserts: its `tags`, else those named `data["..."]` in the expression."""
    given = check.get("tags")
    if isinstance(given, (list, tuple)) and given:
        return list(dict.fromkeys(str(t) for t in given))
    return list(dict.fromkeys(found[1] for found in _TAG.findall(str(check.get("expr", "")))))


def inside(root: Path, relative: object) -> Path | None:
    """Return `root / relative`, or None where that is empty, absolute or leads out of `root`."""
    if not isinstance(relative, str) or not relative or "\0" in relative:
        return None
    pure = PurePosixPath(relative)
    return None if pure.is_absolute() or ".." in pure.parts else root / pure


def log_path(case: Mapping[str, Any]) -> str | None:
    """Return the run.log of the last attempt (of a suite: of its only one), relative to the workspace folder."""
    tries: Sequence[Mapping[str, Any]] = attempts(case)
    path = tries[-1].get("path") if tries else case.get("path")
    return f"{path}/run.log" if isinstance(path, str) and path else None


def command_line(argv: object) -> str:
    """Return an argv as one line for a shell."""
    import shlex

    return shlex.join(one_line(a, 4000) for a in argv) if isinstance(argv, (list, tuple)) else one_line(argv or "")


def baseline_words(case: Mapping[str, Any]) -> tuple[str, str]:
    """Return what the vendored Bridge says of a case: new, pre-existing or environment, and a sentence; or nothing."""
    found = table(case.get("baseline"))
    if not found:
        return "", ""
    kind = one_line(found.get("finding") or "")
    return kind, one_line(found.get("text") or f"the vendored Bridge gives {verdict_of(found)}")
