"""The probe judges where every interpreter takes our packages from, and asks it in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import probe
from tasks.reason import Verdict
from tasks.settings import ROOT

ROOTS = {"bridge": "/co/bridge", "mcore": "/co/mcore", "nemo_rl": "/co/rl"}
FINE = {
    "megatron.bridge": {"path": "/co/bridge/src/megatron/bridge/__init__.py"},
    "megatron.core": {"path": "/co/mcore/megatron/core/__init__.py"},
    "nemo_rl": {"path": "/co/rl/nemo_rl/__init__.py"},
}


def error(kind, text, frames=(), missing=None):
    return {
        "error": {
            "type": kind,
            "text": text,
            "missing": missing,
            "frames": list(frames),
            "frame": [frames[-1], 3, "f"] if frames else None,
        }
    }


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        ({}, "Pass", ""),
        ({"megatron.core": {"path": "/usr/lib/site-packages/megatron/core/__init__.py"}}, "Blocked", "expected below /co/mcore"),
        ({"megatron.bridge": {"path": "/co/bridge-old/src/megatron/bridge/__init__.py"}}, "Blocked", "expected below /co/bridge"),
        ({"megatron.core": {"path": None}}, "Blocked", "namespace without __init__"),
        ({"megatron.bridge": error("ModuleNotFoundError", "No module named 'transformer_engine'", ["/co/bridge/src/x.py"], "transformer_engine")}, "Blocked", "transformer_engine"),
        ({"megatron.bridge": error("ModuleNotFoundError", "No module named 'megatron.core.new'", ["/co/bridge/src/x.py"], "megatron.core.new")}, "Blocked", "needs a Core that has megatron.core.new"),
        ({"megatron.bridge": error("SyntaxError", "invalid syntax", ["/co/bridge/src/x.py"])}, "Fail", "/co/bridge/src/x.py:3"),
        ({"megatron.bridge": error("SystemExit", "1", ["/co/bridge/src/x.py"])}, "Fail", "SystemExit"),
        ({"megatron.bridge": error("ModuleNotFoundError", "No module named 'megatron.bridge.gone'", ["/co/bridge/src/x.py"], "megatron.bridge.gone")}, "Fail", "gone"),
        ({"megatron.bridge": error("ImportError", "cannot import name 'override' from 'typing'", ["/co/bridge/src/x.py", "/co/mcore/y.py"], "typing")}, "Blocked", "use the image's"),
        ({"megatron.bridge": error("ImportError", "cannot import name 'overide' from 'typing'", ["/co/bridge/src/x.py"], "typing")}, "Fail", "overide"),
        ({"megatron.core": error("ModuleNotFoundError", "No module named 'megatron.core'", [], "megatron.core")}, "Blocked", "submodule update"),
        ({"nemo_rl": error("RuntimeError", "cuda", ["/usr/lib/torch/x.py"])}, "Blocked", "RuntimeError"),
    ],
)  # fmt: skip
def test_answers_are_judged(found, verdict, words):
    answers = {"policy": {"modules": {**FINE, **found}}}
    decided, reasons = probe.judge(answers, ROOTS)
    assert decided == verdict
    assert words in " ".join(r.text for r in reasons)


@pytest.mark.parametrize("answers", [None, {}, {"policy": {"error": "no interpreter: none of /x exists"}}])
def test_no_answer_is_never_a_pass(answers):
    assert probe.judge(answers, ROOTS)[0] is Verdict.BLOCKED


def test_equal_errors_of_several_roles_are_one_reason():
    broken = {"modules": {**FINE, "nemo_rl": {"path": "/elsewhere/nemo_rl/__init__.py"}}}
    assert len(probe.judge({"driver": broken, "policy": broken}, ROOTS)[1]) == 1


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    for name, text in {
        "bridge/src/megatron/bridge/__init__.py": "print('noise on stdout')\n",
        "mcore/megatron/core/__init__.py": "__version__ = '0.1'\n",
        "rl/nemo_rl/__init__.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def ask(trees: Path, **env: str):
    spec = trees / "spec.json"
    asked = probe.question(sys.executable, str(trees / "answers.json"), in_image=False)
    spec.write_text(json.dumps({**asked, "timeout_s": 20}))
    path = env.pop("PYTHONPATH", f"{trees}/bridge/src:{trees}/mcore:{trees}/rl")
    subprocess.run(
        [sys.executable, str(ROOT / "containers/probe.py"), str(spec)],
        check=True, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", **env}, capture_output=True,
    )  # fmt: skip
    roots = {"bridge": f"{trees}/bridge", "mcore": f"{trees}/mcore", "nemo_rl": f"{trees}/rl"}
    return probe.judge(json.loads((trees / "answers.json").read_text()), roots)


def test_the_trees_under_test_are_found_in_real_processes(trees):
    assert ask(trees) == (Verdict.PASS, [])


def test_another_tree_first_on_the_path_is_blocked(trees, tmp_path):
    (trees / "old/megatron/bridge").mkdir(parents=True)
    (trees / "old/megatron/bridge/__init__.py").write_text("")
    verdict, reasons = ask(trees, PYTHONPATH=f"{trees}/old:{trees}/bridge/src:{trees}/mcore:{trees}/rl")
    assert verdict is Verdict.BLOCKED
    assert f"{trees}/old/megatron/bridge" in reasons[0].text


@pytest.mark.parametrize(
    "code", ["def broken(:\n", "raise SystemExit(0)\n", "import os; os._exit(0)\n", "raise KeyboardInterrupt\n"]
)
def test_a_bridge_that_cannot_be_imported_is_never_a_pass(trees, code):
    (trees / "bridge/src/megatron/bridge/__init__.py").write_text(code)
    assert ask(trees)[0] in (Verdict.FAIL, Verdict.BLOCKED)


def test_an_import_that_hangs_is_blocked(trees):
    (trees / "bridge/src/megatron/bridge/__init__.py").write_text("import time\ntime.sleep(60)\n")
    spec = trees / "spec.json"
    asked = probe.question(sys.executable, str(trees / "answers.json"), in_image=False)
    spec.write_text(json.dumps({**asked, "timeout_s": 1.5}))
    subprocess.run(
        [sys.executable, str(ROOT / "containers/probe.py"), str(spec)], check=True,
        env={"PYTHONPATH": f"{trees}/bridge/src:{trees}/mcore:{trees}/rl", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    verdict, reasons = probe.judge(json.loads((trees / "answers.json").read_text()), ROOTS)
    assert verdict is Verdict.BLOCKED
    assert "took longer" in " ".join(r.text for r in reasons)
