"""The functions that a check may call: one table, `FUNCTIONS`; pure, over points in the order of their steps.

The first five and `len`, `abs` decide as NeMo-RL's tests/check_metrics.py does, window arithmetic included. The others
are this project's own, for runs that must learn something (level 6) and for ratios around one:

| call | value |
|---|---|
| trimmed_mean(x, share=0.1) | mean without the floor(n * share) smallest and as many largest; 3 or more must remain |
| share_above(x, t) | share of values > t (`ratio_above` counts >=) |
| within(x, low, high) | true if low <= every value <= high |
| first(x), last(x) | value at the smallest, largest step |
| slope(x, start=1, end=0) | least squares: sum (s - mean s)(v - mean v) / sum (s - mean s)^2, in units per step |
| robust_slope(x, start=1, end=0) | Theil-Sen: median of (v_j - v_i) / (s_j - s_i) over all pairs with s_i < s_j |
| improves(x, "up") | true if the one-sided Mann-Kendall test finds a rise at 5 %: z > 1.645; "down": a fall |
| not_worse(x, "up") | false only if that test finds a fall at 1 %: z < -2.326; "down": a rise |
| finite(x) | true if every value is finite; the only function that accepts others |
| nonzero(x) | true if some value is not 0 |
| varies(x) | true if max - min > 1e-9 * max(|max|, |min|) |
| finite_only(x) | the series without its non-finite values, for the other functions |

Mann-Kendall: S = sum over i < j of sign(v_j - v_i), variance with ties (n(n-1)(2n+5) - sum t(t-1)(2t+5)) / 18,
z = (S - sign S) / sqrt(variance). It knows only the order of values, so that one spike among 20 cannot decide.
Simulated with 20 points (tests/test_trends.py, seeded; bounds of 2,000 runs each): flat noise passes `improves` in at
most 6 of 100 runs, with lag-one correlation 0.3 in 14; a rise of three (two) standard deviations over the run fails it
in at most 5 (25). Flat noise fails `not_worse` in at most 2 of 100, correlated noise in 5; a fall of three standard
deviations passes it in at most 15. Fewer than 5 points decide nothing: both are failures then.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Result = float | bool
MIN_TREND_POINTS = 5
MIN_TRIMMED_POINTS = 3
MIN_KEPT_POINTS = 2  # of `ignore_top_p`, where it left something out: a single point must not pass for a mean
MAX_PAIRS_POINTS = 2000  # robust_slope looks at all pairs, two million here
IMPROVES_Z = 1.645  # one-sided 5 %
NOT_WORSE_Z = 2.326  # one-sided 1 %
VARIES_RELATIVE = 1e-9


class NoAnswerError(ValueError):
    """The points do not suffice for the question (none in the window, too few); the check then fails with this text."""


@dataclass(frozen=True, slots=True)
class Points:
    """A series as functions see it: distinct steps and their values, in the order of the file.

    `steps` are only needed by functions of steps; a key that is no number makes `step_numbers` fail, as int() does.
    """

    tag: str
    steps: tuple[str, ...]
    values: tuple[float, ...]

    def step_numbers(self) -> list[int]:
        """Return the steps as integers; NoAnswerError where one is none."""
        try:
            return [int(step) for step in self.steps]
        except ValueError as error:
            raise NoAnswerError(f"a step of {self.tag} is not a whole number: {error}") from error

    def ordered(self) -> Points:
        """Return the points in ascending order of steps."""
        order = sorted(range(len(self.steps)), key=self.step_numbers().__getitem__)
        return Points(self.tag, tuple(self.steps[i] for i in order), tuple(self.values[i] for i in order))


def window(points: Points, start: float = 1, end: float = 0) -> Points:
    """Return the points with start <= step < end, as check_metrics.py counts.

    A negative start, and an end of 0 or less, have (largest step + 1) added; so (20) is from step 20 on and (-6, -1)
    the five steps before the last. Raises NoAnswerError where no step lies in it.
    """
    steps = points.step_numbers()
    beyond = max(steps) + 1
    low = start + beyond if start < 0 else start
    high = end + beyond if end <= 0 else end
    chosen = [i for i, step in enumerate(steps) if low <= step < high]
    if not chosen:
        raise NoAnswerError(f"no step of {points.tag} from {low:g} to {high - 1:g}, logged are {_range(steps)}")
    return Points(points.tag, tuple(points.steps[i] for i in chosen), tuple(points.values[i] for i in chosen))


def _range(steps: Sequence[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if min(steps) != max(steps) else f"step {steps[0]} alone"


def mean(points: Points, range_start: float = 1, range_end: float = 0, ignore_top_p: float = 0.0) -> float:
    """Return the mean of a window, of its lowest int(n * (1 - p)) values (at least one) if `ignore_top_p` is p."""
    values: Sequence[float] = window(points, range_start, range_end).values
    if ignore_top_p > 0.0:
        kept = max(int(len(values) * (1.0 - ignore_top_p)), 1)
        if kept < len(values) and kept < MIN_KEPT_POINTS:
            raise NoAnswerError(f"only {kept} of {len(values)} points left by ignore_top_p={ignore_top_p:g}")
        values = sorted(values)[:kept]
    return statistics.mean(values)


def median(points: Points, range_start: float = 1, range_end: float = 0) -> float:
    """Return the median of a window."""
    return statistics.median(window(points, range_start, range_end).values)


def ratio_above(points: Points, threshold: float) -> float:
    """Return the share of values >= threshold."""
    return sum(value >= threshold for value in points.values) / len(points.values)


def share_above(points: Points, threshold: float) -> float:
    """Return the share of values > threshold."""
    return sum(value > threshold for value in points.values) / len(points.values)


def trimmed_mean(points: Points, share: float = 0.1) -> float:
    """Return the mean without the floor(n * share) smallest and as many largest values."""
    if not 0.0 <= share < 0.5:
        raise NoAnswerError(f"share must be from 0 to below 0.5, not {share:g}")
    cut = int(len(points.values) * share)
    left = sorted(points.values)[cut : len(points.values) - cut]
    if len(left) < MIN_TRIMMED_POINTS:
        raise NoAnswerError(f"{len(left)} points left after trimming, at least {MIN_TRIMMED_POINTS} are needed")
    return statistics.mean(left)


def within(points: Points, low: float, high: float) -> bool:
    """Return whether every value lies from low to high."""
    return all(low <= value <= high for value in points.values)


def slope(points: Points, range_start: float = 1, range_end: float = 0) -> float:
    """Return the least squares slope of value over step."""
    chosen = window(points, range_start, range_end)
    steps, values = chosen.step_numbers(), chosen.values
    if len(steps) < 2:
        raise NoAnswerError(f"a slope needs two points, {points.tag} has {len(steps)}")
    return statistics.linear_regression(steps, values).slope


def robust_slope(points: Points, range_start: float = 1, range_end: float = 0) -> float:
    """Return the Theil-Sen slope of value over step."""
    chosen = window(points, range_start, range_end).ordered()
    steps, values = chosen.step_numbers(), chosen.values
    if not 2 <= len(steps) <= MAX_PAIRS_POINTS:
        raise NoAnswerError(f"robust_slope needs 2 to {MAX_PAIRS_POINTS} points, {points.tag} has {len(steps)}")
    count = len(steps)
    return statistics.median(
        (values[j] - values[i]) / (steps[j] - steps[i]) for i in range(count) for j in range(i + 1, count)
    )


def mann_kendall(points: Points) -> float:
    """Return z of the Mann-Kendall trend test: positive for a rise; 0 where all values are equal."""
    values = points.ordered().values
    count = len(values)
    if count < MIN_TREND_POINTS:
        raise NoAnswerError(f"a trend needs at least {MIN_TREND_POINTS} points, {points.tag} has {count}")
    seen: list[float] = []
    score = 0
    for value in values:
        below = bisect.bisect_left(seen, value)
        above = len(seen) - bisect.bisect_right(seen, value)
        score += below - above
        seen.insert(below, value)
    ties = sum(t * (t - 1) * (2 * t + 5) for t in Counter(values).values())
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18
    return (score - (score > 0) + (score < 0)) / math.sqrt(variance) if variance > 0 else 0.0


def improves(points: Points, direction: str = "up") -> bool:
    """Return whether the values rise (or fall) beyond what flat noise does in one run of twenty."""
    return mann_kendall(points) * _sign(direction) > IMPROVES_Z


def not_worse(points: Points, direction: str = "up") -> bool:
    """Return False only where the values fall (or rise) beyond what flat noise does in one run of a hundred."""
    return mann_kendall(points) * _sign(direction) >= -NOT_WORSE_Z


def _sign(direction: str) -> int:
    return 1 if direction == "up" else -1


def finite(points: Points) -> bool:
    """Return whether every value is finite."""
    return all(map(math.isfinite, points.values))


def varies(points: Points) -> bool:
    """Return whether the values are not all the same, up to the rounding of a different order of summation."""
    low, high = min(points.values), max(points.values)
    return high - low > VARIES_RELATIVE * max(abs(low), abs(high))


Kind = Literal["number", "text", "direction"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter after the series: its name, kind, range (both ends allowed) and whether it may be left out."""

    name: str
    kind: Kind = "number"
    low: float = -math.inf
    high: float = math.inf
    required: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """One callable of the grammar: `call(points, *parameters)`; `is_true` says that a check may consist of it alone."""

    call: Callable[..., Result]
    parameters: tuple[Parameter, ...] = ()
    is_true: bool = False
    accepts_non_finite: bool = False


_WINDOW = (Parameter("range_start"), Parameter("range_end"))
_THRESHOLD = (Parameter("threshold", required=True),)
_DIRECTION = (Parameter("direction", kind="direction"),)

FUNCTIONS: dict[str, Function] = {
    "min": Function(lambda points: min(points.values)),
    "max": Function(lambda points: max(points.values)),
    "mean": Function(mean, (*_WINDOW, Parameter("ignore_top_p", low=0.0, high=1.0))),
    "median": Function(median, _WINDOW),
    "ratio_above": Function(ratio_above, _THRESHOLD),
    "len": Function(lambda points: len(points.values)),
    "share_above": Function(share_above, _THRESHOLD),
    "trimmed_mean": Function(trimmed_mean, (Parameter("share", low=0.0, high=0.49),)),
    "within": Function(within, (Parameter("low", required=True), Parameter("high", required=True)), is_true=True),
    "first": Function(lambda points: points.ordered().values[0]),
    "last": Function(lambda points: points.ordered().values[-1]),
    "slope": Function(slope, _WINDOW),
    "robust_slope": Function(robust_slope, _WINDOW),
    "improves": Function(improves, _DIRECTION, is_true=True),
    "not_worse": Function(not_worse, _DIRECTION, is_true=True),
    "finite": Function(finite, is_true=True, accepts_non_finite=True),
    "nonzero": Function(lambda points: any(points.values), is_true=True),
    "varies": Function(varies, is_true=True),
}
"""What a check may call on a series. `abs(number)` and `finite_only(series)` are part of the grammar itself."""
