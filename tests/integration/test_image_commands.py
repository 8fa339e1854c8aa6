"""`doit image build`, `image=build`, `show` and `update` on a real engine, builder and registry."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tasks import container_image, image_build, image_commands, image_pins, image_update, images, settings
from tasks.errors import UserError
from tasks.runtimes.docker import Docker
from tests.conftest import run_git
from tests.integration.conftest import HOST, REF

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from docker import DockerClient

pytestmark = pytest.mark.docker

DOCKERFILE = f"""\
ARG BASE_IMAGE={REF}
FROM ${{BASE_IMAGE}} AS base
ARG FLAVOUR=plain
COPY pyproject.toml uv.lock /opt/src/
COPY --chown=0:0 tools/ /opt/src/tools/
RUN echo $FLAVOUR > /opt/flavour; echo '{{"uv.lock": "x"}}' > /opt/nemo_rl_container_fingerprint
FROM base AS release
ARG NEMO_RL_COMMIT
ENV NEMO_RL_COMMIT=${{NEMO_RL_COMMIT}}
FROM base AS cache
COPY README.md /
"""
# the shape of NeMo-RL's own: a stage that the checkout replaces, a here-document, --mount, --link, stages after release
MODERN = f"""\
ARG BASE_IMAGE={REF}
FROM scratch AS nemo-rl
ADD --keep-git-dir=true https://example.invalid/RL.git#main /
FROM ${{BASE_IMAGE}} AS base
RUN <<"EOF" bash -exu
echo hello >/opt/hello
EOF
FROM base AS release
COPY --from=nemo-rl --link tools/ /opt/src/tools/
RUN --mount=type=cache,target=/root/.cache cat /opt/src/tools/generate_fingerprint.py
COPY --from=nemo-rl . /opt/nemo-rl
FROM scratch AS export
COPY --from=base /opt/hello /
"""
BUILDX = subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode == 0
BUILDER = "buildx" if BUILDX else "classic"


class Checkout:
    """A NeMo-RL with a Dockerfile for the classic builder, and doit's image commands on it."""

    def __init__(self, repo: Path, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_HOST", HOST)
        self.repo, self.build = repo, build

    def settings(self, **variables: str) -> settings.Settings:
        given = {"nemo_rl": str(self.repo), "build": str(self.build), **variables}
        return settings.load(given, environ={})

    def run(self, *words: str, **variables: str) -> int:
        return image_commands.main(words, self.settings(**variables))

    def provenance(self) -> tuple[Path, Any]:
        """Return folder and content of the only build's provenance."""
        (path,) = self.build.glob("images/*/provenance.json")
        return path.parent, json.loads(path.read_text())

    def wanted(self) -> str:
        return image_build.wanted(self.settings(), Docker(host=HOST))


@pytest.fixture
def checkout(image: str, make_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    files = {
        "docker/Dockerfile": DOCKERFILE, "pyproject.toml": "a", "uv.lock": "b", "tools/generate_fingerprint.py": "print('{}')",
        "README.md": "c", "nemo_rl/x.py": "",
    }  # fmt: skip
    return Checkout(make_repo("RL", files), tmp_path / "build", monkeypatch)


def test_an_image_is_built_once_for_its_inputs_and_stale_exactly_when_they_change(
    checkout: Checkout, client: DockerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="nothing was built yet"):
        checkout.wanted()
    assert checkout.run("build", args="FLAVOUR=nuts") == 0
    told = capsys.readouterr().out
    assert "Result: Pass" in told
    assert re.search(r"MB  .*FLAVOUR", told), told
    identity = checkout.wanted()
    found = client.images.get(identity)
    head = run_git(checkout.repo, "rev-parse", "HEAD").strip()
    assert container_image.commit_inside(found.attrs["Config"]) == head
    assert client.containers.run(identity, ["cat", "/opt/flavour"], remove=True, network_mode="none") == b"nuts\n"
    folder, made = checkout.provenance()
    assert (made["id"], made["target"], made["nemo_rl"], made["builder"]) == (identity, "release", head, BUILDER)
    assert {"file pyproject.toml", "file tools/generate_fingerprint.py", f"base {REF}"} < set(made["inputs"])
    assert "file README.md" not in made["inputs"], "only the cache stage copies it"
    bill = json.loads((folder / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert checkout.run("build", args="FLAVOUR=nuts") == 0
    assert checkout.provenance()[1] == made, "nothing changed: not built again"
    # what the target does not take leaves it fresh; what it takes makes it stale by name
    (checkout.repo / "README.md").write_text("d")
    (checkout.repo / "nemo_rl/x.py").write_text("y")
    assert checkout.wanted() == identity
    for name in ("uv.lock", "docker/Dockerfile", "tools/more.sh"):
        path = checkout.repo / name
        old = path.read_text() if path.exists() else None
        path.write_text((old or "") + "\n")
        with pytest.raises(UserError, match=rf"not built for these inputs \(file {name}\); run `doit image build`"):
            checkout.wanted()
        path.write_text(old) if old is not None else path.unlink()
    assert checkout.wanted() == identity
    # a name alone is no proof: another image under it is not taken
    client.images.get(REF).tag(*made["tag"].split(":"))
    with pytest.raises(UserError, match="not built for these inputs"):
        checkout.wanted()


def test_what_is_used_and_shown_is_the_built_image_and_how_it_fits(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkout.run("build") == 0
    capsys.readouterr()
    used = images.resolve(checkout.settings(image="build"), Docker(host=HOST), progress=lambda _: None)
    assert used.id == checkout.wanted()
    assert checkout.run("show", "build", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["bytes"] > 0
    assert [(d["key"], d["matters"]) for d in shown["differences"]] == [("uv.lock", True)]
    run_git(checkout.repo, "commit", "-q", "--allow-empty", "-m", "two")
    assert checkout.run("show", used.id) == 0
    assert "no matter: the image was built from NeMo-RL" in capsys.readouterr().out


def test_a_failing_build_is_a_users_error_with_the_builders_last_lines(checkout: Checkout) -> None:
    (checkout.repo / "docker/Dockerfile").write_text(
        DOCKERFILE.replace("RUN echo", "RUN echo gone wrong; exit 7; echo")
    )
    with pytest.raises(UserError, match="(?s)the build ended with.*(non-zero|exit) code: 7"):
        checkout.run("build")
    (checkout.repo / "docker/Dockerfile").write_text(
        DOCKERFILE.replace("RUN echo", "RUN --mount=type=cache,target=/x echo")
    )
    if BUILDER == "classic":
        with pytest.raises(UserError, match="needs BuildKit .--mount=., and docker buildx is not installed"):
            checkout.run("build")
    with pytest.raises(UserError, match="no such stage"):
        checkout.run("build", target="nope")
    with pytest.raises(
        UserError, match="args=FLAVOR: write NAME=VALUE, with a name of the Dockerfile's: BASE_IMAGE, FLA"
    ):
        checkout.run("build", args="FLAVOR=x")


@pytest.mark.skipif(not BUILDX, reason="no docker buildx (Debian 12 has none): tried by hand with Debian 13's")
def test_a_dockerfile_like_nemo_rls_takes_the_checkout_and_nothing_from_the_network(
    checkout: Checkout, client: DockerClient
) -> None:
    (checkout.repo / "docker/Dockerfile").write_text(MODERN)
    (checkout.repo / "nemo_rl/x.py").write_text("edited")
    assert checkout.run("build") == 0
    told = client.containers.run(
        checkout.wanted(), ["cat", "/opt/hello", "/opt/nemo-rl/nemo_rl/x.py"], remove=True, network_mode="none"
    )
    assert told == b"hello\nedited"
    (checkout.repo / "nemo_rl/x.py").write_text("again")
    with pytest.raises(UserError, match="file nemo_rl/x.py"):
        checkout.wanted()


def test_a_new_pin_is_proposed_as_a_diff_and_written_on_request(
    client: DockerClient, image: str, registry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.integration.test_docker import _variant

    path, told, engine = tmp_path / "images.yaml", list[str](), Docker(host=HOST)
    path.write_text(f"# head\nschema: 1\nimages:\n  rl:\n    reference: {registry}/t/rl:v1\n    digest: null\n")
    sha = "3b04247b78c69ed4c447204aad0d1e3215b0a083"
    digest = _variant(client, image, f"{registry}/t/rl:v1", f"ENV NEMO_RL_COMMIT={sha}")
    before = path.read_text()

    def update(name: str | None = "rl", **keys: bool) -> int:
        return image_update.update(engine, name, path=path, say=told.append, **keys)

    assert update() == 0
    assert f"+    digest: {digest}\n" in capsys.readouterr().out
    assert path.read_text() == before
    assert update(apply=True) == 0
    pin = image_pins.load_pins(path)["rl"]
    assert (pin.digest, pin.nemo_rl) == (digest, sha), "the image that is here says its commit itself"
    assert path.read_text().startswith("# head\n")
    assert container_image.resolve_container("rl", engine, pins=path, require_pinned=True).digest == digest
    assert update() == 0
    assert told[-2:] == [f"rl: {registry}/t/rl:v1 is {digest} as pinned", "Result: Pass - nothing to change"]
    # the tag moves to an image that is not here: its commit is unknown, and the old one is not carried over
    second = _variant(client, image, f"{registry}/t/rl:v1", f"ENV NEMO_RL_COMMIT={'0' * 40}")
    client.images.remove(f"{registry}/t/rl:v1")
    capsys.readouterr()
    assert update(None, apply=True) == 0
    assert {f"-    digest: {digest}", f"+    digest: {second}"} < set(capsys.readouterr().out.splitlines())
    assert image_pins.load_pins(path)["rl"].nemo_rl in (None, "0" * 40)
    path.write_text(path.read_text().replace(":v1", ":v9"))
    assert update() == 2
    assert "manifest unknown" in told[-2]
