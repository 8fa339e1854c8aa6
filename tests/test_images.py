"""Pins, references and environments as data; a registry and an engine for real are in tests/integration."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import sys
import tarfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from docker.errors import ImageNotFound

from tasks import container_image, files
from tasks.container_image import commit_inside
from tasks.errors import UserError
from tasks.image_pins import Image, Reference, load_pins, parse_reference
from tasks.images import describe_interpreter, resolve
from tasks.runtimes import choose
from tasks.runtimes.docker import Docker
from tasks.settings import Settings

CONTAINERS = Path(__file__).resolve().parent.parent / "containers"
A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("nemo-rl", ("nemo-rl", "latest", None)),
        ("app:1", ("app", "1", None)),
        ("nvcr.io/nvidia/nemo-rl:v0.5.0", ("nvcr.io/nvidia/nemo-rl", "v0.5.0", None)),
        ("127.0.0.1:5055/t/app", ("127.0.0.1:5055/t/app", "latest", None)),
        ("127.0.0.1:5055/t/app:1", ("127.0.0.1:5055/t/app", "1", None)),
        (f"host:5000/a@{A}", ("host:5000/a", None, A)),
        (f"a/b:tag@{A}", ("a/b", "tag", A)),
    ],
)
def test_references_are_taken_apart(text: str, parts: tuple[str, str | None, str | None]) -> None:
    assert parse_reference(text) == Reference(*parts)


@pytest.mark.parametrize(
    "text", ["", "Upper/Case", "a b", "a@sha256:12", "a:", "/a", "a//b", "-v", "a:b:c", "ä", "a@" + A + "0"]
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not an image reference"):
        parse_reference(text)


def test_the_shipped_pins_are_sound_and_name_public_registries_only() -> None:
    pins = load_pins()
    assert len(pins) >= 3
    for pin in pins.values():
        assert pin.reference is None or pin.reference.startswith("nvcr.io/nvidia/nemo-rl:")
        assert pin.verified_by is None or pin.digest


def pins_file(folder: Path, text: str) -> Path:
    path = folder / "images.yaml"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("images: {}\n", "1: schema must be 1"),
        ("schema: 2\nimages: {}\n", "1: schema must be 1"),
        ("schema: 1\n", "a mapping is expected"),
        ("schema: 1\nimages:\n  a:\n    referense: x\n", "4: unknown key 'referense'; did you mean 'reference'"),
        ("schema: 1\nimages:\n  a: 3\n", "3: a mapping is expected"),
        ("schema: 1\nimages:\n  a:\n    digest: sha256:12\n", "4: a: digest must be sha256: and 64"),
        (f"schema: 1\nimages:\n  a:\n    reference: x@{A}\n", "4: a: reference must be repo:tag"),
        ("schema: 1\nimages:\n  a:\n    nemo_rl: 1234567\n", "4: a: nemo_rl must be text: put it into quotes"),
        ("schema: 1\nimages:\n  a:\n    nemo_rl: main\n", "4: a: nemo_rl must be a commit"),
        ("schema: 1\nimages:\n  a: {}\n  a: {}\n", "4: key 'a' twice"),
        ("schema: [\n", "not YAML"),
    ],
)
def test_mistakes_in_the_pins_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = pins_file(tmp_path, text)
    with pytest.raises(UserError) as caught:
        load_pins(path)
    assert f"{path}:" in str(caught.value)
    assert message in str(caught.value)


PINS = f"""
    schema: 1
    images:
      open: {{reference: "nvcr.io/nvidia/nemo-rl:v1", digest: null}}
      hidden: {{reference: null, note: Look elsewhere.}}
      good: {{reference: "host:5000/app:1", digest: "{A}", nemo_rl: abcdef1234}}
"""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (None, r"no image named: set NEMO_RL_IMAGE or image=REF; names in .*: open, hidden, good"),
        ("open", r"has no digest for nvcr.io/nvidia/nemo-rl:v1 yet. Run `doit image update open`"),
        ("hidden", r"its reference is not public, give it with image=REF. Look elsewhere."),
    ],
)
def test_names_that_cannot_be_resolved_say_what_to_do(tmp_path: Path, setting: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        container_image.resolve_container(setting, Docker(host="unix:///none"), pins=pins_file(tmp_path, PINS))


def test_without_an_engine_the_error_names_it_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"image=app:1: docker at unix://.*Start the engine"):
        container_image.resolve_container("app:1", Docker(host=f"unix://{tmp_path}/none.sock"))


class Engine:
    """A scripted engine and registry: `local` name -> (id, RepoDigests), `remote` tag -> digest."""

    def __init__(
        self, local: dict[str, tuple[str, list[str]]], remote: dict[str, str], env: list[str] | None = None
    ) -> None:
        self.local, self.remote, self.env = local, remote, env or []
        self.asked: list[str] = []
        self.images, self.containers, self.api = self, self, self
        self.timeout = 60

    def get(self, name: str) -> Any:
        if name not in self.local:
            raise ImageNotFound(name)
        identity, digests = self.local[name]
        made: Any = type(
            "Found",
            (),
            {"id": identity, "tag": lambda _, repo, tag: self.local.update({f"{repo}:{tag}": self.local[name]})},
        )()
        made.attrs = {"RepoDigests": digests, "Config": {"Env": self.env}}
        return made

    def get_registry_data(self, tag: str) -> Any:
        from docker.errors import APIError

        self.asked.append(tag)
        if tag not in self.remote:
            raise APIError("connection refused")
        return type("Data", (), {"id": self.remote[tag]})()

    def pull(self, repo: str, tag: str, **_: Any) -> list[dict[str, Any]]:
        self.local[f"{repo}@{tag}"] = (f"id-of-{tag[-1]}", [f"{repo}@{tag}"])
        return [
            {"status": "Downloading", "id": "l1", "progressDetail": {"current": 5, "total": 9}},
            {"status": "Download complete", "id": "l1"},
        ]

    def create(self, *_: Any, **__: Any) -> Any:
        from docker.errors import NotFound

        def nothing(_: Any, path: str) -> None:
            raise NotFound(path)

        return type("Container", (), {"get_archive": nothing, "remove": lambda *_, **__: None})()

    def close(self) -> None:
        return


def locate(engine: Engine, setting: str, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Image:
    import contextlib

    runtime = Docker(host="unix:///fake.sock")
    monkeypatch.setattr(runtime, "client", lambda: contextlib.closing(engine))
    return container_image.resolve_container(setting, runtime, progress=lambda _: None, **keys)


def test_two_digests_of_one_repository_are_told_apart_by_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    other = f"elsewhere/app@{B}"
    engine = Engine({"app:1": ("i", [other, f"app@{A}", f"app@{B}"])}, {"app:1": B})
    assert locate(engine, "app:1", monkeypatch).digest == B
    engine.remote.clear()
    offline = locate(engine, "app:1", monkeypatch)
    assert (offline.id, "unknown" in offline.notes[0]) == ("i", True)


def test_an_image_made_here_is_its_id_and_no_registry_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine({"app:1": ("i", [f"elsewhere/app@{B}"])}, {"app:1": A})
    found = locate(engine, "app:1", monkeypatch)
    assert (found.id, found.digest, engine.asked) == ("i", None, [])


def test_a_moved_tag_is_followed_with_a_note_and_never_used_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine({"app:1": ("old", [f"app@{A}"])}, {"app:1": B})
    found = locate(engine, "app:1", monkeypatch)
    assert (found.id, found.digest) == ("id-of-b", B)
    assert found.notes == (f"app:1 moved from {A} to {B}; the new image is used.",)
    assert locate(engine, "app:1", monkeypatch).notes == ()


def test_a_pinned_image_that_is_present_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine({f"app@{A}": ("i", [f"app@{A}"])}, {})
    assert locate(engine, f"app@{A}", monkeypatch, require_pinned=True).id == "i"
    assert engine.asked == []
    assert locate(engine, f"app:1@{A}", monkeypatch).notes == ()  # the registry is down: the pin holds all the same


def test_a_pin_whose_commit_contradicts_the_image_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = pins_file(tmp_path, PINS)
    here = {f"host:5000/app:1@{A}": ("x", [])} | {f"host:5000/app@{A}": ("i", [])}
    agreed = Engine(here, {}, ["NEMO_RL_COMMIT=abcdef1234" + "0" * 30])
    assert locate(agreed, "good", monkeypatch, pins=pins).nemo_rl_sha == "abcdef1234" + "0" * 30
    assert locate(Engine(here, {}), "good", monkeypatch, pins=pins).nemo_rl_sha == "abcdef1234"
    with pytest.raises(UserError, match="correct the pin"):
        locate(Engine(here, {}, ["NEMO_RL_COMMIT=" + "0" * 40]), "good", monkeypatch, pins=pins)


@pytest.mark.parametrize(
    ("config", "commit"),
    [
        ({}, None),
        ({"Env": None, "Labels": None}, None),
        ({"Env": ["NEMO_RL_COMMIT=<unknown>"]}, None),
        ({"Env": ["A=1", "NEMO_RL_COMMIT=abcdef1"]}, "abcdef1"),
        ({"Labels": {"nemo-rl-e2e.nemo_rl": "abcdef2"}}, "abcdef2"),
    ],
)
def test_the_commit_is_read_from_the_images_configuration(config: dict[str, Any], commit: str | None) -> None:
    assert commit_inside(config) == commit


# interpreters


@pytest.fixture
def interpreter(tmp_path: Path) -> tuple[Path, Path]:
    """Return an interpreter with one distribution, and its site-packages."""
    site = tmp_path / "lib" / "site-packages"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\necho asked >> {tmp_path}/asked\nPYTHONPATH={site} exec "{sys.executable}" -S "$@"\n'
    )
    python.chmod(0o755)
    install(site, "torch", "2.13.0")
    return python, site


def install(site: Path, name: str, version: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_an_interpreters_environment_is_its_distributions_and_is_asked_for_once(
    tmp_path: Path, interpreter: tuple[Path, Path]
) -> None:
    python, site = interpreter
    cache = tmp_path / "cache.json"
    first = describe_interpreter(python, cache)
    expected = {"python": ".".join(map(str, sys.version_info[:3])), "distributions": [["torch", "2.13.0"]]}
    assert first.id == f"sha256:{files.sha256_json(expected)}"
    assert first.ref.endswith(", 1 distributions")
    assert describe_interpreter(python, cache) == first
    assert (tmp_path / "asked").read_text() == "asked\n"
    install(site, "vllm", "0.25.1")
    second = describe_interpreter(python, cache)
    assert second.id != first.id
    assert (tmp_path / "asked").read_text() == "asked\nasked\n"


def test_a_damaged_cache_of_interpreters_is_no_obstacle(tmp_path: Path, interpreter: tuple[Path, Path]) -> None:
    cache = tmp_path / "cache.json"
    for text in ("", "[]", "{", '{"x": 1}'):
        cache.write_text(text)
        assert describe_interpreter(interpreter[0], cache).id.startswith("sha256:")


@pytest.mark.parametrize(
    "script", ["#!/bin/bash\nexit 3\n", "#!/bin/bash\necho no json\n", ""], ids=["fails", "babbles", "empty"]
)
def test_an_interpreter_that_cannot_be_asked_is_a_users_error(tmp_path: Path, script: str) -> None:
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o755)
    with pytest.raises(UserError, match="cannot be asked for its packages"):
        describe_interpreter(python)
    with pytest.raises(UserError, match="No such file"):
        describe_interpreter(tmp_path / "missing")


def test_the_local_runtime_is_described_by_its_interpreter(tmp_path: Path, interpreter: tuple[Path, Path]) -> None:
    settings = Settings(build=tmp_path / "build", levels=tmp_path, python=interpreter[0])
    found = resolve(settings, choose("local"))
    assert found.digest is None
    assert json.dumps(found.as_dict()) == json.dumps(dataclasses.replace(found, notes=("a moment's note",)).as_dict())


# the CI image


def ci_image() -> Any:
    spec = importlib.util.spec_from_file_location("ci_image", CONTAINERS / "ci_image.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_archive_depends_on_content_and_epoch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ci_image()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_text("x")
    monkeypatch.setattr(module, "_host_content", lambda _: {"etc/passwd": b"root", "bin/sh": "busybox"})

    def build(name: str) -> tuple[str, bytes]:
        identity = module.build(tmp_path / name, "a/b:1", trees=[(tmp_path / "tree", "/opt/t")])
        return identity, (tmp_path / name).read_bytes()

    first, second = build("1.tar"), build("2.tar")
    assert first == second
    with tarfile.open(tmp_path / "1.tar") as tar:
        manifest = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = tar.extractfile(manifest[0]["Config"]).read()  # type: ignore[union-attr]
        assert first[0] == f"sha256:{hashlib.sha256(config).hexdigest()}"
        with tarfile.open(fileobj=tar.extractfile(manifest[0]["Layers"][0])) as layer:
            assert {"opt/t/f", "bin/sh", "e2e/agent", "tmp"} <= set(layer.getnames())
            assert all(member.mtime == 0 and member.uid == 0 for member in layer)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1735689600")
    assert build("3.tar")[0] != first[0]
    (tmp_path / "tree" / "f").write_text("y")
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert build("4.tar")[0] != first[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.tar", "2.tar", "3.tar", "4.tar", "tree"]
