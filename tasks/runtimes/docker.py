"""Jobs as containers, through docker-py's API calls.

What the engine is not trusted with, each seen on a real one (20.10): `wait` on a container that never started says 0;
every stream ends without an error when the daemon dies; a daemon's SIGTERM looks like a normal exit 143; OOMKilled can
be true with exit 0; a `volumes` source that is missing gets created. So the state is polled, a mount is a
`Mount(bind)`, 143 is believed only from a daemon that is still the same, and exit.json decides.

The agent's standard input is attached (StdinOnce): if the runner dies, the engine closes it, and the agent stops by
itself and gives the files back. `collect_orphans` is for what even that did not end.

Network: none, with the host name in /etc/hosts, unless the job asks for it; then the engine's bridge (two runs must not
see each other's Ray), or the host's network where the engine has no bridge. Never a TTY. The image's entry point stays:
NVIDIA's sets up the driver compatibility libraries and then executes what it is given.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from tasks import files
from tasks.errors import UserError
from tasks.reason import Reason
from tasks.runtimes.container import (
    LABEL,
    TARGETS,
    advice,
    end_without_engine,
    give_back,
    hang_up,
    labels,
    network,
    rootless,
    said,
)
from tasks.runtimes.job import (
    AGENT_FLAGS,
    DEADLINE_MARGIN_S,
    POLL_S,
    STOP_S,
    Ended,
    Job,
    is_orphan,
    parse_owner,
    start_time,
    this_owner,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

    from docker import DockerClient
    from docker.models.containers import Container

API_S = 60  # one API call; a busy engine with a full disk took 20 s to create a container
ENGINE_LOST_S = 60.0  # without an answer: a live-restore engine comes back sooner
ENGINE_DYING_S = 3.0  # after an unexplained 143 or 137: a daemon that stopped its containers is gone by then
UNLIMITED = -1


class _LostError(Exception):
    """The container, or the engine itself, is not there any more."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Docker:
    """Runs jobs in containers of one image (an ID or repo@digest) on one engine."""

    name = "docker"
    default_host = "unix:///var/run/docker.sock"
    host_variable = "DOCKER_HOST"
    remedy = "Start the engine, or set DOCKER_HOST, or use runtime=local."

    def __init__(self, image: str = "", *, workspace: str = "", host: str | None = None) -> None:
        self.image, self.workspace = image, workspace
        self.host = host or os.environ.get(self.host_variable) or self.default_host

    def target(self, kind: str, host: Path) -> str:
        """Return the fixed path of `kind` in the container; KeyError for an unknown kind."""
        return TARGETS[kind]

    def use(self, image: str) -> None:
        """Run later jobs in `image`, an ID or repo@digest."""
        self.image = image

    def unusable(self, subject: str, error: Exception) -> UserError:
        """Return the UserError for what the engine said: what, where, what to do."""
        return UserError(
            f"{subject}: {self.name} at {self.host}: {said(error)} {advice(str(error), self.remedy)}".strip()
        )

    def available(self) -> Reason | None:
        """Return why no container can be started: no engine, no permission, the bound image not there."""
        from docker.errors import DockerException, ImageNotFound

        try:
            with self.client() as client:
                client.ping()
                if self.image:  # else nothing is bound yet: `resolve` says what about the image
                    client.images.get(self.image)
        except ImageNotFound:
            text = f"{self.image} is not on the engine at {self.host}. `doit image` fetches it."
            return Reason("image", self.image, text)
        except (DockerException, OSError) as error:
            return Reason("engine", self.name, f"No {self.name} engine at {self.host}: {said(error)} {self.remedy}")
        return None

    def client(self) -> contextlib.closing[DockerClient]:
        """Return a client to be used in a `with`; DockerException or OSError where the engine does not answer."""
        import docker

        self.listener()  # docker-py leaves its socket open where this fails
        return contextlib.closing(docker.DockerClient(base_url=self.host, timeout=API_S))

    def run(self, job: Job, *, stop: threading.Event, poll: Callable[[], None]) -> Ended:
        """Run the job's agent in a new container; the container is removed whatever happens."""
        from docker.errors import DockerException

        if problem := self.refusal(job):
            return Ended(None, "not_started", problem)
        started = False
        try:
            with self.client() as client:
                engine = self.engine_pid()
                container, lifeline = self._start(client, job)
                started = True
                try:
                    state, asked = self._watch(container, job, stop=stop, poll=poll)
                    return self._judge(client, container, job, state=state, asked=asked, engine=engine)
                except _LostError as error:
                    return Ended(None, error.reason, str(error))
                finally:
                    self._clear(client, container, job.folder)
                    hang_up(lifeline)
        except (DockerException, OSError) as error:
            if started:
                return Ended(None, "engine_lost", said(error))
            return Ended(None, "not_started", f"{said(error)} {advice(str(error), self.remedy)}".strip())

    def refusal(self, job: Job) -> str:
        """Return why this job cannot be started here, before anything is asked of the engine."""
        if self.host.startswith("unix:"):  # on another host the engine itself must find them
            missing = [str(m.source) for m in job.mounts if not m.source.exists()]
            if missing:
                return f"mount source does not exist: {', '.join(missing)}"
        return ""

    def options(self, client: DockerClient, job: Job) -> dict[str, Any]:
        """Return the arguments of `containers.create` for a job."""
        from docker.types import DeviceRequest, Mount, Ulimit

        options: dict[str, Any] = {
            "image": self.image,
            "command": [job.interpreter, *AGENT_FLAGS, *job.argv],
            "name": f"{LABEL}-{re.sub(r'[^a-zA-Z0-9_.-]', '-', job.id)}-{secrets.token_hex(4)}",
            "labels": labels(job, this_owner(), self.workspace, time.time()),
            "environment": {**job.env, **job.secret_env(), **rootless(client)},
            "mounts": [Mount(m.target, str(m.source), type="bind", read_only=m.read_only) for m in job.mounts],
            "init": True,
            "tty": False,
            "stdin_open": True,  # docker-py then sets StdinOnce too: the lifeline
            "user": "0:0",
            **network(client, wanted=job.network),
        }
        if job.shm_bytes:
            options["shm_size"] = job.shm_bytes
        if job.gpus:
            which = {"device_ids": list(job.gpu_ids)} if job.gpu_ids else {"count": job.gpus}
            options["device_requests"] = [DeviceRequest(capabilities=[["gpu"]], **which)]
            options["ulimits"] = [Ulimit(name="memlock", soft=UNLIMITED, hard=UNLIMITED)]
        return options

    def _start(self, client: DockerClient, job: Job) -> tuple[Container, Any]:
        """Create, attach the lifeline, start; without memlock where the engine may not raise limits."""
        from docker.errors import APIError

        options = self.options(client, job)
        while True:
            container, lifeline = client.containers.create(**options), None
            try:
                lifeline = container.attach_socket(params={"stdin": 1, "stream": 1})
                container.start()
            except BaseException as error:
                hang_up(lifeline)
                with contextlib.suppress(APIError):
                    container.remove(force=True, v=True)
                if isinstance(error, APIError) and "rlimit" in str(error) and options.pop("ulimits", None):
                    continue
                raise
            return container, lifeline

    def _watch(
        self, container: Container, job: Job, *, stop: threading.Event, poll: Callable[[], None]
    ) -> tuple[dict[str, Any], str]:
        """Poll the container to its end; TERM on request or when the agent overran its limits, then KILL.

        Returns the engine's final state and what we had asked for ("", "stopped", "deadline").
        """
        from docker.errors import APIError, DockerException, NotFound

        deadline, kill_at, asked = time.monotonic() + job.timeout_s + DEADLINE_MARGIN_S, float("inf"), ""
        seen, first = time.monotonic(), (0, "")  # pid of the container's first process, and its start time
        while True:
            try:
                self.listener()  # as in client()
                container.reload()
            except NotFound as error:
                raise _LostError("killed", "the container was removed by somebody else") from error
            except (DockerException, OSError) as error:
                if time.monotonic() > seen + (ENGINE_DYING_S if stop.is_set() else ENGINE_LOST_S):
                    text = f"{self.host} does not answer any more: {said(error)} {end_without_engine(*first)}"
                    raise _LostError("engine_lost", text) from error
            else:
                seen, state = time.monotonic(), container.attrs["State"]
                if state["Status"] in {"exited", "dead"}:
                    return state, asked
                if not first[0] and self.engine_pid() is not None:
                    first = (int(state["Pid"]), start_time(int(state["Pid"])) or "")
                number = ""
                if not asked and (stop.is_set() or seen > deadline):
                    asked, kill_at, number = ("stopped" if stop.is_set() else "deadline"), seen + STOP_S, "SIGTERM"
                elif seen > kill_at:
                    kill_at, number = seen + STOP_S, "SIGKILL"
                if number:
                    with contextlib.suppress(APIError):  # it has ended in between; the next look will tell
                        container.kill(signal=number)
            poll()
            time.sleep(POLL_S)

    def _judge(
        self,
        client: DockerClient,
        container: Container,
        job: Job,
        *,
        state: dict[str, Any],
        asked: str,
        engine: int | None,
    ) -> Ended:
        """Put the engine's final state into words; an unexplained 137 or 143 is first checked against the daemon."""
        rc, detail = int(state["ExitCode"]), str(state.get("Error") or "")
        if state.get("OOMKilled"):
            return Ended(rc, "oom", f"a process was killed for memory; the container's exit status is {rc}")
        record = files.read_json(job.folder / "exit.json")
        if record is None and rc in {126, 127}:  # docker-init could not execute what it was given
            last = container.logs(tail=5).decode("utf-8", "replace")
            return Ended(None, "not_started", f"{' '.join(last.split())[:500]} {advice(last, self.remedy)}".strip())
        own = isinstance(record, dict) and record.get("reason") not in {"terminated", "runner_gone"}
        if asked or own or rc not in {137, 143}:
            return Ended(rc, asked or "exited", detail)
        until = time.monotonic() + ENGINE_DYING_S
        while time.monotonic() < until:
            if not self._same_engine(client, engine):
                return Ended(rc, "engine_lost", f"the engine was stopped or restarted during the run (status {rc})")
            time.sleep(POLL_S)
        return Ended(rc, "killed", f"the container was stopped by somebody else (status {rc})")

    def _same_engine(self, client: DockerClient, engine: int | None) -> bool:
        from docker.errors import DockerException

        try:
            return self.engine_pid() == engine and bool(client.ping())
        except (DockerException, OSError):
            return False

    def engine_pid(self) -> int | None:
        """Return what must stay the same for a 143 to be believed; None where it proves nothing."""
        return self.listener()

    def listener(self) -> int | None:
        """Return the pid of the process that listens on the engine's socket, None for another host; OSError: nobody."""
        if not self.host.startswith("unix:"):
            return None
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(self.host.removeprefix("unix://"))
            size = struct.calcsize("3i")
            return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])

    def _clear(self, client: DockerClient, container: Container, folder: Path) -> None:
        """Keep the agent's own output, stop what runs, give the files back if the agent could not, remove."""
        from docker.errors import DockerException

        with contextlib.suppress(DockerException, OSError):
            self.listener()
            container.reload()
            if container.status not in {"exited", "dead"}:
                container.stop(timeout=int(STOP_S))
            if output := container.logs(tail=100):
                files.write_bytes(folder / "agent.log", output)
            if not (folder / "exit.json").exists():
                give_back(client, container)
        with contextlib.suppress(DockerException, OSError):
            self.listener()
            container.remove(force=True, v=True)

    def collect_orphans(self) -> list[str]:
        """Stop and remove containers with our label whose runner is provably dead; UserError where no engine is."""
        from docker.errors import DockerException

        try:
            with self.client() as client:
                return self._collect(client)
        except (DockerException, OSError) as error:
            raise self.unusable("looking for containers that dead runs left", error) from error

    def _collect(self, client: DockerClient) -> list[str]:
        from docker.errors import DockerException

        stopped, here = [], this_owner()
        for container in client.containers.list(all=True, filters={"label": f"{LABEL}=1"}, ignore_removed=True):
            owner = parse_owner(container.labels.get(f"{LABEL}.owner", ""))
            deadline = container.labels.get(f"{LABEL}.deadline", "")
            if not owner or not is_orphan(owner, here, float(deadline) if deadline.isdecimal() else None):
                continue
            with contextlib.suppress(DockerException):  # another collector was faster
                was = container.status
                container.stop(timeout=int(STOP_S))
                container.reload()
                if container.attrs["State"]["ExitCode"] == 137:
                    give_back(client, container)
                container.remove(force=True, v=True)
                stopped.append(f"container {container.name} ({was}) of dead runner {owner.pid}")
        return stopped
