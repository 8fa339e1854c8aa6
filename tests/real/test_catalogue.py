"""levels.yaml against a real NeMo-RL checkout: every script, key, check, step, model and GPU count that it names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks import levels, plan
from tests import catalogue

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
REHEARSED = [case for case in CASES.values() if case.rehearsal and case.rehearsal.supported]
# Scripts that choose the backend of each of their runs themselves.
OWN_BACKENDS = {"level1.sft_resume_diamond"}


def by_id(case: levels.Case) -> str:
    return case.id


def resolved(case: levels.Case, overrides: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    words = catalogue.words_of(RL, case)
    entry = catalogue.script_text(RL, case) or " ".join(case.command or ())
    config = catalogue.config_of(RL, [*words, *overrides], entry)
    refused = catalogue.apply(config, words)
    return config, [*refused, *catalogue.apply(config, overrides)]


@pytest.mark.parametrize("case", SCRIPTS, ids=by_id)
def test_script_exists(case: levels.Case) -> None:
    assert (RL / case.script).is_file()


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


@pytest.mark.parametrize("case", TRAINED, ids=by_id)
def test_every_override_key_is_in_the_config_that_the_script_uses(case: levels.Case) -> None:
    assert resolved(case, case.overrides)[1] == []


@pytest.mark.parametrize("case", REHEARSED, ids=by_id)
def test_every_rehearsal_override_key_is_in_the_config(case: levels.Case) -> None:
    assert resolved(case, levels.rehearse(case).overrides)[1] == []


@pytest.mark.parametrize(
    "case", [c for c in TRAINED if c.backend == "megatron" and c.id not in OWN_BACKENDS], ids=by_id
)
def test_the_policy_backend_is_megatron_alone(case: levels.Case) -> None:
    policy = resolved(case, case.overrides)[0]["policy"]
    assert policy["megatron_cfg"]["enabled"] is True
    assert not policy["dtensor_cfg"]["enabled"]


@pytest.mark.parametrize("case", [c for c in TRAINED if c.id not in OWN_BACKENDS], ids=by_id)
def test_gpus_of_the_case_are_those_of_the_config(case: levels.Case) -> None:
    cluster = resolved(case, case.overrides)[0]["cluster"]
    assert cluster["gpus_per_node"] * cluster["num_nodes"] == case.gpus
    assert cluster["num_nodes"] == case.nodes


@pytest.mark.parametrize("case", TRAINED, ids=by_id)
def test_steps_of_the_case_are_those_of_the_config(case: levels.Case) -> None:
    config = resolved(case, case.overrides)[0]
    asked = next(config[k]["max_num_steps"] for k in ("sft", "dpo", "ppo", "distillation", "grpo") if k in config)
    assert asked == case.steps


@pytest.mark.parametrize("case", TRAINED, ids=by_id)
def test_model_of_the_case_is_that_of_the_config(case: levels.Case) -> None:
    assert resolved(case, case.overrides)[0]["policy"]["model_name"] == case.model


@pytest.mark.parametrize("case", SCRIPTS, ids=by_id)
def test_no_check_of_the_script_is_missing_here(case: levels.Case) -> None:
    ours = {catalogue.normal(text) for text in case.checks}
    assert catalogue.upstream_checks(RL, case) - ours == set()


@pytest.mark.parametrize("case", [c for c in TRAINED if c.id not in OWN_BACKENDS], ids=by_id)
def test_parallel_sizes_and_batches_fit_the_gpus(case: levels.Case) -> None:
    policy = resolved(case, case.overrides)[0]["policy"]
    megatron = policy["megatron_cfg"]
    sizes = [megatron[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context")]
    split = sizes[0] * sizes[1] * sizes[2]
    generation = policy.get("generation") or {}
    colocated = generation.get("colocated") or {}
    own = (
        case.gpus
        if colocated.get("enabled", True)
        else case.gpus
        - (
            (colocated["resources"]["gpus_per_node"] or case.gpus // case.nodes)
            * (colocated["resources"]["num_nodes"] or 1)
        )
    )
    assert own % split == 0
    micro, whole = policy["train_micro_batch_size"], policy["train_global_batch_size"]
    assert whole % (own // split) == 0
    if sizes[0] >= 4:  # NeMo-RL's guard (nemo_rl/models/policy/lm_policy.py)
        assert policy.get("logprob_batch_size") in (None, micro, "${policy.train_micro_batch_size}")
