"""Read what an attempt left, merge its event files, and have verdict.decide decide: seconds, never a GPU.

The files are read here and nowhere else; `verdict` gets plain values. Each result is a record of its own, so that a
changed threshold re-judges and a truncated metrics.json is made again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tasks import refit, verdict
from tasks.files import read_json, sha256_json, write_bytes, write_json
from tasks.reason import Reason, Verdict
from tasks.settings import ROOT
from tasks.stage import Done, code
from tasks.verdict import Evidence, Expectation, Origin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tasks.checks import CheckResult
    from tasks.levels import Case
    from tasks.metrics import Overlap
    from tasks.pipeline import Pipeline
    from tasks.triage import LogFacts

# our own files whose change makes an earlier verdict worthless
JUDGES = (
    "tasks/verdict.py", "tasks/judging.py", "tasks/checks.py", "tasks/grammar.py", "tasks/trends.py",
    "tasks/refit.py", "tasks/reason.py",
    *(f"tasks/triage/{p.name}" for p in sorted((ROOT / "tasks/triage").iterdir()) if p.suffix in (".py", ".yaml")),
)  # fmt: skip
EARLIER = 30  # values of earlier runs that a check is shown among
KIND_OF = {"megatron.bridge": "bridge", "megatron.core": "mcore", "nemo_rl": "nemo_rl"}


def _last(pipe: Pipeline, case: Case) -> Mapping[str, Any]:
    """Return the facts of the attempt that counts: the last one of the run's record."""
    record = pipe.outcomes[f"run:{case.id}"].record
    if record is None:
        message = f"run:{case.id} has no record"
        raise RuntimeError(message)
    return dict(record.artefact["attempts"][-1])


def _evidence_digest(pipe: Pipeline, case: Case) -> str:
    record = pipe.outcomes[f"run:{case.id}"].record
    return sha256_json(dict(record.evidence)) if record else ""


def metrics_inputs(pipe: Pipeline, case: Case) -> dict[str, str]:
    """Return what merging depends on: the attempt's files, where logs are, and the code that merges."""
    where = sha256_json({"logs": case.logs, "also": dict(case.also_logs), "conversion": case.conversion})
    return {
        "run": _evidence_digest(pipe, case),
        "where": where,
        "code": code(
            "tasks/judging.py", "tasks/metrics.py", "tasks/eventfiles.py", "tasks/tfrecords.py", "tasks/crc32c.py"
        ),
    }


def merge(pipe: Pipeline, case: Case) -> Done:
    """Merge the attempt's own event files into metrics.json, in NeMo-RL's format."""
    from tasks import metrics

    folder = pipe.workspace.root / _last(pipe, case)["path"]
    series, files = merged(case, folder)
    data = metrics.to_json(metrics.Merged(series=series, files=(), overlaps=()))
    write_bytes(folder / "metrics.json", data)
    name = os.fspath((folder / "metrics.json").relative_to(pipe.workspace.root))
    return Done({"metrics": name, "event_files": files}, evidence={name: _sha(data)})


def merged(case: Case, folder: Path) -> tuple[dict[str, Mapping[str, float]], list[dict[str, Any]]]:
    """Return the series of an attempt's own event files, and what each file held."""
    from tasks import metrics

    home = folder / "logs"
    series: dict[str, Mapping[str, float]] = {}
    files: list[dict[str, Any]] = []
    for prefix, where in {"": case.logs, **case.also_logs}.items():
        if where is None or not (home / where).is_dir():
            continue
        found = metrics.merge(home / where)
        files += [asdict(file) for file in found.files]
        if case.conversion != "within_attempt":  # one run: two files that disagree about a step are no evidence
            # step 0 holds set-up timings, which a resumed phase writes again
            files += [_conflict(o) for o in found.overlaps if o.conflicts and o.last_step > 0]
        series |= {f"{prefix}/{tag}" if prefix else tag: values for tag, values in found.series.items()}
    return series, files


def _sha(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def _conflict(overlap: Overlap) -> dict[str, Any]:
    """Return an entry that says where two event files of one run contradict each other (cases.md 29)."""
    from tasks.metrics import EventFile

    steps = f"steps {overlap.first_step} to {overlap.last_step}"
    text = f"{steps} differ from {overlap.earlier} ({overlap.conflicts} values, worst {overlap.tag})"
    return asdict(EventFile(overlap.later, 0, overlap.first_step, overlap.last_step, 0, text))


def expectation(case: Case) -> Expectation:
    """Return what the case must show."""
    return Expectation(
        steps=case.steps, step_tag=case.step_tag, megatron=case.backend == "megatron", checks=case.checks,
        real_work=case.real_work, expect_log=case.expect_log, forbid_log=case.forbid_log, files=case.files,
        optional=case.optional,
    )  # fmt: skip


def check_inputs(pipe: Pipeline, case: Case) -> dict[str, str]:
    """Return what judging depends on; no GPU, no tree: those are the run's."""
    probe = pipe.outcomes.get(_probe_task(pipe, case))
    metrics = pipe.outcomes[f"metrics:{case.id}"].record
    return {
        "run": _evidence_digest(pipe, case),
        "facts": sha256_json(dict(_last(pipe, case))),
        "metrics": sha256_json(dict(metrics.artefact)) if metrics else "",
        "expectation": sha256_json({**asdict(expectation(case)), "conversion": case.conversion}),
        "probe": str(probe.verdict if probe else None),
        "code": code(*JUDGES),
    }


def _probe_task(pipe: Pipeline, case: Case) -> str:
    return f"probe-{pipe.environment_of(case)}".rstrip("-")


def retry_class(pipe: Pipeline, case: Case, facts: Mapping[str, Any]) -> str | None:
    """Return why an attempt that has just ended may be tried again, or None: never for a failed check.

    It is judged as it will be later; only infrastructure and a death after complete, sound training say nothing of the
    change.
    """
    series, files = merged(case, pipe.workspace.root / facts["path"])
    evidence, _ = read_evidence(pipe, case, facts, series, files)
    decision = verdict.decide(expectation(case), evidence)
    return decision.failure_class if decision.failure_class in ("infrastructure", "teardown") else None


def read_evidence(
    pipe: Pipeline,
    case: Case,
    facts: Mapping[str, Any],
    series: Mapping[str, Mapping[str, Any]],
    files: list[dict[str, Any]],
) -> tuple[Evidence, LogFacts | None]:
    """Return the evidence of one attempt, given its merged series."""
    from tasks import triage
    from tasks.metrics import EventFile

    folder = pipe.workspace.root / facts["path"]
    log = None
    if (folder / "run.log").exists():
        log = triage.read_log(
            folder / "run.log", expect=case.expect_log, forbid=case.forbid_log, path_map=facts.get("path_map", {})
        )
    probe = pipe.outcomes.get(_probe_task(pipe, case))
    exit_facts = read_json(folder / "exit.json")
    if exit_facts is not None:
        exit_facts |= {"reason": facts["reason"], "detail": facts.get("detail")}
    return Evidence(
        exit=exit_facts,
        facts=log,
        series=series,
        event_files=tuple(EventFile(**file) for file in files),
        missing_files=tuple(facts["missing_files"]),
        origins=read_origins(folder / "origins", facts["roots"]),
        probe=probe.verdict if probe else None,
        damage=Reason("snapshot", "bridge", facts["damage"]) if facts["damage"] else None,
        foreign_conversion=foreign_conversion(folder, case, log),
    ), log


def read_origins(folder: Path, roots: Mapping[str, str]) -> tuple[Origin, ...]:
    """Return where the processes of the run took our packages from, equal lines once, wrong ones first."""
    found = set()
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                note = json.loads(line)
                module, where = note["module"], note["path"]
            except (ValueError, KeyError, TypeError):
                continue  # a process was killed in the middle of its line; the others tell
            if not where:
                continue  # looked for and not found, e.g. nemo_rl in a tool that does not need it
            root = roots[KIND_OF[module]].rstrip("/") + "/"
            real = os.path.realpath(where) if os.path.exists(where) else where
            expected = where.startswith(root) or real.startswith(os.path.realpath(root) + "/")
            found.add(Origin(module, where, note.get("process", "?"), expected))
    return tuple(sorted(found, key=lambda o: (o.expected, o.module, o.path, o.process)))


def foreign_conversion(folder: Path, case: Case, log: LogFacts | None) -> str | None:
    """Return the "Skipping import." line that shows a conversion which this attempt did not make, or None.

    The conversion folder of an attempt starts empty, so a later phase of the same attempt may reuse it where the case
    says so ("within_attempt"); the line names the path (NeMo-RL models/megatron/setup.py).
    """
    if log is None or not log.import_skipped:
        return None
    ours = f"{folder.name}/work/conversions", "/e2e/attempt/work/conversions"
    for line in log.import_lines:
        if not (case.conversion == "within_attempt" and any(path in line for path in ours)):
            return line
    return None


def _history(pipe: Pipeline, case: Case, check: CheckResult) -> dict[str, Any]:
    """Return the values of earlier runs of the case, oldest first, and where this one lies among them."""
    from tasks.checks import history

    values = {  # a run that was judged twice counts once
        record.inputs.get("run"): known["value"]
        for record in pipe.records.history("check", case.id)
        for known in record.artefact.get("checks", [])
        if known["expr"] == check.expr and isinstance(known["value"], float)
    }
    values.pop(_evidence_digest(pipe, case), None)
    earlier = list(values.values())[-EARLIER:]
    text = history(check.value, earlier)
    return ({"earlier": earlier} if earlier else {}) | ({"history": text} if text else {})


def _origins(evidence: Evidence) -> list[str]:
    """Return which file each kind of process took each package from, one line a combination."""
    return [f"{o.module} from {o.path} ({o.process})" for o in evidence.origins[:20]]


def judge(pipe: Pipeline, case: Case) -> Done:
    """Decide the case and write checks.json and verdict.json beside its evidence."""
    facts = _last(pipe, case)
    folder = pipe.workspace.root / facts["path"]
    record = pipe.outcomes[f"metrics:{case.id}"].record
    files = list(record.artefact["event_files"]) if record else []
    evidence, log = read_evidence(pipe, case, facts, read_json(folder / "metrics.json") or {}, files)
    decision = verdict.decide(expectation(case), evidence)
    checks = [{**check.as_dict(), **_history(pipe, case, check)} for check in decision.checks]
    steps = {"requested": case.steps, "reached": decision.steps_reached}
    reasons = [r.as_dict() for r in decision.reasons]
    write_json(folder / "checks.json", checks)
    write_json(
        folder / "verdict.json", {"case": case.id, "verdict": decision.verdict, "reasons": reasons, "steps": steps}
    )
    first = log.first if log else None
    return Done(
        {
            "checks": checks,
            "steps": steps,
            "class": decision.failure_class,
            "first_error": {"text": first.text, "line": first.line, "signature": first.signature} if first else None,
            "warnings": list(log.warnings) if log else [],
            "refit": refit.table(evidence.series, first.signature if first else None),
            "evidence": {"workers_started": bool(log and log.workers_started), "origins": _origins(evidence)},
        },
        decision.verdict,
        decision.reasons,
        reusable=decision.verdict is not Verdict.BLOCKED,
    )
