"""Models before a run: what of a snapshot is missing, what MODEL_PATH means, and what is Blocked with a remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import levels, models
from tests.miniature import LEVELS

WHOLE = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}),
    "1.safetensors": "x",
    "2.safetensors": "x",
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> levels.Case:
    path = tmp_path_factory.mktemp("levels") / "levels.yaml"
    path.write_text(LEVELS)
    return replace(next(iter(levels.load(path).cases())), model="org/model-8B", also_models=("org/draft-1B",))


def cached(home: Path, name: str, files: dict[str, str]) -> None:
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots/abc").mkdir(parents=True)
    for file, text in files.items():
        (repository / "snapshots/abc" / file).write_text(text)


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ((), None),
        (("config.json",), "no config.json"),
        (("tokenizer.json",), "no tokenizer"),
        (("2.safetensors",), "lacks 1 of 2 weight files, first 2.safetensors"),
        (("model.safetensors.index.json",), None),
        (("model.safetensors.index.json", "1.safetensors", "2.safetensors"), "no weights"),
    ],
)
def test_a_snapshot_is_whole_or_says_what_it_lacks(tmp_path: Path, gone: tuple[str, ...], told: str | None) -> None:
    cached(tmp_path, "org/m", {name: text for name, text in WHOLE.items() if name not in gone})
    found = models.lacking("org/m", {"HF_HOME": str(tmp_path)})
    assert (found is None) if told is None else (told in (found or ""))
    folder = tmp_path / "hub/models--org--m/snapshots/abc"
    assert (models.lacking(str(folder), {}) is None) == (told is None)  # MODEL_PATH is held to the same


def test_a_link_to_a_blob_that_is_not_there_counts_as_missing(tmp_path: Path) -> None:
    cached(tmp_path, "org/m", WHOLE)
    file = tmp_path / "hub/models--org--m/snapshots/abc/1.safetensors"
    file.unlink()
    file.symlink_to("../../blobs/gone")
    assert "first 1.safetensors" in (models.lacking("org/m", {"HF_HOME": str(tmp_path)}) or "")


def test_offline_without_the_snapshot_is_blocked_with_the_command_that_mends_it(
    case: levels.Case, tmp_path: Path
) -> None:
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert [r.subject for r in models.preflight(case, offline)] == ["org/model-8B", "org/draft-1B"]
    assert "doit fetch-models level0.train" in models.preflight(case, offline)[0].text
    assert "HF_HOME" in models.preflight(case, {"HF_HUB_OFFLINE": "1"})[0].text
    cached(tmp_path, "org/model-8B", WHOLE)
    cached(tmp_path, "org/draft-1B", {k: v for k, v in WHOLE.items() if k != "tokenizer.json"})
    assert models.preflight(case, offline) == []


def test_a_disk_that_is_too_small_for_what_is_missing_is_blocked(
    case: levels.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": int(15e9)})
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: usage)
    (reason,) = models.preflight(case, {"HF_HOME": str(tmp_path / "later")})
    assert "take about 20 GB" in reason.text
    assert "has 15 GB free" in reason.text
    cached(tmp_path, "org/model-8B", WHOLE)
    assert models.preflight(case, {"HF_HOME": str(tmp_path)}) == []


def test_model_path_brings_its_tokenizer_and_must_be_whole(
    case: levels.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models.overrides(case) == ()
    monkeypatch.setenv("MODEL_PATH", str(tmp_path))
    assert models.overrides(case) == (f"policy.model_name={tmp_path}", f"policy.tokenizer.name={tmp_path}")
    assert models.overrides(replace(case, id="rehearse.level0.train")) == ()
    (reason,) = models.preflight(case, {"MODEL_PATH": str(tmp_path)})
    assert "no config.json; MODEL_PATH must be a whole snapshot" in reason.text
    assert models.wanted([case]) == ["org/draft-1B"]


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("Qwen/Qwen2.5-0.5B", 1.1), ("a/Qwen3-30B-A3B", 66), ("a/Q3-8B-Base", 17.6), ("a/b", 0)]
)
def test_the_size_is_guessed_from_the_name(name: str, gigabytes: float) -> None:
    assert models.size_of(name) / 1e9 == pytest.approx(gigabytes)
