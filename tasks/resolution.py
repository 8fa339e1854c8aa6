"""Stage `config:<case>`: NeMo-RL's own loader resolves what the case will run with, before a GPU is touched.

The training calls are read out of the case's script or command (`tasks.script_calls`), resolved by the checkout in the
driver's interpreter under the agent (containers/resolve.py), and judged (`tasks.config_rules`). Cases that are planned
together in one environment share one process. A Pass says that nothing is known to be wrong; what could not be read is
a note, which the report repeats as a limitation. The digest of the resolved configs is an input of the run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tasks import attempts, case_command, config_rules, environment, inflight, script_calls
from tasks.errors import UserError
from tasks.files import read_json, sha256_json, write_json
from tasks.reason import Reason, Verdict
from tasks.stage import Done, code, stated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tasks.attempts import Tree
    from tasks.levels import Case
    from tasks.pipeline import Pipeline
    from tasks.script_calls import Call

TIMEOUT_S = 900.0  # importing torch from a cold network file system; the resolution itself takes a fraction of a second
CODE = (
    "containers/resolve.py", "containers/agent.py", "tasks/resolution.py", "tasks/config_rules.py",
    "tasks/script_calls.py", "tasks/script_checks.py", "tasks/shell_words.py",
)  # fmt: skip
# What stands for `{attempt}` and the like while a config is resolved: its digest must not depend on a folder's name.
PATHS = {kind: f"/e2e/{kind}" for kind in ("attempt", "bridge", "mcore", "nemo_rl")}


def inputs(pipe: Pipeline, case: Case) -> dict[str, str]:
    """Return what a resolution depends on: the checkout, the interpreter, the case and the user's overrides."""
    return {**stated(pipe, case, {"nemo_rl", case.repo}), "code": code(*CODE)}


def digest(pipe: Pipeline, case: Case) -> str:
    """Return the digest of the case's resolved configs as recorded for the present inputs; "none" before that."""
    record = pipe.records.find("config", case.id, pipe.config(case).inputs())
    return str(record.artefact.get("digest", "none")) if record else "none"


def execute(pipe: Pipeline, case: Case) -> Done:
    """Resolve and judge the case; Blocked (Skipped where optional) with key, file and remedy if it cannot be run so."""
    name = pipe.environment_of(case)
    trees = pipe.sound_trees(baseline=name == "baseline")
    try:
        calls = calls_of(pipe, case, trees)
    except UserError as error:
        verdict = Verdict.SKIPPED if case.optional else Verdict.BLOCKED
        return Done({}, verdict, (Reason("script", case.id, str(error)),), reusable=False)
    if not calls:
        note = f"config not resolved: {' '.join(case.argv()[:2])} starts none of NeMo-RL's training programs by itself"
        return Done({"digest": "none", "calls": [], "notes": [note]})
    with pipe.resolving:
        known = pipe.resolved.get(case.id)
        if known is None:
            known = _ask(pipe, case, calls, trees)
    folder, answers = known
    reasons = config_rules.judge(case, answers, {**environment.passed(os.environ), **case.env})
    verdict = Verdict.PASS if not reasons else Verdict.SKIPPED if case.optional else Verdict.BLOCKED
    shown = [{k: v for k, v in answer.items() if k != "errors"} for answer in answers]
    return Done(
        {
            "attempt": os.fspath(folder.relative_to(pipe.workspace.root)),
            "digest": sha256_json([[answer["program"], answer["arguments"], answer["config"]] for answer in answers]),
            "notes": list(dict.fromkeys(note for answer in answers for note in answer["notes"])),
            "calls": shown,
        },
        verdict, tuple(reasons), reusable=verdict is Verdict.PASS,
        evidence=attempts.evidence_files(folder, pipe.workspace.root),
    )  # fmt: skip


def calls_of(pipe: Pipeline, case: Case, trees: Mapping[str, Tree]) -> tuple[Call, ...]:
    """Return the training calls of a case. Raises UserError where the checkout has no such script, or it is damaged."""
    words, env = case_command.words(pipe, case, pipe.place_of(pipe.environment_of(case)), PATHS)
    if case.script is None:
        return script_calls.of_command(words)
    path = trees[case.repo].path / case.script
    if not path.is_file():
        raise UserError(f"not in this {'NeMo-RL' if case.repo == 'nemo_rl' else 'Bridge'}: {case.script}")
    text = path.read_text(encoding="utf-8", errors="replace")
    return script_calls.of_script(case.script, text, words[2:], {**environment.passed(os.environ), **env})


def _ask(
    pipe: Pipeline, case: Case, calls: Sequence[Call], trees: Mapping[str, Tree]
) -> tuple[Path, list[dict[str, Any]]]:
    """Resolve the case, and with it those that are planned in the same environment and have no record yet."""
    name = pipe.environment_of(case)
    asked = {case.id: calls}
    for other in _planned(pipe, case):
        try:
            asked[other.id] = calls_of(pipe, other, trees)
        except UserError:
            continue  # its own turn tells
    place = pipe.place_of(name)
    folder = pipe.folder(f"config:{case.id}", f"config-{name}" if name else "config")
    asked_before = (folder / inflight.FILE).exists()  # by a job that reads its question when it starts

    def command(paths: Mapping[str, str]) -> attempts.Command:
        question = {
            "cases": {key: [call.as_dict() for call in value] for key, value in asked.items() if value},
            "validate": not place.rehearsal,  # it costs an import of torch, and a rehearsal burns no GPU
            "secrets": list(environment.secret_names(os.environ)),
            "result": f"{paths['attempt']}/answers.json",
        }
        if not asked_before:
            write_json(folder / "question.json", question)
        # in the image PATH begins with the driver's environment
        argv = (place.interpreter, f"{paths['agent']}/resolve.py", f"{paths['attempt']}/question.json")
        return attempts.Command(argv, paths["nemo_rl"], TIMEOUT_S, cuda=False)

    attempt = pipe.perform(place, trees, folder, f"config:{case.id}", command)
    attempts.clear_work(folder)
    found = read_json(folder / "answers.json")
    if not isinstance(found, dict) or attempt.exit is None or attempt.exit.get("rc") != 0:
        why = attempt.engine_detail or f"see {folder / 'run.log'}"
        raise UserError(f"NeMo-RL's config loader gave no answer in {place.interpreter}: {why}")
    taken = {case.id: found[case.id]} if asked_before else found  # who else was asked then may be another case by now
    pipe.resolved |= {key: (folder, answers) for key, answers in taken.items()}
    return pipe.resolved[case.id]


def _planned(pipe: Pipeline, case: Case) -> list[Case]:
    """Return the other planned cases of the same environment that would be resolved anew."""
    others = (pipe.case(task.removeprefix("config:")) for task in pipe.planned if task.startswith("config:"))
    return [
        other for other in others
        if other.id != case.id and other.id not in pipe.resolved and f"config:{other.id}" not in pipe.outcomes
        and pipe.environment_of(other) == pipe.environment_of(case)
        and not ((kept := pipe.records.find("config", other.id, inputs(pipe, other))) and kept.reusable)
    ]  # fmt: skip
