"""A stage: who it is, what it depends on, how it is done, what it came to; and what its input digests are made of."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks import environment
from tasks.digests import digest_of
from tasks.files import sha256_file, sha256_json
from tasks.reason import Reason, Verdict
from tasks.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tasks.levels import Case
    from tasks.pipeline import Pipeline
    from tasks.records import Record


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one stage came to in this invocation; `record` holds its inputs and artefact, `cached` tells reuse."""

    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    record: Record | None = None
    cached: bool = False
    why: str = ""  # it was done and not reused


@dataclass(frozen=True, slots=True)
class Done:
    """What executing a stage returns: its artefact, whether equal inputs may reuse it, and what proves it."""

    artefact: Mapping[str, Any]
    verdict: Verdict = Verdict.PASS
    reasons: tuple[Reason, ...] = ()
    reusable: bool = True
    evidence: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """One box of the pipeline: who it is, what it depends on, how it is done. `inputs` is asked when its turn comes."""

    kind: str
    name: str
    inputs: Callable[[], Mapping[str, str]]
    execute: Callable[[], Done]

    @property
    def task(self) -> str:
        """Return the doit task name, `kind:name`."""
        return f"{self.kind}:{self.name}" if self.name else self.kind


def code(*names: str) -> str:
    """Return a digest of our own files whose change makes a result worthless."""
    return sha256_json({name: sha256_file(ROOT / name) for name in names})


def environment_inputs(case_env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an input digest that the environment makes: whitelisted values, never secrets."""
    return {"environment": sha256_json({**environment.passed(os.environ), **case_env})}


def stated(pipe: Pipeline, case: Case, kinds: Iterable[str]) -> dict[str, str]:
    """Return what a case's config and its run both depend on: trees of `kinds`, image, definition, environment.

    The tree that the case works in always counts, with whatever the command names of it.
    """
    name = pipe.environment_of(case)
    place, trees = pipe.place_of(name), pipe.trees(baseline=name == "baseline")
    work = "bridge-work" if case.repo == "bridge" else case.repo
    named = pipe.named(case.repo, work, (*case.argv(), *pipe.settings.overrides))
    return {
        **{kind: trees[kind].components[kind] for kind in kinds},
        case.repo: trees[case.repo].components[work],
        **({"named files": digest_of(named)} if named else {}),
        "image": sha256_json(place.image),
        "definition": sha256_json(case.run_definition()),
        "overrides": sha256_json(list(pipe.settings.overrides)),
        **environment_inputs(case.env),
    }
