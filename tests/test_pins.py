"""Versions come from one place: requirements, pyproject.toml, dodo.py, doitw, the flake and the images agree, as texts."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def text(path: str) -> str:
    return (ROOT / path).read_text()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def asked(lines: list[str]) -> dict[str, str]:
    """Return the specifier of each requirement by its normalised name."""
    found = [re.fullmatch(r"([A-Za-z0-9][\w.-]*)\s*(\S*)", line.split("#")[0].strip()) for line in lines]
    return {normal(hit[1]): hit[2] for hit in found if hit}


def locked(path: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return version and hashes of each package by its name."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", text(path), flags=re.MULTILINE)
    heads = [(re.match(r"(\S+)==(\S+)", block), block) for block in blocks]
    return {normal(hit[1]): (hit[2], tuple(re.findall(r"sha256:(\w{64})", block))) for hit, block in heads if hit}


def nix_list(path: str, name: str) -> set[str]:
    """Return the strings of the list `name = [ ... ];` in a Nix file."""
    found = re.search(rf"^ *{name} = \[([^\]]*)\];", text(path), flags=re.MULTILINE)
    assert found, f"{path} has no list {name}"
    return set(re.findall(r'"([^"]+)"', found[1]))


RUN = asked(text("requirements/run.in").splitlines())
DEV = asked([line for line in text("requirements/dev.in").splitlines() if not line.startswith("-c")])
RUN_LOCK = locked("requirements/run.txt")
DEV_LOCK = locked("requirements/dev.txt")
SUPPORTED = ((3, 11), (3, 13))


def test_the_parsers_see_the_files() -> None:
    assert {"doit", "docker", "python-on-whales", "pyyaml", "tensorboard", "junit-xml"} <= RUN.keys()
    assert {"ruff", "mypy", "hypothesis"} <= DEV.keys()
    assert RUN_LOCK["doit"][1]


def test_pyproject_depends_on_what_run_in_asks_for() -> None:
    assert asked(PROJECT["project"]["dependencies"]).keys() == RUN.keys()


@pytest.mark.parametrize("name", sorted(RUN))
def test_every_runtime_requirement_is_pinned_by_hash(name: str) -> None:
    assert RUN_LOCK[name][1], f"{name} has no hash in requirements/run.txt"


@pytest.mark.parametrize("name", sorted(DEV))
def test_every_test_requirement_is_pinned_by_hash(name: str) -> None:
    assert DEV_LOCK[name][1], f"{name} has no hash in requirements/dev.txt"


def test_both_locks_agree_where_they_overlap() -> None:
    both = RUN_LOCK.keys() & DEV_LOCK.keys()
    assert {name: RUN_LOCK[name][0] for name in both} == {name: DEV_LOCK[name][0] for name in both}


@pytest.mark.parametrize("name", sorted(RUN | DEV))
def test_every_requirement_is_known_to_nix(name: str) -> None:
    known = nix_list("nix/stub/packages.nix", "seen") | nix_list("nix/python.nix", "absent")
    assert name in known, f"look {name} up in nixpkgs, then add it to `seen` in nix/stub/packages.nix"


def test_nix_takes_names_from_the_same_files_and_leaves_out_no_runtime_requirement() -> None:
    assert {"../requirements/run.in", "../requirements/dev.in", "../requirements/run.txt"} <= set(
        re.findall(r"\.\./\S+?\.(?:in|txt)", text("nix/requirements.nix"))
    )
    assert re.search(r"run = python\.withPackages \(pick requirements\.run\);", text("nix/python.nix"))
    assert not nix_list("nix/python.nix", "absent") & RUN.keys()


def test_doit_is_one_version_everywhere() -> None:
    version, hashes = RUN_LOCK["doit"]
    assert RUN["doit"] == asked(PROJECT["project"]["dependencies"])["doit"] == f"~={version}"
    assert f'"minversion": "{version}"' in text("dodo.py")
    assert re.findall(r'requirements\.hash "(\w+)"', text("nix/python.nix"))[0] in hashes
    assert version not in text("nix/python.nix"), "the version is read from requirements/run.txt"


def test_python_is_one_range_everywhere() -> None:
    low, high = SUPPORTED
    assert PROJECT["project"]["requires-python"] == f">={low[0]}.{low[1]}"
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{low[0]}{low[1]}"
    assert PROJECT["tool"]["mypy"]["python_version"] == f"{low[0]}.{low[1]}"
    assert f"{low} <= sys.version_info[:2] <= {high}" in text("doitw")
    used = {path: set(re.findall(r"\bpython3(\d+)\b", text(path))) for path in ("nix/python.nix", "nix/default.nix")}
    assert used["nix/python.nix"] == used["nix/default.nix"]
    assert [low[1] <= int(minor) <= high[1] for minor in used["nix/python.nix"]] == [True]


def test_the_flake_is_locked_to_one_nixpkgs() -> None:
    nodes = json.loads(text("flake.lock"))["nodes"]
    assert sorted(nodes) == ["nixpkgs", "root"]
    pin, branch = nodes["nixpkgs"]["locked"], nodes["nixpkgs"]["original"]
    assert f'nixpkgs.url = "github:{branch["owner"]}/{branch["repo"]}/{branch["ref"]}"' in text("flake.nix")
    assert re.fullmatch(r"[0-9a-f]{40}", pin["rev"])
    assert re.fullmatch(r"sha256-[A-Za-z0-9+/]{43}=", pin["narHash"])


def test_the_dockerfile_names_no_version_of_its_own() -> None:
    bases = re.findall(r"^FROM (\S+)", text("containers/Dockerfile"), flags=re.MULTILINE)
    assert bases == ["${BASE}"], "the base comes from containers/images.yaml, by digest"
