"""Which error of a log is the cause: count, fold, and choose.

The earliest error wins, with three exceptions that keep the blame right:
- overcome: a transient error (retried, or an exception that was only logged) before the last sign of progress;
- symptom (actor died, collective timed out): gives way to a real error just behind it, because Ray delivers late;
- wrapper ("refit failed", "could not load"): gives way to a known, more exact error just behind it, its own cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.triage.facts import Finding

if TYPE_CHECKING:
    from tasks.triage.facts import ErrorKind
    from tasks.triage.signatures import Signature
    from tasks.triage.tracebacks import Group

MOST_FINDINGS = 100  # kept; a log that has more is repeating itself
KEPT = 10  # of those that were overcome, once there are so many
LATE = 200  # lines within which an error behind a symptom may be its cause
INSIDE = 60  # lines within which an error behind a wrapper is what it wraps
LONGEST_TEXT = 500  # characters of a finding's text
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # nothing that a report may not carry

UNCAUGHT = ("uncaught-exception", "undecided", "An exception without a Bridge frame; compare with the baseline.")
IMPORTING = ("import-failed", "undecided", "Importing the Bridge ended in an error elsewhere; look at the probe.")
BRIDGE_FRAME = ("bridge-frame", "change", "The exception came through the Bridge; start at the frame named here.")


def short(text: str) -> str:
    """Return a text for people: bounded, without control characters."""
    return CONTROL.sub("\ufffd", text.strip()[:LONGEST_TEXT])


@dataclass(slots=True)
class _Error:
    """A finding while it is being counted. `epoch`: how many signs of progress had been seen; `known`: a signature."""

    signature: str
    kind: ErrorKind
    line: int
    text: str
    remedy: str
    times: int
    epoch: int
    known: bool
    transient: bool
    symptom: bool
    wrapper: bool
    recovered: bool = False

    def finding(self) -> Finding:
        """Return it as it is handed out."""
        return Finding(self.signature, self.kind, self.line, self.text, self.remedy, self.times - 1, self.recovered)


class Blame:
    """The errors and tracebacks of one log, in the order of its lines."""

    def __init__(self) -> None:
        self.epoch = 0
        self._errors: dict[tuple[str, str, int], _Error] = {}
        self._groups: list[Group] = []

    def progress(self) -> None:
        """The driver got on: what was transient before is overcome."""
        self.epoch += 1

    def known(self, signature: Signature, kind: ErrorKind, line: int, text: str, times: int) -> None:
        """Count a line that matches a signature."""
        error = _Error(
            signature.id, kind, line, short(text), signature.remedy, times, self.epoch,
            known=True, transient=signature.transient, symptom=signature.symptom, wrapper=signature.wrapper,
        )  # fmt: skip
        self._count(error, "")

    def traceback(self, group: Group) -> None:
        """Judge a traceback that has ended: a candidate for the root, and an error unless a signature explains it."""
        if group.caught:
            return
        if len(self._groups) >= MOST_FINDINGS:
            self._groups = self._groups[:KEPT] + [g for g in self._groups[KEPT:] if g.epoch == self.epoch]
        if len(self._groups) < MOST_FINDINGS:
            self._groups.append(group)
        if group.known:
            return
        text = short(group.root.text) or f"traceback cut off in {group.deepest() or 'its first line'}"
        name, kind, remedy = BRIDGE_FRAME if group.bridge_frames() else UNCAUGHT
        if group.importing():
            name, kind, remedy = IMPORTING
        error = _Error(
            name, kind, group.root.line or group.start, text, remedy, 1, group.epoch,  # type: ignore[arg-type]
            known=False, transient=True, symptom=False, wrapper=False,
        )  # fmt: skip
        self._count(error, re.sub(r"\d+", "#", text))

    def _count(self, error: _Error, detail: str) -> None:
        """Fold an error into its like; a transient one that comes again after progress is a new one."""
        key = (error.signature, detail, error.epoch if error.transient else 0)
        like = self._errors.get(key)
        if like is not None:
            like.times += error.times
            return
        if len(self._errors) >= MOST_FINDINGS:  # what was overcome makes room
            for old in [k for k, e in self._errors.items() if e.transient and e.epoch < self.epoch][KEPT:]:
                del self._errors[old]
        if len(self._errors) < MOST_FINDINGS:
            self._errors[key] = error

    def outcome(self, *, done: bool) -> tuple[Finding | None, tuple[Finding, ...], Group | None]:
        """Return the cause, all findings by line, and the traceback that tells most about the cause."""
        ordered = sorted(self._errors.values(), key=lambda e: e.line)
        for error in ordered:
            error.recovered = error.transient and error.epoch < self.epoch
        first = _first(ordered, done=done)
        overcome = first is not None and first.recovered
        left = [group for group in self._groups if overcome or group.epoch == self.epoch]
        root = min(left, key=lambda group: group.start, default=None)
        return first.finding() if first else None, tuple(e.finding() for e in ordered), root


def _first(errors: list[_Error], *, done: bool) -> _Error | None:
    """Choose the cause.

    If all exceptions were only logged and the training never ended, the earliest of them is the best guess.
    """
    left = [e for e in errors if not e.recovered]
    if not left:
        logged = [e for e in errors if not e.known]
        return logged[0] if logged and not done else None
    first = left[0]
    if first.symptom:
        own = (UNCAUGHT[0], first.line)  # the traceback that ends in the symptom itself tells no more than it
        others = (e for e in left if not e.symptom and (e.signature, e.line) != own)
        first = next((e for e in others if e.line - first.line <= LATE), first)
    if first.wrapper:
        exact = (e for e in left if e.known and not (e.symptom or e.wrapper) and 0 < e.line - first.line <= INSIDE)
        first = next(exact, first)
    return first
