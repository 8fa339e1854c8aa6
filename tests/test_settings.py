"""Settings come from the command line, the environment, site.yaml, defaults, in this order; mistakes are explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import settings
from tasks.errors import UserError


def test_the_command_line_wins_over_environment_over_site_over_default(tmp_path):
    (tmp_path / "site.yaml").write_text("runtime: podman\nretries: 3\n")
    load = settings.load
    assert load({"runtime": "local"}, environ={"E2E_RUNTIME": "docker"}, root=tmp_path).runtime == "local"
    assert load({}, environ={"E2E_RUNTIME": "docker"}, root=tmp_path).runtime == "docker"
    assert load({}, environ={}, root=tmp_path).runtime == "podman"
    assert load({}, environ={}, root=tmp_path).retries == 3
    assert load({}, environ={}, root=tmp_path / "none").runtime == "docker"


@pytest.mark.parametrize(
    "word", ["policy.model_name=x", "+a=1", "++a.b=2", "~a.b=3", "policy.megatron_cfg.enabled=true", "a.b=c=d"]
)
def test_a_dotted_or_marked_name_is_an_override_and_stays_verbatim(tmp_path, word):
    name, _, value = word.partition("=")
    assert settings.load({name: value}, environ={}, root=tmp_path).overrides == (word,)


def test_an_override_without_a_value_is_kept(tmp_path):
    assert settings.load({}, flags=("~logger.wandb",), environ={}, root=tmp_path).overrides == ("~logger.wandb",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"runtim": "local"}, "did you mean runtime=?"),
        ({"runtime": "dokcer"}, "did you mean docker?"),
        ({"timeout": "1:30"}, "not a duration"),
        ({"timeout": "0s"}, "not a duration"),
        ({"retries": "-1"}, "whole number of at least 0"),
        ({"jobs": "0"}, "whole number of at least 1"),
        ({"fresh": "maybe"}, "fresh=1 or fresh=0"),
        ({"zzz": "1"}, "settings are"),
    ],
)
def test_a_wrong_setting_says_what_is_right(tmp_path, given, words):
    with pytest.raises(UserError, match=words.replace("?", r"\?").replace("=", "=")):
        settings.load(given, environ={}, root=tmp_path)


@pytest.mark.parametrize("text", ["nonsense: 1\n", "[1, 2]\n", "a: [\n"])
def test_a_wrong_site_file_is_named(tmp_path, text):
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(UserError, match=r"site\.yaml"):
        settings.load({}, environ={}, root=tmp_path)


def test_a_missing_checkout_says_how_to_name_it(tmp_path):
    with pytest.raises(UserError, match=r"BRIDGE_REPO is not set.*export BRIDGE_REPO="):
        settings.load({}, environ={}, root=tmp_path).checkout("bridge")
    with pytest.raises(UserError, match=r"no such directory \(from BRIDGE_REPO\)"):
        settings.load({}, environ={"BRIDGE_REPO": "/does/not/exist"}, root=tmp_path).checkout("bridge")


def test_core_is_the_one_that_the_bridge_pins_unless_named(tmp_path):
    (tmp_path / "b/3rdparty/Megatron-LM").mkdir(parents=True)
    (tmp_path / "m").mkdir()
    both = {"bridge": str(tmp_path / "b")}
    assert settings.load(both, environ={}, root=tmp_path).checkout("mcore") == tmp_path / "b/3rdparty/Megatron-LM"
    assert (
        settings.load({**both, "mcore": str(tmp_path / "m")}, environ={}, root=tmp_path).checkout("mcore")
        == tmp_path / "m"
    )


def test_durations_have_units():
    assert [settings.parse_duration(t, "timeout") for t in ("90", "60s", "45m", "2h", "1.5h")] == [
        90,
        60,
        2700,
        7200,
        5400,
    ]


def test_paths_may_hold_blanks(tmp_path):
    (tmp_path / "my repo").mkdir()
    assert settings.load({"bridge": str(tmp_path / "my repo")}, environ={}, root=tmp_path).checkout("bridge") == Path(
        tmp_path / "my repo"
    )


def test_a_duration_may_have_parts_as_in_levels_yaml():
    assert settings.parse_duration("1h30m", "timeout") == 5400.0
    for wrong in ("1h30", "30m1h", "h", "0m", ""):
        with pytest.raises(UserError, match="not a duration"):
            settings.parse_duration(wrong, "timeout")


@pytest.mark.parametrize("name", settings.SWITCHES)
def test_a_switch_is_on_or_off_and_a_guess_is_refused(name):
    assert [settings.load({name: text}, environ={}).arguments[name] for text in ("1", "yes", "No", "0")] == list("1100")
    with pytest.raises(UserError, match=f"write {name}=1 or {name}=0"):
        settings.load({name: "maybe"}, environ={})
