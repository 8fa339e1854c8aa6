"""Both programs in place of the originals inside real functional scripts, with a trainer that only logs (NEMO_RL_REPO).

The scripts run unmodified in a tree of their own: `uv` is a stand-in that calls Python, the trainer writes the event
files that the script's checks speak of. Each script runs twice, with the originals and with ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPO = os.environ.get("NEMO_RL_REPO")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not REPO, reason="NEMO_RL_REPO is not set: no scripts to stand in"),
]

SCRIPTS = [
    "grpo_megatron",
    "grpo_megatron_generation",
    "sft_megatron",
    "dpo_megatron",
    "distillation_megatron",
    "ppo_megatron",
]
PROGRAMS = {"json_dump_tb_logs.py": "tasks.metrics", "check_metrics.py": "tasks.checks"}

UV = """#!/bin/bash
shift
while [[ "$1" == --no-sync || "$1" == coverage || "$1" == -a || "$1" == --data-file=* || "$1" == --source=* || "$1" == run ]]; do shift; done
case "$1" in
*/examples/*) shift; exec "$STUB_PYTHON" "$STUB_TRAINER" "$@" ;;
*) exec "$STUB_PYTHON" "$@" ;;
esac
"""

TRAINER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import event_log
given = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:] if "=" in word)
steps = int(next(value for name, value in given.items() if name.endswith(".max_num_steps")))
kind = given.get("stub", "good")
good = {{
    "train/loss": 0.4, "train/reward": 0.5, "train/token_mult_prob_error": 1.01, "train/probs_ratio_clamped_min": 0.98,
    "train/probs_ratio_clamped_max": 1.02, "train/critic/loss": 0.3, "train/critic/explained_var": 0.1,
    "train/critic/grad_norm": 2.0, "train/grad_norm": 0.7,
}}
bad = {{"train/loss": 50.0, "train/token_mult_prob_error": 10.6}}
records = []
for step in range(1, (steps if kind != "short" else 1) + 1):
    values = good | (bad if kind == "bad" else {{}})
    if kind == "nan" and step == steps:
        values = values | dict.fromkeys(bad, float("nan"))
    records += [event_log.scalar(tag, step, value) for tag, value in values.items()]
event_log.write(Path(given["logger.log_dir"]) / "exp_001" / "tensorboard" / "events.out.tfevents.1.stub", records)
print("trained", steps, "steps")
sys.exit(3 if kind == "crash" else 0)
"""


def tree(folder: Path, *, ours: bool) -> Path:
    """Return a NeMo-RL tree with the scripts and either the originals or shims of our programs."""
    repo = folder / ("ours" if ours else "theirs")
    (repo / "tests" / "functional").mkdir(parents=True)
    for script in SCRIPTS:
        shutil.copy(Path(str(REPO)) / "tests" / "functional" / f"{script}.sh", repo / "tests" / "functional")
    for program, module in PROGRAMS.items():
        if ours:
            shim = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom {module} import main\nsys.exit(main())\n"
            (repo / "tests" / program).write_text(shim)
        else:
            shutil.copy(Path(str(REPO)) / "tests" / program, repo / "tests")
    return repo


def run(repo: Path, script: str, kind: str) -> tuple[int, bytes | None, str]:
    """Run one script; return its exit status, metrics.json and what it printed."""
    tools = repo.parent / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "uv").write_text(UV)
    (tools / "uv").chmod(0o755)
    (tools / "trainer.py").write_text(TRAINER.format(tests=str(ROOT / "tests")))
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "HOME": str(repo.parent),
        "STUB_PYTHON": sys.executable,
        "STUB_TRAINER": str(tools / "trainer.py"),
    }
    ended = subprocess.run(
        ["bash", str(repo / "tests" / "functional" / f"{script}.sh"), f"stub={kind}"],
        cwd=repo,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    metrics = repo / "tests" / "functional" / script / "metrics.json"
    return ended.returncode, metrics.read_bytes() if metrics.exists() else None, ended.stdout + ended.stderr


@pytest.mark.parametrize("kind", ["good", "bad"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_ends_the_same_with_our_programs(tmp_path: Path, script: str, kind: str) -> None:
    theirs = run(tree(tmp_path, ours=False), script, kind)
    ours = run(tree(tmp_path, ours=True), script, kind)
    assert ours[:2] == theirs[:2], ours[2] + theirs[2]
    assert ours[0] == (0 if kind == "good" else 1)
    assert ours[1] is not None


def test_nan_that_the_original_passes_over_fails_with_ours(tmp_path: Path) -> None:
    theirs = run(tree(tmp_path, ours=False), "grpo_megatron", "nan")
    ours = run(tree(tmp_path, ours=True), "grpo_megatron", "nan")
    assert theirs[0] == 0
    assert ours[0] == 1
    assert "train/token_mult_prob_error is nan at step 2" in ours[2]


@pytest.mark.parametrize(("kind", "status"), [("crash", 3), ("short", 1)])
def test_failures_before_and_in_the_checks_keep_their_status(tmp_path: Path, kind: str, status: int) -> None:
    assert run(tree(tmp_path, ours=True), "sft_megatron", kind)[0] == status
