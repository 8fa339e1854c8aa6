"""Mistakes in a levels file have their line and a way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks import levels
from tasks.errors import UserError
from tests.levels_files import CASE, case_with, loaded, mistakes

HEAD = "schema: 1\n"


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
