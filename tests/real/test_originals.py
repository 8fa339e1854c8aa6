"""The same answers as NeMo-RL's own two programs, asked side by side (NEMO_RL_REPO)."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks import metrics
from tasks.checks import Verdict, evaluate, parse
from tasks.grammar import Call, Constant, Value
from tasks.script_checks import read_checks, unresolved
from tasks.weaknesses import weaknesses
from tests import event_log

if TYPE_CHECKING:
    from types import ModuleType

REPO = os.environ.get("NEMO_RL_REPO")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not REPO, reason="NEMO_RL_REPO is not set: no original to compare with"),
]


class Corpus(list[str]):
    def __repr__(self) -> str:
        return f"{len(self)} expressions"  # what hypothesis prints of a failing example


def original(name: str) -> ModuleType:
    path = Path(str(REPO)) / "tests" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dump() -> ModuleType:
    from rich.console import Console

    module = original("json_dump_tb_logs.py")
    module.console = Console(quiet=True)
    return module


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    return original("check_metrics.py")


def corpus() -> dict[str, Path]:
    """Return every check expression of the checkout and one script that has it."""
    found: dict[str, Path] = {}
    for script in sorted(Path(str(REPO)).glob("**/*.sh")):
        if "check_metrics.py" in script.read_text(errors="replace"):
            for expr in read_checks(script):
                found.setdefault(expr, script)
    return found


# Event files

TAGS = st.sampled_from(["train/loss", "train/reward", "validation/accuracy", "ray/node.0.gpu.0.mem_gb", "ü x"])
FLOATS = st.floats(width=32)
POINTS = st.lists(st.tuples(TAGS, st.integers(-2, 400), FLOATS), max_size=30)
EXTRAS = st.sampled_from(["none", "histogram", "restart", "old version", "no version", "several", "long"])


def extra(kind: str) -> list[bytes]:
    return {
        "histogram": [event_log.histogram("weights", 1)],
        "restart": [event_log.restart(3)],
        "several": [event_log.scalars({"train/loss": 1.0, "train/reward": 2.0}, 5)],
        "long": [event_log.scalar("t" * 5000, 1, 1.0)],
    }.get(kind, [])


@given(st.lists(st.tuples(POINTS, EXTRAS), min_size=1, max_size=3), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_bytes_as_the_original_dump(
    dump: ModuleType, tmp_path_factory: pytest.TempPathFactory, logs: list[tuple[Any, str]], strict: bool
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    for index, (points, kind) in enumerate(logs):
        path = folder / f"exp_{index:03}" / "tensorboard" / f"events.out.tfevents.{index}.host"
        records = [event_log.scalar(tag, step, value) for tag, step, value in points]
        middle = len(records) // 2
        event_log.write(path, records[:middle] + extra(kind) + records[middle:], wall_time=1000.0 + index)
        if kind == "old version":
            path.write_bytes(event_log.version(1000.0 + index, "brain.Event:1") + b"".join(records))
        elif kind == "no version":
            path.write_bytes(b"".join(records))
        os.utime(path, (1000 + index, 1000 + index))
    merged = metrics.merge([folder / f"exp_{index:03}" for index in range(len(logs))])  # as the file times order them
    dump.merge_tb_logs_to_json(str(folder), str(folder / "theirs.json"))
    assert metrics.to_json(merged, allow_nan=True) == (folder / "theirs.json").read_bytes()
    if strict:
        repeats_nan = any(math.isnan(value) for points, _ in logs for _, _, value in points)
        try:
            dump.merge_tb_logs_to_json(str(folder), None, error_on_conflicts=True)
        except ValueError:
            if not repeats_nan:  # theirs takes a repeated NaN for a conflict
                with pytest.raises(metrics.ConflictError):
                    metrics.merge(folder, conflicts_are_errors=True)
        else:
            metrics.merge(folder, conflicts_are_errors=True)


@pytest.mark.parametrize("cut", [1, 13, 47, 60])
def test_same_points_as_the_original_from_a_cut_file(dump: ModuleType, tmp_path: Path, cut: int) -> None:
    path = event_log.write(tmp_path / "events.out.tfevents.1", event_log.ramp("train/loss", range(1, 11)))
    path.write_bytes(path.read_bytes()[:-cut])
    dump.merge_tb_logs_to_json(str(tmp_path), str(tmp_path / "theirs.json"))
    merged = metrics.merge(tmp_path)
    assert metrics.to_json(merged) == (tmp_path / "theirs.json").read_bytes()
    assert merged.problems


# Checks


def test_every_expression_of_the_checkout_is_in_the_grammar() -> None:
    found = corpus()
    assert len(found) > 100
    for expr in found:
        assert not unresolved(expr), expr
        parse(expr)


def test_no_expression_of_the_checkout_can_never_fail_or_never_pass() -> None:
    hopeless = {expr: w for expr in corpus() for w in weaknesses(parse(expr)) if w.startswith("never")}
    assert hopeless == {}


def difference_is_meant(expr: str, data: dict[str, Any]) -> bool:
    """Return whether one of the three exceptions of tasks/checks.py applies."""
    check = parse(expr)
    for tag in check.tags:
        series = data.get(tag)
        values = series.values() if isinstance(series, dict) else [series]
        if series == {} or any(isinstance(value, float) and not math.isfinite(value) for value in values):
            return True
    return "left by ignore_top_p" in evaluate(check, data).text


def near(expr: str) -> st.SearchStrategy[float]:
    """Return numbers on both sides of the constants of an expression."""
    constants = [
        float(n.value) for n in parse(expr).nodes() if isinstance(n, Constant) and not isinstance(n.value, str)
    ]
    around = [c * f for c in constants or [1.0] for f in (0.5, 0.99, 1.0, 1.01, 2.0)]
    return st.one_of(st.sampled_from([*around, 0.0, -1.0]), st.floats(-1e6, 1e6), st.just(math.nan))


@given(st.data())
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_decision_as_the_original_checker(
    checker: ModuleType, expressions: list[str], data: st.DataObject
) -> None:
    expr = expressions[data.draw(st.integers(0, len(expressions) - 1))]
    check = parse(expr)
    singles = {n.tag for n in check.nodes() if isinstance(n, Value) and n.step is None}
    named = [int(n.step) for n in check.nodes() if isinstance(n, Value) and n.step]
    named += [int(n.value) for n in check.nodes() if isinstance(n, Constant) and str(n.value).isdecimal()]
    named += [int(abs(float(v))) for n in check.nodes() if isinstance(n, Call) for _, v in n.arguments]
    metrics_data: dict[str, Any] = {}
    for tag in check.tags:
        if data.draw(st.integers(0, 19)) == 0:
            continue
        if tag in singles:
            metrics_data[tag] = data.draw(st.one_of(near(expr), st.sampled_from(["yes", "no"])))
            continue
        steps = data.draw(st.sets(st.one_of(st.integers(0, 25), st.sampled_from([*named, 1])), max_size=30))
        start = data.draw(st.sampled_from([0, 0, 0, 7]))  # a resumed run begins later
        metrics_data[tag] = {str(step): data.draw(near(expr)) for step in sorted(steps) if step >= start}
    theirs, _, _ = checker.evaluate_check(metrics_data, expr)
    ours = evaluate(check, metrics_data).verdict is Verdict.PASS
    if difference_is_meant(expr, metrics_data):
        assert theirs or not ours
    else:
        assert ours == theirs


@pytest.fixture(scope="module")
def expressions() -> Corpus:
    return Corpus(corpus())
