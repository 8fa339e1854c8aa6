"""A rehearsal of the real NeMo-RL in a container: Pass, and Fail with the names of k and v swapped in the Bridge.

Minutes on two cores: only with E2E_REAL_FULL=1, an engine, both checkouts (BRIDGE_REPO, NEMO_RL_REPO) and, to spare its
making, a finished CPU environment in E2E_CPU_HOME.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import cpu
from tests.conftest import run_git
from tests.integration.conftest import HOST, ROOT

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(os.environ.get("E2E_REAL_FULL") != "1", reason="minutes of two cores: E2E_REAL_FULL=1"),
]
CASE = "rehearse.level1.sft_megatron"
MAPPING = "src/megatron/bridge/models/qwen/qwen3_bridge.py"
REF = "nemo-rl-e2e/rehearsal:test"


def rehearse(bridge: Path, nemo_rl: Path, build: Path, *words: str) -> tuple[int, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "doit", "rehearse:level1.sft_megatron", f"build={build}", *words],
        cwd=ROOT, text=True, capture_output=True, timeout=1800, check=False,
        env={
            **kept, "BRIDGE_REPO": str(bridge), "NEMO_RL_REPO": str(nemo_rl), "DOCKER_HOST": HOST, "PYTHONPATH": str(ROOT),
        },
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_sft_megatron_passes_in_a_container_and_swapped_names_are_found(tmp_path, client, ci_image):
    nemo_rl, bridge = Path(os.environ["NEMO_RL_REPO"]), tmp_path / "Bridge"
    subprocess.run(["cp", "-a", f"{os.environ['BRIDGE_REPO']}/.", bridge], check=True)
    home = Path(os.environ.get("E2E_CPU_HOME") or tmp_path / "cpu")
    made = cpu.build(home, print)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "cpu").symlink_to(home)
    archive = tmp_path / "rehearsal.tar"
    identity = ci_image.build(archive, REF, packages=["git", "make", "g++"], mounted=[made.python.parent.parent])
    client.images.load(archive.read_bytes())
    before = [run_git(tree, "status", "--porcelain", "--ignored") for tree in (bridge, nemo_rl)]
    words = (nemo_rl, tmp_path / "build", "runtime=docker", f"image={identity}")
    rc, out = rehearse(bridge, *words)
    assert rc == 0, out
    (attempt,) = (tmp_path / "build").glob(f"*/attempts/{CASE}/*")
    spec = json.loads((attempt / "spec.json").read_text())
    assert spec["env"]["PYTHONPATH"].startswith("/opt/Megatron-Bridge/src:")
    assert "/opt/Megatron-Bridge/src/" in "".join(path.read_text() for path in (attempt / "origins").glob("*.jsonl"))
    assert {path.lstat().st_uid for path in (attempt, *attempt.rglob("*"))} == {os.getuid()}
    assert [run_git(tree, "status", "--porcelain", "--ignored") for tree in (bridge, nemo_rl)] == before
    text = (bridge / MAPPING).read_text()
    swapped = text.replace("k_proj.weight", "K").replace("v_proj.weight", "k_proj.weight").replace("K", "v_proj.weight")
    assert swapped != text
    (bridge / MAPPING).write_text(swapped)
    rc, out = rehearse(bridge, *words)
    assert rc == 1, out
