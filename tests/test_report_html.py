"""index.html: escaped, small, self-contained, the same for the same report, and usable without a script."""

from __future__ import annotations

import itertools
import json
import math
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from tasks.report import html
from tasks.report.curves import curves, split, thin
from tests import report_samples as samples

if TYPE_CHECKING:
    from pathlib import Path

VOID = {"meta", "link", "input", "br", "rect", "line", "polyline", "ellipse"}
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}"


class Page(HTMLParser):
    """Collects what the tests ask for, and fails where the elements do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in {"script", "style"}:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def page_of(root: Path, *cases: dict[str, Any], **more: Any) -> tuple[str, Page]:
    report = samples.report(*cases, **more)
    samples.write_evidence(root, report)
    text = html.render(report, root)
    return text, Page(text)


def test_full_page_has_everything_and_nothing_from_the_network(tmp_path: Path) -> None:
    report = samples.full_report()
    samples.write_evidence(tmp_path, report)
    text = html.render(report, tmp_path)
    page = Page(text)
    for words in (
        "Why", "What was asked", "Deliverables", "What ran, what was reused, and why", "Exactly what was tested",
        "not evidence against the Bridge provider", "k and v are swapped", "taken from the record of 2026-11-28T10:00:00Z on dgx-02",
        "the failure is new with this change", "AssertionError: token_mult_prob_error 3.2071 > 1.05", "./doitw why level0.grpo_megatron",
        "./doitw rehearse:level1.sft_megatron fresh=1", "./doitw baseline:level0.grpo_megatron fresh=1", "3 Fail (1 in quarantine)",
        "src/megatron/bridge/models/conversion/param_mapping.py", "-205 %",
    ):  # fmt: skip
        assert words in page.text, words
    assert not any("src" in attrs for _, attrs in page.tags)
    assert all((a["href"] or "").startswith(("#", "data:")) for _, a in page.tags if "href" in a)
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    assert all((a["href"] or "#")[1:] in ids for a in page.all("a"))


def test_verdict_comes_before_everything_else(tmp_path: Path) -> None:
    for case, word in ((samples.case(), "Pass"), (samples.failing_case(), "Fail"), (samples.blocked_case(), "Blocked")):
        text, page = page_of(tmp_path, case)
        assert f"<title>{word}: " in text
        assert page.text.split("Skip to the deliverables")[1].split()[1] == word


def test_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    first, _ = page_of(tmp_path, samples.failing_case(), samples.flaky_case())
    again, _ = page_of(tmp_path, samples.failing_case(), samples.flaky_case())
    assert first == again


def test_text_from_outside_is_never_markup(tmp_path: Path) -> None:
    case = samples.failing_case(
        title=NASTY, proves=NASTY, model=NASTY, command=[NASTY], chain=[NASTY], case=NASTY,
        reasons=[samples.reason(NASTY, NASTY, NASTY)], checks=[samples.check(NASTY, text=NASTY, value=NASTY)],
        first_error={"text": NASTY, "line": 3, "file": NASTY},
    )  # fmt: skip
    stage = {"name": NASTY, "state": NASTY, "why": NASTY, "needs": [NASTY]}
    report = samples.report(
        case, workspace=NASTY, requested=[NASTY], limitations=[NASTY], stages=[stage], sentence=NASTY
    )
    samples.write_evidence(tmp_path, {**report, "cases": []})
    log = tmp_path / case["attempts"][0]["path"] / "run.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"{NASTY}\n" * 5)
    (tmp_path / case["metrics"]).write_text(json.dumps({NASTY: {"1": 1.0, "2": 2.0}}))
    text = html.render(report, tmp_path)
    page = Page(text)
    assert text.count("<script") == 1
    assert not page.all("img")
    assert "onerror" not in {name for _, attrs in page.tags for name in attrs}
    assert "{{7*7}}" in page.text
    assert "49" not in page.text


def test_log_is_folded_with_the_root_error_marked(tmp_path: Path) -> None:
    text, page = page_of(tmp_path, samples.failing_case())
    assert '<span class="no">41 </span>AssertionError: token_mult_prob_error 3.2071 &gt; 1.05</mark>' in text
    assert "The last 160 lines of run.log" in page.text
    assert {"class": "log"} in page.all("details")
    assert "\x1b" not in text


def test_curves_show_asserted_tags_with_limit_and_baseline(tmp_path: Path) -> None:
    report = samples.report(samples.failing_case())
    samples.write_evidence(tmp_path, report)
    made = curves(report["cases"][0], tmp_path, max_points=120)
    assert [c.tag for c in made] == ["train/token_mult_prob_error", "train/reward", "train/loss"]
    assert [c.limits for c in made] == ["1.05", "0.3", ""]
    assert all(c.baseline for c in made)
    points = json.loads(made[0].data)
    assert len(points) == 20
    assert points[3][:2] == [4, "3.20988"]


def test_both_limits_of_a_tag_are_drawn(tmp_path: Path) -> None:
    both = [samples.check(), samples.check('min(data["train/token_mult_prob_error"]) > 0.9', limit=0.9)]
    report = samples.report(samples.case(checks=both))
    samples.write_evidence(tmp_path, report)
    assert curves(report["cases"][0], tmp_path, max_points=50)[0].limits == "0.9 and 1.05"
    assert html.render(report, tmp_path).count('<line class="limit"') == 2


def test_the_demo_offers_only_its_own_command(tmp_path: Path) -> None:
    _, page = page_of(tmp_path, samples.case(), demo=True)
    assert "./doitw demo fresh=1" in page.text
    assert "doitw why" not in page.text


def test_values_that_are_not_finite_are_named_and_cut_the_curve(tmp_path: Path) -> None:
    case = samples.case(checks=[samples.check()])
    path = tmp_path / case["metrics"]
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps({"train/token_mult_prob_error": {"1": 1, "2": 1.2, "3": "NaN", "4": 1.1, "x": 2, "5": "Infinity"}})
    )
    (curve,) = curves(case, tmp_path, max_points=50)
    assert curve.lost == "3, 5"
    assert len(curve.lines) == 1
    assert len(curve.dots) == 1
    assert "not finite at step 3, 5" in html.render(samples.report(case), tmp_path)
    path.write_text('{"train/token_mult_prob_error": {"1": "NaN"}}')
    assert curves(case, tmp_path, max_points=50)[0].lost == "1"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"train/token_mult_prob_error": 3}', b"\xff", b"[" * 100_000])
def test_unusable_metrics_give_a_page_without_curves(content: bytes, tmp_path: Path) -> None:
    case = samples.case()
    (tmp_path / case["metrics"]).parent.mkdir(parents=True)
    (tmp_path / case["metrics"]).write_bytes(content)
    assert "<svg" not in html.render(samples.report(case), tmp_path)


def test_a_spike_survives_downsampling() -> None:
    points = [(n, 1.0 + 0.001 * math.sin(n)) for n in range(10_000)]
    points[7777] = (7777, 50.0)
    few = thin(points, 60)
    assert len(few) <= 62
    assert (7777, 50.0) in few
    assert few[0] == points[0]
    assert few[-1] == points[-1]
    assert few == sorted(few)
    assert split({"2": 1.0, "1": "-Infinity", "a": 1, "3": None, "4": 1e308}) == ([(2, 1.0)], [1, 3, 4])


@pytest.mark.parametrize(
    ("value", "limit", "expected"),
    [
        (1.0, 2.0, {"left": "0.00", "width": "47.17", "limit": "94.34"}),
        (4.0, 2.0, {"left": "0.00", "width": "94.34", "limit": "47.17"}),
        (0.0, 0.0, {"left": "0.00", "width": "0.40", "limit": "0.00"}),
        ("NaN", 1.0, None),
        (None, 1.0, None),
        (math.inf, 1.0, None),
        (True, 1.0, None),
        (10**400, 1.0, None),
    ],
)
def test_bar_lies_on_a_scale_with_zero(value: Any, limit: Any, expected: dict[str, str] | None) -> None:
    assert html.bar(value, limit) == (expected and {**expected, "earlier": []})
    if expected:
        assert 0 <= float(expected["left"]) + float(expected["width"]) <= 100.5


def test_bar_of_negative_numbers_stays_on_the_track() -> None:
    for value, limit in ((-3.0, -1.0), (-3.0, 2.0), (3.0, -2.0)):
        bar = html.bar(value, limit)
        assert bar is not None
        assert all(0 <= float(bar[k]) <= 100 for k in ("left", "width", "limit"))
        assert float(bar["left"]) + float(bar["width"]) <= 100


def test_earlier_values_are_marked_on_the_bar_and_named(tmp_path: Path) -> None:
    bar = html.bar(1.0, 2.0, [0.5, 0.5, 9e9, -3, "NaN", None])
    assert bar is not None
    assert bar["earlier"] == ["23.6", "100.0", "0.0"]
    told = "usually 1.01 (3 earlier records), now 1.0213"
    case = samples.case(checks=[samples.check(earlier=[1.01, 1.01, 1.012], history=told), samples.check(earlier=[1.5])])
    text, page = page_of(tmp_path, case)
    assert text.count("<s style=") == 3
    assert told in page.text
    assert "earlier: 1.5" in page.text


def test_root_error_is_linked_to_its_line(tmp_path: Path) -> None:
    _, page = page_of(tmp_path, samples.failing_case())
    assert {"href": "#d2-L41"} in page.all("a")
    assert {"id": "d2-L41"} in page.all("mark")
    (tmp_path / "attempts/level0.grpo_megatron/0001/run.log").unlink()
    text = html.render(samples.report(samples.failing_case()), tmp_path)
    assert "run.log:41" in text
    assert "-L41" not in text


@pytest.mark.parametrize("cases", [50, 210])
def test_page_stays_below_a_megabyte(cases: int, tmp_path: Path) -> None:
    many = [samples.failing_case(case=f"grpo_{n}") for n in range(cases)]
    for n, case in enumerate(many):
        case["attempts"] = [samples.attempt(f"level0.grpo_{n}")]
        case["metrics"] = many[0]["attempts"][0]["path"] + "/metrics.json"
        case["reasons"] = case["reasons"] * 3
    one = {"state": "ran", "why": "bridge, nemo_rl changed", "needs": ["probe", "unit:bridge-mapping"]}
    stages = [{"name": f"{kind}:level0.grpo_{n}", **one} for kind in ("run", "check") for n in range(cases)]
    report = samples.report(*many, stages=stages)
    samples.write_evidence(tmp_path, {**report, "cases": report["cases"][:1]}, steps=600, lines=10)
    for case in many:
        log = tmp_path / case["attempts"][0]["path"] / "run.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("<&\"'>" * 20_000 if cases == 50 else "x\n" * 400)
    text = html.render(report, tmp_path)
    assert len(text.encode()) < (1_000_000 if cases == 50 else 3_000_000)
    assert text.count("<details class=") >= cases


def test_demo_banner_only_in_the_demo(tmp_path: Path) -> None:
    banner = "Nothing on this page is evidence about a real Bridge"
    assert banner in page_of(tmp_path, samples.case(), demo=True)[1].text
    assert banner not in page_of(tmp_path, samples.case())[1].text


def test_controls_and_graphics_have_names_for_screen_readers(tmp_path: Path) -> None:
    text, page = page_of(tmp_path, samples.failing_case(), samples.blocked_case())
    assert page.all("html") == [{"lang": "en"}]
    assert all(a.get("aria-label") for a in page.all("svg"))
    assert all(a.get("role") == "img" for a in page.all("svg"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(a.get("scope") in {"row", "col"} for a in page.all("th"))
    labelled = {a["for"] for a in page.all("label")}
    assert all(a["id"] in labelled for a in page.all("input"))
    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text
    levels = [int(tag[1]) for tag, _ in page.tags if tag in {"h1", "h2", "h3"}]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_checks_of_a_case_that_did_not_run_are_not_shown_as_failed(tmp_path: Path) -> None:
    case = samples.not_run_case(checks=[samples.check(verdict="Fail", value=None, limit=None)])
    _text, page = page_of(tmp_path, case)
    assert "not evaluated" in page.text
    assert "Fail" not in page.text.replace("not evaluated", "").split("Limitations")[0].split("Deliverables", 1)[1]


def test_report_with_holes_still_gives_a_page(tmp_path: Path) -> None:
    holes: dict[str, Any] = {
        "cases": [{"level": "level0", "case": "x"}, None],
        "suites": [{}],
        "proofs": [{}],
        "probe": {},
        "stages": [{}],
    }
    text = html.render(holes, tmp_path)
    Page(text)
    assert "<title>Blocked: nemo-rl-e2e</title>" in text
    assert "Nothing was executed." in html.render({}, tmp_path)
