"""Python tracebacks in a log that several processes write at once: frames, the root error, the first Bridge frame.

A reader feeds each line with the name of its stream (Ray prefix, rank label). A group is what Python prints for one
uncaught exception: a chain of blocks, the first of which is the root. Ray puts the worker's frames behind the driver's
in one block (`RayTaskError(X): ray::Worker.method() (pid=...)`, then frames again), so the deepest frame is the last.

>>> reader = Reader({})
>>> log = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "ValueError: x"]
>>> for number, text in enumerate(log, 1):
...     _ = reader.feed(number, "", text)
>>> [(g.root.text, g.root.frames[-1].function) for g in reader.finish()]
[('ValueError: x', 'f')]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.triage.prefixes import PREFIX_STARTS

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADER = "Traceback (most recent call last):"
BRIDGE = "megatron/bridge/"
MOST_FRAMES = 400  # kept of one block; a RecursionError prints a thousand
MOST_STREAMS = 256  # open at once; the oldest is closed
PATIENCE = 40  # lines of the same stream that belong to no traceback before it counts as cut off
FARTHEST = 400  # lines of all streams behind its last line after which a traceback is over

FRAME = re.compile(r'^[\s|+]*File "([^"\n]{1,1024})", line (\d{1,9})(?:, in (\S.{0,199}))?')
ERROR = re.compile(r"^(?:[|+] )*[A-Za-z_][\w.]{0,199}(?:\[[^\]]{0,99}\])?(?::|$|\s*\()")
CHAIN = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
RAY_CALL = re.compile(r"ray::[\w.:<>-]{1,200}\(\)\s?\(pid=")
CAUGHT = re.compile(r"\b(?:failed with|due to|ignored|ignoring|caught|suppressed|skipped)\W{0,3}$", re.IGNORECASE)
STOPPED = ("KeyboardInterrupt", "SystemExit: 0", "SystemExit: 143", "SystemExit: 130")


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a traceback: a file of the user's checkout where it could be mapped, line from 1, function."""

    file: str
    line: int
    function: str


@dataclass(slots=True)
class Block:
    """Frames, outermost first, and the exception line behind them (empty if the log ends before it)."""

    frames: list[Frame] = field(default_factory=list)
    line: int = 0
    text: str = ""


@dataclass(slots=True)
class Group:
    """One printed traceback with its chain. `caught`: the program says that it went on without the thing."""

    stream: str
    start: int
    caught: bool
    blocks: list[Block] = field(default_factory=lambda: [Block()])
    known: bool = False  # a signature explains one of its lines
    last: int = 0  # the line that was read last
    epoch: int = 0  # the reader's own mark, set while lines come
    idle: int = 0
    chained: bool = False

    @property
    def root(self) -> Block:
        """Return the first block of the chain that has an error, else the first."""
        return next((b for b in self.blocks if b.text), self.blocks[0])

    def bridge_frames(self) -> tuple[Frame, ...]:
        """Return the Bridge frames of the first block that has some, outermost first."""
        for block in self.blocks:
            if found := tuple(f for f in block.frames if BRIDGE in f.file.replace("\\", "/")):
                return found
        return ()

    def deepest(self) -> Frame | None:
        """Return where the root error was raised: the last frame of the root block, Ray's own plumbing passed over."""
        candidates = [b for b in [self.root, *self.blocks] if b.frames]
        for block in candidates:
            if "/ray/_private/" not in block.frames[-1].file:
                return block.frames[-1]
        return candidates[0].frames[-1] if candidates else None

    def importing(self) -> bool:
        """Tell whether the Bridge was only being imported and the error was raised elsewhere."""
        deepest, frames = self.deepest(), self.bridge_frames()
        return bool(frames) and deepest not in frames and all(f.function == "<module>" for f in frames)


class Reader:
    """Follow the open tracebacks of all streams. `path_map` replaces path prefixes, the longest first."""

    def __init__(self, path_map: Mapping[str, str]) -> None:
        self.open: dict[str, Group] = {}
        self._prefixes = sorted(
            ((old.rstrip("/"), new.rstrip("/")) for old, new in path_map.items() if old.rstrip("/")),
            key=lambda pair: -len(pair[0]),
        )

    def ignores(self, line: str) -> bool:
        """Tell whether `line`, which begins no traceback, belongs to none of the open streams."""
        return not any(line.startswith(stream) if stream else line[:1] not in PREFIX_STARTS for stream in self.open)

    def feed(self, number: int, stream: str, text: str) -> list[Group]:
        """Take one line; return the groups that it closes."""
        closed = self.expire(number)
        group = self.open.get(stream)
        at = text.find(HEADER)
        if at >= 0:
            closed += self._header(number, stream, text[:at], group)
        elif group is not None:
            group.last = number
            closed += self._continue(number, text, group)
        elif RAY_CALL.search(text):
            closed += self._begin(Group(stream, number, caught=False))
        return closed

    def expire(self, number: int) -> list[Group]:
        """Close the oldest group if nothing came for it for long."""
        oldest = next(iter(self.open.values()), None)
        return [self._close(oldest)] if oldest is not None and number - oldest.last > FARTHEST else []

    def finish(self) -> list[Group]:
        """Close what is open: the log ended inside these tracebacks."""
        left = [g for g in self.open.values() if g.blocks[0].frames or g.blocks[0].text]
        return [self._close(group) for group in left]

    def _header(self, number: int, stream: str, before: str, group: Group | None) -> list[Group]:
        if group is not None and group.chained:
            group.blocks.append(Block())
            group.chained, group.last = False, number
            return []
        closed = [self._close(group)] if group is not None else []
        caught = CAUGHT.search(before.rstrip()) is not None or before.startswith(("INFO:", "DEBUG:", "WARNING:"))
        return closed + self._begin(Group(stream, number, caught=caught))

    def _begin(self, group: Group) -> list[Group]:
        closed = []
        if len(self.open) >= MOST_STREAMS:
            closed.append(self._close(next(iter(self.open.values()))))
        group.last = group.start
        self.open[group.stream] = group
        return closed

    def _close(self, group: Group) -> Group:
        self.open.pop(group.stream, None)
        if group.root.text.startswith(STOPPED):
            group.caught = True
        return group

    def _continue(self, number: int, text: str, group: Group) -> list[Group]:
        block = group.blocks[-1]
        frame = FRAME.match(text)
        if frame:
            if block.text:  # frames after an error: Ray's worker behind the driver, without a word between
                block = Block()
                group.blocks.append(block)
            if len(block.frames) < MOST_FRAMES:
                block.frames.append(Frame(self.mapped(frame[1]), int(frame[2]), (frame[3] or "").strip()))
            else:
                block.frames[-1] = Frame(self.mapped(frame[1]), int(frame[2]), (frame[3] or "").strip())
            group.chained, group.idle = False, 0
            return []
        if CHAIN.match(text):
            group.chained, group.idle = True, 0
            return []
        if RAY_CALL.search(text):
            if group.chained:
                group.blocks.append(Block())
                group.chained = False
            group.idle = 0
            return []
        if not text.strip() or (text[:1].isspace() and not block.text):
            group.idle += 1
        elif not block.text and (block.frames or group.chained or len(group.blocks) > 1) and ERROR.match(text):
            block.line, block.text, group.idle = number, text, 0
        elif not block.text and not block.frames and ERROR.match(text) and group.idle == 0:
            block.line, block.text = number, text  # Ray prints a chained cause without frames
        elif block.text.endswith(":") and not group.chained:
            block.text = f"{block.text} {text.strip()}"  # the message begins on a line of its own
        elif block.text and not group.chained:
            return [self._close(group)]
        else:
            group.idle += 1
        return [self._close(group)] if group.idle > PATIENCE else []

    def mapped(self, file: str) -> str:
        """Return `file` with the longest known prefix replaced, at a path boundary."""
        for old, new in self._prefixes:
            if file == old or file.startswith(old + "/"):
                return new + file[len(old) :]
        return file
