"""verdict <- rule <- evidence: every rule of the verdict has its words, and `doit why`, report and page show the chain."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import bundle, chain, settings
from tasks.invocation import Invocation
from tasks.triage.signatures import KINDS
from tasks.why import chain_of
from tests.conftest import run_git
from tests.miniature import Done, Miniature

CHECK = {"expr": "max(x) < 1", "op": "<", "limit": 1.0, "value": 2.0, "worst_step": "7", "text": "t", "verdict": "Fail"}
JUDGED = {
    "checks": [CHECK],
    "steps": {"requested": 2, "reached": 2},
    "evidence": {"origins": ["megatron.bridge from /b"]},
}


def reason(kind: str, subject: str = "s", text: str = "t") -> dict[str, Any]:
    return {"kind": kind, "subject": subject, "text": text}


def test_every_reason_that_the_verdict_knows_stands_for_a_rule():
    source = (Path(chain.__file__).parent / "verdict.py").read_text()
    kinds = set(re.findall(r'Reason\(\s*"(\w+)"', source)) | (set(KINDS) - {"warning"})
    assert len(kinds) > 20
    assert kinds <= set(chain.RULES)


@pytest.mark.parametrize(
    ("given", "file", "line", "value"),
    [
        (reason("check", "max(x) < 1"), "a/1/metrics.json", None, "max(x) < 1 is 2.0 at step 7, limit < 1.0"),
        (reason("check", "gone"), "a/1/metrics.json", None, "t"),
        (reason("environment", text="run.log:12: No space"), "a/1/run.log", 12, "run.log:12: No space"),
        (reason("rc", text="process ended with rc 3"), "a/1/exit.json", None, "process ended with rc 3"),
        (reason("bridge_frame", "/co/x.py"), "/co/x.py", None, "t"),
        (reason("gpus", text="0 of 2 GPUs"), None, None, "0 of 2 GPUs"),
    ],
)
def test_a_reason_leads_to_its_file_line_and_value(given, file, line, value):
    link = chain.links("Fail", [given], JUDGED, "a/1")[0]
    assert (link.file, link.line, link.value) == (file, line, value)
    assert link.text.startswith(f"Fail \u2190 {link.rule} \u2190 ")
    if line:
        assert f"{file}:{line}" in link.text


def test_a_pass_has_one_chain_for_each_proof():
    texts = [link.text for link in chain.links("Pass", [], JUDGED, "a/1")]
    assert len(texts) == 5
    assert "a/1/exit.json: rc 0" in texts[0]
    assert "2 of 2" in texts[1]
    assert chain.links("Pass", [], {}, None) == []


def now_of(mini: Miniature) -> Invocation:
    """An invocation of this process on the miniature: what `doit why` looks through."""
    chosen = {"bridge": mini.bridge, "nemo_rl": mini.nemo_rl, "levels": mini.levels, "build": mini.build}
    return Invocation(settings.load({**{k: str(v) for k, v in chosen.items()}, "runtime": "local"}, environ={}))


def told(mini: Miniature) -> list[chain.Link]:
    now = now_of(mini)
    return chain_of(now, now.case("level0.train"))


@dataclass(frozen=True)
class Told:
    """A miniature whose first run edits the Bridge's checkout meanwhile, and what two calls of level 0 gave."""

    mini: Miniature
    first: Done
    chain: list[chain.Link]
    second: Done


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Told:
    mini = Miniature(tmp_path_factory.mktemp("edited"))
    mini.levels.write_text(mini.levels.read_text().replace("    suites: [mapping]\n", ""))
    assert told(mini) == []
    mapping, trainer = mini.bridge / "src/megatron/bridge/mapping.py", mini.nemo_rl / "train.py"
    edit = f'open("{mapping}", "w").write("FACTOR = 1.5\\n")\n'
    trainer.write_text(trainer.read_text().replace("records = []\n", f"{edit}records = []\n"))
    first = mini.doit("level0")
    run_git(mini.bridge, "checkout", "-q", ".")
    links = told(mini)
    mapping.write_text("FACTOR = 1.5\n")
    return Told(mini, first, links, mini.doit("level0"))


@pytest.mark.slow
def test_an_edit_during_the_run_is_not_what_was_tested_and_the_next_call_runs_again(edited: Told) -> None:
    assert edited.first.rc == 0, edited.first.out  # the frozen tree has 1.0
    assert edited.second.rc == 1
    assert edited.second.ran("run:level0.train")


@pytest.mark.slow
def test_why_gives_the_chain_of_what_is_there_now(edited: Told) -> None:
    mini, failed = edited.mini, edited.second
    assert {link.verdict for link in edited.chain} == {"Pass"}
    assert any(str(link.value).startswith("max(data[") for link in edited.chain)
    assert "1.5 at step 1, limit < 1.05" in failed.case["chain"][0]
    assert "1.5 at step 1, limit &lt; 1.05" in (mini.workspace / "report/index.html").read_text()
    assert failed.case["chain"] == [link.text for link in told(mini)]
    shown = json.loads(mini.doit("why", "level0.train", "--json").out)
    check = next(stage for stage in shown if stage["task"].startswith("check:"))
    assert check["chain"][0]["file"].endswith("/metrics.json")
    run_git(mini.bridge, "checkout", "-q", ".")  # the newest record is the Fail, that of this tree the Pass
    assert told(mini) == edited.chain
    assert bundle.find(now_of(mini), "level0.train").folder == mini.attempts()[0]
    mini.levels.write_text(mini.levels.read_text().replace("gpus: 0", "gpus: 99"))
    now = now_of(mini)
    now.execute(now.run(now.case("level0.train")))
    assert [(link.verdict, link.rule) for link in told(mini)] == [("Blocked", chain.PREFLIGHT[0])]
    (mini.bridge / "src/megatron/bridge/__init__.py").write_text("raise RuntimeError('no')\n")
    broken = now_of(mini)
    broken.execute(broken.probe())
    assert [str(link.value).partition(":")[0] for link in told(mini)] == ["probe is Fail"]
