"""The CPU proof on real input: it passes on the unmodified Bridge and sees what the round trip alone does not.

Needs BRIDGE_REPO and NEMO_RL_REPO; they are copied. E2E_REAL_BUILD keeps the CPU environment between runs.
"""

from __future__ import annotations

import json

import pytest

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


def proved(real: Real) -> tuple[str, dict[str, str]]:
    """Return the verdict of the Qwen3 proof and that of each check, from its artefact."""
    found = next(real.build.glob("Bridge_RL-local-*/stages/proof/qwen3.json"))
    artefact = json.loads(found.read_text())
    return artefact["verdict"], {c["name"]: c["verdict"] for c in artefact["checks"]}


def test_qwen3_passes_on_the_unmodified_tree_and_is_not_measured_twice(real):
    assert real.doit("proof:qwen3") == 0, real.out
    verdict, checks = proved(real)
    assert verdict == "Pass"
    assert len(checks) == 7
    assert set(checks.values()) == {"Pass"}
    attempts = list(real.build.glob("Bridge_RL-local-*/attempts/proof.qwen3/*"))
    assert real.doit("proof:qwen3") == 0, real.out
    assert list(real.build.glob("Bridge_RL-local-*/attempts/proof.qwen3/*")) == attempts


@full
def test_k_and_v_swapped_in_the_names_is_seen_by_the_logits_alone(real):
    real.edit(
        PROVIDER,
        {"self_attn.k_proj.weight": "self_attn.v_proj.weight", "self_attn.v_proj.weight": "self_attn.k_proj.weight"},
    )
    try:
        assert real.doit("proof:qwen3") == 1, real.out
    finally:
        real.revert()
    verdict, checks = proved(real)
    assert verdict == "Fail"
    assert [checks[name] for name in EXPORT] == ["Pass"] * 3, "the round trip is bit-equal"
    assert checks["logits"] == checks["gradients"] == "Fail"


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
def test_an_exception_of_the_bridge_names_the_line_of_the_checkout(real):
    real.edit(PROVIDER, {"provider.qk_layernorm = True": "provider.qk_layernorm = no_such_name"})
    try:
        assert real.doit("proof:qwen3") == 1, real.out
    finally:
        real.revert()
    assert proved(real)[0] == "Fail"
    assert f"{real.bridge}/{PROVIDER}" in real.out
