"""`doit image build`, `update`, `show`: what is asked of the image stage beyond bringing it up to date.

They share the word with the task `image`, so they are no doit commands (doit refuses a command with a task's name):
`command.Run` hands a line that begins with these two words over to `main`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tasks import fingerprint, images
from tasks.errors import UserError
from tasks.runtimes import choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.runtimes.docker import Docker
    from tasks.settings import Settings

VERBS = ("build", "update", "show")
USAGE = {
    "build": "doit image build [--target=NAME] [--build-arg=NAME=VALUE] [--cache-from=X] [--cache-to=X] [--no-cache]",
    "update": "doit image update [NAME] [apply=1]",
    "show": "doit image show [NAME|REF]",
}
OPTIONS = ("target", "build-arg", "cache-from", "cache-to", "no-cache")


def main(words: Sequence[str], settings: Settings) -> int:
    """Do `VERB [words]` and return the exit status; UserError for a mistake of the user's."""
    verb, *rest = words
    as_json = "--json" in rest
    rest = [word for word in rest if word != "--json"]
    names = [word for word in rest if not word.startswith("-")]
    options = [word.removeprefix("--").partition("=")[::2] for word in rest if word.startswith("-")]
    if (len(names) > 1 or (names and verb == "build")) or (options and verb != "build"):
        raise UserError(f"usage: {USAGE[verb]} [--json]")
    if wrong := [name for name, _ in options if name not in OPTIONS]:
        raise UserError(f"doit image build: unknown option --{wrong[0]}; usage: {USAGE['build']}")
    engine = _engine(settings)
    name = names[0] if names else settings.image
    if verb == "update":
        return _update(
            name, engine, apply=settings.arguments.get("apply", "0") in ("1", "true", "yes"), as_json=as_json
        )
    if verb == "show":
        return _show(name, engine, settings, as_json=as_json)
    return _build(dict(options), [v for n, v in options if n == "build-arg"], engine, settings, as_json=as_json)


def _engine(settings: Settings) -> Docker:
    from tasks.runtimes.docker import Docker

    runtime = choose(settings.runtime if settings.runtime in ("docker", "podman") else "docker")
    assert isinstance(runtime, Docker)  # noqa: S101 - both are
    return runtime


def _update(name: str | None, engine: Docker, *, apply: bool, as_json: bool) -> int:
    from tasks import image_pins

    diff, said, unanswered = image_pins.update(name, engine, apply=apply)
    if as_json:
        print(json.dumps({"diff": diff, "notes": said, "written": bool(apply and diff), "unanswered": unanswered}))
        return 2 if unanswered else 0
    print(diff, end="")
    for line in said:
        print(f"note: {line}")
    done = (
        "written; commit it" if apply and diff else "apply=1 writes it" if diff else "the pins are as the registry says"
    )
    if unanswered:
        done = f"no answer for {unanswered} of {len(said)} pins" + (f"; {done}" if diff else "")
    print(f"Result: {'Blocked' if unanswered else 'Pass'} - {done}")
    return 2 if unanswered else 0


def _build(options: dict[str, str], arguments: list[str], engine: Docker, settings: Settings, *, as_json: bool) -> int:
    from tasks import image_build

    if bad := [text for text in arguments if "=" not in text]:
        raise UserError(f"--build-arg={bad[0]}: write --build-arg=NAME=VALUE")
    args = dict(text.split("=", 1) for text in arguments)
    tell = (lambda _: None) if as_json else print
    made = image_build.build(settings, engine, options, args, tell)
    if as_json:
        print(json.dumps(made))
        return 0
    _layers(made["layers"], made["bytes"])
    print(f"Result: Pass - {made['tag']} {made['id'][:19]}, use it with image=build; records in {made['folder']}")
    return 0


def _show(name: str | None, engine: Docker, settings: Settings, *, as_json: bool) -> int:
    from docker.errors import DockerException

    from tasks import image_build, image_facts

    if name == "build":
        name = image_build.wanted(settings, engine)
    image = images.resolve_container(name, engine, progress=lambda _: None)
    differences = fingerprint.notes(image.as_dict(), settings.nemo_rl) if settings.nemo_rl else []
    try:
        with engine.client() as client:
            layers = image_facts.layers(client, image.id)
            size = int(client.images.get(image.id).attrs["Size"])
    except (DockerException, OSError) as error:
        raise engine.unusable(image.ref, error) from error
    shown: dict[str, Any] = {
        **image.as_dict(), "bytes": size, "layers": layers, "differences": differences,
        "notes": list(image.notes),
    }  # fmt: skip
    if as_json:
        print(json.dumps(shown, indent=1))
        return 0
    print(f"{image.ref}\n  ID      {image.id}\n  digest  {image.digest or 'none: never pushed or pulled'}")
    print(f"  NeMo-RL {image.nemo_rl_sha or 'not said'}, fingerprint {'there' if image.fingerprint else 'none'}")
    _layers(layers, size)
    for line in (*image.notes, *(("matters: " if d["matters"] else "no matter: ") + d["text"] for d in differences)):
        print(f"note: {line}")
    return 0


def _layers(layers: Sequence[dict[str, Any]], size: int) -> None:
    print(f"{size / 1e6:10.1f} MB in {sum(1 for layer in layers if layer['bytes'])} layers")
    for layer in layers:
        if layer["bytes"]:
            print(f"{layer['bytes'] / 1e6:10.1f} MB  {layer['by'][:100]}")
