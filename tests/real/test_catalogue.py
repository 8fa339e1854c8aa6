"""levels.yaml against a real NeMo-RL checkout: every script, key, check, step, model and GPU count that it names."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks import config_rules, cpu, levels, plan, script_calls, script_checks

ROOT = Path(__file__).parents[2]
HERE = os.environ.get("NEMO_RL_REPO", "")
RL = Path(HERE or "/nonexistent")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not HERE, reason="NEMO_RL_REPO is not set: no NeMo-RL checkout to compare with"),
]

LEVELS = levels.load(ROOT / "levels.yaml")
CASES = {case.id: case for case in LEVELS.cases()}
SCRIPTS = [case for case in CASES.values() if case.script]
TRAINED = [case for case in CASES.values() if case.steps is not None]
REHEARSED = [levels.rehearse(case) for case in CASES.values() if case.rehearsal and case.rehearsal.supported]


def by_id(case: levels.Case) -> str:
    return case.id


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What NeMo-RL's own loader makes of every case and every rehearsal: one process of the CPU environment."""
    home = Path(os.environ.get("E2E_REAL_BUILD") or ROOT / "build") / "cpu"
    built = cpu.build(home, print) if "E2E_REAL_BUILD" in os.environ else cpu.ready(home)
    if built is None:
        pytest.skip("no CPU environment: set E2E_REAL_BUILD, or run `doit cpu` once")
    folder = tmp_path_factory.mktemp("resolved")
    asked = {case.id: [call.as_dict() for call in calls(case)] for case in [*CASES.values(), *REHEARSED]}
    question = {"cases": asked, "validate": False, "secrets": [], "result": str(folder / "answers.json")}
    text = json.dumps(question)
    for name in ("attempt", "bridge", "mcore", "nemo_rl", "model", "models", "data"):
        text = text.replace(f"{{{name}}}", f"/e2e/{name}")
    (folder / "question.json").write_text(text)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": HERE, "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [str(built.python), str(ROOT / "containers/resolve.py"), str(folder / "question.json")]
    subprocess.run(argv, cwd=RL, env=env, check=True)
    return json.loads((folder / "answers.json").read_text())


def calls(case: levels.Case) -> tuple[script_calls.Call, ...]:
    if case.script is None:
        return script_calls.of_command(case.argv())
    return script_calls.of_script(case.script, (RL / case.script).read_text(), case.overrides, case.env)


def configs(answers: dict[str, list[dict[str, Any]]], case: levels.Case) -> list[dict[str, Any]]:
    return [answer["config"] for answer in answers[case.id] if answer["config"]]


@pytest.mark.parametrize("case", SCRIPTS, ids=by_id)
def test_script_exists(case: levels.Case) -> None:
    assert (RL / case.script).is_file()


def removed_at_exit(case: levels.Case) -> list[str]:
    """Return what the script's own EXIT trap deletes, relative to the tree where it lies in there."""
    text = (RL / case.script).read_text().replace("$(basename $0 .sh)", Path(case.script).stem)
    values = dict(re.findall(r"^(?:export )?([A-Z_]+)=(.+)$", text, re.MULTILINE))
    values |= {"SCRIPT_DIR": str(Path(case.script).parent), "PROJECT_ROOT": "."}
    found = re.findall(r"^trap \"rm -rf ([^\"]+)\" EXIT", text, re.MULTILINE)
    for _ in values:
        found = [re.sub(r"\$\{?([A-Z_]+)\}?", lambda name: values[name[1]], path) for path in found]
    assert not [path for path in found if "$" in path], found
    return found


@pytest.mark.parametrize("case", SCRIPTS, ids=by_id)
def test_nothing_is_expected_that_the_script_itself_removes_at_its_end(case: levels.Case) -> None:
    looked_for = [*case.files, *([case.logs] if case.logs else []), *case.also_logs.values()]
    for gone in removed_at_exit(case):
        assert [path for path in looked_for if path == gone or path.startswith(f"{gone}/")] == []


@pytest.mark.parametrize("suite", [s for s in LEVELS.suites.values() if s.repo == "nemo_rl"], ids=lambda s: s.name)
def test_unit_suite_files_exist(suite: levels.Suite) -> None:
    assert [p for p in suite.paths if not (RL / p).exists()] == []


@pytest.mark.skipif(
    "BRIDGE_REPO" not in os.environ, reason="BRIDGE_REPO is not set: no Bridge checkout to compare with"
)
@pytest.mark.parametrize("suite", [s for s in LEVELS.suites.values() if s.repo == "bridge"], ids=lambda s: s.name)
def test_bridge_unit_suite_files_exist(suite: levels.Suite) -> None:
    assert [p for p in suite.paths if not (Path(os.environ["BRIDGE_REPO"]) / p).exists()] == []


@pytest.mark.skipif(
    "BRIDGE_REPO" not in os.environ, reason="BRIDGE_REPO is not set: no Bridge checkout to compare with"
)
def test_every_file_of_the_bridge_belongs_to_a_known_component() -> None:
    bridge = os.environ["BRIDGE_REPO"]
    listed = subprocess.run(["git", "-C", bridge, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    surfaces = plan.load_surfaces()
    assert [path for path in listed.split("\0") if path and surfaces.of(path) is surfaces.unknown] == []


@pytest.mark.parametrize("case", [*TRAINED, *REHEARSED], ids=by_id)
def test_nemo_rls_own_loader_takes_every_key_and_no_rule_objects(
    answers: dict[str, list[dict[str, Any]]], case: levels.Case
) -> None:
    assert answers[case.id] != []
    assert config_rules.judge(case, answers[case.id], case.env) == []


@pytest.mark.parametrize("case", TRAINED, ids=by_id)
def test_gpus_steps_and_model_of_the_case_are_those_of_the_config(
    answers: dict[str, list[dict[str, Any]]], case: levels.Case
) -> None:
    for config in configs(answers, case):
        cluster = config["cluster"]
        assert (cluster["gpus_per_node"] * cluster["num_nodes"], cluster["num_nodes"]) == (case.gpus, case.nodes)
        asked = next(config[k]["max_num_steps"] for k in ("sft", "dpo", "ppo", "distillation", "grpo") if k in config)
        assert asked == case.steps
        assert config["policy"]["model_name"] == case.model


def test_only_the_script_that_writes_its_own_configs_is_not_read_whole(
    answers: dict[str, list[dict[str, Any]]],
) -> None:
    unread = {case for case, found in answers.items() if any(one["unread"] for one in found)}
    assert unread == {"level1.grpo_megatron_mbridge_restore", "rehearse.level1.grpo_megatron_mbridge_restore"}


@pytest.mark.parametrize("case", SCRIPTS, ids=by_id)
def test_no_check_of_the_script_is_missing_here(case: levels.Case) -> None:
    told = script_checks.drift(script_checks.as_upstream(case), RL / case.script)
    assert [text for text in told if "compare by hand" not in text] == []
