"""What a resolved config must satisfy: a config that runs, one change at a time, and the rule that must object."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from tasks import config_rules, levels
from tests.miniature import LEVELS

GOOD: dict[str, Any] = {
    "cluster": {"gpus_per_node": 8, "num_nodes": 1},
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4},
    "loss_fn": {"force_on_policy_ratio": False},
    "policy": {
        "train_global_batch_size": 32,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {"enabled": False},
        "dtensor_cfg": {"enabled": False, "tensor_parallel_size": 1, "context_parallel_size": 1},
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": 1,
        },
        "generation": {"colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}}},
    },
}
M = "policy.megatron_cfg"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> levels.Case:
    path = tmp_path_factory.mktemp("levels") / "levels.yaml"
    path.write_text(LEVELS)
    return replace(next(iter(levels.load(path).cases())), gpus=8)


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(GOOD)
    for key, value in changes.items():
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return config


def answer(config: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {
        "program": "examples/run_grpo.py", "config_file": "examples/configs/a.yaml", "config": config, "errors": [],
        "unread": [], "variables": {}, "notes": [], **more,
    }  # fmt: skip


# (changes, kind of the reason, key in it, words of it); the first is what nothing may object to
TRAPS = [
    ({"policy.dtensor_cfg.enabled": True}, "backends", "policy.dtensor_cfg.enabled", "both backends enabled"),
    ({f"{M}.enabled": False, "policy.dtensor_cfg.enabled": True}, "backend", f"{M}.enabled", "would not touch the Bridge"),
    ({f"{M}.enabled": False}, "backends", f"{M}.enabled", "no backend enabled"),
    ({f"{M}.tensor_model_parallel_size": 4, "policy.logprob_batch_size": 4}, "tp_guard", "policy.logprob_batch_size",
     "try policy.logprob_batch_size=2"),
    ({f"{M}.tensor_model_parallel_size": 3}, "parallel", f"{M}.tensor_model_parallel_size", "8 GPUs train"),
    ({f"{M}.context_parallel_size": 4}, "parallel", f"{M}.tensor_model_parallel_size", "= 16 does not divide"),
    ({f"{M}.expert_model_parallel_size": 8}, "parallel", f"{M}.expert_model_parallel_size", "= 16 does not divide"),
    ({f"{M}.expert_tensor_parallel_size": 3}, "parallel", f"{M}.expert_model_parallel_size", "= 6 does not divide"),
    ({"policy.train_global_batch_size": 1}, "batch", "policy.train_global_batch_size", "2 data parallel ranks"),
    ({"policy.train_micro_batch_size": 3, "policy.logprob_batch_size": 3}, "batch", "policy.train_micro_batch_size",
     "no multiple of policy.train_micro_batch_size 3"),
    ({"grpo.num_prompts_per_step": 2}, "batch", "policy.train_global_batch_size", "try policy.train_global_batch_size=8"),
    ({"cluster.gpus_per_node": 16}, "gpus", "cluster.gpus_per_node", "the case has 8 GPUs"),
    ({"policy.generation.colocated": {"enabled": False, "resources": {"gpus_per_node": 8}}}, "parallel",
     f"{M}.tensor_model_parallel_size", "0 GPUs train"),
    ({"policy.generation.colocated": {"enabled": False, "resources": {"gpus_per_node": 5}}}, "parallel",
     f"{M}.tensor_model_parallel_size", "3 GPUs train"),
    ({"teacher": {"megatron_cfg": {**GOOD["policy"]["megatron_cfg"], "pipeline_model_parallel_size": 3}}}, "parallel",
     "teacher.megatron_cfg.tensor_model_parallel_size", "does not divide"),
    ({"value": {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": True}}}, "backends",
     "value.dtensor_cfg.enabled", "both backends"),
]  # fmt: skip


def test_a_config_that_runs_is_not_objected_to(case: levels.Case) -> None:
    assert config_rules.judge(case, [answer(GOOD)], {}) == []


@pytest.mark.parametrize(("changes", "kind", "key", "words"), TRAPS)
def test_each_trap_is_named_with_key_file_and_remedy(
    case: levels.Case, changes: dict[str, Any], kind: str, key: str, words: str
) -> None:
    reasons = config_rules.judge(case, [answer(changed(changes))], {})
    assert (reasons[0].kind, reasons[0].subject) == (kind, key)
    assert words in reasons[0].text
    assert reasons[0].text.startswith("examples/configs/a.yaml: ")
    assert "; try " in reasons[0].text


@pytest.mark.parametrize(
    ("changes", "env", "why"),
    [
        ({f"{M}.tensor_model_parallel_size": 4, "policy.logprob_batch_size": 4}, {"NRL_IGNORE_TP_ACCURACY_CHECK": "0"}, "told"),
        ({f"{M}.tensor_model_parallel_size": 4, "policy.logprob_batch_size": 4, "loss_fn.force_on_policy_ratio": True}, {}, "ratio"),
        ({"policy.train_micro_batch_size": 3, "policy.logprob_batch_size": 3, "policy.sequence_packing.enabled": True}, {}, "packed"),
        ({"cluster.num_nodes": "${nodes}", "cluster.gpus_per_node": "many"}, {}, "no numbers decide nothing"),
        ({f"{M}.tensor_model_parallel_size": 3, "on_policy_distillation": {"teachers": 1}}, {}, "teachers on other nodes"),
        ({"policy.generation.colocated": {"enabled": False, "resources": {"gpus_per_node": 4}}}, {}, "half and half"),
    ],
)  # fmt: skip
def test_what_nemo_rl_lets_through_is_let_through(
    case: levels.Case, changes: dict[str, Any], env: dict[str, str], why: str
) -> None:
    assert config_rules.judge(case, [answer(changed(changes))], env) == [], why


def test_a_script_that_sets_the_guard_off_itself_is_believed(case: levels.Case) -> None:
    config = changed({f"{M}.tensor_model_parallel_size": 4, "policy.logprob_batch_size": 4})
    told = answer(config, variables={"NRL_IGNORE_TP_ACCURACY_CHECK": "1"})
    assert config_rules.judge(case, [told], {}) == []


def test_one_megatron_call_among_several_is_enough_and_a_case_of_any_backend_needs_none(case: levels.Case) -> None:
    dtensor = answer(changed({f"{M}.enabled": False, "policy.dtensor_cfg.enabled": True}))
    assert config_rules.judge(case, [dtensor, answer(GOOD)], {}) == []
    assert config_rules.judge(replace(case, backend="any"), [dtensor], {}) == []


def test_what_the_script_computes_is_not_judged(case: levels.Case) -> None:
    config = changed({"policy.dtensor_cfg.enabled": True})
    assert config_rules.judge(case, [answer(config, unread=["$EXTRA"])], {}) == []


def test_an_unknown_key_is_told_with_the_nearest_one(case: levels.Case) -> None:
    error = {
        "kind": "override", "key": "policy.megatron_cfg.tensor_parallel_size",
        "text": "policy.megatron_cfg.tensor_parallel_size=2: Could not override\nfull_key: x",
        "keys": ["policy", "policy.megatron_cfg.tensor_model_parallel_size"],
    }  # fmt: skip
    (reason,) = config_rules.judge(case, [answer(None, errors=[error])], {})
    assert reason.subject == "policy.megatron_cfg.tensor_parallel_size"
    assert "did you mean policy.megatron_cfg.tensor_model_parallel_size=?" in reason.text
    assert "examples/configs/a.yaml" in reason.text
    (far,) = config_rules.judge(case, [answer(None, errors=[{**error, "key": "zzz"}])], {})
    assert "++zzz=" in far.text
