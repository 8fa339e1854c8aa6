"""A check decides as upstream's program does, and says what it saw; non-finite values fail."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.checks import evaluate, history, main, parse
from tasks.reason import Verdict
from tests.check_samples import decide, passes

DECISIONS = Path(__file__).parent / "fixtures" / "decisions.json"
# One of each form that NeMo-RL's scripts use (interface facts, section 2); tags and limits are ours.
FORMS = [
    'max(data["a"]) < 1.05',
    'min(data["a"]) > 0.79',
    'max(data["a"]) <= 1',
    'min(data["a"]) >= 0',
    'max(data["a"]) == 0',
    'mean(data["a"]) < 1.1',
    'mean(data["a"], 5) < 1.1',
    'mean(data["a"], 3, 9) > 0.6',
    'mean(data["a"], -6, -1) < 1.0',
    'mean(data["a"],-6,-1) < 1.0',
    'mean(data["a"], -3) < 1.0',
    'mean(data["a"], ignore_top_p=0.25) < 1.0',
    'median(data["a"]) < 1.0',
    'median(data["a"], 4) < 1.0',
    'abs(median(data["a"])) < 0.5',
    'ratio_above(data["a"], 1.0) < 0.3',
    'len(data["a"]) == 10',
    '"3" in data["a"]',
    'data["a"]["2"] < 1.0',
    "data['a']['2'] > 0.5",
    'data["a"]["2"] == 1.0',
    'data["score"] >= 0.5',
    'data["word"] == "yes"',
    '(data["a"]["1"] - mean(data["a"], -6, -1)) / data["a"]["1"] > 0.2',
    'mean(data["a"], -5, -1) < 0.7 * data["a"]["1"]',
]


def samples() -> list[dict[str, Any]]:
    """Return data of several lengths and offsets (a resumed run begins later), finite and not empty."""
    chance = random.Random(4)  # noqa: S311 - test data
    found: list[dict[str, Any]] = []
    for first, last in ((1, 10), (1, 2), (3, 12), (0, 9), (1, 1), (8, 10), (1, 25)):
        for scale in (0.5, 2.0):
            series = {str(step): round(chance.uniform(0.0, scale), 3) for step in range(first, last + 1)}
            found.append({"a": series, "score": scale / 4, "word": chance.choice(["yes", "no"])})
    found.append({"a": {"1": 0.0, "2": 1.0, "3": 0.0}, "score": 0.5, "word": "yes"})
    found.append({"a": {"2": 1.0, "10": 40.0, "1": 1.02}})
    found.append({})
    return found


def series(*values: float, first: int = 1) -> dict[str, dict[str, float]]:
    return {"a": {str(step): value for step, value in enumerate(values, first)}}


@pytest.mark.parametrize("decision", json.loads(DECISIONS.read_text()), ids=lambda d: f"{d['expr']}-{d['sample']}")
def test_same_decision_as_recorded_from_the_original(decision: dict[str, Any]) -> None:
    result = decide(decision["expr"], samples()[decision["sample"]])
    if "left by ignore_top_p" not in result.text:
        assert (result.verdict is Verdict.PASS) is decision["passed"], result.text


@pytest.mark.parametrize(
    ("expr", "steps"),
    [
        ('mean(data["a"], 20) < 1', "20 to 25, 6 points"),
        ('mean(data["a"], -6, -1) < 1', "20 to 24, 5 points"),
        ('mean(data["a"], 1, 3) < 1', "1 to 2, 2 points"),
        ('mean(data["a"], -1) < 1', "25"),
        ('median(data["a"]) < 1', "1 to 25, 25 points"),
    ],
)
def test_windows_count_as_the_original(expr: str, steps: str) -> None:
    assert decide(expr, series(*[0.5] * 25)).steps == steps


def test_window_of_a_resumed_run_counts_from_its_largest_step() -> None:
    assert decide('mean(data["a"], -6, -1) < 1', series(*[0.5] * 10, first=41)).steps == "45 to 49, 5 points"


@pytest.mark.parametrize(
    "expr", ['max(data["a"]) < 1.05', 'min(data["a"]) > 0.5', 'ratio_above(data["a"], 1.05) < 0.1']
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "NaN", "-Infinity"])
def test_value_that_is_not_finite_fails_wherever_it_stands(expr: str, bad: Any) -> None:
    for place in range(3):
        values: list[Any] = [1.0, 1.0, 1.0]
        values[place] = bad
        result = decide(expr, series(*values))
        assert result.verdict is Verdict.FAIL
        assert f"at step {place + 1} (1 of 3 values are not finite)" in result.text


def test_nan_outside_of_the_window_or_step_fails_too() -> None:
    data = series(math.nan, 1.0, 1.0)
    assert not passes('mean(data["a"], 2) < 2', data)
    assert not passes('data["a"]["3"] < 2', data)
    assert not passes('"3" in data["a"]', data)
    assert not passes('data["score"] < 2', {"score": math.nan})


def test_check_may_say_that_values_need_not_be_finite() -> None:
    data = series(1.0, math.nan, 1.0)
    result = decide('max(finite_only(data["a"])) < 2', data)
    assert result.verdict is Verdict.PASS
    assert "left out as not finite: a at step 2" in result.text
    assert decide('finite(data["a"])', data).text == 'finite(data["a"]) is false'
    assert not passes('max(finite_only(data["a"])) < 2', series(math.nan))


@pytest.mark.parametrize(
    "expr", ['ratio_above(data["a"], 1.05) < 0.1', 'len(data["a"]) == 0', 'max(data["a"]) < 1', 'finite(data["a"])']
)
def test_empty_series_fails(expr: str) -> None:
    result = decide(expr, {"a": {}})
    assert (result.verdict, result.text) == (Verdict.FAIL, "no points in a")


def test_missing_step_says_what_was_logged_last() -> None:
    result = decide('data["a"]["500"] > 0.1', series(*[1.0] * 499))
    assert result.text == "step 500 absent from a, last logged 499"
    assert not passes('"500" in data["a"]', series(*[1.0] * 499))


def test_missing_metric_names_a_similar_one() -> None:
    assert decide('max(data["train/los"]) < 1', {"train/loss": {"1": 1.0}}).text == (
        "metric train/los absent; train/loss was logged"
    )


def test_single_point_left_by_trimming_cannot_pass() -> None:
    assert not passes('mean(data["a"], ignore_top_p=0.05) < 1.1', series(1.0, 40.0))
    assert passes('mean(data["a"], ignore_top_p=0.05) < 1.1', series(*[1.02] * 99, 40.0))
    assert not passes('mean(data["a"]) < 1.1', series(*[1.02] * 99, 40.0))
    assert passes('trimmed_mean(data["a"]) < 1.1', series(*[1.02] * 99, 40.0))
    assert not passes('trimmed_mean(data["a"], 0.4) < 1.1', series(1.0, 1.0, 40.0, 1.0))


@pytest.mark.parametrize(
    "data", [{"a": [1.0]}, {"a": 3.0}, {"a": None}, {"a": {"1": None}}, {"a": {"1": [1]}}, {"a": {"x": "y"}}]
)
def test_what_is_no_series_of_numbers_fails_in_words(data: dict[str, Any]) -> None:
    for expr in ('max(data["a"]) < 1e9', 'mean(data["a"]) < 1e9'):
        result = decide(expr, data)
        assert result.verdict is Verdict.FAIL
        assert "a" in result.text


def test_text_is_not_compared_with_a_number() -> None:
    assert not passes('data["word"] < 2', {"word": "1"})
    assert not passes('data["word"] == 1', {"word": "1"})
    assert not passes('data["score"] == "yes"', {"score": 1.0})


def test_division_by_zero_fails_in_words() -> None:
    assert decide('1 / data["a"]["1"] < 2', series(0.0)).text == "division by zero"


def test_result_gives_value_limit_margin_and_worst_step() -> None:
    result = decide('max(data["a"]) < 1.05', series(1.0, 1.078, 1.01))
    assert (result.value, result.limit, result.op, result.worst_step) == (1.078, 1.05, "<", "2")
    assert result.margin_percent == pytest.approx(-2.6667, abs=1e-3)
    assert result.text == 'max(data["a"]) is 1.078, 2.7 % beyond the limit 1.05, worst at step 2'
    assert result.tags == ("a",)


def test_limit_on_the_left_is_the_same_check() -> None:
    result = decide('1.05 > max(data["a"])', series(1.0, 1.078))
    assert (result.value, result.limit, result.op, result.verdict) == (1.078, 1.05, "<", Verdict.FAIL)


def test_a_value_far_beyond_the_limit_reads_without_an_exponent() -> None:
    result = evaluate(parse('max(data["a"]) < 0.8'), {"a": {"1": 7.951}})
    assert result.text == 'max(data["a"]) is 7.951, 890 % beyond the limit 0.8'


def test_value_just_beyond_the_limit_is_told_apart_from_it() -> None:
    assert "is 1.0500001," in decide('max(data["a"]) < 1.05', series(1.0500001)).text


def test_result_is_json_whatever_the_numbers() -> None:
    for value in (1e308, -1e308, 0.0):
        for expr in ('max(data["a"]) < 0', 'max(data["a"]) - -1e308 > 1', 'max(data["a"]) * 1e10 > 1'):
            json.dumps(decide(expr, series(value)).as_dict(), allow_nan=False)


def test_order_of_keys_does_not_matter() -> None:
    forward = series(3.0, 1.0, 2.0)
    backward = {"a": dict(reversed(forward["a"].items()))}
    for expr in [*FORMS, 'last(data["a"]) == 2', 'first(data["a"]) == 3', 'slope(data["a"]) < 0']:
        assert decide(expr, forward).verdict == decide(expr, backward).verdict


def test_history_compares_with_earlier_records() -> None:
    assert history(1.049, [1.01, 1.01, 1.012]) == "usually 1.01 (3 earlier records), now 1.049, outside 1.01 to 1.012"
    assert history(1.01, [1.0, 1.02, math.nan]) == "usually 1.01 (2 earlier records), now 1.01"
    assert history("yes", [1.0, 1.0]) is None
    assert history(1.0, [1.0]) is None


@given(st.lists(st.integers(0, 1), min_size=3, max_size=60))
@settings(deadline=None)
def test_more_bad_steps_never_turn_fail_into_pass(bad: list[int]) -> None:
    expr = 'ratio_above(data["a"], 1.0) <= 0.05'
    values = [2.0 if b else 0.5 for b in bad]
    if not passes(expr, series(*values)):
        for i in range(len(values)):
            assert not passes(expr, series(*[2.0 if j == i else v for j, v in enumerate(values)]))


JSON_LIKE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=4)),
    max_leaves=8,
)


@given(st.sampled_from([*FORMS, 'improves(data["a"])', 'robust_slope(data["a"]) > 0', 'finite(data["a"])']), JSON_LIKE)
@settings(max_examples=200, deadline=None)
def test_any_data_gives_a_decision_that_is_json(expr: str, content: Any) -> None:
    result = decide(expr, {"a": content, "word": content, "score": content})
    json.dumps(result.as_dict(), allow_nan=False)
    assert result.verdict in {Verdict.PASS, Verdict.FAIL}


def test_step_may_be_written_as_a_number() -> None:
    assert passes('data["a"][2] == 5', series(1.0, 5.0))


@pytest.fixture
def metrics_file(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"a": {"1": 1.0, "2": 2.0}, "b": {"1": math.nan}}))
    return path


def test_program_exits_0_1_or_2(metrics_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(metrics_file), 'max(data["a"]) < 3', 'min(data["a"]) > 0']) == 0
    assert main([str(metrics_file), 'max(data["a"]) < 3', 'max(data["b"]) < 3']) == 1
    assert main([str(metrics_file), 'max(data["a"]) < 3', "mxa(data) < 3"]) == 2
    assert "did you mean 'max'?" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json"), 'max(data["a"]) < 3']) == 2
    for text in ("[1]", "{", "[" * 100_000):
        (tmp_path / "bad.json").write_text(text)
        assert main([str(tmp_path / "bad.json"), 'max(data["a"]) < 3']) == 2


def test_program_prints_json(metrics_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(metrics_file), 'max(data["a"]) < 3', 'max(data["b"]) < 3', "--json", "--table-width", "80"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [(c["expr"], c["verdict"], c["value"]) for c in printed["checks"]] == [
        ('max(data["a"]) < 3', "Pass", 2.0),
        ('max(data["b"]) < 3', "Fail", None),
    ]


def record(upstream: Path) -> None:
    """Ask the original program for its decisions on FORMS and `samples` and keep them."""
    spec = importlib.util.spec_from_file_location("check_metrics", upstream / "tests" / "check_metrics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    decisions = [
        {"expr": expr, "sample": index, "passed": module.evaluate_check(data, expr)[0]}
        for expr in FORMS
        for index, data in enumerate(samples())
    ]
    lines = ",\n".join(json.dumps(decision) for decision in decisions)
    DECISIONS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
