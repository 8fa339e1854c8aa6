"""Whether an image's dependencies are those that a NeMo-RL checkout asks for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tasks import answer, digests
from tasks.fingerprint import compare, drift, of_checkout, stage
from tests.conftest import run_git

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BASE = {
    "pyproject.toml": "a",
    "uv.lock": "b",
    "submodules/3rdparty/x/Megatron-Bridge": "c",
    "submodules/3rdparty/Gym": "d",
}
TOOL = "import json; print(json.dumps({'pyproject.toml': 'a', 'uv.lock': 'b'}))\n"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"uv.lock": "B"}, [("uv.lock", True)]),
        ({"pyproject.toml": None}, [("pyproject.toml", True)]),
        ({"submodules/3rdparty/x/Megatron-Bridge": "C"}, [("submodules/3rdparty/x/Megatron-Bridge", False)]),
        ({"submodules/3rdparty/Gym": None, "uv.lock": "B"}, [("uv.lock", True), ("submodules/3rdparty/Gym", False)]),
        ({"submodules/new": "e"}, [("submodules/new", False)]),
    ],
)
def test_only_dependencies_matter_and_come_first(changes: dict[str, Any], expected: list[tuple[str, bool]]) -> None:
    theirs = {k: v for k, v in {**BASE, **changes}.items() if v is not None}
    assert [(d.key, d.matters) for d in compare(theirs, BASE)] == expected
    assert [(d.key, d.matters) for d in compare(BASE, theirs)] == expected


@pytest.fixture
def checkout(make_repo: Callable[..., Path]) -> Path:
    return make_repo("RL", {"tools/generate_fingerprint.py": TOOL})


def test_the_checkouts_own_program_is_asked_and_leaves_nothing(checkout: Path) -> None:
    assert of_checkout(checkout) == {"pyproject.toml": "a", "uv.lock": "b"}
    assert run_git(checkout, "status", "--porcelain", "--ignored") == ""
    image = {"fingerprint": json.dumps({"pyproject.toml": "a", "uv.lock": "x"}), "nemo_rl_sha": None}
    assert [(d.key, d.image, d.checkout) for d in drift(image, checkout)] == [("uv.lock", "x", "b")]


@pytest.mark.parametrize("tool", ["", "print('no json')", "raise SystemExit(3)", None])
def test_what_cannot_be_compared_is_unknown_and_matters(checkout: Path, tool: str | None) -> None:
    path = checkout / "tools/generate_fingerprint.py"
    path.unlink() if tool is None else path.write_text(tool)
    found = drift({"fingerprint": "{}"}, checkout)
    assert [(d.key, d.matters) for d in found] == [("fingerprint", True)]
    assert "unknown" in found[0].text
    assert [d.matters for d in drift({"fingerprint": "no json"}, checkout)] == [True]


def test_another_commit_is_said_and_without_a_fingerprint_its_fit_is_unknown(checkout: Path) -> None:
    head = run_git(checkout, "rev-parse", "HEAD").strip()
    same = json.dumps({"pyproject.toml": "a", "uv.lock": "b"})
    assert drift({"fingerprint": same, "nemo_rl_sha": head}, checkout) == []
    assert drift({"fingerprint": None, "nemo_rl_sha": head[:9]}, checkout) == []
    assert drift({"fingerprint": None, "nemo_rl_sha": None}, checkout) == []
    other = "0" * 40
    assert [(d.key, d.matters) for d in drift({"fingerprint": same, "nemo_rl_sha": other}, checkout)] == [
        ("commit", False)
    ]
    found = drift({"fingerprint": None, "nemo_rl_sha": other}, checkout)
    assert [(d.key, d.matters) for d in found] == [("fingerprint", True), ("commit", False)]


def test_the_image_stage_is_stale_when_the_checkout_asks_for_other_packages_and_the_report_says_it(
    checkout: Path, tmp_path: Path
) -> None:
    def pipe(**image: str | None) -> Any:
        found = {"nemo_rl": digests.scan("nemo_rl", checkout, tmp_path / "scan.json")}
        place, chosen = SimpleNamespace(image=image), SimpleNamespace(nemo_rl=checkout)
        return SimpleNamespace(place=place, manifests=found, settings=chosen, tell=lambda *_, **__: None)

    fits = {"fingerprint": json.dumps({"pyproject.toml": "a", "uv.lock": "b"})}
    before, silent = (stage(pipe(**image)).inputs() for image in (fits, {}))
    assert "differences" not in stage(pipe(**fits)).execute().artefact
    (checkout / "README.md").write_text("no package")
    assert stage(pipe(**fits)).inputs() == before
    (checkout / "uv.lock").write_text("x")
    (checkout / "tools/generate_fingerprint.py").write_text(TOOL.replace("'b'", "'x'"))
    assert stage(pipe(**fits)).inputs() != before
    assert stage(pipe()).inputs() == silent, "nothing can be compared"
    made = stage(pipe(**fits)).execute().artefact
    assert [(d["key"], d["matters"]) for d in made["differences"]] == [("uv.lock", True)]
    report: Any = {"demo": False, "cases": [], "proofs": [], "provenance": {"bridge": {}, "mcore": {}, "image": made}}
    now: Any = SimpleNamespace(levels=SimpleNamespace(levels={}), settings=SimpleNamespace(overrides=()))
    assert [text for text in answer.limitations(now, report) if text.startswith("image: uv.lock is not the one")]
