"""The demo's checkouts are the same commits everywhere; nothing of the user's in them is lost."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tasks import demo, levels
from tasks.demo import faults, repositories
from tasks.errors import UserError
from tests.demo.checkouts import (
    SCRIPTS,
    git,
)


@pytest.fixture
def made(good: demo.Checkouts, tmp_path: Path) -> demo.Checkouts:
    """Return a copy of the generated checkouts that a test may spoil."""
    for checkout in (good.bridge, good.nemo_rl):
        shutil.copytree(checkout, tmp_path / "repos" / checkout.name, symlinks=True)
    return demo.Checkouts(tmp_path / "repos/bridge", tmp_path / "repos/nemo-rl")


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
