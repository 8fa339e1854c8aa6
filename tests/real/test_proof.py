"""The CPU proof on real input: it passes on the unmodified Bridge and sees what the round trip alone does not.

Needs BRIDGE_REPO and NEMO_RL_REPO; they are copied. E2E_REAL_BUILD keeps the CPU environment between runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from tasks import proof
from tests.real.test_rehearsals import MAPPING, PROVIDER, REPOS, Real, full

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not all(REPOS), reason="set BRIDGE_REPO and NEMO_RL_REPO to real checkouts"),
]

EXPORT = ("export missing", "export extra", "export unequal")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    """Return copies with a workspace of their own; only the CPU environment is shared with the rehearsals."""
    home = tmp_path_factory.mktemp("real")
    made = Real(home)
    if made.build != home / "build":
        shared, made.build = made.build / "cpu", home / "build"
        shared.mkdir(parents=True, exist_ok=True)
        made.build.mkdir()
        (made.build / "cpu").symlink_to(shared)
    return made


FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")


def proofs(real: Real) -> dict[str, dict[str, Any]]:
    """Return the report's proofs by family."""
    return {p["family"]: p for p in real.report["proofs"]}


def proved(real: Real, family: str = "qwen3") -> tuple[str, dict[str, str]]:
    """Return the verdict of a proof and that of each check."""
    found = proofs(real)[family]
    return found["verdict"], {c["name"]: c["verdict"] for c in found["checks"]}


def attempts(real: Real) -> list[str]:
    return sorted(path.name for path in real.build.glob("Bridge_RL-local-*/attempts/proof*/*"))


def test_four_families_pass_on_the_unmodified_tree_in_one_attempt(real):
    assert real.doit(*(f"proof:{family}" for family in FAMILIES)) == 0, real.out
    for family in FAMILIES:
        verdict, checks = proved(real, family)
        assert verdict == "Pass"
        assert set(checks) == proof.required(family)
        assert set(checks.values()) == {"Pass"}
    assert len(attempts(real)) == 1


def test_k_and_v_swapped_in_the_names_is_seen_by_the_logits_and_reaches_no_other_family(real):
    before = attempts(real)
    real.edit(
        PROVIDER,
        {"self_attn.k_proj.weight": "self_attn.v_proj.weight", "self_attn.v_proj.weight": "self_attn.k_proj.weight"},
    )
    try:
        assert real.doit(*(f"proof:{family}" for family in FAMILIES)) == 1, real.out
    finally:
        real.revert()
    verdict, checks = proved(real)
    assert verdict == "Fail"
    assert [checks[name] for name in EXPORT] == ["Pass"] * 3, "the round trip is bit-equal"
    assert checks["logits"] == checks["gradients"] == checks["TP=2 logits"] == "Fail"
    assert all(proofs(real)[family]["cached"] for family in FAMILIES if family != "qwen3")
    assert len(attempts(real)) == len(before) + 1


def test_going_back_finds_the_earlier_passes(real):
    before = attempts(real)
    assert real.doit(*(f"proof:{family}" for family in FAMILIES)) == 0, real.out
    assert attempts(real) == before


@full
def test_k_and_v_swapped_in_the_merge_is_a_fail(real):
    merge = "qkv_weights.extend([q_group, {}_group, {}_group])"
    real.edit(MAPPING, {merge.format("k", "v"): merge.format("v", "k")})
    try:
        assert real.doit("proof:qwen3") == 1, real.out
    finally:
        real.revert()
    verdict, checks = proved(real)
    assert verdict == "Fail"
    assert checks["export unequal"] == checks["logits"] == "Fail"


@full
def test_an_adapter_cut_without_regard_to_tensor_parallelism_is_seen_there_alone(real):
    """Merged and exported wrongly alike, and right in one process: only the logits of two ranks tell."""
    ranks = "tp_size = 1 if is_expert else parallel_state.get_tensor_model_parallel_world_size()"
    real.edit("src/megatron/bridge/models/conversion/peft_bridge.py", {ranks: "tp_size = 1"})
    try:
        assert real.doit("proof:qwen3") == 1, real.out
    finally:
        real.revert()
    assert {name for name, verdict in proved(real)[1].items() if verdict != "Pass"} == {"lora TP=2 logits"}


@full
def test_an_exception_of_the_bridge_names_the_line_of_the_checkout(real):
    real.edit(PROVIDER, {"provider.qk_layernorm = True": "provider.qk_layernorm = no_such_name"})
    try:
        assert real.doit("proof:qwen3") == 1, real.out
    finally:
        real.revert()
    assert proved(real)[0] == "Fail"
    assert f"{real.bridge}/{PROVIDER}" in real.out


@full
def test_every_listed_family_passes(real):
    assert real.doit("proof") == 0, real.out
    assert {family: p["verdict"] for family, p in proofs(real).items()} == dict.fromkeys(proof.FAMILIES, "Pass")
