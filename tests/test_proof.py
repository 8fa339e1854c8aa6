"""A CPU proof is judged by its numbers: one missing, not a number, or measured elsewhere is never a Pass."""

from __future__ import annotations

import ast
import math

import pytest

from tasks import proof
from tasks.errors import UserError
from tasks.reason import Verdict
from tasks.settings import ROOT

ENDED = {"reason": "exited", "rc": 0}
RAISED = {"reason": "exited", "rc": 1}
ROOTS = {"bridge": "/snap/bridge-1", "mcore": "/work/mcore"}
ORIGINS = {
    "megatron.bridge": "/snap/bridge-1/src/megatron/bridge/__init__.py",
    "megatron.core": "/work/mcore/megatron/core/__init__.py",
}
MAPPING = ["/snap/bridge-1/src/megatron/bridge/models/conversion/param_mapping.py", 812, "hf_to_megatron"]
INIT = ["/snap/bridge-1/src/megatron/bridge/__init__.py", 3, "<module>"]
LAYER = ["/work/mcore/megatron/core/transformer/attention.py", 90, "forward"]
TORCH = ["/env/torch/nn/functional.py", 5, "linear"]
WRAPPED = ["/cpu/shim/e2e_cpu/cuda_devices.py", 45, "wrapped"]
STANDIN = ["/cpu/shim/e2e_cpu/megatron_layers.py", 75, "__init__"]
PROGRAM = ["/agent/cpu/proof/serve.py", 250, "rank"]


def answer(*, origins=ORIGINS, without=(), extra=(), problems=(), family="qwen3", **values):
    measured = {name: 0.0 for name in sorted(proof.required(family)) if name not in without} | {
        name.replace("_", " "): value for name, value in values.items()
    }
    checks = [{"name": n, "value": v, "text": f"about {n}"} for n, v in measured.items()]
    return {"family": family, "origins": origins, "checks": [*checks, *extra], "problems": list(problems)}


def problem(kind, *frames, text="it went wrong", stage="measure", missing=None):
    found = {"stage": stage, "type": kind, "text": text, "missing": missing, "frames": [PROGRAM, *frames]}
    return {"section": "TP=2", **found}


def raised(kind, *frames, **facts):
    return answer(problems=[problem(kind, *frames, **facts)])


@pytest.mark.parametrize(
    ("given", "exit_facts", "verdict", "words"),
    [
        (answer(), ENDED, "Pass", ""),
        (answer(logits=9e-5, loss=9e-6, gradients=9e-4), ENDED, "Pass", ""),
        # each number
        (answer(logits=2e-4), ENDED, "Fail", "logits: 0.0002, at most 0.0001: about logits"),
        (answer(loss=2e-5), ENDED, "Fail", "loss"),
        (answer(gradients=2e-3), ENDED, "Fail", "gradients"),
        (answer(export_missing=1), ENDED, "Fail", "export missing: 1, at most 0.0"),
        (answer(export_extra=1), ENDED, "Fail", "export extra"),
        (answer(export_unequal=1), ENDED, "Fail", "export unequal"),
        # no number is no good number
        (answer(logits="nan"), ENDED, "Fail", "logits: nan"),
        (answer(logits="inf"), ENDED, "Fail", "logits: inf"),
        (answer(logits=math.nan), ENDED, "Fail", "logits: nan"),
        (answer(logits=None), ENDED, "Fail", "logits: None"),
        (answer(logits="fine"), ENDED, "Fail", "logits: fine"),
        # something was not measured
        (answer(without=["logits"]), ENDED, "Blocked", "logits was not measured"),
        (answer(without=list(proof.LIMITS)), ENDED, "Blocked", "gradients was not measured"),
        (answer(extra=[{"name": "new", "value": 0}]), ENDED, "Blocked", "new has no limit"),
        (answer(), RAISED, "Blocked", "the proof ended with rc 1"),
        (answer(without=["TP=2 unequal"]), ENDED, "Blocked", "TP=2 unequal was not measured"),
        (answer(without=["lora merge"]), ENDED, "Blocked", "lora merge was not measured"),
        (answer(family="qwen2"), ENDED, "Blocked", "no answer"),
        # a twin of a bad value does not hide it
        (answer(logits=1.0, extra=[{"name": "logits", "value": 0.0}]), ENDED, "Fail", "logits: 1"),
        # a reference that is off says nothing about the Bridge
        (answer(rotary_table=0.5, logits=1.0), ENDED, "Blocked", "rotary table"),
        # measured on another tree
        (answer(origins={**ORIGINS, "megatron.bridge": "/site/megatron/bridge/__init__.py"}), ENDED, "Fail", "/site/"),
        (
            answer(origins={**ORIGINS, "megatron.core": "/work/mcore2/megatron/core/a.py"}),
            ENDED,
            "Fail",
            "/work/mcore2",
        ),
        (answer(origins={}), ENDED, "Blocked", "nothing tells where megatron.bridge"),
        # no answer
        (None, ENDED, "Blocked", "no answer, rc 0"),
        ([], {"reason": "exited", "rc": -9}, "Blocked", "no answer, rc -9"),
        (answer(), None, "Blocked", "no exit.json"),
        (answer(), {"reason": "timeout", "rc": None}, "Blocked", "timeout"),
        # exceptions
        (raised("KeyError", MAPPING), RAISED, "Fail", "param_mapping.py:812 in hf_to_megatron"),
        (raised("RuntimeError", MAPPING, TORCH), RAISED, "Fail", "param_mapping.py:812"),
        (raised("RuntimeError", MAPPING, WRAPPED), RAISED, "Fail", "param_mapping.py:812"),
        (raised("RuntimeError", LAYER, TORCH), RAISED, "Fail", "attention.py:90 in forward), in Core"),
        (raised("NotImplementedError", MAPPING, STANDIN), RAISED, "Blocked", "stand-ins do not do it"),
        (raised("NotImplementedError", MAPPING), RAISED, "Fail", "param_mapping.py:812"),
        (raised("NameError", INIT, stage="import"), RAISED, "Fail", "__init__.py:3"),
        (raised("OSError", INIT, TORCH, stage="import"), RAISED, "Blocked", "while it was imported"),
        (raised("ModuleNotFoundError", INIT, missing="mamba_ssm"), RAISED, "Blocked", "lacks a package"),
        (raised("ModuleNotFoundError", INIT, missing="megatron.bridge.x"), RAISED, "Fail", "__init__.py:3"),
        (raised("ValueError", TORCH), RAISED, "Blocked", "in no frame of Bridge or Core"),
        (raised("AttributeError", stage="reference"), RAISED, "Blocked", "reference cannot be had"),
    ],
)
def test_verdict_of_a_proof(given, exit_facts, verdict, words):
    decided, reasons, _ = proof.judge(given, exit_facts, ROOTS, "qwen3")
    assert decided == verdict
    assert words in "; ".join(r.text for r in reasons)
    assert (decided is Verdict.PASS) == (not reasons)


def test_a_fault_is_not_hidden_by_a_gap_of_another_section():
    both = [problem("NotImplementedError", MAPPING, STANDIN), problem("KeyError", MAPPING)]
    verdict, reasons, _ = proof.judge(answer(problems=both), ENDED, ROOTS, "qwen3")
    assert verdict is Verdict.FAIL
    assert [r.kind for r in reasons] == ["bridge_frame", "standin"]
    verdict, reasons, _ = proof.judge(answer(problems=both[:1], logits=1.0), ENDED, ROOTS, "qwen3")
    assert verdict is Verdict.FAIL


def test_experts_need_their_parallel_export_and_others_do_not():
    lacking = answer(family="qwen3_moe", without=["EP=2 unequal"])
    assert proof.judge(lacking, ENDED, ROOTS, "qwen3_moe")[0] is Verdict.BLOCKED
    assert proof.judge(answer(family="qwen3_moe"), ENDED, ROOTS, "qwen3_moe")[0] is Verdict.PASS
    assert not any(name.startswith("EP") for name in proof.required("qwen3"))


def test_checks_carry_their_limit_and_verdict():
    _, _, checks = proof.judge(answer(logits=0.5), ENDED, ROOTS, "qwen3")
    found = {c["name"]: (c["verdict"], c["value"], c["limit"]) for c in checks}
    assert found["logits"] == ("Fail", 0.5, 1e-4)
    assert found["loss"] == ("Pass", 0.0, 1e-5)
    assert set(found) == proof.required("qwen3")


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="qwen2, qwen3, llama, mistral"):
        proof.stage(None, "gpt")


def test_the_program_knows_every_family_that_is_listed():
    tree = ast.parse((ROOT / proof.PROGRAM / "families.py").read_text())
    recipes = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "RECIPES"
    )
    known = {key.value for key in recipes.keys}
    assert known == set(proof.FAMILIES) | set(proof.UNPROVED)
    assert not set(proof.FAMILIES) & set(proof.UNPROVED)
    assert set(proof.FAMILIES) >= proof.EXPERTS


def test_every_file_that_measures_is_an_input():
    files = set(proof.program_files())
    assert {f"{proof.PROGRAM}/{n}.py" for n in ("serve", "sections", "families", "reference", "bytecode")} <= files
    assert f"{proof.PROGRAM}/mutants.py" not in files


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("Qwen/Qwen2.5-0.5B", "qwen2"),
        ("Qwen/Qwen2.5-Math-7B", "qwen2"),
        ("Qwen/Qwen2.5-VL-3B-Instruct", None),
        ("Qwen/Qwen2.5-Omni-3B", None),
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("Qwen/Qwen3-1.7B-Base", "qwen3"),
        ("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
        ("Qwen/Qwen3.5-9B-Base", None),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "deepseek_v3"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16", None),
        ("", None),
    ],
)
def test_family_of_a_model(model, family):
    assert proof.family_of(model) == family
