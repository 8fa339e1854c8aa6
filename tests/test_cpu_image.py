"""The CPU environment as layers of an image, and as a job in it sees it; an engine for real is in tests/integration."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest

from tasks import cpu, cpu_image, image_pins, images
from tasks.errors import UserError
from tasks.files import sha256_json
from tasks.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable


def venv(home: Path, version: str = "3.11.7") -> Path:
    """Make what pip leaves behind, with the venv's path in its scripts."""
    top = home / "venv"
    site = top / "lib/python3.11/site-packages"
    for folder in (
        site / "torch-2.dist-info",
        site / "pybind11/include",
        site / "a/__pycache__",
        top / "bin",
        top / "include",
    ):
        folder.mkdir(parents=True)
    (top / "pyvenv.cfg").write_text(f"home = /somewhere\nversion = {version}\n")
    (top / "complete.json").write_text("{}")
    (top / "bin/python").symlink_to("/somewhere/python")
    (top / "bin/ray").write_text(f"#!{top}/bin/python\n")
    (top / "bin/ninja").write_bytes(b"\x7fELF\0" + os.fsencode(top))
    sha = hashlib.sha256((top / "bin/ray").read_bytes()).hexdigest()
    (site / "torch-2.dist-info/RECORD").write_text(f"a/x.py,sha256=1,1\n../../../bin/ray,sha256={sha},40\n")
    (site / "pybind11/include/p.h").write_text("x")
    (site / "a/x.py").write_text("x")
    (site / "a/__pycache__/x.pyc").write_text("x")
    return top


def text(what: Path | str | bytes) -> str:
    return what.decode() if isinstance(what, bytes) else what if isinstance(what, str) else what.read_text()


def test_the_packages_layer_has_no_path_of_this_machine_and_no_byte_code(tmp_path: Path) -> None:
    one, two = (cpu_image._packages(venv(tmp_path / name)) for name in ("one", "two"))
    assert one.keys() == two.keys()
    names = {name.removeprefix("opt/e2e-cpu/venv/") for name in one}
    site = "lib/python3.11/site-packages"
    assert names == {
        "pyvenv.cfg", "bin/python", "bin/python3", "bin/python3.11", "bin/ray", "bin/ninja", "lib64", f"{site}/a/x.py",
        f"{site}/torch-2.dist-info/RECORD", f"{site}/pybind11/include/p.h",
    }  # fmt: skip
    for name in names - {"bin/ninja"}:
        assert text(one[f"opt/e2e-cpu/venv/{name}"]) == text(two[f"opt/e2e-cpu/venv/{name}"]), name
        assert str(tmp_path) not in text(one[f"opt/e2e-cpu/venv/{name}"])
    assert text(one["opt/e2e-cpu/venv/bin/ray"]) == "#!/opt/e2e-cpu/venv/bin/python\n"
    assert text(one[f"opt/e2e-cpu/venv/{site}/torch-2.dist-info/RECORD"]) == "a/x.py,sha256=1,1\n../../../bin/ray,,\n"


def test_a_layer_is_the_same_bytes_wherever_and_whenever_the_venv_was_made(tmp_path: Path) -> None:
    digests = []
    for name in ("one", "two"):
        top = venv(tmp_path / name)
        (top / "bin/ninja").unlink()
        os.utime(top / "bin/ray", (1, len(digests)))
        cpu_image._recipe().write_layer(tmp_path / name / "l.tar", cpu_image._packages(top), 0, folders=())
        digests.append((tmp_path / name / "l.tar").read_bytes())
    assert digests[0] == digests[1]
    with tarfile.open(tmp_path / "one" / "l.tar") as tar:
        assert tar.getmember("opt/e2e-cpu/venv/bin/ray").mode == 0o755
        assert tar.getmember("opt/e2e-cpu/venv/pyvenv.cfg").mode == 0o644


def test_layers_that_hold_something_else_have_another_layout_number(tmp_path: Path) -> None:
    """The label of a pinned image says the number alone: count cpu_image.LAYOUT up, then correct the hash here."""
    top, recipe = venv(tmp_path), cpu_image._recipe()
    (top / "bin/ninja").unlink()
    built = dataclasses.replace(cpu_image.environment([]), data=tmp_path / "models/data")
    own = sorted({name if "/ray_venvs/" in name else name.split("/")[2] for name in cpu_image._standins(built)})
    recipe.write_layer(tmp_path / "layer.tar", cpu_image._packages(top), 0, folders=cpu_image.FOLDERS)
    held = [hashlib.sha256((tmp_path / "layer.tar").read_bytes()).hexdigest(), own, cpu_image.LIBRARIES]
    known = {1: "ee3388489af95e364ad27d45b68806b42cec41cdf101b0065eaab1985b2287c3"}
    assert {cpu_image.LAYOUT: sha256_json(held)} == known


@pytest.mark.parametrize("version", ["3.12.1", "3.13.0"])
def test_packages_of_another_python_than_debians_are_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(UserError, match=rf"is Python {version[:4]}, the image's Debian has 3.11"):
        cpu_image._packages(venv(tmp_path, version))


def test_an_archive_may_leave_out_layers_that_the_engine_has_and_keeps_its_id(tmp_path: Path) -> None:
    recipe, layers = cpu_image._recipe(), []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 700)
        layers.append((name * 64, tmp_path / name))
    whole, partial = recipe.archive(layers, "r:1", 0), recipe.archive([(layers[0][0], None), layers[1]], "r:1", 0)
    assert whole[0] == partial[0]
    for (identity, stream), expected in ((whole, ["a", "b"]), (partial, ["b"])):
        (tmp_path / "x.tar").write_bytes(b"".join(stream))
        with tarfile.open(tmp_path / "x.tar") as tar:
            names = tar.getnames()
            config: Any = json.load(tar.extractfile(names[0]))  # type: ignore[arg-type]
        assert f"sha256:{names[0].removesuffix('.json')}" == identity
        assert names[2:] == [f"{name * 64}/layer.tar" for name in expected]
        assert len(config["rootfs"]["diff_ids"]) == len(config["history"]) == 2


def test_an_attempt_in_a_container_names_paths_of_the_container_only(tmp_path: Path) -> None:
    inside = cpu_image.environment(["noisy", "noisy_qwen2"])
    made = cpu.environment(inside, tmp_path, gpus=2, standins=["vllm"], seen="/e2e/attempt")
    told = [*made.env.values(), *made.pythonpath, str(made.python)]
    assert not [word for word in told if str(tmp_path) in word or str(cpu.SOURCE) in word]
    assert made.env["HF_HOME"] == "/e2e/attempt/cpu/hf"
    assert made.env["RAY_TMPDIR"] == made.env["TMPDIR"] == "/tmp"
    assert made.env["PATH"].split(":")[:2] == ["/opt/e2e-cpu/bin", "/opt/e2e-cpu/venv/bin"]
    assert made.pythonpath[-1] == "/e2e/attempt/cpu/standins/vllm"
    assert (tmp_path / "cpu/standins/vllm").is_dir()
    link = next((tmp_path / "cpu/hf/hub").glob("*/snapshots/*"))
    assert os.readlink(link) == "/opt/e2e-cpu/models/models/noisy_qwen2"


class Store:
    """An engine's store: keeps what is loaded under the ID of its configuration, or calls it by something else."""

    def __init__(self, kind: str, name: str = "", layers: list[str] | None = None) -> None:
        self.kind, self.name, self.layers = kind, name, layers
        self.sent, self.images, self.loaded = list[str](), self, list[SimpleNamespace]()

    def info(self) -> dict[str, Any]:
        return {"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1" if self.kind == "containerd" else "x"]]}

    def version(self) -> dict[str, Any]:
        return {"Components": [{"Name": "Podman Engine" if self.kind == "podman" else "Engine"}]}

    def load(self, stream: Any) -> None:
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
            names = tar.getnames()
            config: Any = json.load(tar.extractfile(names[0]))  # type: ignore[arg-type]
        self.sent = [name for name in names if name.endswith("/layer.tar")]
        layers = self.layers or config["rootfs"]["diff_ids"]
        identity = self.name or f"sha256:{names[0].removesuffix('.json')}"
        self.loaded.append(SimpleNamespace(id=identity, attrs={"RootFS": {"Layers": layers}}))

    def get(self, _: str) -> SimpleNamespace:
        return self.loaded[-1]

    def list(self, **_: object) -> list[SimpleNamespace]:
        return self.loaded


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    (tmp_path / "debian.tar").write_bytes(b"d" * 10240)
    monkeypatch.setattr(cpu_image, "_base", lambda *_: tmp_path / "debian.tar")
    top = venv(tmp_path / "made")
    (tmp_path / "models/data").mkdir(parents=True)
    built = dataclasses.replace(
        cpu_image.environment(["noisy"]), python=top / "bin/python", data=tmp_path / "models/data"
    )
    return lambda store: cpu_image._make(tmp_path, built, store, lambda _: None)


def test_the_image_has_one_id_however_often_it_is_written_and_known_layers_are_not_sent_again(
    write: Callable[[Any], str],
) -> None:
    store, other = Store("docker"), Store("docker")
    first = write(store)
    assert (write(other), len(other.sent)) == (first, 3)
    assert (write(store), len(store.sent)) == (first, 1)


@pytest.mark.parametrize("kind", ["containerd", "podman"])
def test_engines_that_want_every_layer_get_it_and_may_call_the_image_by_its_manifest(
    write: Callable[[Any], str], kind: str
) -> None:
    store = Store(kind, name="sha256:manifest")
    assert [write(store), write(store)] == ["sha256:manifest"] * 2
    assert len(store.sent) == 3


def test_an_image_with_other_layers_than_were_sent_is_refused(write: Callable[[Any], str]) -> None:
    with pytest.raises(UserError, match="the engine made sha256:x out of the CPU image"):
        write(Store("docker", name="sha256:x", layers=["sha256:1"]))


class Pinned:
    """An engine on which the user's image has these labels."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels, self.images = labels, self

    def client(self) -> Pinned:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def get(self, _: str) -> Pinned:
        return self


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> image_pins.Image:
    image = image_pins.Image("r@sha256:1", "sha256:1", "sha256:2", None, None)
    monkeypatch.setattr(images, "resolve", lambda *_, **__: image)
    return image


def test_a_pinned_cpu_image_is_used_only_with_this_checkouts_stand_ins(resolved: image_pins.Image) -> None:
    settings = load({"image": "r@sha256:1"}, environ={})
    good = {cpu_image.LABEL: cpu_image.digest(), cpu_image.MODELS_LABEL: '["noisy"]'}
    ask: Any = cpu_image._pinned
    assert ask(settings, Pinned(good), print) == (resolved, ("noisy",))
    assert ask(settings, Pinned({}), print) is None, "the levels' image"
    with pytest.raises(UserError, match="made from other stand-ins"):
        ask(settings, Pinned({**good, cpu_image.LABEL: "0" * 64}), print)


def test_the_label_follows_the_stand_ins(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = cpu_image.digest(tmp_path)
    (tmp_path / "a").write_text("2")
    assert cpu_image.digest(tmp_path) != first
