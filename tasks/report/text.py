"""Text from anywhere made safe to print: nothing here trusts a log, a traceback or a name.

`clean` gives text that XML 1.0 may carry, `one_line` a message, `read_tail` the end of a log of any size in bounded
memory (a trainer's log can be 200 MB, and libxml2 refuses text nodes over 10 MB).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGE = 500  # characters; the JUnit profile's limit
MAX_LINE = 4000  # characters kept of one log line: a printed tensor must not push the traceback out of the excerpt
MAX_SCAN = 8 << 20  # bytes of log that a look for one line number may read

_ANSI = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC: titles, hyperlinks
    r"|\x1b[PX^_][^\x1b]*\x1b\\"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-Z\\-~]"  # two characters, charset selection
)
# What XML 1.0 forbids even as a reference, and what junit-xml drops in silence beside it (C1 controls, noncharacters).
_ILLEGAL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff"
    + "".join(f"{chr((plane << 16) + 0xFFFE)}{chr((plane << 16) + 0xFFFF)}" for plane in range(1, 17))
    + "]"
)


def clean(text: object) -> str:
    r"""Return `text` as XML 1.0 text: colours gone, other illegal characters visible.

    >>> clean("\x1b[31mFAILED\x1b[0m \x00 \x07 ]]> 5%\r10%")
    'FAILED #x00 #x07 ]]> 5%\n10%'
    """
    plain = _ANSI.sub("", str(text)).replace("\r\n", "\n").replace("\r", "\n")
    return _ILLEGAL.sub(lambda found: f"#x{ord(found[0]):02X}", plain)


def one_line(text: object, limit: int = MAX_MESSAGE) -> str:
    """Return `text` cleaned, on one line of at most `limit` characters."""
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a log: cleaned `lines`, whether something was left out, and the file's size in bytes."""

    lines: tuple[str, ...]
    cut: bool
    size_bytes: int


def read_tail(path: Path, *, max_lines: int = 200, max_bytes: int = 64 << 10) -> Tail | None:
    """Return at most `max_lines` lines and `max_bytes` bytes (UTF-8, cleaned) from the end of `path`.

    Of a progress bar (carriage returns inside a line) the last state counts, as on a terminal. None where the file
    cannot be read. Reads at most four times `max_bytes`, whatever the size of the file.
    """
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            start = max(0, size - 4 * max_bytes)
            log.seek(start)
            raw = log.read(4 * max_bytes)
    except (OSError, ValueError):  # a name that no file system can hold is as good as absent
        return None
    rows = raw.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    if start and len(rows) > 1:
        del rows[0]  # begins in the middle of a line
    if rows and not rows[-1]:
        del rows[-1]
    kept: list[str] = []
    left = max_bytes
    for row in reversed(rows[-max_lines:]):
        line = _log_line(row.rstrip("\r").rpartition("\r")[2])
        left -= len(line.encode()) + 1
        if left < 0:
            break
        kept.append(line)
    return Tail(tuple(reversed(kept)), start > 0 or len(kept) < len(rows), size)


def read_around(path: Path, line: int, *, before: int = 3, after: int = 12) -> tuple[tuple[int, str], ...]:
    """Return numbered, cleaned lines around `line` (from 1) if it lies in the first 8 MiB of `path`, else nothing."""
    if line < 1:
        return ()
    try:
        with path.open("rb") as log:
            rows = log.read(MAX_SCAN).split(b"\n", line + after)
    except (OSError, ValueError):  # a name that no file system can hold is as good as absent
        return ()
    if len(rows) <= line - 1 or (len(rows) == line and not rows[-1]):
        return ()
    first = max(0, line - 1 - before)
    rows = rows[first : line + after]
    if not rows[-1]:
        del rows[-1]  # what follows the final newline
    return tuple(
        (number, _log_line(row[: 4 * MAX_LINE].decode("utf-8", "replace").rstrip("\r")))
        for number, row in enumerate(rows, first + 1)
    )


def _log_line(text: str) -> str:
    """Return one line of a log cleaned and cut; cut before as well, since cleaning megabytes takes seconds."""
    line = clean(text[: 4 * MAX_LINE]).replace("\n", " ")
    return line if len(line) <= MAX_LINE else line[: MAX_LINE - 1] + "…"
