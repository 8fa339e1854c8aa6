"""Run a case: preflight, one attempt (one more where its class allows it), and what it left; nothing is judged here.

A run is reusable when its process ended by itself with rc 0: then only its evidence counts, and judging it anew costs
a second. Any other end is run again at the next call.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import (
    attempts,
    case_command,
    checkouts,
    cpu,
    environment,
    gpus,
    inflight,
    local_copy,
    records,
    resolution,
    snapshot,
)
from tasks.files import read_json, write_json
from tasks.reason import Reason, Verdict
from tasks.stage import Done, stated

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from tasks.attempts import Command, Place, Tree
    from tasks.levels import Case
    from tasks.pipeline import Pipeline

# Ray and vLLM print seldom while they compile; a driver whose engine died says nothing for ever (cases.md 106).
SILENCE_S = 1800.0
INTERFERED = ("oom", "preempted", "time_limit", "node_fail", "requeued", "cancelled")  # whatever exit.json says
NOT_AGAIN = ("cancelled", "time_limit")  # somebody meant it, or it would only meet the same limit
KEPT_BYTES = 16 << 20  # larger outputs (checkpoints) are listed with size, not copied


def inputs(pipe: Pipeline, case: Case) -> dict[str, str]:
    """Return the parts of a case's input digest (design.md, "Words")."""
    name = pipe.environment_of(case)
    return {
        **stated(pipe, case, (kind for kind in checkouts.TREES if kind in case.reaches)),
        "config": resolution.digest(pipe, case),
        "gpus": pipe.gpus.label() if case.gpus and name != "cpu" else "none",
        "runtime": pipe.place_of(name).runtime.name,
    }


def preflight(pipe: Pipeline, case: Case, place: Place) -> list[Reason]:
    """Return why the case cannot run here, before anything is started; empty if it can."""
    from tasks import environment, models

    reasons = []
    waiting = pipe.in_flight(f"run:{case.id}") is not None  # its GPUs are granted and paid for
    if not place.rehearsal and case.gpus and not waiting:  # the CPU environment pretends its GPUs
        lacking = gpus.lacking(case.gpus, pipe.gpus) if pipe.offer is None else None
        text = pipe.offer.lacking(case.gpus, case.nodes) if pipe.offer else None
        reasons += [lacking] if lacking else [Reason("gpus", "sinfo", text)] if text else []
        if budget := over_budget(pipe, case):
            reasons.append(budget)
    if case.nodes > 1 and place.runtime.name != "slurm":
        reasons.append(Reason("nodes", case.id, f"needs {case.nodes} nodes: use runtime=slurm"))
    if place.runtime.name == "local":
        for path in case.clean:
            if path.startswith("/") and Path(path).exists():
                text = f"{path} exists and the script would delete or reuse it: move it away and call again"
                reasons.append(Reason("foreign_file", path, text))
    reasons += [
        Reason("needs", need, f"needs {need}: set {variable}")
        for need, variable in (("hf_token", "HF_TOKEN"),)
        if need in case.needs and not os.environ.get(variable)
    ]
    if not place.rehearsal:
        reasons += models.preflight(case, {**environment.passed(os.environ), **case.env})
    free = shutil.disk_usage(pipe.workspace.root).free
    if free < 2 << 30:
        reasons.append(
            Reason("disk", os.fspath(pipe.workspace.root), f"{free >> 20} MiB free, 2 GiB needed: build=PATH")
        )
    return reasons


def over_budget(pipe: Pipeline, case: Case) -> Reason | None:
    """Return why another attempt of the case would pass `max_gpu_hours=`, counting its minutes in levels.yaml."""
    most, hours = pipe.settings.max_gpu_hours, case.gpus * case.minutes / 60
    if most is None or pipe.gpu_hours + hours <= most:
        return None
    text = f"{hours:.1f} GPU-hours, {pipe.gpu_hours:.1f} used by this call: more than max_gpu_hours={most:g}"
    return Reason("gpu_hours", case.id, text, f"{most:g}", f"{pipe.gpu_hours + hours:.1f}")


def execute(pipe: Pipeline, case: Case, retries: int | None = None) -> Done:
    """Run the case; another attempt follows only for classes that say nothing about the change (default: retries=)."""
    from tasks import judging

    name = pipe.environment_of(case)
    place = pipe.place_of(name)
    pipe.workspace.root.mkdir(parents=True, exist_ok=True)
    reasons = preflight(pipe, case, place)
    if reasons:
        verdict = Verdict.SKIPPED if case.optional else Verdict.BLOCKED
        return Done({"attempts": []}, verdict, tuple(reasons), reusable=False)
    trees = pipe.sound_trees(baseline=name == "baseline")
    tried: list[dict[str, Any]] = []
    before = pipe.records.latest("run", case.id)
    most = pipe.settings.retries if retries is None else retries
    with _gpu_lease(pipe, case, place):
        while True:
            if not place.rehearsal and pipe.in_flight(f"run:{case.id}") is None:
                pipe.gpu_hours += case.gpus * case.minutes / 60
            facts = _attempt(pipe, case, place, trees)
            final = pipe.stop.is_set() or facts["reason"] in NOT_AGAIN
            again = None if final else judging.retry_class(pipe, case, facts)
            tried.append({**facts, "retry_class": again})
            if again is None or len(tried) > most or over_budget(pipe, case):
                break
            inflight.close(pipe.workspace.root / facts["path"])
    proof: dict[str, str] = {}
    for one in tried:
        proof |= attempts.evidence_files(pipe.workspace.root / one["path"], pipe.workspace.root)
        if not pipe.settings.keep_work:
            attempts.clear_work(pipe.workspace.root / one["path"])
    last = tried[-1]
    clean = last["reason"] == "exited" and last["rc"] == 0 and last["damage"] is None and not last["log_lost_bytes"]
    return Done(
        {"attempts": tried, "command": _as_run(pipe, tried[-1], case), "notes": gpus.driver_notes(tried, before)},
        reusable=clean, evidence=proof, gpus=pipe.gpus.models[: case.gpus],
    )  # fmt: skip


def _as_run(pipe: Pipeline, last: Mapping[str, Any], case: Case) -> list[str]:
    """Return the exact command of an attempt, as its spec has it."""
    spec = read_json(pipe.workspace.root / last["path"] / "spec.json") or {}
    return list(spec.get("argv") or case_command.argv(pipe, case))


def _command(pipe: Pipeline, case: Case, paths: Mapping[str, str], place: Place, cwd: str) -> Command:
    """Return the command of one attempt."""
    found, env = case_command.words(pipe, case, place, paths)
    plan = case.rehearsal if place.rehearsal else None
    if found[0] == "python":
        found[0] = place.interpreter
    return attempts.Command(
        tuple(found), cwd, pipe.settings.timeout_s or case.timeout_s, env, gpus=case.gpus,
        done_pattern=case.done_pattern, grace_s=case.grace_s, silence_s=SILENCE_S, network="network" in case.needs,
        standins=tuple(name for name in plan.standins if name not in cpu.ALWAYS) if plan else (), nodes=case.nodes,
    )  # fmt: skip


def _attempt(pipe: Pipeline, case: Case, place: Place, trees: Mapping[str, Tree]) -> dict[str, Any]:
    """Execute once and collect; return the plain facts that run.json keeps of it."""
    folder = pipe.folder(f"run:{case.id}", case.id)

    def command(paths: Mapping[str, str]) -> Command:
        cwd = snapshot.workplace(case.repo, trees[case.repo].path, folder, paths)
        return _command(pipe, case, paths, place, cwd)

    attempt = pipe.perform(place, trees, folder, f"run:{case.id}", command)
    missing = collect(case, folder, trees)
    damage = None if _bridge_is_intact(trees) else "the Bridge snapshot was changed while the case ran"
    if attempt.exit is not None:
        damage = damage or local_copy.unproved(folder, case.nodes)
    roots = {kind: place.root(kind, folder, trees) for kind in checkouts.TREES}
    exit_facts = attempt.exit or {}
    reason = how_it_ended(exit_facts, attempt.engine_reason)
    facts = {
        "id": attempt.id,
        "path": os.fspath(folder.relative_to(pipe.workspace.root)),
        "rc": exit_facts.get("rc"),
        "log_lost_bytes": exit_facts.get("log_lost_bytes", 0),
        "reason": reason,
        "detail": attempt.engine_detail,
        "started": exit_facts.get("started"),
        "duration_s": exit_facts.get("duration_s"),
        "gpus": list(pipe.gpus.models[: case.gpus]),
        "driver": exit_facts.get("environment", {}).get("driver"),
        "missing_files": missing,
        "damage": damage,
        "roots": roots,
        "path_map": pipe.path_map(folder, trees, place),
        # what bundle and reproduce need and the digests of the record do not give back
        "case": case.id,
        "overrides": list(pipe.settings.overrides),
        "runtime": place.runtime.name,
        "passed": environment.passed(os.environ),
        "image": {key: place.image.get(key) for key in ("ref", "digest", "id")},
        "trees": {kind: {"digest": m.digest, "sha": m.head} for kind, m in pipe.manifests.items()},
    }
    write_json(folder / "attempt.json", {k: v for k, v in facts.items() if k != "path_map"})
    return facts


def how_it_ended(exit_facts: Mapping[str, Any], engine: str) -> str:
    """Return the reason of an end: the agent's own, unless the engine's says that somebody interfered.

    Slurm sends its TERM to every process of a job: the command may die of it, or even end with rc 0, before the agent
    hears of it, and exit.json then says "exited".
    """
    own = str(exit_facts.get("reason", "no_exit"))
    if engine in INTERFERED or (engine not in ("", "exited") and own in ("no_exit", "terminated")):
        return engine
    return engine if engine == "stopped" and own == "exited" and exit_facts.get("rc") != 0 else own


def _bridge_is_intact(trees: Mapping[str, Tree]) -> bool:
    """Tell whether the Bridge's snapshot still has the content of its manifest; hashes 2,000 files in 0.2 s."""
    home = trees["bridge"].path.parent
    manifest = read_json(home / "manifest.json")
    if manifest is None:
        return True  # the vendored Bridge is part of NeMo-RL's snapshot, which the work copy has compared
    return snapshot.has_content(home)


def collect(case: Case, folder: Path, trees: Mapping[str, Tree]) -> list[str]:
    """Copy new outputs of the case beside run.log; return the globs of `files` that no new, non-empty file matches.

    New means: not part of the snapshot that the attempt's tree was copied from.
    """
    work = folder / "work" / case.repo
    old = snapshot.files_of(trees[case.repo].path)
    new = []
    for base, _, names in os.walk(work):
        for name in names:
            path = Path(base, name)
            relative = path.relative_to(work).as_posix()
            if relative not in old and path.is_file() and not path.is_symlink():
                new.append(relative)
    wanted = [case.logs, *case.also_logs.values()] if case.logs else list(case.also_logs.values())
    for relative in sorted(new):
        inside = any(place == "." or relative.startswith(f"{place}/") for place in wanted if place)
        is_output = inside and "tfevents" in relative
        is_text = relative.endswith(("run.log", "metrics.json", ".json", ".log")) and relative.startswith("tests/")
        if is_output or is_text:
            source = work / relative
            if is_output or source.stat().st_size <= KEPT_BYTES:
                target = folder / "logs" / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
    sizes = {relative: (work / relative).stat().st_size for relative in new}
    return [
        glob for glob in case.files if not any(size and _matches(relative, glob) for relative, size in sizes.items())
    ]


def _matches(path: str, glob: str) -> bool:
    """Tell whether a path matches; `*` crosses folders as in fnmatch, and `**/` may stand for none, as in a shell."""
    return fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path, glob.replace("**/", ""))


def _gpu_lease(pipe: Pipeline, case: Case, place: Place) -> AbstractContextManager[None]:
    """Hold the host's GPUs for one case: two of ours never share them, in this process or in another.

    Slurm gives each job GPUs of its own.
    """
    if not case.gpus or place.rehearsal or pipe.offer is not None:
        return nullcontext()
    return records.lock(
        pipe.settings.build / "leases" / "gpus.lock", pipe.settings.wait_s, "GPUs",
        lambda text: pipe.tell("progress", f"run:{case.id}", text=text),
    )  # fmt: skip
