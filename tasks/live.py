"""The face for a terminal: finished stages scroll by; what runs stays below: step, likely end, GPU memory, output."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from tasks import gpus
from tasks.faces import Plain

if TYPE_CHECKING:
    from rich.text import Text

LOOK_S = 5.0  # between two looks at the GPUs
STYLES = {"Pass": "green", "Fail": "bold red", "Blocked": "yellow"}


@dataclass(frozen=True, slots=True)
class Running:
    """One stage at work: its start on the monotonic clock, usual length in seconds, step and newest line."""

    since: float
    usual_s: float | None = None
    step: str = ""
    last: str = ""

    def line(self, subject: str, memory: str) -> str:
        """Return the stage as one line; what is not known takes no room."""
        spent = time.monotonic() - self.since
        parts = (f"{spent:6.0f} s", subject, self.step, ending(spent, self.usual_s), memory, self.last)
        return "  ".join(part for part in parts if part)


def ending(spent_s: float, usual_s: float | None) -> str:
    """Return when a stage is likely to end, from the time that it took before."""
    if usual_s is None:
        return ""
    left = usual_s - spent_s
    if left < 0:
        return f"usually done after {_rough(usual_s)}"
    return f"about {_rough(left)} left ({time.strftime('%H:%M', time.localtime(time.time() + left))})"


def _rough(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


class Live:
    """A terminal."""

    live = True

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self.console = Console(file=out, highlight=False)
        self.plain = Plain(out, colour=False)
        self.running: dict[str, Running] = {}
        self.memory = ""
        self.lock, self.closed = threading.Lock(), threading.Event()
        self.watch: threading.Thread | None = None
        self.live_line = RichLive(
            get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True
        )
        self.live_line.start()

    def _render(self) -> Text:
        from rich.text import Text

        with self.lock:
            lines = [one.line(subject, self.memory) for subject, one in self.running.items()]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def _watch_gpus(self) -> None:
        """Keep `memory` up to date; on a thread of its own, since a broken driver answers late or never."""
        while not self.closed.is_set():
            self.memory = gpus.memory()
            self.closed.wait(LOOK_S)

    def show(self, kind: str, subject: str, text: str, **facts: Any) -> None:
        """Update the live line, or print a finished stage above it."""
        from rich.text import Text

        with self.lock:
            known = self.running.get(subject, Running(time.monotonic()))
            if kind == "start":
                self.running[subject] = Running(time.monotonic(), facts.get("usual_s"))
                if facts.get("gpus") and self.watch is None:
                    self.watch = threading.Thread(target=self._watch_gpus, daemon=True)
                    self.watch.start()
            elif kind == "step":
                self.running[subject] = replace(known, step=text, last=str(facts.get("last", known.last)))
            elif kind == "progress":
                self.running[subject] = replace(known, last=text)
            elif kind == "done":
                self.running.pop(subject, None)
        if kind == "done":
            self.live_line.refresh()  # rich repaints what it last drew below a new line: not the finished stage
            mark = f"{facts.get('verdict', '')}{' (cached)' if facts.get('cached') else ''}"
            style = STYLES.get(facts.get("verdict", ""), "cyan")
            self.console.print(Text.assemble((f"{mark:16}", style), subject, "  ", text), soft_wrap=True)
        elif kind == "row":
            self.console.print(text, markup=False, soft_wrap=True)
        elif kind == "note":
            self.console.print(Text(f"{subject}: {text}"), soft_wrap=True)
        elif kind == "result":
            self.close()
            self.plain.show(kind, subject, text, **facts)

    def close(self) -> None:
        """Stop the live line and give the cursor back."""
        self.closed.set()
        self.live_line.stop()
