"""What the records say of the trees as they are now, told as a report although the last one is gone.

A case is told if its run has a record for exactly these inputs and its evidence is as it was; nothing is run, and what
is stale is not spoken of: a result of another tree must not stand beside this one's revision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks import answer, cpu
from tasks.errors import UserError
from tasks.reason import Verdict

if TYPE_CHECKING:
    from tasks.invocation import Invocation
    from tasks.levels import Case
    from tasks.stage import Stage


def compose(now: Invocation) -> dict[str, Any]:
    """Return the report of every level's case and rehearsal that is known; raise UserError where there is none."""
    planned: dict[str, list[str]] = {}
    now.sync()
    now.recall(now.image())
    recorded = {home.name for home in (now.workspace.root / "records" / "run").glob("*")}
    names = [name for case in now.levels.cases() for name in (case.id, f"rehearse.{case.id}") if name in recorded]
    for name in names:  # a baseline or a repeat is shown with the case that it belongs to
        try:
            case = now.case(name)
        except UserError:
            continue  # no rehearsal any more
        if now.environment_of(case) == "cpu" and not _has_cpu_environment(now):
            continue  # to ask for it would build it
        stages = _stages(now, case)
        if not _recall(now, stages):
            continue
        now.requested.append(case.id)
        before: list[str] = []
        for task in ("image", "sync", *(stage.task for stage in stages)):
            planned.setdefault(task, before)
            before = [*before, task]
    if not now.requested:
        raise UserError(
            f"{now.workspace.report}: no report, and no record fits the trees as they are now; run a level first"
        )
    now.planned, now.needs = list(planned), planned
    return answer.compose(now)


def _has_cpu_environment(now: Invocation) -> bool:
    contained = now.settings.origins.get("runtime") == "the command line" and now.settings.runtime != "local"
    return not contained and cpu.ready(now.settings.build / "cpu") is not None


def _stages(now: Invocation, case: Case) -> list[Stage]:
    """Return what a case's verdict rests on, in order."""
    name = now.environment_of(case)
    suites = now.levels.levels[case.level].suites if not name else ()
    return [
        now.probe(environment_name=name),
        *(now.unit(now.levels.suites[suite]) for suite in suites),
        now.config(case), now.run(case), now.metrics(case), now.check(case),
    ]  # fmt: skip


def _recall(now: Invocation, stages: list[Stage]) -> bool:
    """Put the outcomes of the stages in place as far as they are known; return whether the case can be told."""
    for at, stage in enumerate(stages):
        if not now.recall(stage):
            return False
        if now.outcomes[stage.task].verdict is not Verdict.PASS and stage.kind != "check":
            for later in stages[at + 1 :]:
                now.depend(later.task, stage.task)
            break
    return True
