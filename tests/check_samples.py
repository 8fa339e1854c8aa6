"""A check and data in one call, for tests of checks and of their weaknesses."""

from __future__ import annotations

from typing import Any

from tasks.checks import CheckResult, evaluate, parse
from tasks.reason import Verdict


def decide(expr: str, data: dict[str, Any]) -> CheckResult:
    return evaluate(parse(expr), data)


def passes(expr: str, data: dict[str, Any]) -> bool:
    return decide(expr, data).verdict is Verdict.PASS
