"""Which GPUs this host shows: asked of nvidia-smi by argv, judged before anything is started."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.records import Record

TIMEOUT_S = 30
_LINE = re.compile(r"GPU \d+: (?P<model>.+?) \(UUID: [^)]+\)")


@dataclass(frozen=True, slots=True)
class Gpus:
    """The models seen, one entry a GPU, and why there is no answer (None: nvidia-smi answered)."""

    models: tuple[str, ...]
    driver: str = ""
    problem: str | None = None

    def label(self) -> str:
        """Return the GPUs as the input digest and a cached Pass name them, e.g. "2x NVIDIA H200, driver 580.82"."""
        kinds = sorted(set(self.models))
        counted = ", ".join(f"{self.models.count(kind)}x {kind}" for kind in kinds) or "none"
        return f"{counted}, driver {self.driver}" if self.driver else counted


def _ask(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["nvidia-smi", *args], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
    )


def visible() -> Gpus:
    """Return the GPUs that nvidia-smi lists; never raises."""
    try:
        listed = _ask("-L")
        if listed.returncode:
            return Gpus((), problem=f"nvidia-smi failed (rc {listed.returncode})")
        models = tuple(m["model"] for m in map(_LINE.match, listed.stdout.splitlines()) if m)
        asked = _ask("--query-gpu=driver_version", "--format=csv,noheader") if models else None
    except FileNotFoundError:
        return Gpus((), problem="nvidia-smi is not on PATH")
    except subprocess.TimeoutExpired:
        return Gpus((), problem=f"nvidia-smi gave no answer within {TIMEOUT_S} s")
    except OSError as error:
        return Gpus((), problem=f"nvidia-smi cannot be started: {error.strerror}")
    version = re.search(r"^\s*(\d+(?:\.\d+)+)\s*$", asked.stdout, re.MULTILINE) if asked else None
    return Gpus(models, version[1] if version else "")


def memory() -> str:
    """Return the used memory of all GPUs as "GPU 61/160 GiB"; empty where nvidia-smi has no answer. Never raises."""
    try:
        asked = _ask("--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    pairs = re.findall(r"^\s*(\d+), *(\d+)\s*$", asked.stdout, re.MULTILINE)  # MiB
    used, total = (sum(int(pair[n]) for pair in pairs) for n in (0, 1))
    return f"GPU {used / 1024:.0f}/{total / 1024:.0f} GiB" if total else ""


def driver_notes(tried: Sequence[Mapping[str, Any]], before: Record | None) -> list[str]:
    """Return what a reader must know of the nodes' GPU drivers: attempts that differ, or the case's last run did.

    On a cluster the driver is no input of a run: which node it gets is not known before.
    """
    seen = [str(one["driver"]) for one in tried if one.get("driver")]
    notes = [f"its attempts had different GPU drivers: {', '.join(seen)}"] if len(set(seen)) > 1 else []
    earlier = [one.get("driver") for one in before.artefact.get("attempts", [])] if before else []
    if seen and before and earlier and earlier[-1] and earlier[-1] != seen[-1]:
        notes.append(f"ran with GPU driver {seen[-1]}, the run of {before.finished} with {earlier[-1]}")
    return notes


def lacking(wanted: int, gpus: Gpus) -> Reason | None:
    """Return why `wanted` GPUs cannot be had, or None."""
    if wanted <= len(gpus.models):
        return None
    seen = gpus.problem or f"{len(gpus.models)} of {wanted} GPUs"
    text = f"needs {wanted} GPUs: {seen}"
    return Reason("gpus", "nvidia-smi", text, str(wanted), str(len(gpus.models)))
