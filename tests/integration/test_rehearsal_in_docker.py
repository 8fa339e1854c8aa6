"""A rehearsal on the real NeMo-RL in the CPU image: Pass, files given back, checkouts unchanged; a swapped mapping fails.

Needs an engine, BRIDGE_REPO and NEMO_RL_REPO, and E2E_REAL_FULL=1: the image alone takes minutes to build (a Debian from
the archive, 3.4 GB loaded into the engine).
"""

from __future__ import annotations

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


def test_both_rehearsals_pass_in_a_container_and_a_swapped_mapping_fails(client, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", HOST)
    real = Real(tmp_path, runtime="docker")
    assert real.doit(SFT, GRPO) == 0, real.out
    assert [(c["verdict"], c["rehearsal"]) for c in real.report["cases"]] == [("Pass", True)] * 2
    for path in (real.workspace / "attempts").rglob("*"):
        assert path.lstat().st_uid == os.getuid(), path
    origins = "".join(p.read_text() for p in (real.workspace / "attempts").glob("rehearse*/*/origins/*.jsonl"))
    assert "/opt/Megatron-Bridge/src/megatron/bridge/__init__.py" in origins
    for repo in (real.bridge, real.nemo_rl):
        assert run_git(repo, "status", "--porcelain") == ""
    assert real.doit(SFT, GRPO) == 0, real.out
    assert all(c["cached"] for c in real.report["cases"])
    keys = {"k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight"}
    real.edit(PROVIDER, {keys["k"]: keys["v"], keys["v"]: keys["k"]})
    assert real.doit(GRPO) == 1, real.out
    assert "token_mult_prob_error" in real.reasons("rehearse.level0.grpo_megatron")
