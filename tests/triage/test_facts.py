"""What a run says about itself: its banners, its workers, what it skipped or reused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triage.logs import MEGATRON, SETUP, facts, step


def test_good_run_is_recognised_by_its_banners(tmp_path: Path) -> None:
    log = "\n".join(
        [
            "Initializing lm_policy workers:   0%|          | 0/1\rInitializing lm_policy workers: 100%|####| 1/1",
            "  \u2713 1 workers initialized in 3.10s",
            MEGATRON + "Checkpoint loaded",
            SETUP,
            step(1, 2),
            "\U0001f4ca Training Results:\x1b[36m(MegatronPolicyWorker[rank=0] pid=1)\x1b[0m text",
            step(2, 2),
            "Max number of steps has been reached, stopping training early",
        ]
    )
    found = facts(tmp_path, log.encode())
    assert found.first is None
    assert (found.megatron_worker, found.dtensor_worker) == (True, False)
    assert (found.workers_started, found.workers_ready, found.setup_complete, found.starts) == (True, True, True, 1)
    assert (found.last_step, found.step_resets, found.training_done, found.done_line) == ((2, 2), 0, True, 8)
    assert (found.import_skipped, found.skip_line, found.lines, found.size_bytes) == (False, None, 8, len(log.encode()))


@pytest.mark.parametrize(
    ("line", "megatron", "dtensor"),
    [
        ("(MegatronPolicyWorker pid=3) x", True, False),
        ("\x1b[36m(MegatronPolicyWorker[rank=1] pid=3, ip=192.0.2.7)\x1b[0m x", True, False),
        ("[mcore 1step] \x1b[36m(MegatronPolicyWorker pid=3)\x1b[0m x", True, False),
        ("3: (MegatronPolicyWorker pid=3) x", True, False),
        ("(MegatronQuantPolicyWorker pid=3) x", True, False),
        ("(DTensorPolicyWorkerV2[rank=0] pid=3) x", False, True),
        ("(MegatronValueWorker pid=3) x", False, False),
        ("(IsolatedWorkerInitializer pid=3) MegatronPolicyWorker", False, False),
        ("MegatronPolicyWorker", False, False),
        ("policy.megatron_cfg.enabled=true", False, False),
        ("repr=MegatronPolicyWorker[rank=0])", False, False),
        ("ray::MegatronPolicyWorker.train() (pid=3, ip=192.0.2.2)", False, False),
        ("(VllmGenerationWorker pid=3) (MegatronPolicyWorker pid=4) x", False, False),
    ],
)
def test_megatron_is_proved_only_by_its_workers_prefix(
    tmp_path: Path, line: str, megatron: bool, dtensor: bool
) -> None:
    found = facts(tmp_path, f"a\n{line}\nb\n".encode())
    assert (found.megatron_worker, found.dtensor_worker) == (megatron, dtensor)


@pytest.mark.parametrize(
    ("line", "skipped"),
    [
        ("SKIP: needs two GPUs", True),
        ("[failover] SKIP: needs >= 3 free GPUs (2 generation + 1 trainer), found 1.", True),
        ("FAST: Skipping: grpo_megatron.sh", True),
        ("[INFO] Target step 500 reached, skipping run", True),
        ("+ echo 'SKIP: needs two GPUs'", False),
        ("SKIP_GOOD_CHECK=1", False),
        ("Skipping aggregation for x", False),
        ("Warning: Skipping metric 'train/x'", False),
    ],
)
def test_skip_lines_are_recognised(tmp_path: Path, line: str, skipped: bool) -> None:
    assert facts(tmp_path, f"{line}\n".encode()).skip_line == (line if skipped else None)


def test_reused_conversion_is_noted_with_its_line(tmp_path: Path) -> None:
    found = facts(tmp_path, f"x\n{MEGATRON}Checkpoint already exists at /c. Skipping import.\n".encode())
    assert (found.import_skipped, found.import_line) == (True, 2)
    assert found.import_lines == ("Checkpoint already exists at /c. Skipping import.",)


def test_two_runs_in_one_log_are_counted(tmp_path: Path) -> None:
    run = f"{SETUP}\n{step(1, 2)}\n{step(2, 2)}\n"
    found = facts(tmp_path, (run + run).encode())
    assert (found.starts, found.step_resets, found.last_step) == (2, 1, (2, 2))


def test_end_by_time_limit_of_the_trainer_is_an_early_end(tmp_path: Path) -> None:
    found = facts(tmp_path, b"Timeout has been reached, stopping training early\n")
    assert found.early_end == "Timeout has been reached, stopping training early"
    assert not found.training_done


@pytest.mark.parametrize(
    "line",
    [
        "the model wrote: Max number of steps has been reached",
        "print('Max number of steps has been reached')",
        "Async GRPO training complete!",
        "Timeout has been reached, stopping training early",
    ],
)
def test_training_is_not_done_because_someone_says_so(tmp_path: Path, line: str) -> None:
    assert not facts(tmp_path, f"{line}\n".encode()).training_done
