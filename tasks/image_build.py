"""An image from the NeMo-RL checkout's own Dockerfile, named by the digest of what goes into it.

Protocol: the inputs are the Dockerfile, the context files that the target copies, target, build arguments, the digests
of its base images and our thin layer. `doit image build` builds them as nemo-rl-e2e/nemo-rl:<digest> and leaves
provenance.json, sbom.json and build.log in build/images/<digest>/. `image=build` means that image: where an input has
changed since, there is none of that name, and the image stage says which input it was.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from typing import TYPE_CHECKING, Any

from tasks import container_image, digests, dockerfile, environment
from tasks.errors import UserError
from tasks.files import read_json, sha256_file, sha256_json, write_json
from tasks.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from docker import DockerClient

    from tasks.runtimes.docker import Docker
    from tasks.settings import Settings

DOCKERFILE = "docker/Dockerfile"
THIN = ROOT / "containers" / "Dockerfile"
TARGET = "release"  # what NeMo-RL publishes; the last stages of its Dockerfile export build caches
SOURCE_STAGE = "nemo-rl"  # clones a revision from the network unless the checkout takes its place
REPOSITORY = "nemo-rl-e2e/nemo-rl"
INPUTS_LABEL = "nemo-rl-e2e.inputs"


def inputs(
    settings: Settings, client: DockerClient, target: str, args: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str]:
    """Return name -> digest of everything that goes into the image; `known`: inputs of an earlier build.

    A base image that neither engine nor registry can name now counts as unchanged if it was `known`. UserError: no
    Dockerfile, no such target, a base that nobody knows.
    """
    checkout = settings.checkout("nemo_rl")
    text = read(checkout)
    needs = dockerfile.needs(text, target, args, contexts=_contexts(text))
    manifest = digests.scan("nemo_rl", checkout, settings.build / "images" / "scan.json")
    files = dict(manifest.files)
    found = {
        f"file {name}": f"{files[name].mode} {files[name].sha}" for name in dockerfile.copied(files, needs.sources)
    }
    for name in (DOCKERFILE, ".dockerignore"):
        if name in files:
            found[f"file {name}"] = f"{files[name].mode} {files[name].sha}"
    for ref in needs.bases:
        found[f"base {ref}"] = _base(client, ref) or known.get(f"base {ref}") or ""
        if not found[f"base {ref}"]:
            raise UserError(f"{ref}: the base image is neither on this engine nor given by its registry")
    return {**found, "target": target, "arguments": sha256_json(dict(args)), "thin layer": sha256_file(THIN)}


def read(checkout: Path) -> str:
    """Return the checkout's Dockerfile."""
    path = checkout / DOCKERFILE
    if not path.is_file():
        raise UserError(f"{path}: this NeMo-RL has no such Dockerfile; give a published image with image=REF")
    return path.read_text(encoding="utf-8")


def _contexts(text: str) -> tuple[str, ...]:
    stages = (rest.split() for word, rest in dockerfile.instructions(text) if word == "FROM")
    return (SOURCE_STAGE,) if any(words[-1] == SOURCE_STAGE for words in stages) else ()


def _base(client: DockerClient, ref: str) -> str:
    if "@sha256:" in ref:
        return ref.partition("@")[2]
    here = container_image.present(client, ref)
    return str(here.id) if here else container_image.registry_digest(client, ref)[0] or ""


def choice(settings: Settings, target: str, given: str) -> tuple[str, dict[str, str]]:
    """Return target and build arguments: NeMo-RL's usual ones, unless the user says others."""
    text, commit = read(settings.checkout("nemo_rl")), digests.git(settings.checkout("nemo_rl"), "rev-parse", "HEAD")
    stages = {rest.split()[-1] for word, rest in dockerfile.instructions(text) if word == "FROM"}
    return target or (TARGET if TARGET in stages else ""), arguments(given, text, commit.strip())


def arguments(given: str, text: str, commit: str) -> dict[str, str]:
    """Return the build arguments of `args=NAME=VALUE,...`, with NEMO_RL_COMMIT where the Dockerfile `text` takes it.

    Raises UserError for a word without `=`, an argument that the Dockerfile does not know, and a secret.
    """
    known = {rest.partition("=")[0] for word, rest in dockerfile.instructions(text) if word == "ARG"}
    found = {container_image.COMMIT: commit} if container_image.COMMIT in known else {}
    for word in filter(None, given.split(",")):
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise UserError(
                f"args={name}: write NAME=VALUE, with a name of the Dockerfile's: {', '.join(sorted(known))}"
            )
        if environment.secret_names({name: value}):
            raise UserError(f"args={name}: a build argument can be read in the image for ever; no secrets there")
        found[name] = value
    return dict(sorted(found.items()))


def wanted(settings: Settings, engine: Docker) -> str:
    """Return the ID of the image for the checkout as it is now; where it is not built, UserError says what changed."""
    from docker.errors import DockerException

    last = read_json(settings.build / "images" / "last.json")
    if not isinstance(last, dict):
        raise UserError("image=build: nothing was built yet; run `doit image build`")
    target, args = choice(settings, last["target"], last["given"])
    try:
        with engine.client() as client:
            now = inputs(settings, client, target, args, last["inputs"])
            digest = sha256_json(now)
            here = container_image.present(client, f"{REPOSITORY}:{digest[:16]}")
            if here is None or here.labels.get(INPUTS_LABEL) != digest:  # anybody can give a name
                raise UserError(
                    f"image=build: not built for these inputs ({changes(last['inputs'], now)}); run `doit image build`"
                )
    except (DockerException, OSError) as error:
        raise engine.unusable("image=build", error) from error
    return str(here.id)


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return which inputs differ, at most five by name."""
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more if names else "nothing changed, the engine has lost it"


def build(
    settings: Settings,
    engine: Docker,
    report: Callable[[str], None],
    *,
    target: str = "",
    args: str = "",
    cache: str = "",
) -> dict[str, Any]:
    """Return the provenance of the image for the present inputs, building it where the engine has it not.

    `cache`: an image reference that buildx reads and writes its cache by. UserError: what `inputs` says, a builder that
    cannot or fails (with its last lines), a checkout that changed meanwhile.
    """
    from docker.errors import DockerException

    from tasks import image_facts

    home = settings.build / "images"
    last = read_json(home / "last.json") or {}
    target, given = choice(settings, target, args)
    try:
        with engine.client() as client:
            now = inputs(settings, client, target, given, last.get("inputs", {}))
            digest = sha256_json(now)
            folder, tag = home / digest[:16], f"{REPOSITORY}:{digest[:16]}"
            here, known = container_image.present(client, tag), read_json(folder / "provenance.json")
            if here is None or not known or known["id"] != here.id:
                folder.mkdir(parents=True, exist_ok=True)
                started = time.time()
                builder = _builder(settings, engine, tag, target, given, cache, folder / "build.log", report)
                _thin(client, settings, tag, digest)
                if inputs(settings, client, target, given, now) != now:
                    raise UserError(
                        f"{settings.nemo_rl} changed while its image was built; run `doit image build` again"
                    )
                here = client.images.get(tag)
                write_json(folder / "sbom.json", image_facts.bill_of_materials(client, str(here.id)))
                known = {
                    "schema": 1, "tag": tag, "id": here.id, "bytes": here.attrs["Size"], "inputs_digest": digest,
                    "nemo_rl": digests.git(settings.checkout("nemo_rl"), "rev-parse", "HEAD").strip(),
                    "dockerfile": DOCKERFILE, "target": target, "arguments": given, "inputs": now,
                    "builder": builder, "engine": str(client.version().get("Version", "")), "host": os.uname().nodename,
                    "started": int(started), "duration_s": round(time.time() - started, 1),
                    "sbom_sha256": sha256_file(folder / "sbom.json"),
                    "layers": image_facts.layers(client, str(here.id)),
                }  # fmt: skip
                write_json(folder / "provenance.json", known)
            write_json(home / "last.json", {"target": target, "given": args, "inputs": now})
    except (DockerException, OSError) as error:
        raise engine.unusable("doit image build", error) from error
    return {**known, "folder": os.fspath(folder)}


def _builder(
    settings: Settings, engine: Docker, tag: str, target: str, args: Mapping[str, str], cache: str, log: Path,
    report: Callable[[str], None],
) -> str:  # fmt: skip
    """Build with buildx, or with the classic builder where the Dockerfile allows it; return which it was."""
    from python_on_whales import DockerClient as Whales
    from python_on_whales.exceptions import DockerException

    program = shutil.which("docker")
    if program is None:  # python-on-whales would download one
        raise UserError("doit image build: no `docker` client on PATH: install docker-ce-cli or Debian's docker.io")
    checkout = settings.checkout("nemo_rl")
    text = read(checkout)
    whales = Whales(host=engine.host, client_call=[program])
    common: dict[str, Any] = {
        "build_args": dict(args), "file": checkout / DOCKERFILE, "tags": [tag], "target": target or None
    }  # fmt: skip
    try:
        if whales.buildx.is_installed():
            report(f"building {DOCKERFILE} with buildx: {log}")
            contexts: dict[str, Any] = {name: os.fspath(checkout) for name in _contexts(text)}
            caches: dict[str, Any] = {
                "cache_from": {"type": "registry", "ref": cache},
                "cache_to": {"type": "registry", "ref": cache, "mode": "max"},
            } if cache else {}  # fmt: skip
            lines = whales.buildx.build(
                checkout, build_contexts=contexts, load=True, stream_logs=True, **caches, **common
            )
            _follow(lines or (), log, report)
            return "buildx"
        feature = dockerfile.needs_buildkit(text) or (_contexts(text) and f"the build context {SOURCE_STAGE}")
        if feature or cache:
            raise UserError(
                f"{checkout / DOCKERFILE} needs BuildKit ({feature or 'cache='}), and docker buildx is not installed: "
                "install the docker-buildx-plugin package (Debian: docker-buildx), or give a published image, image=REF"
            )
        report(f"building {DOCKERFILE} with the classic builder (no docker buildx here)")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whales.legacy_build(checkout, quiet=True, **common)
    except DockerException as error:
        last = (error.stderr or error.stdout or str(error)).strip().splitlines()[-15:]
        raise UserError(
            f"{checkout / DOCKERFILE}: the build ended with {error.return_code}:\n" + "\n".join(last)
        ) from error
    return "classic"


def _follow(lines: Any, log: Path, report: Callable[[str], None]) -> None:
    """Keep the builder's lines; report where a step begins, at most one a second."""
    said = 0.0
    with log.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line if line.endswith("\n") else f"{line}\n")
            if " [" in line and time.monotonic() > said + 1:
                said = time.monotonic()
                report(line.strip()[:150])


def _thin(client: DockerClient, settings: Settings, tag: str, digest: str) -> None:
    """Put our layer on the image: mount points, the commit, and the digest of the inputs as labels."""
    head = digests.git(settings.checkout("nemo_rl"), "rev-parse", "HEAD").strip()
    client.images.build(
        path=os.fspath(THIN.parent), dockerfile=THIN.name, buildargs={"BASE": tag, "NEMO_RL_SHA": head}, tag=tag,
        labels={INPUTS_LABEL: digest}, rm=True, forcerm=True,
    )  # fmt: skip
