"""Jobs as podman containers, through podman's Docker-compatible socket (seen: 4.3.1, rootful).

Where that API differs in silence, this module looks for itself: GPU requests are ignored and the container runs without
a GPU (refused here), a missing mount source is created (checked before, see `Docker.refusal`), per-container ulimits
break the start (never sent), OOMKilled stays false. Containers do not die with the service, which may also be started
anew by systemd for each call: its pid proves nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tasks.runtimes.docker import Docker

if TYPE_CHECKING:
    from docker import DockerClient

    from tasks.runtimes.job import Job


class Podman(Docker):
    """The Docker runtime on podman's socket."""

    name = "podman"
    default_host = (
        "unix:///run/podman/podman.sock"
        if os.geteuid() == 0
        else f"unix://{os.environ.get('XDG_RUNTIME_DIR', f'/run/user/{os.getuid()}')}/podman/podman.sock"
    )
    host_variable = "CONTAINER_HOST"
    remedy = "Start it (systemctl --user start podman.socket), or set CONTAINER_HOST, or use runtime=docker or local."

    def refusal(self, job: Job) -> str:
        """Return why a job cannot run: a missing mount source, or GPUs, which this API ignores without a word."""
        if job.gpus:
            return (
                f"podman's Docker API ignores GPU requests in silence, and the job needs {job.gpus} GPU(s): "
                "use runtime=docker, or runtime=local inside a container that has them."
            )
        return super().refusal(job)

    def options(self, client: DockerClient, job: Job) -> dict[str, Any]:
        """Return the arguments of `containers.create`; SELinux labels off, else the bind mounts are unreadable."""
        return {**super().options(client, job), "security_opt": ["label=disable"]}

    def engine_pid(self) -> None:
        """Return None: the service's pid may change between two calls."""
