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
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 1 << 18  # bytes; larger ones leave the cache and are slower (measured 1.6 s against 2.2 s for 200 MB)
LONGEST_LINE = 16384  # bytes kept of a line
TABLES = 8  # needles share eight bits of a byte
WINDOW = 8  # bytes of a needle that the tables know
SHORTEST = 3  # bytes of a needle at least

ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)|[@-Z\\^_])")


class Line(NamedTuple):
    """One line: its number from 1, and its text as a terminal would show it."""

    number: int
    text: str


class Watch:
    """What the scan looks for; the consumer changes it while the scan runs.

    `lines` and `size_bytes` count what has been read so far; `every` asks for all lines.
    """

    def __init__(self, needles: set[bytes]) -> None:
        self.needles = {n for n in needles if len(n) >= SHORTEST}
        self.every = False
        self.lines = 0
        self.size_bytes = 0

    def drop(self, *needles: bytes) -> None:
        """Stop looking for `needles`: there is nothing more to learn from them."""
        if self.needles & set(needles):
            self.needles -= set(needles)
    

def clean(raw: bytes) -> str:
    """Return the text of one line without its line feed, colours or overwritten parts.

    >>> clean(b"10%\\r\\x1b[32m100%\\x1b[0m\\r")
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
    return rest[cut if cut >= 0 else 0 :][:LONGEST_LINE]


def _lines(block: bytes, watch: Watch) -> Iterator[Line]:
    """Yield the wanted lines of a block of whole lines; follow `watch` while doing so."""
    import numpy as np

    if b"\x1b" in block:  # a colour in the middle of a word would hide a needle
        block = ESCAPES.sub(b"", block.replace(b"\x1b[36m", b"").replace(b"\x1b[0m", b""))
    if b"\0" in block:
        block = block.replace(b"\0", b"")
    ends: list[int] = np.flatnonzero(np.frombuffer(block, np.uint8) == 10).tolist()  # noqa: PLR2004 - line feed
    first = watch.lines
    watch.lines += len(ends)
    wanted = iter(_hits(block, ends, watch))
    index, following = -1, next(wanted, None)
    while True:
        if watch.every:
            index += 1
        else:
            while following is not None and following <= index:
                following = next(wanted, None)
            if following is None:
                return
            index = following
        if index >= len(ends):
            return
        start = ends[index - 1] + 1 if index else 0
        yield Line(first + index + 1, clean(block[start : ends[index]]))


class _Index(NamedTuple):
    """Four tables over pairs of bytes (offsets 0, 2, 4, 6 of a window), and the needles by their window's start."""

    tables: tuple[Any, Any, Any, Any]
    heads: dict[bytes, tuple[tuple[bytes, int], ...]]


_indices: dict[frozenset[bytes], _Index] = {}


def _hits(block: bytes, ends: list[int], watch: Watch) -> Iterator[int]:
    """Yield the indices of the lines of `block` that hold a needle, ascending, each once."""
    import numpy as np

    needles = frozenset(watch.needles)
    index = _indices.get(needles)
    if index is None:
        if len(_indices) > 64:  # noqa: PLR2004 - a few runs' worth
            _indices.clear()
        index = _indices[needles] = _build(needles)
    data = np.frombuffer(block + b"\n" * WINDOW, np.uint8)
    pairs = data[:-1].astype(np.uint16)
    pairs <<= 8
    pairs |= data[1:]
    marks = index.tables[0].take(pairs[:-4])
    marks &= index.tables[1].take(pairs[2:-2])
    places = np.flatnonzero(marks.view(np.bool_))
    marks = marks[places]
    for offset in (4, 6):
        marks &= index.tables[offset // 2].take(pairs.take(places + offset, mode="clip"))
        kept = np.flatnonzero(marks)
        places, marks = places[kept], marks[kept]
    last = -1
    for place in places.tolist():
        if last >= 0 and place <= ends[last]:
            continue
        for needle, offset in index.heads.get(block[place : place + SHORTEST], ()):
            if place >= offset and block.startswith(needle, place - offset):
                last = bisect_left(ends, place, last + 1)
                yield last
                break


def _build(needles: frozenset[bytes]) -> _Index:
    """Make the tables for `needles`; one that contains another is left to that one."""
    import numpy as np

    tables = [np.zeros(65536, np.uint8) for _ in range(4)]
    heads: dict[bytes, list[tuple[bytes, int]]] = {}
    for needle in sorted(needles):
        if any(other != needle and other in needle for other in needles):
            continue
        offset = max(range(max(1, len(needle) - WINDOW + 1)), key=lambda at: _rarity(needle[at : at + WINDOW]))
        window = needle[offset : offset + WINDOW]
        same = heads.setdefault(window[:SHORTEST], [])
        same.append((needle, offset))
        bit = np.uint8(1 << (list(heads).index(window[:SHORTEST]) % TABLES))
        for at, table in zip((0, 2, 4, 6), tables, strict=True):
            pair = window[at : at + 2]
            if len(pair) == 2:  # noqa: PLR2004 - a pair
                table[pair[0] << 8 | pair[1]] |= bit
            elif pair:
                table[pair[0] << 8 : (pair[0] + 1) << 8] |= bit
            else:
                table |= bit
    return _Index((tables[0], tables[1], tables[2], tables[3]), {head: tuple(found) for head, found in heads.items()})


def _rarity(window: bytes) -> int:
    """Guess how rare a text is in a log: capitals and signs are, the commonest letters are not."""
    return sum(0 if byte in b" etaoinsrl" else 1 if byte in b"abcdefghijklmnopqrstuvwxyz0123456789./_-" else 3 for byte in window[:4])
