"""What happened, according to the log: the first error and whose it is, as facts for the verdict.

`read_log` makes one pass in flat memory. The earliest known error wins, its repeats are folded into it, later ones are
listed as what followed. Three rules keep the blame right:
- what was retried or caught and then overcome (a later sign of progress by the driver) is not the cause;
- a symptom (actor died, collective timed out) gives way to a real error just behind it, because Ray delivers late;
- tracebacks that a program prints while going on ("Import of X failed with: Traceback") count for nothing.
Signatures are data (`signatures.yaml`). Facts about a run that went well come from its own banners.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tasks.triage.facts import ErrorKind, Finding, Frame, LogFacts, retry_class
from tasks.triage.patterns import compile_user
from tasks.triage.prefixes import split
from tasks.triage.scan import Watch, scan
from tasks.triage.signatures import shipped
from tasks.triage.tracebacks import HEADER, Reader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tasks.triage.patterns import UserPattern
    from tasks.triage.prefixes import Part
    from tasks.triage.scan import Line
    from tasks.triage.signatures import Signature
    from tasks.triage.tracebacks import Group

__all__ = ["ErrorKind", "Finding", "Frame", "LogFacts", "read_log", "retry_class"]

MOST_FINDINGS = 100  # kept; a log that has more is repeating itself
KEPT = 10  # of those that were overcome, once there are so many
MOST_TRACEBACKS = 2000  # read frame by frame between two signs of progress
LATE = 200  # lines within which an error behind a symptom may be its cause
LONGEST_TEXT = 500  # characters of a finding's text

QUIET = re.compile(
    r"^(?:INFO|DEBUG|WARN|WARNING|[Ww]arning)[: ]|^\++ |^MasterConfig\(|\b(?:User|Future|Deprecation|Runtime)Warning: "
)
SKIP = re.compile(r"^(?:SKIP[: ]|FAST: Skipping|Target step \d+ reached, skipping run)")
STEP = re.compile(r"={3,} Step (\d{1,9})/(\d{1,9}) ={3,}")
DONE = re.compile(r"(?:^|\])\s*Max number of steps has been reached")
EARLY = re.compile(r"^Timeout (?:has been )?reached, stopping training early")
READY = re.compile(r"\u2713 \d+ workers initialized in ")
MEGATRON = re.compile(r"^Megatron\w*PolicyWorker")
DTENSOR = re.compile(r"^DTensor\w*PolicyWorker")
STALE = ("unmapped-parameter", "missing-hf-key", "whitelisted-shape")

BANNERS = {
    "skip": (b"SKIP", b"FAST: Skipping", b", skipping run"),
    "step": (b"= Step ",),
    "done": (b"Max number of steps has",),
    "early": (b"reached, stopping training",),
    "started": (b"Initializing lm_policy workers",),
    "ready": (b"workers initialized in",),
    "setup": (b"SETUP COMPLETE",),
    "import": (b"Skipping import.",),
    "megatron": (b"(Megatron",),
    "dtensor": (b"(DTensor",),
    "traceback": (HEADER.encode(), b"ray::"),
}


def read_log(
    path: Path,
    *,
    expect: Sequence[str] = (),
    forbid: Sequence[str] = (),
    path_map: Mapping[str, str] | None = None,
) -> LogFacts:
    """Read a run's log once and return its facts; a missing log has none.

    `expect` and `forbid` are regular expressions searched in each line, with and without its Ray prefix; `path_map`
    maps path prefixes of the run to those of the user's checkout. Raises UserError for an unusable expression.
    """
    reading = _Reading(shipped(), expect, forbid, path_map or {})
    for line in scan(path, reading.watch):
        reading.take(line)
    return reading.result()


class _Reading:
    """The state of one pass."""

    def __init__(
        self, signatures: Sequence[Signature], expect: Sequence[str], forbid: Sequence[str], paths: Mapping[str, str]
    ) -> None:
        self.users = {text: compile_user(text, "expect_log") for text in expect}
        self.users.update({text: compile_user(text, "forbid_log") for text in forbid})
        self.expect, self.forbid = tuple(expect), tuple(forbid)
        self.found: dict[str, int] = {}
        self.waiting = dict(self.users)
        self.signatures = signatures
        self.by_needles: dict[tuple[bytes, ...], tuple[Signature, ...]] = {}
        needles = {n for s in signatures for n in s.needles} | {n for group in BANNERS.values() for n in group}
        self.watch = Watch(needles.union(*(u.needles or () for u in self.users.values())))
        self.tracebacks = Reader(paths)
        self.read = 0
        self.groups: list[tuple[Group, int]] = []
        self.errors: dict[tuple[str, str, int], _Error] = {}
        self.warnings: dict[str, tuple[int, str, int]] = {}
        self.epoch = 0
        self.at: dict[str, int] = {}
        self.skip_line: str | None = None
        self.early_end: str | None = None
        self.step: tuple[int, int] | None = None
        self.starts = self.resets = 0
        self._poll()

    def take(self, line: Line) -> None:
        """Take one line of the log."""
        if self.waiting:
            self._users(line)
        if not line.needles and self.tracebacks.ignores(line.text):
            for group in self.tracebacks.expire(line.number):
                self._traceback(group)
            self._poll()
            return
        for part in split(line.text):
            closed = self.tracebacks.feed(line.number, part.stream, part.text) if self._follow(part) else ()
            if line.needles:
                self._banners(line, part)
                self._match(line, part, self.tracebacks.open.get(part.stream))
            for group in closed:
                self._traceback(group)
        self._poll()

    def _poll(self) -> None:
        self.watch.every = bool(self.tracebacks.open) or any(u.needles is None for u in self.waiting.values())

    def _follow(self, part: Part) -> bool:
        """Tell whether tracebacks are still worth reading: a log may consist of nothing else."""
        if HEADER in part.text:
            self.read += 1
        return self.read <= MOST_TRACEBACKS or bool(self.tracebacks.open)

    def _users(self, line: Line) -> None:
        for text, pattern in list(self.waiting.items()):
            if pattern.found_in(line.text) or any(pattern.found_in(part.text) for part in split(line.text)):
                self.found[text] = line.number
                del self.waiting[text]
                self._drop(pattern)

    def _drop(self, pattern: UserPattern) -> None:
        """Forget the needles of a pattern that was found, unless somebody else needs them."""
        kept = {n for u in self.waiting.values() for n in u.needles or ()}
        kept |= {n for s in self.signatures for n in s.needles} | {n for group in BANNERS.values() for n in group}
        self.watch.drop(*set(pattern.needles or ()) - kept)

    def _banners(self, line: Line, part: Part) -> None:
        """Note what the run says about itself."""
        text, number = part.text, line.number
        if part.actor:
            for name, pattern in (("megatron", MEGATRON), ("dtensor", DTENSOR)):
                if name not in self.at and pattern.match(part.actor):
                    self.at[name] = number
                    self.watch.drop(*BANNERS[name])
        for name, words in (("started", "Initializing lm_policy workers"), ("import", "Skipping import.")):
            if words in text and name not in self.at:
                self.at[name] = number
                self.watch.drop(*BANNERS[name])
        if self.skip_line is None and SKIP.match(text):
            self.skip_line = line.text[:LONGEST_TEXT]
        if self.early_end is None and EARLY.match(text):
            self.early_end = text[:LONGEST_TEXT]
        if READY.search(text):
            self._progress("ready", number)
        if text.strip() == "SETUP COMPLETE":
            self.starts += 1
            self._progress("setup", number)
        if DONE.search(text):
            self._progress("done", number)
        banner = STEP.search(text) if "= Step " in text else None
        if banner:
            step = (int(banner[1]), int(banner[2]))
            self.resets += self.step is not None and step[0] < self.step[0]
            self.step = step
            self._progress("step", number)

    def _progress(self, name: str, number: int) -> None:
        """The driver got on: what was transient before is overcome."""
        self.at.setdefault(name, number)
        self.epoch += 1
        self.read = 0

    def _match(self, line: Line, part: Part, group: Group | None) -> None:
        """Match the signatures whose needles are there against one line; the first in the file's order wins."""
        signatures = self.by_needles.get(line.needles)
        if signatures is None:
            signatures = self.by_needles[line.needles] = tuple(
                s for s in self.signatures if any(found in own for found in line.needles for own in s.needles)
            )
        if not signatures or (group is not None and group.caught):
            return
        number, quiet = line.number, QUIET.search(part.text) is not None
        for signature in signatures:
            if quiet and not (signature.any_level or signature.kind == "warning"):
                continue
            if not signature.pattern.search(part.text):
                continue
            text = part.text.strip()[:LONGEST_TEXT]
            if signature.kind == "warning":
                at, said, times = self.warnings.get(signature.id, (number, text, 0))
                self.warnings[signature.id] = (at, said, times + part.times)
            else:
                self._error(_Error(signature.id, signature.kind, number, text, signature.remedy), signature, part.times)
                if group is not None:
                    group.known = group.known or not signature.symptom
            return

    def _error(self, error: _Error, signature: Signature | None, times: int) -> None:
        """Count an error; a transient one that comes again after progress is a new one."""
        error.transient = signature is None or signature.transient
        error.symptom = signature is not None and signature.symptom
        error.epoch = self.epoch
        detail = "" if signature is not None else re.sub(r"\d+", "#", error.text)
        key = (error.signature, detail, self.epoch if error.transient else 0)
        known = self.errors.get(key)
        if known is not None:
            known.times += times
            return
        if len(self.errors) >= MOST_FINDINGS:  # what was overcome makes room
            for old in [k for k, e in self.errors.items() if e.transient and e.epoch < self.epoch][KEPT:]:
                del self.errors[old]
        if len(self.errors) < MOST_FINDINGS:
            error.times = times
            self.errors[key] = error

    def _traceback(self, group: Group) -> None:
        """Judge a traceback that has ended."""
        if group.caught:
            return
        if len(self.groups) >= MOST_FINDINGS:
            self.groups = self.groups[:KEPT] + [g for g in self.groups[KEPT:] if g[1] == self.epoch]
        if len(self.groups) < MOST_FINDINGS:
            self.groups.append((group, self.epoch))
        if group.known:
            return
        root, bridge = group.root, group.bridge_frames()
        text = root.text or f"traceback cut off in {group.deepest() or 'its first line'}"
        name, kind, remedy = UNCAUGHT
        if bridge and group.importing():
            name, kind, remedy = IMPORTING
        elif bridge:
            name, kind, remedy = BRIDGE_FRAME
        self._error(_Error(name, kind, root.line or group.start, text[:LONGEST_TEXT], remedy), None, 1)

    def _root(self, first: _Error | None) -> Group | None:
        """Return the traceback that tells most about the cause: the first that was not overcome."""
        left = [group for group, epoch in self.groups if epoch == self.epoch]
        if first is not None and first.recovered:
            left = [group for group, _ in self.groups]
        return min(left, key=lambda group: group.start, default=None)

    def result(self) -> LogFacts:
        """Close what is open and return the facts."""
        for group in sorted(self.tracebacks.finish(), key=lambda g: g.start):
            self._traceback(group)
        ordered = sorted(self.errors.values(), key=lambda e: e.line)
        for error in ordered:
            error.recovered = error.transient and error.epoch < self.epoch
        first = _first(ordered, done="done" in self.at)
        findings = tuple(e.finding() for e in ordered)
        root = self._root(first)
        bridge = root.bridge_frames() if root else ()
        raised = bool(bridge) and root is not None and not root.importing()
        return LogFacts(
            lines=self.watch.lines,
            size_bytes=self.watch.size_bytes,
            first=first.finding() if first else None,
            findings=findings,
            bridge_frame=bridge[0] if raised else None,
            megatron_worker="megatron" in self.at,
            skip_line=self.skip_line,
            import_skipped="import" in self.at,
            workers_started="started" in self.at or "ready" in self.at,
            last_step=self.step,
            training_done="done" in self.at,
            expected={text: text in self.found for text in self.expect},
            forbidden={text: self.found.get(text) for text in self.forbid},
            warnings=tuple(said + (f" ({n - 1} similar)" if n > 1 else "") for _, said, n in self.warnings.values()),
            bridge_frames=bridge,
            root_frame=root.deepest() if root else None,
            root_error=root.root.text[:LONGEST_TEXT] or None if root else None,
            dtensor_worker="dtensor" in self.at,
            workers_ready="ready" in self.at,
            setup_complete="setup" in self.at,
            starts=self.starts,
            step_resets=self.resets,
            early_end=self.early_end,
            done_line=self.at.get("done"),
            import_line=self.at.get("import"),
            stale_weights=any(name in self.warnings for name in STALE),
            warning_lines={name: line for name, (line, _, _) in self.warnings.items()},
        )


class _Error:
    """A finding while it is being counted."""

    __slots__ = ("epoch", "kind", "line", "recovered", "remedy", "signature", "symptom", "text", "times", "transient")

    def __init__(self, signature: str, kind: str, line: int, text: str, remedy: str) -> None:
        self.signature, self.kind, self.line, self.text, self.remedy = signature, kind, line, text, remedy
        self.times, self.epoch = 1, 0
        self.transient = self.symptom = self.recovered = False

    def finding(self) -> Finding:
        """Return it as it is handed out."""
        kind: ErrorKind = self.kind  # type: ignore[assignment]
        return Finding(self.signature, kind, self.line, self.text, self.remedy, self.times - 1, self.recovered)


UNCAUGHT = ("uncaught-exception", "undecided", "An exception without a Bridge frame; compare with the baseline.")
IMPORTING = ("import-failed", "undecided", "Importing the Bridge ended in an error elsewhere; look at the probe.")
BRIDGE_FRAME = ("bridge-frame", "change", "The exception came through the Bridge; start at the frame named here.")


def _first(errors: Sequence[_Error], *, done: bool) -> _Error | None:
    """Choose the cause: the earliest that was not overcome, where a symptom gives way to what follows closely.

    If all exceptions were only logged and the training never ended, the earliest of them is the best guess.
    """
    open_ = [e for e in errors if not e.recovered]
    if not open_:
        logged = [e for e in errors if e.signature in (UNCAUGHT[0], IMPORTING[0], BRIDGE_FRAME[0])]
        return logged[0] if logged and not done else None
    first = open_[0]
    if first.symptom:
        return next((e for e in open_ if not e.symptom and e.line - first.line <= LATE), first)
    return first
