"""Levels and cases as they are merged, named, cached and shown."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import levels
from tasks.errors import UserError
from tasks.settings import ROOT
from tests.levels_files import CASE, case_with, loaded, mistakes, write


def only_case(tmp_path: Path, text: str) -> levels.Case:
    (case,) = loaded(tmp_path, text).cases()
    return case


def test_kind_and_case_add_up_and_the_nearest_word_counts(tmp_path: Path) -> None:
    kind = """kinds:
  sft: {checks: ['min(data["train/loss"]) > 0'], done_pattern: Max number, grace: 5m, real_work: [train/grad_norm]}
"""
    case = only_case(tmp_path, case_with("kind: sft\ngrace: 60s") + kind)
    assert case.checks == ('min(data["train/loss"]) > 0', 'max(data["train/loss"]) < 5')
    assert (case.done_pattern, case.grace_s, case.real_work) == ("Max number", 60.0, ("train/grad_norm",))
    case = only_case(tmp_path, case_with("kind: sft\ndone_pattern: null\nreal_work: []") + kind)
    assert (case.done_pattern, case.real_work) == (None, ())


@pytest.mark.parametrize(
    ("lines", "forbidden", "expected"),
    [
        ("", True, False),
        ("conversion: within_attempt", False, True),
        ("backend: any", False, False),
        ("backend: any\nconversion: fresh", True, False),
    ],
)
def test_reused_conversion_is_forbidden_unless_the_case_made_it(
    tmp_path: Path, lines: str, forbidden: bool, expected: bool
) -> None:
    case = only_case(tmp_path, case_with(lines))
    assert (r"Skipping import\." in case.forbid_log) is forbidden
    assert any("successfully saved checkpoint" in text for text in case.expect_log) is expected


def test_defaults_are_the_strict_ones(tmp_path: Path) -> None:
    case = only_case(tmp_path, CASE)
    assert case.backend == "megatron"
    assert case.real_work == ("train/loss",)
    assert case.logs == "tests/functional/one/logs"
    assert not case.optional
    assert case.reaches == ("nemo_rl", "bridge", "mcore")


def test_rehearsal_takes_profile_case_and_own_words_in_that_order(tmp_path: Path) -> None:
    profiles = """rehearsal_profiles:
  tiny: {overrides: [a.x=1, a.y=1], model: trained, timeout: 5m, standins: [flash_attn]}
  sft: {extends: tiny, overrides: ['a.x={model}'], standins: [vllm]}
"""
    text = case_with("overrides: [a.x=0]\nrehearsal: {profile: sft, overrides: [a.y=2], gpus: 2}") + profiles
    case = only_case(tmp_path, text)
    trial = levels.rehearse(case)
    assert trial.id == "rehearse.level0.one"
    assert trial.overrides == ("a.x=0", "a.x=1", "a.y=1", "a.x={model}", "a.y=2")
    assert (trial.gpus, trial.timeout_s, trial.model, trial.steps) == (2, 300.0, "trained", 2)
    assert trial.rehearsal is not None
    assert trial.rehearsal.standins == ("flash_attn", "vllm")
    assert trial.checks == case.checks


def test_profile_that_extends_itself_is_refused(tmp_path: Path) -> None:
    profiles = "rehearsal_profiles:\n  a: {extends: b}\n  b: {extends: a}\n"
    assert "extends itself" in mistakes(tmp_path, case_with("rehearsal: {profile: a}") + profiles)


def test_case_without_rehearsal_says_why(tmp_path: Path) -> None:
    case = only_case(tmp_path, case_with("no_rehearsal: needs eight GPUs"))
    with pytest.raises(UserError, match="needs eight GPUs"):
        levels.rehearse(case)


def test_included_variants_are_part_of_the_group(tmp_path: Path) -> None:
    text = (
        CASE
        + """  5: {title: all, includes: [vlm]}
variants:
  vlm:
    title: v
    suites: [maps]
    cases:
      must: {script: tests/functional/v.sh, steps: 1, gpus: 1}
      may: {script: tests/functional/w.sh, steps: 1, gpus: 1, optional: true}
"""
    )
    group = loaded(tmp_path, text).levels["level5"]
    assert [case.id for case in group.required] == ["vlm.must"]
    assert group.suites == ("maps",)
    assert "includes others itself" in mistakes(tmp_path, text.replace("v\n", "v\n    includes: [level5]\n", 1))


@pytest.mark.parametrize("name", ["level0.one", "a.b"])
def test_two_things_of_one_name_are_refused_with_both_lines(tmp_path: Path, name: str) -> None:
    more = f"""variants:
  {name}: {{title: v, cases: {{c: {{script: tests/functional/v.sh, steps: 1}}}}}}
  a: {{title: v, cases: {{b.c: {{script: tests/functional/v.sh, steps: 1}}}}}}
"""
    told = mistakes(tmp_path, CASE + more)
    assert ("'level0.one'" if name == "level0.one" else "'a.b.c'") in told
    assert told.count("is called as what line") == 1


def test_a_path_means_the_same_however_it_is_written(tmp_path: Path) -> None:
    case = only_case(tmp_path, case_with("logs: ./logs/\nfiles: [out//*.txt, './a']"))
    assert (case.logs, case.files) == ("logs", ("out/*.txt", "a"))
    suite = "paths: [./tests/unit_tests/x.py::test[a//b]]"
    text = CASE.replace(
        "paths: [tests/unit_tests/models/test_param_mapping.py]", suite.replace("[.", "['.").replace("]]", "]']")
    )
    assert loaded(tmp_path, text).suites["maps"].paths == ("tests/unit_tests/x.py::test[a//b]",)


def test_name_with_an_equals_sign_gets_a_task_name_and_keeps_its_own(tmp_path: Path) -> None:
    found = loaded(tmp_path, CASE.replace("      one:", "      'tp=2,pp=1':"))
    case = found.case("level0.tp-2-pp-1")
    assert case.original == "tp=2,pp=1"
    assert found.case("level0.tp=2,pp=1") is case
    assert any("is called 'tp-2-pp-1'" in text for text in found.warnings)


def test_names_that_become_one_task_are_refused(tmp_path: Path) -> None:
    one = "      one:\n        script: tests/functional/one.sh\n        gpus: 2\n        steps: 2\n"
    text = CASE.replace(one, one.replace("one:", "'a=b':") + one.replace("one:", "'a,b':"))
    assert "becomes the task name 'a-b', which is taken already" in mistakes(tmp_path, text)
    assert "no letter or digit" in mistakes(tmp_path, CASE.replace("      one:", "      '==':"))


def test_unknown_case_and_level_are_told_with_the_nearest(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    with pytest.raises(UserError, match=r"unknown case 'level0\.onne'; did you mean 'level0\.one'\?"):
        found.case("level0.onne")
    with pytest.raises(UserError, match="did you mean 'level0'"):
        found.level("level1")


def test_expired_quarantine_is_an_error_also_from_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path, case_with("quarantine: {reason: flaky, owner: ann, until: 2026-12-31}"))
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        case = levels.load(path, cache, today=dt.date(2026, 12, 31)).case("level0.one")
        assert case.quarantine == levels.Quarantine("flaky", "ann", "2026-12-31")
        with pytest.raises(
            UserError, match=r"levels\.yaml:9: quarantine of level0\.one expired on 2026-12-31 \(flaky\)"
        ):
            levels.load(path, cache, today=dt.date(2027, 1, 1))


def test_cached_levels_equal_those_of_the_file(tmp_path: Path) -> None:
    shipped = ROOT / "levels.yaml"
    first = levels.load(shipped, tmp_path)
    assert levels.load(shipped, tmp_path) == first == levels.load(shipped)


def test_second_load_imports_neither_yaml_nor_pydantic(tmp_path: Path) -> None:
    path, cache = write(tmp_path, CASE), tmp_path / "cache"
    levels.load(path, cache)
    program = (
        "import sys; from pathlib import Path; from tasks import levels; "
        "levels.load(Path(sys.argv[1]), Path(sys.argv[2])); "
        "print([m for m in ('yaml', 'pydantic', 'difflib', 'tasks.levels_schema') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path, cache], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', "null"])
def test_damaged_cache_is_read_past(tmp_path: Path, damage: str) -> None:
    path, cache = write(tmp_path, CASE), tmp_path / "cache"
    first = levels.load(path, cache)
    (kept,) = cache.iterdir()
    kept.write_text(damage)
    assert levels.load(path, cache) == first


def test_cache_of_another_shape_under_the_right_key_is_read_past(tmp_path: Path) -> None:
    path, cache = write(tmp_path, CASE), tmp_path / "cache"
    first = levels.load(path, cache)
    (kept,) = cache.iterdir()
    stored = json.loads(kept.read_text())
    del stored["document"]["levels"]["level0"]["cases"][0]["steps"]
    kept.write_text(json.dumps(stored))
    assert levels.load(path, cache) == first


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path, cache = write(tmp_path, CASE), tmp_path / "cache"
    assert levels.load(path, cache).case("level0.one").steps == 2
    write(tmp_path, CASE.replace("steps: 2", "steps: 3"))
    assert levels.load(path, cache).case("level0.one").steps == 3


def test_rows_carry_everything_and_are_json(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    (row,) = levels.rows(found, {"level0.one": "fresh"})
    assert row["id"] == "level0.one"
    assert (row["state"], row["gpu_minutes"]) == ("fresh", 90.0)
    assert set(levels.CASE_KEYS) - {"rehearsal"} <= set(row)
    json.dumps(row)
    assert levels.rows(found, {})[0]["state"] == "never"


def test_threshold_wording_and_position_are_no_part_of_the_run(tmp_path: Path) -> None:
    first = only_case(tmp_path, CASE).run_definition()
    assert (
        only_case(tmp_path, "# moved\n" + CASE.replace("< 5", "< 4") + "        title: x\n").run_definition() == first
    )
    assert only_case(tmp_path, CASE.replace("gpus: 2", "gpus: 1")).run_definition() != first
