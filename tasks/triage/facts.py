"""What a log says: the dataclasses that triage hands to the verdict. Facts only, nothing is decided here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tasks.triage.tracebacks import Frame

__all__ = ["ErrorKind", "Finding", "Frame", "LogFacts"]

ErrorKind = Literal["infrastructure", "environment", "configuration", "change", "undecided"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One known error, or an uncaught exception.

    `line` counts from 1 and is that of its first occurrence; `echoes` counts the others (other ranks, Ray's "repeated
    7x"), up to about 20,000 between two signs of progress; `recovered`: the run got on after it (retried, or caught and
    only logged).
    """

    signature: str
    kind: ErrorKind
    line: int
    text: str
    remedy: str
    echoes: int
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class LogFacts:
    """All that one log says.

    `first` is the earliest error that was not overcome; `findings` holds all in order of lines, at most MOST_FINDINGS.
    `bridge_frame` is the first frame of the Bridge in the first traceback that was not caught, `bridge_frames` all of
    them (the last is where the Bridge was left), `root_frame` where its root error `root_error` was raised. There is no
    `bridge_frame` if the Bridge was only on the way: being imported, when an import of its own failed elsewhere.
    `last_step` is (i, N) of the last banner; N is what the run believes, not what was asked for.
    `workers_started`: the policy's workers began to be built; `workers_ready`, `setup_complete`: that they were, and
    all else too. `starts` counts set-ups and `step_resets` banners that went back: several runs in one log.
    `import_lines`: the different "Skipping import." lines, each naming the conversion that was reused.
    `stale_weights`: a warning says that parameters kept values which are not the checkpoint's.
    """

    lines: int
    size_bytes: int
    first: Finding | None
    findings: tuple[Finding, ...]
    bridge_frame: Frame | None
    megatron_worker: bool
    skip_line: str | None
    import_skipped: bool
    workers_started: bool
    last_step: tuple[int, int] | None
    training_done: bool
    expected: dict[str, bool]
    forbidden: dict[str, int | None]
    warnings: tuple[str, ...]
    bridge_frames: tuple[Frame, ...] = ()
    root_frame: Frame | None = None
    root_error: str | None = None
    dtensor_worker: bool = False
    workers_ready: bool = False
    setup_complete: bool = False
    starts: int = 0
    step_resets: int = 0
    early_end: str | None = None
    done_line: int | None = None
    import_line: int | None = None
    import_lines: tuple[str, ...] = ()
    stale_weights: bool = False
    warning_lines: dict[str, int] = field(default_factory=dict)
