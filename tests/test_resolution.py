"""What the checkout's own loader says before a run: containers/resolve.py by itself, then the stage on miniatures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks import inflight, resolution
from tasks.attempts import Attempt
from tasks.records import input_digest
from tests.miniature import LEVELS, LOADER, Miniature
from tests.test_chain import now_of

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """\
import os
from nemo_rl.algorithms.mini import MasterConfig, train
from nemo_rl.utils.config import load_config
DEFAULT = os.path.join(os.path.dirname(__file__), "configs", "mini.yaml")
raise SystemExit("importing a program would start Ray")
"""
TREE = {
    "examples/run_mini.py": PROGRAM,
    "examples/configs/mini.yaml": '{"run": {"steps": 2}, "wandb": {"api_key": "abc"}, "note": "hf_very_secret!"}',
    "nemo_rl/__init__.py": "",
    "nemo_rl/utils/__init__.py": "",
    "nemo_rl/utils/config.py": LOADER,
    "nemo_rl/algorithms/__init__.py": "",
    "nemo_rl/algorithms/mini.py": "def train(): pass\nclass MasterConfig:\n"
    "    def __init__(self, run, **more):\n        assert run['steps'] > 0, 'steps must be positive'\n",
}


def resolve(folder: Path, change: dict[str, str | None], *arguments: str, **call: Any) -> dict[str, Any]:
    for name, text in {**TREE, **change}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    one = {"program": "examples/run_mini.py", "arguments": arguments, "unread": [], "variables": {}, **call}
    question = {
        "cases": {"a": [one]},
        "validate": True,
        "secrets": ["HF_TOKEN"],
        "result": str(folder / "answers.json"),
    }
    (folder / "question.json").write_text(json.dumps(question))
    env = {**os.environ, "PYTHONPATH": str(folder), "HF_TOKEN": "hf_very_secret"}
    argv = [sys.executable, str(ROOT / "containers/resolve.py"), "question.json"]
    subprocess.run(argv, cwd=folder, env=env, check=True)
    (answer,) = json.loads((folder / "answers.json").read_text())["a"]
    return answer


def test_the_default_config_is_found_without_importing_the_program_and_secrets_are_hidden(tmp_path: Path) -> None:
    answer = resolve(tmp_path, {}, "run.steps=5", "+run.new=x")
    assert answer["errors"] == []
    assert answer["config_file"] == "examples/configs/mini.yaml"
    assert answer["config"] == {"run": {"steps": 5, "new": "x"}, "wandb": {"api_key": "***"}, "note": "***!"}
    assert "hf_very_secret" not in (tmp_path / "answers.json").read_text()


@pytest.mark.parametrize(
    ("change", "arguments", "kind", "told"),
    [
        ({"examples/run_mini.py": None}, [], "program", "not in this NeMo-RL: examples/run_mini.py"),
        ({"examples/configs/mini.yaml": None}, [], "config", "not in this NeMo-RL: examples/configs/mini.yaml"),
        ({}, ["--config", "a.yaml"], "config", "not in this NeMo-RL: a.yaml"),
        ({"examples/configs/mini.yaml": "{"}, [], "config", "mini.yaml: JSONDecodeError"),
        ({"nemo_rl/utils/config.py": "def load_config(path): return {}\n"}, ["a=1"], "loader",
         "not in this NeMo-RL: nemo_rl.utils.config.parse_hydra_overrides"),
        ({"nemo_rl/utils/config.py": "import no_such_package\n"}, [], "loader", "No module named 'no_such_package'"),
        ({"examples/run_mini.py": "import sys\n"}, [], "config", "no --config, and no default can be read"),
        ({}, ["run.step=5", "run.steps=1", "other=2"], "override", "run.step=5: \"Could not override 'run.step'\""),
        ({}, ["run.steps=0"], "validation", "nemo_rl.algorithms.mini.MasterConfig: steps must be positive"),
    ],
)  # fmt: skip
def test_what_another_revision_lacks_is_told_never_crashed_on(
    tmp_path: Path, change: dict[str, str | None], arguments: list[str], kind: str, told: str
) -> None:
    answer = resolve(tmp_path, change, *arguments)
    assert answer["errors"][0]["kind"] == kind
    assert told in answer["errors"][0]["text"]


def test_every_refused_override_is_told_at_once(tmp_path: Path) -> None:
    answer = resolve(tmp_path, {}, "run.step=5", "run.steps=1", "other=2")
    assert [error["key"] for error in answer["errors"]] == ["run.step", "other"]
    assert answer["errors"][0]["keys"][:2] == ["run", "run.steps"]


def test_a_validation_that_cannot_be_had_is_a_note_and_no_refusal(tmp_path: Path) -> None:
    answer = resolve(tmp_path, {"nemo_rl/algorithms/mini.py": "import no_torch\n"})
    assert answer["errors"] == []
    assert "not validated: import nemo_rl.algorithms.mini" in answer["notes"][0]


def test_a_config_whose_path_the_script_computes_is_not_resolved(tmp_path: Path) -> None:
    answer = resolve(tmp_path, {}, "--config", "e2e-unread", unread=["$TEMP"])
    assert (answer["config"], answer["errors"]) == (None, [])
    assert answer["notes"] == ["config not resolved: the script computes $TEMP"]


def recorded(mini: Miniature) -> list[dict[str, Any]]:
    """Return the records of level0.train."""
    return [json.loads(path.read_text()) for path in mini.workspace.glob("records/*/level0.train/*.json")]


@pytest.mark.slow
def test_an_answer_of_a_loader_that_did_not_end_well_is_none(tmp_path: Path) -> None:
    mini = Miniature(tmp_path)
    mini.levels.write_text(LEVELS.replace("command: [python, train.py]", "command: [python, examples/run_mini.py]"))
    loader = mini.nemo_rl / "nemo_rl/utils/config.py"
    loader.write_text(loader.read_text() + "import atexit, os\natexit.register(os._exit, 3)\n")
    dead = mini.doit("config:level0.train")
    assert (dead.rc, dead.report["result"]) == (2, "Blocked"), dead.out
    assert "config loader gave no answer" in dead.out


@pytest.mark.slow
def test_what_cannot_count_is_blocked_before_the_run_and_a_good_config_is_resolved_once(tmp_path: Path) -> None:
    mini = Miniature(tmp_path)
    text = LEVELS.replace("command: [python, train.py]", "command: [python, examples/run_mini.py]")
    mini.levels.write_text(
        text + "      gone: {script: tests/functional/gone.sh, optional: true, steps: 2, timeout: 9s}\n"
        "      lost: {script: tests/functional/lost.sh, steps: 2, timeout: 9s}\n"
    )

    wrong = mini.doit("level0.train", "level0.gone", "level0.lost", "run.step=3")
    assert wrong.rc == 2, wrong.out
    verdicts = {case["id"]: (case["verdict"], case["reasons"][0]["text"]) for case in wrong.report["cases"]}
    assert verdicts["level0.train"][0] == "Blocked"
    assert "mini.yaml: " in verdicts["level0.train"][1]
    assert "no key run.step; did you mean run.steps=?" in verdicts["level0.train"][1]
    assert verdicts["level0.gone"] == ("Skipped", "not in this NeMo-RL: tests/functional/gone.sh")
    assert verdicts["level0.lost"] == ("Blocked", "not in this NeMo-RL: tests/functional/lost.sh")
    assert mini.attempts() == []

    config = "check:level0.train"
    assert mini.doit(config).rc == 0
    asked = sorted((mini.workspace / "attempts/config").iterdir())
    assert len(mini.attempts()) == 1
    of = {record["stage"]: record for record in recorded(mini) if record["reusable"]}
    assert of["run"]["inputs"]["config"] == of["config"]["artefact"]["digest"]
    assert len(of["config"]["artefact"]["digest"]) == 64
    assert mini.doit(config, "fresh=1").rc == 0
    assert len(mini.attempts()) == 2
    assert sorted((mini.workspace / "attempts/config").iterdir()) == asked

    file = mini.nemo_rl / "examples/configs/mini.yaml"
    file.write_text(file.read_text().replace('"enabled": false', '"enabled": true'))
    both = mini.doit("config:level0.train")  # asked for by itself: what a run would meet
    assert (both.rc, both.report["result"]) == (2, "Blocked")
    assert "both backends enabled" in both.report["sentence"]
    assert len(mini.attempts()) == 2


def test_a_job_in_flight_is_picked_up_with_the_question_it_was_asked(tmp_path: Path, monkeypatch: Any) -> None:
    mini = Miniature(tmp_path)
    mini.levels.write_text(LEVELS.replace("command: [python, train.py]", "command: [python, examples/run_mini.py]"))
    now = now_of(mini)
    now.sync()
    stage = now.config(now.case("level0.train"))
    folder = now.workspace.attempts / "config" / "20261201-000000-abcd"
    folder.mkdir(parents=True)
    (folder / "question.json").write_text("asked")
    key = input_digest(stage.inputs())
    inflight.note(folder, state="submitted", task=stage.task, key=key, job="17")

    def perform(_place: Any, _trees: Any, given: Path, _task: str, command: Any) -> Attempt:
        command({"attempt": "/a", "agent": "/b", "nemo_rl": "/c"})
        answer = {"program": "p", "arguments": [], "config": {}, "notes": [], "errors": [], "config_file": "f"}
        (given / "answers.json").write_text(json.dumps({"level0.train": [answer], "level0.other": [answer]}))
        return Attempt(given.name, given, {"rc": 0, "reason": "exited"}, "exited", "")

    monkeypatch.setattr(now, "perform", perform)
    monkeypatch.setattr(resolution.config_rules, "judge", lambda *_: [])
    assert now.execute(stage).verdict == "Pass"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert (folder / "question.json").read_text() == "asked"
    assert set(now.resolved) == {"level0.train"}  # the other case may be another one by now
    assert not inflight.is_open(folder)
