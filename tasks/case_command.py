"""What a case runs: its script, the model of MODEL_PATH, the user's overrides; with the paths of one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks import cpu, models

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.attempts import Place
    from tasks.levels import Case
    from tasks.pipeline import Pipeline


def argv(pipe: Pipeline, case: Case) -> tuple[str, ...]:
    """Return the command of a case as it would be typed in the NeMo-RL checkout, the user's overrides last."""
    return (*case.argv(), *models.overrides(case), *pipe.settings.overrides)


def words(pipe: Pipeline, case: Case, place: Place, paths: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return command and variables with `paths` in place of `{attempt}`, `{bridge}`, `{mcore}`, `{nemo_rl}`."""
    words, env = list(argv(pipe, case)), dict(case.env)
    plan = case.rehearsal if place.rehearsal else None
    if place.cpu and plan:
        data = place.cpu.data / plan.data if plan.data else place.cpu.data
        words = list(cpu.substitute(words, place.cpu, plan.model, data=data))
        env = {key: cpu.substitute([value], place.cpu, plan.model, data=data)[0] for key, value in env.items()}
    for kind, path in paths.items():
        words = [word.replace(f"{{{kind}}}", path) for word in words]
        env = {key: value.replace(f"{{{kind}}}", path) for key, value in env.items()}
    return words, env
