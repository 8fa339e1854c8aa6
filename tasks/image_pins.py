"""A new pin for containers/images.yaml as a diff: what the registry's tag points to now, and nothing that is not known.

Facts of the old image never go over to the new digest: the commit is the one that the image itself names, where it is
on this engine, else null; nobody has verified it.
"""

from __future__ import annotations

import difflib
import re
import time
from typing import TYPE_CHECKING

from tasks import images
from tasks.errors import UserError
from tasks.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tasks.images import Pin
    from tasks.runtimes.docker import Docker


def update(
    name: str | None, engine: Docker, path: Path = images.PINS, *, apply: bool = False
) -> tuple[str, list[str], int]:
    """Return the unified diff that pins `name` (every public one if None) anew, a sentence each, how many are open.

    Writes the file only where `apply`. UserError: no such name, no reference, no answer of engine or registry for the
    one that was named; among all of them, one that gives no answer is a sentence.
    """
    pins = images.load_pins(path)
    if name is not None and name not in pins:
        close = difflib.get_close_matches(name, pins, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(pins)}"
        raise UserError(f"{path}: no image {name!r}; {hint}")
    old = text = path.read_text(encoding="utf-8")
    said, unanswered = [], 0
    for pin in [pins[name]] if name else [p for p in pins.values() if p.reference]:
        if not pin.reference:
            raise UserError(
                f"{pin.name}: its reference is not public, no registry can be asked. {pin.note or ''}".strip()
            )
        facts, problem = _ask(pin, engine)
        if facts is None:
            if name:
                raise UserError(f"{pin.reference}: the registry gives nothing: {problem}")
            said.append(f"{pin.name}: no answer, {problem}")
            unanswered += 1
        elif facts["digest"] == pin.digest:
            said.append(f"{pin.name}: {pin.reference} still is {pin.digest}")
        else:
            text = rewrite(text, pin.name, facts)
            said.append(
                f"{pin.name}: {pin.reference} is {facts['digest']}" + (f", was {pin.digest}" if pin.digest else "")
            )
    label = "containers/images.yaml"
    diff = "".join(
        difflib.unified_diff(old.splitlines(keepends=True), text.splitlines(keepends=True), f"a/{label}", f"b/{label}")
    )
    if apply and diff:
        write_bytes(path, text.encode())
    return diff, said, unanswered


def _ask(pin: Pin, engine: Docker) -> tuple[dict[str, str | None] | None, str]:
    """Return digest, date and commit as the registry and the engine know them now, or None and why not."""
    from docker.errors import DockerException

    repo = images.parse_reference(str(pin.reference)).repo
    try:
        with engine.client() as client:
            digest, problem = images.registry_digest(client, str(pin.reference))
            if digest is None:
                return None, problem
            here = images.present(client, f"{repo}@{digest}")
            commit = images.commit_inside(here.attrs.get("Config") or {}) if here else None
    except (DockerException, OSError) as error:
        raise engine.unusable(str(pin.reference), error) from error
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"digest": digest, "nemo_rl": commit, "bridge": None, "date": date, "verified_by": None}, ""


def rewrite(text: str, name: str, facts: Mapping[str, str | None]) -> str:
    """Return the file's text with these keys of one entry replaced, line by line, comments kept."""
    lines, inside, left = text.splitlines(keepends=True), False, dict(facts)
    out = []
    for line in lines:
        head = re.match(r"  (\S[^:]*):\s*$", line)
        if head or not line.startswith((" ", "#", "\n")):
            if inside:
                out += [_line(key, value) for key, value in left.items()]
            inside = bool(head) and str(head and head[1]).strip("'\"") == name
        key = re.match(r"    (\w+):", line)
        if inside and key and key[1] in left:
            out.append(_line(key[1], left.pop(key[1])))
            continue
        out.append(line)
    if inside:
        out += [_line(key, value) for key, value in left.items()]
    return "".join(out)


def _line(key: str, value: str | None) -> str:
    quoted = (
        f'"{value}"' if value and re.fullmatch(r"[\de-]+", value) else value
    )  # YAML would make a number or date of it
    return f"    {key}: {quoted or 'null'}\n"
