"""Where a job runs: local, docker, podman, slurm. The protocol of a runtime, and who owns what it started: job.py."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tasks.runtimes.job import Runtime

NAMES = ("local", "docker", "podman", "slurm")


def choose(
    name: str,
    *,
    image: str = "",
    workspace: str = "",
    host: str | None = None,
    site: Mapping[str, object] | None = None,
    detach: bool = False,
    say: Callable[[str], None] = print,
) -> Runtime:
    """Return the runtime called `name`; UserError for an unknown name.

    For containers: `image` is an ID or repo@digest (or comes later, by `use`), `host` the engine's address. For Slurm:
    `site` is the mapping of site.yaml, `say` is told what becomes of a job.
    """
    if name == "local":
        from tasks.runtimes.local import Local

        return Local()
    if name == "docker":
        from tasks.runtimes.docker import Docker

        return Docker(image, workspace=workspace, host=host)
    if name == "podman":
        from tasks.runtimes.podman import Podman

        return Podman(image, workspace=workspace, host=host)
    if name == "slurm":
        from tasks.runtimes.slurm import Slurm
        from tasks.runtimes.slurm_commands import site_of

        return Slurm(image, site=site_of(site or {}), detach=detach, say=say)
    close = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UserError(f"runtime={name}: not a runtime of this version{hint} (known: {', '.join(NAMES)}; E2E_RUNTIME)")
