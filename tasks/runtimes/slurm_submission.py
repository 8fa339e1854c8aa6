"""What is submitted: sbatch's argv, the job's environment, and the sentence that says which way and what it may cost.

    one node:      sbatch slurm_step.sh -> srun --container-image ... slurm_start.py -> agent.py spec.json
    several nodes: sbatch ray.sub (of the attempt's NeMo-RL) -> Ray -> COMMAND: slurm_start.py -> agent.py spec.json

Slurm's own files are in the attempt's `slurm/`: job.out, started.json, ray.sub's logs. Everything is argv; the one
shell string is COMMAND, which ray.sub writes into a file and gives to bash.
"""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.runtimes.container import TARGETS
from tasks.runtimes.job import AGENT_FLAGS
from tasks.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasks.runtimes.job import Job
    from tasks.runtimes.slurm_commands import Site

STEP = ROOT / "containers" / "slurm_step.sh"
STARTUP_S = 1800.0  # on top of the agent's limits: image import, and ray.sub's own half hour for its workers
TAIL_BYTES = 4000


def name(job: Job) -> str:
    """Return the job's name: unique, so that a submission whose answer was lost is found by it."""
    return f"e2e:{job.id}"


def home(job: Job) -> Path:
    """Return the folder of Slurm's own files; no evidence, and nothing that a verdict rests on."""
    return job.folder / "slurm"


def started(job: Job) -> bool:
    """Return whether the agent was started on a node."""
    return (home(job) / "started.json").exists()


def ray_sub(job: Job) -> Path:
    """Return the ray.sub of the NeMo-RL that the job runs in."""
    return next((m.source for m in job.mounts if m.target == TARGETS["nemo_rl"]), Path("/")) / "ray.sub"


def refusal(job: Job, site: Site) -> str:
    """Return why this job cannot be submitted, before Slurm is asked."""
    if missing := [str(m.source) for m in job.mounts if not m.source.exists()]:
        return f"mount source does not exist: {', '.join(missing)}"
    forbidden = ",: " if job.nodes > 1 else ",:"  # pyxis separates by these; ray.sub splits words, too
    if bad := [str(m.source) for m in job.mounts if set(forbidden) & set(str(m.source))]:
        return f"--container-mounts cannot name {bad[0]}: build=PATH without any of {forbidden!r}"
    if job.nodes > 1:
        if not ray_sub(job).is_file():
            return "this NeMo-RL has no ray.sub: several nodes cannot be had"
        needed = ("account", "partition")
        if not all(site.given.get(n) or os.environ.get(f"SBATCH_{n.upper()}") for n in needed):
            return "ray.sub needs both: write slurm: {account: NAME, partition: NAME} into site.yaml"
    return ""


def limit_s(job: Job, site: Site) -> float:
    """Return Slurm's time limit in seconds: the agent's limits and the start-up, at most what the site allows."""
    return min(job.timeout_s + STARTUP_S, site.time_s or math.inf)


def plan(job: Job, site: Site) -> str:
    """Return the sentence that is printed before a submission: which way, why, and what it may cost."""
    hours = limit_s(job, site) / 3600
    way = "one node: sbatch with srun --container-image"
    if job.nodes > 1:
        way = f"{job.nodes} nodes: sbatch with ray.sub of the NeMo-RL checkout, which starts Ray on all of them"
    return f"{name(job)}: {way}; {job.gpus} GPUs for at most {hours:.1f} h = {job.gpus * hours:.1f} GPU-hours"


def options(job: Job, site: Site, image: str, bad: Iterable[str]) -> list[str]:
    """Return sbatch's options and script; after them, for one node, the arguments of srun."""
    found = [
        f"--job-name={name(job)}", f"--comment={name(job)}", f"--nodes={job.nodes}",
        f"--time={math.ceil(limit_s(job, site) / 60)}", f"--output={home(job)}/job.out", "--open-mode=append",
        "--no-requeue", "--dependency=singleton", "--export=ALL",
    ]  # fmt: skip
    if job.gpus and site.gres:
        found.append(f"--gres=gpu:{_each(job)}")
    if avoided := sorted(bad):
        found.append(f"--exclude={','.join(avoided)}")
    if job.nodes > 1:
        return [*found, os.fspath(ray_sub(job))]
    inside = [
        "--nodes=1", "--ntasks=1", "--input=none", "--no-container-mount-home", f"--container-image={image}",
        f"--container-mounts={_mounts(job)}", f"--container-workdir={TARGETS['attempt']}",
    ]  # fmt: skip
    return [*found, "--ntasks=1", os.fspath(STEP), *inside, *_start(job)]


def environment(job: Job, image: str) -> dict[str, str]:
    """Return what the job gets beside the site's own: secrets by name, and what ray.sub wants to be told."""
    env = {**job.secret_env(), "NEMO_RL_E2E_ROOTLESS": "1"}  # files are the user's already: nothing to give back
    if job.nodes > 1:
        place = os.fspath(home(job))
        # ray.sub starts the cluster before the agent has given the command its environment
        env |= {k: v for k, v in job.env.items() if k.startswith("RAY_") and k not in ("RAY_ADDRESS", "RAY_TMPDIR")}
        env |= {
            "CONTAINER": image, "MOUNTS": f"{_mounts(job)},{place}:{place}", "COMMAND": shlex.join(_start(job)),
            "GPUS_PER_NODE": str(_each(job)), "BASE_LOG_DIR": place,
        }  # fmt: skip
        if job.local_copy:  # ray.sub goes on after a set-up that failed: end the step, which ends the job soon
            env["SETUP_COMMAND"] = f"{shlex.join(_copying(job))} || kill -TERM $PPID"
    return env


def tail(job: Job) -> str:
    """Return the end of what batch script and, under ray.sub, driver printed."""
    found = []
    for path in (home(job) / "job.out", *sorted(home(job).glob("*-logs/ray-driver.log"))):
        try:
            found.append(path.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace").strip())
        except OSError:
            continue
    return "\n".join(found)


def _each(job: Job) -> int:
    return -(-job.gpus // job.nodes)


def _mounts(job: Job) -> str:
    return ",".join(f"{m.source}:{m.target}" + (":ro" if m.read_only else "") for m in job.mounts)


def _start(job: Job) -> list[str]:
    """Return the command inside the container."""
    python = [job.interpreter, *AGENT_FLAGS]
    note = f"{TARGETS['attempt']}/slurm/started.json"
    first = _copying(job) if job.local_copy else []
    if first and job.nodes > 1:  # ray.sub has had the copies made, and does not ask what came of it
        listed, _, _, notes = job.local_copy
        first = [*first[:-4], "--proved", str(job.nodes), listed, notes]
    return [*first, *python, f"{TARGETS['agent']}/slurm_start.py", note, *python, *job.argv]


def _copying(job: Job) -> list[str]:
    return [job.interpreter, *AGENT_FLAGS, f"{TARGETS['agent']}/local_copy.py", *job.local_copy]
