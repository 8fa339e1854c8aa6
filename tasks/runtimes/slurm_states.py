"""What Slurm says about a job, read and put into our words. Pure: text in, `Seen` and `Ended` out.

Slurm only explains. Whether a run ended by itself is in the agent's exit.json, and whether it ever began in the
started.json that containers/slurm_start.py makes; a state says why where these two say nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.runtimes.job import Ended

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "%i|%T|%r|%N|%S"  # squeue: id, state, reason, nodes, (expected) start
OVER = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
     "REVOKED")
)  # fmt: skip
WAITING = frozenset(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"))
# reasons with which a job stays pending for ever unless somebody changes the job or the cluster
HOPELESS = frozenset(
    ("BadConstraints", "PartitionTimeLimit", "PartitionNodeLimit", "DependencyNeverSatisfied", "InvalidAccount",
     "InvalidQOS", "AccountNotAllowed", "QOSNotAllowed")
)  # fmt: skip
SAID = "this attempt was started before"  # containers/slurm_start.py
_MEMORY = re.compile(r"slurmstepd\S*: error: .*(?:exceeded (?:job )?memory limit|oom-kill event)", re.IGNORECASE)
_ENDS = {
    "PREEMPTED": ("preempted", "preempted by another job"),
    "NODE_FAIL": ("node_fail", "a node failed"),
    "BOOT_FAIL": ("node_fail", "a node did not boot"),
    "TIMEOUT": ("time_limit", "stopped at Slurm's time limit; site.yaml `slurm: {time: ...}` caps it"),
    "DEADLINE": ("time_limit", "stopped at Slurm's deadline"),
    "CANCELLED": ("cancelled", "cancelled by somebody else"),
    "REVOKED": ("cancelled", "revoked by the federation"),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """One job as squeue or sacct shows it. `start` is "" or Slurm's local time, expected while it is pending."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""

    @property
    def is_over(self) -> bool:
        """Return whether no process of the job can be alive; COMPLETING is not over."""
        return self.state in OVER

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        when = f", expected to start {self.start}" if self.state == "PENDING" and self.start else ""
        return f"job {self.id} {self.state}{why}{f' on {self.nodes}' if self.nodes else ''}{when}"


def parse(text: str) -> list[Seen]:
    """Return the jobs of `squeue -o FORMAT` or of sacct's five columns, lowest id first; other lines are skipped."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) == 5 and parts[0].isdecimal():
            job, state, reason, nodes, start = parts
            unknown = ("N/A", "Unknown", "(null)", "None assigned")
            kept = ("" if part in unknown else part for part in (reason, nodes, start))
            found.append(Seen(job, state.split()[0] if state else "", *kept))  # sacct: "CANCELLED by 1000"
    return sorted(found, key=lambda seen: int(seen.id))


def gpus_of(gres: str) -> tuple[str, int]:
    """Return type and number of GPUs of a gres text: "gpu:h100:8(S:0-1),nvme:1" -> ("h100", 8)."""
    counts = [
        (match["type"] or "gpu", int(match["count"]))
        for match in re.finditer(r"(?:^|,)gpu:(?:(?P<type>[^:,(]+):)?(?P<count>\d+)", gres)
    ]
    return (counts[0][0], sum(count for _, count in counts)) if counts else ("", 0)


def judge(
    seen: Seen | None, exit_record: Mapping[str, Any] | None, *, started: bool, output: str, waited_s: float
) -> Ended:
    """Return how a job that is over ended. `output` is the end of the job's own output, `waited_s` for exit.json."""
    rc = exit_record.get("rc") if exit_record else None
    last = " ".join(output.split())[-400:]
    name = str(seen) if seen else "the job, of which Slurm knows nothing any more,"
    if (seen and seen.state == "OUT_OF_MEMORY") or _MEMORY.search(output):
        return Ended(rc, "oom", f"{name}: killed for memory. {last}")
    if SAID in output:
        return Ended(rc, "requeued", f"{name}: Slurm started it again, which was refused")
    if seen and seen.state in _ENDS:
        reason, text = _ENDS[seen.state]
        return Ended(rc, reason, f"{name}: {text}. {last}".strip())
    if exit_record is not None:
        return Ended(rc, "exited", name)
    if seen and not started:
        hint = "" if last else "Does every node see the build folder, under the same path? "
        return Ended(None, "not_started", f"{name}: the agent never started. {hint}{last}".strip())
    if seen and seen.state == "FAILED":
        return Ended(None, "killed", f"{name}: the agent was killed. {last}".strip())
    text = f"{name} left no exit.json within {waited_s:g} s: is the build folder on a shared file system? {last}"
    return Ended(None, "engine_lost", text.strip())
