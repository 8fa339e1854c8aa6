"""An engine, the CI image on it, and what happens where there is none: skipped visibly, failed in CI."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from tasks.runtimes.docker import Docker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient

ROOT = Path(__file__).resolve().parent.parent.parent
CONTAINERS = ROOT / "containers"
HOST = os.environ.get("E2E_TEST_DOCKER_HOST") or os.environ.get("DOCKER_HOST") or ""
IN_CI = os.environ.get("CI") == "true"
REF = "nemo-rl-e2e/ci:latest"


def lacking(reason: str) -> NoReturn:
    """Skip, visibly; in CI fail."""
    if IN_CI:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def client() -> Iterator[DockerClient]:
    if not HOST:
        lacking("no engine: set E2E_TEST_DOCKER_HOST or DOCKER_HOST (.ci/engine.sh start DIR)")
    reason = Docker("none", host=HOST).available()
    if reason and reason.kind == "engine":
        lacking(reason.text)
    with Docker(host=HOST).client() as connected:
        yield connected


@pytest.fixture(scope="session")
def ci_image() -> Any:
    spec = importlib.util.spec_from_file_location("ci_image", CONTAINERS / "ci_image.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory, ci_image: Any) -> tuple[Path, str]:
    """Build the CI image's archive; return it and the ID that it promises."""
    out = tmp_path_factory.mktemp("image") / "ci.tar"
    try:
        return out, ci_image.build(out, REF)
    except FileNotFoundError as error:
        lacking(str(error))


@pytest.fixture(scope="session")
def image(client: DockerClient, archive: tuple[Path, str]) -> str:
    with archive[0].open("rb") as file:
        loaded = client.images.load(file.read())
    assert [one.id for one in loaded] == [archive[1]]
    return archive[1]
