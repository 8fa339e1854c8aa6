"""A case n times anew: nothing reused, nothing retried, no Fail hidden, the spread as numbers and a plot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tasks import repeat
from tasks.errors import UserError
from tasks.report import repeat as page
from tests.miniature import Miniature

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

EXPR = 'max(data["t"]) < 1.05'


def attempt(value: Any, verdict: str = "Pass", **more: Any) -> dict[str, Any]:
    """One attempt as perform collects it; its check follows its value."""
    good = isinstance(value, float) and value < 1.05
    margin = 100 * (1.05 - value) / 1.05 if isinstance(value, float) else None
    check = {
        "expr": EXPR, "op": "<", "limit": 1.05, "value": value, "margin_percent": margin,
        "verdict": "Pass" if good else "Fail",
    }  # fmt: skip
    reasons = [] if verdict == "Pass" else [{"kind": "check", "subject": EXPR, "text": f"is {value} <b>"}]
    made = {"id": "a", "path": "attempts/x/a", "verdict": verdict, "reasons": reasons, "checks": [check]}
    return {**made, **more}


def test_spread_is_told_against_the_limit():
    found = repeat.summarise("level0.x", 3, [attempt(1.01), attempt(1.04), attempt(1.02)])
    assert (found["verdict"], found["passed"], found["share"]) == ("Pass", 3, 1.0)
    row = found["checks"][0]
    assert (row["min"], row["median"], row["max"], row["passed"]) == (1.01, 1.02, 1.04, 3)
    assert row["spread_percent"] == pytest.approx(100 * 0.03 / 1.05)
    assert row["margin_percent"] == pytest.approx(100 * 0.01 / 1.05)  # that of the worst attempt


@pytest.mark.parametrize(
    ("tried", "verdict", "passed"),
    [
        ([attempt(1.0), attempt(1.2, "Fail"), attempt(1.0)], "Fail", 2),
        ([attempt(1.0), attempt(1.0, "Blocked"), attempt(1.2, "Fail")], "Fail", 1),
        ([attempt(1.0), attempt(1.0, "Blocked"), attempt(1.0)], "Blocked", 2),
        ([attempt(1.0), attempt(1.0)], "Blocked", 2),  # stopped before the third
        ([attempt(1.0, "Skipped"), attempt(1.0), attempt(1.0)], "Blocked", 2),
        ([], "Blocked", 0),
    ],
)
def test_only_all_of_them_are_a_pass(tried, verdict, passed):
    found = repeat.summarise("level0.x", 3, tried)
    assert (found["verdict"], found["passed"]) == (verdict, passed)
    assert f"{passed} of 3 attempts passed" in found["reasons"][0]["text"]


def test_values_that_are_no_numbers_are_kept_and_named():
    found = repeat.summarise("level0.x", 2, [attempt("NaN", "Fail"), attempt(1.0, checks=[])])
    assert found["checks"][0]["values"] == ["NaN", None]
    assert found["checks"][0]["median"] is None
    text = page.render(found)
    assert "no number in attempt 1" in text
    assert "<b>" not in text.partition("<tbody>")[2].replace("<b class", "")  # a reason is text, never markup
    assert "-" in list(repeat.table(found))[1]


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", ""])
def test_n_is_a_whole_number(text):
    with pytest.raises(UserError, match="write how many times"):
        repeat.times({"n": text})


def test_a_case_repeated_shows_its_spread_and_hides_no_fail(tmp_path: Path) -> None:
    mini = Miniature(tmp_path)
    mini.levels.write_text(mini.levels.read_text().replace("    suites: [mapping]\n", ""))
    trainer = mini.nemo_rl / "train.py"
    drift = '1.0 + 0.04 * len(os.listdir(os.environ["HOME"] + "/../.."))'  # 1.04, 1.08 in its folder
    trainer.write_text(trainer.read_text().replace("1.0 * FACTOR", drift))
    done = mini.doit("level0", "repeat:level0.train", "n=2")
    assert done.rc == 1, done.out
    level, repeated = done.report["cases"]
    assert (level["id"], level["verdict"]) == (
        "level0.train",
        "Pass",
    )  # its record stands, and says what repeats showed
    assert "1 of 2 attempts passed (doit repeat:level0.train)" in " ".join(level["limitations"])
    assert (repeated["id"], repeated["verdict"], len(repeated["attempts"])) == ("repeat.level0.train", "Fail", 2)
    assert done.report["sentence"].startswith("repeat.level0.train failed: 1 of 2 attempts passed")
    found = json.loads((mini.workspace / "report/repeat.json").read_text())
    assert [round(v, 4) for v in found["checks"][0]["values"]] == [1.04, 1.08]
    assert [one["verdict"] for one in found["attempts"]] == ["Pass", "Fail"]
    assert len({one["path"] for one in found["attempts"]}) == 2
    assert len(list((mini.workspace / "records/run/repeat.level0.train").glob("*.json"))) == 2
    assert "1/2  max(data[" in done.out
    assert (mini.workspace / "report/repeat.html").read_text().count("<circle") >= 4
