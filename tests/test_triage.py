"""Logs are written here, small: what triage must find in them, and what it must never find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tasks import triage
from tasks.errors import UserError
from tasks.triage import LogFacts, read_log
from tasks.triage.danger import danger
from tasks.triage.patterns import compile_user, needles
from tasks.triage.prefixes import split
from tasks.triage.scan import BLOCK, LONGEST_LINE, Watch, clean, scan
from tasks.triage.signatures import KINDS, SignatureError, parse, shipped

QUICK = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
MEGATRON = "\x1b[36m(MegatronPolicyWorker[rank=0] pid=12, ip=192.0.2.2)\x1b[0m "
SETUP = "                  SETUP COMPLETE"


def step(i: int, n: int) -> str:
    return f"{'=' * 25} Step {i}/{n} {'=' * 25}"


def facts(tmp_path: Path, text: str | bytes, **arguments: object) -> LogFacts:
    path = tmp_path / "run.log"
    path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    return read_log(path, **arguments)  # type: ignore[arg-type]


def traceback(error: str, *files: str, prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):"]
    for number, file in enumerate(files, 1):
        lines += [f'  File "{file}", line {number}, in function_{number}', "    call()", "    ^^^^^^"]
    return "".join(f"{prefix}{line}\n" for line in [*lines, error])


# One line for every signature, as the program in question prints it.
EXAMPLES = [
    ("ray-start", "Exception: The current node timed out during startup. This could happen because some of the raylet failed to startup"),
    ("hub-server-error", "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://x"),
    ("network", "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x', port=443): Max retries exceeded with url: /"),
    ("network", "httpx.ConnectError: [Errno -3] Temporary failure in name resolution"),
    ("ray-out-of-memory", "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."),
    ("node-died", "ray.exceptions.NodeDiedError: Task failed due to the node (where this task was running) was dead"),
    ("object-store-full", "ray.exceptions.ObjectStoreFullError: Failed to put object"),
    ("ray-session", "Session name session_1 does not match persisted value session_0. Perhaps there was an error"),
    ("gpu-hardware", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("port-in-use", "OSError: [Errno 98] Address already in use"),
    ("port-in-use", "RuntimeError: Could not find a free port in range 1000-1010"),
    ("git-objects", "fatal: missing blob object 'deadbeef'"),
    ("slurm-step", "srun: error: Unable to create step for job 7: Memory required by task is not available"),
    ("container-engine", "docker: Error response from daemon: OCI runtime create failed: runc"),
    ("sandbox-not-started", "RuntimeError: sandbox at port 6000 never started"),
    ("hub-rate-limit", "429 Too Many Requests"),
    ("hub-rate-limit", "HTTP Error 429 thrown while requesting GET https://x. Retrying in 1s [Retry 1/5]."),
    ("hub-disguised", "Invalid repository ID or local directory specified: 'Qwen/Qwen2.5-1.5B-Instruct'."),
    ("hub-offline", "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files"),
    ("hub-access", "huggingface_hub.errors.GatedRepoError: 401 Client Error."),
    ("disk-full", "OSError: [Errno 28] No space left on device: '/tmp/x'"),
    ("shared-memory", "ERROR: Unexpected bus error encountered in worker. insufficient shared memory (shm)."),
    ("gpu-driver", "RuntimeError: Found no NVIDIA driver on your system."),
    ("gpu-memory-taken", "ValueError: Free memory on device (3/80 GiB) on startup is less than desired GPU memory utilization"),
    ("bridge-not-found", "ModuleNotFoundError: No module named 'megatron.bridge'"),
    ("core-mismatch", "ModuleNotFoundError: No module named 'megatron.core.transformer.mla_qk_norm_config'"),
    ("core-mismatch", "ImportError: cannot import name 'Foo' from 'megatron.core.transformer' (/x/__init__.py)"),
    ("missing-package", "ModuleNotFoundError: No module named 'prettytable'"),
    ("missing-package", "AssertionError: flashinfer is not installed"),
    ("package-version", "ImportError: cannot import name 'Foo' from 'transformers' (/x/__init__.py)"),
    ("package-version", "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"),
    ("build-helper", "make: python3-config: No such file or directory"),
    ("build-helper", "helpers.cpp:12:10: fatal error: pybind11/pybind11.h: No such file or directory"),
    ("read-only", "OSError: [Errno 30] Read-only file system: '/opt/x'"),
    ("environment-locked", "error: Extras `mcore` and `vllm` are incompatible with the declared conflicts"),
    ("cuda-arch-list", "RuntimeError: TORCH_CUDA_ARCH_LIST is not set. This is required in Megatron backend."),
    ("resources", "nemo_rl.x.ResourceInsufficientError: Not enough GPUs available. Requested 2 GPUs, but only 1"),
    ("checkpoint-not-shared", "FileNotFoundError: Pretrained run config not found at /x/run_config.yaml on rank=1."),
    ("old-conversion", "with an older version of megatron-bridge."),
    ("git-owner", "fatal: detected dubious ownership in repository at '/opt/nemo-rl'"),
    ("command-missing", "run.sh: line 3: uv: command not found"),
    ("command-missing", "bash: tests/functional/gone.sh: No such file or directory"),
    ("tp-batch-variant", "AssertionError: There is a known batch-variant accuracy issue with TP>=4 in policy"),
    ("two-backends", "ValueError: Configure either Megatron (policy.megatron_cfg.enabled=true) or DTensor, not both."),
    ("world-size", "ValueError: World size (1) is insufficient for the parallelism configuration. Required"),
    ("override", "OverridesError: Failed to parse Hydra overrides: Could not override 'grpo.max_num_stepz'."),
    ("shape-mismatch", "ValueError: Shape mismatch for megatron param decoder.layers.0.mlp.linear_fc1.weight:"),
    ("parallelism-unknown", "ValueError: Cannot determine parallelism type for module 'Foo' at weight 'x'"),
    ("architecture-unknown", "\u2717 Model architecture 'FooForCausalLM' is not yet supported"),
    ("autobridge-load", "ValueError: Failed to load model with AutoBridge: boom"),
    ("bridge-import", "ImportError: cannot import name 'Foo' from 'megatron.bridge.models' (/x/__init__.py)"),
    ("weight-names", "ValueError: There is no module or parameter named 'model.foo' in Qwen2ForCausalLM"),
    ("weight-names", "KeyError: 'model.layers.0.self_attn.q_proj.weight'"),
    ("refit-worker", "Error in VllmInternalWorkerExtension.update_weights_via_ipc_zmq: shapes"),
    ("refit-failed", "\u274c Error: Updating weights for the generation policy failed during refit."),
    ("checkpoint-save", "Failed to save checkpoint to /x/step_2: boom"),
    ("provider-field", "megatron_cfg set 'foo' but GPTModelProvider has no such field; this setting is ignored"),
    ("gpu-out-of-memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("gpu-illegal-access", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("nccl", "torch.distributed.DistBackendError: NCCL error: unhandled system error, ncclSystemError"),
    ("collective-timeout", "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"),
    ("collective-timeout", "torch.distributed.DistBackendError: [1] wait timeout after 600000ms, keys: /default_pg"),
    ("zmq-timeout", "TimeoutError: worker (rank 0): ZMQ communication timeout after 120000ms in policy worker side."),
    ("generation-unavailable", "GenerationUnavailable: generate did not return within 600s."),
    ("actor-died", "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."),
    ("crashed", "Fatal Python error: Segmentation fault"),
    ("killed", "run.sh: line 40:  1234 Killed                  uv run examples/run_grpo.py"),
    ("async-loop", "\u274c Error in async loop: boom"),
]  # fmt: skip
WARNINGS = [
    ("unmapped-parameter", "WARNING: No mapping found for megatron_param: decoder.layers.0.foo"),
    ("missing-hf-key", "WARNING: Can't find model.layers.0.self_attn.out_proj.weight in hf_keys"),
    (
        "whitelisted-shape",
        "WARNING: Shape mismatch for megatron param embedding.weight allowed by whitelist. Skipping.",
    ),
    ("image-mismatch", "WARNING: Container/Code Version Mismatch Detected!"),
    ("incomplete-save", "Checkpoint finalization failed while handling an exception; boom"),
]


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(EXAMPLES)])
def test_known_line_is_found_under_ray_prefix_and_colours(tmp_path: Path, name: str, line: str) -> None:
    kind = next(s.kind for s in shipped() if s.id == name)
    for text in (line, MEGATRON + line, f"\x1b[1m{line}\x1b[0m\r", f"[rank3]: {line}", f"\r 1%\r 2%\r{line}"):
        found = facts(tmp_path, f"noise\n{text}\nnoise\n".encode())
        assert found.first is not None, text
        assert (found.first.signature, found.first.kind, found.first.line, found.first.echoes) == (name, kind, 2, 0)
        assert found.first.remedy
        assert "\x1b" not in found.first.text


@pytest.mark.parametrize(("name", "line"), WARNINGS, ids=[n for n, _ in WARNINGS])
def test_warnings_are_listed_and_are_no_errors(tmp_path: Path, name: str, line: str) -> None:
    log = f"{MEGATRON}WARNING:megatron.bridge.x:x.py:3: {line}\n" * 3
    found = facts(tmp_path, log.encode())
    assert found.first is None
    assert found.findings == ()
    assert len(found.warnings) == 1
    assert found.warnings[0].endswith("(2 similar)")
    assert found.warning_lines == {name: 1}
    assert found.stale_weights == (name not in {"image-mismatch", "incomplete-save"})


def test_every_signature_has_an_example_remedy_and_source() -> None:
    assert {s.id for s in shipped()} == {name for name, _ in EXAMPLES + WARNINGS}
    assert all(s.remedy and s.source and s.kind in KINDS and s.needles for s in shipped())
    assert all(len(n) >= 3 for s in shipped() for n in s.needles)
    assert shipped() is shipped()


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"schema": 2, "signatures": []},
        {"schema": 1, "signatures": [{"id": "a", "kind": "odd", "patterns": ["abcd"], "remedy": "r", "source": "s"}]},
        {"schema": 1, "signatures": [{"id": "a", "kind": "change", "patterns": [r"\w+"], "remedy": "r", "source": "s"}]},
        {"schema": 1, "signatures": [{"id": "a", "kind": "change", "patterns": ["(abc"], "remedy": "r", "source": "s"}]},
        {"schema": 1, "signatures": [{"id": "a", "kind": "change", "patterns": ["abcd"], "remedy": "r", "source": "s"}] * 2},
        {"schema": 1, "signatures": [{"id": "a", "kind": "change", "patterns": ["abcd"], "remedy": "r", "source": "s", "x": 1}]},
    ],
)  # fmt: skip
def test_faulty_signature_data_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(SignatureError, match=r"signatures\.yaml"):
        parse(document)


# --- first cause first ---------------------------------------------------------------------------------------------


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


# --- tracebacks ----------------------------------------------------------------------------------------------------

RAY_LOG = (
    "Traceback (most recent call last):\n"
    '  File "/work/attempt/nemo_rl/examples/run_grpo.py", line 258, in <module>\n'
    "    main()\n"
    '  File "/env/ray/_private/worker.py", line 1050, in get_objects\n'
    "    raise value.as_instanceof_cause()\n"
    "ray.exceptions.RayTaskError(TypeError): \x1b[36mray::MegatronPolicyWorker.train()\x1b[39m (pid=7, ip=192.0.2.2, "
    "actor_id=ab, repr=MegatronPolicyWorker[rank=0])\n"
    "           ^^^^^^^^\n"
    '  File "/work/attempt/nemo_rl/nemo_rl/models/megatron/setup.py", line 1866, in setup_model\n'
    "    model = get_model(\n"
    '  File "/work/attempt/bridge/src/megatron/bridge/models/model_provider.py", line 660, in get_model\n'
    '  File "/work/attempt/bridge/src/megatron/bridge/peft/base.py", line 137, in walk\n'
    "TypeError: isinstance() arg 2 must be a type\n"
)


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


# --- what the run says about itself --------------------------------------------------------------------------------


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


# --- expected and forbidden lines ----------------------------------------------------------------------------------


def test_expected_and_forbidden_lines(tmp_path: Path) -> None:
    log = f"a\n{MEGATRON}loss: 0.5\nNaN found\nNaN found\n"
    found = facts(
        tmp_path, log.encode(), expect=[r"^loss: \d", "never", r"\d\.\d$"], forbid=["NaN", "(?i)nan FOUND", "Inf"]
    )
    assert found.expected == {r"^loss: \d": True, "never": False, r"\d\.\d$": True}
    assert found.forbidden == {"NaN": 3, "(?i)nan FOUND": 3, "Inf": None}


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", r"\8", "(?P<x>a)(?P<x>b)", "[z-a]", "(?z)"])
def test_faulty_expression_is_the_users_error(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UserError, match=r"expect_log.*not valid"):
        facts(tmp_path, b"", expect=[pattern])


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(.*)*x", "(.+,)*y", "(a|ab)*c", "(a|a)+b", r"(\w+\s?)*$", "(x+x+)+y", "(?:a?)+b", "(a*){5,}", ".*?(.*.*)*z", "(?:(?:a+)b?)*c", "x*x*x*x*y"]
)  # fmt: skip
def test_expression_that_may_take_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="may take for ever"):
        compile_user(pattern, "forbid_log")


@pytest.mark.parametrize(
    "pattern", [r"Step \d+/\d+.*loss.*nan", r"(\w+\s)*end", "([^,]*,)*x", "(foo|bar)+", r".*error.*", r"(?:\d{1,3}\.){3}\d{1,3}", "(?:ab)+", r"reward: +\d+\.\d+", "a.*b.*c", r"(?i)out of memory|nan\b"]
)  # fmt: skip
def test_usual_expressions_are_accepted_and_fast(pattern: str) -> None:
    compiled = compile_user(pattern, "expect_log")
    start = time.process_time()
    for line in ("a" * 20000, "Step 1/" * 3000, "loss" * 5000, "ab," * 7000, "a b" * 6000, " " * 20000, "1.1" * 6000):
        compiled.found_in(line)
    assert time.process_time() - start < 10


@given(st.from_regex(r"[ab.*+?()|,]{1,12}", fullmatch=True))
@settings(deadline=None, max_examples=150)
def test_no_accepted_expression_explodes(pattern: str) -> None:
    try:
        compiled = compile_user(pattern, "x")
    except (UserError, FutureWarning):
        return
    start = time.process_time()
    for line in ("a" * 28 + "!", "ab" * 14 + "!", "b" * 28, "a," * 14):
        compiled.found_in(line)
    assert time.process_time() - start < 1


@given(
    st.text("ab1 \n", max_size=30),
    st.sampled_from(["ab+1", "(ab|b1) a", "a(?:b1)?b", "(?:aab)+", "[ab]1b a", "a.b1|b a1"]),
)
@settings(deadline=None)
def test_needles_are_in_every_match(text: str, pattern: str) -> None:
    found = needles(pattern)
    if found and re.search(pattern, text):
        assert any(n in text.encode() for n in found)


def test_danger_is_empty_for_plain_patterns() -> None:
    import importlib

    parser = importlib.import_module("re._parser")
    assert [danger(parser.parse(s.pattern.pattern)) for s in shipped() if s.id in {"disk-full", "resources"}] == [
        "",
        "",
    ]


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"step 2/2 done\r", "step 2/2 done"),
        (b"1%\r2%\r3%", "3%"),
        (b"1%\r2%\r   \r", "2%"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07x", "x"),
        (b"a\0b", "ab"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 20000, "x" * LONGEST_LINE),
    ],
)
def test_lines_are_what_a_terminal_shows(raw: bytes, text: str) -> None:
    assert clean(raw) == text


def test_carriage_returns_do_not_hide_the_end_of_a_line(tmp_path: Path) -> None:
    bar = b"".join(b"\r%3d%%|####      | %d/500" % (n // 5, n) for n in range(500))
    found = facts(tmp_path, bar + b"\r\nMax number of steps has been reached\r\nstep 2/2 done\r\n", expect=["done$"])
    assert found.training_done
    assert found.expected == {"done$": True}
    assert found.lines == 3


def test_error_glued_to_a_progress_bar_is_found(tmp_path: Path) -> None:
    log = b"\r 10%|#| 1/9\r 20%|#| 2/9" + traceback("ValueError: x", "/x/megatron/bridge/a.py").encode()
    assert facts(tmp_path, log).bridge_frame is not None


def test_line_without_end_does_not_fill_memory_and_what_follows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with path.open("wb") as out:
        for _ in range(60):
            out.write(b"x" * (1 << 18))
        out.write(b"\n429 Too Many Requests\n" + b"\rbar" * 200000 + b"\rOSError: [Errno 28] No space left on device")
    found = read_log(path)
    assert [(f.signature, f.line) for f in found.findings] == [("hub-rate-limit", 2), ("disk-full", 3)]
    assert max(len(f.text) for f in found.findings) < 600


@pytest.mark.parametrize("offset", [*range(-40, 3)])
def test_line_across_a_block_border_is_whole(tmp_path: Path, offset: int) -> None:
    line = b"OSError: [Errno 28] No space left on device"
    log = b"." * (BLOCK + offset - 1) + b"\n" + line + b"\n"
    found = facts(tmp_path, log)
    assert found.first is not None
    assert (found.first.line, found.lines, found.first.text) == (2, 2, line.decode())


def test_findings_carry_no_control_characters(tmp_path: Path) -> None:
    found = facts(tmp_path, b"\x1b[31mOSError: [Errno 28]\x1b[0m \x00 \x07 \x0b ]]> 5%\n")
    assert found.first is not None
    assert found.first.text == "OSError: [Errno 28]  \ufffd \ufffd ]]> 5%"


def test_missing_and_empty_logs_have_no_facts(tmp_path: Path) -> None:
    none, empty = read_log(tmp_path / "gone.log", expect=["a"], forbid=["b"]), facts(tmp_path, b"")
    assert (none.lines, none.size_bytes, none.first, none.expected, none.forbidden) == (
        0,
        0,
        None,
        {"a": False},
        {"b": None},
    )
    assert (empty.lines, empty.megatron_worker, empty.training_done, empty.warnings) == (0, False, False, ())


@given(
    st.one_of(
        st.binary(max_size=3000),
        st.lists(
            st.one_of(
                st.binary(max_size=40),
                st.sampled_from(
                    [line.encode() for _, line in EXAMPLES]
                    + RAY_LOG.encode().splitlines()
                    + [
                        MEGATRON.encode(),
                        b"Traceback (most recent call last):",
                        step(2, 3).encode(),
                        b"\r",
                        b"\x1b[",
                        b"",
                    ]
                ),
            ),
            max_size=40,
        ).map(b"\n".join),
    )
)
@example(b"\x1b[36m(MegatronPolicyWorker pid=")
@example(b"Traceback (most recent call last):\n" * 3000)
@QUICK
def test_arbitrary_bytes_never_crash_and_never_prove_anything(tmp_path: Path, log: bytes) -> None:
    found = facts(tmp_path, log, expect=["x"], forbid=[r"\d{3}"])
    assert found.size_bytes == len(log)
    assert found.lines == log.count(b"\n") + (not log.endswith(b"\n") and bool(log))
    plain = re.sub(rb"\x1b\[[0-9;]*m|\0", b"", log)
    if found.megatron_worker:
        assert re.search(rb"\(Megatron\w*PolicyWorker(?:\[[^]]*\])? pid=\w+", plain)
    if found.training_done:
        assert b"Max number of steps has been reached" in plain
    for finding in found.findings:
        assert 1 <= finding.line <= found.lines
        assert finding.echoes >= 0
        assert finding.kind in KINDS[:-1]


@given(
    st.lists(st.tuples(st.integers(0, len(EXAMPLES) - 1), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12)
)
@QUICK
def test_fast_search_hands_out_every_line_that_a_signature_matches(
    tmp_path: Path, plan: list[tuple[int, bool, int]]
) -> None:
    lines: list[str] = []
    for index, prefixed, noise in plan:
        lines += ["noise " * 20] * noise + [(MEGATRON if prefixed else "") + EXAMPLES[index][1]]
    path = tmp_path / "run.log"
    path.write_text("\n".join(lines), encoding="utf-8")
    watch = Watch({n for s in shipped() for n in s.needles})
    handed = {line.number for line in scan(path, watch)}
    matching = {i for i, line in enumerate(lines, 1) if any(s.pattern.search(split(line.replace("\x1b[36m", "").replace("\x1b[0m", ""))[0].text) for s in shipped())}  # fmt: skip
    assert matching <= handed
    assert watch.lines == len(lines)


# --- size ----------------------------------------------------------------------------------------------------------


def test_a_needle_that_matched_nothing_for_long_is_looked_for_again_after_a_step(tmp_path: Path) -> None:
    noise, known = "ValueError: nothing special\n" * 40_000, "ValueError: flashinfer is not installed\n"
    step = f"{'=' * 25} Step 1/2 {'=' * 25}\n"
    assert "missing" not in str(facts(tmp_path, (noise + known).encode()).first)  # the price of a bounded time
    found = facts(tmp_path, (noise + step + known).encode()).first
    assert found is not None
    assert (found.kind, found.line) == ("environment", 40_002)


def test_long_log_is_read_fast_in_flat_memory(tmp_path: Path) -> None:
    """24 MB here, 200 MB in bench/bench_triage.py; the limit leaves room for a slow, busy machine."""
    body = "".join(f"{MEGATRON}step {n} loss: 0.{n} reward 0.5 generation took {n} s\n" for n in range(2000))
    path = tmp_path / "run.log"
    with path.open("w", encoding="utf-8") as out:
        while out.tell() < 24_000_000:
            out.write(body)
        out.write(traceback("ValueError: x", "/x/megatron/bridge/a.py"))
    code = (
        "import resource, sys, time; from pathlib import Path; from tasks.triage import read_log; "
        "read_log(Path('/nowhere')); read_log(Path(sys.argv[2])); peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "start = time.process_time(); facts = read_log(Path(sys.argv[1])); "
        "print(facts.first.signature, time.process_time() - start, "
        "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)"
    )
    small = tmp_path / "small.log"
    small.write_text(body * 4, encoding="utf-8")
    root = Path(triage.__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path), str(small)],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    signature, seconds, kib = ran.stdout.split()
    assert signature == "bridge-frame"
    assert float(seconds) < 3
    assert int(kib) < 16_000


def test_error_that_comes_again_after_progress_is_seen_although_its_counting_was_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triage, "MOST_ECHOES", 1000)
    limit = "429 Too Many Requests\n"
    log = limit * 40_000 + SETUP + "\n" + limit
    found = facts(tmp_path, log.encode())
    assert found.first is not None
    assert (found.first.line, found.first.echoes) == (40_002, 0)
    assert found.findings[0].recovered
    assert 1000 <= found.findings[0].echoes < 39_999  # the paused rest was not even looked at


def test_log_of_nothing_but_errors_is_read_in_bounded_time() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.log"
        path.write_text(
            traceback("ValueError: x", "/x/megatron/bridge/a.py") * 5000
            + "OSError: [Errno 28] No space left on device\n" * 5000,
            encoding="utf-8",
        )
        start = time.process_time()
        found = read_log(path)
        assert time.process_time() - start < 10
    counted = [(f.signature, f.echoes) for f in found.findings]
    assert counted == [("bridge-frame", triage.MOST_TRACEBACKS - 1), ("disk-full", 4999)]
