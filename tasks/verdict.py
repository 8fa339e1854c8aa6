"""The answer: the one pure function that decides a case from its evidence.

Order of the rules is order of harm: nothing is a Pass unless every proof is there (a wrong green), and what went wrong
before the Bridge had a say is Blocked, not Fail (wrong blame). Signatures live in triage/signatures.yaml, not here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.checks import evaluate, parse
from tasks.reason import Reason, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tasks.checks import CheckResult
    from tasks.metrics import EventFile
    from tasks.triage import LogFacts


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a case must show; the part of its definition that judging needs, so that a changed threshold re-judges."""

    steps: int | None = None
    step_tag: str = "train/loss"
    megatron: bool = True
    checks: tuple[str, ...] = ()
    real_work: tuple[str, ...] = ()
    expect_log: tuple[str, ...] = ()
    forbid_log: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one process of the run really took a module from; `expected` tells whether that is the tree under test."""

    module: str
    path: str
    process: str
    expected: bool


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything one attempt left behind, read but not judged.

    `exit` is exit.json or None; `series` is tag -> step -> value; `missing_files` the globs without a new, non-empty
    file; `probe` the probe's verdict for the same snapshot and image; `damage` why snapshot or evidence is not what it
    was; `foreign_conversion` a log line that shows a Hugging Face conversion not made by this attempt.
    """

    exit: Mapping[str, Any] | None
    facts: LogFacts | None
    series: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    event_files: tuple[EventFile, ...] = ()
    missing_files: tuple[str, ...] = ()
    origins: tuple[Origin, ...] = ()
    probe: Verdict | None = None
    damage: Reason | None = None
    foreign_conversion: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, why, each check with its value, and the last step of the step tag (0: none)."""

    verdict: Verdict
    reasons: tuple[Reason, ...]
    checks: tuple[CheckResult, ...] = ()
    steps_reached: int = 0
    failure_class: str | None = None


# An end by these is the environment's or the user's doing; nothing was measured about the change.
_STOPPED = {
    "terminated": "the run was stopped",
    "stopped": "the run was stopped",
    "runner_gone": "the runner died while the case ran",
    "spawn_failed": "the command could not be started",
    "not_started": "the engine did not start the run",
    "engine_lost": "the container engine was lost",
    "deadline": "the agent overran its own limits",
    "killed": "the run was killed from outside",
    "oom": "the run was killed for memory",
    "preempted": "the job was preempted",
    "time_limit": "the job met Slurm's time limit, not its own",
    "node_fail": "a node failed",
    "requeued": "the job was requeued",
    "cancelled": "the job was cancelled by somebody else",
}

# Proofs that a line of the log gives, or takes away by being there.
_OF_THE_LOG = frozenset({"expect_log", "backend"})


def steps_reached(series: Mapping[str, Mapping[str, Any]], tag: str) -> int:
    """Return the largest step of `tag`, 0 if it has none. Other tags count seconds as steps and never decide this."""
    return max((int(step) for step in series.get(tag, {})), default=0)


def _step_reasons(ask: Expectation, evidence: Evidence, reached: int) -> list[Reason]:
    if ask.steps is None:
        return []
    if not evidence.event_files:
        return [Reason("no_evidence", "event files", "no evidence: this attempt wrote no event file")]
    if ask.step_tag not in evidence.series:
        return [Reason("steps", ask.step_tag, f"metric {ask.step_tag} absent: 0 of {ask.steps} steps")]
    if not evidence.series[ask.step_tag]:
        return [Reason("steps", ask.step_tag, f"metric {ask.step_tag} has no points: 0 of {ask.steps} steps")]
    if reached < ask.steps:
        text = f"target step not reached: {reached} of {ask.steps}"
        return [Reason("steps", ask.step_tag, text, str(ask.steps), str(reached))]
    if reached > ask.steps:
        text = f"ran past the requested step: {reached}, asked for {ask.steps}"
        return [Reason("steps", ask.step_tag, text, str(ask.steps), str(reached))]
    return []


def _event_reasons(evidence: Evidence) -> list[Reason]:
    """Report files that end inside a record or are corrupt: points may be missing, so nothing read is complete."""
    return [
        Reason("event_file", file.path, f"event file {file.path}: {file.problem}")
        for file in evidence.event_files
        if file.problem and not (file.problem in {"no scalars", "empty"} and evidence.series)
    ]


def is_finite(value: Any) -> bool:
    """Tell whether a metric value is a finite number; the written forms "NaN" and "Infinity" are not."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def _finite_reasons(ask: Expectation, evidence: Evidence) -> list[Reason]:
    """Report what is not finite in the training series and in those that the case names as its proof of work."""
    reasons = []
    for tag in sorted(evidence.series):
        if tag.startswith("train/") or tag in (ask.step_tag, *ask.real_work):
            bad = [step for step, value in evidence.series[tag].items() if not is_finite(value)]
            if bad:
                first = min(bad, key=int)
                text = f"{tag} is {evidence.series[tag][first]} at step {first} ({len(bad)} non-finite values)"
                reasons.append(Reason("non_finite", tag, text))
    return reasons


def _work_reasons(ask: Expectation, evidence: Evidence) -> list[Reason]:
    """Refuse runs in which nothing was learned or even differentiated: all checks can hold on zeros (cases.md 103)."""
    reasons = []
    for tag in ask.real_work:
        values = evidence.series.get(tag, {}).values()
        if not values:
            reasons.append(
                Reason("no_real_work", tag, f"{tag} was not logged: nothing shows that the run did real work")
            )
        elif all(is_finite(v) and v == 0 for v in values):
            reasons.append(Reason("no_real_work", tag, f"{tag} is 0 at every step: the run did no real work"))
    return reasons


def _log_reasons(ask: Expectation, evidence: Evidence) -> list[Reason]:
    if evidence.facts is None:
        return [Reason("no_evidence", "run.log", "no evidence: run.log is missing")]
    reasons = [
        Reason("expect_log", pattern, f"expected log line never appeared: {pattern}")
        for pattern in ask.expect_log
        if not evidence.facts.expected.get(pattern)
    ]
    for pattern in ask.forbid_log:
        line = evidence.facts.forbidden.get(pattern)
        if line is not None:
            reasons.append(Reason("forbid_log", pattern, f"forbidden log line appeared: {pattern} (run.log:{line})"))
    return reasons


def _origin_reasons(ask: Expectation, evidence: Evidence) -> list[Reason]:
    reasons = [
        Reason("origin", o.module, f"{o.process} imported {o.module} from {o.path}, not from the tree under test")
        for o in evidence.origins
        if not o.expected
    ]
    if ask.megatron:
        if not any(o.module == "megatron.bridge" and o.expected for o in evidence.origins):
            text = "no process of the run imported megatron.bridge from the tree under test"
            reasons.append(Reason("origin", "megatron.bridge", text))
        if evidence.facts is not None and not evidence.facts.megatron_worker:
            text = "the log has no MegatronPolicyWorker line: another backend may have trained"
            reasons.append(Reason("backend", "megatron", text))
    if evidence.foreign_conversion:
        text = f"the Hugging Face import was skipped, an old conversion was used: {evidence.foreign_conversion[:200]}"
        reasons.append(Reason("conversion_cache", "conversion", text))
    return reasons


def missing_proofs(ask: Expectation, evidence: Evidence, checks: tuple[CheckResult, ...]) -> list[Reason]:
    """Return one reason for each proof that a Pass needs and the evidence lacks; empty only if all are there."""
    reached = steps_reached(evidence.series, ask.step_tag)
    return [
        *_origin_reasons(ask, evidence),  # first: whatever else is wrong, another tree was measured
        *_step_reasons(ask, evidence, reached),
        *_event_reasons(evidence),
        *_finite_reasons(ask, evidence),
        *(Reason("check", c.expr, c.text, None if c.limit is None else str(c.limit), str(c.value))
          for c in checks if c.verdict is not Verdict.PASS),
        *_work_reasons(ask, evidence),
        *_log_reasons(ask, evidence),
        *(Reason("file", glob, f"no new, non-empty file matches {glob}") for glob in evidence.missing_files),
    ]  # fmt: skip


def _cause(evidence: Evidence) -> Reason | None:
    """Return the first cause that the log names, as a reason: the earliest finding, its echoes counted."""
    if evidence.facts is None or evidence.facts.first is None:
        return None
    first = evidence.facts.first
    echoes = f" ({first.echoes} similar)" if first.echoes else ""
    text = f"run.log:{first.line}: {first.text[:300]}{echoes}"
    return Reason(first.kind, first.signature, text + (f"; {first.remedy}" if first.remedy else ""))


def _end(exit_facts: Mapping[str, Any]) -> str:
    """Say in words how the process ended."""
    reason, rc = exit_facts.get("reason"), exit_facts.get("rc")
    words = {
        "timeout": "stopped at the time limit",
        "hang": "training was done, then the process hung and was stopped",
        "silent": "stopped after a long silence of the log",
    }
    return words.get(str(reason), f"process ended with rc {rc}")


def decide(ask: Expectation, evidence: Evidence) -> Decision:
    """Return the verdict of one attempt. Pure: the same evidence always gives the same decision.

    Pass needs rc 0 and an empty `missing_proofs`. A run that did not end well is Blocked when its first cause is the
    environment's or it died before the policy workers existed, Fail when the cause is the change's, when a check is
    false at the full step count, or when only the end went wrong (class teardown or hang).
    """
    checks = tuple(evaluate(parse(expr), evidence.series) for expr in ask.checks)
    reached = steps_reached(evidence.series, ask.step_tag)

    def decided(verdict: Verdict, *reasons: Reason, failure_class: str | None = None) -> Decision:
        return Decision(verdict, reasons, checks, reached, failure_class)

    if evidence.damage is not None:
        return decided(Verdict.BLOCKED, evidence.damage)
    if evidence.exit is None:
        text = "the attempt has no exit.json: runner, engine or machine died before it ended"
        return decided(Verdict.BLOCKED, Reason("no_exit", "exit.json", text), failure_class="infrastructure")
    ended = str(evidence.exit.get("reason"))
    if ended in _STOPPED:
        text = f"{_STOPPED[ended]}: {evidence.exit.get('detail') or 'no result was measured'}"
        stopped = [Reason("stopped", ended, text)]
        cause = _cause(evidence)
        return decided(Verdict.BLOCKED, *stopped, *([cause] if cause else []), failure_class="infrastructure")
    if evidence.probe is not Verdict.PASS:
        text = "the import probe has no Pass for this snapshot and image"
        return decided(Verdict.BLOCKED, Reason("probe", "probe", text))
    missing = missing_proofs(ask, evidence, checks)
    facts = evidence.facts
    if facts is not None and facts.skip_line and not reached:
        text = f"the script skipped itself and trained nothing: {facts.skip_line[:200]}"
        return decided(Verdict.SKIPPED if ask.optional else Verdict.BLOCKED, Reason("skip", "script", text))
    complete = ask.steps is None or reached >= ask.steps
    if evidence.exit.get("rc") == 0 and ended == "exited":
        lost = evidence.exit.get("log_lost_bytes")
        if lost and all(reason.kind in _OF_THE_LOG for reason in missing):
            why = evidence.exit.get("log_error")
            text = f"{lost} bytes of run.log could not be written ({why}): what they said is unknown"
            return decided(Verdict.BLOCKED, Reason("log_lost", "run.log", text), failure_class="environment")
        if not missing:
            return decided(Verdict.PASS)
        cause = _cause(evidence)
        if not complete and cause is not None and cause.kind in {"infrastructure", "environment", "configuration"}:
            return decided(Verdict.BLOCKED, cause, *missing, failure_class=cause.kind)
        return decided(Verdict.FAIL, *missing, failure_class="early_end" if not complete else "check")
    return _decide_bad_end(ask, evidence, missing, decided, complete=complete)


def _decide_bad_end(
    ask: Expectation, evidence: Evidence, missing: list[Reason], decided: Callable[..., Decision], *, complete: bool
) -> Decision:
    """Decide a run whose process did not end by itself with rc 0."""
    exit_facts = evidence.exit or {}
    ended, facts, cause = str(exit_facts.get("reason")), evidence.facts, _cause(evidence)
    end = Reason("rc", "process", _end(exit_facts), "0", str(exit_facts.get("rc")))
    if complete and facts is not None and (ask.steps is not None or ended == "hang"):
        if not missing:
            steps = f"steps {ask.steps}/{ask.steps}, metrics ok" if ask.steps is not None else "nothing is missing"
            if ended == "hang" or (ended in {"timeout", "silent"} and facts.training_done):
                text = f"hang after completion: {steps}, {_end(exit_facts)}"
                return decided(Verdict.FAIL, Reason("hang", "process", text), failure_class="hang")
            text = f"teardown: {steps}, {_end(exit_facts)}"
            return decided(Verdict.FAIL, Reason("teardown", "process", text), failure_class="teardown")
        if any(r.kind in {"check", "non_finite", "origin", "conversion_cache"} for r in missing):
            return decided(Verdict.FAIL, *missing, end, failure_class="check")
    frame = facts.bridge_frame if facts is not None else None
    in_bridge = (
        [Reason("bridge_frame", frame.file, f"raised in the Bridge: {frame.file}:{frame.line} in {frame.function}")]
        if frame
        else []
    )
    first = [cause] if cause else []
    if cause is not None and cause.kind in {"infrastructure", "environment", "configuration"}:
        return decided(Verdict.BLOCKED, cause, end, *missing, failure_class=cause.kind)
    if in_bridge or (cause is not None and cause.kind == "change"):
        # out of memory or a NCCL time-out may pass through a Bridge frame: only the baseline tells
        open_question = cause is not None and cause.kind == "undecided"
        reasons = (*first, *in_bridge, end, *missing)
        return decided(Verdict.FAIL, *reasons, failure_class="undecided" if open_question else "change")
    if facts is not None and ask.megatron and not facts.workers_started and ask.steps is not None:
        text = "ended before the policy workers were initialised: not evidence against the Bridge"
        return decided(
            Verdict.BLOCKED, Reason("before_workers", "process", text), *first, end, failure_class="environment"
        )
    text = "the log does not tell whether the change or the environment did it; run the baseline: doit baseline:CASE"
    return decided(Verdict.FAIL, *first, end, *missing, Reason("undecided", "cause", text), failure_class="undecided")
