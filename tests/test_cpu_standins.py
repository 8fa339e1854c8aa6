"""The stand-ins of containers/cpu, as far as they can be asked without torch: what they answer and what they refuse.

Each runs in a fresh interpreter of its own, as in a rehearsal. With torch and the real trees: tests/real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import cpu

BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def uv(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "show.py"
    script.write_text("import os, sys; print(os.getcwd(), sys.argv[1:])")
    return subprocess.run(
        ["bash", str(cpu.SOURCE / "bin" / "uv"), *(a.replace("SCRIPT", str(script)) for a in args)],
        capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},  # a bare Debian has no `python`
    )  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        ("run", "SCRIPT", "--no-sync", "a b"),
        ("run", "--no-sync", "SCRIPT", "--no-sync", "a b"),
        ("run", "--locked", "--extra", "mcore", "python", "SCRIPT", "--no-sync", "a b"),
        ("run", "--", "python", "SCRIPT", "--no-sync", "a b"),
    ],
)
def test_uv_run_runs_the_command_with_its_arguments(tmp_path: Path, args: tuple[str, ...]) -> None:
    assert uv(tmp_path, *args).stdout == f"{tmp_path} ['--no-sync', 'a b']\n"


@pytest.mark.parametrize(
    "args", [("venv", "x"), ("sync",), (), ("run",), ("run", "--isolated", "SCRIPT"), ("run", "--extra")]
)
def test_uv_refuses_what_it_does_not_do(tmp_path: Path, args: tuple[str, ...]) -> None:
    got = uv(tmp_path, *args)
    assert got.returncode == 2
    assert "uv stand-in" in got.stderr


def test_the_compiled_helper_is_kept_by_its_sources_and_other_calls_are_the_compilers(tmp_path: Path) -> None:
    folder, work, real = (tmp_path / name for name in ("bin", "work", "real"))
    for made in (folder, work, real):
        made.mkdir()
    shutil.copy(cpu.SOURCE / "bin" / "g++", folder)
    (real / "g++").write_text(
        '#!/bin/sh\n[ "$1" = -v ] && exit\necho "$@" >>calls\n[ -z "$4" ] || cp helpers.cpp "$4"\n'
    )
    (real / "g++").chmod(0o755)

    def compiled(source: str, *words: str) -> str:
        (work / "helpers.cpp").write_text(source)
        command = [str(folder / "g++"), *(words or ("-O3", "helpers.cpp", "-o", "helpers_cpp.so"))]
        path = f"{folder}:{real}:/usr/bin:/bin"
        subprocess.run(command, cwd=work, env={"PATH": path}, check=True, timeout=30, capture_output=True)
        return (work / "helpers_cpp.so").read_text()

    assert [compiled("a"), compiled("a"), compiled("b"), compiled("a")] == ["a", "a", "b", "a"]
    compiled("a", "--version")
    assert (work / "calls").read_text().splitlines() == ["-O3 helpers.cpp -o helpers_cpp.so"] * 2 + ["--version"]


def standalone(code: str, *folders: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter with the stand-ins' folders on its path (no torch in this environment)."""
    path = os.pathsep.join(str(cpu.SOURCE / folder) for folder in folders)
    return subprocess.run(
        [str(BASE), "-c", code], capture_output=True, text=True, timeout=30, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env},
    )  # fmt: skip


def test_an_interpreter_without_e2e_cpu_is_untouched() -> None:
    got = standalone("import sys, builtins; print('e2e_cpu' in sys.modules, builtins.__import__.__module__)", "shim")
    assert got.stdout == "False builtins\n", got.stderr


def test_unknown_mode_is_an_error_at_start_up() -> None:
    got = standalone("pass", "shim", E2E_CPU="yes")
    assert "expected 'import' or 'run'" in got.stderr


def test_action_runs_once_after_the_import_and_asking_for_the_spec_does_not_use_it_up(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("value = 1\n")
    (tmp_path / "act.py").write_text("def on(module): module.value += 1\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from e2e_cpu import after_import\n"
        "after_import.register({'late': 'act:on'})\n"
        "import importlib.util; importlib.util.find_spec('late')\n"
        "import late; print(late.value)\n"
        "importlib.reload(late); print(late.value)\n"
        "try: after_import.register({'late': 'act:on'})\n"
        "except RuntimeError as error: print(error)\n"
    )
    assert standalone(code, "shim").stdout == "2\n1\nimported before e2e_cpu could patch it: late\n"


def test_failing_action_is_seen_even_where_the_import_error_is_caught(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("")
    (tmp_path / "act.py").write_text("def on(module): raise ImportError('renamed upstream')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from e2e_cpu import after_import\n"
        "after_import.register({'late': 'act:on'})\n"
        "try:\n import late\nexcept ImportError: print('caught')\n"
    )
    got = standalone(code, "shim")
    assert got.stdout == "caught\n"
    assert "act:on failed after import of late" in got.stderr
    assert "renamed upstream" in got.stderr


def test_device_identifier_differs_between_attempts() -> None:
    code = "import types; from e2e_cpu import nvml; m = types.SimpleNamespace(); nvml.apply(m); print(m.nvmlDeviceGetUUID(0))"
    tags = {standalone(code, "shim", E2E_CPU_TAG=tag).stdout for tag in ("1", "2")}
    assert len(tags) == 2
    assert "KeyError" in standalone(code, "shim").stderr


def test_unused_names_of_vllm_import_and_refuse() -> None:
    code = (
        "from vllm.v1.engine.core import EngineCoreProc\n"
        "from vllm.v1.worker.gpu_worker import Worker\n"
        "kept = EngineCoreProc.run_engine_core\n"
        "Worker()\n"
        "for use in (EngineCoreProc, kept):\n"
        " try: use(1)\n"
        " except NotImplementedError as error: print(error)\n"
    )
    assert standalone(code, "standins/vllm").stdout.splitlines() == [
        "vllm.v1.engine.core.EngineCoreProc is not answered by the CPU stand-in of vLLM",
        "vllm.v1.engine.core.EngineCoreProc.run_engine_core is not answered by the CPU stand-in of vLLM",
    ]


def test_engine_refuses_what_would_change_results() -> None:
    code = (
        "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n"
        "from vllm import LLM, SamplingParams\n"
        "for make in (lambda: LLM('m', 'a.b', tensor_parallel_size=2), lambda: LLM('m', 'a.b', logprobs_mode='raw_logprobs'),\n"
        "             lambda: SamplingParams(bad_words=['x']), lambda: SamplingParams(min_p=0.1)):\n"
        " try: make()\n"
        " except (NotImplementedError, TypeError) as error: print(type(error).__name__)\n"
    )
    assert standalone(code, "standins/vllm").stdout.split() == [*["NotImplementedError"] * 3, "TypeError"]
