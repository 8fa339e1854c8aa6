"""What a check cannot show: each is tried at load time on made-up series that say nothing good about a run.

Found by trying, not by reasoning about the expression: constant series of several lengths and sizes. NaN, absent and
empty series always fail (tasks/checks.py), so what remains to be seen is
- "never fails": no finite series fails it; an error in levels.yaml;
- "never passes": the same the other way;
- "one-sided: passes on 0.0": all zero is what a run logs that compared or learned nothing (cases.md 102, 103);
- "worth little: ...": the quantity is clamped by the trainer, so that within its range the check always holds.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from tasks.checks import evaluate
from tasks.grammar import Call, Constant, Value
from tasks.reason import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasks.grammar import Check

EXTREME = 1e12
LENGTHS = (1, 2, 5, 20)
MAX_STEPS = 5000  # a check of a later step is tried on that step and the few below
# Clamped by NeMo-RL before min and max are taken, with -1.0 where no finite value was left (nemo_rl/algorithms/grpo.py,
# "ratio_clip"): tag -> range
SENTINEL = -1.0
CLAMPED = {"train/probs_ratio_clamped_min": (0.8, 1.2), "train/probs_ratio_clamped_max": (0.8, 1.2)}


def weaknesses(check: Check) -> tuple[str, ...]:
    """Return the weaknesses of a check, worst first; an empty tuple for a sound two-sided one."""
    fails = passes = False
    for data in _tries(check):
        holds = evaluate(check, data).verdict is Verdict.PASS
        passes, fails = passes or holds, fails or not holds
        if passes and fails:
            break
    found = []
    if not fails:
        found.append("never fails")
    elif not passes:
        found.append("never passes")
    if passes and _passes_on_zeros(check):
        found.append("one-sided: passes on 0.0")
    clamped = [tag for tag in check.tags if tag in CLAMPED]
    if fails and clamped and len(check.tags) == 1 and _always_holds_within(check, clamped[0]):
        low, high = CLAMPED[clamped[0]]
        sentinel = evaluate(check, {clamped[0]: _constant(check, SENTINEL, max(_lengths(check)))}).verdict
        rest = "nothing but NaN" if sentinel is Verdict.PASS else f"only {SENTINEL} (no finite value)"
        found.append(f"worth little: the trainer clamps {clamped[0]} to {low:g} ... {high:g}, {rest} can fail it")
    return tuple(found)


def _numbers(check: Check) -> list[float]:
    """Return values around the constants of the check, zero, and extremes of both signs."""
    constants = {float(n.value) for n in check.nodes() if isinstance(n, Constant) and not isinstance(n.value, str)}
    for node in check.nodes():
        if isinstance(node, Call):
            constants |= {float(value) for _, value in node.arguments if not isinstance(value, str)}
    around = {c + d for c in constants for d in (-1.0, -1e-6, 0.0, 1e-6, 1.0)}
    return sorted({-EXTREME, -1.0, 0.0, 1.0, EXTREME} | around)[:40]


def _lengths(check: Check) -> list[int]:
    """Return lengths of series to try: short ones, and those that the check's numbers and steps speak of."""
    numbers = [int(n) for n in _numbers(check) if 1 <= n <= MAX_STEPS]
    steps = [int(n.step) for n in check.nodes() if isinstance(n, Value) and n.step and int(n.step) <= MAX_STEPS]
    steps += [
        int(n.value)
        for n in check.nodes()
        if isinstance(n, Constant) and str(n.value).isdecimal() and len(str(n.value)) < 5
    ]
    return sorted({*LENGTHS, *numbers, *steps} - {0})[:12]


def _tries(check: Check) -> Iterator[dict[str, Any]]:
    """Yield data for all tags of the check: constants, rising and falling series, single numbers, compared texts."""
    singles = {n.tag for n in check.nodes() if isinstance(n, Value) and n.step is None}
    texts = [n.value for n in check.nodes() if isinstance(n, Constant) and isinstance(n.value, str)]
    numbers = _numbers(check)
    combinations = itertools.islice(itertools.product(numbers, repeat=min(len(check.tags), 2)), 900)
    lengths = _lengths(check)
    for combination in combinations:
        for length in lengths:
            data: dict[str, Any] = {}
            for index, tag in enumerate(check.tags):
                value = combination[min(index, len(combination) - 1)]
                data[tag] = value if tag in singles else _constant(check, value, length)
            yield data
    for length, sign in itertools.product(lengths, (1.0, -1.0)):
        for power in (1, -1):
            ramp = {str(step): sign * (step + 1.0) ** power for step in range(length + 1)}
            yield {tag: sign if tag in singles else ramp for tag in check.tags}
    if texts and singles:
        for text in [*texts, "x"]:
            yield dict.fromkeys(check.tags, text)
    if _speaks_of_finiteness(check):
        yield {tag: {"1": math.nan} for tag in check.tags}


def _constant(check: Check, value: float, length: int) -> dict[str, float]:
    """Return steps 1 to `length`, and those that the check names outside of what lengths are tried for."""
    series = {str(step): value for step in range(1, length + 1)}
    named = {n.step for n in check.nodes() if isinstance(n, Value) and n.step and not 1 <= int(n.step) <= MAX_STEPS}
    return series | dict.fromkeys(sorted(named), value)


def _speaks_of_finiteness(check: Check) -> bool:
    return any(isinstance(node, Call) and node.function.accepts_non_finite for node in check.nodes())


def _passes_on_zeros(check: Check) -> bool:
    """Return whether a run that logged only zeros passes, having logged as many steps as the check speaks of."""
    of_values = [n for n in check.nodes() if isinstance(n, Value) or (isinstance(n, Call) and n.name != "len")]
    if not of_values or _speaks_of_finiteness(check):
        return False  # the check is about the number of steps, or about NaN, alone
    singles = {n.tag for n in check.nodes() if isinstance(n, Value) and n.step is None}
    length = max(_lengths(check))
    data = {tag: 0.0 if tag in singles else _constant(check, 0.0, length) for tag in check.tags}
    return evaluate(check, data).verdict is Verdict.PASS


def _always_holds_within(check: Check, tag: str) -> bool:
    low, high = CLAMPED[tag]
    length = max(_lengths(check))
    values = (low, (low + high) / 2, high, math.nextafter(low, high))
    return all(evaluate(check, {tag: _constant(check, value, length)}).verdict is Verdict.PASS for value in values)
