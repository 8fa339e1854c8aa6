"""`doit image build`, `update`, `show`: what is asked of images beyond bringing the stage `image` up to date.

They share the word with the task `image`, so they are no doit commands (doit refuses a command with a task's name):
`command.Run` hands a line that begins with these two words over to `main`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tasks import container_image, images
from tasks.errors import UserError
from tasks.runtimes import choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.runtimes.docker import Docker
    from tasks.settings import Settings

USAGE = {
    "build": "doit image build [target=STAGE] [args=NAME=VALUE,...] [cache=REF]",
    "update": "doit image update [NAME] [apply=1]",
    "show": "doit image show [NAME|REF|build] [--json]",
}


def main(words: Sequence[str], settings: Settings) -> int:
    """Do `VERB [words]` and return the exit status; UserError for a mistake of the user's."""
    from tasks.runtimes.docker import Docker

    verb, *rest = words
    as_json = verb == "show" and "--json" in rest
    names = [word for word in rest if not (as_json and word == "--json")]
    if len(names) > (verb != "build") or any(name.startswith("-") for name in names):
        raise UserError(f"image {verb} {' '.join(rest)}: usage: {USAGE[verb]}")
    engine = choose(settings.runtime) if settings.runtime != "local" else Docker()
    if not isinstance(engine, Docker):
        raise UserError(f"image {verb}: runtime={settings.runtime} has no engine for it: use docker or podman")
    asked = settings.image if settings.origins.get("image") == "the command line" or verb == "show" else None
    name, given = names[0] if names else asked, settings.arguments
    if verb == "update":
        from tasks.image_update import update

        return update(engine, name, apply=given.get("apply") == "1", say=print)
    if verb == "show":
        return _show(name, engine, settings, as_json=as_json)
    return _build(engine, settings, **{key: given.get(key, "") for key in ("target", "args", "cache")})


def _build(engine: Docker, settings: Settings, **options: str) -> int:
    from tasks import image_build

    made = image_build.build(settings, engine, print, **options)
    _layers(made["layers"], made["bytes"])
    print(f"Result: Pass - {made['tag']} {made['id'][:19]}, use it with image=build; records in {made['folder']}")
    return 0


def _show(name: str | None, engine: Docker, settings: Settings, *, as_json: bool) -> int:
    from docker.errors import DockerException

    from tasks import fingerprint, image_build, image_facts

    if name == images.BUILT:
        name = image_build.wanted(settings, engine)
    image = container_image.resolve_container(name, engine, progress=lambda _: None)
    try:
        with engine.client() as client:
            layers = image_facts.layers(client, image.id)
            size = int(client.images.get(image.id).attrs["Size"])
    except (DockerException, OSError) as error:
        raise engine.unusable(image.ref, error) from error
    differences = fingerprint.notes(image.as_dict(), settings.nemo_rl)
    if as_json:
        shown: dict[str, Any] = {**image.as_dict(), "bytes": size, "layers": layers, "differences": differences}
        print(json.dumps({**shown, "notes": list(image.notes)}, indent=1))
        return 0
    print(f"{image.ref}\n  ID      {image.id}\n  digest  {image.digest or 'none: never pushed or pulled'}")
    print(f"  NeMo-RL {image.nemo_rl_sha or 'not said'}, fingerprint {'there' if image.fingerprint else 'none'}")
    _layers(layers, size)
    for line in (*image.notes, *fingerprint.sentences(differences)):
        print(f"note: {line}")
    return 0


def _layers(layers: Sequence[dict[str, Any]], size: int) -> None:
    print(f"{size / 1e6:10.1f} MB in {sum(1 for layer in layers if layer['bytes'])} layers")
    for layer in layers:
        if layer["bytes"]:
            print(f"{layer['bytes'] / 1e6:10.1f} MB  {layer['by'][:100]}")
