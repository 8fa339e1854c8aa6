"""The hand-over of weights: which timings are told, and which part is named where it broke."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.refit import BOUNDARIES, boundary, sentence, table
from tasks.triage.signatures import shipped

TOTAL = "timing/train/prepare_for_generation/total"
SERIES: dict[str, dict[str, Any]] = {
    TOTAL: {"0": 99.0, "10": 3.0, "2": 1.0},
    "timing/train/weight_sync": {"1": 0.5},
    "refit/transfer/payloads": {"1": 7},
    "timing/train/policy_training": {"1": 8.0},
    "timing/train/prepare_for_generation/odd": {"1": None},
}


def test_timings_of_the_hand_over_are_told_in_order_of_steps_and_nothing_else_is() -> None:
    found = table(SERIES, None)
    assert found is not None
    assert found["boundary"] is None
    rows = {row["tag"]: row for row in found["rows"]}
    assert list(rows) == ["refit/transfer/payloads", TOTAL, "timing/train/weight_sync"]
    assert rows[TOTAL] == {"tag": TOTAL, "steps": 2, "mean": 2.0, "max": 3.0, "last": 3.0}
    assert sentence(found) == f"refit 2 s a step, at most 3 s ({TOTAL})"


@pytest.mark.parametrize(
    ("signature", "where"),
    [
        ("shape-mismatch", "producer"), ("nccl", "transport"), ("zmq-timeout", "transport"), ("refit-worker", "consumer"),
        ("weight-names", "consumer"), ("refit-failed", None), ("disk-full", None), (None, None),
    ],
)  # fmt: skip
def test_the_first_error_names_the_part_and_a_wrapper_names_none(signature: str | None, where: str | None) -> None:
    assert boundary(signature) == where
    assert (table({}, signature) or {"boundary": None})["boundary"] == where


def test_a_run_without_a_hand_over_has_no_table() -> None:
    assert table({"train/loss": {"1": 1.0}}, None) is None
    assert sentence(None) == ""
    assert sentence(table({}, "nccl")) == "refit broke at the transport"


def test_every_signature_that_is_named_exists() -> None:
    known = {signature.id for signature in shipped()}
    assert {name for names in BOUNDARIES.values() for name in names} <= known
