"""What a case inherits: from its `kind` the checks and log lines, from a rehearsal profile the tiny model's overrides.

Lists that say what must hold (checks, log lines, limitations, needs) add up, kind first; everything else is the nearest
word: the case's own, then the kind's, then the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks import levels_models as models
from tasks.errors import suggest

if TYPE_CHECKING:
    from tasks.levels_rules import Notes
    from tasks.marked_yaml import Place

SKIPPED_IMPORT = r"Skipping import\."
"""NeMo-RL prints it when an old conversion is reused (nemo_rl/models/megatron/setup.py): the mapping was not run."""

CONVERTED = r"successfully saved checkpoint from iteration +0 to (?!\S*tmp_step)"
"""Megatron-Core's line when the conversion is written; a training checkpoint goes to tmp_step_N."""

_EMPTY = models.KindModel()
_ALL_TREES = ["nemo_rl", "bridge", "mcore"]


def merged_case(case: models.CaseModel, model: models.FileModel, place: Place, notes: Notes) -> dict[str, Any]:
    """Return the case's keys with everything inherited, in plain JSON; names and line are the caller's."""
    kind = _EMPTY
    if case.kind is not None:
        found = model.kinds.get(case.kind)
        if found is None:
            notes.problem((*place, "kind"), f"unknown kind {case.kind!r}{suggest(case.kind, list(model.kinds))}")
        kind = found or _EMPTY
    conversion = case.conversion or ("fresh" if case.backend == "megatron" else "none")
    expect, forbid = [*kind.expect_log, *case.expect_log], [*kind.forbid_log, *case.forbid_log]
    if conversion == "fresh":
        forbid.append(SKIPPED_IMPORT)
    elif conversion == "within_attempt":
        expect.append(CONVERTED)
    step_tag = case.step_tag or kind.step_tag or "train/loss"
    real_work = case.real_work if case.real_work is not None else kind.real_work
    said = [f"no evidence for weight mappings: {case.not_mapping_evidence}"] if case.not_mapping_evidence else []
    merged = {
        "kind": case.kind or "",
        "script": case.script,
        "command": case.command,
        "repo": case.repo,
        "overrides": case.overrides,
        "env": case.env,
        "gpus": case.gpus,
        "nodes": case.nodes,
        "timeout_s": case.timeout,
        "minutes": case.timeout / 60 if case.minutes is None else case.minutes,
        "steps": case.steps,
        "step_tag": step_tag,
        "logs": case.logs or _usual_logs(case.script, steps=case.steps),
        "also_logs": case.also_logs,
        "backend": case.backend,
        "conversion": conversion,
        "checks": _once([*kind.checks, *case.checks]),
        "expect_log": _once(expect),
        "forbid_log": _once(forbid),
        "files": case.files,
        "clean": case.clean,
        "done_pattern": (case if "done_pattern" in case.model_fields_set else kind).done_pattern,
        "grace_s": case.grace or kind.grace or 60.0,
        "model": case.model,
        "also_models": case.also_models,
        "optional": case.optional,
        "quarantine": case.quarantine.model_dump() if case.quarantine else None,
        "needs": _once([*kind.needs, *case.needs]),
        "compares": case.compares if case.compares is not None else kind.compares or "",
        "not_mapping_evidence": case.not_mapping_evidence,
        "real_work": real_work if real_work is not None else [step_tag] if case.steps else [],
        "limitations": _once([*kind.limitations, *case.limitations, *said]),
        "reaches": case.reaches or _ALL_TREES,
        "no_rehearsal": case.no_rehearsal or ("" if case.rehearsal else "none is described"),
    }
    merged["rehearsal"] = _rehearsal(case.rehearsal, merged, model, (*place, "rehearsal"), notes)
    return merged


def _usual_logs(script: str | None, *, steps: int | None) -> str | None:
    """Return where a maintained script logs; for a command that has steps, the whole tree is searched for new files."""
    if script:
        return f"{script.removesuffix('.sh')}/logs"
    return "." if steps is not None else None


def _rehearsal(
    plan: models.RehearsalModel | None, case: dict[str, Any], model: models.FileModel, place: Place, notes: Notes
) -> dict[str, Any] | None:
    if plan is None:
        return None
    chain: list[models.ProfileModel] = [plan]  # nearest first
    name, seen = plan.profile, set[str]()
    while name is not None:
        profile = model.rehearsal_profiles.get(name)
        if profile is None or name in seen:
            what = "extends itself" if profile else f"is unknown{suggest(name, list(model.rehearsal_profiles))}"
            notes.problem((*place, "profile"), f"rehearsal profile {name!r} {what}")
            break
        seen.add(name)
        chain.append(profile)
        name = profile.extends

    def nearest(key: str, default: Any) -> Any:
        return next((v for p in chain if (v := getattr(p, key)) is not None), default)

    outward = chain[::-1]
    timeout = nearest("timeout", 900.0)
    return {
        "profile": plan.profile or "",
        "supported": plan.supported,
        "reason": plan.reason,
        "overrides": [o for p in outward for o in p.overrides],
        "env": {k: v for p in outward for k, v in p.env.items()},
        "gpus": nearest("gpus", 1),
        "nodes": nearest("nodes", 1),
        "timeout_s": timeout,
        "minutes": nearest("minutes", timeout / 60),
        "steps": plan.steps if plan.steps is not None else case["steps"],
        "checks": nearest("checks", case["checks"]),
        "expect_log": nearest("expect_log", case["expect_log"]),
        "forbid_log": nearest("forbid_log", case["forbid_log"]),
        "files": nearest("files", case["files"]),
        "real_work": nearest("real_work", case["real_work"]),
        "model": nearest("model", ""),
        "data": nearest("data", ""),
        "standins": _once([s for p in outward for s in p.standins]),
    }


def _once(items: list[str]) -> list[str]:
    return list(dict.fromkeys(items))
