"""The words of every answer: Verdict, and Reason, which says why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What was found out about a deliverable. Fail means the change, Blocked the environment."""

    PASS = "Pass"
    FAIL = "Fail"
    BLOCKED = "Blocked"
    SKIPPED = "Skipped"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is stale or why a verdict is what it is.

    `kind` is a stable word for programs ("steps", "check", "origin", "timeout"...), `subject` what it is about (a tag,
    a file, a task), `text` one sentence for people; `old` and `new` the two values of a comparison, if there is one.
    """

    kind: str
    subject: str
    text: str
    old: str | None = None
    new: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the reason as report.json carries it, without absent values."""
        return {k: v for k, v in asdict(self).items() if v is not None}
