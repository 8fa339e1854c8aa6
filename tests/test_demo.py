"""The demo workspace: stable repositories, edits that survive, scripts that pass, and faults that leave the evidence they promise.

What the pipeline makes of that evidence is tested elsewhere; here the scripts are run by hand, as a user would.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import demo, levels
from tasks.demo import faults, repositories
from tasks.errors import UserError

SCRIPTS = {
    "grpo_megatron": 2,
    "grpo_megatron_generation": 2,
    "grpo_megatron_lora": 3,
    "grpo_megatron_lora_resume": 4,
    "grpo_megatron_non_colocated": 2,
}
LEARNING = ("grpo_megatron_lora", "grpo.max_num_steps=20", "data.shuffle=false", "checkpointing.enabled=false")
TAGS = (
    "loss", "reward", "grad_norm", "gen_kl_error", "kl_penalty", "approx_entropy", "token_mult_prob_error",
    "probs_ratio_clamped_min", "probs_ratio_clamped_max", "lr", "global_valid_toks", "mean_prompt_length",
    "mean_gen_tokens_per_sample",
)  # fmt: skip
BANNERS = """Loaded configuration from:|Final config:|Using log directory: .*/logs/exp_001|Initializing lm_policy workers
MegatronPolicyWorker\\[rank=0\\] pid=\\d+\\) Using default megatron checkpoint dir:|> compiling dataset index builder
Model, optimizer, and learning rate scheduler built|Checkpoint loaded|Reference model loaded|✓ 1 workers initialized in
SETUP COMPLETE|={25} Step 1/2 ={25}|Training Results:|• Loss:|• Generation KL Error:|={25} Step 2/2 ={25}
Max number of steps has been reached, stopping training early""".replace("\n", "|").split("|")


@dataclass(frozen=True)
class Evidence:
    """What a script left: exit status (None: stopped by the test), output, its own metrics.json or {}."""

    rc: int | None
    log: str
    metrics: dict[str, dict[str, float]]
    tree: Path

    def series(self, tag: str) -> list[float]:
        return [self.metrics[tag][step] for step in sorted(self.metrics[tag], key=int)]


def git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", checkout, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def environment(checkouts: demo.Checkouts, home: Path) -> dict[str, str]:
    bridge, nemo_rl = checkouts.bridge, checkouts.nemo_rl
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONPATH": f"{bridge / 'src'}:{bridge / '3rdparty/Megatron-LM'}:{nemo_rl}",
        "NRL_MEGATRON_CHECKPOINT_DIR": str(home / "conversions"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run(checkouts: demo.Checkouts, home: Path, script: str, *overrides: str, stop_after: str | None = None) -> Evidence:
    """Run a script in a copy of the NeMo-RL checkout; with `stop_after`, stop it ten seconds after that line."""
    tree = home / "nemo-rl"
    if not tree.exists():
        shutil.copytree(checkouts.nemo_rl, tree, symlinks=True)
    command = ["bash", f"tests/functional/{script}.sh", *overrides]
    env = environment(demo.Checkouts(checkouts.bridge, tree), home)
    process = subprocess.Popen(command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)  # fmt: skip
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        os.killpg(process.pid, signal.SIGKILL)

    assert process.stdout is not None
    lines, timers = [], [threading.Timer(300, stop)]
    timers[0].start()
    for line in process.stdout:
        lines.append(line)
        if stop_after and stop_after in line:
            timers.append(threading.Timer(10, stop))
            timers[-1].start()
    rc: int | None = process.wait()
    process.stdout.close()
    for timer in timers:
        timer.cancel()
    file = tree / f"tests/functional/{script}/metrics.json"
    metrics = json.loads(file.read_text()) if file.exists() else {}
    return Evidence(None if stopped.is_set() else rc, "".join(lines), metrics, tree)


def pytest_of(checkouts: demo.Checkouts, home: Path, name: str) -> tuple[int, str]:
    """Run a suite of the demo's levels file as a user would; return pytest's exit status and output."""
    suite = levels.load(demo.LEVELS).suites[name]
    tree = checkouts.bridge if suite.repo == "bridge" else checkouts.nemo_rl
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite.paths]
    done = subprocess.run(
        command, cwd=tree, env=environment(checkouts, home), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> demo.Checkouts:
    return demo.make(tmp_path_factory.mktemp("good"))


@pytest.fixture
def made(good: demo.Checkouts, tmp_path: Path) -> demo.Checkouts:
    """Return a copy of the generated checkouts that a test may spoil."""
    for checkout in (good.bridge, good.nemo_rl):
        shutil.copytree(checkout, tmp_path / "repos" / checkout.name, symlinks=True)
    return demo.Checkouts(tmp_path / "repos/bridge", tmp_path / "repos/nemo-rl")


def faulty(name: str, good: demo.Checkouts, folder: Path) -> demo.Checkouts:
    """Return the good checkouts with the broken one replaced by an edited copy."""
    fault = demo.FAULTS[name]
    which = "bridge" if fault.repo == "bridge" else "nemo_rl"
    broken = folder / "broken" / getattr(good, which).name
    shutil.copytree(getattr(good, which), broken, symlinks=True)
    demo.apply(fault, broken)
    return demo.Checkouts(**{"bridge": good.bridge, "nemo_rl": good.nemo_rl, which: broken})


# -- repositories ------------------------------------------------------------------------------------------------------


def test_same_templates_give_the_same_commits_under_another_umask_and_user(
    good: demo.Checkouts, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody else")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    (tmp_path / "config").write_text("[core]\n\tautocrlf = true\n[commit]\n\tgpgsign = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    before = os.umask(0o077)
    try:
        again = demo.make(tmp_path / "a folder with blanks")
    finally:
        os.umask(before)
    monkeypatch.undo()
    for one, other in ((good.bridge, again.bridge), (good.nemo_rl, again.nemo_rl)):
        assert git(one, "rev-parse", "HEAD") == git(other, "rev-parse", "HEAD")
        assert git(other, "status", "--porcelain") == ""
        assert git(one, "ls-files", "-s") == git(other, "ls-files", "-s")


def test_read_only_templates_with_caches_in_them_give_the_same_commits(
    good: demo.Checkouts, tmp_path: Path, monkeypatch: Any
) -> None:
    templates = tmp_path / "templates"
    for tree in ("bridge", "megatron_lm", "nemo_rl"):
        shutil.copytree(repositories.TEMPLATES / tree, templates / tree)
    for junk in (
        "bridge/.ruff_cache/x",
        "bridge/src/__pycache__/y.pyc",
        "nemo_rl/examples/models/tiny-adder/model.npz",
    ):
        (templates / junk).parent.mkdir(exist_ok=True)
        (templates / junk).write_text("left by a tool")
    folders = [templates, *(p for p in templates.rglob("*") if p.is_dir())]
    for path in templates.rglob("*.*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in folders:
        folder.chmod(0o555)
    monkeypatch.setattr(repositories, "TEMPLATES", templates)
    repositories.template_digest.cache_clear()
    try:
        made = demo.make(tmp_path / "repos")
    finally:
        repositories.template_digest.cache_clear()
        for folder in folders:
            folder.chmod(0o755)
    assert git(made.nemo_rl, "rev-parse", "HEAD") == git(good.nemo_rl, "rev-parse", "HEAD")
    (made.bridge / "pyproject.toml").write_text("a generated file can be edited")


def test_checkouts_have_the_shape_of_the_real_ones(good: demo.Checkouts) -> None:
    for path in ("src/megatron/bridge/__init__.py", "3rdparty/Megatron-LM/megatron/core/__init__.py"):
        assert (good.bridge / path).is_file()
        assert (good.nemo_rl / repositories.VENDORED / path).is_file()
    assert not (good.bridge / "src/megatron/__init__.py").exists()
    assert "160000" in git(good.bridge, "ls-files", "-s", "3rdparty/Megatron-LM")
    assert git(good.nemo_rl, "submodule", "status", "--recursive").count("\n") == 2
    for script in SCRIPTS:
        assert "100755" in git(good.nemo_rl, "ls-files", "-s", f"tests/functional/{script}.sh")
    for nested in (good.bridge, good.nemo_rl, good.bridge / "3rdparty/Megatron-LM"):
        assert demo.is_demo(nested)


def test_edits_commits_and_untracked_files_survive_another_make_of_newer_templates(
    made: demo.Checkouts, monkeypatch: Any
) -> None:
    (made.bridge / "src/megatron/bridge/__init__.py").write_text("edited")
    (made.nemo_rl / "new.txt").write_text("untracked")
    monkeypatch.setattr(repositories, "template_digest", lambda: "newer")
    assert demo.make(made.bridge.parent) == made
    assert (made.bridge / "src/megatron/bridge/__init__.py").read_text() == "edited"
    assert (made.nemo_rl / "new.txt").read_text() == "untracked"


@pytest.mark.parametrize("edit", ["nested file", "commit", "stash", "branch"])
def test_work_that_git_status_does_not_show_survives(edit: str, made: demo.Checkouts, monkeypatch: Any) -> None:
    author = ("-c", "user.name=me", "-c", "user.email=me@example.invalid")
    core = made.bridge / "3rdparty/Megatron-LM"
    target = core if edit == "nested file" else made.bridge
    (target / "README.md").write_text("mine")
    if edit == "commit":
        git(target, *author, "commit", "-qam", "mine")
    elif edit == "stash":
        git(target, *author, "stash")
    elif edit == "branch":
        git(target, *author, "checkout", "-qb", "mine")
        git(target, *author, "commit", "-qam", "mine")
        git(target, "checkout", "-q", "main")
    monkeypatch.setattr(repositories, "template_digest", lambda: "newer")
    before = git(target, "for-each-ref"), (target / "README.md").read_text()
    demo.make(made.bridge.parent)
    assert (git(target, "for-each-ref"), (target / "README.md").read_text()) == before


def test_untouched_checkout_of_older_templates_is_renewed(made: demo.Checkouts, monkeypatch: Any) -> None:
    (made.nemo_rl / "tests/functional/grpo_megatron").mkdir()
    (made.nemo_rl / "tests/functional/grpo_megatron/run.log").write_text("ignored output is no edit")
    monkeypatch.setattr(repositories, "template_digest", lambda: "newer")
    demo.make(made.bridge.parent)
    for checkout in (made.bridge, made.nemo_rl):
        assert json.loads((checkout / demo.repositories.MARKER).read_text())["templates"] == "newer"


def test_current_checkout_is_not_even_looked_into(made: demo.Checkouts, monkeypatch: Any) -> None:
    monkeypatch.setattr(repositories, "_git", lambda *_a, **_k: pytest.fail("git was called"))
    assert demo.make(made.bridge.parent) == made


def test_folder_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bridge").mkdir()
    (tmp_path / "bridge/precious").write_text("x")
    with pytest.raises(UserError, match="not a generated demo checkout"):
        demo.make(tmp_path)
    assert (tmp_path / "bridge/precious").read_text() == "x"


def test_interrupted_generation_leaves_nothing_half_made(tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(repositories, "_put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            demo.make(tmp_path)
    (tmp_path / ".making-left-by-sigkill").mkdir()
    demo.make(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "bridge", "nemo-rl"]


def test_two_at_once_give_one_result(tmp_path: Path) -> None:
    results: list[demo.Checkouts] = []
    threads = [threading.Thread(target=lambda: results.append(demo.make(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert git(results[0].bridge, "status", "--porcelain") == ""


# -- faults and levels -------------------------------------------------------------------------------------------------


def test_levels_file_is_sound_and_its_scripts_and_suites_exist(good: demo.Checkouts) -> None:
    loaded = levels.load(demo.LEVELS)
    assert loaded.warnings == ()
    assert set(loaded.levels) == set(faults.ALL_LEVELS)
    for case in loaded.cases():
        assert case.script is not None
        assert (good.nemo_rl / case.script).is_file()
    for suite in loaded.suites.values():
        tree = good.bridge if suite.repo == "bridge" else good.nemo_rl
        assert all((tree / path).exists() for path in suite.paths)


def test_every_fault_applies_and_names_deliverables_that_exist(good: demo.Checkouts) -> None:
    loaded = levels.load(demo.LEVELS)
    known = {"probe", *loaded.levels, *(f"unit:{name}" for name in loaded.suites)}
    assert len(demo.FAULTS) >= 8
    for fault in demo.FAULTS.values():
        assert {*fault.found_by, *fault.missed_by} <= known, fault.name
        assert fault.found_by, fault.name
        assert not set(fault.found_by) & set(fault.missed_by), fault.name
        checkout = good.bridge if fault.repo == "bridge" else good.nemo_rl
        for path in fault.paths:
            assert faults._edited(fault, path, (checkout / path).read_text()) != (checkout / path).read_text()


def test_faulty_copy_holds_the_fault_alone_and_is_kept_while_it_does(tmp_path: Path) -> None:
    made = demo.make_faulty(tmp_path, "mapping-swapped")
    assert made.bridge == tmp_path / "fault-mapping-swapped/bridge"
    assert git(made.bridge, "status", "--porcelain").split() == ["M", *demo.FAULTS["mapping-swapped"].paths]
    assert git(made.nemo_rl, "status", "--porcelain") == ""
    edited = made.bridge / demo.FAULTS["mapping-swapped"].paths[0]
    before = edited.stat().st_mtime_ns
    assert demo.make_faulty(tmp_path, "mapping-swapped") == made
    assert edited.stat().st_mtime_ns == before
    (made.bridge / "mine").write_text("an edit of the user")
    told: list[str] = []
    demo.make_faulty(tmp_path, "mapping-swapped", tell=told.append)
    assert (tmp_path / "fault-mapping-swapped.edited-1/bridge/mine").read_text() == "an edit of the user"
    assert "edited-1" in told[0]
    assert not (made.bridge / "mine").exists()


def test_fault_that_no_longer_fits_changes_nothing(made: demo.Checkouts) -> None:
    fault = demo.FAULTS["nan-at-step-2"]
    path = made.bridge / fault.paths[0]
    path.write_text(path.read_text().replace("ceiling", "roof"))
    before = path.read_text()
    with pytest.raises(UserError, match="0 times, not once"):
        demo.apply(fault, made.bridge)
    assert path.read_text() == before


def test_unknown_fault_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'mapping-swapped'"):
        demo.make_faulty(tmp_path, "maping-swapped")


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_level_0_script_shows_banners_tags_and_steps_in_the_real_form(good: demo.Checkouts, tmp_path: Path) -> None:
    evidence = run(good, tmp_path, "grpo_megatron")
    assert evidence.rc == 0, evidence.log
    place = 0
    for banner in BANNERS:
        found = re.compile(banner).search(evidence.log, place)
        assert found, banner
        place = found.start()
    assert "Skipping import." not in evidence.log
    assert f"megatron.bridge from {good.bridge}/src/megatron/bridge/__init__.py" in evidence.log
    for tag in TAGS:
        assert list(evidence.metrics[f"train/{tag}"]) == ["1", "2"], tag
    assert any(tag.startswith("timing/train/") for tag in evidence.metrics)
    assert 1.0 < max(evidence.series("train/token_mult_prob_error")) < 1.001  # float32 against float64: near, not equal
    assert list(evidence.tree.glob("tests/functional/grpo_megatron/logs/exp_001/tensorboard/events.out.tfevents.*"))
    again = run(good, tmp_path, "grpo_megatron")
    assert "Skipping import." in again.log
    assert again.series("train/loss") == evidence.series("train/loss")
    assert git(evidence.tree, "status", "--porcelain") == ""


def test_override_that_the_configuration_does_not_know_ends_before_any_worker(
    good: demo.Checkouts, tmp_path: Path
) -> None:
    evidence = run(good, tmp_path, "grpo_megatron", "policy.megatron_cfg.converter_type=x")
    assert evidence.rc == 1
    assert "Could not override 'policy.megatron_cfg.converter_type'" in evidence.log
    assert "Initializing lm_policy workers" not in evidence.log


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_of_the_good_demo_passes_to_its_last_step(script: str, good: demo.Checkouts, tmp_path: Path) -> None:
    evidence = run(good, tmp_path, script)
    assert evidence.rc == 0, evidence.log
    assert max(map(int, evidence.metrics["train/loss"])) == SCRIPTS[script]
    assert {f"train/{tag}" for tag in TAGS} <= set(evidence.metrics)
    assert all(map(math.isfinite, (v for s in evidence.metrics.values() for v in s.values())))
    assert sum(evidence.series("train/reward")) / SCRIPTS[script] > 0.3


@pytest.mark.slow
def test_reward_rises_over_twenty_steps(good: demo.Checkouts, tmp_path: Path) -> None:
    rewards = run(good, tmp_path, *LEARNING).series("train/reward")
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.18


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bridge-mapping", "bridge-provider", "nemo-rl-loop"])
def test_suite_of_the_good_demo_executes_its_minimum(name: str, good: demo.Checkouts, tmp_path: Path) -> None:
    rc, output = pytest_of(good, tmp_path, name)
    assert rc == 0, output
    assert int(re.findall(r"(\d+) passed", output)[0]) >= levels.load(demo.LEVELS).suites[name].min_tests


# One look a fault: the script that should notice, and what its evidence must show although, mostly, rc is 0.
SYMPTOMS: dict[str, tuple[tuple[str, ...], Any]] = {
    "mapping-swapped": (("grpo_megatron",), lambda e: e.rc == 1 and min(e.series("train/token_mult_prob_error")) > 2),
    "weight-not-exported": (("grpo_megatron_non_colocated",), lambda e: e.rc == 1 and min(e.series("train/token_mult_prob_error")) > 2),
    "wrong-scale": (("grpo_megatron",), lambda e: e.rc == 0 and max(e.series("train/reward")) < 0.2),
    "optimizer-noop": (LEARNING, lambda e: e.rc == 0 and sum(e.series("train/reward")[-5:]) - sum(e.series("train/reward")[:5]) < 0.5),
    "resume-loses-optimizer": (("grpo_megatron_lora_resume",), lambda e: e.rc == 1 and e.series("resume/relative_difference")[1] > 0.01),
    "nan-at-step-2": (("grpo_megatron",), lambda e: e.rc == 0 and math.isnan(e.series("train/loss")[1]) and math.isfinite(e.series("train/loss")[0])),
    "stops-early": (("grpo_megatron",), lambda e: e.rc == 0 and list(e.metrics["train/loss"]) == ["1"]),
    "worker-imports-vendored": (("grpo_megatron",), lambda e: e.rc == 0 and re.search(r"megatron\.bridge from .*/Megatron-Bridge-workspace/", e.log)),
    "syntax-error": (("grpo_megatron",), lambda e: e.rc == 1 and "SyntaxError" in e.log and "gpt_provider.py" in e.log and not e.metrics),
    "refit-raises": (("grpo_megatron_non_colocated",), lambda e: e.rc == 1 and "model_bridge.py" in e.log and "failed during refit" in e.log and not e.metrics),
    "hangs-at-the-end": (("grpo_megatron",), lambda e: e.rc is None and "Step 2/2" in e.log and not e.metrics),
}  # fmt: skip


def test_every_fault_has_a_symptom_here() -> None:
    assert {*SYMPTOMS, "zero-tests"} == set(demo.FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYMPTOMS)
def test_fault_shows_its_symptom(name: str, good: demo.Checkouts, tmp_path: Path) -> None:
    command, shows = SYMPTOMS[name]
    stop_after = "Max number of steps has been reached" if name == "hangs-at-the-end" else None
    evidence = run(faulty(name, good, tmp_path), tmp_path, *command, stop_after=stop_after)
    assert shows(evidence), evidence.log


@pytest.mark.slow
def test_swapped_mapping_is_a_false_pass_of_the_level_3_script_that_only_the_reward_gives_away(
    good: demo.Checkouts, tmp_path: Path
) -> None:
    evidence = run(faulty("mapping-swapped", good, tmp_path), tmp_path, "grpo_megatron_generation")
    assert evidence.rc == 0
    assert max(evidence.series("train/token_mult_prob_error")) < 1.05
    assert max(evidence.series("train/reward")) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "expected",
    [
        ("wrong-scale", "bridge-mapping", 1, "test_round_trip_is_the_identity"),
        ("refit-raises", "bridge-mapping", 0, "passed"),
        ("syntax-error", "bridge-provider", 2, "SyntaxError"),
        ("zero-tests", "bridge-provider", 5, "deselected"),
        ("zero-tests", "bridge-mapping", 0, "1 skipped"),
        (
            "mapping-swapped",
            "bridge-mapping",
            0,
            "passed",
        ),  # a round trip cannot see a swap that is undone on the way back
    ],
)
def test_fault_in_the_unit_suites(expected: tuple[str, str, int, str], good: demo.Checkouts, tmp_path: Path) -> None:
    name, suite, rc, says = expected
    found, output = pytest_of(faulty(name, good, tmp_path), tmp_path, suite)
    assert found == rc, output
    assert says in output
