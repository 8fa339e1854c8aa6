"""A rehearsal of the real NeMo-RL as Slurm jobs: Pass, also over two nodes, and Fail with k and v swapped in the Bridge.

Two nodes of .ci/slurm.sh and its stand-in for pyxis (.ci/srun). Minutes on two cores: only with E2E_REAL_FULL=1, both
checkouts (BRIDGE_REPO, NEMO_RL_REPO) and, to spare its making, a finished CPU environment in E2E_CPU_HOME.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import run_git
from tests.integration.conftest import ROOT
from tests.integration.test_slurm import cluster  # noqa: F401 - the module's cluster, its stand-in first on PATH

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.environ.get("E2E_REAL_FULL") != "1", reason="minutes of two cores: E2E_REAL_FULL=1"),
]
CASE = "level1.sft_megatron"
MAPPING = "src/megatron/bridge/models/qwen/qwen3_bridge.py"  # of the model that this case is rehearsed with
SBATCH = {"SBATCH_MEM_PER_NODE": "10000", "SBATCH_ACCOUNT": "a", "SBATCH_PARTITION": "main"}


def rehearse(bridge: Path, build: Path, image: Path, *words: str) -> tuple[int, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "SLURM_CONF", "NEMO_RL_REPO") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "doit", f"rehearse:{CASE}", "runtime=slurm", f"build={build}", f"image={image}", *words],
        cwd=ROOT, text=True, capture_output=True, timeout=1500, check=False,
        env={**kept, **SBATCH, "BRIDGE_REPO": str(bridge), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_sft_megatron_passes_as_a_job_and_swapped_names_are_found(tmp_path):
    nemo_rl, bridge, build = Path(os.environ["NEMO_RL_REPO"]), tmp_path / "Bridge", tmp_path / "build"
    subprocess.run(["cp", "-a", f"{os.environ['BRIDGE_REPO']}/.", bridge], check=True)
    build.mkdir()
    (build / "cpu").symlink_to(os.environ.get("E2E_CPU_HOME") or tmp_path / "cpu")
    (tmp_path / "node.sqsh").write_text("the stand-in has no image: the node's own programs run\n")
    before = [run_git(tree, "status", "--porcelain", "--ignored") for tree in (bridge, nemo_rl)]
    rc, out = rehearse(bridge, build, tmp_path / "node.sqsh")
    assert rc == 0, out
    jobs = {path.parent.parent.name for path in build.glob("*/attempts/*/*/slurm.json")}
    assert jobs == {"probe-cpu", "config-cpu", f"rehearse.{CASE}"}
    (attempt,) = build.glob(f"*/attempts/rehearse.{CASE}/*")
    spec = json.loads((attempt / "spec.json").read_text())
    assert spec["env"]["PYTHONPATH"].startswith("/opt/Megatron-Bridge/src:")
    assert "/opt/Megatron-Bridge/src/" in "".join(path.read_text() for path in (attempt / "origins").glob("*.jsonl"))
    assert [run_git(tree, "status", "--porcelain", "--ignored") for tree in (bridge, nemo_rl)] == before
    text = (bridge / MAPPING).read_text()
    swapped = re.sub(r"\b([kv])_proj\.weight", lambda found: f"{'v' if found[1] == 'k' else 'k'}_proj.weight", text)
    assert swapped != text
    (bridge / MAPPING).write_text(swapped)
    rc, out = rehearse(bridge, build, tmp_path / "node.sqsh")
    assert rc == 1, out
    assert 'data["train/loss"]["3"]' in out


def test_two_nodes_train_together_in_the_ray_cluster_that_ray_sub_starts(tmp_path):
    """Real Ray on both nodes: two policy workers each, in processes that cannot see those of the other node."""
    build, levels = tmp_path / "build", yaml.safe_load((ROOT / "levels.yaml").read_text())
    build.mkdir()
    (build / "cpu").symlink_to(os.environ.get("E2E_CPU_HOME") or tmp_path / "cpu")
    (tmp_path / "node.sqsh").write_text("the stand-in has no image: the node's own programs run\n")
    plan = levels["levels"][1]["cases"]["sft_megatron"]["rehearsal"]
    plan |= {"gpus": 4, "nodes": 2}
    plan["overrides"] += ["cluster.num_nodes=2", "cluster.gpus_per_node=2"]
    plan["overrides"] += ["policy.train_micro_batch_size=2", "sft.val_micro_batch_size=1"]  # 4 ranks share a batch
    (tmp_path / "levels.yaml").write_text(yaml.safe_dump(levels))
    words = (f"levels={tmp_path / 'levels.yaml'}",)
    rc, out = rehearse(Path(os.environ["BRIDGE_REPO"]), build, tmp_path / "node.sqsh", *words)
    assert rc == 0, out
    assert "2 nodes: sbatch with ray.sub" in out
    (attempt,) = build.glob(f"*/attempts/rehearse.{CASE}/*")
    seen = [
        json.loads(line) for path in (attempt / "origins").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    assert {one["module"] for one in seen} >= {"megatron.bridge", "megatron.core", "nemo_rl"}
    assert all(one["path"].startswith(("/opt/Megatron-", "/opt/nemo-rl/")) for one in seen)
    assert len(list((attempt / "slurm").glob("*-logs/ray-worker-*.log"))) == 1
