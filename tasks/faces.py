"""How an invocation is shown: lines of text, or one JSON event a line; the face for a terminal is live.py."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

COLOURS = {"Pass": "32", "Fail": "31", "Blocked": "33", "Skipped": "36"}


class Undisturbed:
    """A stream whose reader may go (`| head -1`) or whose disk may fill: words are lost, not a run or its status."""

    def __init__(self, out: TextIO | None) -> None:
        # no stream at all: it was closed before Python started (`>&-`)
        self._out = out if out is not None else io.StringIO()

    def write(self, text: str) -> int:
        """Write as far as anybody still reads."""
        try:
            return self._out.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Flush as far as anybody still reads."""
        try:
            self._out.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Send what is still buffered, and what follows, nowhere: also what the interpreter flushes at its end."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._out.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Print to `Undisturbed` streams within the block."""
    out: Any = Undisturbed(sys.stdout)
    err: Any = Undisturbed(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        yield


class Face(Protocol):
    """How events are shown; one that is `live` hears every look at a log, the others only of new steps."""

    live: bool

    def show(self, kind: str, subject: str, text: str, **facts: Any) -> None:
        """Show one event: kind "start", "progress", "step", "done", "stale", "note" or "result"."""

    def close(self) -> None:
        """Give the terminal back."""


class Plain:
    """Lines with a time stamp, for logs and pipes."""

    live = False

    def __init__(self, out: TextIO, *, colour: bool) -> None:
        self.out, self.colour = out, colour

    def show(self, kind: str, subject: str, text: str, **facts: Any) -> None:
        """Print one line; the answer's lines have no time stamp, so that the last line is the contract's."""
        if kind in ("result", "row"):
            line = text
        else:
            verdict = facts.get("verdict", "")
            mark = f"{verdict}{' (cached)' if facts.get('cached') else ''}" if verdict else "..."
            if self.colour and verdict:
                mark = f"\x1b[{COLOURS.get(verdict, '0')}m{mark}\x1b[0m"
            line = f"{time.strftime('%H:%M:%S')} {subject}: {mark} {text}".rstrip()
        print(line, file=self.out, flush=True)

    def close(self) -> None:
        """Nothing to give back."""


class Json:
    """One JSON event a line, for programs."""

    live = False

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def show(self, kind: str, subject: str, text: str, **facts: Any) -> None:
        """Print one event."""
        event = {"event": kind, "subject": subject, "text": text, "time": time.time(), **facts}
        print(json.dumps(event, default=str), file=self.out, flush=True)

    def close(self) -> None:
        """Nothing to give back."""
