"""The environment of a run, by whitelist: what is listed here reaches it, nothing else does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# Passed on as they are, because they change what a run does; their values are part of the input digest.
PASSED = (
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE",
    "HF_ENDPOINT", "MODEL_PATH", "TORCH_CUDA_ARCH_LIST", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH",
    "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NRL_IGNORE_TP_ACCURACY_CHECK",
    "NEMO_RL_VENV_DIR", "NEMO_RL_PY_EXECUTABLES_SYSTEM", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
# Passed by name only: the agent takes them from its own environment and hides their values in the log.
SECRETS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "NGC_API_KEY",
    "GITHUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
)
# Folders of the host that a container must see at the same path.
HOST_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "MODEL_PATH")


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whitelisted variables that the user has set, but those that carry a login."""
    return {name: environ[name] for name in PASSED if environ.get(name) and not _has_login(environ[name])}


def secret_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the secrets that are set, addresses with a login among them; never their values."""
    return tuple(
        name for name in (*SECRETS, *PASSED) if environ.get(name) and (name in SECRETS or _has_login(environ[name]))
    )


def _has_login(value: str) -> bool:
    """Tell whether a value is an address such as http://me:password@proxy:3128."""
    return "@" in value.partition("://")[2].partition("/")[0]


def compose(
    *,
    user: Mapping[str, str],
    case: Mapping[str, str],
    pythonpath: Iterable[str],
    attempt: str,
    interpreter: str,
    local: bool,
    ray_folder: Path | None,
) -> dict[str, str]:
    """Return the complete environment of one attempt; all paths are those seen by the run.

    The private parts, each against a fault seen in real runs: HOME (functional scripts append to the global git
    configuration), the conversions (an old one hides a broken import: "Skipping import."), Ray's folder and
    no RAY_ADDRESS (a run joins a foreign cluster and dies with it), no automatic ray.init (a driver that died calls
    actors from destructors, which starts Ray anew and hangs: 15 minutes of a rehearsal), UV_NO_SYNC (`uv run` re-syncs
    and removes what PYTHONPATH put in place), byte code outside the trees.
    """
    folder = interpreter.rpartition("/")[0]
    path = (
        os.environ.get("PATH", os.defpath)
        if local
        else "/opt/nemo_rl_venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    )
    environment = {
        "PATH": f"{folder}:{path}" if folder else path,
        "LANG": "C.UTF-8",
        "USER": "e2e",
        "PYTHONUNBUFFERED": "1",
        "PYTHONNOUSERSITE": "1",
        "UV_NO_SYNC": "1",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "WANDB_MODE": "disabled",
        "HYDRA_FULL_ERROR": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        **user,
        "HOME": f"{attempt}/home",
        "PYTHONPYCACHEPREFIX": f"{attempt}/work/pycache",
        "NRL_MEGATRON_CHECKPOINT_DIR": f"{attempt}/work/conversions",
        "E2E_ORIGINS": f"{attempt}/origins",
        **case,
        "PYTHONPATH": ":".join(pythonpath),
    }
    if ray_folder is not None:
        environment["RAY_TMPDIR"] = os.fspath(ray_folder)
    return environment
