"""Who wrote a line: labels, Ray and rank prefixes taken off, so that the text stands alone.

>>> split("(MegatronPolicyWorker[rank=0] pid=12, ip=192.0.2.2) boom [repeated 7x across cluster]")
[Part(stream='(MegatronPolicyWorker[rank=0] pid=12, ip=192.0.2.2)', actor='MegatronPolicyWorker', text='boom', times=7)]
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Ray writes "(Name[rank=0] pid=12, ip=1.2.3.4) text", "(pid=12)" before the actor has a name, "(raylet)" for itself.
RAY = re.compile(
    r"\((?:(?P<actor>[A-Za-z_][\w.:-]{0,99})(?:\[[^\]\s]{0,40}\])? )?pid=\w{1,20}(?:, ip=[^\s),]{1,64})?\) ?"
    r"|\((?:raylet|gcs_server|autoscaler)(?:[ ,][^)]{0,80})?\) ?"
)
# "[mcore 1step] " of scripts that label their runs, "3: " of srun --label, "[rank3]: " of torch
LABEL = re.compile(r"(?:\[rank\d{1,5}\]: ?|\[[A-Za-z][\w .+:-]{0,38}\] |\d{1,4}: )")
LABEL_RANK = re.compile(r"\[rank\d{1,5}\]: ?")
LOGGED = re.compile(r"(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]\s]{1,99}\] ?")
LEVEL = re.compile(r"(?:ERROR|CRITICAL):[\w.]{1,200}:(?:[\w.]{1,99}:\d{1,6}: )?")
REPEATED = re.compile(r"\s*[\[(]repeated (\d{1,9})x[^\])]{0,60}[\])](?: \(Ray deduplicates.*)?$")

PREFIX_STARTS = tuple("([0123456789")


class Part(NamedTuple):
    """What one process said in a line: its stream, the Ray actor ("" for the driver), the text, how many times."""

    stream: str
    actor: str
    text: str
    times: int


def split(line: str) -> list[Part]:
    """Return the parts of a line: usually one, two if a worker's line was glued to unfinished text of the driver."""
    if "pid=" not in line:
        return [_part(line)]
    for found in RAY.finditer(line):
        at = found.start()
        if at and line[:at].strip() and found["actor"] and LABEL.fullmatch(line[:at]) is None:
            before = RAY.match(LABEL.sub("", line, count=1) if LABEL.match(line) else line)
            if before is None:
                return [_part(line[:at]), _part(line[at:])]
            break
    return [_part(line)]


def _part(line: str) -> Part:
    """Take prefixes off while there are any (a worker's engine has one of its own), at most four."""
    actor, at, times = "", 0, 1
    for _ in range(4):
        if line[at : at + 1] not in PREFIX_STARTS:
            break
        found = RAY.match(line, at) or (LABEL_RANK if actor else LABEL).match(line, at)
        if found is None:
            break
        if found.re is RAY:
            actor = actor or found["actor"] or "?"
        at = found.end()
    rest = line[at:]
    if rest.startswith(("ERROR", "CRITICAL")):
        logged = LOGGED.match(rest) or LEVEL.match(rest)
        rest = rest[logged.end() :] if logged is not None else rest
    repeated = REPEATED.search(rest) if "repeated" in rest else None
    if repeated is not None:
        times, rest = int(repeated[1]), rest[: repeated.start()]
    return Part(line[:at].rstrip(), actor, rest, times)
