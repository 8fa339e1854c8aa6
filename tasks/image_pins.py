"""What images are called: containers/images.yaml, references, and an `Image` as the facts that a record keeps of it.

A tag is a promise, a digest a fact: a pin holds both.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.errors import UserError

PINS = Path(__file__).resolve().parent.parent / "containers" / "images.yaml"
PIN_KEYS = ("reference", "digest", "nemo_rl", "bridge", "date", "verified_by", "note")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
REFERENCE = re.compile(
    r"(?P<repo>(?:[a-z0-9][a-z0-9.-]*:\d+/)?[a-z0-9][a-z0-9._-]*(?:/[a-z0-9][a-z0-9._-]*)*)"  # a port only before a /
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Pin:
    """One entry of images.yaml; absent facts are None, never guessed."""

    name: str
    reference: str | None = None
    digest: str | None = None
    nemo_rl: str | None = None
    bridge: str | None = None
    date: str | None = None
    verified_by: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """An environment. `id` is what runs; `digest` the registry's name for it (None: never pushed).

    `fingerprint` is the text of NeMo-RL's fingerprint file (sorted JSON); `notes` are sentences for the report.
    """

    ref: str
    digest: str | None
    id: str
    nemo_rl_sha: str | None
    fingerprint: str | None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return what image.json holds: everything but the notes, which tell of a moment."""
        return {key: value for key, value in asdict(self).items() if key != "notes"}


@dataclass(frozen=True, slots=True)
class Reference:
    """`repo[:tag][@digest]`; with a digest the engine ignores the tag."""

    repo: str
    tag: str | None
    digest: str | None


def parse_reference(text: str) -> Reference:
    """Return the parts of an image reference; UserError where it is none. A bare name means the tag `latest`."""
    match = REFERENCE.fullmatch(text)
    if not match:
        known = "repo:tag, repo@sha256:..., sha256:... or a name of containers/images.yaml"
        raise UserError(f"image={text}: not an image reference ({known}).")
    tag, digest = match["tag"], match["digest"]
    return Reference(match["repo"], tag if tag or digest else "latest", digest)


def load_pins(path: Path = PINS) -> dict[str, Pin]:
    """Return the pins by name; UserError with file and line for anything that is not as images.yaml's head says."""
    from tasks import marked_yaml

    marked = marked_yaml.read(path)
    problems: list[tuple[int, str]] = []

    def mapping(place: marked_yaml.Place, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            problems.append((marked.line(place), "a mapping is expected here"))
            return {}
        for key in value:
            if known and key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
                problems.append((marked.line((*place, key)), f"unknown key {key!r}; {hint}"))
        return value

    top = mapping((), marked.value, ("schema", "images"))
    if top.get("schema") != 1:
        problems.append((marked.line(("schema",)), "schema must be 1"))
    pins = {}
    for name, value in mapping(("images",), top.get("images"), ()).items():
        fields = mapping(("images", name), value, PIN_KEYS)
        for key, text in fields.items():
            if problem := _pin_problem(key, text):
                problems.append((marked.line(("images", name, key)), f"{name}: {key} {problem}"))
        pins[name] = Pin(name, **{key: fields[key] for key in PIN_KEYS if key in fields})
    if problems:
        raise marked_yaml.FileError(path, problems)
    return pins


def _pin_problem(key: str, text: Any) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        return "must be text: put it into quotes"
    if key == "digest" and not DIGEST.fullmatch(text):
        return f"must be sha256: and 64 hexadecimal digits, not {text!r}"
    if key in {"nemo_rl", "bridge"} and not re.fullmatch("[0-9a-f]{7,40}", text):
        return f"must be a commit, 7 to 40 hexadecimal digits, not {text!r}"
    match = REFERENCE.fullmatch(text) if key == "reference" else None
    if key == "reference" and (match is None or match["digest"]):
        return f"must be repo:tag (the digest has a key of its own), not {text!r}"
    return ""
