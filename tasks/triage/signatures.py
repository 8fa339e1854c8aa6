"""The signatures as data: read `signatures.yaml` once per process, check it, compile it.

A signature is a claim about one line of a log: what it means (kind), what to do (remedy), who prints it (source).
Nothing here decides a verdict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from tasks.triage.patterns import needles

Kind = Literal["infrastructure", "environment", "configuration", "change", "undecided", "warning"]
KINDS = ("infrastructure", "environment", "configuration", "change", "undecided", "warning")
FLAGS = ("transient", "symptom", "wrapper", "any_level")
FILE = Path(__file__).with_name("signatures.yaml")


@dataclass(frozen=True, slots=True)
class Signature:
    """One known line. `needles` are literals of which every match contains one (UTF-8)."""

    id: str
    kind: Kind
    pattern: re.Pattern[str]
    needles: tuple[bytes, ...]
    remedy: str
    source: str
    transient: bool
    symptom: bool
    wrapper: bool
    any_level: bool


class SignatureError(ValueError):
    """`signatures.yaml` is not as this module needs it: a fault of this project, not of the user."""


@cache
def shipped() -> tuple[Signature, ...]:
    """Return the signatures of `signatures.yaml`, in its order, compiled once per process."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return parse(yaml.load(FILE.read_bytes(), loader))  # noqa: S506 - CSafeLoader is the C form of SafeLoader


def parse(document: Any) -> tuple[Signature, ...]:
    """Return the signatures of a parsed document; SignatureError names the entry that is wrong."""
    entries = document.get("signatures") if isinstance(document, dict) else None
    if not isinstance(entries, list) or document.get("schema") != 1:
        raise SignatureError("signatures.yaml: schema 1 with a list `signatures` expected")
    result = tuple(_signature(entry) for entry in entries)
    names = [s.id for s in result]
    if len(set(names)) != len(names):
        raise SignatureError(f"signatures.yaml: id used twice: {min(n for n in names if names.count(n) > 1)}")
    return result


def _signature(entry: dict[str, Any]) -> Signature:
    name = str(entry.get("id", entry))
    unknown = set(entry) - {"id", "kind", "patterns", "remedy", "source", *FLAGS}
    if unknown or entry.get("kind") not in KINDS or not entry.get("remedy") or not entry.get("source"):
        raise SignatureError(f"signatures.yaml: {name}: unknown key {sorted(unknown)}, kind, remedy or source is wrong")
    literals: list[bytes] = []
    for text in entry["patterns"]:
        try:
            found = needles(text)
        except re.error as error:
            raise SignatureError(f"signatures.yaml: {name}: {text!r}: {error}") from error
        if not found:
            raise SignatureError(f"signatures.yaml: {name}: {text!r} has no fixed text to search for")
        literals.extend(found)
    return Signature(
        id=name,
        kind=cast("Kind", entry["kind"]),
        pattern=re.compile("|".join(f"(?:{text})" for text in entry["patterns"])),
        needles=tuple(sorted(set(literals))),
        remedy=entry["remedy"],
        source=entry["source"],
        transient=bool(entry.get("transient")),
        symptom=bool(entry.get("symptom")),
        wrapper=bool(entry.get("wrapper")),
        any_level=bool(entry.get("any_level")),
    )
