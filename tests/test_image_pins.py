"""A new pin as a change of images.yaml; registries for real are in tests/integration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tasks import image_commands, image_pins, images, settings
from tasks.errors import UserError
from tasks.runtimes.docker import Docker

if TYPE_CHECKING:
    from pathlib import Path

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
TEXT = f"""\
# head
schema: 1
images:
  one:
    reference: host:5/one:1
    digest: "{A}"  # why
    nemo_rl: "1234567"
    note: >-
      text
      digest: not a key
  'two':
    # a comment
    reference: host:5/two:1
    digest: null
  hidden:
    reference: null
"""
FACTS: dict[str, str | None] = {"digest": B, "nemo_rl": None, "bridge": None, "date": "2026-12-01", "verified_by": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "images.yaml"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize("name", ["one", "two"])
def test_one_entry_changes_and_nothing_of_the_old_image_stays_with_the_new_digest(path: Path, name: str) -> None:
    before = images.load_pins(path)
    path.write_text(image_pins.rewrite(TEXT, name, FACTS))
    after = images.load_pins(path)
    pin = after.pop(name)
    assert (pin.digest, pin.nemo_rl, pin.date, pin.verified_by) == (B, None, "2026-12-01", None)
    assert (pin.reference, pin.note) == (before[name].reference, before.pop(name).note)
    assert after == before
    assert path.read_text().startswith("# head\n")


def update(path: Path, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str | None, **keys: Any) -> Any:
    def ask(pin: images.Pin, _: object) -> Any:
        digest = answers[pin.name]
        return ({**FACTS, "digest": digest}, "") if digest else (None, "connection refused.")

    monkeypatch.setattr(image_pins, "_ask", ask)
    return image_pins.update(name, Docker(host="unix:///none"), path, **keys)


def test_all_public_pins_are_asked_and_a_dead_registry_is_a_note(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diff, said, unanswered = update(path, {"one": None, "two": B}, monkeypatch, None)
    assert unanswered == 1
    assert said == ["one: no answer, connection refused.", f"two: host:5/two:1 is {B}"]
    assert f"+    digest: {B}" in diff
    assert path.read_text() == TEXT, "a proposal writes nothing"
    assert update(path, {"one": A, "two": B}, monkeypatch, None, apply=True)[1][0] == f"one: host:5/one:1 still is {A}"
    assert images.load_pins(path)["two"].digest == B


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ones", "did you mean 'one'"),
        ("hidden", "reference is not public"),
        ("two", "gives nothing: connection refused"),
    ],
)
def test_a_named_pin_that_cannot_be_had_is_a_users_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        update(path, {"two": None}, monkeypatch, name, apply=True)
    assert path.read_text() == TEXT


def test_a_registry_that_gives_no_answer_is_no_pass(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(image_pins, "update", lambda *_, **__: ("", ["a: no answer, refused."], 1))
    assert image_commands.main(["update"], settings.load({}, environ={})) == 2
    assert "Result: Blocked - no answer for 1 of 1 pins" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["update", "a", "b"], ["show", "--x"], ["build", "name"], ["build", "--nope=1"]])
def test_words_that_do_not_fit_are_answered_with_the_usage(words: list[str]) -> None:
    with pytest.raises(UserError, match="usage: doit image"):
        image_commands.main(words, settings.load({}, environ={}))
