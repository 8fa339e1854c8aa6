"""What the user asked for: command line, then environment, then site.yaml, then defaults; read once."""

from __future__ import annotations

import difflib
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parent.parent
# does a failing CPU proof of a case's model family stop the case? on: yes; warn: it is shown; auto: on where
# `doit cpu` has built the environment, so that nobody who asks for a level installs 4 GB
PROOFS = ("auto", "on", "warn", "off")
RUNTIMES = ("local", "docker", "podman", "slurm")


class Setting(NamedTuple):
    """A name that may stand on the command line: what it is for, and the environment variable that may carry it.

    `argument`: of a single command, which reads it from `Settings.arguments`.
    """

    text: str
    environment: str = ""
    argument: bool = False


SETTINGS = {
    "bridge": Setting("Checkout of Megatron-Bridge under test.", "BRIDGE_REPO"),
    "nemo_rl": Setting("Checkout of NeMo-RL.", "NEMO_RL_REPO"),
    "mcore": Setting("Checkout of Megatron-LM; by default the Bridge's 3rdparty/Megatron-LM.", "MCORE_REPO"),
    "image": Setting(
        "Image with NeMo-RL: a reference, a name of containers/images.yaml, or `build` for one built here.",
        "NEMO_RL_IMAGE",
    ),
    "runtime": Setting("Where runs happen.", "E2E_RUNTIME"),
    "build": Setting("Folder of all state; by default `build` in this project.", "E2E_BUILD_DIR"),
    "levels": Setting("A levels file instead of the shipped one.", "E2E_LEVELS"),
    "reports": Setting("Folder that gets a copy of the four report files at the end of a run; for CI.", "E2E_REPORTS"),
    "python": Setting("Interpreter of the local runtime; by default the one that runs doit."),
    "retries": Setting("How often a failure that says nothing of the change is tried again; 1 by default."),
    "timeout": Setting("Time limit of every case instead of its own: 60s, 45m, 2h."),
    "fresh": Setting("1: ignore earlier results of runs and unit suites."),
    "require_executed": Setting("1: a Pass from an earlier record is Blocked."),
    "require_pinned": Setting("1: an image without a digest is refused."),
    "jobs": Setting("How many stages run at a time; 1 by default."),
    "baseline": Setting(
        "What an automatic comparison with the vendored Bridge may cost: off, or GPUs times time; 40m."
    ),
    "keep_work": Setting("1: keep the work copies of an attempt."),
    "wait": Setting("How long to wait for the workspace and the GPUs; 2h by default."),
    "notify": Setting("Program called with the report folder, summary.md as its input; a list in site.yaml; off."),
    "proof": Setting(
        "auto, on, warn, off: a failing CPU proof of its family stops a GPU case; auto: if `doit cpu` ran."
    ),
    "max_gpu_hours": Setting("GPU-hours that one call may use, by the minutes in levels.yaml; more is Blocked."),
    "detach": Setting("1: with runtime=slurm submit and return; the same command picks the result up."),
    "since": Setting(
        "Revision that `doit plan` and `doit changed` compare with; by default the merge base with main.", argument=True
    ),
    "undo": Setting("1: `doit vendor` takes its copy back.", argument=True),
    "fault": Setting("Fault of `doit demo`; `list` names them.", argument=True),
    "family": Setting("Model family of a command that takes one.", argument=True),
    "n": Setting("How many, for a command that repeats.", argument=True),
    "open": Setting("1: `doit report` serves the page on 127.0.0.1 until Ctrl-C.", argument=True),
    "verify": Setting("1: `doit bundle FILE` verifies instead of making one.", argument=True),
    "key": Setting("SSH key that signs a bundle.", argument=True),
    "tolerance": Setting("Relative difference that `doit reproduce` allows: 0.05, or a list TAG:VALUE.", argument=True),
    "annotations": Setting("github or azure: `doit report` prints lines for beside the code.", argument=True),
    "compare": Setting("Two attempts or two Bridge revisions, A,B: `doit report` writes compare.html.", argument=True),
    "apply": Setting("`doit image update apply=1` writes the proposed pin into containers/images.yaml.", argument=True),
    "target": Setting(
        "Stage of NeMo-RL's Dockerfile that `doit image build` builds: release, else its last.", argument=True
    ),
    "args": Setting("Build arguments of `doit image build`: NAME=VALUE,NAME=VALUE.", argument=True),
    "cache": Setting("Image reference that `doit image build` reads and writes buildx's cache by.", argument=True),
}
# contract: the command line wins over these
ENVIRONMENT = {name: setting.environment for name, setting in SETTINGS.items() if setting.environment}
# an undecided failure is compared with the vendored Bridge by itself if that costs no more (level 0: 20 GPU minutes)
BASELINE_GPU_MINUTES = 40.0
SWITCHES = ("undo", "open", "verify", "apply")  # of the arguments: on or off, and nothing else
_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(f"(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?")


@dataclass(frozen=True, slots=True)
class Settings:
    """Every choice of one invocation. Paths are absolute; durations are in seconds."""

    build: Path
    levels: Path
    python: Path
    runtime: str = "docker"
    bridge: Path | None = None
    nemo_rl: Path | None = None
    mcore: Path | None = None
    image: str | None = None
    retries: int = 1
    timeout_s: float | None = None
    fresh: bool = False
    require_executed: bool = False
    require_pinned: bool = False
    keep_work: bool = False
    baseline_budget: float = BASELINE_GPU_MINUTES
    jobs: int = 1
    wait_s: float = 7200.0
    notify: tuple[str, ...] = ()
    reports: Path | None = None
    proof: str = "auto"
    overrides: tuple[str, ...] = ()
    detach: bool = False
    max_gpu_hours: float | None = None
    slurm: Mapping[str, object] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def checkout(self, kind: str) -> Path:
        """Return the checkout of "bridge", "nemo_rl" or "mcore"; raise UserError that says how to name it.

        Core is looked for where the Bridge pins it (3rdparty/Megatron-LM) unless the user names another.
        """
        path: Path | None = getattr(self, kind)
        if path is None and kind == "mcore":
            path = self.checkout("bridge") / "3rdparty/Megatron-LM"
        if path is None:
            name = ENVIRONMENT[kind]
            raise UserError(
                f"{name} is not set: name the checkout with `export {name}=/path/to/checkout` or `{kind}=/path` on the "
                "command line (`./doitw demo` runs a labelled demonstration without any)"
            )
        if not path.is_dir():
            raise UserError(f"{kind}={path}: no such directory (from {self.origins.get(kind, 'the Bridge checkout')})")
        return path


def is_override(name: str) -> bool:
    """Tell a Hydra override (`a.b=1`, `+a=1`, `++a.b=1`, `~a`) from a setting of ours: contract, "Settings"."""
    return "." in name or name[:1] in ("+", "~")


def parse_duration(text: str, name: str) -> float:
    """Return seconds of "90", "60s", "45m", "2h", "1h30m"; raise UserError otherwise."""
    given = text.strip()
    match = _DURATION.fullmatch(f"{given}s" if re.fullmatch(_NUMBER, given) else given)
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    if not (total := hours * 3600 + minutes * 60 + seconds):
        raise UserError(f"{name}={text}: not a duration; write 60s, 45m, 2h or 1h30m")
    return total


def _flag(text: str, name: str) -> bool:
    if text.lower() not in {"1", "0", "true", "false", "yes", "no"}:
        raise UserError(f"{name}={text}: write {name}=1 or {name}=0")
    return text.lower() in {"1", "true", "yes"}


def _count(text: str, name: str, lowest: int) -> int:
    if not text.isdecimal() or int(text) < lowest:
        raise UserError(f"{name}={text}: write a whole number of at least {lowest}")
    return int(text)


def _budget(text: str | None) -> float:
    """Return the GPU minutes that an automatic baseline may cost: `baseline=off`, or a duration times GPUs."""
    if text is None:
        return BASELINE_GPU_MINUTES
    return 0.0 if text in ("off", "0") else parse_duration(text, "baseline") / 60


def _notify(text: str | None, site: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the program to tell the answer to: `notify=PROGRAM` or `notify=off`; with arguments only in site.yaml."""
    if text is None:
        words = site.get("notify") or []
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError(f"site.yaml: notify: must be a list, program first: [mail-it, --to, me]; not {words!r}")
        return tuple(words)
    return () if text in ("off", "0") else (text,)


def _site(path: Path) -> tuple[dict[str, Any], Mapping[str, object]]:
    """Return the settings of site.yaml, and its one mapping: `slurm:`, options of sbatch by their long names."""
    if not path.exists():
        return {}, {}
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: must be a mapping of settings, e.g. `runtime: docker`")
    slurm = loaded.pop("slurm", None) or {}
    if not isinstance(slurm, dict):
        raise UserError(f"{path}: slurm must be a mapping, e.g. `slurm: {{partition: batch, account: me}}`")
    plain = {str(k): v if isinstance(v, list) else str(v) for k, v in loaded.items() if not isinstance(v, dict)}
    return plain, {str(k): v for k, v in slurm.items()}


def _hours(text: str | None) -> float | None:
    if text is not None and not re.fullmatch(r"\d+(\.\d+)?", text):
        raise UserError(f"max_gpu_hours={text}: write a number of GPU-hours, e.g. 40")
    return None if text is None else float(text)


def check_names(names: Mapping[str, str], where: str) -> None:
    """Raise UserError for the first name that is no setting, with the nearest one that is."""
    for name in names:
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f"; did you mean {near[0]}=?" if near else f"; settings are {', '.join(SETTINGS)}"
            raise UserError(f"unknown setting {name}={names[name]} {where}{hint}")


def load(
    variables: Mapping[str, str],
    flags: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
    root: Path = ROOT,
) -> Settings:
    """Return the settings of this invocation.

    `variables` are the `name=value` words of the command line, `flags` its overrides without a value (`~key`).
    Raises UserError for an unknown setting or a value that does not fit.
    """
    environ = os.environ if environ is None else environ
    overrides = tuple(f"{k}={v}" for k, v in variables.items() if is_override(k)) + flags
    given = {k: v for k, v in variables.items() if not is_override(k)}
    check_names(given, "on the command line")
    site, slurm = _site(root / "site.yaml")
    check_names(site, f"in {root / 'site.yaml'}")
    origins: dict[str, str] = {}

    def value(name: str) -> str | None:
        sources = (
            (given.get(name), "the command line"),
            (environ.get(ENVIRONMENT.get(name, "")), ENVIRONMENT.get(name, "")),
            (words if isinstance(words := site.get(name), str) else None, "site.yaml"),
        )
        for text, origin in sources:
            if text:
                origins[name] = origin
                return text
        return None

    def path(name: str) -> Path | None:
        text = value(name)
        return Path(os.path.abspath(os.path.expanduser(text))) if text else None

    runtime = value("runtime") or "docker"
    if runtime not in RUNTIMES:
        near = difflib.get_close_matches(runtime, RUNTIMES, n=1)
        raise UserError(
            f"runtime={runtime}: choose {', '.join(RUNTIMES)}" + (f"; did you mean {near[0]}?" if near else "")
        )
    timeout = value("timeout")
    proof = value("proof") or "auto"
    if proof not in PROOFS:
        raise UserError(f"proof={proof}: choose {', '.join(PROOFS)} (auto: where the CPU environment is built)")

    def flag(name: str) -> bool:
        return _flag(value(name) or "0", name)

    return Settings(
        build=Path(os.path.realpath(path("build") or root / "build")),  # Python and git say where a tree really is
        levels=path("levels") or root / "levels.yaml",
        python=path("python") or Path(sys.executable),
        runtime=runtime,
        bridge=path("bridge"),
        nemo_rl=path("nemo_rl"),
        mcore=path("mcore"),
        image=value("image"),
        retries=_count(value("retries") or "1", "retries", 0),
        timeout_s=parse_duration(timeout, "timeout") if timeout else None,
        fresh=flag("fresh"),
        require_executed=flag("require_executed"),
        require_pinned=flag("require_pinned"),
        keep_work=flag("keep_work"),
        baseline_budget=_budget(value("baseline")),
        jobs=_count(value("jobs") or "1", "jobs", 1),
        wait_s=parse_duration(value("wait") or "2h", "wait"),
        reports=path("reports"),
        notify=_notify(value("notify"), site),
        proof=proof,
        overrides=overrides,
        detach=flag("detach"),
        max_gpu_hours=_hours(value("max_gpu_hours")),
        slurm=slurm,
        arguments={
            name: str(int(_flag(text, name))) if name in SWITCHES else text
            for name, text in given.items()
            if SETTINGS[name].argument
        },
        origins=origins,
    )
