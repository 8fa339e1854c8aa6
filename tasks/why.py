"""Why a stage is fresh or stale: its newest record against now, down to the files; and what its verdict rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks import chain
from tasks.digests import difference
from tasks.errors import UserError
from tasks.files import read_json, sha256_json
from tasks.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.invocation import Invocation
    from tasks.levels import Case
    from tasks.records import Record
    from tasks.stage import Stage


def stages_of(now: Invocation, word: str) -> list[Stage]:
    """Return the stages behind a task, case or level name; UserError with a suggestion otherwise."""
    from tasks.errors import suggest

    kind, _, rest = word.partition(":")
    if word in ("image", "probe"):
        return [getattr(now, kind)()]
    if kind == "unit":
        suites = now.levels.suites
        if rest and rest not in suites:
            raise UserError(f"unknown suite {rest!r}{suggest(rest, suites)}")
        return [now.unit(suites[rest])] if rest else [now.unit(s) for s in suites.values()]
    if kind in ("config", "run", "metrics", "check") and rest:
        return [getattr(now, kind)(now.case(rest))]
    if word in now.levels.levels:
        level = now.levels.levels[word]
        return [
            *(now.unit(now.levels.suites[s]) for s in level.suites),
            *(stage for case in (*level.cases, *level.included) for stage in (now.run(case), now.check(case))),
        ]
    case = now.case(f"{kind}.{rest}" if kind in ("rehearse", "baseline", "repeat") else word)
    return [now.config(case), now.run(case), now.metrics(case), now.check(case)]


def record_of(now: Invocation, stage: Stage) -> Record | None:
    """Return the record that speaks for a stage: that of its inputs as they are now, else the newest.

    Metrics and check follow the run that speaks: theirs are the newest of that run's evidence.
    """
    if stage.kind in ("metrics", "check"):
        run = record_of(now, now.run(now.case(stage.name)))
        digest = sha256_json(dict(run.evidence)) if run else None
        found = [r for r in now.records.history(stage.kind, stage.name) if r.inputs.get("run") == digest]
        return found[-1] if found else None
    latest = now.records.latest(stage.kind, stage.name)
    return latest and (now.records.find(stage.kind, stage.name, stage.inputs()) or latest)


def chain_of(now: Invocation, case: Case) -> list[chain.Link]:
    """Return what the verdict of a case rests on, from records alone; nothing where nothing is known."""
    from tasks import answer

    run = record_of(now, now.run(case))
    stopped = _stopped_before(now, case, run)
    if stopped is not None or run is None:
        return [stopped] if stopped else []
    check, tried = record_of(now, now.check(case)), run.artefact["attempts"]
    if not tried or check is None:  # preflight
        return chain.links(run.artefact["verdict"], run.artefact["reasons"], {}, None) if not tried else []
    judged = check.artefact
    verdict, reasons, _ = answer.compared(now, case, judged["verdict"], judged["reasons"], judged)
    return chain.links(verdict, reasons, judged, tried[-1]["path"])


def _stopped_before(now: Invocation, case: Case, run: Record | None) -> chain.Link | None:
    """Return the probe or unit suite that has stopped the case since its run, if one did."""
    name = now.environment_of(case)
    suites = now.levels.levels[case.level].suites if not name else ()
    before = [now.probe(environment_name=name), *(now.unit(now.levels.suites[suite]) for suite in suites)]
    for last in filter(None, (record_of(now, stage) for stage in before)):
        if last.artefact["verdict"] != "Pass" and (run is None or last.finished > run.finished):
            text = last.artefact["reasons"][0]["text"] if last.artefact["reasons"] else "no reason"
            task = f"{last.stage}:{last.name}".rstrip(":")
            reason = Reason("dependency", task, f"{task} is {last.artefact['verdict']}: {text}")
            return chain.links("Blocked", [reason.as_dict()], {}, None)[0]
    return None


def explain(now: Invocation, stage: Stage) -> tuple[str, list[Reason]]:
    """Return the state of a stage ("fresh", "stale", "never") and the reasons, its record compared with now."""
    latest = record_of(now, stage)
    if latest is None:
        return "never", [Reason("never", stage.task, "has never been done in this workspace")]
    tried = latest.artefact.get("attempts") or []
    what = f"verdict {latest.artefact['verdict']}"
    if stage.kind == "run" and tried:
        what = f"run: rc {tried[-1]['rc']}, {tried[-1]['reason']}, attempt {tried[-1]['id']}"
    told = [
        Reason("last", stage.task, f"last {what}, {latest.finished} on {latest.host}"),
        *(Reason(**r) for r in latest.artefact["reasons"]),
    ]
    proof = next(iter(latest.evidence), None)
    if proof:
        told.append(
            Reason("evidence", proof, f"evidence: {now.workspace.root / proof}" + _more(len(latest.evidence) - 1))
        )
    if stage.kind in ("metrics", "check"):
        return "follows its run", told
    inputs = stage.inputs()
    exact = now.records.find(stage.kind, stage.name, inputs)
    if exact is not None and exact.reusable:
        damage = now.records.damaged(exact)
        return ("stale", [damage, *told]) if damage else ("fresh", told)
    if exact is not None:
        return "stale", [Reason("not_reusable", stage.task, "the last run with these inputs did not end well"), *told]
    changed = []
    for name in sorted({*latest.inputs, *inputs}):
        old, new = latest.inputs.get(name), inputs.get(name)
        if old != new:
            changed.append(Reason("input", name, f"{name} changed", (old or "none")[:12], (new or "none")[:12]))
            changed += _files_behind(now, name, old)
    return "stale", [*changed, *told]


def _files_behind(now: Invocation, name: str, old: str | None) -> list[Reason]:
    """Return the files that differ from the snapshot which had the old digest of a tree; at most twenty."""
    if name not in now.manifests:
        return []
    for home in now.workspace.snapshots.glob(f"{name}-*"):
        before = read_json(home / "manifest.json")
        if before and _component(name, before["files"], old):
            lines = difference(before["files"], now.manifests[name].as_dict())
            return [Reason("file", line[2:], f"  {line}") for line in lines[:20]]
    return []


def _component(name: str, files: Mapping[str, Sequence[str]], digest: str | None) -> bool:
    from tasks.digests import COMPONENTS, Entry, digest_of

    entries = {path: Entry(*entry) for path, entry in files.items()}
    return any(digest_of(entries, patterns) == digest for kind, patterns in COMPONENTS.items() if kind.startswith(name))


def _more(count: int) -> str:
    return f" and {count} more" if count else ""
