"""Import once, then a forked child for every section of every family, as many at a time as there are cores."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proof import bytecode, reference
from proof.families import RECIPES
from proof.sections import SECTIONS, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEMA = 2
SECTION_S = 300.0  # a section takes seconds; one that waits for a rank that died must not hold the rest


def roots() -> tuple[str, ...]:
    """Return the folders of PYTHONPATH below which Bridge and Core are found."""
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return tuple(path for path in found if Path(path, "megatron").is_dir())


def problem(section: str, stage: str, error: BaseException) -> dict[str, Any]:
    """Return what `error` says and where it was raised, its first cause first in the chain."""
    root = error
    while (cause := root.__cause__ or (None if root.__suppress_context__ else root.__context__)) is not None:
        root = cause
    frames = [[f.filename, f.lineno, f.name] for f in traceback.extract_tb(root.__traceback__)]
    if root is not error:  # who called what failed
        frames = [[f.filename, f.lineno, f.name] for f in traceback.extract_tb(error.__traceback__)] + frames
    missing = root.name if isinstance(root, ImportError) else None
    return {
        "section": section, "stage": stage, "type": type(root).__name__, "text": str(root)[:2000], "missing": missing,
        "frames": frames,
    }  # fmt: skip


class Trace:
    """Which files' code was entered; module bodies and class bodies run at import are not looked at."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __call__(self, frame: Any, _event: str, _arg: Any) -> None:
        """Note the file of a function that is entered: what sys.settrace calls."""
        self.files.add(frame.f_code.co_filename)

    def seen(self) -> dict[str, str]:
        """Return the files of Bridge and Core that were imported, and which of them were entered."""
        files = {getattr(m, "__file__", None) for n, m in list(sys.modules.items()) if n.startswith("megatron")}
        return {file: "executed" if file in self.files else "imported" for file in sorted(filter(None, files))}


def fork(target: Path, work: Callable[[], Any]) -> int:
    """Run `work` in a child that writes what it returns to `target`; return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        making = target.with_name(f"{target.name}.new")
        making.write_text(json.dumps(work()))
        making.rename(target)
        status = 0
    except BaseException:  # noqa: BLE001 - the parent's business ends here, whatever was raised
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def rank(family: str, section: str, kept: Path, scratch: Path, number: int) -> dict[str, Any]:
    """Run one rank of a section here and return its part of the answer."""
    started, answer = time.monotonic(), {"checks": [], "problem": None}
    do, sizes = SECTIONS[section]
    trace = Trace()
    threading.settrace(trace)  # type: ignore[arg-type]
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        run = Run(family, kept / family, scratch, number, sizes)
        try:
            answer["checks"] = do(run)
        finally:
            answer["provider"] = run.provider
    except Exception as error:  # noqa: BLE001 - whatever was raised is the finding, and judged elsewhere
        traceback.print_exc()
        answer["problem"] = problem(section, "measure", error)
    finally:
        sys.settrace(None)
    return {**answer, "files": trace.seen(), "seconds": round(time.monotonic() - started, 1)}


def section(family: str, name: str, kept: Path, folder: Path) -> dict[str, Any]:
    """Run every rank of one section and return the first one's answer, or the problem of the one that has one."""
    world = max(SECTIONS[name][1].values(), default=1)
    folder.mkdir(parents=True)
    pids = {}
    for number in range(world):
        target = folder / f"{number}.json"
        work = functools.partial(rank, family, name, kept, folder, number)
        pids[fork(target, work)] = target
    ended = wait_all(set(pids), SECTION_S, stop_at_failure=True)
    answers = [json.loads(t.read_text()) if t.exists() else None for t in pids.values()]
    failed = [a for a in answers if a and a["problem"]]
    if failed or None in answers:
        return failed[0] if failed else {
            "checks": [], "files": {}, "seconds": 0,
            "problem": {"section": name, "stage": "measure", "type": "Ended", "missing": None, "frames": [],
                        "text": f"a process of it ended without an answer, status {sorted(ended)}"}}  # fmt: skip
    files: dict[str, str] = {}
    for answer in answers:
        files |= {f: how for f, how in answer["files"].items() if how == "executed" or f not in files}
    return {**answers[0], "files": files}


def wait_all(pids: set[int], limit_s: float, *, stop_at_failure: bool) -> list[int]:
    """Wait for `pids` and return their wait statuses; killed after `limit_s`, or 5 s after one of them failed."""
    deadline, ended = time.monotonic() + limit_s, []
    while pids:
        for pid in sorted(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pids.discard(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(
                        pid, signal.SIGKILL
                    )  # what it left behind: a checkpoint's writer has a process of its own
                ended.append(status)
                if status and stop_at_failure:
                    deadline = min(deadline, time.monotonic() + 5)
        if pids and time.monotonic() > deadline:
            for pid in pids:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    return ended


def pool(jobs: Iterator[tuple[Path, Callable[[], Any]]], width: int) -> Iterator[Path]:
    """Fork the jobs, at most `width` at a time, and yield each target as its child ends."""
    running: dict[int, Path] = {}
    todo = iter(jobs)
    exhausted = False
    while running or not exhausted:
        while len(running) < width and not exhausted:
            job = next(todo, None)
            if job is None:
                exhausted = True
            else:
                running[fork(*job)] = job[0]
        if running:
            pid, _ = os.wait()
            if pid in running:
                yield running.pop(pid)


def sections_of(family: str) -> list[str]:
    """Return the sections of a family: EP only where there are experts.

    LoRA under TP only where there are none: with experts TP wants sequence parallelism, and then the Bridge asks for
    the version of Transformer Engine.
    """
    experts = any("expert" in name for name in RECIPES[family][2])
    left_out = {"lora TP=2"} if experts else {"EP=2", "lora EP=2"}
    return [name for name in SECTIONS if name not in left_out]


def answers(out: Path, kept: Path, families: list[str], origins: dict[str, str], import_s: float) -> None:
    """Measure every section of `families`, whose references are kept, and write OUT/FAMILY.json."""
    with tempfile.TemporaryDirectory(prefix="proof-") as scratch:
        home = Path(scratch)
        jobs = {home / f"{family}.{name}.json": (family, name) for family in families for name in sections_of(family)}
        todo = [(t, functools.partial(section, f, n, kept, home / f / n)) for t, (f, n) in jobs.items()]
        for _ in pool(iter(todo), os.cpu_count() or 1):
            pass
        for family in families:
            parts = {n: t for t, (f, n) in jobs.items() if f == family}
            write(out, family, {n: json.loads(t.read_text()) for n, t in parts.items()}, origins, import_s)


def write(out: Path, family: str, parts: dict[str, Any], origins: dict[str, str], import_s: float) -> None:
    """Write the answer of one family and show its checks."""
    files: dict[str, str] = {}
    for part in parts.values():
        files |= {f: how for f, how in part["files"].items() if how == "executed" or f not in files}
    answer = {
        "schema": SCHEMA, "family": family, "origins": origins, "files": files,
        "checks": [check for part in parts.values() for check in part["checks"]],
        "problems": [part["problem"] for part in parts.values() if part["problem"]],
        "seconds": {"import": import_s, **{name: part["seconds"] for name, part in parts.items()}},
    }  # fmt: skip
    for found in answer["checks"]:
        print(f"{family}: {found['name']}: {found['value']} ({found['text']})", flush=True)
    for found in answer["problems"]:
        print(f"{family}: {found['section']}: {found['type']}: {found['text'][:300]}", flush=True)
    making = out / f"{family}.json.new"
    making.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    making.rename(out / f"{family}.json")


def failed(out: Path, families: list[str], found: dict[str, Any], origins: dict[str, str]) -> None:
    """Write one problem as the answer of several families."""
    part = {"checks": [], "files": {}, "seconds": 0, "problem": found}
    for family in families:
        write(out, family, {found["section"]: part}, origins, 0.0)


def untried() -> list[str]:
    """Return the architectures that this Bridge registers and no recipe makes: asked of its own registry."""
    from megatron.bridge import AutoBridge

    return sorted(set(AutoBridge.list_supported_models()) - {model for _, model, _ in RECIPES.values()})


def import_trees() -> dict[str, str]:
    """Import Bridge and Core and return where from."""
    import megatron.bridge
    import megatron.core
    import torch

    torch.set_num_threads(1)
    return {m.__name__: str(m.__file__) for m in (megatron.bridge, megatron.core)}


def main(out: Path, kept: Path, families: list[str]) -> int:
    """Prove `families`, write their answers below `out`; what is raised is in them, and the status is 0."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    started = time.monotonic()
    unknown = sorted(set(families) - set(RECIPES))
    if unknown:
        msg = f"no tiny model is known for {unknown[0]!r}"
        raise LookupError(msg)
    kept.mkdir(parents=True, exist_ok=True)
    lacking = [family for family in families if not reference.is_kept(kept / family)]
    beside = reference.start(kept, lacking) if lacking else None
    try:
        bytecode.install(kept.parent / "bytecode", roots())
        try:
            origins = import_trees()
        except Exception as error:  # noqa: BLE001 - whatever was raised is the finding, and judged elsewhere
            traceback.print_exc()
            failed(out, families, problem("import", "import", error), {})
            return 0
        (out / "untried.json").write_text(json.dumps(untried()))
        import_s = round(time.monotonic() - started, 1)
        if beside is not None:
            beside.wait()
        have = [family for family in families if family not in lacking or reference.is_kept(kept / family)]
        for family in set(families) - set(have):
            path = kept / f"{family}.problem"
            text = path.read_text() if path.exists() else "the reference process left no answer"
            found = {"section": "reference", "stage": "reference", "type": "Reference", "text": text, "missing": None,
                     "frames": []}  # fmt: skip
            failed(out, [family], found, origins)
        answers(out, kept, have, origins, import_s)
    finally:
        if beside is not None and beside.poll() is None:
            beside.kill()
            beside.wait()
    print(f"{len(families)} families in {time.monotonic() - started:.1f} s, {import_s} of them imports", flush=True)
    return 0
