"""Rehearsals on the real NeMo-RL in the CPU image: Pass, Fail with k and v swapped, Pass by a registry's digest.

Needs an engine, BRIDGE_REPO and NEMO_RL_REPO, and E2E_REAL_FULL=1: the image alone takes minutes to build (a Debian from
the archive, 3.4 GB loaded into the engine); E2E_REAL_BUILD keeps it.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.conftest import run_git
from tests.integration.conftest import HOST
from tests.real.test_rehearsals import GRPO, PROVIDER, REPOS, SFT, Real

pytestmark = [
    pytest.mark.docker,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not all(REPOS), reason="set BRIDGE_REPO and NEMO_RL_REPO to real checkouts"),
    pytest.mark.skipif(not os.environ.get("E2E_REAL_FULL"), reason="set E2E_REAL_FULL=1 for the longer real tests"),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", HOST)
        yield Real(tmp_path_factory.mktemp("real"), runtime="docker")


def test_sft_and_the_whole_grpo_loop_pass_and_files_come_back_to_the_caller(client, real):
    before = [run_git(repo, "status", "--porcelain", "--ignored") for repo in (real.bridge, real.nemo_rl)]
    assert real.doit(SFT, GRPO) == 0, real.out
    assert [(c["verdict"], c["rehearsal"]) for c in real.report["cases"]] == [("Pass", True)] * 2
    for case in real.report["cases"]:
        attempt = real.workspace / case["attempts"][-1]["path"]
        spec = json.loads((attempt / "spec.json").read_text())
        assert spec["env"]["PYTHONPATH"].startswith("/opt/Megatron-Bridge/src:")
        assert "/opt/Megatron-Bridge/src/" in "".join(p.read_text() for p in (attempt / "origins").glob("*.jsonl"))
        assert {path.lstat().st_uid for path in (attempt, *attempt.rglob("*"))} == {os.getuid()}
    assert [run_git(repo, "status", "--porcelain", "--ignored") for repo in (real.bridge, real.nemo_rl)] == before
    assert real.doit(SFT, GRPO) == 0, real.out
    assert all(c["cached"] for c in real.report["cases"])


def test_k_and_v_swapped_in_the_bridges_mapping_is_a_fail(client, real):
    keys = {"k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight"}
    real.edit(PROVIDER, {keys["k"]: keys["v"], keys["v"]: keys["k"]})
    try:
        assert real.doit(SFT) == 1, real.out
    finally:
        real.revert()
    assert 'data["train/loss"]' in real.reasons("rehearse.level1.sft_megatron")


def test_the_image_is_pulled_by_the_digest_that_a_registry_gives_and_not_built_again(client, real, registry):
    assert real.doit(SFT) == 0, real.out
    image = real.report["provenance"]["image"]["id"]
    client.images.get(image).tag(f"{registry}/e2e/cpu", "1")
    told = client.images.push(f"{registry}/e2e/cpu", "1", stream=True, decode=True)
    digest = [line["aux"]["Digest"] for line in told if "aux" in line][-1]
    for name in client.images.get(image).tags:
        client.images.remove(name)
    assert image not in [one.id for one in client.images.list(all=True)]
    assert real.doit(SFT, f"image={registry}/e2e/cpu@{digest}") == 0, real.out
    assert real.report["provenance"]["image"]["id"] == image
    assert not real.report["cases"][0]["cached"], "the name of the image is an input of the run"
    assert "ready after" not in real.out, "a pinned image is not built"
