"""The pipeline on one page: image, sync -> probe -> unit, config -> run -> metrics -> check, and groups of them.

doit orders and selects; each stage is fresh by its record (tasks/pipeline.py), not by doit's database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks import invocation, proof
from tasks.console import Reporter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasks.levels import Case
    from tasks.stage import Stage


PIPE = invocation.current()

DOIT_CONFIG = {
    "reporter": Reporter,
    "backend": "sqlite3",
    "dep_file": str(PIPE.database()),
    "continue": True,
    "verbosity": 2,
    "num_process": PIPE.settings.jobs if PIPE.settings.jobs > 1 else 0,
    "par_type": "thread",
    "default_tasks": [],
    "minversion": "0.37.0",
}


def _stage(stage: Stage, *needs: str) -> dict[str, Any]:
    """Make the doit task of a stage: up to date by its record, done by its action, an arrow to each stage it needs."""
    return {
        **({"basename": stage.kind, "name": stage.name} if stage.name else {"basename": stage.kind}),
        "actions": [(PIPE.do, [stage])],
        "uptodate": [lambda task, values: PIPE.is_fresh(stage)],  # noqa: ARG005 - doit passes by these names
        "targets": PIPE.artefacts(stage.task),
        "file_dep": [file for need in needs for file in PIPE.artefacts(need)],
        "task_dep": list(needs),
        "doc": f"{stage.kind} {stage.name}".strip(),
    }


def task_image() -> dict[str, Any]:
    """The pinned image, or the environment of the local interpreter."""
    return _stage(PIPE.image())


def task_sync() -> dict[str, Any]:
    """Manifest, revision and frozen snapshot of Bridge, Core and NeMo-RL."""
    return {"actions": [(PIPE.do_sync, [])]}


def task_probe() -> dict[str, Any]:
    """Where every interpreter of a run takes Bridge, Core and NeMo-RL from."""
    return _stage(PIPE.probe(), "image", "sync")


def task_unit() -> Iterator[dict[str, Any]]:
    """Unit suites, no GPU."""
    for suite in PIPE.levels.suites.values():
        yield _stage(PIPE.unit(suite), "sync", "probe")


def task_proof() -> Iterator[dict[str, Any]]:
    """CPU proof of a model family: export bit-equal, logits and gradients against Hugging Face; never a level."""
    for family in proof.FAMILIES:
        yield _stage(proof.stage(PIPE, family), "sync", "cpu")
        # before a case that trains such a model on GPUs: only a Fail stops it (proof=warn|off|on)
        gate = {"actions": [(PIPE.do_gate, [family])], "task_dep": ["sync", "cpu"], "doc": "the proof, before GPUs"}
        yield {"basename": "gate", "name": family, **gate}
    yield {"basename": "roundtrip", "actions": None, "task_dep": ["proof"], "doc": "the proofs by the skill's name"}


def task_repeat() -> Iterator[dict[str, Any]]:
    """One case n times anew: spread of its asserted values, share of passes."""
    for case, first in PIPE.repeatable():
        yield {"basename": "repeat", "name": case.id, "actions": [(PIPE.do_repeat, [case])], "task_dep": list(first)}


def _case(case: Case, first: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the four stages of a case."""
    yield _stage(PIPE.config(case), first[0])
    yield _stage(PIPE.run(case), *first, f"config:{case.id}")
    yield _stage(PIPE.metrics(case), f"run:{case.id}")
    yield _stage(PIPE.check(case), f"metrics:{case.id}", f"run:{case.id}", first[0])


def _group(prefix: str, case: Case) -> dict[str, Any]:
    """Make `rehearse:CASE` or `baseline:CASE` out of a case in that form."""
    return {
        "basename": prefix,
        "name": case.id.removeprefix(f"{prefix}."),
        "actions": None,
        "task_dep": [f"check:{case.id}"],
    }


def task_cases() -> Iterator[dict[str, Any]]:
    """Every case of every level: `doit level0`, `doit level2.noncolocated`, `doit vlm`; rehearsals and baselines."""
    for level in PIPE.levels.levels.values():
        suites = [f"unit:{name}" for name in level.suites]
        for case in level.cases:
            yield from _case(case, ("probe", *suites, *PIPE.gates(case)))
            yield {"basename": case.id, "actions": None, "task_dep": [f"check:{case.id}"], "doc": case.title}
        wanted = [f"check:{case.id}" for case in level.required]
        yield {"basename": level.id, "actions": None, "task_dep": [*suites, *wanted], "doc": level.title}
    # the real script on a CPU, tiny models and stand-ins: evidence of its own kind, never a level
    build = {"actions": [(PIPE.do_cpu, [])], "clean": [PIPE.prune_cpu]}
    yield {"basename": "cpu", **build, "doc": "build the CPU environment of the rehearsals; doit clean cpu"}
    yield _stage(PIPE.probe(environment_name="cpu"), "sync", "cpu")
    for case in PIPE.asked_for("rehearse"):
        yield from _case(case, ("probe-cpu",))
        yield _group("rehearse", case)
    # the same case with the Bridge that NeMo-RL vendors: is a failure new, pre-existing or the environment's?
    yield _stage(PIPE.probe(environment_name="baseline"), "image", "sync")
    for case in PIPE.asked_for("baseline"):
        yield from _case(case, ("probe-baseline",))
        yield _group("baseline", case)
