"""Licences of everything that is pinned, offline, from the metadata of what is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
RULES = yaml.safe_load((ROOT / "requirements" / "licences.yaml").read_text())
CPU = Path(os.environ.get("E2E_REAL_BUILD") or ROOT / "build") / "cpu" / "venv"


def sbom() -> Any:
    """Return what lists an image's packages, a script of its own, as a module."""
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "containers" / "sbom.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listing(top: Path) -> list[tuple[str, str]]:
    """Return (name, licence) of every distribution below `top`, as an image's bill of materials has it."""
    return [(name, licence) for name, _, licence, _ in sbom().python(str(top))]


def accepted(licence: str) -> bool:
    """Tell whether one alternative (OR) has nothing but accepted parts (AND)."""
    if licence in RULES["accepted"]:
        return True
    words = [w for w in re.split(r"\s+(AND|OR)\s+", licence) if w]
    parts, alternatives = [w.strip("() ") for w in words], [[]]  # type: ignore[var-annotated]
    if "(" in licence and "OR" in words and "AND" in words:  # `A AND (B OR C)`: every part, to be on the safe side
        return all(part in RULES["accepted"] for part in parts if part not in ("AND", "OR"))
    for part in parts:
        if part == "OR":
            alternatives.append([])
        elif part != "AND":
            alternatives[-1].append(part)
    return any(names and all(name in RULES["accepted"] for name in names) for names in alternatives)


def unaccepted(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, licence) for name, licence in found if name not in RULES["packages"] and not accepted(licence)]


@pytest.mark.parametrize(
    ("licence", "fine"),
    [
        ("MIT", True), ("", False), ("GPL-3.0", False), ("MIT AND GPL-3.0", False), ("MIT OR GPL-3.0", True),
        ("GPL-3.0 OR MIT AND BSD", True), ("MPL-2.0 AND (Apache-2.0 OR MIT)", True), ("MIT AND (GPL-3.0 OR BSD)", False),
    ],
)  # fmt: skip
def test_an_expression_is_accepted_where_one_alternative_is(licence: str, fine: bool) -> None:
    assert accepted(licence) is fine


@pytest.mark.parametrize(
    ("headers", "fine"),
    [
        ({"License-Expression": "MIT OR GPL-3.0-only"}, True),
        ({"License-Expression": "MIT AND GPL-3.0-only"}, False),
        ({"License-Expression": "GPL-3.0-or-later WITH GCC-exception-3.1 AND MIT"}, True),
        ({"License-Expression": "GPL-3.0-or-later"}, False),
        ({"License-Expression": "AGPL-3.0-only"}, False),
        ({"License": "GPLv3"}, False),
        ({"License": "UNKNOWN", "Classifier": "License :: OSI Approved :: MIT License"}, True),
        ({"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"}, False),
        ({"License-Expression": "GPL-3.0-only", "Classifier": "License :: OSI Approved :: MIT License"}, False),
        ({}, False),
    ],
)
def test_copyleft_without_an_exception_and_silence_are_refused(headers: dict[str, str], fine: bool) -> None:
    metadata = Message()
    for name, value in headers.items():
        metadata[name] = value
    assert accepted(sbom().licence(metadata)) is fine


def test_the_runners_packages_have_accepted_licences() -> None:
    found = listing(Path(sys.prefix))
    assert len(found) > 20
    assert unaccepted(found) == []


@pytest.mark.skipif(not CPU.exists(), reason="the CPU environment is not built (doit cpu)")
def test_the_rehearsals_packages_have_accepted_licences() -> None:
    found = listing(CPU.resolve())
    assert len(found) > 100
    assert unaccepted(found) == []


def test_an_exception_names_a_package_that_is_there_and_a_reason() -> None:
    assert all(isinstance(reason, str) and len(reason) > 10 for reason in RULES["packages"].values())
