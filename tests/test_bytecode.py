"""Byte code is found again where the content is the same, and never where it is not."""

from __future__ import annotations

import os
import subprocess
import sys

from tasks import bytecode, digests, snapshot


def run(prefix, path, *code):
    env = {"PYTHONPYCACHEPREFIX": str(prefix), "PYTHONPATH": str(path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-S", "-c", *code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def frozen(make_repo, tmp_path, text, name="mapping.py"):
    repo = make_repo("bridge", {name: text, "same.py": "VALUE = 'same'\n"})
    manifest = digests.scan("bridge", repo, tmp_path / "cache.json", ())
    return snapshot.take(manifest, tmp_path / "snapshots")


def attempt(tmp_path, tree, name):
    prefix = tmp_path / name / "pycache"
    copy = tmp_path / name / "work"
    snapshot.work_copy(tree, copy)
    top, home = bytecode.beside(tree)
    bytecode.share(prefix, {copy: home / tree.relative_to(top)})
    return prefix, copy


def test_a_second_attempt_finds_the_byte_code_of_the_first(make_repo, tmp_path):
    tree = frozen(make_repo, tmp_path, "VALUE = 1\n")
    for name in ("one", "two"):
        prefix, copy = attempt(tmp_path, tree, name)
        assert run(prefix, copy, "import mapping; print(mapping.VALUE, mapping.__file__)") == f"1 {copy}/mapping.py"
        compiled = list((tree.parent / "bytecode").rglob("mapping.*.pyc"))
        assert len(compiled) == 1
        if name == "one":
            first = compiled[0].stat()
    assert compiled[0].stat().st_ino == first.st_ino, "not compiled again"
    assert not list(copy.rglob("*.pyc"))
    assert snapshot.is_sound(
        tree.parent, tree.parent.name and snapshot.read_json(tree.parent / "manifest.json")["digest"]
    )


def test_an_edit_of_the_same_size_and_time_is_what_runs(make_repo, tmp_path):
    """Swapping two letters leaves the size, and both snapshots may be made within one second."""
    ran = []
    for number, text in enumerate(("ORDER = 'kv'\n", "ORDER = 'vk'\n")):
        tree = frozen(make_repo, tmp_path, text)
        prefix, copy = attempt(tmp_path, tree, str(number))
        ran.append(run(prefix, copy, "import mapping, same; print(mapping.ORDER)"))
    assert ran == ["kv", "vk"]
    assert len(list((tree.parent / "bytecode").rglob("same.*.pyc"))) == 1


def test_byte_code_of_equal_files_is_taken_over_and_of_others_not(make_repo, tmp_path):
    tree = frozen(make_repo, tmp_path, "ORDER = 'kv'\n")
    prefix, copy = attempt(tmp_path, tree, "one")
    run(prefix, copy, "import mapping, same")
    new = frozen(make_repo, tmp_path, "ORDER = 'vk'\n")
    taken = {path.name.partition(".")[0] for path in (new.parent / "bytecode").rglob("*.pyc")}
    assert taken == {"same"}


def test_a_run_that_edits_its_copy_sees_its_edit_and_the_next_attempt_does_not(make_repo, tmp_path):
    tree = frozen(make_repo, tmp_path, "VALUE = 1\n")
    prefix, copy = attempt(tmp_path, tree, "one")
    (copy / "mapping.py").write_text("VALUE = 2\n")
    assert run(prefix, copy, "import mapping; print(mapping.VALUE)") == "2"
    prefix, copy = attempt(tmp_path, tree, "two")
    assert run(prefix, copy, "import mapping; print(mapping.VALUE)") == "1"


def test_the_packages_of_an_interpreter_are_compiled_once(tmp_path):
    places = bytecode.of_interpreter(__import__("pathlib").Path(sys.executable), tmp_path / "kept")
    for name in ("one", "two"):
        bytecode.share(tmp_path / name, places)
        run(tmp_path / name, tmp_path, "import json.tool, wave")
    assert list((tmp_path / "kept").rglob("wave.*.pyc"))
    assert not [p for p in (tmp_path / "one").rglob("wave.*.pyc") if "kept" not in str(p.resolve())]
