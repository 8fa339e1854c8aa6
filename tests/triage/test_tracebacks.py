"""Tracebacks: the Bridge frame in the user's checkout, ranks apart, what was caught counts for nothing."""

from __future__ import annotations

from pathlib import Path

from tasks import triage
from tests.triage.logs import MEGATRON, RAY_LOG, facts, step, traceback


def test_bridge_frame_is_named_in_the_users_checkout(tmp_path: Path) -> None:
    paths = {"/work/attempt/bridge": "/home/me/Bridge", "/work/attempt": "/elsewhere", "/work/att": "/wrong"}
    found = facts(tmp_path, RAY_LOG.encode(), path_map=paths)
    assert found.first is not None
    assert (found.first.signature, found.first.kind, found.first.line) == ("bridge-frame", "change", 12)
    assert found.bridge_frame == triage.Frame(
        "/home/me/Bridge/src/megatron/bridge/models/model_provider.py", 660, "get_model"
    )
    assert [f.function for f in found.bridge_frames] == ["get_model", "walk"]
    assert found.root_frame == found.bridge_frames[-1]
    assert found.root_error == "TypeError: isinstance() arg 2 must be a type"


def test_path_prefixes_end_at_a_folder(tmp_path: Path) -> None:
    found = facts(tmp_path, RAY_LOG.encode(), path_map={"/work/att": "/wrong", "": "/nowhere"})
    assert found.bridge_frame is not None
    assert found.bridge_frame.file == "/work/attempt/bridge/src/megatron/bridge/models/model_provider.py"


def test_same_traceback_of_driver_and_worker_is_one_finding(tmp_path: Path) -> None:
    worker = "".join(f"{MEGATRON}{line}\n" for line in RAY_LOG.splitlines()[5:])
    found = facts(
        tmp_path, (RAY_LOG + worker.replace("ray.exceptions", "Exception raised in creation task: x")).encode()
    )
    assert [(f.signature, f.line, f.echoes) for f in found.findings] == [("bridge-frame", 12, 1)]


def test_interleaved_tracebacks_of_ranks_are_kept_apart(tmp_path: Path) -> None:
    one = traceback("ValueError: a", "/x/nemo_rl/a.py", "/x/megatron/bridge/b.py", prefix="(W[rank=0] pid=1) ")
    two = traceback("ValueError: a", "/y/nemo_rl/a.py", "/y/megatron/bridge/b.py", prefix="(W[rank=1] pid=2) ")
    mixed = "".join(a + b for a, b in zip(one.splitlines(True), two.splitlines(True), strict=True))
    found = facts(tmp_path, mixed.encode())
    assert [(f.signature, f.echoes) for f in found.findings] == [("bridge-frame", 1)]
    assert found.bridge_frames == (triage.Frame("/x/megatron/bridge/b.py", 2, "function_2"),)


def test_first_of_a_chain_is_the_root(tmp_path: Path) -> None:
    chain = (
        traceback("KeyError: 'q'", "/x/megatron/bridge/models/deep.py")
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + traceback("RuntimeError: refit", "/x/nemo_rl/algorithms/grpo.py")
    )
    found = facts(tmp_path, chain.encode())
    assert found.root_error == "KeyError: 'q'"
    assert found.root_frame == triage.Frame("/x/megatron/bridge/models/deep.py", 1, "function_1")
    assert [f.signature for f in found.findings] == ["bridge-frame"]


def test_message_on_the_next_line_belongs_to_the_error(tmp_path: Path) -> None:
    found = facts(tmp_path, (traceback("ValueError: ", "/x/a.py") + "the real words\n").encode())
    assert found.root_error == "ValueError: the real words"


def test_error_from_outside_while_the_bridge_is_imported_is_undecided(tmp_path: Path) -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "/x/megatron/bridge/__init__.py", line 21, in <module>\n'
        '  File "/x/megatron/rl/rl_utils.py", line 989, in <module>\n'
        "AttributeError: type object 'x' has no attribute 'Run'\n"
    )
    found = facts(tmp_path, log.encode())
    assert found.first is not None
    assert (found.first.signature, found.first.kind) == ("import-failed", "undecided")
    assert found.bridge_frame is None
    assert len(found.bridge_frames) == 1


def test_missing_package_inside_the_bridge_is_the_environment(tmp_path: Path) -> None:
    found = facts(
        tmp_path, traceback("ModuleNotFoundError: No module named 'nvrx'", "/x/megatron/bridge/a.py").encode()
    )
    assert [(f.signature, f.kind) for f in found.findings] == [("missing-package", "environment")]


def test_caught_import_errors_count_for_nothing(tmp_path: Path) -> None:
    body = traceback(
        "AttributeError: module 'megatron.core' has no attribute 'FP8'", "/x/megatron/bridge/utils/import_utils.py"
    )
    caught = "Import of FP8 from megatron.core failed with: " + body
    logged = "INFO:megatron.bridge.utils:import_utils.py:333: " + caught
    known = "Import of apex failed with: " + traceback("ModuleNotFoundError: No module named 'apex'", "/x/a.py")
    found = facts(tmp_path, (caught + "\n" + logged + "\n" + known).encode())
    assert found.first is None
    assert found.findings == ()
    assert found.bridge_frame is None


def test_logged_exception_of_a_run_that_went_on_is_no_cause(tmp_path: Path) -> None:
    logged = traceback("TypeError: must be real", "/x/megatron/bridge/a.py", prefix="(Worker pid=1) ")
    end = "Max number of steps has been reached, stopping training early\n"
    found = facts(tmp_path, (f"{step(1, 2)}\n{logged}{step(2, 2)}\n{end}").encode())
    assert found.first is None
    assert found.bridge_frame is None
    assert [(f.signature, f.recovered) for f in found.findings] == [("bridge-frame", True)]


def test_only_exception_of_a_run_that_hung_is_the_best_guess(tmp_path: Path) -> None:
    logged = traceback("TypeError: must be real", "/x/collector.py", prefix="(AsyncTrajectoryCollector pid=1) ")
    found = facts(tmp_path, f"{logged}{step(1, 9)}\n".encode())
    assert found.first is not None
    assert (found.first.signature, found.first.recovered) == ("uncaught-exception", True)
    assert found.root_error == "TypeError: must be real"


def test_traceback_of_a_stopped_run_is_no_error(tmp_path: Path) -> None:
    assert facts(tmp_path, traceback("KeyboardInterrupt", "/x/megatron/bridge/a.py").encode()).findings == ()


def test_traceback_cut_off_by_death_is_still_reported(tmp_path: Path) -> None:
    found = facts(
        tmp_path, b'Traceback (most recent call last):\n  File "/x/megatron/bridge/a.py", line 3, in f\n    x('
    )
    assert found.first is not None
    assert (found.first.signature, found.first.line) == ("bridge-frame", 1)
    assert found.lines == 3


def test_error_after_thousands_of_overcome_ones_is_found(tmp_path: Path) -> None:
    noise = "".join(
        traceback(f"TypeError: kind {'ab'[n % 2] * (n // 2 + 1)}", "/x/a.py", prefix="(W pid=1) ")
        + step(n + 1, 999)
        + "\n"
        for n in range(300)
    )
    found = facts(tmp_path, (noise + traceback("ValueError: real", "/x/megatron/bridge/b.py")).encode())
    assert found.first is not None
    assert found.first.text == "ValueError: real"
    assert found.bridge_frame is not None
    assert len(found.findings) <= triage.MOST_FINDINGS


def test_vllm_engine_lines_keep_their_traceback(tmp_path: Path) -> None:
    prefix = "(VllmGenerationWorker pid=5) (EngineCore_0 pid=9) ERROR 11-30 20:00:00 [core.py:700] "
    body = traceback("ValueError: There is no module or parameter named 'x' in Qwen2", "/x/vllm/a.py", prefix=prefix)
    found = facts(tmp_path, body.encode())
    assert [(f.signature, f.line) for f in found.findings] == [("weight-names", 5)]
    assert found.root_frame == triage.Frame("/x/vllm/a.py", 1, "function_1")
