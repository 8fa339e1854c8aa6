"""Lines of a log, fast: only those that may matter are handed out, whatever bytes the log is made of.

One pass in blocks. Each block is searched for all needles at once: two tables over pairs of bytes (numpy) mark where a
needle may begin, and only there Python looks. The consumer may ask for every line (`Watch.every`) while it reads a
traceback, and may drop needles that have told all they can. Memory is bounded by the block, not by file or line.

A line is what a terminal would show: colours removed, the text behind the last carriage return, NUL bytes dropped, at
most LONGEST_LINE characters; undecodable bytes become U+FFFD.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK = 1 << 18  # bytes; larger ones leave the cache and are slower (measured 1.6 s against 2.2 s for 200 MB)
LONGEST_LINE = 16384  # bytes kept of a line
WINDOW = 8  # bytes of a needle that are compared at once
SHORT = 1  # the mark of needles shorter than that; longer ones share the other seven bits
MOST_INDICES = 64  # kept per process: one per set of needles
SHORTEST = 3  # bytes of a needle at least

ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)|[@-Z\\^_])")


class Line(NamedTuple):
    """One line: its number from 1, its text as a terminal would show it, and the needles that it may hold.

    A needle that contains another one of the watched is not named, that one is.
    """

    number: int
    text: str
    needles: tuple[bytes, ...]


class Watch:
    """What the scan looks for; the consumer changes it while the scan runs.

    `lines` and `size_bytes` count what has been read so far; `every` asks for all lines.
    """

    def __init__(self, needles: set[bytes]) -> None:
        self.needles = {n for n in needles if len(n) >= SHORTEST}
        self.paused: set[bytes] = set()
        self.resumed = 0
        self.every = False
        self.lines = 0
        self.size_bytes = 0

    def drop(self, *needles: bytes) -> None:
        """Stop looking for `needles`: there is nothing more to learn from them."""
        if self.needles & set(needles):
            self.needles -= set(needles)

    def pause(self, *needles: bytes) -> None:
        """Stop looking for `needles` until `resume`: so many lines hold them that more would tell nothing new."""
        self.paused |= self.needles & set(needles)
        self.needles -= self.paused

    def resume(self) -> None:
        """Look again for what was paused."""
        if self.paused:
            self.needles |= self.paused
            self.paused.clear()
            self.resumed += 1


def clean(raw: bytes) -> str:
    r"""Return the text of one line without its line feed, colours or overwritten parts.

    >>> clean(b"10%\r\x1b[32m100%\x1b[0m\r")
    '100%'
    """
    if b"\x1b" in raw:
        raw = ESCAPES.sub(b"", raw)
    raw = raw.rstrip(b"\r")
    if b"\r" in raw:
        raw = next((part for part in reversed(raw.split(b"\r")) if part.strip()), b"")
    return raw[:LONGEST_LINE].replace(b"\0", b"").decode("utf-8", "replace").rstrip()


def scan(path: Path, watch: Watch) -> Iterator[Line]:
    """Yield the lines of `path` that hold one of the watched needles, or all of them while `watch.every` is set.

    A missing file has no lines. OSError otherwise as the file system gives it.
    """
    try:
        stream = path.open("rb", buffering=0)
    except FileNotFoundError:
        return
    with stream:
        rest = b""
        while chunk := stream.read(BLOCK):
            watch.size_bytes += len(chunk)
            block = rest + chunk
            end = block.rfind(b"\n") + 1
            rest = _fold(block[end:])
            if end:
                yield from _lines(block[:end], watch)
        if rest:
            yield from _lines(rest + b"\n", watch)


def _fold(rest: bytes) -> bytes:
    """Bound a line without an end: what a progress bar overwrote goes first, then what is too long."""
    if len(rest) <= 2 * LONGEST_LINE:
        return rest
    cut = rest.rfind(b"\r", 0, -1)
    return rest[max(cut, 0) :][:LONGEST_LINE]


def _lines(block: bytes, watch: Watch) -> Iterator[Line]:
    """Yield the wanted lines of a block of whole lines; follow `watch` while doing so."""
    import numpy as np

    if b"\x1b" in block:  # a colour in the middle of a word would hide a needle
        block = block.replace(b"\x1b[36m", b"").replace(b"\x1b[0m", b"")  # Ray's own, at half the cost
        block = ESCAPES.sub(b"", block) if b"\x1b" in block else block
    if b"\0" in block:
        block = block.replace(b"\0", b"")
    ends: list[int] = np.flatnonzero(np.frombuffer(block, np.uint8) == 10).tolist()
    first = watch.lines
    watch.lines += len(ends)
    wanted, resumed = _hits(block, ends, watch), watch.resumed
    index, hit = -1, next(wanted, None)
    while True:
        if resumed != watch.resumed:  # what was not looked for a moment ago may be in the rest of this block
            wanted, resumed = _hits(block, ends, watch), watch.resumed
            hit = next(wanted, None)
        while hit is not None and hit[0] <= index:
            hit = next(wanted, None)
        if watch.every and index + 1 < len(ends):
            index += 1
        elif hit is not None:
            index = hit[0]
        else:
            return
        start = ends[index - 1] + 1 if index else 0
        found = hit[1] if hit is not None and hit[0] == index else ()
        yield Line(first + index + 1, clean(block[start : ends[index]]), found)


class _Index(NamedTuple):
    """Needles prepared for one search: two tables over pairs of bytes, whole windows as numbers, windows by start."""

    first: Any
    second: Any
    windows: Any
    heads: dict[bytes, tuple[tuple[bytes, int], ...]]


_indices: dict[frozenset[bytes], _Index] = {}


def _hits(block: bytes, ends: list[int], watch: Watch) -> Iterator[tuple[int, tuple[bytes, ...]]]:
    """Yield index and needles of the lines of `block` that hold some, ascending, each once."""
    import numpy as np

    needles = frozenset(watch.needles)
    index = _indices.get(needles)
    if index is None:
        if len(_indices) >= MOST_INDICES:
            _indices.clear()
        index = _indices[needles] = _build(needles)
    data = np.frombuffer(block + b"\n" * WINDOW, np.uint8)
    pairs = data[:-1].astype(np.uint16)
    pairs <<= 8
    pairs |= data[1:]
    marks = index.first.take(pairs[:-6])
    marks &= index.second.take(pairs[2:-4])
    places = np.flatnonzero(marks.view(np.bool_))
    whole = np.zeros(len(places), np.uint64)
    for offset in range(0, WINDOW, 2):
        whole <<= np.uint64(16)
        whole |= pairs.take(places + offset)
    nearest = index.windows.take(np.searchsorted(index.windows, whole), mode="clip")
    places = places[(nearest == whole) | (marks[places] & SHORT != 0)]
    line = -1
    found: tuple[bytes, ...] = ()
    for place in places.tolist():
        for needle, offset in index.heads.get(block[place : place + SHORTEST], ()):
            if place < offset or not block.startswith(needle, place - offset):
                continue
            if line >= 0 and place <= ends[line]:
                found = found if needle in found else (*found, needle)
                continue
            if found:
                yield line, found
            line, found = bisect_left(ends, place, line + 1), (needle,)
    if found:
        yield line, found


def _build(needles: frozenset[bytes]) -> _Index:
    """Prepare `needles`; one that contains another is left to that one."""
    import numpy as np

    first, second = np.zeros(65536, np.uint8), np.zeros(65536, np.uint8)
    windows = [0]
    heads: dict[bytes, list[tuple[bytes, int]]] = {}
    for number, needle in enumerate(sorted(needles)):
        if any(other != needle and other in needle for other in needles):
            continue
        offset = max(range(max(1, len(needle) - WINDOW + 1)), key=_rarity_in(needle))
        window = needle[offset : offset + WINDOW]
        heads.setdefault(window[:SHORTEST], []).append((needle, offset))
        bit = SHORT
        if len(window) == WINDOW:
            bit = 2 << (number % 7)
            windows.append(int.from_bytes(window, "big"))
        first[window[0] << 8 | window[1]] |= bit
        if len(window) > SHORTEST:
            second[window[2] << 8 | window[3]] |= bit
        else:
            second[window[2] << 8 : (window[2] + 1) << 8] |= bit
    return _Index(first, second, np.array(sorted(windows), np.uint64), {h: tuple(n) for h, n in heads.items()})


def _rarity_in(needle: bytes) -> Callable[[int], int]:
    """Guess how rare a window is in a log: capitals and signs are, the commonest letters and "Error" are not."""

    def rarity(at: int) -> int:
        common, usual, window = b" etaoinsrl", b"bcdfghjkmpquvwxyz0123456789./_-", needle[at : at + WINDOW]
        return sum(0 if byte in common else 1 if byte in usual else 3 for byte in window) - 9 * (b"Error" in window)

    return rarity
