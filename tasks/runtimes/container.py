"""What a container of ours is asked for, how it is known again, and an engine's words in ours.

Labels are the proof of ownership (see `Owner`); everything here takes the client or plain values and decides nothing
about a run.
"""

from __future__ import annotations

import io
import os
import re
import signal
import tarfile
import time
from typing import TYPE_CHECKING, Any

from tasks.runtimes.job import DEADLINE_MARGIN_S, POLL_S, STOP_S, Job, Owner, start_time, this_owner

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

LABEL = "nemo-rl-e2e"
TARGETS = {
    "bridge": "/opt/Megatron-Bridge",
    "mcore": "/opt/Megatron-LM",
    "nemo_rl": "/opt/nemo-rl",
    "attempt": "/e2e/attempt",
    "agent": "/e2e/agent",
}
HOSTNAME = "e2e"
GIVE_BACK_S = 60.0  # for a chown of an attempt's work trees, 20,000 files


def labels(job: Job, owner: Owner, workspace: str, now: float) -> dict[str, str]:
    """Return the labels that prove a container ours and say when nobody can be waiting for it any more."""
    return {
        f"{LABEL}.run": f"{owner.pid}-{owner.start}",
        **job.labels,
        LABEL: "1",
        f"{LABEL}.attempt": job.id,
        f"{LABEL}.pid": str(owner.pid),
        f"{LABEL}.boot": f"{owner.boot}/{owner.start}",
        f"{LABEL}.owner": str(owner),
        f"{LABEL}.deadline": str(int(now + job.timeout_s + DEADLINE_MARGIN_S)),
        f"{LABEL}.workspace": workspace,
    }


def rootless(client: DockerClient) -> dict[str, str]:
    """Return what tells the agent not to give files back: root in a rootless engine's container is the caller."""
    found = any("rootless" in option for option in client.info().get("SecurityOptions") or ())
    return {"NEMO_RL_E2E_ROOTLESS": "1"} if found else {}


def network(client: DockerClient, *, wanted: bool) -> dict[str, Any]:
    """Return the network arguments; see the module's docstring for why."""
    if not wanted:
        return {"network_mode": "none", "hostname": HOSTNAME, "extra_hosts": {HOSTNAME: "127.0.0.1"}}
    bridges = client.networks.list(names=["bridge"])
    return {"network_mode": "bridge" if any(n.name == "bridge" for n in bridges) else "host"}


def give_back(client: DockerClient, dead: Container) -> None:
    """Run the agent's give-back in the image and with the mounts of a container whose agent was killed."""
    from docker.types import Mount

    config = dead.attrs["Config"]
    container = client.containers.create(
        dead.attrs["Image"],
        [*config["Cmd"][:-1], "give-back", config["Cmd"][-1]],
        mounts=[
            Mount(m["Destination"], m["Source"], type="bind", read_only=not m["RW"])
            for m in dead.attrs.get("Mounts") or ()
            if m["Type"] == "bind"
        ],
        labels={**config["Labels"], f"{LABEL}.owner": str(this_owner())},
        network_mode="none",
        init=True,
        user="0:0",
    )
    try:
        container.start()
        until = time.monotonic() + GIVE_BACK_S
        while container.status not in {"exited", "dead"} and time.monotonic() < until:
            time.sleep(POLL_S)
            container.reload()
    finally:
        container.remove(force=True, v=True)


def read_file(container: Container, path: str, limit: int) -> bytes:
    """Return a file of a container, running or not; b"" where it is larger than `limit` bytes, NotFound without one."""
    stream, status = container.get_archive(path)
    if int((status or {}).get("size", 0)) > limit:
        return b""
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
        member = tar.next()
        source = tar.extractfile(member) if member and member.isreg() else None
        return source.read() if source else b""


def end_without_engine(pid: int, start: str) -> str:
    """Stop a container whose engine is dead by its first process: docker-init passes TERM on; return what happened.

    Only if it still is the process that the engine named, and only where this process sees it and may signal it.
    """
    if start_time(pid) != start or start in {"", "?"}:
        return ""
    try:
        for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, POLL_S)):
            os.kill(pid, number)
            until = time.monotonic() + wait_s
            while start_time(pid) == start and time.monotonic() < until:
                time.sleep(POLL_S)
    except ProcessLookupError:
        pass
    except OSError as error:
        return f"The container may still run: process {pid} ({error.strerror})."
    return "Its container was stopped."


def hang_up(lifeline: Any) -> None:
    """Close an attached socket: docker-py's file object, the socket below it and the response that it came from."""
    for part in (getattr(lifeline, "_response", None), lifeline, getattr(lifeline, "_sock", None)):
        if part is not None:
            part.close()


def said(error: BaseException) -> str:
    """Return what the engine said, on one line, at most 500 characters."""
    text = str(getattr(error, "explanation", None) or error)
    return " ".join(text.split())[:500].rstrip(".") + "."


def advice(text: str, no_engine: str) -> str:
    """Return what to do about an engine's refusal; texts as seen on Docker 20.10 and podman 4.3.

    `no_engine` is the remedy where nobody answered.
    """
    for pattern, remedy in (
        ("could not select device driver", "Install the NVIDIA container toolkit on the engine's host (nvidia-ctk)."),
        ("bind source path does not exist", "The engine does not see that path: is it on another host?"),
        ("No such image", "`doit image` fetches it."),
        (
            "stat .*no such file|executable file not found|exec .* failed: No such",
            "The image lacks the interpreter: python=PATH inside the image.",
        ),
        ("no space left", "Free the engine's disk (docker system df)."),
        ("container-init|catatonit", "Install catatonit on the engine's host."),
        ("rlimit", "The engine may not raise limits: default_ulimits in containers.conf."),
        (r"\[Errno|Connection aborted|server API version", no_engine),
    ):
        if re.search(pattern, text):
            return remedy
    return ""
