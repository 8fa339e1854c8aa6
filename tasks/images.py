"""Which environment a run uses, as facts: reference, digest, ID, NeMo-RL commit, dependency fingerprint.

`resolve` turns what the user wrote (a name of containers/images.yaml, a reference, an image ID) into an `Image`, asking
the registry once: a tag is a promise, a digest a fact. What is present is used without a network; what is absent is
pulled by digest. For the local runtime the environment is the interpreter's installed distributions.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import files
from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from docker import DockerClient
    from docker.models.images import Image as EngineImage

    from tasks.runtimes.docker import Docker
    from tasks.runtimes.job import Runtime
    from tasks.settings import Settings

PINS = Path(__file__).resolve().parent.parent / "containers" / "images.yaml"
PIN_KEYS = ("reference", "digest", "nemo_rl", "bridge", "date", "verified_by", "note")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
REFERENCE = re.compile(
    r"(?P<repo>(?:[a-z0-9][a-z0-9.-]*:\d+/)?[a-z0-9][a-z0-9._-]*(?:/[a-z0-9][a-z0-9._-]*)*)"  # a port only before a /
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
FINGERPRINT = "/opt/nemo_rl_container_fingerprint"  # NeMo-RL docker/Dockerfile, tools/generate_fingerprint.py
FINGERPRINT_MAX_BYTES = 1 << 20
COMMIT = "NEMO_RL_COMMIT"  # in the image's environment, same Dockerfile; "<unknown>" where the build did not say
COMMIT_LABEL = "nemo-rl-e2e.nemo_rl"  # containers/Dockerfile
BUILT = "build"  # image=build: what `doit image build` made of the checkout, see image_build.py
PULL_QUIET_S = 600  # between two events of a pull: extracting a layer of 10 GB is silent
INTERPRETER_S = 60.0
DISTRIBUTIONS = """
import importlib.metadata, json, os, platform, sys
found = {(d.metadata["Name"] or "?", d.version or "?") for d in importlib.metadata.distributions()}
paths = [p for p in sys.path if p.endswith("-packages") and os.path.isdir(p)]
print(json.dumps({"python": platform.python_version(), "distributions": sorted(found), "paths": paths}))
"""


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


def resolve(settings: Settings, runtime: Runtime, *, progress: Callable[[str], None] = print) -> Image:
    """Return the environment that the settings name, and bind a container runtime to it (`runtime.use`).

    Raises UserError: no image named, unknown, no digest recorded, not found, registry or engine out of reach, a commit
    inside that contradicts the pin.
    """
    from tasks.runtimes.docker import Docker
    from tasks.runtimes.slurm import Slurm

    if isinstance(runtime, Slurm):
        from tasks.slurm_image import resolve as for_slurm

        image, name = for_slurm(settings.image, settings.build / "cache" / "squashfs.json", progress=progress)
        runtime.use(name)
        return image
    if not isinstance(runtime, Docker):
        return describe_interpreter(settings.python, settings.build / "interpreters.json")
    named = settings.image
    if named == BUILT:
        from tasks import image_build

        named = image_build.wanted(settings, runtime)
    image = resolve_container(named, runtime, require_pinned=settings.require_pinned, progress=progress)
    for note in image.notes:
        progress(note)
    runtime.use(image.id)
    return image


def resolve_container(
    setting: str | None,
    engine: Docker,
    *,
    require_pinned: bool = False,
    offline: bool = False,
    pins: Path = PINS,
    progress: Callable[[str], None] = print,
) -> Image:
    """Return the image that `setting` means on an engine; `offline` never asks a registry. UserError as `resolve`."""
    from docker.errors import DockerException

    pin = _pin(setting, pins)
    wanted = f"{pin.reference}@{pin.digest}" if pin else str(setting)
    try:
        with engine.client() as client:
            if DIGEST.fullmatch(wanted):
                found, digest, notes = present(client, wanted), None, list[str]()
                if found is None:
                    raise UserError(
                        f"image={wanted}: not on this engine, and an ID cannot be pulled: give repo@sha256:..."
                    )
            else:
                reference = parse_reference(wanted)
                if reference.digest is None and require_pinned:
                    raise UserError(
                        f"image={wanted}: require_pinned=1 refuses a tag, which may point elsewhere tomorrow: give "
                        f"{reference.repo}@sha256:... or a name of containers/images.yaml."
                    )
                found, digest, notes = _locate(client, reference, offline=offline, progress=progress)
            commit = commit_inside(found.attrs.get("Config") or {})
            if pin and pin.nemo_rl and commit and not commit.startswith(pin.nemo_rl[: len(commit)]):
                raise UserError(
                    f"image={pin.name}: {pins} says NeMo-RL {pin.nemo_rl}, the image says {commit}: correct the pin, "
                    "or do not use this image."
                )
            commit = commit or (pin.nemo_rl if pin else None)
            return Image(wanted, digest, str(found.id), commit, fingerprint_inside(client, found), tuple(notes))
    except (DockerException, OSError) as error:
        raise engine.unusable(f"image={wanted}", error) from error


def _pin(setting: str | None, path: Path) -> Pin | None:
    """Return the pin called `setting`, complete, or None where it is no name but a reference or an ID."""
    pins = load_pins(path)
    if not setting:
        raise UserError(f"no image named: set NEMO_RL_IMAGE or image=REF; names in {path}: {', '.join(pins)}.")
    pin = pins.get(setting)
    if pin and not pin.reference:
        raise UserError(
            f"image={setting}: its reference is not public, give it with image=REF. {pin.note or ''}".strip()
        )
    if pin and not pin.digest:
        raise UserError(
            f"image={setting}: {path} has no digest for {pin.reference} yet. Run `doit image update {setting}` "
            "where the registry can be reached and commit the line, or give image=REPO@sha256:... yourself."
        )
    return pin


def _locate(
    client: DockerClient, reference: Reference, *, offline: bool, progress: Callable[[str], None]
) -> tuple[EngineImage, str | None, list[str]]:
    """Return the engine's image, its digest in the reference's repository, and notes on a tag that moved."""
    repo, tag = reference.repo, f"{reference.repo}:{reference.tag}"

    def by_digest(digest: str) -> EngineImage:
        there = present(client, f"{repo}@{digest}")
        if there is None and offline:
            raise UserError(f"image={repo}@{digest}: not on this engine, and a pull is forbidden (offline).")
        return there or _pull(client, repo, digest, progress)

    if reference.digest:
        found = by_digest(reference.digest)
        now = None if offline or not reference.tag else registry_digest(client, tag)[0]
        notes = [f"{tag} now points to {now}; the pinned {reference.digest} is used."] if now else []
        return found, reference.digest, notes if now != reference.digest else []
    local = present(client, tag)
    # One entry a repository, and more than one after the same image came by another manifest: select, never take [0].
    entries = (entry.partition("@") for entry in ((local.attrs.get("RepoDigests") or ()) if local else ()))
    digests = sorted(digest for name, _, digest in entries if name == repo)
    if local and not digests:  # built or loaded here: no registry knows it
        return local, None, []
    now, problem = (None, "offline.") if offline else registry_digest(client, tag)
    if local and (now is None or now in digests):
        return local, now or digests[0], [] if now else [f"whether {tag} moved is unknown: {problem}"]
    if now is None:
        raise UserError(f"image={tag}: not on this engine, and the registry gives nothing: {problem}")
    found = by_digest(now)
    found.tag(repo, reference.tag)
    return found, now, [f"{tag} moved from {digests[0]} to {now}; the new image is used."] if digests else []


def present(client: DockerClient, name: str) -> EngineImage | None:
    """Return the engine's image of that name, digest or ID, or None."""
    from docker.errors import ImageNotFound

    try:
        return client.images.get(name)
    except ImageNotFound:
        return None


def registry_digest(client: DockerClient, tag: str) -> tuple[str | None, str]:
    """Return the digest that the registry has for `repo:tag` and "", or None and why not (podman cannot ask)."""
    from docker.errors import APIError

    from tasks.runtimes.container import said

    try:
        return str(client.images.get_registry_data(tag).id), ""
    except APIError as error:
        return None, said(error)


def _pull(client: DockerClient, repo: str, digest: str, progress: Callable[[str], None]) -> EngineImage:
    """Pull by digest with a progress line a second; UserError with the engine's words."""
    progress(f"pulling {repo}@{digest}")
    last, said, layers = time.monotonic(), "", dict[str, tuple[int, int]]()
    usual, client.api.timeout = client.api.timeout, PULL_QUIET_S
    try:
        for event in client.api.pull(repo, tag=digest, stream=True, decode=True):
            if "error" in event:  # comes with HTTP status 200
                raise UserError(f"image={repo}@{digest}: {event['error']}")
            layers |= _layer(event, layers)
            if layers and time.monotonic() > last + 1:
                last = time.monotonic()
                done, total = (sum(column) / 1e9 for column in zip(*layers.values(), strict=True))
                text = f"pulling {repo}: {done:.2f} of {total:.2f} GB in {len(layers)} layers known so far"
                if text != said:  # unpacking takes longer than the network, and has nothing to tell
                    progress(text)
                said = text
    finally:
        client.api.timeout = usual
    return client.images.get(f"{repo}@{digest}")


def _layer(event: Mapping[str, Any], layers: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return layer -> (bytes done, bytes in all) as far as one event of a pull tells."""
    detail, name = event.get("progressDetail") or {}, event.get("id", "")
    if event.get("status") == "Downloading" and detail.get("total"):
        return {name: (int(detail["current"]), int(detail["total"]))}
    if event.get("status") == "Download complete" and name in layers:
        return {name: (layers[name][1], layers[name][1])}
    return {}


def commit_inside(config: Mapping[str, Any]) -> str | None:
    """Return the NeMo-RL commit that an image's configuration names: NEMO_RL_COMMIT, else our Dockerfile's label."""
    values = dict(item.partition("=")[::2] for item in config.get("Env") or ())
    commit = values.get(COMMIT) or (config.get("Labels") or {}).get(COMMIT_LABEL) or ""
    return commit if re.fullmatch(r"[0-9a-f]{7,40}", commit) else None


def fingerprint_inside(client: DockerClient, image: EngineImage) -> str | None:
    """Return the image's dependency fingerprint, read out of a container that is never started; None without one."""
    from docker.errors import NotFound

    from tasks.runtimes.container import LABEL, read_file
    from tasks.runtimes.job import this_owner

    labels = {LABEL: "1", f"{LABEL}.owner": str(this_owner())}
    container = client.containers.create(str(image.id), ["never-started"], labels=labels, network_mode="none")
    try:
        text = read_file(container, FINGERPRINT, FINGERPRINT_MAX_BYTES).decode("utf-8", "replace").strip()
    except NotFound:
        return None
    finally:
        container.remove(force=True, v=True)
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text or None


def describe_interpreter(interpreter: Path, cache: Path | None = None) -> Image:
    """Return the environment of an interpreter: a digest over its version and its distributions (name, version).

    `cache`, a file of this function's own, holds as long as interpreter and site-packages keep their times.
    """
    key = str(interpreter.absolute())  # not resolved: a venv's python is a link, and the venv is what counts
    records = files.read_json(cache) if cache else None
    records = records if isinstance(records, dict) else {}
    known = records.get(key)
    if not known or known["stamps"] != _stamps(known["stamps"]):
        known = _ask(interpreter)
        known["stamps"] = _stamps([key, *known.pop("paths")])
        if cache:
            files.write_json(cache, {**records, key: known})
    return Image(f"python {known['python']}, {known['count']} distributions", None, known["digest"], None, None)


def _ask(interpreter: Path) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "env": env}
    try:
        run = subprocess.run([str(interpreter), "-c", DISTRIBUTIONS], timeout=INTERPRETER_S, check=True, **options)
        told = json.loads(run.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise UserError(f"python={interpreter}: cannot be asked for its packages: {' '.join(last)}") from error
    digest = files.sha256_json({"python": told["python"], "distributions": told["distributions"]})
    count = len(told["distributions"])
    return {"python": told["python"], "count": count, "digest": f"sha256:{digest}", "paths": told["paths"]}


def _stamps(paths: Iterable[str]) -> dict[str, int]:
    """Return path -> mtime in ns, -1 where there is nothing."""
    found = {path: Path(path) for path in paths}
    return {name: path.stat().st_mtime_ns if path.exists() else -1 for name, path in found.items()}
