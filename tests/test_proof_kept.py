"""What a proof keeps between runs is believed only for what it was made from: byte code by content, references by hash."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tasks.settings import ROOT

CPU = ROOT / "containers" / "cpu"


def python(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CPU), **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def imported(folder, kept, more=""):
    code = (
        "import sys; from pathlib import Path; from proof import bytecode\n"
        f"sys.path.insert(0, {str(folder)!r}); bytecode.install(Path({str(kept)!r}), ({str(folder)!r},))\n"
        f"{more}\nimport subject; print(subject.x, subject.f.__code__.co_filename)"
    )
    return python(code)


def write(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "subject.py").write_text(text)
    os.utime(folder / "subject.py", (1, 1))


def test_an_edit_of_equal_size_and_time_is_seen(tmp_path):
    write(tmp_path / "a", "x = 1\ndef f(): pass\n")
    assert imported(tmp_path / "a", tmp_path / "kept")[0] == "1"
    write(tmp_path / "a", "x = 2\ndef f(): pass\n")
    assert imported(tmp_path / "a", tmp_path / "kept")[0] == "2"
    assert not list(tmp_path.glob("a/__pycache__/*"))


def test_another_copy_shares_the_code_and_keeps_its_own_path(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, "x = 1\ndef f(): pass\n")
        assert imported(tmp_path / name, tmp_path / "kept") == ["1", str(tmp_path / name / "subject.py")]
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_damaged_code_is_compiled_again(tmp_path):
    write(tmp_path / "a", "x = 1\ndef f(): pass\n")
    imported(tmp_path / "a", tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    digest, _, body = file.read_bytes().partition(b"\n")
    file.write_bytes(digest + b"\n" + body.replace(b"\x01\x00\x00\x00", b"\x07\x00\x00\x00"))
    assert imported(tmp_path / "a", tmp_path / "kept")[0] == "1"


def test_a_fault_replaces_what_is_read_and_not_the_file(tmp_path):
    write(tmp_path / "a", "x = 1\ndef f(): pass\n")
    file = tmp_path / "a" / "subject.py"
    fault = f"bytecode.ByContent.replaced = {{{str(file)!r}: b'x = 3\\ndef f(): pass\\n'}}"
    assert imported(tmp_path / "a", tmp_path / "kept", fault)[0] == "3"
    assert imported(tmp_path / "a", tmp_path / "kept")[0] == "1"


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        ("pass", True),
        ("(f / 'reference.pt').write_bytes(b'other')", False),
        ("(f / 'model' / 'extra.safetensors').write_bytes(b'')", False),
        ("(f / 'reference.pt').unlink()", False),
        ("(f / 'complete.json').unlink()", False),
        ("reference.recipe = lambda: 'another program'", False),
    ],
)
def test_a_reference_is_kept_only_whole_and_by_the_same_program(tmp_path, damage, kept):
    code = (
        "import json; from pathlib import Path; from proof import reference\n"
        f"f = Path({str(tmp_path)!r}); (f / 'model').mkdir(); (f / 'reference.pt').write_bytes(b'kept')\n"
        "marker = {'recipe': reference.recipe(), 'files': reference._hashes(f)}\n"
        f"(f / 'complete.json').write_text(json.dumps(marker))\n{damage}\nprint(reference.is_kept(f))"
    )
    assert python(code) == [str(kept)]
