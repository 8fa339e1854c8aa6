"""A unit suite is judged by its JUnit file: nothing executed is never a Pass, whatever the exit status."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tasks import levels, suites
from tasks.reason import Verdict
from tasks.settings import ROOT

ENDED = {"reason": "exited", "rc": 0}


def xml(path, *cases):
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return suites.read_junit(path)


GOOD = '<testcase classname="t" name="a"/>'
SKIP = '<testcase classname="t" name="s"><skipped message="no"/></testcase>'
FAIL = '<testcase classname="t" name="f"><failure message="assert 1 == 2">trace</failure></testcase>'
FOREIGN = (
    '<testcase classname="" name="c"><error message="collection failure">'
    "ModuleNotFoundError: No module named 'transformer_engine'</error></testcase>"
)
OURS = FOREIGN.replace("transformer_engine", "megatron.bridge.gone")


@pytest.mark.parametrize(
    ("cases", "exit_facts", "least", "verdict", "words"),
    [
        ([GOOD], ENDED, 1, "Pass", ""),
        ([GOOD, SKIP], ENDED, 1, "Pass", ""),
        ([GOOD], ENDED, 2, "Blocked", "1 tests executed, at least 2"),
        ([], {"reason": "exited", "rc": 5}, 1, "Blocked", "0 tests executed"),
        ([SKIP] * 12, ENDED, 1, "Blocked", "0 tests executed (12 skipped"),
        ([SKIP] * 12, ENDED, 0, "Blocked", "0 tests executed"),
        ([GOOD, FAIL], {"reason": "exited", "rc": 1}, 1, "Fail", "t::f: assert 1 == 2"),
        ([GOOD, FAIL], ENDED, 1, "Fail", "assert 1 == 2"),
        ([FOREIGN], {"reason": "exited", "rc": 2}, 1, "Blocked", "transformer_engine"),
        ([OURS], {"reason": "exited", "rc": 2}, 1, "Fail", "megatron.bridge.gone"),
        ([FOREIGN, FAIL], {"reason": "exited", "rc": 1}, 1, "Fail", ""),
        ([GOOD], {"reason": "exited", "rc": 3}, 1, "Blocked", "rc 3 though no test failed"),
        ([GOOD], {"reason": "timeout", "rc": None}, 1, "Blocked", "did not end by itself"),
        ([GOOD], None, 1, "Blocked", "did not end by itself"),
    ],
)
def test_verdict_of_a_suite(tmp_path, cases, exit_facts, least, verdict, words):
    decided, reasons = suites.decide(xml(tmp_path / "j.xml", *cases), exit_facts, least)
    assert decided == verdict
    assert words in " ".join(r.text for r in reasons)


@pytest.mark.parametrize("content", [None, "", "<testsuites>", "not xml", "<a/>" * 2])
def test_a_missing_or_broken_junit_file_is_blocked(tmp_path, content):
    if content is not None:
        (tmp_path / "j.xml").write_text(content)
    decided, reasons = suites.decide(suites.read_junit(tmp_path / "j.xml"), ENDED, 1)
    assert decided is Verdict.BLOCKED
    assert "0 tests executed" in reasons[0].text


@pytest.mark.parametrize("change", [{"interpreter": "generation"}, {"gpus": 1}, {"repo": "nemo_rl"}, {"args": ("-x",)}])
def test_a_pass_in_another_interpreter_or_place_is_not_reused(change):
    components = dict.fromkeys(("bridge", "bridge-tests", "nemo_rl", "nemo_rl-tests", "mcore"), "same")
    pipe = SimpleNamespace(tree=lambda kind: SimpleNamespace(components=components), place=SimpleNamespace(image={}))
    suite = levels.load(ROOT / "levels.yaml").suites["bridge-mapping"]
    assert suites.inputs(pipe, suite) != suites.inputs(pipe, replace(suite, **change))
