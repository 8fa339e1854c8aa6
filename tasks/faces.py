"""How an invocation is shown: lines of text, or one JSON event a line; the face for a terminal is live.py."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol, TextIO

COLOURS = {"Pass": "32", "Fail": "31", "Blocked": "33", "Skipped": "36"}


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
