"""The CPU environment: what is built once, and what an attempt gets for itself.

No package is installed here: `python` and `pip` are played by small scripts. Real installation and real runs: tests/real.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import cpu, cpu_build
from tasks.errors import UserError

Calls = Callable[[], list[str]]  # steps that were really run, in order
BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()

FAKE_PYTHON = """#!{base}
import os, pathlib, sys
log = pathlib.Path({log!r})
with log.open("a") as out:
    print(" ".join(sys.argv[1:]), file=out)
args = sys.argv[1:]
if args[:1] == ["-c"]:
    print({version!r} if "sys.version" in args[1] else "2.13.0+cpu")
    sys.exit(0 if "sys.version" in args[1] else int(os.environ.get("FAKE_TORCH", "0")))
if args[:2] == ["-m", "venv"]:
    bin = pathlib.Path(args[-1]) / "bin"
    bin.mkdir(parents=True)
    (bin / "python").write_text(pathlib.Path(sys.argv[0]).read_text())
    (bin / "python").chmod(0o755)
elif args[:2] == ["-m", "pip"]:
    fds = pathlib.Path("/proc/self/fd")
    targets = [os.readlink(fd) for fd in fds.iterdir() if fd.is_symlink()]
    print("pip holds the lock:", any(t.endswith("/build/lock") for t in targets), file=log.open("a"))
    print("Collecting torch==2.13.0")
    print("ERROR: no space left on device" if os.environ.get("FAKE_PIP") else "Installing collected packages: torch")
    sys.exit(int(os.environ.get("FAKE_PIP", "0")))
else:
    out = pathlib.Path(args[1])
    for name in ("trained", "noisy", "noisy_qwen2"):
        (out / "models" / name).mkdir(parents=True)
        (out / "models" / name / "config.json").write_text("{{}}")
    (out / "data").mkdir()
    print("trained: step 100/500, loss 0.5")
"""


def fake_python(tmp_path: Path, version: str) -> str:
    return FAKE_PYTHON.format(base=BASE, log=str(tmp_path / "calls"), version=version)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


def make_source(folder: Path) -> Path:
    for name, text in {
        "requirements.txt": "# comment\ntorch==2.13.0\nray==2.60.0\n",
        "make_models.py": "# recipe\n",
        "shim/sitecustomize.py": "",
        "standins/vllm/vllm/__init__.py": "",
        "standins/vllm/vllm/v1/executor/ray_executor.py": "anchor\n",
        "standins/flash_attn/flash_attn/__init__.py": "",
        "standins/flashinfer/flashinfer/__init__.py": "",
        "bin/uv": "#!/bin/sh\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return make_python(tmp_path)


def make_python(tmp_path: Path) -> Path:
    path = tmp_path / "python3.11"
    path.write_text(fake_python(tmp_path, "3.11.7 (main)"))
    path.chmod(0o755)
    return path


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    def read() -> list[str]:
        lines = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
        names = {"venv": "-m venv", "pip": "-m pip", "models": "make_models.py"}
        return [name for line in lines for name, mark in names.items() if mark in line]

    return read


def build(tmp_path: Path, source: Path, python: Path, lines: list[str] | None = None) -> cpu.CpuEnvironment:
    return cpu.build(tmp_path / "build", (lines if lines is not None else []).append, source=source, python=python)


def test_second_build_does_nothing_and_says_nothing(tmp_path: Path, source: Path, python: Path, calls: Calls) -> None:
    first_lines: list[str] = []
    first = build(tmp_path, source, python, first_lines)
    assert calls() == ["venv", "pip", "models"]
    assert any("2 packages" in line for line in first_lines)
    assert any("step 100/500" in line for line in first_lines)
    again: list[str] = []
    assert build(tmp_path, source, python, again) == first
    assert again == []
    assert calls() == ["venv", "pip", "models"]


@pytest.mark.parametrize(
    ("changed", "repeated"),
    [
        ("shim/sitecustomize.py", []),
        ("standins/vllm/vllm/__init__.py", []),
        ("make_models.py", ["models"]),
        ("requirements.txt", ["venv", "pip", "models"]),
    ],
)
def test_an_edit_repeats_only_what_is_made_from_it(
    tmp_path: Path, source: Path, python: Path, calls: Calls, changed: str, repeated: list[str]
) -> None:
    before = build(tmp_path, source, python)
    (source / changed).write_text((source / changed).read_text() + "extra==1\n")
    after = build(tmp_path, source, python)
    assert calls()[3:] == repeated
    assert after.digest != before.digest
    assert after.pythonpath != before.pythonpath  # a frozen copy each: a run in progress keeps its own


def test_a_comment_in_the_pins_installs_nothing_again(tmp_path: Path, source: Path, python: Path, calls: Calls) -> None:
    build(tmp_path, source, python)
    (source / "requirements.txt").write_text("# other words\ntorch==2.13.0\nray==2.60.0\n")
    build(tmp_path, source, python)
    assert calls() == ["venv", "pip", "models"]


def test_digest_sees_content_mode_and_python(source: Path, python: Path, tmp_path: Path) -> None:
    first = cpu.digest(source, python)
    (source / "bin/uv").chmod(0o755)
    second = cpu.digest(source, python)
    other = tmp_path / "other"
    other.write_text(fake_python(tmp_path, "3.12.1"))
    other.chmod(0o755)
    assert len({first, second, cpu.digest(source, other)}) == 3
    (source / "shim/__pycache__").mkdir()
    (source / "shim/__pycache__/x.pyc").write_text("")
    assert cpu.digest(source, python) == second


@pytest.mark.parametrize("left", ["venv", "models"])
def test_what_an_interrupted_step_left_is_not_believed(
    tmp_path: Path, source: Path, python: Path, calls: Calls, left: str
) -> None:
    build(tmp_path, source, python)
    folder = next((tmp_path / "build").glob(f"{left}-*"))
    (folder / "complete.json").unlink()
    (folder / "half").write_text("")
    assert cpu.ready(tmp_path / "build", source=source, python=python) is None
    build(tmp_path, source, python)
    assert not (folder / "half").exists()
    assert calls()[3:] == {"venv": ["venv", "pip"], "models": ["models"]}[left]


def test_failed_pip_is_an_error_with_its_last_lines_and_is_tried_again(
    tmp_path: Path, source: Path, python: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PIP", "1")
    with pytest.raises(UserError, match=r"(?s)pip install ended with 1.*no space left on device"):
        build(tmp_path, source, python)
    assert cpu.ready(tmp_path / "build", source=source, python=python) is None
    monkeypatch.delenv("FAKE_PIP")
    build(tmp_path, source, python)
    assert calls() == ["venv", "pip", "venv", "pip", "models"]


@pytest.mark.parametrize(("code", "said"), [("3", "a CUDA build; .*PIP_EXTRA_INDEX_URL"), ("1", "cannot be imported")])
def test_packages_that_cannot_serve_are_refused(
    tmp_path: Path, source: Path, python: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setenv("FAKE_TORCH", code)
    with pytest.raises(UserError, match=said):
        build(tmp_path, source, python)
    assert cpu.ready(tmp_path / "build", source=source, python=python) is None


def test_python_outside_the_range_is_refused(tmp_path: Path, source: Path, python: Path) -> None:
    python.write_text(fake_python(tmp_path, "3.10.13"))
    with pytest.raises(UserError, match=r"3\.10; the CPU environment needs 3\.11"):
        build(tmp_path, source, python)


def test_second_builder_waits_says_so_and_gives_up_in_time(tmp_path: Path) -> None:
    lines: list[str] = []
    with (
        cpu_build.locked(tmp_path / "lock", lines.append),
        pytest.raises(UserError, match="another process has held"),
        cpu_build.locked(tmp_path / "lock", lines.append, timeout_s=0.0),
    ):
        pass
    with cpu_build.locked(tmp_path / "lock", lines.append, timeout_s=0.0):
        pass


def test_two_builders_at_once_make_everything_once(
    tmp_path: Path, source: Path, python: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-ins, too: to freeze them again would pull them from under the run that the first builder started."""
    frozen: list[Path] = []
    freeze = cpu._freeze
    monkeypatch.setattr(cpu, "_freeze", lambda place, *rest: (frozen.append(place), freeze(place, *rest)))
    results: list[cpu.CpuEnvironment] = []
    threads = [threading.Thread(target=lambda: results.append(build(tmp_path, source, python))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert results[0] == results[1]
    assert calls() == ["venv", "pip", "models"]
    assert len(frozen) == 1


def test_pip_holds_the_lock_itself(tmp_path: Path, source: Path, python: Path) -> None:
    build(tmp_path, source, python)
    assert "pip holds the lock: True" in (tmp_path / "calls").read_text()


def test_lock_outlives_a_killed_builder_while_its_pip_lives(tmp_path: Path) -> None:
    """Otherwise the next build would remove the folder into which an orphaned pip still writes."""
    lines: list[str] = []
    read, write = os.pipe()
    with cpu_build.locked(tmp_path / "lock", lines.append) as lock:
        child = subprocess.Popen(["cat"], stdin=read, pass_fds=(lock,))
    os.close(read)
    with pytest.raises(UserError), cpu_build.locked(tmp_path / "lock", lines.append, timeout_s=0.0):
        pass
    os.close(write)
    child.wait(10)
    with cpu_build.locked(tmp_path / "lock", lines.append, timeout_s=0.0):
        pass


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> cpu.CpuEnvironment:
    folder = tmp_path_factory.mktemp("built")
    return build(folder, make_source(folder / "source"), make_python(folder))


@pytest.fixture
def made(built: cpu.CpuEnvironment, monkeypatch: pytest.MonkeyPatch) -> cpu.CpuEnvironment:
    monkeypatch.setattr(cpu.tempfile, "gettempdir", lambda: "/tmp")
    return built


def test_attempts_share_no_path_no_ray_and_no_device(tmp_path: Path, made: cpu.CpuEnvironment) -> None:
    a, b = (cpu.environment(made, tmp_path / name, gpus=2) for name in ("a", "b"))
    try:
        own = ["HOME", "HF_HOME", "NRL_MEGATRON_CHECKPOINT_DIR", "RAY_TMPDIR", "TMPDIR", "CUDA_VISIBLE_DEVICES"]
        assert all(a.env[name] != b.env[name] for name in [*own, "E2E_CPU_TAG", "RAY_OVERRIDE_RESOURCES"])
        assert all(Path(a.env[name]).is_relative_to(tmp_path / "a") for name in own[:3])
        assert all(list(Path(a.env[name]).iterdir()) == [] for name in ("HOME", "NRL_MEGATRON_CHECKPOINT_DIR"))
        assert a.env["RAY_ADDRESS"] == "local"
    finally:
        cpu.release(tmp_path / "a")
        cpu.release(tmp_path / "b")
    assert not a.temporary.exists()


def test_an_ended_attempt_takes_the_sockets_of_its_own_tag_along(
    tmp_path: Path, made: cpu.CpuEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(tempfile.mkdtemp(prefix="e2e"))  # short: a socket's path has 107 bytes
    monkeypatch.setattr(cpu, "REFIT_SOCKETS", place)
    tags = {name: cpu.environment(made, tmp_path / name, gpus=1).env["E2E_CPU_TAG"] for name in ("a", "b")}
    for name in (f"GPU-e2e-{tags['a']}-0.sock", f"GPU-e2e-{tags['a']}-1.sock", f"GPU-e2e-{tags['b']}-0.sock"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(place / name))
    (place / f"GPU-e2e-{tags['a']}-2.sock").write_text("a file, not a socket")
    cpu.release(tmp_path / "a")
    left = sorted(path.name for path in place.iterdir())
    cpu.release(tmp_path / "b")
    shutil.rmtree(place)
    assert left == sorted([f"GPU-e2e-{tags['a']}-2.sock", f"GPU-e2e-{tags['b']}-0.sock"])


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
def test_fake_gpus_are_resources_and_the_tag_is_the_one_that_init_ray_computes(
    tmp_path: Path, made: cpu.CpuEnvironment, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_tag", lambda _: 123_456)  # sorts between 1 and 2
    got = cpu.environment(made, tmp_path / "a", gpus=gpus)
    cpu.release(tmp_path / "a")
    resources = json.loads(got.env["RAY_OVERRIDE_RESOURCES"])
    devices = got.env["CUDA_VISIBLE_DEVICES"].split(",")
    assert resources["GPU"] == gpus
    assert devices[:gpus] == [str(n) for n in range(gpus)]
    assert int(devices[gpus]) > 99_999
    # nemo_rl/distributed/virtual_cluster.py: sorted, joined by "_"
    assert resources["nrl_tag_" + "_".join(sorted(devices))] == 1


def test_ray_sockets_fit_into_107_bytes(
    tmp_path: Path, made: cpu.CpuEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = cpu.environment(made, tmp_path / ("deep" * 30), gpus=1)
    cpu.release(tmp_path / ("deep" * 30))
    session = "ray/session_2026-11-30_21-08-12_123456_4194304/sockets/plasma_store"
    assert len(f"{got.env['RAY_TMPDIR']}/{session}".encode()) <= 107
    monkeypatch.setattr(cpu.tempfile, "gettempdir", lambda: "/tmp/" + "long" * 10)
    with pytest.raises(UserError, match="set TMPDIR"):
        cpu.environment(made, tmp_path / "b", gpus=1)


def test_vllm_is_opt_in_and_a_copy_because_it_is_patched_in_place(tmp_path: Path, made: cpu.CpuEnvironment) -> None:
    without = cpu.environment(made, tmp_path / "a", gpus=1)
    got = cpu.environment(made, tmp_path / "a", gpus=1, standins=["vllm"])
    cpu.release(tmp_path / "a")
    assert [Path(path).name for path in without.pythonpath] == ["shim", "flash_attn"]
    copy = Path(got.pythonpath[-1])
    assert copy.is_relative_to(tmp_path / "a")
    (copy / "vllm/v1/executor/ray_executor.py").write_text("patched")
    assert (Path(made.standins["vllm"]) / "vllm/v1/executor/ray_executor.py").read_text() == "anchor\n"
    with pytest.raises(UserError, match="unknown stand-in 'vlm'"):
        cpu.environment(made, tmp_path / "a", gpus=1, standins=["vlm"])


def test_stock_name_leads_to_a_tiny_model_in_the_attempts_own_cache(tmp_path: Path, made: cpu.CpuEnvironment) -> None:
    for _ in range(2):  # a second call for the same attempt is harmless
        got = cpu.environment(made, tmp_path / "a", gpus=1)
    cpu.release(tmp_path / "a")
    entry = Path(got.env["HF_HOME"]) / "hub" / "models--Qwen--Qwen2.5-0.5B"
    revision = (entry / "refs" / "main").read_text()
    assert (entry / "snapshots" / revision / "config.json").exists()


def test_unit_suites_get_torch_as_it_is(tmp_path: Path, made: cpu.CpuEnvironment) -> None:
    modes = [cpu.environment(made, tmp_path / "a", gpus=1, cuda=flag).env["E2E_CPU"] for flag in (True, False)]
    cpu.release(tmp_path / "a")
    assert modes == ["run", "import"]


def test_placeholders_are_replaced_and_hydra_braces_stay(made: cpu.CpuEnvironment) -> None:
    texts = ["policy.model_name={model}", "a={models}/noisy", "b={data}/x", "c=${policy.model_name}", "--config={rl}/y"]
    done = cpu.substitute(texts, made, "trained", rl=Path("/x"))
    models = made.models["trained"].parent
    assert done == (
        f"policy.model_name={models}/trained",
        f"a={models}/noisy",
        f"b={made.data}/x",
        "c=${policy.model_name}",
        "--config=/x/y",
    )
    with pytest.raises(UserError, match="unknown tiny model 'traned'"):
        cpu.substitute([], made, "traned")
