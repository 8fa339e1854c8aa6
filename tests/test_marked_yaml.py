"""YAML as levels files may use it: one meaning for every scalar, lines for every mistake, bounded work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.marked_yaml import FileError, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1e-3", 0.001), ("a: 5e-7", 5e-7), ("a: 1E5", 1e5), ("a: -0.5", -0.5), ("a: 0", 0), ("a: -12", -12),
        ("a: '012'", "012"), ("a: 'no'", "no"), ("a: 2026-12-31", "2026-12-31"), ("a: 1.2.3", "1.2.3"), ("a:", None),
        ("a: ~", None), ("a: true", True), ("a: =", "="), ("a: 12e", "12e"), ("a: 1x", "1x"),
        ("a: |\n  no\n", "no\n"),
    ],
)  # fmt: skip
def test_plain_scalar_means_what_yaml_1_2_says(text: str, value: Any) -> None:
    found = parse(text.encode(), Path("x.yaml")).value["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: no", "write true, false or 'no'"), ("a: On", "'On'"), ("on: 1", "'on'"),
        ("a: 1:30", "90s"), ("a: 012", "decimal"), ("00: a", "decimal"), ("a: 0x1F", "decimal"), ("a: 1_000", "decimal"),
        ("a: +1", "decimal"), ("a: .inf", "finite"), ("a: .NaN", "finite"), ("a: 1e999", "beyond"),
        ("a: !!python/object/apply:os.system [x]", "tags"), ("a: !!int '3'", "tags"), ("a: &x [*x]", "itself"),
        ("<<: {a: 1}", "merge"), ("[1]: 2", "one word"), ("a: 1\na: 2", "first on line 1"), ("a: [", "not YAML"),
        ("a: 1\n---\nb: 2", "not YAML"), ("", "empty"), ("a: \x00", "not YAML"), ("[" * 5000, "not YAML"),
    ],
)  # fmt: skip
def test_what_yaml_readers_disagree_on_is_refused_with_its_line(text: str, word: str) -> None:
    with pytest.raises(FileError) as caught:
        parse(("# first\n" + text).encode() if text else b"", Path("x.yaml"))
    assert word.replace("line 1", "line 2") in str(caught.value)
    assert str(caught.value).startswith("x.yaml:")
    if text.startswith(("a: no", "a: 1:30", "00")):
        assert str(caught.value).startswith("x.yaml:2: ")


def test_bytes_that_are_no_utf8_name_their_line() -> None:
    with pytest.raises(FileError, match=r"x\.yaml:2: not UTF-8"):
        parse(b"a: 1\nb: \xff\n", Path("x.yaml"))


def test_aliases_that_multiply_are_stopped() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(FileError, match="more than"):
        parse("\n".join(lines).encode(), Path("x.yaml"))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet="ab:-[]{}&*!|>'\" \n#0159.ex", max_size=60).map(str.encode))
def test_no_input_makes_anything_but_a_file_error(data: bytes) -> None:
    try:
        parse(data, Path("x.yaml"))
    except FileError as error:
        assert all(line >= 1 for line, _ in error.problems)  # noqa: PT017 - most inputs are errors, some are not
