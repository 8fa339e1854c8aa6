"""Functions of series against numpy, and how often the trend tests are wrong, by simulation."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.checks import Verdict, evaluate, parse
from tasks.trends import NoAnswerError, Points, improves, mann_kendall, not_worse, robust_slope, slope, trimmed_mean

if TYPE_CHECKING:
    from collections.abc import Callable

FINITE = st.floats(-1e6, 1e6)
SERIES = st.dictionaries(st.integers(0, 500), FINITE, min_size=5, max_size=40)
RUNS = 2000
STEPS = 20


def points(values: list[float], first: int = 1) -> Points:
    return Points("a", tuple(str(i) for i in range(first, first + len(values))), tuple(values))


def of(series: dict[int, float]) -> Points:
    return Points("a", tuple(map(str, series)), tuple(series.values()))


def holds(expr: str, values: list[float]) -> bool:
    data = {"a": {str(i): value for i, value in enumerate(values, 1)}}
    return evaluate(parse(expr), data).verdict is Verdict.PASS


# Against numpy


@given(SERIES.filter(lambda series: max(series) > 0))
@settings(deadline=None)
def test_slope_is_that_of_polyfit(series: dict[int, float]) -> None:
    from_one = {step: value for step, value in series.items() if step >= 1}
    if len(from_one) < 2:
        return
    expected = np.polyfit(list(from_one), list(from_one.values()), 1)[0]
    assert slope(of(series)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(SERIES)
@settings(deadline=None)
def test_robust_slope_is_the_median_over_all_pairs(series: dict[int, float]) -> None:
    pairs = itertools.combinations(sorted(item for item in series.items() if item[0] >= 1), 2)
    slopes = [(v2 - v1) / (s2 - s1) for (s1, v1), (s2, v2) in pairs]
    if slopes:
        assert robust_slope(of(series)) == pytest.approx(float(np.median(slopes)), rel=1e-9, abs=1e-9)


@given(SERIES)
@settings(deadline=None)
def test_mann_kendall_counts_pairs(series: dict[int, float]) -> None:
    values = np.array([series[step] for step in sorted(series)])
    score = float(np.sign(values[None, :] - values[:, None])[np.triu_indices(len(values), 1)].sum())
    _, ties = np.unique(values, return_counts=True)
    n = len(values)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    expected = (score - np.sign(score)) / math.sqrt(variance) if variance else 0.0
    assert mann_kendall(of(series)) == pytest.approx(expected)


@given(st.lists(FINITE, min_size=10, max_size=60))
@settings(deadline=None)
def test_trimmed_mean_leaves_out_both_ends(values: list[float]) -> None:
    cut = len(values) // 10
    expected = float(np.mean(np.sort(values)[cut : len(values) - cut]))
    assert trimmed_mean(points(values)) == pytest.approx(expected, rel=1e-9, abs=1e-6)


# What they say


def test_one_spike_does_not_decide() -> None:
    rising = [0.1 * i for i in range(20)]
    assert improves(points([*rising[:10], 50.0, *rising[11:]]))
    flat = [0.5, 0.4] * 9 + [0.5, 99.0]
    assert not improves(points(flat))
    assert abs(robust_slope(points(flat))) < 0.02


def test_direction_is_up_unless_down_is_said() -> None:
    falling = [1.0 - 0.05 * i for i in range(20)]
    assert holds('improves(data["a"], "down")', falling)
    assert not holds('improves(data["a"])', falling)
    assert not holds('not_worse(data["a"])', falling)
    assert holds('not_worse(data["a"], "down")', falling)
    assert holds('slope(data["a"]) < -0.04', falling)


@pytest.mark.parametrize("value", [0.0, 0.7])
def test_constant_series_does_not_improve_and_does_not_vary(value: float) -> None:
    for expr in ('improves(data["a"])', 'improves(data["a"], "down")', 'varies(data["a"])'):
        assert not holds(expr, [value] * 20)
    assert holds('nonzero(data["a"])', [value] * 20) is bool(value)


def test_varies_is_not_misled_by_rounding() -> None:
    assert not holds('varies(data["a"])', [0.1 + 0.2, 0.3] * 5)
    assert holds('varies(data["a"])', [0.3, 0.3001] * 5)
    assert holds('varies(data["a"])', [0.0, 1e-30] * 5)


@pytest.mark.parametrize(
    ("expr", "values", "expected"),
    [
        ('within(data["a"], 0.9, 1.05)', [0.9, 1.0, 1.05], True),
        ('within(data["a"], 0.9, 1.05)', [0.0, 1.0], False),
        ('share_above(data["a"], 1) == 0', [1.0, 1.0], True),
        ('ratio_above(data["a"], 1) == 1', [1.0, 1.0], True),
        ('last(data["a"]) == 2', [5.0, 2.0], True),
        ('first(data["a"]) == 5', [5.0, 2.0], True),
        ('finite(data["a"])', [1.0, math.inf], False),
        ('finite(data["a"])', [1.0, 2.0], True),
        ('varies(data["a"])', [1.0, math.nan], False),
        ('trimmed_mean(data["a"], 0.25) == 2.5', [-100.0, 2.0, 3.0, 100.0], False),
        ('trimmed_mean(data["a"], 0.2) == 2', [-100.0, 1.0, 2.0, 3.0, 100.0], True),
    ],
)
def test_small_functions(expr: str, values: list[float], expected: bool) -> None:
    assert holds(expr, values) is expected


@pytest.mark.parametrize("function", [improves, not_worse])
def test_few_points_decide_nothing(function: Callable[[Points], bool]) -> None:
    with pytest.raises(NoAnswerError, match="at least 5 points, a has 4"):
        function(points([1.0, 2.0, 3.0, 4.0]))
    assert not holds('not_worse(data["a"])', [1.0, 2.0])


def test_long_series_are_judged_quickly_or_refused() -> None:
    long = points([float(i % 7) for i in range(50_000)])
    assert mann_kendall(long) < 1.645
    with pytest.raises(NoAnswerError, match="2 to 2000 points"):
        robust_slope(long)


# How often they are wrong: the numbers of the module's docstring


def simulate(rise: float, correlation: float = 0.0) -> list[list[float]]:
    """Return RUNS runs of STEPS points: noise of one standard deviation on a straight rise of `rise` over the run."""
    chance = random.Random(f"{rise} {correlation}")  # noqa: S311 - a simulation
    fresh = math.sqrt(1 - correlation**2)
    runs = []
    for _ in range(RUNS):
        noise = chance.gauss()
        run = []
        for step in range(STEPS):
            run.append(rise * step / (STEPS - 1) + noise)
            noise = correlation * noise + fresh * chance.gauss()
        runs.append(run)
    return runs


@pytest.mark.parametrize(
    ("name", "simulated", "function", "wrong", "at_most"),
    [
        ("flat noise taken for learning", (0.0, 0.0), improves, True, 0.06),
        ("flat correlated noise taken for learning", (0.0, 0.3), improves, True, 0.14),
        ("learning of 3 sigma not seen", (3.0, 0.0), improves, False, 0.05),
        ("learning of 2 sigma not seen", (2.0, 0.0), improves, False, 0.25),
        ("flat noise taken for harm", (0.0, 0.0), not_worse, False, 0.02),
        ("flat correlated noise taken for harm", (0.0, 0.3), not_worse, False, 0.05),
        ("harm of 3 sigma not seen", (-3.0, 0.0), not_worse, True, 0.15),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_false_alarm_rate(
    name: str, simulated: tuple[float, float], function: Callable[[Points], bool], wrong: bool, at_most: float
) -> None:
    rate = sum(function(points(run)) is wrong for run in simulate(*simulated)) / RUNS
    print(f"{name}: {rate:.3f} of {RUNS} runs of {STEPS} points")
    assert rate <= at_most
