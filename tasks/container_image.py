"""The image that a setting means on an engine: found or pulled by digest, and asked what is inside.

What is present is used without a network; what is absent is pulled by digest; a tag is resolved by the registry once.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

from tasks.errors import UserError
from tasks.image_pins import DIGEST, PINS, Image, Pin, Reference, load_pins, parse_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from docker import DockerClient
    from docker.models.images import Image as EngineImage

    from tasks.runtimes.docker import Docker

FINGERPRINT = "/opt/nemo_rl_container_fingerprint"  # NeMo-RL docker/Dockerfile, tools/generate_fingerprint.py
FINGERPRINT_MAX_BYTES = 1 << 20
COMMIT = "NEMO_RL_COMMIT"  # in the image's environment, same Dockerfile; "<unknown>" where the build did not say
COMMIT_LABEL = "nemo-rl-e2e.nemo_rl"  # containers/Dockerfile
PULL_QUIET_S = 600  # between two events of a pull: extracting a layer of 10 GB is silent


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
