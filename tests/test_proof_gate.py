"""Only a CPU proof that failed keeps a case from its GPUs; nobody who asks for a level installs an environment for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tasks import cpu, invocation, settings
from tasks.reason import Reason, Verdict
from tasks.stage import Outcome


def call(tmp_path, *, demo=False, **given):
    pipe = invocation.Invocation(settings.load(given, environ={}, root=tmp_path))
    pipe.__dict__.update(_has_checkouts=True, workspace=SimpleNamespace(demo=demo))
    return pipe


@pytest.mark.parametrize(
    ("verdict", "chosen", "goes_on", "reported"),
    [
        (Verdict.PASS, "auto", True, True),
        (Verdict.FAIL, "auto", False, True),
        (Verdict.FAIL, "on", False, True),
        (Verdict.FAIL, "warn", True, True),
        (Verdict.BLOCKED, "on", True, False),
    ],
)
def test_what_a_proof_does_to_a_case(tmp_path, monkeypatch, verdict, chosen, goes_on, reported):
    pipe = call(tmp_path, proof=chosen)
    found = Outcome(verdict, (Reason("proof", "logits", "logits: 1"),))
    monkeypatch.setattr(pipe, "do", lambda stage: pipe.outcomes.update({stage.task: found}))
    assert (pipe.do_gate("qwen2") is True) is goes_on
    assert ("proof:qwen2" in pipe.planned) is reported
    assert ("gate:qwen2" in pipe.outcomes) is not goes_on


@pytest.mark.parametrize(
    ("given", "built", "model", "gates"),
    [
        ({}, True, "Qwen/Qwen2.5-0.5B", ["gate:qwen2"]),
        ({}, False, "Qwen/Qwen2.5-0.5B", []),
        ({"proof": "on"}, False, "Qwen/Qwen2.5-0.5B", ["gate:qwen2"]),
        ({"proof": "warn"}, False, "Qwen/Qwen2.5-0.5B", ["gate:qwen2"]),
        ({"proof": "off"}, True, "Qwen/Qwen2.5-0.5B", []),
        ({}, True, "Qwen/Qwen2.5-VL-3B-Instruct", []),
        ({}, True, None, []),
    ],
)
def test_when_a_case_has_a_gate(tmp_path, monkeypatch, given, built, model, gates):
    monkeypatch.setattr(cpu, "ready", lambda _: object() if built else None)
    assert call(tmp_path, **given).gates(SimpleNamespace(model=model)) == gates
    assert call(tmp_path, demo=True, **given).gates(SimpleNamespace(model=model)) == []


def test_an_unknown_word_for_proof_is_refused(tmp_path):
    with pytest.raises(settings.UserError, match="choose auto, on, warn, off"):
        settings.load({"proof": "maybe"}, environ={}, root=tmp_path)
