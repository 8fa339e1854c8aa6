"""Expected and forbidden lines: faulty expressions, and such that may take for ever, are refused."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import UserError
from tasks.triage.danger import danger
from tasks.triage.patterns import compile_user, needles
from tasks.triage.signatures import shipped
from tests.triage.logs import MEGATRON, facts


def test_expected_and_forbidden_lines(tmp_path: Path) -> None:
    log = f"a\n{MEGATRON}loss: 0.5\nNaN found\nNaN found\n"
    found = facts(
        tmp_path, log.encode(), expect=[r"^loss: \d", "never", r"\d\.\d$"], forbid=["NaN", "(?i)nan FOUND", "Inf"]
    )
    assert found.expected == {r"^loss: \d": True, "never": False, r"\d\.\d$": True}
    assert found.forbidden == {"NaN": 3, "(?i)nan FOUND": 3, "Inf": None}


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", r"\8", "(?P<x>a)(?P<x>b)", "[z-a]", "(?z)"])
def test_faulty_expression_is_the_users_error(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UserError, match=r"expect_log.*not valid"):
        facts(tmp_path, b"", expect=[pattern])


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(.*)*x", "(.+,)*y", "(a|ab)*c", "(a|a)+b", r"(\w+\s?)*$", "(x+x+)+y", "(?:a?)+b", "(a*){5,}", ".*?(.*.*)*z", "(?:(?:a+)b?)*c", "x*x*x*x*y"]
)  # fmt: skip
def test_expression_that_may_take_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="may take for ever"):
        compile_user(pattern, "forbid_log")


@pytest.mark.parametrize(
    "pattern", [r"Step \d+/\d+.*loss.*nan", r"(\w+\s)*end", "([^,]*,)*x", "(foo|bar)+", r".*error.*", r"(?:\d{1,3}\.){3}\d{1,3}", "(?:ab)+", r"reward: +\d+\.\d+", "a.*b.*c", r"(?i)out of memory|nan\b"]
)  # fmt: skip
def test_usual_expressions_are_accepted_and_fast(pattern: str) -> None:
    compiled = compile_user(pattern, "expect_log")
    start = time.process_time()
    for line in ("a" * 20000, "Step 1/" * 3000, "loss" * 5000, "ab," * 7000, "a b" * 6000, " " * 20000, "1.1" * 6000):
        compiled.found_in(line)
    assert time.process_time() - start < 10


@given(st.from_regex(r"[ab.*+?()|,]{1,12}", fullmatch=True))
@settings(deadline=None, max_examples=150)
def test_no_accepted_expression_explodes(pattern: str) -> None:
    try:
        compiled = compile_user(pattern, "x")
    except (UserError, FutureWarning):
        return
    start = time.process_time()
    for line in ("a" * 28 + "!", "ab" * 14 + "!", "b" * 28, "a," * 14):
        compiled.found_in(line)
    assert time.process_time() - start < 1


@given(
    st.text("ab1 \n", max_size=30),
    st.sampled_from(["ab+1", "(ab|b1) a", "a(?:b1)?b", "(?:aab)+", "[ab]1b a", "a.b1|b a1"]),
)
@settings(deadline=None)
def test_needles_are_in_every_match(text: str, pattern: str) -> None:
    found = needles(pattern)
    if found and re.search(pattern, text):
        assert any(n in text.encode() for n in found)


def test_danger_is_empty_for_plain_patterns() -> None:
    import importlib

    parser = importlib.import_module("re._parser")
    assert [danger(parser.parse(s.pattern.pattern)) for s in shipped() if s.id in {"disk-full", "resources"}] == [
        "",
        "",
    ]
