"""An engine, the CI image on it, and what happens where there is none: skipped visibly, failed in CI."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from tasks.runtimes.docker import Docker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def until(look: Callable[[], Any], seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


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


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    program = shutil.which("docker-registry")
    if not program:
        lacking("docker-registry is not installed (apt-get install docker-registry)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {tmp_path / 'registry'}}}}}\n"
        f"http: {{addr: '{address}'}}\n"
    )
    with (tmp_path / "registry.log").open("wb") as log:
        process = subprocess.Popen([program, "serve", config], stdout=log, stderr=log)

    def up() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(address.split(":"), 1):  # type: ignore[arg-type]
            return True
        return False

    try:
        until(up)
        yield address
    finally:
        process.terminate()
        process.wait(10)
