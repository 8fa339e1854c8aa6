"""`doit image build`: the NeMo-RL image from the checkout's own Dockerfile, our thin layer on it, and what is inside.

Its digest is that of its inputs: Dockerfile, checkout content, build arguments, target, our layer. With equal inputs
and the image on the engine nothing is built. The record keeps inputs, image ID, layers and the SBOM file's hash. Two
builds have different IDs even so (the time is in an image's configuration): an image is built once and pushed.

buildx where the client has it, else the classic builder, which NeMo-RL's present Dockerfile is too new for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

from tasks import digests, files, images, records
from tasks.errors import UserError
from tasks.runtimes.container import LABEL, said
from tasks.runtimes.job import this_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from docker import DockerClient

    from tasks.pipeline import Pipeline
    from tasks.runtimes.docker import Docker

DOCKERFILE = "docker/Dockerfile"
LAYER = images.PINS.parent / "Dockerfile"
REPOSITORY = "nemo-rl-e2e/nemo-rl"
# Runs inside, with whatever python3 there is: every Debian package and every Python distribution on the disk.
INVENTORY = r"""
import email, json, os
dpkg, pip, skip = [], [], {"/proc", "/sys", "/dev"}
try:
    for block in open("/var/lib/dpkg/status", encoding="utf-8", errors="replace").read().split("\n\n"):
        fields = email.message_from_string(block)
        if "installed" in str(fields["Status"]).split():
            dpkg.append([fields["Package"], fields["Version"], fields["Architecture"]])
except OSError:
    pass
for top, names, _ in os.walk("/"):
    names[:] = [name for name in names if os.path.join(top, name) not in skip]
    for name in names:
        path = os.path.join(top, name, "METADATA" if name.endswith(".dist-info") else "PKG-INFO")
        if name.endswith((".dist-info", ".egg-info")) and os.path.isfile(path):
            fields = email.message_from_string(open(path, encoding="utf-8", errors="replace").read())
            licence = (fields["License-Expression"] or fields["License"] or "").split("\n")[0]
            pip.append([fields["Name"], fields["Version"], licence, top])
print(json.dumps({"dpkg": sorted(dpkg), "pip": sorted(pip, key=str)}))
"""


def arguments(text: str | None, dockerfile: str, commit: str | None) -> dict[str, str]:
    """Return the build arguments of `args=NAME=VALUE,...`, with NEMO_RL_COMMIT where the Dockerfile takes it.

    Raises UserError for a word without `=` and for an argument that the Dockerfile does not know.
    """
    known = set(re.findall(r"^ARG\s+(\w+)", dockerfile, flags=re.MULTILINE))
    given = {images.COMMIT: commit} if commit and images.COMMIT in known else {}
    for word in filter(None, (text or "").split(",")):
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise UserError(
                f"args={word}: write NAME=VALUE, with a name of the Dockerfile's: {', '.join(sorted(known))}"
            )
        given[name] = value
    return dict(sorted(given.items()))


def inputs(dockerfile: str, context: str, args: Mapping[str, str], target: str) -> dict[str, str]:
    """Return the named inputs of a build; equal ones need no second build. `context` is the checkout's digest."""
    return {
        "dockerfile": files.sha256_json(dockerfile),
        "context": context,
        "args": files.sha256_json(dict(args)),
        "target": target,
        "layer": files.sha256_file(LAYER),
    }


def build(pipe: Pipeline, engine: Docker, *, target: str, args: str | None, say: Callable[[str], None]) -> int:
    """Build what is not built, print ID, size, layers and inventory, keep the record; return 0.

    Raises UserError: no checkout, Dockerfile, client or engine; a build that fails; a checkout changed meanwhile.
    """
    from docker.errors import DockerException

    root, context = pipe.settings.checkout("nemo_rl"), pipe.manifests["nemo_rl"]
    try:
        dockerfile = (root / DOCKERFILE).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{root / DOCKERFILE}: {error.strerror}; this NeMo-RL has no Dockerfile there") from error
    given = arguments(args, dockerfile, context.head)
    named = inputs(dockerfile, context.digest, given, target)
    key = records.input_digest(named)
    tag = f"{REPOSITORY}:{key[:12]}"
    try:
        with engine.client() as client:
            known = pipe.records.find("image-build", "", named)
            if known and known.reusable and not pipe.records.damaged(known) and _has(client, known.artefact["id"]):
                say(f"{known.artefact['tag']} is built already (inputs {key[:12]}, {known.finished})")
                return _told(known.artefact, say)
            started = time.monotonic()
            _build(engine, root, f"{tag}-base", file=root / DOCKERFILE, args=given, target=target, text=dockerfile)
            if digests.scan("nemo_rl", root, pipe.workspace.root / "cache" / "nemo_rl.json").digest != context.digest:
                raise UserError(f"{root} changed while the image was built from it: build again")
            own = {"BASE": f"{tag}-base", "NEMO_RL_SHA": context.head or ""}
            _build(engine, LAYER.parent, tag, file=LAYER, args=own, target="", text="")
            artefact = _described(client, tag) | {"args": given, "nemo_rl": context.head, "tag": tag}
            sbom = pipe.workspace.root / "images" / f"{key[:12]}.sbom.json"
            sbom.parent.mkdir(parents=True, exist_ok=True)
            inside = inventory(client, artefact["id"])
            files.write_json(sbom, inside)
            artefact |= {"sbom": os.fspath(sbom), **{f"{kind}_packages": len(found) for kind, found in inside.items()}}
            pipe.records.save(
                records.Record(
                    "image-build", "", named, artefact, reusable=True,
                    evidence={os.fspath(sbom.relative_to(pipe.workspace.root)): files.sha256_file(sbom)},
                    finished=records.utc_now(), duration_s=round(time.monotonic() - started, 3),
                    host=os.uname().nodename,
                )
            )  # fmt: skip
    except (DockerException, OSError) as error:
        raise engine.unusable("image build", error) from error
    return _told(artefact, say)


def inventory(client: DockerClient, image: str) -> dict[str, Any]:
    """Return the Debian packages and Python distributions inside an image; UserError where its python3 cannot tell."""
    from docker.errors import APIError

    labels = {LABEL: "1", f"{LABEL}.owner": str(this_owner())}
    try:
        container = client.containers.create(
            image, ["-I", "-c", INVENTORY], entrypoint=["python3"], network_mode="none", labels=labels
        )
        try:  # not run(remove=True): a busy engine may remove the container before its log is read
            container.start()
            container.wait()
            output = container.logs(stdout=True, stderr=False)
        finally:
            container.remove(force=True)
        told: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (APIError, ValueError, IndexError) as error:
        raise UserError(f"image build: python3 in {image} does not tell what is inside: {said(error)}") from error
    return told


def _has(client: DockerClient, identity: str) -> bool:
    from docker.errors import ImageNotFound

    with contextlib.suppress(ImageNotFound):
        return bool(client.images.get(identity))
    return False


def _build(
    engine: Docker, context: Path, tag: str, *, file: Path, args: Mapping[str, str], target: str, text: str
) -> None:
    from python_on_whales import DockerClient as Whales
    from python_on_whales.exceptions import DockerException

    program = shutil.which("docker")
    if program is None:  # python-on-whales would download one
        raise UserError("image build: no `docker` client on PATH: install docker-ce-cli or Debian's docker.io")
    whales = Whales(host=engine.host, client_call=[program])
    options: dict[str, Any] = {"file": file, "build_args": dict(args), "tags": [tag], "target": target or None}
    try:
        if whales.buildx.is_installed():
            # the Dockerfile's stage of this name would fetch a branch from the network instead of the checkout
            own: dict[str, Any] = (
                {"nemo-rl": context} if re.search(r"^FROM scratch AS nemo-rl$", text, flags=re.MULTILINE) else {}
            )
            whales.buildx.build(context, build_contexts=own, load=True, progress="plain", **options)
        else:
            whales.legacy_build(context, quiet=False, **options)
    except DockerException as error:
        last = " ".join(str(error.stderr or error.stdout or error).split())[-500:]
        raise UserError(f"image build: {file}: {last} (its output is above)") from error


def _described(client: DockerClient, tag: str) -> dict[str, Any]:
    image = client.images.get(tag)
    layers = [[int(step["Size"]), str(step["CreatedBy"])[:100]] for step in image.history() if step.get("Size")]
    return {"id": image.id, "size": int(image.attrs["Size"]), "layers": layers}


def _told(artefact: Mapping[str, Any], say: Callable[[str], None]) -> int:
    for size, made_by in artefact["layers"]:
        say(f"{size / 1e6:10.1f} MB  {made_by}")
    say(f"{artefact['size'] / 1e6:10.1f} MB  in all, {artefact['id']}")
    say(f"SBOM: {artefact['dpkg_packages']} Debian and {artefact['pip_packages']} Python packages, {artefact['sbom']}")
    say(f"Result: Pass - built: use image={artefact['tag']}, or push it and pin its digest")
    return 0


def command(pipe: Pipeline, verb: str, words: list[str]) -> int:
    """Do `doit image update [NAME]` or `doit image build`; return the exit status. UserError for other words."""
    from tasks.image_update import update
    from tasks.runtimes import choose
    from tasks.runtimes.docker import Docker

    given = pipe.settings
    engine = choose(given.runtime) if given.runtime != "local" else Docker()
    if not isinstance(engine, Docker):
        raise UserError(f"image {verb}: runtime={given.runtime} has no engine for it: use docker or podman")
    if verb == "update" and len(words) <= 1:
        named = words[0] if words else (given.image if given.origins.get("image") == "the command line" else None)
        return update(engine, named, apply=given.arguments.get("apply") == "1", say=print)
    if words:
        raise UserError(f"image {verb} {' '.join(words)}: too many words (doit image update [NAME], doit image build)")
    given_args = given.arguments
    return build(pipe, engine, target=given_args.get("target", ""), args=given_args.get("args"), say=print)
