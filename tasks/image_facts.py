"""What an image is made of: layers with their sizes, and a bill of materials (CycloneDX) from what is inside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tasks.errors import UserError
from tasks.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker import DockerClient

PROGRAM = ROOT / "containers" / "sbom.py"
OUT = "/e2e-sbom.json"
LISTING_BYTES = 64 << 20
LISTING_S = 900  # an image of 50 GB has a million files


def layers(client: DockerClient, identity: str) -> list[dict[str, Any]]:
    """Return the layers from the base up: bytes, the instruction that made it (first line), tags."""
    found = client.images.get(identity).history()
    return [
        {"bytes": int(one["Size"]), "by": " ".join(str(one["CreatedBy"]).split())[:200], "tags": one.get("Tags") or []}
        for one in reversed(found)
    ]


def bill_of_materials(client: DockerClient, identity: str) -> dict[str, Any]:
    """Return a CycloneDX document of the image, asked of its own python3 in a container without a network.

    UserError where the image has no python3 or the listing fails.
    """
    from docker.errors import DockerException

    from tasks.runtimes.container import LABEL, read_file, said
    from tasks.runtimes.job import this_owner

    usual, client.api.timeout = client.api.timeout, LISTING_S
    container = client.containers.create(
        identity, ["-c", PROGRAM.read_text(encoding="utf-8"), "/", OUT], entrypoint=["python3"], network_mode="none",
        user="0:0", labels={LABEL: "1", f"{LABEL}.owner": str(this_owner())},
    )  # fmt: skip
    try:
        container.start()
        rc = container.wait()["StatusCode"]
        if rc:
            last = container.logs(tail=1).decode("utf-8", "replace").strip()
            raise UserError(f"{identity[:19]} cannot list its packages: python3 ended with {rc}: {last}")
        listed = json.loads(read_file(container, OUT, LISTING_BYTES))  # a log may be late or empty, a file is not
    except (DockerException, ValueError) as error:
        raise UserError(f"{identity[:19]} cannot list its packages: {said(error)}") from error
    finally:
        client.api.timeout = usual
        container.remove(force=True, v=True)
    return cyclonedx(listed, identity)


def cyclonedx(listed: Mapping[str, Any], identity: str) -> dict[str, Any]:
    """Return the listing of containers/sbom.py as a CycloneDX 1.5 document; pure, the same for the same image."""
    components: dict[str, dict[str, Any]] = {}
    for name, version, architecture in listed["debian"]:
        purl = f"pkg:deb/debian/{name}@{version}?arch={architecture}"
        components[purl] = {"type": "library", "name": name, "version": version, "purl": purl}
    for name, version, licence, folder in listed["python"]:
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version}"
        one = components.setdefault(purl, {"type": "library", "name": name, "version": version, "purl": purl})
        if licence:
            one["licenses"] = [{"license": {"name": licence}}]
        one.setdefault("properties", []).append({"name": "folder", "value": folder})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": identity}},
        "components": [components[purl] for purl in sorted(components)],
    }
