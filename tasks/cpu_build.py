"""The slow steps of the CPU environment: installing the pins and training the tiny models, with progress, once.

Protocol: each step makes one folder and, as its last act, `complete.json` in it. A folder without that file is what an
interrupted step has left: it is removed and made anew. `locked` keeps a second build out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.files import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

INSTALL_TIMEOUT_S = 3600.0  # 170 packages, 1.3 GB of downloads; 150 s on a fast line
MODELS_TIMEOUT_S = 1800.0  # 60 s on two free cores
LOCK_TIMEOUT_S = 5400.0
REPORT_EVERY = 20  # packages between two lines of progress
TAIL_LINES = 15
CHECK_TIMEOUT_S = 600.0
CUDA_BUILD = 3
WARMED = ("ray", "transformers", "datasets", "tensordict", "hydra", "omegaconf", "tensorboard", "wandb", "mlflow")

# Actors for which NeMo-RL ignores NEMO_RL_PY_EXECUTABLES_SYSTEM and would make an environment with uv: with a link
# <NEMO_RL_VENV_DIR>/<class> the environment that it leads to is used (distributed/ray_actor_environment_registry.py,
# utils/venvs.py of 7ea279abf). Another such actor stops at the uv stand-in.
ACTORS = (
    "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker",
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2",
    "nemo_rl.algorithms.async_utils.AsyncTrajectoryCollector",
    "nemo_rl.algorithms.async_utils.ReplayBuffer",
    "nemo_rl.experience.sync_rollout_actor.SyncRolloutActor",
)


@contextlib.contextmanager
def locked(path: Path, report: Callable[[str], None], timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[int]:
    """Hold the lock file `path` and yield its descriptor; UserError after `timeout_s`.

    Steps inherit the descriptor: if this process is killed, the lock lives as long as the pip that it has left behind,
    and nobody removes a folder under it.
    """
    with path.open("w") as lock:
        deadline = time.monotonic() + timeout_s
        said = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(f"another process has held {path} for {timeout_s / 60:.0f} minutes") from None
                if not said:
                    report("CPU environment: another process is building it, waiting")
                    said = True
                time.sleep(0.2)
        yield lock.fileno()


def install(venv: Path, requirements: Path, python: Path, report: Callable[[str], None], lock: int) -> None:
    """Make `venv` from the pins; nothing where it is complete. UserError with pip's last lines where pip fails."""
    if (venv / "complete.json").exists():
        return
    shutil.rmtree(venv, ignore_errors=True)
    total = sum(1 for line in requirements.read_text().splitlines() if "==" in line and not line.startswith("#"))
    report(f"CPU environment: installing {total} packages (PyTorch for CPU, Ray, transformers...), about 3 minutes")
    started = time.monotonic()
    # --clear and no pip upgrade: the interpreter's own pip is good enough and needs no network of its own
    _stream([str(python), "-m", "venv", "--clear", str(venv)], lambda _: None, lock, 300.0, "python -m venv")
    # --no-compile: of 3.6 GB a run imports a tenth; _check_torch compiles that part, once
    command = [
        str(venv / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-input", "--no-compile",
        "--disable-pip-version-check", "--progress-bar", "off", "-r", str(requirements),
    ]  # fmt: skip
    _stream(command, _packages(report, total), lock, INSTALL_TIMEOUT_S, "pip install")
    _check_torch(venv)
    write_json(venv / "complete.json", {"schema": 1, "packages": total, "requirements": requirements.read_text()})
    report(f"CPU environment: {total} packages installed in {time.monotonic() - started:.0f} s")


def make_models(folder: Path, recipe: Path, python: Path, report: Callable[[str], None], lock: int) -> None:
    """Run the recipe into `folder`; nothing where it is complete. UserError with its last lines where it fails."""
    if (folder / "complete.json").exists():
        return
    report("CPU environment: training the tiny models, about a minute on two free cores")
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _stream([str(python), str(recipe), str(folder)], _models(report), lock, MODELS_TIMEOUT_S, recipe.name)
    write_json(folder / "complete.json", {"schema": 1, "models": sorted(p.name for p in (folder / "models").iterdir())})
    report(f"CPU environment: tiny models made in {time.monotonic() - started:.0f} s")


def actor_links(folder: Path, venv: Path) -> None:
    """Link every actor of ACTORS to `venv`."""
    folder.mkdir(parents=True)
    for actor in ACTORS:
        (folder / actor).symlink_to(venv)


def _packages(report: Callable[[str], None], total: int) -> Callable[[str], None]:
    """Return a reader of pip's lines that reports every REPORT_EVERY packages and the long silent step after them."""
    seen = 0

    def read(line: str) -> None:
        nonlocal seen
        if match := re.match(r"(?:Collecting|Processing) (?:\S*/)?(\S+)", line):
            seen += 1
            if seen % REPORT_EVERY == 0:
                report(f"CPU environment: {seen}/{total} packages fetched, now {match[1]}")
        elif line.startswith("Installing collected packages"):
            report(f"CPU environment: {seen}/{total} packages fetched, unpacking them (3.6 GB)")

    return read


def _models(report: Callable[[str], None]) -> Callable[[str], None]:
    def read(line: str) -> None:
        if re.match(r"[a-z0-9_]+: step ", line):
            report(f"CPU environment: {line}")

    return read


def _check_torch(venv: Path) -> None:
    """Refuse a CUDA build, which the index of PyPI gives: it is large and its answers are not the stand-ins'.

    The imports that every run makes are made here once, so that their bytecode is there before workers want it at once.
    """
    code = (
        "import sys, torch; print(torch.__version__)\n"
        f"if torch.version.cuda is not None: sys.exit({CUDA_BUILD})\n"
        f"import {', '.join(WARMED)}"
    )
    asked = subprocess.run(
        [str(venv / "bin" / "python"), "-c", code], env=_environment(), capture_output=True, text=True, check=False,
        timeout=CHECK_TIMEOUT_S,
    )  # fmt: skip
    if asked.returncode == CUDA_BUILD or "libcud" in asked.stderr:
        raise UserError(
            f"pip gave torch {asked.stdout.strip()}, a CUDA build; name an index of CPU wheels in PIP_EXTRA_INDEX_URL "
            "(PyTorch's installation page has its address) and run the command again"
        )
    if asked.returncode:
        raise UserError(f"the installed packages cannot be imported: {asked.stderr.strip()[-500:]}")


def _environment() -> dict[str, str]:
    """Return the caller's environment without what would change imports, and with the model hub off."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "E2E_CPU"))}
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def _stream(command: list[str], read: Callable[[str], None], lock: int, timeout_s: float, name: str) -> None:
    """Run `command` and give each line of its output to `read`; UserError with the last lines on failure or time-out.

    Its own session, so that everything it started ends with it, also when this process is interrupted.
    """
    tail: list[str] = []
    timed_out = threading.Event()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=_environment(), start_new_session=True, pass_fds=(lock,),
    ) as process:  # fmt: skip

        def stop() -> None:
            timed_out.set()
            _kill(process)

        timer = threading.Timer(timeout_s, stop)
        timer.daemon = True
        timer.start()
        try:
            for line in process.stdout or ():
                tail = [*tail[1 - TAIL_LINES :], line.rstrip()]
                read(line.rstrip())
            process.wait()
        finally:
            timer.cancel()
            _kill(process)
    if timed_out.is_set():
        raise UserError(f"{name} was stopped after {timeout_s / 60:.0f} minutes; its last lines:\n" + "\n".join(tail))
    if process.returncode:
        raise UserError(f"{name} ended with {process.returncode}; its last lines:\n" + "\n".join(tail))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process group that `process` leads, unless it has been reaped: its number may then be another's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
