"""The command line on miniature checkouts: what runs again, what is found again, what is never a Pass, what survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import run_git
from tests.miniature import LEVELS, Miniature
from tests.test_report import SCHEMA, violations

pytestmark = pytest.mark.slow


@pytest.fixture
def mini(tmp_path: Path) -> Miniature:
    return Miniature(tmp_path)


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Miniature:
    """A miniature whose level 0 has passed, its build folder on another disk; tests that use it leave it passing."""
    made = Miniature(tmp_path_factory.mktemp("passed"))
    made.build.symlink_to(tmp_path_factory.mktemp("disk"))
    first = made.doit("level0")
    assert first.rc == 0, first.out
    return made


def wait_for(condition, seconds=60.0):
    """Wait until `condition` holds; a bounded poll, not a sleep that hopes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail("waited in vain")


def test_a_good_change_passes_with_its_evidence(passed):
    report = passed.report()
    assert report["result"] == "Pass"
    case = report["cases"][0]
    assert case["steps"] == {"requested": 2, "reached": 2}
    assert [c["verdict"] for c in case["checks"]] == ["Pass", "Pass"]
    attempt = passed.workspace / case["attempts"][0]["path"]
    assert {"spec.json", "run.log", "exit.json", "metrics.json", "checks.json", "verdict.json"} <= {
        p.name for p in attempt.iterdir()
    }
    assert report["provenance"]["bridge"]["sha"] == run_git(passed.bridge, "rev-parse", "HEAD").strip()


def test_nothing_runs_twice_and_a_cached_pass_is_shown_as_cached(passed):
    again = passed.doit("level0")
    assert again.rc == 0
    assert not again.ran("run:level0.train")
    assert again.case["cached"] is True
    assert again.case["cached_from"]["attempt"] == again.case["attempts"][0]["id"]
    assert "evidence files hashed again" in again.case["chain"][-1]
    assert again.out.rstrip().splitlines()[-2].startswith("Result: Pass - ")


def test_real_reports_are_what_the_published_schema_describes_and_no_more(passed):
    stages_alone = passed.doit("sync", "image").report
    assert [s["name"] for s in stages_alone["stages"]] == ["sync", "image"]
    for report in (passed.doit("level0").report, stages_alone):
        assert violations(report, SCHEMA, closed=True) == []


def test_ci_can_forbid_a_cached_pass(passed):
    refused = passed.doit("level0", "require_executed=1")
    assert refused.rc == 2
    assert "require_executed=1" in refused.case["reasons"][0]["text"]


def test_a_truncated_metrics_file_is_noticed_and_made_again(passed):
    metrics = passed.workspace / passed.report()["cases"][0]["metrics"]
    metrics.write_text("")
    again = passed.doit("level0")
    assert again.rc == 0
    assert not again.ran("run:level0.train")
    assert json.loads(metrics.read_text())["train/loss"]


def test_a_changed_threshold_judges_again_without_running(passed):
    original = passed.levels.read_text()
    passed.levels.write_text(original.replace("< 1.05", "< 0.5"))
    stricter = passed.doit("level0")
    passed.levels.write_text(original)
    assert stricter.rc == 1
    assert not stricter.ran("run:level0.train")
    assert "beyond the limit 0.5" in stricter.case["reasons"][0]["text"]
    assert not any("earlier" in check for check in stricter.case["checks"]), "a run is no earlier run of itself"
    assert passed.doit("level0").rc == 0


def test_a_documentation_change_runs_nothing(passed):
    (passed.bridge / "docs/guide.md").write_text("other text\n")
    again = passed.doit("level0")
    run_git(passed.bridge, "checkout", "-q", ".")
    assert again.rc == 0
    assert not again.ran("run:level0.train")
    assert again.report["provenance"]["bridge"]["dirty"] == ["M docs/guide.md"]


def forget_report(mini: Miniature) -> None:
    for path in (mini.workspace / "report").iterdir():
        path.unlink()


def test_the_report_can_be_told_again_from_records_alone(mini):
    text = LEVELS + "      bad: {command: [python, train.py, run.mode=badend], steps: 2, logs: logs, backend: any}\n"
    mini.levels.write_text(text)
    first = mini.doit("level0", "retries=0")
    forget_report(mini)
    again = mini.doit("report")
    assert (again.rc, again.report["result"]) == (first.rc, first.report["result"]) == (1, "Fail")
    for told, known in zip(again.report["cases"], first.report["cases"], strict=True):
        assert told["cached"]
        assert {k: told[k] for k in ("id", "verdict", "reasons", "checks", "attempts", "steps")} == {
            k: known[k] for k in ("id", "verdict", "reasons", "checks", "attempts", "steps")
        }
    assert again.report["provenance"] == first.report["provenance"]
    assert {p.name for p in (mini.workspace / "report").iterdir()} == {
        "report.json", "junit.xml", "summary.md", "index.html"
    }  # fmt: skip


def test_a_record_of_another_tree_or_with_other_evidence_is_not_told_again(mini):
    assert mini.doit("level0").rc == 0
    mapping = mini.bridge / "src/megatron/bridge/mapping.py"
    kept = mapping.read_text()
    mapping.write_text("FACTOR = 1.0  # another tree\n")
    forget_report(mini)
    assert mini.doit("report").rc == 2
    mapping.write_text(kept)
    (mini.attempts()[-1] / "run.log").write_text("forged")
    forged = mini.doit("report")
    assert forged.rc == 2
    assert "no record fits" in forged.out


def test_a_level_that_only_includes_others_is_answered_by_their_cases(passed):
    text = passed.levels.read_text()
    passed.levels.write_text(text + "  5:\n    title: all\n    includes: [level0]\n")
    done = passed.doit("level5")
    assert (done.rc, done.report["result"]) == (0, "Pass"), done.out
    assert done.report["groups"] == {"level5": ["unit.mapping", "level0.train"]}
    assert "run:level0.train: fresh" in passed.doit("why", "level5").out
    passed.levels.write_text(text + "  7:\n    title: suites alone\n    suites: [mapping]\n")
    assert passed.doit("level7").rc == 0
    passed.levels.write_text(text)


IN_OTHER_PLACES = """\
      inside: {repo: bridge, script: scripts/go.sh, backend: any, expect_log: [one], files: [out/*.txt]}
      unit: {command: [python, tests/unit/go.py], backend: any, expect_log: [one]}
"""


def test_a_case_works_in_a_copy_of_its_tree_and_runs_again_when_what_it_names_there_changed(mini):
    script, program = mini.bridge / "scripts/go.sh", mini.nemo_rl / "tests/unit/go.py"
    script.parent.mkdir(parents=True)
    script.write_text("python -c 'import megatron.bridge'; echo one; mkdir -p out; echo x > out/a.txt\n")
    program.parent.mkdir(parents=True)
    program.write_text("import megatron.bridge\nprint('one')\n")
    mini.levels.write_text(LEVELS + IN_OTHER_PLACES)
    first = mini.doit("level0.inside", "level0.unit")
    assert first.rc == 0, first.out
    assert not list(mini.workspace.glob("snapshots/bridge-*/tree/out")), "a frozen tree was written to"
    script.write_text("echo two\n")
    program.write_text("import megatron.bridge\nprint('two')\n")
    then = mini.doit("level0.inside", "level0.unit")
    assert [case["verdict"] for case in then.report["cases"]] == ["Fail", "Fail"]
    assert then.ran("run:level0.inside")
    assert then.ran("run:level0.unit")


def test_a_build_folder_that_would_be_tested_itself_is_refused(mini):
    for inside in (mini.nemo_rl / "state", mini.bridge):
        refused = mini.doit("level0", f"build={inside}")
        assert refused.rc == 2
        assert "would become part of what is tested" in refused.out
    (mini.nemo_rl / ".gitignore").write_text("__pycache__/\nignored/\n")
    assert mini.doit("sync", f"build={mini.nemo_rl / 'ignored'}").rc == 0


def test_a_unit_suite_of_the_bridge_cannot_change_what_the_next_one_sees(mini):
    test = mini.bridge / "tests/unit_tests/test_mapping.py"
    test.write_text("import os\ndef test_it(): assert not os.path.exists('left'); open('left', 'w').close()\n")
    assert mini.doit("unit:mapping").rc == 0
    assert mini.doit("unit:mapping", "fresh=1").rc == 0


def test_a_b_a_finds_the_earlier_pass(passed):
    mapping = passed.bridge / "src/megatron/bridge/mapping.py"
    mapping.write_text("FACTOR = 1.5\n")
    broken = passed.doit("level0")
    assert broken.rc == 1
    assert broken.ran("run:level0.train")
    assert "1.5" in broken.case["reasons"][0]["text"]
    stages = {s["name"]: s for s in broken.report["stages"]}
    assert (stages["image"]["state"], stages["check:level0.train"]["state"]) == ("reused", "failed")
    assert (stages["run:level0.train"]["state"], stages["run:level0.train"]["why"]) == ("ran", "bridge changed")
    assert stages["run:level0.train"]["needs"] == ["probe", "unit:mapping", "config:level0.train"]
    assert [c["earlier"] for c in broken.case["checks"]] == [[1.0], [1.0]]
    run_git(passed.bridge, "checkout", "-q", ".")
    back = passed.doit("level0")
    assert [s["state"] for s in back.report["stages"] if s["name"].startswith(("run", "check"))] == ["reused"] * 2
    assert back.rc == 0
    assert not back.ran("run:level0.train")
    known = json.loads(passed.doit("status", "--json").out)["cases"]
    assert [row["verdict"] for row in known] == ["Pass"], "the Fail is newer, but of another tree"


def test_changed_evidence_is_not_believed(passed):
    log = passed.workspace / passed.report()["cases"][0]["attempts"][0]["path"] / "run.log"
    log.write_text(log.read_text() + "one more line\n")
    again = passed.doit("level0")
    assert again.rc == 0
    assert again.ran("run:level0.train")


def test_fresh_ignores_an_earlier_pass(passed):
    again = passed.doit("level0", "fresh=1")
    assert again.rc == 0
    assert again.case["cached"] is False


def test_why_names_the_file(passed):
    (passed.bridge / "src/megatron/bridge/new_model.py").write_text("x = 1\n")
    told = passed.doit("why", "level0.train")
    (passed.bridge / "src/megatron/bridge/new_model.py").unlink()
    assert "A src/megatron/bridge/new_model.py" in told.out
    assert "run:level0.train: stale" in told.out
    assert "run:level0.train: fresh" in passed.doit("why", "level0.train").out


# Each way to look like a Pass without being one, with the words that say what it was.
@pytest.mark.parametrize(
    ("mode", "verdict", "rc", "words"),
    [
        ("early", "Fail", 1, "target step not reached: 1 of 2"),
        ("nan", "Fail", 1, "NaN at step 2"),
        ("noevents", "Fail", 1, "no evidence"),
        ("skip", "Blocked", 2, "skipped itself"),
        ("teardown", "Fail", 1, "teardown: steps 2/2, metrics ok"),
    ],
)
def test_what_only_looks_like_a_pass(passed, mode, verdict, rc, words):
    done = passed.doit("level0", f"run.mode={mode}")
    assert done.rc == rc, done.out
    assert done.case["verdict"] == verdict
    assert words in " ".join(r["text"] for r in done.case["reasons"])
    assert done.case["command"][-1] == f"run.mode={mode}"


def test_only_a_bad_end_after_sound_training_is_tried_again(passed):
    before = len(passed.attempts())
    assert len(passed.doit("level0", "run.mode=teardown", "fresh=1").case["attempts"]) == 2
    assert len(passed.attempts()) == before + 2
    again = passed.doit("level0", "run.mode=badend")  # rc 1 and a false check: that is no flake
    assert again.rc == 1
    assert len(again.case["attempts"]) == 1
    assert "beyond the limit" in again.case["reasons"][0]["text"]


@pytest.mark.parametrize(
    ("vendored", "finding", "rc"), [("FACTOR = 1.0\n", "new", 1), ("FACTOR = 3.0\n", "pre-existing", 2)]
)
def test_an_undecided_death_is_compared_with_the_vendored_bridge_by_itself(mini, vendored, finding, rc):
    package = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge/src/megatron/bridge"
    core = package.replace("src/megatron/bridge", "3rdparty/Megatron-LM/megatron/core")
    for name, text in {
        f"{package}/__init__.py": "",
        f"{package}/mapping.py": vendored,
        f"{core}/__init__.py": "",
    }.items():
        (mini.nemo_rl / name).parent.mkdir(parents=True, exist_ok=True)
        (mini.nemo_rl / name).write_text(text)
    (mini.bridge / "src/megatron/bridge/mapping.py").write_text("FACTOR = 3.0\n")
    done = mini.doit("level0", "run.mode=die")  # the process is killed where FACTOR is 3: no cause in the log
    assert done.rc == rc, done.out
    assert done.case["class"] == "undecided"
    assert done.case["baseline"]["finding"] == finding
    decided = [text for text in done.case["chain"] if "the vendored Bridge shows, too" in text]
    assert bool(decided) is (rc == 2)
    off = mini.doit("level0", "run.mode=die", "baseline=off")
    assert off.case["baseline"]["finding"] == finding  # a record by now


def test_a_worker_that_imports_another_bridge_is_found(mini):
    other = mini.home / "other/megatron/bridge"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "mapping.py").write_text("FACTOR = 1.0\n")
    (mini.nemo_rl / "train.py").write_text(
        f"import sys; sys.path.insert(0, {str(mini.home / 'other')!r})\n" + (mini.nemo_rl / "train.py").read_text()
    )
    done = mini.doit("level0")
    assert done.rc == 1
    assert "not from the tree under test" in done.case["reasons"][0]["text"]


@pytest.mark.parametrize(
    ("break_it", "rc", "task", "words"),
    [
        (lambda m: (m.bridge / "src/megatron/bridge/__init__.py").write_text("def broken(:\n"), 1, "probe", "SyntaxError"),
        (lambda m: (m.bridge / "tests/unit_tests/test_mapping.py").write_text(""), 2, "unit:mapping", "0 tests executed"),
        (lambda m: (m.bridge / "tests/unit_tests/test_mapping.py").write_text("def test(): assert 0\n"), 1, "unit:mapping", "assert 0"),
        (
            lambda m: run_git(m.bridge, "mv", "tests/unit_tests/test_mapping.py", "tests/test_mapping.py"), 2,
            "unit:mapping", "renamed to tests/test_mapping.py",
        ),
    ],
)  # fmt: skip
def test_an_earlier_stage_stops_the_case_and_is_named(mini, break_it, rc, task, words):
    break_it(mini)
    done = mini.doit("level0")
    assert done.rc == rc, done.out
    assert done.case["verdict"] == "Blocked"
    assert done.case["reasons"][0]["kind"] == "dependency"
    assert done.case["reasons"][0]["subject"] == task
    assert words in done.out
    assert mini.build.glob("*/attempts/level0.train/*")


def test_the_checkouts_are_not_touched(passed):
    for repo in (passed.bridge, passed.nemo_rl):
        assert run_git(repo, "status", "--porcelain", "--ignored").replace("!! 3rdparty/\n", "") == ""


def test_secrets_are_passed_and_never_written(mini):
    done = mini.doit("level0", HF_TOKEN="hf_very_secret_value")
    assert done.rc == 0, done.out
    for path in mini.build.rglob("*"):
        if path.is_file():
            assert b"hf_very_secret_value" not in path.read_bytes(), path
    assert "token ***" in (mini.attempts()[0] / "run.log").read_text()


def test_after_sigkill_of_the_runner_nothing_goes_on_and_the_next_call_ends_well(mini):
    runner = mini.start("level0", "run.mode=sleep")
    wait_for(lambda: list(mini.build.glob("*/attempts/level0.train/*/started")))
    attempt = mini.attempts()[0]
    runner.kill()
    runner.communicate()
    ended = wait_for(lambda: (attempt / "exit.json").exists() and json.loads((attempt / "exit.json").read_text()))
    assert ended["reason"] == "runner_gone"
    assert mini.doit("level0").rc == 0


@pytest.mark.parametrize(("number", "rc"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_run_within_seconds_and_leaves_a_report(mini, number, rc):
    runner = mini.start("level0", "run.mode=sleep")
    wait_for(lambda: list(mini.build.glob("*/attempts/level0.train/*/started")))
    told = time.monotonic()
    runner.send_signal(number)
    out, _ = runner.communicate(timeout=60)
    assert time.monotonic() - told < 30
    assert runner.returncode == rc, out
    assert mini.report()["result"] == "Blocked"
    assert "Result: Blocked" in out


def test_two_runs_at_once_wait_for_each_other_and_both_are_right(mini):
    first, second = mini.start("level0"), mini.start("level0")
    outs = [process.communicate(timeout=200)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outs
    assert len(mini.attempts()) == 1  # the second found the first one's record


def test_daemons_of_a_run_end_with_it(mini):
    assert mini.doit("level0", "run.mode=daemon").rc in (0, 1)
    tree = str(mini.attempts()[0])

    def left() -> list[str]:
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if tree.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
            except OSError:
                continue
        return found

    wait_for(lambda: not left())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("levle0",), "did you mean 'level0'?"),
        (("level0", "runtim=local"), "did you mean runtime=?"),
        (("level0", "bridge=/does/not/exist"), "no such directory"),
        (("why", "level0.trian"), "level0.train"),
        (("why",), "why what?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(passed, words, text):
    command = [
        *passed.argv()[:3],
        *words,
        *(w for w in passed.argv()[3:] if w.split("=")[0] not in {x.split("=")[0] for x in words}),
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, env=passed.environment(), check=False
    )
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("Result: Blocked - ")


def test_without_checkouts_nothing_runs_and_the_error_says_how(passed):
    done = subprocess.run(
        [*passed.argv()[:3], "level0", "runtime=local"], cwd=Path(__file__).parent.parent, capture_output=True, text=True,
        env=passed.environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "export BRIDGE_REPO=" in done.stderr


def test_a_level_file_with_a_mistake_names_the_line(mini):
    mini.levels.write_text(mini.levels.read_text().replace("step_tag", "x").replace("    cases:", "    caess:"))
    done = mini.doit("level0")
    assert done.rc == 2
    assert "levels.yaml:" in done.out
    assert "did you mean 'cases'" in done.out


def test_two_event_files_that_contradict_each_other_are_no_evidence(mini):
    trainer = mini.nemo_rl / "train.py"
    again = 'write(Path("logs/exp_002/tensorboard/events.out.tfevents.2.h.1.0"), [scalars({"train/loss": 9.0}, 1)])\n'
    trainer.write_text(trainer.read_text().replace('if mode == "daemon":', again + 'if mode == "daemon":'))
    done = mini.doit("level0")
    assert done.rc == 1, done.out
    assert "steps 1 to 1 differ" in " ".join(r["text"] for r in done.case["reasons"])


@pytest.mark.parametrize(
    ("origin", "runtime", "contained"),
    [
        ("the command line", "docker", True), ("the command line", "podman", True), ("the command line", "slurm", True),
        ("the command line", "local", False), ("E2E_RUNTIME", "docker", False), ("site.yaml", "docker", False),
        (None, "docker", False),
    ],
)  # fmt: skip
def test_rehearsals_leave_the_host_only_for_a_runtime_on_the_command_line(
    tmp_path, monkeypatch, origin, runtime, contained
):
    from tasks import cpu_image
    from tasks.attempts import Place
    from tasks.pipeline import Pipeline
    from tasks.settings import Settings

    here, there = (Place(runtime, "python", {"id": runtime}, rehearsal=True) for runtime in ("here", "engine"))
    monkeypatch.setattr(cpu_image, "place", lambda *_: there)
    monkeypatch.setattr(cpu_image, "mounted", lambda built, _: there if built is here else None)
    origins = {"runtime": origin} if origin else {}
    pipe = Pipeline(Settings(build=tmp_path, levels=tmp_path, python=tmp_path, runtime=runtime, origins=origins))
    pipe.__dict__.update(cpu_place=here, place=there, workspace=SimpleNamespace(name="w"))
    assert pipe.place_of("cpu") is (there if contained else here)
    assert pipe.cpu_place is here, "proofs run on this machine"


def test_an_interpreter_of_a_cpu_environment_that_is_not_todays_is_refused_with_a_way_out(tmp_path, monkeypatch):
    """Without its stand-ins the probe would blame the Bridge for what the interpreter lacks."""
    from tasks import pipeline
    from tasks.errors import UserError
    from tasks.settings import Settings

    python = tmp_path / "cpu/venv-1/bin/python"
    python.parent.mkdir(parents=True)
    monkeypatch.setattr(pipeline.images, "resolve", lambda *_, **__: SimpleNamespace(as_dict=dict))
    pipe = pipeline.Pipeline(Settings(build=tmp_path, levels=tmp_path, python=python, runtime="local"))
    pipe.__dict__.update(workspace=SimpleNamespace(name="w"))
    with pytest.raises(UserError, match=r"`\./doitw cpu` renews it"):
        _ = pipe.place


@pytest.mark.parametrize(
    ("requested", "planned", "made"),
    [
        (["cpu"], ["cpu"], "image"), (["rehearse:x"], ["cpu", "probe-cpu", "check:rehearse.x"], "image"),
        (["proof:qwen2"], ["cpu", "proof:qwen2"], "environment"), (["level1"], ["cpu", "gate:qwen2"], "environment"),
    ],
)  # fmt: skip
def test_the_image_of_the_cpu_environment_is_made_for_rehearsals_alone(tmp_path, monkeypatch, requested, planned, made):
    from tasks.invocation import Invocation
    from tasks.settings import Settings

    asked = []
    for name, what in (("rehearsal_place", "image"), ("cpu_place", "environment")):
        monkeypatch.setattr(Invocation, name, property(lambda _, what=what: asked.append(what) or True))
    now = Invocation(Settings(build=tmp_path, levels=tmp_path, python=tmp_path))
    now.requested, now.planned = requested, planned
    assert now.do_cpu() is True
    assert asked == [made]
