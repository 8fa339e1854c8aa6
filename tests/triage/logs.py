"""Logs that tests of triage write, small: steps, tracebacks, and the facts that are read out of them."""

from __future__ import annotations

import textwrap
from pathlib import Path

from hypothesis import HealthCheck, settings

from tasks.triage import LogFacts, read_log

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
