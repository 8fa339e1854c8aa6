"""levels.yaml: every mistake has a line and a suggestion, nothing is guessed, and a second look costs nothing."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import levels
from tasks.errors import UserError
from tasks.marked_yaml import FileError, parse

ROOT = Path(__file__).parents[1]
HEAD = "schema: 1\n"
CASE = """schema: 1
suites:
  maps: {repo: bridge, paths: [tests/unit_tests/models/test_param_mapping.py]}
levels:
  0:
    title: smoke
    suites: [maps]
    cases:
      one:
        script: tests/functional/one.sh
        gpus: 2
        steps: 2
        checks: ['max(data["train/loss"]) < 5']
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "levels.yaml"
    path.write_text(text)
    return path


def case_with(lines: str, *, without: str = "") -> str:
    kept = [line for line in CASE.splitlines() if not (without and line.strip().startswith(without))]
    return "\n".join([*kept, *(f"        {line}" for line in lines.splitlines())]) + "\n"


def mistakes(tmp_path: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        levels.load(write(tmp_path, text))
    return str(caught.value)


def loaded(tmp_path: Path, text: str = CASE) -> levels.Levels:
    return levels.load(write(tmp_path, text))


def only_case(tmp_path: Path, text: str) -> levels.Case:
    (case,) = loaded(tmp_path, text).cases()
    return case


# -- YAML 1.1 --------------------------------------------------------------------------------------------------------


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


# -- the schema ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ("overides: [a=b]", 14, "unknown key 'overides'; did you mean 'overrides'?"),
        ("gpu: 2", 14, "did you mean 'gpus'"),
        ("timeout: 45", 14, "is not a duration; write 60s, 45m"),
        ("timeout: 1h30", 14, "is not a duration"),
        ("timeout: 0s", 14, "not between"),
        ("timeout: 900h", 14, "not between"),
        ("overrides:\n  - grpo.max_num_steps: 2", 15, "so write 'grpo.max_num_steps=2'"),
        ("overrides: [grpo.max_num_steps]", 14, "is not a Hydra override"),
        ("overrides: ['a.b=x y']", 14, "tear it apart"),
        ("overrides: [logger.log_dir=/x]", 14, "would find nothing there"),
        ("overrides: ['a.b={model}']", 14, "belongs to rehearsals"),
        ("overrides: ['a.b={atempt}/x']", 14, "did you mean 'attempt'?"),
        ("overrides: [--help]", 14, "only --config"),
        ("env: {A: 1}", 14, "put it in quotes"),
        ("env: {HF_TOKEN: hf_x}", 14, "never written here"),
        ("env: {MY_API_KEY: x}", 14, "never written here"),
        ("env: {NRL_IGNORE_TP_ACCURACY_CHECK: '1'}", 14, "never evidence"),
        ("env: {PYTHONPATH: x}", 14, "set by the runner"),
        ("optional: 'true'", 14, "must be true or false"),
        ("backend: megatorn", 14, "did you mean 'megatron'?"),
        ("command: python x.py", 14, "must be a list of arguments"),
        ("command: [python, x.py]", 9, "both of script and command"),
        ("expect_log: ['(']", 14, "not a regular expression"),
        ("expect_log: ['x*']", 14, "matches every line"),
        ("files: [/etc/passwd]", 14, "inside the tree"),
        ("files: [../x]", 14, "inside the tree"),
        ("clean: [/tmp/]", 14, "more than one folder"),
        ("clean: [/tmp/*]", 14, "more than one folder"),
        ("clean: [/home/x]", 14, "inside the tree"),
        ("needs: [netwrok]", 14, "did you mean 'network'?"),
        ("kind: grpo", 14, "unknown kind 'grpo'"),
        ("rehearsal: {profile: tiny}", 14, "rehearsal profile 'tiny' is unknown"),
        ("rehearsal: {supported: false}", 14, "says why in `reason`"),
        ("rehearsal: {overrides: ['a.b={modle}']}", 14, "did you mean 'model'?"),
        ("quarantine: {reason: r, owner: o, until: soon}", 14, "is not a date"),
        ("quarantine: {reason: r, owner: o}", 14, "key 'until' is missing"),
        ("also_logs: {Base-Line: x}", 14, "small letters"),
        ("nodes: 4", 11, "gpus counts all nodes"),
        ("rehearsal: {nodes: 2}", 14, "gpus counts all nodes"),
        ("model: null", 14, "must be text but is nothing"),
    ],
)
def test_mistake_in_a_case_has_its_line_and_a_way_out(tmp_path: Path, lines: str, line: int, words: str) -> None:
    text = mistakes(tmp_path, case_with(lines))
    assert words in text
    assert f"levels.yaml:{line}: " in text


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (CASE.replace("schema: 1\n", ""), 1, "key 'schema' is missing"),
        (CASE.replace("schema: 1", "schema: 2"), 1, "schema: 2 is not 1"),
        (CASE.replace("[maps]", "[mapps]"), 7, "unknown suite 'mapps'; did you mean 'maps'?"),
        (CASE.replace("  0:", "  level0:"), 5, "write 0"),
        (CASE.replace("  0:", "  00:"), 5, "write it in decimal"),
        (CASE.replace("  0:", "  vlm:"), 5, "under `variants:`"),
        (CASE.replace("repo: bridge", "repo: brigde"), 3, "did you mean 'bridge'?"),
        (CASE.replace("paths: [tests", "min_tests: 0, paths: [tests"), 3, "min_tests"),
        (CASE.replace("    cases:", "    includes: [vlm]\n    cases:"), 8, "unknown level or variant 'vlm'"),
        (CASE + "variants:\n  unit: {title: x}\n", 15, "is a command or level already"),
        (CASE + "variants:\n  level9: {title: x}\n", 15, "is a command or level already"),
        (CASE + "variant: {}\n", 14, "did you mean 'variants'?"),
        (HEAD, 1, "nothing could ever be run"),
        ("[1, 2]\n", 1, "must be a mapping"),
        (HEAD + "levels:\n", 2, "has no value"),
    ],
)
def test_mistake_around_the_cases_has_its_line_and_a_way_out(tmp_path: Path, text: str, line: int, words: str) -> None:
    found = mistakes(tmp_path, text)
    assert words in found
    assert f"levels.yaml:{line}: " in found


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    text = mistakes(tmp_path, case_with("overides: []\ntimeout: soon\noptional: maybe"))
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    "check",
    ["data[", "__import__('os').system('x')", "max(data['a']) < 5 or True", "1 < 2", 'max(data["a"]) > 1e300'],
)
def test_check_that_cannot_be_read_or_cannot_fail_is_refused(tmp_path: Path, check: str) -> None:
    text = mistakes(tmp_path, CASE.replace("""'max(data["train/loss"]) < 5'""", json.dumps(check)))
    assert "levels.yaml:13: check" in text


def test_missing_file_and_folder_are_told_without_traceback(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            levels.load(path)


# -- warnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("command: [bash, -c, 'python x.py 2>&1 | tee run.log']\nlogs: x", "a pipe in a command"),
        ("command: [python, x.py, '|', tee, run.log]\nlogs: x", "'|' reaches the program as an argument"),
        ("command: [python, x.py, '&&', y]\nlogs: x", "'&&' reaches the program"),
        ("command: [sh, -c, 'x | y']\nlogs: x", "only bash gets"),
    ],
)
def test_pipe_in_a_command_is_a_warning(tmp_path: Path, lines: str, words: str) -> None:
    warnings = loaded(tmp_path, case_with(lines, without="script:")).warnings
    assert any(words in text and "levels.yaml:" in text for text in warnings)


def test_alternation_in_a_program_argument_is_no_pipe(tmp_path: Path) -> None:
    text = case_with("command: [python, -m, pytest, -k, 'a|b']\nlogs: x", without="script:")
    assert loaded(tmp_path, text).warnings == ()


@pytest.mark.parametrize(
    ("checks", "warned"),
    [
        (['max(data["train/token_mult_prob_error"]) < 1.05'], True),
        (['max(data["train/token_mult_prob_error"]) < 1.05', 'min(data["train/token_mult_prob_error"]) > 0.9'], False),
        (['max(data["train/gen_kl_error"]) < 0.01'], False),  # zero is its best value, and real work is asked for
    ],
)
def test_one_sided_ratio_is_a_warning(tmp_path: Path, checks: list[str], warned: bool) -> None:
    text = CASE.replace("""['max(data["train/loss"]) < 5']""", json.dumps(checks))
    assert any("one-sided" in w for w in loaded(tmp_path, text).warnings) is warned


# -- what a case inherits --------------------------------------------------------------------------------------------


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


# -- names -----------------------------------------------------------------------------------------------------------


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


# -- quarantine ------------------------------------------------------------------------------------------------------


def test_expired_quarantine_is_an_error_also_from_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path, case_with("quarantine: {reason: flaky, owner: ann, until: 2026-12-31}"))
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        case = levels.load(path, cache, today=dt.date(2026, 12, 31)).case("level0.one")
        assert case.quarantine == levels.Quarantine("flaky", "ann", "2026-12-31")
        with pytest.raises(
            UserError, match=r"levels\.yaml:9: quarantine of level0\.one expired on 2026-12-31 \(flaky\)"
        ):
            levels.load(path, cache, today=dt.date(2027, 1, 1))


# -- the cache -------------------------------------------------------------------------------------------------------


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


# -- for `doit levels` and digests -----------------------------------------------------------------------------------


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
