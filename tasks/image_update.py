"""`doit image update [NAME]`: ask the registry what a pinned tag is now and propose the new pin as a unified diff.

A digest that changes makes what was known of the old image untrue: its commits, its date and who verified it go to
null, for whoever checks the new one; the commit is the one that the image itself names, where it is on this engine.
`apply=1` writes the file; comments and order stay.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from tasks import container_image, files, image_pins
from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from docker import DockerClient

    from tasks.image_pins import Pin
    from tasks.runtimes.docker import Docker

OF_THE_OLD = ("nemo_rl", "bridge", "date", "verified_by")


def repinned(text: str, pin: Pin, digest: str, commit: str | None = None) -> str:
    """Return images.yaml's `text` with the new digest of `pin`; unchanged where it has that digest already.

    `commit`: NeMo-RL's, if the image itself says so. Raises UserError where the entry is not written one key a line, as
    the file is by its head.
    """
    if pin.digest == digest:
        return text
    lines = text.splitlines(keepends=True)
    start = next((n for n, line in enumerate(lines) if re.match(rf"  {re.escape(pin.name)}:\s*(#.*)?$", line)), None)
    if start is None:
        raise UserError(f"{pin.name}: not written as a block of images.yaml: change the digest to {digest} by hand")
    rest = lines[start + 1 :]
    end = start + 1 + next((n for n, line in enumerate(rest) if re.match(r" {0,3}[^\s#]", line)), len(rest))
    changes = {"digest": digest} | (dict.fromkeys(OF_THE_OLD, "null") if pin.digest else {})
    changes |= {"nemo_rl": f'"{commit}"'} if commit else {}  # quoted: YAML would make a number of 1234567
    for n in range(start + 1, end):
        found = re.match(r"    (\w+):", lines[n])
        if found and found[1] in changes:
            lines[n] = f"    {found[1]}: {changes.pop(found[1])}\n"
    lines[start + 1 : start + 1] = [f"    {key}: {value}\n" for key, value in changes.items() if value != "null"]
    return "".join(lines)


def proposal(old: str, new: str, path: str) -> str:
    """Return the change as a diff that `git apply` takes; empty for no change."""
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}")
    return "".join(lines)


def update(
    engine: Docker, name: str | None, *, path: Path = image_pins.PINS, apply: bool = False, say: Callable[[str], None]
) -> int:
    """Print the diff for one name or all published ones, and write it with `apply`; return 0, or 2 if one was not told.

    Raises UserError for an unknown name, one without a reference, and an engine out of reach.
    """
    from docker.errors import DockerException

    pins = image_pins.load_pins(path)
    if name and name not in pins:
        near = difflib.get_close_matches(name, pins, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(pins)})"
        raise UserError(f"image update {name}: {path} has no such name{hint}")
    if name and not pins[name].reference:
        raise UserError(f"image update {name}: its reference is not public, so no registry can be asked for it")
    wanted = [pin for pin in pins.values() if pin.reference and name in {None, pin.name}]
    old = new = path.read_text(encoding="utf-8")
    untold = []
    try:
        with engine.client() as client:
            for pin in wanted:
                digest, problem = container_image.registry_digest(client, str(pin.reference))
                if digest is None:
                    untold.append(pin.name)
                    say(f"{pin.name}: {pin.reference} cannot be asked for: {problem}")
                    continue
                new = repinned(new, pin, digest, _commit(client, pin, digest))
                say(f"{pin.name}: {pin.reference} is {digest}{' as pinned' if pin.digest == digest else ''}")
    except (DockerException, OSError) as error:
        raise engine.unusable("image update", error) from error
    if diff := proposal(old, new, f"containers/{path.name}"):
        print(diff, end="")
    if apply and new != old:
        files.write_bytes(path, new.encode())
        image_pins.load_pins(path)
    done = "written" if apply and new != old else "proposed" if new != old else "nothing to change"
    say(f"Result: {'Blocked' if untold else 'Pass'} - {done}" + (f"; not told: {', '.join(untold)}" if untold else ""))
    return 2 if untold else 0


def _commit(client: DockerClient, pin: Pin, digest: str) -> str | None:
    """Return NeMo-RL's commit as the image itself says it, where it is on this engine."""
    here = container_image.present(client, f"{image_pins.parse_reference(str(pin.reference)).repo}@{digest}")
    return container_image.commit_inside(here.attrs.get("Config") or {}) if here else None
