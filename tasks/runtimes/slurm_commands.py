"""Slurm's commands, by argv, with time limits: submit, look, cancel, what GPUs there are. Nothing here judges a run.

A controller that does not answer is waited for by the caller: `Controller` raises `NoAnswerError`, and `RefusedError`
where Slurm said no. Jobs are looked for by name (`e2e:<attempt id>`), so that a submission whose answer was lost is
found all the same.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.gpus import Gpus
from tasks.runtimes.slurm_states import FORMAT, Seen, gpus_of, parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CALL_S = 60.0
PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "SHELL", "TMPDIR", "SLURM_CONF")
PASSED_PREFIXES = ("SBATCH_", "ENROOT_", "PYXIS_")  # the site's own defaults and credentials' place; no SLURM_JOB_*
OURS = frozenset(
    ("job-name", "comment", "output", "error", "chdir", "nodes", "ntasks", "export", "parsable", "wrap", "array",
     "dependency", "exclude", "requeue", "no-requeue", "open-mode", "wait", "input", "test-only")
)  # fmt: skip
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_CONTACT = re.compile(
    r"Unable to contact|Socket timed out|Connection refused|Zero Bytes|connect failure|timed out", re.IGNORECASE
)


class NoAnswerError(Exception):
    """The controller did not answer; what was asked may have been done or not (`sure`: certainly not)."""

    def __init__(self, text: str, *, sure: bool) -> None:
        super().__init__(text)
        self.sure = sure


class RefusedError(Exception):
    """Slurm answered and said no."""


@dataclass(frozen=True, slots=True)
class Site:
    """`slurm:` of site.yaml: `time_s` caps the time limit, `gres` says whether GPUs are asked for, the rest is argv.

    `local_copy` is a folder inside the container, on the node's own storage, that Core is copied to; "" for none.
    """

    options: tuple[str, ...] = ()
    time_s: float | None = None
    gres: bool = True
    given: Mapping[str, str] = field(default_factory=dict)
    local_copy: str = ""


def site_of(given: Mapping[str, object]) -> Site:
    """Return the options of site.yaml's `slurm:` mapping, long names of sbatch; UserError for what we set ourselves."""
    from tasks.settings import parse_duration

    options, time_s, gres, local = [], None, True, ""
    for name, value in given.items():
        where = f"site.yaml, slurm: {name}: {value}"
        if name == "local_copy":
            if not re.fullmatch(r"(/[\w.-]+)+", local := str(value)):
                raise UserError(f"{where}: an absolute path inside the container, on the node's own storage: /tmp")
            continue
        if not _OPTION.fullmatch(name) or isinstance(value, (dict, list)):
            raise UserError(f"{where}: write a long option of sbatch and its value, e.g. `partition: batch`")
        if name in OURS:
            raise UserError(f"{where}: --{name} is set for every job by this tool; remove it")
        if name == "time":
            time_s = parse_duration(str(value), "slurm: time")
        elif name == "gres":
            if value not in (True, False):
                raise UserError(f"{where}: `gres: false` where the cluster has no GRES; numbers come from the case")
            gres = bool(value)
        elif value is not False:
            options.append(f"--{name}" if value is True else f"--{name}={value}")
    return Site(tuple(options), time_s, gres, {k: str(v) for k, v in given.items()}, local)


@dataclass(frozen=True, slots=True)
class Controller:
    """The cluster that the commands on PATH and SLURM_CONF speak to."""

    site: Site

    def call(self, *argv: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Return a command's standard output; RefusedError, NoAnswerError (also for a command that is not there).

        In a session of its own: a Ctrl-C for us is none for a submission under way.
        """
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=CALL_S, check=False, env=env, cwd=cwd,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"{argv[0]} gave no answer within {CALL_S:g} s", sure=False) from None
        except FileNotFoundError:
            raise RefusedError(f"{argv[0]} is not on PATH: runtime=slurm runs on a login node of the cluster") from None
        except OSError as error:
            raise RefusedError(f"{argv[0]} cannot be started: {error.strerror}") from error
        said = " ".join((done.stderr or done.stdout).split())[-500:]
        if done.returncode and _CONTACT.search(said):
            raise NoAnswerError(said, sure="connect failure" in said or "Connection refused" in said)
        if done.returncode:
            raise RefusedError(said or f"{argv[0]} ended with rc {done.returncode}")
        return done.stdout

    def submit(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> str:
        """Submit and return the job's id."""
        kept = {k: v for k, v in os.environ.items() if k in PASSED or k.startswith(PASSED_PREFIXES)}
        out = self.call("sbatch", "--parsable", *self.site.options, *argv, env={**kept, **env}, cwd=cwd)
        return out.strip().splitlines()[-1].partition(";")[0]

    def look(self, name: str) -> list[Seen]:
        """Return the user's jobs called `name` that the controller still knows, ended ones too for some minutes."""
        return parse(self.call("squeue", "-h", "-t", "all", "-u", str(os.getuid()), "-n", name, "-o", FORMAT))

    def remembered(self, name: str) -> list[Seen]:
        """Return what the accounting knows of jobs called `name`; nothing where there is none."""
        try:
            fields = "--format=JobIDRaw,State,Reason,NodeList,Start"
            return parse(self.call("sacct", "-n", "-X", "-P", "-S", "now-14days", f"--name={name}", fields))
        except (NoAnswerError, RefusedError):
            return []

    def cancel(self, name: str) -> None:
        """Cancel every job of the user called `name`."""
        self.call("scancel", f"--user={os.getuid()}", f"--name={name}")

    def cancel_id(self, job: str) -> None:
        """Cancel one job."""
        self.call("scancel", job)

    def offered(self) -> Offer:
        """Return the GPUs that the partition's usable nodes have; a problem instead of an exception."""
        partition = self.site.given.get("partition") or os.environ.get("SBATCH_PARTITION", "")
        where = ["-p", partition] if partition else []
        try:
            text = self.call("sinfo", "-h", "-N", *where, "-o", "%N|%G|%T")
        except (NoAnswerError, RefusedError) as error:
            return Offer((), str(error))
        nodes = {}
        for line in text.splitlines():
            name, gres, state = (*line.strip().split("|"), "", "")[:3]
            if not state.startswith(("down", "drain", "fail", "unknown")):
                nodes[name] = gpus_of(gres)
        return Offer(tuple(nodes.values()), "", gres=self.site.gres)


@dataclass(frozen=True, slots=True)
class Offer:
    """Type and number of GPUs of each usable node, or why that is not known."""

    nodes: tuple[tuple[str, int], ...]
    problem: str = ""
    gres: bool = True

    def gpus(self) -> Gpus:
        """Return the best node's GPUs: stable while nodes come and go, so that records do not turn stale."""
        kind, count = max(self.nodes, key=lambda node: node[1], default=("", 0))
        return Gpus((f"slurm {kind}",) * count, problem=self.problem or None)

    def lacking(self, gpus: int, nodes: int) -> str | None:
        """Return why `nodes` nodes with `gpus` GPUs in all cannot be had, or None."""
        if self.problem:
            return f"needs {gpus} GPUs: {self.problem}"
        each = -(-gpus // nodes)
        fit = sum(1 for _, count in self.nodes if count >= each or not self.gres)
        if fit >= nodes:
            return None
        best = max((count for _, count in self.nodes), default=0)
        return (
            f"needs {nodes} nodes of {each} GPUs: Slurm offers {fit} such of {len(self.nodes)} usable nodes "
            f"(largest: {best} GPUs); slurm: {{partition: NAME}} in site.yaml names another partition"
        )
