"""A CPU proof is judged by its numbers: one missing, not a number, or measured elsewhere is never a Pass."""

from __future__ import annotations

import ast
import math

import pytest

from tasks import proof
from tasks.errors import UserError
from tasks.settings import ROOT
from tasks.verdict import Verdict

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
PROGRAM = ["/agent/cpu/proof.py", 250, "prove"]


def answer(*, origins=ORIGINS, without=(), extra=(), problem=None, **values):
    measured = {name: 0.0 for name in proof.LIMITS if name not in without} | {
        name.replace("_", " "): value for name, value in values.items()
    }
    checks = [{"name": n, "value": v, "text": f"about {n}"} for n, v in measured.items()]
    return {"family": "qwen3", "origins": origins, "checks": [*checks, *extra], "problem": problem}


def raised(kind, *frames, text="it went wrong", stage="measure", missing=None):
    return answer(
        problem={"stage": stage, "type": kind, "text": text, "missing": missing, "frames": [PROGRAM, *frames]}
    )


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
        (answer(), RAISED, "Blocked", "rc 1 though it reports no problem"),
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
    decided, reasons, _ = proof.judge(given, exit_facts, ROOTS)
    assert decided == verdict
    assert words in "; ".join(r.text for r in reasons)
    assert (decided is Verdict.PASS) == (not reasons)


def test_checks_carry_their_limit_and_verdict():
    _, _, checks = proof.judge(answer(logits=0.5), ENDED, ROOTS)
    found = {c["name"]: (c["verdict"], c["value"], c["limit"]) for c in checks}
    assert found["logits"] == ("Fail", 0.5, 1e-4)
    assert found["loss"] == ("Pass", 0.0, 1e-5)
    assert set(found) == set(proof.LIMITS)


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="qwen2, qwen3, llama, mistral"):
        proof.stage(None, "gpt")


def test_the_program_knows_every_family_and_measures_every_limit():
    tree = ast.parse((ROOT / proof.PROGRAM).read_text())
    recipes = next(node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "RECIPES")
    assert {key.value for key in recipes.keys} == set(proof.FAMILIES)
    measured = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"
    }
    assert measured == set(proof.LIMITS)
