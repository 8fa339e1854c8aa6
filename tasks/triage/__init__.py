"""What happened, according to the log: the first error and whose it is, as facts for the verdict.

`read_log` makes one pass in flat memory: scan (lines that matter) -> prefixes (who wrote them) -> signatures and
tracebacks (what they mean) -> blame (which of them is the cause). Signatures are data (`signatures.yaml`); facts about
a run that went well come from its own banners. Tracebacks that a program prints while it goes on ("Import of X failed
with: Traceback") count for nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from tasks.triage.blame import MOST_FINDINGS, Blame, short
from tasks.triage.facts import ErrorKind, Finding, Frame, LogFacts
from tasks.triage.patterns import compile_user
from tasks.triage.prefixes import split
from tasks.triage.scan import Watch, scan
from tasks.triage.signatures import shipped
from tasks.triage.tracebacks import HEADER, Reader

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tasks.triage.prefixes import Part
    from tasks.triage.scan import Line
    from tasks.triage.signatures import Signature
    from tasks.triage.tracebacks import Group

__all__ = ["MOST_FINDINGS", "ErrorKind", "Finding", "Frame", "LogFacts", "read_log"]

MOST_TRACEBACKS = 2000  # read frame by frame between two signs of progress
MOST_IMPORTS = 100  # different "Skipping import." lines kept
MOST_ECHOES = 20_000  # counted of one signature between two signs of progress; a log may consist of nothing else
MOST_VAIN = 20_000  # lines that hold the same needles and match nothing ("ValueError: "), between two signs of progress

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
        self.blame = Blame()
        self.echoes: Counter[str] = Counter()
        self.vain: Counter[tuple[bytes, ...]] = Counter()
        self.warnings: dict[str, tuple[int, str, int]] = {}
        self.at: dict[str, int] = {}
        self.import_lines: dict[str, int] = {}
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
                self.blame.traceback(group)
            self._poll()
            return
        for part in split(line.text):
            closed = self.tracebacks.feed(line.number, part.stream, part.text) if self._follow(part) else ()
            open_ = self.tracebacks.open.get(part.stream)
            if open_ is not None and (open_.chained or not open_.root.text):
                open_.epoch = self.blame.epoch
            if line.needles:
                self._banners(line, part)
                self._match(line, part, open_)
            for group in closed:
                self.blame.traceback(group)
        self._poll()

    def _poll(self) -> None:
        self.watch.every = bool(self.tracebacks.open) or any(u.needles is None for u in self.waiting.values())

    def _follow(self, part: Part) -> bool:
        """Tell whether tracebacks are still worth reading: a log may consist of nothing else."""
        self.read += HEADER in part.text
        if self.read <= MOST_TRACEBACKS:
            return True
        if not self.watch.paused.issuperset(BANNERS["traceback"]):
            self.watch.pause(*BANNERS["traceback"])
            for group in self.tracebacks.finish():
                self.blame.traceback(group)
        return False

    def _users(self, line: Line) -> None:
        for text, pattern in list(self.waiting.items()):
            if pattern.found_in(line.text) or any(pattern.found_in(part.text) for part in split(line.text)):
                self.found[text] = line.number
                self.watch.drop(*self._own(pattern.needles or ()))
                del self.waiting[text]

    def _own(self, needles: Iterable[bytes]) -> set[bytes]:
        """Return those of the needles of a user's pattern or a signature that nobody else needs."""
        others = [s.needles for s in self.signatures] + list(BANNERS.values())
        others += [u.needles or () for u in self.waiting.values()]
        return {needle for needle in needles if sum(needle in other for other in others) <= 1}

    def _banners(self, line: Line, part: Part) -> None:
        """Note what the run says about itself."""
        text, number = part.text, line.number
        if part.actor:
            for name, pattern in (("megatron", MEGATRON), ("dtensor", DTENSOR)):
                if name not in self.at and pattern.match(part.actor):
                    self.at[name] = number
                    self.watch.drop(*BANNERS[name])
        if "Initializing lm_policy workers" in text:
            self.at.setdefault("started", number)
            self.watch.drop(*BANNERS["started"])
        if "Skipping import." in text and len(self.import_lines) < MOST_IMPORTS:
            self.at.setdefault("import", number)
            self.import_lines[short(text)] = number
        if self.skip_line is None and SKIP.match(text):
            self.skip_line = short(line.text)
        if self.early_end is None and EARLY.match(text):
            self.early_end = short(text)
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
        self.blame.progress()
        self.read = 0
        self.echoes.clear()
        self.vain.clear()
        self.watch.resume()

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
            self.echoes[signature.id] += 1
            if self.echoes[signature.id] > MOST_ECHOES:
                self.watch.pause(*self._own(signature.needles))
            if signature.kind == "warning":
                at, said, times = self.warnings.get(signature.id, (number, short(part.text), 0))
                self.warnings[signature.id] = (at, said, times + part.times)
            else:
                self.blame.known(signature, signature.kind, number, part.text, part.times)
                if group is not None:
                    group.known = group.known or not signature.symptom
            return
        self.vain[line.needles] += 1
        if self.vain[line.needles] > MOST_VAIN:
            kept = {n for own in [*BANNERS.values(), *(u.needles or () for u in self.waiting.values())] for n in own}
            self.watch.pause(*set(line.needles) - kept)

    def result(self) -> LogFacts:
        """Close what is open and return the facts."""
        for group in sorted(self.tracebacks.finish(), key=lambda g: g.start):
            self.blame.traceback(group)
        first, findings, root = self.blame.outcome(done="done" in self.at)
        bridge = root.bridge_frames() if root else ()
        raised = bool(bridge) and root is not None and not root.importing()
        return LogFacts(
            lines=self.watch.lines,
            size_bytes=self.watch.size_bytes,
            first=first,
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
            root_error=short(root.root.text) or None if root else None,
            dtensor_worker="dtensor" in self.at,
            workers_ready="ready" in self.at,
            setup_complete="setup" in self.at,
            starts=self.starts,
            step_resets=self.resets,
            early_end=self.early_end,
            done_line=self.at.get("done"),
            import_line=self.at.get("import"),
            import_lines=tuple(self.import_lines),
            stale_weights=any(name in self.warnings for name in STALE),
            warning_lines={name: line for name, (line, _, _) in self.warnings.items()},
        )
