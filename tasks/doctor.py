"""Every precondition on one page, looked at without starting or changing anything; each finding with its remedy."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import environment, images, workspace
from tasks.checkouts import CORE_IN_BRIDGE, VENDORED
from tasks.errors import UserError
from tasks.runtimes import choose

if TYPE_CHECKING:
    from tasks.invocation import Invocation

GIB = 1 << 30
SHM_BYTES = 16 * GIB  # Ray and NCCL fall back to disk or die below that (cases.md 71)
DISK_BYTES = 20 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """One looked-at thing: `state` is "ok", "note" (works, worth knowing) or "bad" (blocks)."""

    state: str
    subject: str
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for --json."""
        return asdict(self)


def examine(now: Invocation) -> list[Finding]:
    """Return all findings, in the order in which a run would meet them."""
    return [
        *_checkouts(now), *_levels(now), *_image(now), _gpus(now), *_space(now), *_cache(), *_secrets(),
    ]  # fmt: skip


def _checkouts(now: Invocation) -> list[Finding]:
    from tasks import digests, provenance

    found: list[Finding] = []
    for kind in ("bridge", "mcore", "nemo_rl"):
        try:
            path = now.settings.checkout(kind)
            digests.require_repository(path)
            dirty = provenance.dirty_files(path, (CORE_IN_BRIDGE,) if kind == "bridge" else ())
        except UserError as error:
            text, remedy = (
                str(error).splitlines()[0],
                "git submodule update --init --recursive" if kind == "mcore" else "",
            )
            if all(text != told.text for told in found):  # without a Bridge its Core is not missed, too
                found.append(Finding("bad", kind, text, remedy))
            continue
        state = f"{len(dirty)} dirty files" if dirty else "clean"
        found.append(Finding("ok", kind, f"{path} at {provenance.head(path)[:12]}, {state}"))
    try:
        vendored = now.settings.checkout("nemo_rl") / VENDORED
        if not (vendored / "src").is_dir():
            text = "the vendored Bridge is not checked out: no baseline can be run"
            found.append(
                Finding("note", "vendored", text, "git submodule update --init --recursive in the NeMo-RL checkout")
            )
        demo = workspace.of(now.settings).demo
    except UserError:
        return found
    if demo:
        found.append(Finding("note", "demo", "a checkout is a generated demo: no statement about the real projects"))
    return found


def _levels(now: Invocation) -> list[Finding]:
    try:
        levels = now.levels
    except UserError as error:
        return [Finding("bad", "levels", str(error).splitlines()[0])]
    cases = sum(1 for _ in levels.cases())
    return [
        Finding("ok", "levels", f"{now.settings.levels}: {len(levels.levels)} levels, {cases} cases"),
        *(Finding("note", "levels", f"{len(levels.warnings)} remarks, the first: {w}") for w in levels.warnings[:1]),
    ]


def _image(now: Invocation) -> list[Finding]:
    chosen = now.settings
    try:
        runtime = choose(chosen.runtime)
        unavailable = runtime.available() if chosen.runtime != "local" else None
        image = images.resolve(chosen, runtime, progress=lambda _: None) if unavailable is None else None
    except UserError as error:
        return [Finding("bad", "image", str(error).splitlines()[0])]
    if unavailable is not None:
        return [Finding("bad", "engine", unavailable.text)]
    return [Finding("ok", "image", f"{image.ref} {image.id[:19]}, runtime={chosen.runtime}")] if image else []


def _gpus(now: Invocation) -> Finding:
    wanted = min((case.gpus for case in now.levels.cases() if case.gpus), default=0) if _readable(now) else 0
    seen = now.gpus
    if seen.models:
        return Finding("ok", "gpus", seen.label())
    text = seen.problem or "0 GPUs"
    if wanted == 0:
        return Finding("ok", "gpus", f"{text}; this levels file needs none")
    return Finding(
        "bad",
        "gpus",
        f"{text}; levels need {wanted} or more",
        "rehearsals and CPU proofs need none: doit rehearse:CASE",
    )


def _readable(now: Invocation) -> bool:
    try:
        return bool(now.levels)
    except UserError:
        return False


def _space(now: Invocation) -> list[Finding]:
    found = []
    places = {"disk": now.settings.build, "shm": Path("/dev/shm"), "tmp": Path("/tmp")}
    for subject, path in places.items():
        at = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        free = shutil.disk_usage(at).free
        least = SHM_BYTES if subject == "shm" else DISK_BYTES if subject == "disk" else GIB
        text = f"{path}: {free / GIB:.1f} GiB free"
        if free >= least:
            found.append(Finding("ok", subject, text))
        else:
            remedy = (
                "build=PATH on a larger disk" if subject == "disk" else "the docker runtime asks for 64 GiB of its own"
            )
            state = "bad" if subject == "disk" and free < 2 * GIB else "note"
            found.append(
                Finding(state, subject, f"{text}, {least // GIB} GiB advised", remedy if subject != "tmp" else "")
            )
    return found


def _cache() -> list[Finding]:
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    if not Path(home).is_dir():
        return [
            Finding(
                "note",
                "hf cache",
                f"{home} does not exist: models are downloaded by the first run",
                "export HF_HOME=/large/disk",
            )
        ]
    models = len(list(Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").glob("models--*")))
    return [Finding("ok", "hf cache", f"{home}: {models} models")]


def _secrets() -> list[Finding]:
    present = environment.secret_names(os.environ)
    text = f"present: {', '.join(present)} (passed by name, never written down)" if present else "none set"
    return [
        Finding("ok" if present else "note", "tokens", text, "" if present else "HF_TOKEN is needed for gated models")
    ]
