"""pynvml for devices that do not exist.

The identifier of a device must differ between attempts: NeMo-RL's refit meets its peer at `ipc:///tmp/<UUID>.sock`
(workers/base_policy_worker.py, vllm/vllm_backend.py), so two runs with the same UUID on one machine would send each
other their weights. E2E_CPU_TAG, chosen per attempt, is part of it. Free memory is what the refit sizes its buffer by.
"""

from __future__ import annotations

import os
from typing import Any

DEVICE_COUNT = 8
BUFFER_BYTES = 64 << 20  # a tiny model needs less than 1 MiB


class _Memory:
    free, total, used = BUFFER_BYTES, BUFFER_BYTES, 0


def apply(module: Any) -> None:
    """Answer the calls of nemo_rl/utils/nvml.py; KeyError without E2E_CPU_TAG."""
    tag = os.environ["E2E_CPU_TAG"]
    module.nvmlInit = module.nvmlShutdown = lambda *_: None
    module.nvmlDeviceGetCount = lambda: DEVICE_COUNT
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetUUID = lambda handle: f"GPU-e2e-{tag}-{handle}"
    module.nvmlDeviceGetMemoryInfo = lambda _: _Memory
    module.nvmlDeviceGetComputeRunningProcesses = lambda _: []
