"""Reading evidence: whose conversion was used, where modules came from, when another attempt is allowed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import answer, judging, levels
from tasks.files import sha256_json
from tasks.reason import Verdict
from tasks.records import Record
from tasks.settings import ROOT
from tasks.stage import Outcome
from tests.test_verdict import GOOD_LOG

SKIPPING = "Checkpoint already exists at {path}. Skipping import."


def converted(*paths: str) -> Any:
    lines = tuple(SKIPPING.format(path=path) for path in paths)
    return replace(GOOD_LOG, import_skipped=bool(lines), import_lines=lines)


@pytest.mark.parametrize(
    ("paths", "conversion", "foreign"),
    [
        ((), "fresh", False),
        (("/home/u/.cache/conversions/qwen",), "fresh", True),
        (("/b/attempts/c/20261201-1/work/conversions/qwen",), "fresh", True),
        (("/b/attempts/c/20261201-1/work/conversions/qwen",), "within_attempt", False),
        (("/e2e/attempt/work/conversions/qwen",), "within_attempt", False),
        (("/b/attempts/c/20261130-9/work/conversions/qwen",), "within_attempt", True),
        (("/e2e/attempt/work/conversions/qwen", "/cache/qwen"), "within_attempt", True),
    ],
)
def test_a_conversion_of_an_earlier_run_is_foreign(paths, conversion, foreign):
    case: Any = SimpleNamespace(conversion=conversion)
    found = judging.foreign_conversion(Path("/b/attempts/c/20261201-1"), case, converted(*paths))
    assert (found is not None) is foreign
    if foreign:
        assert found == SKIPPING.format(path=paths[-1])


def test_origins_are_judged_by_the_tree_with_the_wrong_ones_first(tmp_path: Path) -> None:
    roots = {"bridge": "/snap/bridge", "mcore": "/snap/mcore", "nemo_rl": "/snap/rl"}
    notes = [
        {"module": "megatron.bridge", "path": "/snap/bridge/src/megatron/bridge/__init__.py", "process": "driver"},
        {"module": "megatron.bridge", "path": "/snap/bridge-old/megatron/bridge/__init__.py", "process": "worker"},
        {"module": "megatron.core", "path": "/venv/megatron/core/__init__.py", "process": "worker"},
        {"module": "nemo_rl", "path": None, "process": "tool"},
    ]
    text = "".join(json.dumps(note) + "\n" for note in notes)
    (tmp_path / "host.1.jsonl").write_text(text + '{"module": "megatron.bri')  # killed while it wrote
    found = judging.read_origins(tmp_path, roots)
    assert [(o.module, o.expected) for o in found] == [
        ("megatron.bridge", False), ("megatron.core", False), ("megatron.bridge", True)
    ]  # fmt: skip


EXPR = 'max(data["x"]) < 1.05'


def baseline(verdict: str, value: float, *, same_inputs: bool = True) -> dict[str, Any] | None:
    """Compare a failed check of value 1.078 with a baseline record of the given verdict and value."""
    run = Record(
        "run",
        "baseline.c",
        {"image": "i", "gpus": "1x A"},
        {"attempts": [{"path": "a/1"}]},
        reusable=True,
        evidence={"log": "1"},
    )
    check = Record(
        "check", "baseline.c", {"run": sha256_json({"log": "1"})},
        {"verdict": verdict, "checks": [{"expr": EXPR, "value": value, "verdict": verdict}]}, reusable=True,
    )  # fmt: skip
    records = SimpleNamespace(find=lambda *_: run if same_inputs else None, history=lambda *_: [check])
    stage = SimpleNamespace(inputs=dict)
    now: Any = SimpleNamespace(records=records, case=lambda name: SimpleNamespace(id=name), run=lambda _: stage)
    case: Any = SimpleNamespace(id="c")
    mine = {"checks": [{"expr": EXPR, "value": 1.078047513961792, "verdict": "Fail"}]}
    return answer.baseline(now, case, "Fail", mine)


def test_the_same_value_on_the_baseline_is_said_to_be_pre_existing():
    found = baseline("Fail", 1.078047513961792)
    assert found is not None
    assert found["finding"] == "pre-existing"
    assert found["text"] == f"the vendored Bridge fails, too, with the same value: {EXPR}"
    other = baseline("Fail", 1.2)
    assert other is not None
    assert other["text"] == "the vendored Bridge fails, too"


def test_a_passing_baseline_makes_the_failure_new():
    found = baseline("Pass", 1.0)
    assert found is not None
    assert found["finding"] == "new"


def test_a_baseline_of_another_image_or_gpu_says_nothing():
    assert baseline("Fail", 1.078047513961792, same_inputs=False) is None


def test_another_word_on_the_conversion_merges_and_judges_anew(tmp_path: Path) -> None:
    # within_attempt allows two phases that differ about a step; kept for "fresh", such a merge would be a Pass
    record: Any = SimpleNamespace(evidence={}, artefact={"attempts": [{}]})
    pipe: Any = SimpleNamespace(
        outcomes={"run:level0.grpo_megatron": Outcome(Verdict.PASS, record=record),
                  "metrics:level0.grpo_megatron": Outcome(Verdict.PASS, record=record)},
        environment_of=lambda case: "",
    )  # fmt: skip
    case = levels.load(ROOT / "levels.yaml").case("level0.grpo_megatron")
    both = [replace(case, conversion=word) for word in ("fresh", "within_attempt")]
    for inputs in (judging.metrics_inputs, judging.check_inputs):
        one, other = (inputs(pipe, c) for c in both)
        assert one != other
