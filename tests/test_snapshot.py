"""A snapshot is what its manifest says, complete or not there, and never a link to the user's files."""

from __future__ import annotations

import os
import shutil

import pytest

from tasks import snapshot
from tasks.digests import scan
from tasks.errors import UserError

FILES = {"src/a.py": "a = 1\n", "src/deep/b.py": "b = 1\n", "run.sh": "echo\n"}


def test_an_edit_after_the_snapshot_does_not_reach_it(make_repo, tmp_path):
    repo = make_repo("r", FILES)
    tree = snapshot.take(scan("bridge", repo, tmp_path / "c"), tmp_path / "snapshots")
    with (repo / "src/a.py").open("r+") as same_inode:
        same_inode.write("EDITED")
    assert (tree / "src/a.py").read_text() == "a = 1\n"


def test_untracked_files_modes_and_links_are_in_it(make_repo, tmp_path):
    repo = make_repo("r", FILES)
    (repo / "src/new.py").write_text("new\n")
    (repo / "run.sh").chmod(0o755)
    (repo / "link").symlink_to("src/a.py")
    tree = snapshot.take(scan("bridge", repo, tmp_path / "c"), tmp_path / "snapshots")
    assert (tree / "src/new.py").read_text() == "new\n"
    assert (tree / "run.sh").stat().st_mode & 0o111
    assert (tree / "link").is_symlink()


@pytest.mark.parametrize("absolute", [True, False])
def test_what_a_link_out_of_the_tree_leads_to_is_frozen_with_it(make_repo, tmp_path, absolute):
    repo, outside = make_repo("r", FILES), tmp_path / "outside.py"
    outside.write_text("one\n")
    (repo / "src/a.py").unlink()
    (repo / "src/a.py").symlink_to(outside if absolute else os.path.relpath(outside, repo / "src"))
    manifest = scan("bridge", repo, tmp_path / "c")
    tree = snapshot.take(manifest, tmp_path / "snapshots")
    outside.write_text("two\n")
    assert (tree / "src/a.py").read_text() == "one\n"
    assert snapshot.has_content(tree.parent)
    assert scan("bridge", repo, tmp_path / "c").digest != manifest.digest


def test_a_folder_of_code_behind_a_link_is_refused_and_other_links_stay(make_repo, tmp_path):
    repo, outside = make_repo("r", FILES), tmp_path / "elsewhere"
    outside.mkdir()
    (repo / "data").symlink_to(outside)
    (repo / "src/gone.py").symlink_to(tmp_path / "nowhere")
    (repo / "src/same.py").symlink_to("a.py")
    modes = {path: entry.mode for path, entry in scan("bridge", repo, tmp_path / "c").files.items()}
    assert [modes[path] for path in ("data", "src/gone.py", "src/same.py")] == ["120000"] * 3
    (repo / "src/more").symlink_to(outside)
    with pytest.raises(UserError, match="cannot be frozen"):
        scan("bridge", repo, tmp_path / "c")


def test_a_half_copied_snapshot_is_rebuilt(make_repo, tmp_path):
    manifest = scan("bridge", make_repo("r", FILES), tmp_path / "c")
    tree = snapshot.take(manifest, tmp_path / "snapshots")
    (tree.parent / "manifest.json").unlink()
    (tree / "src/a.py").unlink()
    assert (snapshot.take(manifest, tmp_path / "snapshots") / "src/a.py").read_text() == "a = 1\n"


@pytest.mark.parametrize(
    "damage", [lambda t: (t / "src/a.py").unlink(), lambda t: (t / "src/a.py").write_text("evil\n")]
)
def test_a_damaged_snapshot_is_rebuilt(make_repo, tmp_path, damage):
    manifest = scan("bridge", make_repo("r", FILES), tmp_path / "c")
    damage(snapshot.take(manifest, tmp_path / "snapshots"))
    assert (snapshot.take(manifest, tmp_path / "snapshots") / "src/a.py").read_text() == "a = 1\n"


def test_a_tree_that_changes_while_it_is_copied_is_an_error(make_repo, tmp_path):
    repo = make_repo("r", FILES)
    manifest = scan("bridge", repo, tmp_path / "c")
    (repo / "src/a.py").write_text("changed between manifest and copy\n")
    with pytest.raises(snapshot.TreeChangedError, match=r"src/a\.py changed"):
        snapshot.take(manifest, tmp_path / "snapshots")
    assert list((tmp_path / "snapshots").glob("bridge-*")) == []


def test_a_second_snapshot_links_what_is_equal_and_stays_apart(make_repo, tmp_path):
    repo = make_repo("r", FILES)
    first = snapshot.take(scan("bridge", repo, tmp_path / "c"), tmp_path / "snapshots")
    (repo / "src/a.py").write_text("a = 2\n")
    second = snapshot.take(scan("bridge", repo, tmp_path / "c"), tmp_path / "snapshots")
    assert (first / "src/a.py").read_text() == "a = 1\n"
    assert (second / "src/deep/b.py").stat().st_ino == (first / "src/deep/b.py").stat().st_ino


def test_a_work_copy_is_writable_and_unlinked(make_repo, tmp_path):
    tree = snapshot.take(scan("bridge", make_repo("r", FILES), tmp_path / "c"), tmp_path / "snapshots")
    snapshot.work_copy(tree, tmp_path / "work")
    with (tmp_path / "work/src/a.py").open("r+") as inside:
        inside.write("SCRIBBLE")
    assert (tree / "src/a.py").read_text() == "a = 1\n"
    assert snapshot.has_content(tree.parent)


def test_a_work_copy_of_a_silently_edited_snapshot_is_refused(make_repo, tmp_path):
    import os

    tree = snapshot.take(scan("bridge", make_repo("r", FILES), tmp_path / "c"), tmp_path / "snapshots")
    old = (tree / "src/a.py").stat()
    (tree / "src/a.py").write_text("a = 9\n")
    os.utime(tree / "src/a.py", ns=(old.st_atime_ns, old.st_mtime_ns))
    assert snapshot.is_sound(tree.parent, scan("bridge", tmp_path / "r", tmp_path / "c").digest)
    assert not snapshot.has_content(tree.parent)
    with pytest.raises(UserError, match="not what manifest.json says"):
        snapshot.work_copy(tree, tmp_path / "work")


def test_an_unfinished_copy_of_a_killed_runner_is_not_believed(make_repo, tmp_path):
    manifest = scan("bridge", make_repo("r", FILES), tmp_path / "c")
    home = tmp_path / "snapshots" / f"bridge-{manifest.digest[:20]}"
    (home / "tree/src").mkdir(parents=True)
    (home / "tree/src/a.py").write_text("half\n")
    assert (snapshot.take(manifest, tmp_path / "snapshots") / "src/deep/b.py").exists()
    shutil.rmtree(tmp_path / "snapshots")
