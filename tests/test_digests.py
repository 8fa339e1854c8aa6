"""The manifest sees every change of content, mode and links, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import digests
from tasks.checkouts import Checkouts
from tasks.digests import Entry, digest_of, matches, scan
from tasks.errors import UserError
from tests.conftest import run_git

FILES = {"src/a.py": "a = 1\n", "src/b.py": "b = 1\n", "docs/x.md": "x\n", "run.sh": "echo\n", ".gitignore": "*.log\n"}


def quiet(cache: Path) -> None:
    """Let the stat cache trust its entries: pretend that it was written long after the files."""
    import json

    known = json.loads(cache.read_text())
    known["scanned_ns"] = time.time_ns() + 10 * digests.RACY_NS
    cache.write_text(json.dumps(known))


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda r: (r / "src/a.py").write_text("a = 2\n"), True),
        (lambda r: (r / "src/new.py").write_text("n\n"), True),
        (lambda r: (r / "src/a.py").unlink(), True),
        (lambda r: (r / "run.sh").chmod(0o755), True),
        (lambda r: ((r / "src/b.py").unlink(), (r / "src/b.py").symlink_to("a.py")), True),
        (lambda r: (r / "ignored.log").write_text("l\n"), False),
        (lambda r: os.utime(r / "src/a.py"), False),
        (lambda r: run_git(r, "commit", "-q", "--allow-empty", "-m", "two"), False),
        (lambda r: (r / "src/a.py").write_text("a = 1\n"), False),
    ],
)
def test_the_digest_moves_exactly_with_what_git_would_commit(make_repo, tmp_path, change, seen):
    repo, cache = make_repo("r", FILES), tmp_path / "cache.json"
    before = scan("bridge", repo, cache)
    quiet(cache)
    change(repo)
    assert (scan("bridge", repo, cache).digest != before.digest) is seen
    assert scan("bridge", repo, tmp_path / "no-cache.json").digest == scan("bridge", repo, cache).digest


def test_content_changed_under_a_kept_mtime_and_size_is_seen(make_repo, tmp_path):
    repo, cache = make_repo("r", FILES), tmp_path / "cache.json"
    before = scan("bridge", repo, cache)
    quiet(cache)
    old = (repo / "src/a.py").stat()
    (repo / "src/a.py").write_text("a = 9\n")
    os.utime(repo / "src/a.py", ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (repo / "src/a.py").stat().st_size == old.st_size
    assert scan("bridge", repo, cache).digest != before.digest


def test_a_file_touched_just_before_the_scan_is_hashed_again(make_repo, tmp_path, monkeypatch):
    repo, cache = make_repo("r", FILES), tmp_path / "cache.json"
    scan("bridge", repo, cache)
    hashed = []
    real = digests.content_hash
    monkeypatch.setattr(digests, "content_hash", lambda path, info: (hashed.append(path), real(path, info))[1])
    scan("bridge", repo, cache)
    assert len(hashed) == len(FILES)  # written within RACY_NS of the first scan: not trusted
    quiet(cache)
    hashed.clear()
    scan("bridge", repo, cache)
    assert hashed == []


def test_a_touch_settles_after_one_rehash(make_repo, tmp_path, monkeypatch):
    repo, cache = make_repo("r", FILES), tmp_path / "cache.json"
    scan("bridge", repo, cache)
    for path in FILES:
        os.utime(repo / path)
    scan("bridge", repo, cache)
    quiet(cache)
    monkeypatch.setattr(digests, "content_hash", lambda path, info: pytest.fail(f"{path} was hashed again"))
    scan("bridge", repo, cache)


def test_nested_repositories_are_walked_and_empty_submodules_named(make_repo, tmp_path):
    inner = make_repo("inner", {"core.py": "c = 1\n"})
    outer = make_repo("outer", FILES)
    run_git(outer, "submodule", "add", "-q", str(inner), "3rdparty/Inner")
    run_git(outer, "commit", "-q", "-m", "sub")
    first = scan("nemo_rl", outer, tmp_path / "c.json")
    assert "3rdparty/Inner/core.py" in first.files
    (outer / "3rdparty/Inner/core.py").write_text("c = 2\n")
    second = scan("nemo_rl", outer, tmp_path / "c.json")
    assert second.digest != first.digest
    run_git(outer, "submodule", "deinit", "-q", "-f", "3rdparty/Inner")
    assert scan("nemo_rl", outer, tmp_path / "c.json").files["3rdparty/Inner"].mode == "160000"


def test_excluded_folders_do_not_count(make_repo, tmp_path):
    repo = make_repo("r", FILES)
    first = scan("bridge", repo, tmp_path / "c.json", exclude=("src",))
    (repo / "src/a.py").write_text("other\n")
    assert scan("bridge", repo, tmp_path / "c.json", exclude=("src",)).digest == first.digest


@pytest.mark.parametrize(
    ("path", "component", "seen"),
    [
        ("examples/configs/grpo.yaml", "nemo_rl", True),
        ("tests/functional/grpo.sh", "nemo_rl", True),
        ("uv.lock", "nemo_rl", True),
        ("tests/check_metrics.py", "nemo_rl", True),
        ("docs/guide.md", "nemo_rl", False),
        ("README.md", "nemo_rl", False),
        ("tests/unit/test_x.py", "nemo_rl", False),
        ("tests/unit/environments/data/sanity.json", "nemo_rl", True),  # scripts under tests/functional read it
        ("scripts/go.sh", "bridge-work", True),
        ("tests/unit/test_x.py", "nemo_rl-tests", True),
    ],
)
def test_documentation_reaches_no_run_and_everything_else_does(path, component, seen):
    assert matches(path, digests.COMPONENTS[component]) is seen


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("tests/unit/test_x.py", ["tests/unit/test_x.py"]),
        ("./tests/unit/test_x.py::test_it", ["tests/unit/test_x.py"]),
        ("tests/unit/", ["tests/unit/test_x.py"]),
        ("--config=docs/x.yaml", ["docs/x.yaml"]),
        ("++data.path=docs/x.yaml", ["docs/x.yaml"]),
        ("examples/run.py", []),  # counts with its component
        ("absent.md", []),
        ("", []),
    ],
)
def test_what_a_command_names_counts_though_its_component_leaves_it_out(make_repo, tmp_path, word, found):
    names = ("tests/unit/test_x.py", "docs/x.yaml", "examples/run.py")
    repo = make_repo("r", dict.fromkeys(names, ""))
    taken = SimpleNamespace(manifests={"nemo_rl": scan("nemo_rl", repo, tmp_path / "c.json")})
    assert list(Checkouts.named(taken, "nemo_rl", "nemo_rl", ["python", word])) == found


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p.mkdir(), "not the top of a git repository"),
        (lambda p: (p.mkdir(), run_git(p, "init", "-q")), "no commit yet"),
    ],
)
def test_a_folder_that_names_no_revision_is_refused(tmp_path, make, words):
    make(tmp_path / "r")
    with pytest.raises(UserError, match=words):
        scan("bridge", tmp_path / "r", tmp_path / "c.json")


def test_scanning_writes_nothing_into_the_checkout(make_repo, tmp_path):
    repo = make_repo("r", FILES)
    os.utime(repo / "src/a.py")  # makes `git status` want to refresh the index
    before = {p: p.stat().st_mtime_ns for p in repo.rglob("*")}
    scan("bridge", repo, tmp_path / "c.json")
    assert {p: p.stat().st_mtime_ns for p in repo.rglob("*")} == before


entries = st.dictionaries(
    st.text(min_size=1, max_size=12),
    st.builds(Entry, st.sampled_from(["100644", "100755"]), st.text(max_size=4)),
    max_size=6,
)


@settings(max_examples=200)
@given(entries, st.randoms())
def test_the_digest_does_not_depend_on_order(files, random):
    shuffled = list(files.items())
    random.shuffle(shuffled)
    assert digest_of(dict(shuffled)) == digest_of(files)


@settings(max_examples=200)
@given(entries, entries)
def test_different_trees_have_different_digests(one, other):
    assert (digest_of(one) == digest_of(other)) is (one == other)


def test_the_difference_names_each_path_once():
    old, new = {"a": ["1", "x"], "b": ["1", "y"], "c": ["1", "z"]}, {"a": ["1", "x"], "b": ["1", "Y"], "d": ["1", "w"]}
    assert digests.difference(old, new) == ["M b", "D c", "A d"]
