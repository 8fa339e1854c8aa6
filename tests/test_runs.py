"""What an attempt leaves is only what it made itself, and a case is started only where it can run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tasks import digests, gpus, resolution, runs, snapshot
from tasks.attempts import Tree
from tasks.digests import Entry
from tests.miniature import Miniature
from tests.test_chain import now_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EVENTS = "tests/functional/x/logs/exp_{n}/tensorboard/events.out.tfevents.{n}.h"


@pytest.fixture
def attempt(tmp_path: Path, make_repo: Callable[..., Path]) -> Callable[..., list[str]]:
    """Return a function that collects from an attempt whose tree came with results of an earlier experiment."""
    old = {
        EVENTS.format(n=1): "old",
        "tests/functional/x/metrics.json": '{"train/loss": {"500": 0.1}}',
        "step_1/w": "old",
    }
    repo = make_repo("rl", {**old, "train.py": ""})
    manifest = digests.scan("nemo_rl", repo, tmp_path / "cache.json")
    tree = snapshot.take(manifest, tmp_path / "snapshots")
    folder = tmp_path / "attempt"
    snapshot.work_copy(tree, folder / "work/nemo_rl")

    def collect(new: dict[str, str], files: tuple[str, ...] = ()) -> list[str]:
        for name, text in new.items():
            (folder / "work/nemo_rl" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "work/nemo_rl" / name).write_text(text)
        case: Any = SimpleNamespace(repo="nemo_rl", logs="tests/functional/x/logs", also_logs={}, files=files)
        trees = {"nemo_rl": Tree("nemo_rl", tree, manifest.digest, manifest.components)}
        missing = runs.collect(case, folder, trees)
        found = sorted(p.relative_to(folder / "logs").as_posix() for p in (folder / "logs").rglob("*") if p.is_file())
        return [*found, *(f"missing {glob}" for glob in missing)]

    return collect


def test_results_of_an_earlier_experiment_are_no_evidence(attempt):
    new = EVENTS.format(n=2)
    assert attempt({new: "new"}) == [new]  # neither the old event file nor the metrics.json with step 500


def test_a_run_that_writes_nothing_leaves_nothing(attempt):
    assert attempt({}) == []


def test_an_expected_file_must_be_new_and_not_empty(attempt):
    assert attempt({"step_2/w": "x", "step_3/w": ""}, ("step_1/*", "step_2/*", "step_3/*")) == [
        "missing step_1/*", "missing step_3/*"
    ]  # fmt: skip


def test_two_stars_stand_for_any_folders_or_none(attempt):
    globs = ("out/**/*.txt", "**/b", "out/**/c/*", "no/**/a.txt")
    assert attempt({"out/a.txt": "x", "b": "x", "out/x/y/c/d": "x"}, globs) == ["missing no/**/a.txt"]


def test_a_script_that_the_change_renamed_blocks_its_case_before_anything_starts(tmp_path: Path) -> None:
    now = now_of(Miniature(tmp_path))
    now.workspace.root.mkdir(parents=True)
    case = now.case("level0.train")
    assert runs.preflight(now, case, now.place) == []
    gone = replace(case, command=(), script="tests/functional/renamed.sh")
    done = resolution.execute(now, gone)
    assert done.verdict == "Blocked"
    assert [(r.kind, r.text) for r in done.reasons] == [("script", "not in this NeMo-RL: tests/functional/renamed.sh")]


def test_another_gpu_model_count_or_driver_asks_for_another_run(tmp_path: Path) -> None:
    now = now_of(Miniature(tmp_path))
    case = replace(now.case("level0.train"), gpus=1)
    seen = set()
    for visible in (
        gpus.Gpus(("A",), "1.0"),
        gpus.Gpus(("B",), "1.0"),
        gpus.Gpus(("A", "A"), "1.0"),
        gpus.Gpus(("A",), "2.0"),
    ):
        now.__dict__["gpus"] = visible
        seen.add(runs.inputs(now, case)["gpus"])
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("path", "reached"),
    [
        ("examples/configs/grpo_math_1B_megatron.yaml", True), ("tests/functional/grpo_megatron.sh", True),
        ("uv.lock", True), ("tests/check_metrics.py", True), ("docs/guide.md", False), ("README.md", False),
    ],
)  # fmt: skip
def test_what_python_does_not_import_counts_too(path, reached):
    before = {"nemo_rl/x.py": Entry("100644", "0"), path: Entry("100644", "1")}
    after = {**before, path: Entry("100644", "2")}
    patterns = digests.COMPONENTS["nemo_rl"]
    assert (digests.digest_of(before, patterns) != digests.digest_of(after, patterns)) is reached
