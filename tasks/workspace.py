"""Where everything of one pair of checkouts lives: build/<workspace>/, never inside the checkouts."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.settings import Settings

DEMO_MARKER = ".nemo-rl-e2e-demo"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folders of one workspace; `name` tells checkouts and runtime, `demo` whether a checkout is generated."""

    name: str
    root: Path
    demo: bool

    @property
    def attempts(self) -> Path:
        """Return the folder of all attempts: <case id>/<attempt id>/."""
        return self.root / "attempts"

    @property
    def report(self) -> Path:
        """Return the folder of junit.xml, report.json, summary.md and index.html."""
        return self.root / "report"

    @property
    def snapshots(self) -> Path:
        """Return the folder of frozen trees."""
        return self.root / "snapshots"

    def artefact(self, stage: str, name: str = "") -> Path:
        """Return the file that a stage writes for the next one."""
        return self.root / "stages" / stage / f"{name}.json" if name else self.root / "stages" / f"{stage}.json"


def of(settings: Settings) -> Workspace:
    """Return the workspace of these settings; raises UserError when a checkout is missing."""
    bridge, nemo_rl, mcore = (settings.checkout(kind) for kind in ("bridge", "nemo_rl", "mcore"))
    demo = any((path / DEMO_MARKER).exists() for path in (bridge, nemo_rl))
    if demo and settings.build / "demo" in nemo_rl.parents:
        name = "demo"  # its faults, too: they share records, so that only what a fault reaches runs again
    else:
        parts = (*map(os.fspath, (bridge, nemo_rl, mcore)), settings.runtime)
        short = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:6]
        name = _UNSAFE.sub("-", f"{bridge.name}+{nemo_rl.name}-{settings.runtime}-{short}".replace("+", "_"))
    return Workspace(name, settings.build / name, demo)
