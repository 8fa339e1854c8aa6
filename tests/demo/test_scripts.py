"""The demo's scripts train: the good ones pass to their last step, each fault shows its symptom."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks import demo, levels
from tests.demo.checkouts import (
    SCRIPTS,
    environment,
    git,
    run,
)

LEARNING = ("grpo_megatron_lora", "grpo.max_num_steps=20", "data.shuffle=false", "checkpointing.enabled=false")
TAGS = (
    "loss", "reward", "grad_norm", "gen_kl_error", "kl_penalty", "approx_entropy", "token_mult_prob_error",
    "probs_ratio_clamped_min", "probs_ratio_clamped_max", "lr", "global_valid_toks", "mean_prompt_length",
    "mean_gen_tokens_per_sample",
)  # fmt: skip
BANNERS = """Loaded configuration from:|Final config:|Using log directory: .*/logs/exp_001|Initializing lm_policy workers
MegatronPolicyWorker\\[rank=0\\] pid=\\d+\\) Using default megatron checkpoint dir:|> compiling dataset index builder
Model, optimizer, and learning rate scheduler built|Checkpoint loaded|Reference model loaded|✓ 1 workers initialized in
SETUP COMPLETE|={25} Step 1/2 ={25}|Training Results:|• Loss:|• Generation KL Error:|={25} Step 2/2 ={25}
Max number of steps has been reached, stopping training early""".replace("\n", "|").split("|")


def pytest_of(checkouts: demo.Checkouts, home: Path, name: str) -> tuple[int, str]:
    """Run a suite of the demo's levels file as a user would; return pytest's exit status and output."""
    suite = levels.load(demo.LEVELS).suites[name]
    tree = checkouts.bridge if suite.repo == "bridge" else checkouts.nemo_rl
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite.paths]
    done = subprocess.run(
        command, cwd=tree, env=environment(checkouts, home), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def faulty(name: str, good: demo.Checkouts, folder: Path) -> demo.Checkouts:
    """Return the good checkouts with the broken one replaced by an edited copy."""
    fault = demo.FAULTS[name]
    which = "bridge" if fault.repo == "bridge" else "nemo_rl"
    broken = folder / "broken" / getattr(good, which).name
    shutil.copytree(getattr(good, which), broken, symlinks=True)
    demo.apply(fault, broken)
    return demo.Checkouts(**{"bridge": good.bridge, "nemo_rl": good.nemo_rl, which: broken})


@pytest.mark.slow
def test_level_0_script_shows_banners_tags_and_steps_in_the_real_form(good: demo.Checkouts, tmp_path: Path) -> None:
    evidence = run(good, tmp_path, "grpo_megatron")
    assert evidence.rc == 0, evidence.log
    place = 0
    for banner in BANNERS:
        found = re.compile(banner).search(evidence.log, place)
        assert found, banner
        place = found.start()
    assert "Skipping import." not in evidence.log
    assert f"megatron.bridge from {good.bridge}/src/megatron/bridge/__init__.py" in evidence.log
    for tag in TAGS:
        assert list(evidence.metrics[f"train/{tag}"]) == ["1", "2"], tag
    assert any(tag.startswith("timing/train/") for tag in evidence.metrics)
    assert 1.0 < max(evidence.series("train/token_mult_prob_error")) < 1.001  # float32 against float64: near, not equal
    assert list(evidence.tree.glob("tests/functional/grpo_megatron/logs/exp_001/tensorboard/events.out.tfevents.*"))
    again = run(good, tmp_path, "grpo_megatron")
    assert "Skipping import." in again.log
    assert again.series("train/loss") == evidence.series("train/loss")
    assert git(evidence.tree, "status", "--porcelain") == ""


def test_override_that_the_configuration_does_not_know_ends_before_any_worker(
    good: demo.Checkouts, tmp_path: Path
) -> None:
    evidence = run(good, tmp_path, "grpo_megatron", "policy.megatron_cfg.converter_type=x")
    assert evidence.rc == 1
    assert "Could not override 'policy.megatron_cfg.converter_type'" in evidence.log
    assert "Initializing lm_policy workers" not in evidence.log


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_of_the_good_demo_passes_to_its_last_step(script: str, good: demo.Checkouts, tmp_path: Path) -> None:
    evidence = run(good, tmp_path, script)
    assert evidence.rc == 0, evidence.log
    assert max(map(int, evidence.metrics["train/loss"])) == SCRIPTS[script]
    assert {f"train/{tag}" for tag in TAGS} <= set(evidence.metrics)
    assert all(map(math.isfinite, (v for s in evidence.metrics.values() for v in s.values())))
    assert sum(evidence.series("train/reward")) / SCRIPTS[script] > 0.3


@pytest.mark.slow
def test_reward_rises_over_twenty_steps(good: demo.Checkouts, tmp_path: Path) -> None:
    rewards = run(good, tmp_path, *LEARNING).series("train/reward")
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.18


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bridge-mapping", "bridge-provider", "nemo-rl-loop"])
def test_suite_of_the_good_demo_executes_its_minimum(name: str, good: demo.Checkouts, tmp_path: Path) -> None:
    rc, output = pytest_of(good, tmp_path, name)
    assert rc == 0, output
    assert int(re.findall(r"(\d+) passed", output)[0]) >= levels.load(demo.LEVELS).suites[name].min_tests


# One look a fault: the script that should notice, and what its evidence must show although, mostly, rc is 0.
SYMPTOMS: dict[str, tuple[tuple[str, ...], Any]] = {
    "mapping-swapped": (("grpo_megatron",), lambda e: e.rc == 1 and min(e.series("train/token_mult_prob_error")) > 2),
    "weight-not-exported": (("grpo_megatron_non_colocated",), lambda e: e.rc == 1 and min(e.series("train/token_mult_prob_error")) > 2),
    "wrong-scale": (("grpo_megatron",), lambda e: e.rc == 0 and max(e.series("train/reward")) < 0.2),
    "optimizer-noop": (LEARNING, lambda e: e.rc == 0 and sum(e.series("train/reward")[-5:]) - sum(e.series("train/reward")[:5]) < 0.5),
    "resume-loses-optimizer": (("grpo_megatron_lora_resume",), lambda e: e.rc == 1 and e.series("resume/relative_difference")[1] > 0.01),
    "nan-at-step-2": (("grpo_megatron",), lambda e: e.rc == 0 and math.isnan(e.series("train/loss")[1]) and math.isfinite(e.series("train/loss")[0])),
    "stops-early": (("grpo_megatron",), lambda e: e.rc == 0 and list(e.metrics["train/loss"]) == ["1"]),
    "worker-imports-vendored": (("grpo_megatron",), lambda e: e.rc == 0 and re.search(r"megatron\.bridge from .*/Megatron-Bridge-workspace/", e.log)),
    "syntax-error": (("grpo_megatron",), lambda e: e.rc == 1 and "SyntaxError" in e.log and "gpt_provider.py" in e.log and not e.metrics),
    "refit-raises": (("grpo_megatron_non_colocated",), lambda e: e.rc == 1 and "model_bridge.py" in e.log and "failed during refit" in e.log and not e.metrics),
    "hangs-at-the-end": (("grpo_megatron",), lambda e: e.rc is None and "Step 2/2" in e.log and not e.metrics),
}  # fmt: skip


def test_every_fault_has_a_symptom_here() -> None:
    assert {*SYMPTOMS, "zero-tests"} == set(demo.FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYMPTOMS)
def test_fault_shows_its_symptom(name: str, good: demo.Checkouts, tmp_path: Path) -> None:
    command, shows = SYMPTOMS[name]
    stop_after = "Max number of steps has been reached" if name == "hangs-at-the-end" else None
    evidence = run(faulty(name, good, tmp_path), tmp_path, *command, stop_after=stop_after)
    assert shows(evidence), evidence.log


@pytest.mark.slow
def test_swapped_mapping_is_a_false_pass_of_the_level_3_script_that_only_the_reward_gives_away(
    good: demo.Checkouts, tmp_path: Path
) -> None:
    evidence = run(faulty("mapping-swapped", good, tmp_path), tmp_path, "grpo_megatron_generation")
    assert evidence.rc == 0
    assert max(evidence.series("train/token_mult_prob_error")) < 1.05
    assert max(evidence.series("train/reward")) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "expected",
    [
        ("wrong-scale", "bridge-mapping", 1, "test_round_trip_is_the_identity"),
        ("refit-raises", "bridge-mapping", 0, "passed"),
        ("syntax-error", "bridge-provider", 2, "SyntaxError"),
        ("zero-tests", "bridge-provider", 5, "deselected"),
        ("zero-tests", "bridge-mapping", 0, "1 skipped"),
        (
            "mapping-swapped",
            "bridge-mapping",
            0,
            "passed",
        ),  # a round trip cannot see a swap that is undone on the way back
    ],
)
def test_fault_in_the_unit_suites(expected: tuple[str, str, int, str], good: demo.Checkouts, tmp_path: Path) -> None:
    name, suite, rc, says = expected
    found, output = pytest_of(faulty(name, good, tmp_path), tmp_path, suite)
    assert found == rc, output
    assert says in output
