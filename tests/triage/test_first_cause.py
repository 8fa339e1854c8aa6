"""The earliest real error is the cause; echoes, wrappers and symptoms give way to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.triage.signatures import shipped
from tests.triage.logs import EXAMPLES, MEGATRON, QUICK, SETUP, facts, step, traceback


def test_first_cause_is_quoted_and_its_followers_are_folded(tmp_path: Path) -> None:
    log = "helpers.cpp:9:10: fatal error: pybind11/pybind11.h: No such file or directory\n" + "".join(
        f"\x1b[36m(MegatronPolicyWorker[rank={rank}] pid={rank})\x1b[0m torch.distributed.DistBackendError: [{rank}] "
        "wait timeout after 600000ms\n"
        for rank in range(15)
    )
    found = facts(tmp_path, log.encode())
    assert [(f.signature, f.kind, f.line, f.echoes) for f in found.findings] == [
        ("build-helper", "environment", 1, 0),
        ("collective-timeout", "undecided", 2, 14),
    ]
    assert found.first == found.findings[0]


def test_ray_repeat_counts_are_added_to_the_echoes(tmp_path: Path) -> None:
    line = "(pid=3) OSError: [Errno 28] No space left on device"
    suffix = " [repeated 7x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable)"
    found = facts(tmp_path, f"{line}\n{line}{suffix}\n{line} (repeated 2x)\n".encode())
    assert found.first is not None
    assert (found.first.line, found.first.echoes, found.first.text) == (
        1,
        9,
        "OSError: [Errno 28] No space left on device",
    )


@given(order=st.permutations(range(6)), noise=st.lists(st.sampled_from(["", "x", "loss 0.3"]), max_size=4))
@QUICK
def test_order_of_echoes_changes_nothing(tmp_path: Path, order: list[int], noise: list[str]) -> None:
    lines = [f"(Worker[rank={r}] pid={r}) ray.exceptions.ObjectStoreFullError: {'#'}" for r in order]
    found = facts(tmp_path, "\n".join([*noise, *lines, *noise]).encode())
    assert found.first is not None
    assert (found.first.line, found.first.echoes) == (len(noise) + 1, 5)


@given(st.permutations([e for e in EXAMPLES if e[0] not in {s.id for s in shipped() if s.wrapper}]))
@settings(QUICK, max_examples=40)
def test_earliest_real_error_wins_whatever_follows(tmp_path: Path, chosen: list[tuple[str, str]]) -> None:
    symptoms = {s.id for s in shipped() if s.symptom}
    found = facts(tmp_path, "\n".join(line for _, line in chosen).encode())
    assert found.first is not None
    assert found.first.signature == next(name for name, _ in chosen if name not in symptoms)
    assert [f.line for f in found.findings] == sorted(f.line for f in found.findings)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["Error in X.update_weights_via_ipc_zmq: CUDA out of memory"], "gpu-out-of-memory"),
        (["ValueError: Failed to load model with AutoBridge: couldn't connect to 'https://huggingface.co'"], "hub-offline"),
        (["Failed to save checkpoint to /x: [Errno 28] No space left on device"], "disk-full"),
        (["Error in X.update_weights_via_ipc_zmq: x", "ModuleNotFoundError: No module named 'y'"], "missing-package"),
        (["Error in X.update_weights_from_collective: x", *["."] * 100, "NodeDiedError: x"], "refit-worker"),
        (["Updating weights for the generation policy failed during refit.", traceback("ValueError: x", "/a.py")], "refit-failed"),
        (["ZMQ communication timeout after 120000ms", "Error in X.update_weights_via_ipc_zmq: shapes"], "refit-worker"),
        (["ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "\tpid: 7",
          "The actor is dead because its owner has died. Worker exit detail: Owner's node has crashed."], "node-died"),
        ([traceback("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "/a.py"),
          "The actor is dead because its owner has died. Worker exit detail: Owner's node has crashed."], "node-died"),
        ([traceback("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "/a.py")],
         "actor-died"),
        (["NodeDiedError: x", "Updating weights for the generation policy failed during refit."], "node-died"),
    ],
)  # fmt: skip
def test_wrapper_gives_way_to_the_error_that_it_wraps(tmp_path: Path, lines: list[str], expected: str) -> None:
    found = facts(tmp_path, "\n".join(lines).encode())
    assert found.first is not None
    assert found.first.signature == expected


def test_symptom_gives_way_only_to_an_error_close_behind_it(tmp_path: Path) -> None:
    died = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    killed = "(raylet, ip=192.0.2.2) Task was killed due to the node running low on memory.\n"
    near = facts(tmp_path, (died + "x\n" * 20 + killed).encode())
    far = facts(tmp_path, (died + "x\n" * 400 + killed).encode())
    assert near.first is not None
    assert far.first is not None
    assert (near.first.signature, far.first.signature) == ("ray-out-of-memory", "actor-died")


def test_rate_limit_that_was_overcome_does_not_take_the_blame(tmp_path: Path) -> None:
    limit = "429 Too Many Requests: retrying in 2 s\n"
    bridge = traceback("ValueError: bad", "/run/bridge/src/megatron/bridge/models/x.py")
    overcome = facts(tmp_path, (limit * 2 + SETUP + "\n" + bridge).encode())
    assert overcome.first is not None
    assert overcome.first.signature == "bridge-frame"
    assert (overcome.findings[0].signature, overcome.findings[0].recovered) == ("hub-rate-limit", True)
    fatal = facts(tmp_path, (limit * 2 + "pydantic: Invalid repository ID or local directory 'x'\n").encode())
    assert fatal.first is not None
    assert (fatal.first.signature, fatal.first.kind, fatal.first.echoes) == ("hub-rate-limit", "environment", 1)
    again = facts(tmp_path, (limit + SETUP + "\n" + limit).encode())
    assert again.first is not None
    assert again.first.line == 3


def test_full_disk_stays_the_cause_although_a_step_follows(tmp_path: Path) -> None:
    log = (
        f"{step(1, 3)}\nOSError: [Errno 28] No space left on device\n{step(2, 3)}\nFailed to save checkpoint to /x: y\n"
    )
    found = facts(tmp_path, log.encode())
    assert found.first is not None
    assert found.first.signature == "disk-full"


@pytest.mark.parametrize(
    "line",
    [
        "INFO:x:y.py:3: ModuleNotFoundError: No module named 'apex'",
        "/x/y.py:3: UserWarning: Failed to import plugin due to: RuntimeError('No CUDA GPUs are available')",
        "+ echo 'OSError: [Errno 98] Address already in use'",
        "uuid=? | nvml_error: Failed to initialize NVML: NVML Shared Library Not Found | NVML: total=?",
        "Warning: Exception during strict loading: Error(s) in loading state_dict for GPTModel:",
        '\tMissing key(s) in state_dict: "output_layer.weight".',
        "/x/y.py:26: UserWarning: Apex is not installed. Falling back to Torch Norm",
        "MasterConfig(policy={'model_name': 'x', 'note': 'No space left on device on the moon'})",
        "train/429: 0.1",
    ],
)
def test_noise_of_a_good_run_is_no_error(tmp_path: Path, line: str) -> None:
    found = facts(tmp_path, f"{line}\n{MEGATRON}{line}\n".encode())
    if "space left" not in line:
        assert found.findings == ()
