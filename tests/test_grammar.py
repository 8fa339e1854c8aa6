"""What is in the grammar of checks and what is refused, at its column."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.checks import CheckSyntaxError, evaluate, parse
from tasks.grammar import MAX_LENGTH


@pytest.mark.parametrize(
    ("expr", "column"),
    [
        ("", 1),
        ('max(data["a"])', 1),
        ('data["a"]', 1),
        ('max(data["a"]) < 1 < 2', 22),
        ('max(data["a"]) != 1', 19),
        ('max(data["a"]) not in data["b"]', 23),
        ('max(data["a"]) < 1 and 1 < 2', 1),
        ('mxa(data["a"]) < 1', 1),
        ('max(dta["a"]) < 1', 5),
        ('max(data["a"]) < 2 ** 9 ** 9', 23),
        ('max(data["a"]) + 1 < 2', 18),
        ('max(data["a"]) < x', 18),
        ("max(data) < 1", 5),
        ('max(data["a"]["1"]) < 1', 5),
        ('max(data["a"], 3) < 1', 16),
        ('mean(data["a"], 1, 2, 0.1, 5) < 1', 28),
        ('mean(data["a"], ignore_top=0.1) < 1', 17),
        ('mean(data["a"], 1, range_start=2) < 1', 20),
        ('mean(data["a"], ignore_top_p=1.5) < 1', 30),
        ('mean(data["a"], True) < 1', 17),
        ('ratio_above(data["a"]) < 1', 1),
        ('improves(data["a"], "sideways")', 21),
        ('data["a"]["last"] < 1', 11),
        ('data["a"][-1] < 1', 11),
        ("data[0] < 1", 6),
        ('data["a"].get("1") < 1', 1),
        ('data["a"]["1"]["2"] < 1', 1),
        ('"3" < data["a"]', 1),
        ('3 in data["a"]', 1),
        ('max(data["a"]) == "yes"', 1),
        ("1 < 2", 1),
        ('__import__("os").system("x") < 1', 1),
        ('(lambda: 1)() < max(data["a"])', 2),
        ('[x for x in data["a"]] == 1', 1),
        ('f"{data}" == data["a"]', 1),
        ('max(data["a"]) < 1e999', 18),
        ('max(data["a"]) < ' + "9" * 50, 18),
        ('max(data["a"]) < 1j', 18),
        ("max(data['a\\x00']) < 1", 12),
        ('max(data["a"]) < 1 #', 1),
        ('  mxa(data["é"]) < 1', 3),
        ('max(data["é"], data["b"]) < 1', 16),
        ('max(data["a" "b") < 1', None),
        ('max(*data["a"]) < 1', 5),
        ('max(**data["a"]) < 1', 1),
        ('max(x := data["a"]) < 1', None),
        ('max(data["a"]) < 1; 2', None),
    ],
)
def test_what_is_not_in_the_grammar_is_refused_at_its_column(expr: str, column: int | None) -> None:
    if expr.endswith("#"):
        assert parse(expr).op == "<"  # a comment, and harmless
        return
    with pytest.raises(CheckSyntaxError) as caught:
        parse(expr)
    if column is not None:
        assert caught.value.column == column, caught.value
    assert caught.value.pointed().splitlines()[2].index("^") == caught.value.column + 1


@pytest.mark.parametrize(
    "expr",
    [
        "(" * 400 + 'max(data["a"])' + ")" * 400 + " < 1",
        "-" * 900 + '1 < data["a"]',
        "abs(" * 60 + 'max(data["a"])' + ")" * 60 + " < 1",
        "1 - " * 200 + 'data["a"] < 1',
        "data" + '["a"]' * 150 + " < 1",
        'max(data["' + "a" * MAX_LENGTH + '"]) < 1',
        '"\ud800" in data["a"]',
        'max(data["a"]) < 1\x00',
    ],
)
def test_hostile_expressions_are_refused_at_once(expr: str) -> None:
    with pytest.raises(CheckSyntaxError):
        parse(expr)


@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from([*"()[]<>=-*/,. \n", "data", '"a"', "max", "1", "in", "not", "if", "else"]), max_size=25
        ).map("".join),
    )
)
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_check_or_a_syntax_error(text: str) -> None:
    import warnings

    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own remarks on "1in" and the like
        try:
            check = parse(text)
        except CheckSyntaxError as raised:
            error = raised
    if error is None:
        assert evaluate(check, {"a": {"1": 1.0}}).text
    else:
        assert 1 <= error.column <= len(text) + 2
