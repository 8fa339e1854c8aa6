"""Checks read out of shell scripts: every way in which NeMo-RL's scripts write them, with texts of ours."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import UserError
from tasks.script_checks import as_yaml, drift, main, read_checks, unresolved

if TYPE_CHECKING:
    from pathlib import Path

CALL = "uv run tests/check_metrics.py $JSON_METRICS "


def checks(folder: Path, text: str) -> tuple[str, ...]:
    script = folder / "script.sh"
    script.write_text(text)
    return read_checks(script)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL + """'max(data["a"]) < 1'""", ['max(data["a"]) < 1']),
        (CALL + "\\\n    'max(data[\"a\"]) < 1' \\\n    'min(data[\"a\"]) > 0'\n", ['max(data["a"]) < 1', 'min(data["a"]) > 0']),
        (CALL + '"max(data[\'a\']) < 1"', ["max(data['a']) < 1"]),
        (CALL + r'''"max(data[\"a\"]) < 1"''', ['max(data["a"]) < 1']),
        ("MAX_STEPS=20\n" + CALL + r'''"data[\"a\"][\"$MAX_STEPS\"] < 1"''', ['data["a"]["20"] < 1']),
        ("MAX_STEPS=20\n" + CALL + r'''"data[\"a\"][\"${MAX_STEPS}\"] < 1"''', ['data["a"]["20"] < 1']),
        ("MAX_STEPS=20\n" + CALL + """"data['a']['"$MAX_STEPS"'] < 1\"""", ["data['a']['20'] < 1"]),
        (CALL + """'data["a"]["$MAX_STEPS"] < 1'""", ['data["a"]["$MAX_STEPS"] < 1']),
        (CALL + r'''"max(data[\"a\"]) < \$5"''', ['max(data["a"]) < $5']),
        ("export LIMIT=1.05\n" + CALL + '''"max(data['a']) < $LIMIT"''', ["max(data['a']) < 1.05"]),
        (CALL + '''"max(data['a']) < ${LIMIT:-1.5}"''', ["max(data['a']) < 1.5"]),
        ("N=$(( 3 + 4 ))\n" + CALL + '''"len(data['a']) == $N"''', ["len(data['a']) == $N"]),
        ("N=$(jq '.a | max' x.json)\n" + CALL + '''"len(data['a']) == ${N}"''', ["len(data['a']) == ${N}"]),
        ('${PYTHON:-python} tests/check_metrics.py "${JSON}" --table-width 80 ' + """'max(data["a"]) < 1'""", ['max(data["a"]) < 1']),
        ("#" + CALL + """'max(data["a"]) < 1'""", []),
        ("## " + CALL + """\\\n  'max(data["a"]) < 1'""", []),
        (CALL + """'max(data["a"]) < 1' # 'min(data["a"]) > 0'""", ['max(data["a"]) < 1']),
        (CALL + """'max(data["a"]) < 1' 2>&1 | tee 'check.log'""", ['max(data["a"]) < 1']),
        (CALL + """'max(data["a"]) < 1' > "$OUT" 2> err; echo 'done'""", ['max(data["a"]) < 1']),
        (f"""if [[ $(jq 'max' x) -ge 5 ]]; then\n  {CALL}'max(data["a"]) < 1'\nfi""", ['max(data["a"]) < 1']),
        (f"""if true; then {CALL}'a < 1'; else {CALL}'b < 1'; fi""", ["a < 1", "b < 1"]),
        ("""A=(\n 'a < 1'\n  # why: it's so\n 'b < 1'\n)\n""" + CALL + """"${A[@]}" 'c < 1'""", ["a < 1", "b < 1", "c < 1"]),
        ("""A=('a < 1')\nA+=('b < 1')\n""" + CALL + '''"${A[@]}"''', ["a < 1", "b < 1"]),
        (
            "check() {\n  local limit=$2\n  " + CALL + """"max(data['a']) < $limit"\n}\ncheck one 1.05\ncheck two 1.15 "$@"\n""",
            ["max(data['a']) < 1.05", "max(data['a']) < 1.15"],
        ),
        ("function check { " + CALL + "'a < 1'; }\ncheck\n", ["a < 1"]),
        ("check() {\n" + CALL + "'a < 1'\n}\n", []),
        (
            'for spec in "run1 1" "run2 2"; do\n  read -r run n <<< "${spec}"\n  ' + CALL + """"len(data['a']) == ${n}"\ndone\n""",
            ["len(data['a']) == 1", "len(data['a']) == 2"],
        ),
        ("cat > x << YAML\n" + CALL + "'no < 1'\nit's\nYAML\n" + CALL + "'yes < 1'\n", ["yes < 1"]),
        ("cat <<-'EOF'\n\tit's\n\tEOF\n" + CALL + "'yes < 1'\n", ["yes < 1"]),
        ("echo nothing\n", []),
    ],
)  # fmt: skip
def test_checks_are_read_as_the_shell_would_pass_them(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert checks(tmp_path, text) == tuple(expected)


def test_shell_agrees(tmp_path: Path) -> None:
    """What bash itself passes to the program is what is read."""
    import subprocess

    stub = tmp_path / "check_metrics.py"
    stub.write_text('#!/bin/sh\nshift\nprintf \'%s\\n\' "$@" >> "$OUT"\n')
    stub.chmod(0o755)
    text = (
        "set -eu\nMAX_STEPS=20\nLIMITS=(\n  'a < 1'\n  \"b['$MAX_STEPS'] < 1\"\n)\n"
        'case_of() {\n  local limit=$1\n  ./check_metrics.py m.json \\\n    "${LIMITS[@]}" "c < $limit" \'d["$x"] < 2\'\n}\n'
        'case_of 1.05\nfor n in 1 2; do ./check_metrics.py m.json "e < ${n}"; done\n'
    )
    (tmp_path / "script.sh").write_text(text)
    subprocess.run(
        ["bash", "script.sh"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "OUT": str(tmp_path / "out")}, check=True
    )
    assert read_checks(tmp_path / "script.sh") == tuple((tmp_path / "out").read_text().splitlines())


@pytest.mark.parametrize(
    "text", ["f() {\nf\n}\nf\n", "f() { g; }\ng() { f; }\nf\n", "for i in " + "x " * 5000 + "; do :; done"]
)
def test_scripts_without_an_end_are_left_after_a_bound(tmp_path: Path, text: str) -> None:
    assert checks(tmp_path, text) == ()


def test_mistakes_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"script\.sh: line 2: a ' is never closed"):
        checks(tmp_path, "echo\nuv run check_metrics.py 'a < 1\n")
    with pytest.raises(UserError, match="cannot be read"):
        read_checks(tmp_path / "absent.sh")


@given(st.text(alphabet="ab$(){}'\"\\ \n;|&<>=#`[]@*1!", max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    script = tmp_path_factory.mktemp("s") / "s.sh"
    script.write_text(text + "\nf check_metrics.py m 'x < 1'")
    with contextlib.suppress(UserError):
        assert isinstance(read_checks(script), tuple)


def test_unresolved_variables_are_named() -> None:
    assert unresolved("len(x) == ${expected_steps} - $n") == ("expected_steps", "n")
    assert unresolved('max(data["a"]) < 1') == ()


def test_drift_tells_what_the_script_has_and_levels_lack(tmp_path: Path) -> None:
    script = tmp_path / "case.sh"
    script.write_text(
        CALL + """'max(data["a"]) < 1.10' "data['b']['3'] > 0" "len(data['c']) == $N" 'mean(data["d"]) < 2'"""
    )
    ours = ['max( data["a"] ) < 1.05', 'data["b"]["3"]>0.0', 'within(data["e"], 0, 1)']
    assert drift(ours, script) == (
        'case.sh: max(data["a"]) < 1.10: levels.yaml has max( data["a"] ) < 1.05',
        "case.sh: len(data['c']) == $N: the script computes N; compare by hand",
        'case.sh: mean(data["d"]) < 2: not in levels.yaml',
    )
    assert drift(read_checks(script), script) == ()


def test_yaml_of_any_check_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    wanted = ["data['a']['3'] < 1", 'max(data["a"]) < 1e-3', '"3" in data["a: b"] # no comment']
    assert yaml.safe_load(as_yaml(wanted)) == wanted
    (tmp_path / "s.sh").write_text(CALL + "'a < 1'")
    assert main([str(tmp_path / "s.sh")]) == 0
    assert capsys.readouterr().out == "- 'a < 1'\n"
    (tmp_path / "s.sh").write_text("echo")
    assert main([str(tmp_path / "s.sh")]) == 2
