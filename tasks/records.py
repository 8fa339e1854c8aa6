"""What was done, with which inputs, and what proves it: one file a stage, name and input digest; the truth behind doit.

records/<stage>/<name>/<key>.json is written atomically when a stage ends, so that a kill loses at most the stage in
flight, and going back to an earlier tree (A, B, A) finds its earlier result. A record is believed only while the
evidence files it names still have the hashes they had.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tasks.errors import UserError
from tasks.files import read_json, sha256_file, sha256_json, write_json
from tasks.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

SCHEMA = 1


def utc_now() -> str:
    """Return the time as records carry it: UTC, Z; in milliseconds, as a probe may follow a run in the same second."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def input_digest(inputs: Mapping[str, str]) -> str:
    """Return the key of a record: a digest of named inputs, the schema version among them."""
    return sha256_json({"schema": SCHEMA, **inputs})


@dataclass(frozen=True, slots=True)
class Record:
    """One finished stage.

    `inputs` are the named digests its key is made of, `artefact` its small deterministic result, `evidence` maps files
    (relative to the workspace) to SHA-256, `reusable` says whether a later call with equal inputs may believe it.
    """

    stage: str
    name: str
    inputs: Mapping[str, str]
    artefact: Mapping[str, Any]
    reusable: bool
    evidence: Mapping[str, str] = field(default_factory=dict)
    finished: str = ""
    duration_s: float = 0.0
    host: str = ""
    gpus: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return the input digest."""
        return input_digest(self.inputs)


def why_again(latest: Record | None, inputs: Mapping[str, str]) -> str:
    """Return in a few words why a stage is done although it has `latest` as its newest record."""
    if latest is None:
        return "never done before"
    names = sorted({*latest.inputs, *inputs})
    changed = ", ".join(name for name in names if latest.inputs.get(name) != inputs.get(name))
    if changed:
        return f"{changed} changed"
    return "asked for anew, or its evidence was changed" if latest.reusable else "its last end proves nothing"


class Records:
    """The records of one workspace."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _path(self, stage: str, name: str, key: str) -> Path:
        return self.root / "records" / stage / (name or "_") / f"{key[:32]}.json"

    def save(self, record: Record) -> None:
        """Write the record; raises OSError when it cannot be made durable, and then nothing may be believed."""
        write_json(self._path(record.stage, record.name, record.key), {"schema": SCHEMA, **asdict(record)})

    def find(self, stage: str, name: str, inputs: Mapping[str, str]) -> Record | None:
        """Return the record of exactly these inputs, or None."""
        return self._load(self._path(stage, name, input_digest(inputs)))

    def latest(self, stage: str, name: str) -> Record | None:
        """Return the newest record of a stage whatever its inputs: what `doit why` compares with."""
        return max(self.history(stage, name), key=lambda r: r.finished, default=None)

    def history(self, stage: str, name: str) -> list[Record]:
        """Return all records of a stage, oldest first."""
        found = (self._load(p) for p in (self.root / "records" / stage / (name or "_")).glob("*.json"))
        return sorted((r for r in found if r), key=lambda r: r.finished)

    @staticmethod
    def _load(path: Path) -> Record | None:
        raw = read_json(path)
        if not isinstance(raw, dict) or raw.pop("schema", None) != SCHEMA:
            return None
        try:
            record = Record(**{**raw, "gpus": tuple(raw["gpus"])})
        except (TypeError, KeyError):
            return None
        return record if path.stem == record.key[:32] else None  # edited by hand, or another format

    def damaged(self, record: Record) -> Reason | None:
        """Return why the evidence of `record` no longer proves it, or None while every hash is as recorded."""
        for name, sha in record.evidence.items():
            path = self.root / name
            try:
                now = sha256_file(path)
            except OSError as error:
                return Reason("evidence", name, f"evidence {name} is gone ({error.strerror})", sha[:12], None)
            if now != sha:
                return Reason("evidence", name, f"evidence {name} was changed after the run", sha[:12], now[:12])
        return None


@contextmanager
def lock(path: Path, wait_s: float, purpose: str, waiting: Callable[[str], None] = print) -> Iterator[None]:
    """Hold an exclusive lock on `path` for the block; `waiting` is told once who holds it.

    flock is released by the kernel when its owner dies, so no stale lock needs breaking. Raises UserError after
    `wait_s` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as handle:
        deadline = time.monotonic() + wait_s
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                handle.seek(0)
                owner = handle.read().strip() or "another process"
                if not told:
                    waiting(f"waiting for {owner}, which uses {path.parent.name} ({purpose})")
                    told = True
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{path}: still held by {owner} after {wait_s:.0f} s; wait=2h waits longer"
                    ) from None
                time.sleep(0.2)
        handle.seek(0)
        handle.truncate()
        handle.write(f"pid {os.getpid()} on {os.uname().nodename} since {utc_now()}")
        handle.flush()
        try:
            yield
        finally:
            handle.seek(0)
            handle.truncate()
