"""A new pin as a change of images.yaml: what is replaced, what is forgotten, what stays; the registry is scripted."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tasks import container_image, image_commands, image_pins, image_update, settings
from tasks.errors import UserError
from tasks.image_update import proposal, repinned
from tasks.runtimes.docker import Docker

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
FILE = f"""\
# a comment that stays
schema: 1
images:
  new:
    reference: host/app:1
    digest: null
    nemo_rl: abcdef1234
    note: Known from its page.
  old:
    reference: host/app:2  # and this one
    digest: {A}
    nemo_rl: abcdef1234
    bridge: abcdef1
    date: "2026-01-01"
    verified_by: somebody
    note: >-
      of its page
      digest: not a key
  bare:
    reference: host/app:3
  hidden:
    reference: null
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "images.yaml"
    made.write_text(FILE)
    return made


def after(path: Path, name: str, digest: str) -> image_pins.Pin:
    path.write_text(repinned(FILE, image_pins.load_pins(path)[name], digest))
    return image_pins.load_pins(path)[name]


def test_a_first_digest_leaves_what_is_known_alone(path: Path) -> None:
    before = image_pins.load_pins(path)["new"]
    assert after(path, "new", B) == dataclasses.replace(before, digest=B)


def test_another_digest_makes_what_was_known_of_the_old_image_unknown(path: Path) -> None:
    note = image_pins.load_pins(path)["old"].note
    assert after(path, "old", B) == image_pins.Pin("old", "host/app:2", B, note=note)
    changed = proposal(FILE, path.read_text(), "containers/images.yaml").splitlines()
    assert changed[:2] == ["--- a/containers/images.yaml", "+++ b/containers/images.yaml"]
    assert sum(line.startswith("+ ") for line in changed) == 5
    assert "# and this one" in path.read_text()


def test_an_entry_without_the_key_gets_it_and_an_equal_digest_changes_nothing(path: Path) -> None:
    assert after(path, "bare", B).digest == B
    assert image_pins.load_pins(path)["hidden"].digest is None
    path.write_text(FILE)
    assert repinned(FILE, image_pins.load_pins(path)["old"], A) == FILE
    assert proposal(FILE, FILE, "x") == ""


@pytest.mark.parametrize("name", ["new", "old", "bare"])
def test_the_commit_is_the_one_that_the_image_says(path: Path, name: str) -> None:
    path.write_text(repinned(FILE, image_pins.load_pins(path)[name], B, "1234567"))
    pin = image_pins.load_pins(path)[name]
    assert (pin.digest, pin.nemo_rl, pin.verified_by) == (B, "1234567", None)


def scripted(monkeypatch: pytest.MonkeyPatch, known: dict[str, str]) -> Docker:
    engine = Docker(host="unix:///fake.sock")
    monkeypatch.setattr(engine, "client", lambda: contextlib.nullcontext(None))
    monkeypatch.setattr(container_image, "present", lambda *_: None)
    monkeypatch.setattr(
        container_image, "registry_digest", lambda _, tag: (known.get(tag), "" if tag in known else "refused.")
    )
    return engine


def test_the_diff_is_printed_and_written_only_when_asked(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, told = scripted(monkeypatch, {"host/app:1": B}), list[str]()
    options: dict[str, Any] = {"path": path, "say": told.append}
    assert image_update.update(engine, "new", **options) == 0
    assert f"+    digest: {B}" in capsys.readouterr().out
    assert path.read_text() == FILE
    assert image_update.update(engine, "new", apply=True, **options) == 0
    assert image_pins.load_pins(path)["new"].digest == B
    assert told[-1] == "Result: Pass - written"


def test_a_registry_that_does_not_answer_is_never_a_pass(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    assert image_update.update(scripted(monkeypatch, {"host/app:1": B}), None, path=path, say=told.append) == 2
    assert told[-1] == "Result: Blocked - proposed; not told: old, bare"


@pytest.mark.parametrize(("name", "text"), [("nwe", "did you mean 'new'"), ("hidden", "not public")])
def test_names_that_cannot_be_updated_say_why(
    path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=text):
        image_update.update(scripted(monkeypatch, {}), name, path=path, say=lambda _: None)


@pytest.mark.parametrize("words", [["update", "a", "b"], ["show", "--x"], ["build", "name"], ["build", "--nope=1"]])
def test_words_that_do_not_fit_are_answered_with_the_usage(words: list[str]) -> None:
    with pytest.raises(UserError, match="usage: doit image"):
        image_commands.main(words, settings.load({}, environ={}))
