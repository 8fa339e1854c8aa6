"""Checks that cannot fail are found by trying."""

from __future__ import annotations

import pytest

from tasks.checks import parse
from tasks.weaknesses import weaknesses


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ('max(data["a"]) < 1.05', ("one-sided: passes on 0.0",)),
        ('min(data["a"]) > 0.79', ()),
        ('within(data["a"], 0.9, 1.05)', ()),
        ('len(data["a"]) > 0', ("never fails",)),
        ('len(data["a"]) == 3', ()),
        ('"3" in data["a"]', ()),
        ('ratio_above(data["a"], 1.05) <= 1', ("never fails", "one-sided: passes on 0.0")),
        ('ratio_above(data["a"], 1.05) > 1', ("never passes",)),
        ('abs(max(data["a"])) >= 0', ("never fails", "one-sided: passes on 0.0")),
        ('len(data["a"]) < 1', ("never passes",)),
        ('data["a"]["200"] > 0.5', ()),
        ('data["a"]["20000"] > 0.5', ()),
        ('data["a"]["100"] < 0.65 * data["a"]["0"]', ()),
        ('data["word"] == "yes"', ()),
        ('nonzero(data["a"])', ()),
        ('improves(data["a"])', ()),
        ('finite(data["a"])', ()),
    ],
)
def test_weaknesses_are_found_by_trying(expr: str, expected: tuple[str, ...]) -> None:
    assert weaknesses(parse(expr)) == expected


def test_checks_of_clamped_quantities_are_worth_little() -> None:
    (low,) = weaknesses(parse('min(data["train/probs_ratio_clamped_min"]) > 0.79'))
    assert low.startswith("worth little: the trainer clamps")
    assert "only -1.0" in low
    assert "nothing but NaN" in weaknesses(parse('max(data["train/probs_ratio_clamped_max"]) < 1.21'))[-1]
