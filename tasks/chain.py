"""The chain behind a verdict: verdict <- rule <- evidence (file, line, value); for doit why, report.json and the page.

Pure: it knows which rule a reason's kind stands for and which file of the attempt holds the value. One link a reason; a
Pass has one link a proof.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tasks.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tasks.records import Record

# kind of a reason -> the rule it speaks for, and the file of the attempt that shows it ("": the reason names it itself)
RULES = {
    "rc": ("the process ends by itself with rc 0", "exit.json"),
    "steps": ("the last step of the step tag is the requested one", "metrics.json"),
    "no_evidence": ("this attempt left event files and a log", "attempt.json"),
    "event_file": ("event files are whole and agree with each other", ""),
    "non_finite": ("every value of train/*, of the step tag and of real_work is finite", "metrics.json"),
    "check": ("every check is evaluated and true", "metrics.json"),
    "no_real_work": ("the run did real work: some series is not constant zero", "metrics.json"),
    "log_lost": ("every line of the log could be written", "exit.json"),
    "expect_log": ("the expected lines are in the log", "run.log"),
    "forbid_log": ("no forbidden line is in the log", "run.log"),
    "origin": ("every process imports the trees under test", "origins"),
    "backend": ("Megatron's policy worker is in the log", "run.log"),
    "conversion_cache": ("the Hugging Face weights are converted by this attempt", "run.log"),
    "file": ("the expected files are new and not empty", "attempt.json"),
    "no_exit": ("an attempt without an end proves nothing", "exit.json"),
    "stopped": ("a run that was stopped measured nothing", "exit.json"),
    "snapshot": ("what ran is what is named: the snapshot is unchanged", "attempt.json"),
    "probe": ("the import probe is a Pass for the same trees and image", ""),
    "skip": ("a script that skips itself is no Pass", "run.log"),
    "hang": ("the process ends by itself after the training", "exit.json"),
    "teardown": ("the process ends well after the training", "exit.json"),
    "bridge_frame": ("an exception that came through the Bridge is the change's", ""),
    "before_workers": ("a death before the policy workers is not the Bridge's", "run.log"),
    "undecided": ("where the log cannot tell, the vendored Bridge decides", "run.log"),
    "baseline": ("a failure that the vendored Bridge shows, too, is not the change's", ""),
    "infrastructure": ("the first cause is infrastructure", "run.log"),
    "environment": ("the first cause is the environment", "run.log"),
    "configuration": ("the first cause is the configuration", "run.log"),
    "change": ("the first cause is the change", "run.log"),
    "dependency": ("a stage has its turn when what it needs is a Pass", ""),
    "not_run": ("nothing is a Pass that has not run", ""),
    "cached": ("require_executed=1 asks for a run of its own", ""),
    "repeat": ("a repeat is a Pass if every attempt is", ""),
}
PREFLIGHT = ("a case is started only where it can run", "")
_LINE = re.compile(r"run\.log:(\d+)")
_SHOWN_ORIGINS = 3


@dataclass(frozen=True, slots=True)
class Link:
    """One chain. `file` is relative to the workspace or a path of its own, `line` counts from 1, `value` was found."""

    verdict: str
    rule: str
    file: str | None
    line: int | None
    value: str | None

    @property
    def text(self) -> str:
        """Return the chain as one line."""
        place = f"{self.file}:{self.line}" if self.file and self.line else self.file
        shown = ": ".join(part for part in (place, self.value) if part)
        return " \N{LEFTWARDS ARROW} ".join(part for part in (self.verdict, self.rule, shown) if part)

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        return {**asdict(self), "text": self.text}


def links(
    verdict: str, reasons: Sequence[Mapping[str, Any]], judged: Mapping[str, Any], attempt: str | None
) -> list[Link]:
    """Return the chains of a verdict; `judged` is the check's artefact, `attempt` the folder of its attempt."""
    if verdict == "Pass":
        return list(_proofs(judged, attempt)) if attempt else []
    return [_link(verdict, Reason(**reason), judged, attempt) for reason in reasons]


def _link(verdict: str, reason: Reason, judged: Mapping[str, Any], attempt: str | None) -> Link:
    rule, name = RULES.get(reason.kind, PREFLIGHT)
    file = os.path.normpath(f"{attempt}/{name}") if attempt and name else None
    line = _LINE.search(reason.text)
    value = reason.text
    if reason.kind == "check":
        check: Mapping[str, Any] = next((c for c in judged.get("checks", []) if c["expr"] == reason.subject), {})
        value = _measured(check) if check else value
    elif reason.kind == "repeat":
        file = "report/repeat.json"
    elif reason.kind in ("event_file", "bridge_frame"):
        file = reason.subject
    return Link(verdict, rule, file, int(line[1]) if line and name == "run.log" else None, value)


def _measured(check: Mapping[str, Any]) -> str:
    if check.get("value") is None:
        return f"{check['expr']}: not evaluated, {check['text']}"
    worst = f" at step {check['worst_step']}" if check.get("worst_step") else ""
    limit = f", limit {check['op']} {check['limit']}" if check.get("limit") is not None else ""
    return f"{check['expr']} is {check['value']}{worst}{limit}"


def _proofs(judged: Mapping[str, Any], attempt: str) -> Iterator[Link]:
    """Yield what a Pass rests on, each with the file that shows it."""
    steps = judged.get("steps") or {}
    yield Link("Pass", RULES["rc"][0], f"{attempt}/exit.json", None, "rc 0")
    if steps.get("requested") is not None:
        value = f"{steps['reached']} of {steps['requested']}"
        yield Link("Pass", RULES["steps"][0], f"{attempt}/metrics.json", None, value)
    for check in judged.get("checks", []):
        yield Link("Pass", RULES["check"][0], f"{attempt}/metrics.json", None, _measured(check))
    for origin in (judged.get("evidence") or {}).get("origins", [])[:_SHOWN_ORIGINS]:
        yield Link("Pass", RULES["origin"][0], f"{attempt}/origins", None, origin)
    yield Link("Pass", RULES["probe"][0], "stages/probe.json", None, "Pass")


def cached(verdict: str, run: Record) -> Link:
    """Return why an earlier run answers for this one."""
    file = f"records/run/{run.name}/{run.key[:32]}.json"
    driver = next(
        (f", GPU driver {one['driver']}" for one in run.artefact.get("attempts", [])[-1:] if one.get("driver")), ""
    )
    text = f"recorded {run.finished} on {run.host}{driver}; {len(run.evidence)} evidence files hashed again"
    return Link(verdict, "equal inputs, unchanged evidence: the earlier run answers", file, None, text)
