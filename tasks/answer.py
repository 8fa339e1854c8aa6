"""report.json: what was asked, what came of it, proved by what, on which exact revisions (contract.md, "Files")."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tasks import __version__
from tasks.errors import UserError
from tasks.files import read_json, sha256_json
from tasks.reason import Reason, Verdict
from tasks.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.invocation import Invocation
    from tasks.levels import Case, Level, Suite
    from tasks.records import Record
    from tasks.stage import Outcome

ATTEMPT_KEYS = ("id", "path", "rc", "reason", "started", "duration_s", "gpus", "driver")
STAGES = ("image", "sync", "cpu", "probe", "probe-cpu", "probe-baseline")


def compose(now: Invocation) -> dict[str, Any]:
    """Return the report of an invocation as far as it has come; what has not run is Blocked, "not run yet"."""
    from tasks.report import answer

    report: dict[str, Any] = {
        "schema": 1,
        "workspace": now.workspace.name,
        "demo": now.workspace.demo,
        "requested": now.requested,
        "groups": {name: _members(now.levels.levels[name]) for name in now.requested if name in now.levels.levels},
        "provenance": provenance(now),
        "suites": [_suite(now, now.levels.suites[t[5:]]) for t in now.planned if t.startswith("unit:")],
        "cases": [
            *(_case(now, now.case(task[6:])) for task in now.planned if task.startswith("check:")),
            *(_repeat(now, now.case(task[7:])) for task in now.planned if task.startswith("repeat:")),
        ],
        "proofs": [_proof(now, task[6:]) for task in now.planned if task.startswith("proof:")],
    }
    probe = _stages(now)
    # `doit config:CASE` asks what a run would meet; the import proof it needs is then no answer by itself
    asked_only = bool(now.requested) and all(task.partition(":")[0] == "config" for task in now.requested)
    if probe and not (asked_only and probe["verdict"] == "Pass"):
        report["probe"] = probe
    report["limitations"] = limitations(now, report)
    report["follow_ups"] = follow_ups(report)
    report["stages"] = [_stage(now, task) for task in now.planned if not task.startswith("metrics:")]
    verdict, sentence = answer.overall(report)
    return {**report, "result": str(verdict), "sentence": sentence}


def _members(level: Level) -> list[str]:
    """Return what answers for a level or variant: its suites and required cases, those it includes among them."""
    return [*(f"unit.{name}" for name in level.suites), *(case.id for case in level.required)]


def _stage(now: Invocation, task: str) -> dict[str, Any]:
    """Return what became of a stage: ran, reused, failed or not run; why; and the stages that it waits for."""
    outcome, verdict, reasons = _verdict(now, task)
    if outcome is None or verdict == "Skipped":
        state, why = "not run", reasons[0]["text"] if reasons else ""
    elif outcome.cached:
        state, why = "reused", f"record of {outcome.record.finished}" if outcome.record else ""
    else:
        state, why = "ran" if verdict == "Pass" else "failed", outcome.why or (reasons[0]["text"] if reasons else "")
    needs = [need for need in now.needs[task] if not need.startswith("metrics:")]
    return {"name": task, "verdict": verdict, "reasons": reasons, "state": state, "why": why, "needs": needs}


def _stages(now: Invocation) -> dict[str, Any] | None:
    """Return the import proof, or the stage before it that stopped everything: the first that is no Pass speaks."""
    planned = [task for task in now.planned if task in STAGES]
    if not any(task.startswith("probe") for task in planned):
        return None
    for task in planned:
        outcome = now.outcomes.get(task)
        if outcome is None:
            continue
        if outcome.verdict is not Verdict.PASS:
            texts = [Reason(r.kind, r.subject, f"{task}: {r.text}", r.old, r.new) for r in outcome.reasons]
            return {"verdict": str(outcome.verdict), "reasons": [r.as_dict() for r in texts], "cached": False}
    last = [task for task in planned if task.startswith("probe")][-1]
    outcome = now.outcomes.get(last)
    if outcome is None:
        return {"verdict": "Blocked", "reasons": [_not_run(last).as_dict()], "cached": False}
    bridge = now.revision("bridge")["path"] if last != "probe-baseline" else "the vendored Bridge"
    text = f"megatron.bridge, megatron.core and nemo_rl come from the trees under test ({bridge})"
    return {"verdict": "Pass", "reasons": [], "text": text, "cached": outcome.cached}


def _not_run(task: str) -> Reason:
    return Reason("not_run", task, "not run yet")


def _dependency(now: Invocation, task: str) -> Reason | None:
    """Return why `task` never had its turn: the root that stopped it, not its direct parent."""
    root = now.roots.get(task)
    if root is None:
        return None
    outcome = now.outcomes.get(root)
    why = f": {outcome.reasons[0].text}" if outcome and outcome.reasons else ""
    verdict = str(outcome.verdict).lower() if outcome else "not a Pass"
    return Reason("dependency", root, f"{root} {verdict}{why}")


def provenance(now: Invocation) -> dict[str, Any]:
    """Return the exact revisions, image, host and runner of this invocation."""
    found: dict[str, Any] = {}
    for kind in ("bridge", "mcore", "nemo_rl"):
        known = read_json(now.workspace.artefact(kind)) if "sync" in now.outcomes else None
        found[kind] = {
            k: v for k, v in (known or {"path": os.fspath(now.settings.checkout(kind))}).items() if k != "components"
        }
    image, probe = (now.outcomes.get(task) for task in ("image", "probe-cpu"))
    described = dict(image.record.artefact) if image and image.record else {}
    if not described and probe and probe.record:
        described = dict(probe.record.artefact.get("image", {}))  # of rehearsals
    found["image"] = {k: v for k, v in described.items() if k not in ("verdict", "reasons")}
    found["host"] = os.uname().nodename
    needs_gpus = any(task.startswith("run:") and now.case(task[4:]).gpus for task in now.planned)
    found["gpus"] = list(now.gpus.models) if needs_gpus else []
    found["runner"] = {"version": __version__, "sha": _runner_sha()}
    return found


def _runner_sha() -> str | None:
    """Return the commit of this project without starting git: HEAD, or what it points at."""
    git = ROOT / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text(encoding="ascii").strip()
        packed = (git / "packed-refs").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None  # a wheel, or a work tree with a .git file: the version names it
    return next((line.split(" ")[0] for line in packed if line.endswith(f" {name}")), None)


def _verdict(now: Invocation, task: str) -> tuple[Outcome | None, str, list[dict[str, Any]]]:
    outcome = now.outcomes.get(task)
    if outcome is not None:
        return outcome, str(outcome.verdict), [r.as_dict() for r in outcome.reasons]
    reason = _dependency(now, task) or _not_run(task)
    return None, str(Verdict.BLOCKED), [reason.as_dict()]


def _suite(now: Invocation, suite: Suite) -> dict[str, Any]:
    outcome, verdict, reasons = _verdict(now, f"unit:{suite.name}")
    record = outcome.record if outcome else None
    counts = (record.artefact.get("counts") if record else None) or {}
    return {
        "name": suite.name, "title": suite.title, "verdict": verdict, "reasons": reasons,
        **{key: counts.get(key, 0) for key in ("tests", "failed", "errors", "skipped")},
        "cached": bool(outcome and outcome.cached), "duration_s": record.duration_s if record else 0.0,
        **({"path": record.artefact["attempt"]} if record and "attempt" in record.artefact else {}),
        **_cached_from(outcome),
    }  # fmt: skip


def _proof(now: Invocation, family: str) -> dict[str, Any]:
    outcome, verdict, reasons = _verdict(now, f"proof:{family}")
    record = outcome.record if outcome else None
    return {
        "family": family, "verdict": verdict, "reasons": reasons, "cached": bool(outcome and outcome.cached),
        "checks": list(record.artefact.get("checks", [])) if record else [], **_cached_from(outcome),
    }  # fmt: skip


def _cached_from(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None or outcome.record is None or not outcome.cached:
        return {}
    return {"cached_from": {"when": outcome.record.finished, "host": outcome.record.host}}


def _case(now: Invocation, case: Case) -> dict[str, Any]:
    from tasks import chain, repeat

    run = now.outcomes.get(f"run:{case.id}")
    for task in (f"check:{case.id}", f"metrics:{case.id}", f"run:{case.id}", f"config:{case.id}"):
        outcome = now.outcomes.get(task)
        if outcome is not None and (task.startswith("check:") or outcome.verdict is not Verdict.PASS):
            verdict, reasons = str(outcome.verdict), [r.as_dict() for r in outcome.reasons]
            break
    else:
        waiting = run is not None  # run is done, its verdict is on the way
        outcome, verdict, reasons = None, "Blocked", [_not_run(case.id).as_dict()]
        if not waiting:
            outcome, verdict, reasons = _verdict(now, f"run:{case.id}")
    check = now.outcomes.get(f"check:{case.id}")
    judged: Mapping[str, Any] = check.record.artefact if check and check.record else {}
    tried = list(run.record.artefact.get("attempts", [])) if run and run.record else []
    cached = bool(run and run.cached and check)
    if cached and verdict == "Pass" and now.settings.require_executed and run and run.record:
        verdict = str(Verdict.BLOCKED)
        text = f"cached: ran {run.record.finished}; require_executed=1 asks for a run of its own (fresh=1)"
        reasons = [Reason("cached", case.id, text).as_dict()]
    verdict, reasons, theirs = compared(now, case, verdict, reasons, judged)
    entry: dict[str, Any] = {
        "id": case.id, "level": case.level, "case": case.name, "title": case.title,
        "rehearsal": now.environment_of(case) == "cpu", "verdict": verdict, "reasons": reasons, "cached": cached,
        "attempts": [{key: one.get(key) for key in ATTEMPT_KEYS} for one in tried],
        "steps": judged.get("steps") or {"requested": case.steps, "reached": 0},
        "checks": judged.get("checks") or [_unevaluated(expr) for expr in case.checks],
        "command": list(run.record.artefact.get("command", [])) if run and run.record else list(case.argv()),
        "metrics": f"{tried[-1]['path']}/metrics.json" if tried and judged else None,
        "baseline": theirs,
        "model": case.model, "gpus_wanted": case.gpus, "first_error": judged.get("first_error"),
        "evidence": judged.get("evidence") or {}, "warnings": judged.get("warnings") or [],
        "refit": judged.get("refit"),
        "class": judged.get("class"), "flaky": len(tried) > 1 and verdict == "Pass",
        "limitations": [*case.limitations, *_notes(now, case), *repeat.known(now, case, run.record if run else None)],
    }  # fmt: skip
    if cached and run and run.record:
        entry["cached_from"] = {
            "when": run.record.finished, "host": run.record.host, "gpus": list(run.record.gpus),
            "attempt": tried[-1]["id"],
        }  # fmt: skip
    told = chain.links(verdict, reasons, judged, tried[-1]["path"] if tried else None)
    if cached and run and run.record:
        told.append(chain.cached(verdict, run.record))
    entry["chain"] = [link.text for link in told]
    if case.quarantine:
        held = case.quarantine
        entry["quarantine"] = {"reason": held.reason, "owner": held.owner, "until": held.until}
    return entry


def _notes(now: Invocation, case: Case) -> list[str]:
    """Return what of the case's config could not be resolved before the run, and what of its nodes is worth knowing."""
    found = (now.outcomes.get(f"{kind}:{case.id}") for kind in ("config", "run"))
    return [note for one in found if one and one.record for note in one.record.artefact.get("notes", [])]


def _unevaluated(expr: str) -> dict[str, Any]:
    """Return a check that had no turn: never silent, never a Pass."""
    return {"expr": expr, "verdict": str(Verdict.FAIL), "value": None, "limit": None, "text": f"not evaluated: {expr}"}


def _repeat(now: Invocation, case: Case) -> dict[str, Any]:
    from tasks import repeat

    described = _case(now, now.case(repeat.PREFIX + case.id))
    outcome, _, reasons = _verdict(now, f"repeat:{case.id}")
    if outcome is None or outcome.record is None:
        return {**described, "verdict": str(Verdict.BLOCKED), "reasons": reasons}
    return repeat.entry(outcome.record.artefact, described)


def compared(
    now: Invocation, case: Case, verdict: str, reasons: list[dict[str, Any]], judged: Mapping[str, Any]
) -> tuple[str, list[dict[str, Any]], dict[str, Any] | None]:
    """Return verdict and reasons after the comparison with the vendored Bridge, and that comparison."""
    theirs = baseline(now, case, verdict, judged)
    if theirs and judged.get("class") == "undecided" and theirs["finding"] != "new" and verdict == "Fail":
        # nothing in the evidence points at the change, and without it the case ends no better
        text = f"{theirs['text']}: not evidence against the change"
        return str(Verdict.BLOCKED), [Reason("baseline", case.id, text).as_dict(), *reasons], theirs
    return verdict, reasons, theirs


def baseline(now: Invocation, case: Case, verdict: str, judged: Mapping[str, Any]) -> dict[str, Any] | None:
    """Compare a case with the newest run of the vendored Bridge: if it is no Pass, new, pre-existing or environment."""
    if case.id.startswith(("baseline.", "rehearse.", "repeat.")):
        return None
    found = _baseline_records(now, case)
    if found is None:
        return None
    run, known = found
    tried = run.artefact["attempts"]
    shown = {
        "verdict": known.artefact["verdict"], "when": known.finished, "checks": known.artefact.get("checks", []),
        "metrics": f"{tried[-1]['path']}/metrics.json" if tried else None,
    }  # fmt: skip
    if verdict not in ("Fail", "Blocked"):
        return shown
    theirs = {c["expr"]: c for c in known.artefact.get("checks", [])}
    same = [
        c["expr"] for c in judged.get("checks", [])
        if c["verdict"] == "Fail" and theirs.get(c["expr"], {}).get("value") == c["value"] and c["value"] is not None
    ]  # fmt: skip
    word = {"Pass": "new", "Fail": "pre-existing", "Blocked": "environment"}.get(
        str(known.artefact["verdict"]), "unknown"
    )
    text = {
        "new": "the vendored Bridge passes: the failure is new with this change",
        "pre-existing": "the vendored Bridge fails, too" + (f", with the same value: {same[0]}" if same else ""),
        "environment": "the vendored Bridge is Blocked, too: the environment is the cause",
    }.get(word, "the baseline has no verdict")
    return {**shown, "finding": word, "text": text}


def _baseline_records(now: Invocation, case: Case) -> tuple[Record, Record] | None:
    """Return run and verdict of the baseline of this very image, GPU and NeMo-RL, or None."""
    theirs = now.case(f"baseline.{case.id}")
    known = now.records.history("check", theirs.id)
    if not known:
        return None  # inputs are asked for only where they can matter
    try:
        run = now.records.find("run", theirs.id, now.run(theirs).inputs())
    except UserError:
        return None  # nothing vendored
    if run is None:
        return None
    evidence = sha256_json(dict(run.evidence))
    judged = [r for r in known if r.inputs.get("run") == evidence]
    return (run, judged[-1]) if judged else None


def limitations(now: Invocation, report: Mapping[str, Any]) -> list[str]:
    """Return what this report does not show: each level's own limits and what was special about this run."""
    found: list[str] = []
    if report["demo"]:
        found.append("demo workspace: generated miniature repositories, no statement about Megatron-Bridge or NeMo-RL")
    if any(case["rehearsal"] for case in report["cases"]):
        found.append("rehearsal: tiny models and CPU stand-ins, never a level's Pass")
    if report["proofs"]:
        from tasks import proof

        found += [f"no CPU proof of {name}: {reason}" for name, reason in proof.UNPROVED.items()]
        known = (now.outcomes[f"proof:{p['family']}"].record for p in report["proofs"] if p["checks"])
        untried = next((r.artefact.get("untried") for r in known if r), None)
        found += [f"no CPU proof, no tiny model yet: {', '.join(untried)}"] if untried else []
    ran = {case["level"] for case in report["cases"] if not case["rehearsal"]}
    for level in now.levels.levels.values():
        if level.id in ran:
            found += [f"{level.id} does not prove: {text}" for text in level.does_not_prove]
    for case in report["cases"]:
        found += [f"{case['id']}: {text}" for text in case["limitations"]]
        found += [f"{case['id']}: the log warns: {text[:160]}" for text in case["warnings"][:3]]
    pinned, core = report["provenance"]["bridge"].get("core_pin"), report["provenance"]["mcore"].get("sha")
    if pinned and core and pinned != core:
        found.append(f"Megatron-Core under test is {core[:12]}, the Bridge's commit pins {pinned[:12]}")
    for one in report["provenance"].get("image", {}).get("differences", ()):
        found += [f"image: {one['text']}"] if one["matters"] else []
    if now.settings.overrides:
        found.append(f"overrides of the command line: {' '.join(now.settings.overrides)}")
    return list(dict.fromkeys(found))


def follow_ups(report: Mapping[str, Any]) -> list[str]:
    """Return the next commands to type, the most useful first."""
    found = []
    for case in report["cases"]:
        if case["verdict"] == "Fail" and case["class"] == "undecided" and not case["baseline"]:
            found.append(f"doit baseline:{case['id']}")
        if case["verdict"] in ("Fail", "Blocked") and case["attempts"]:
            found.append(f"doit why {case['id']}")
    return list(dict.fromkeys(found))
