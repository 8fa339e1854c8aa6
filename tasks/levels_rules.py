"""Rules over a whole case of levels.yaml: what would run as something other than what was meant, or could never count.

Each rule stands for a fault that was met: an override torn apart by an unquoted `$@`, a check whose tag nobody logs, a
guard of NeMo-RL switched off, a secret in a file, a pipe that hides an exit status.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from tasks.errors import suggest

if TYPE_CHECKING:
    from tasks.marked_yaml import Marked, Place

_OVERRIDE = re.compile(r"(\+{0,2}[A-Za-z_][\w.@/-]*=.*|~[A-Za-z_][\w.@/-]*(=.*)?)", re.DOTALL)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_SHELL = frozenset(["|", "||", "&", "&&", ";", ">", ">>", "<", "2>&1"])
_SECRET = re.compile(r"(.*_)?(TOKEN|API_KEY|PASSWORD|PASSWD|SECRET|SECRET_KEY|ACCESS_KEY)")
_RATIO = re.compile(r"mult_prob_error|ratio")  # their natural value is 1: 0.0 means that nothing was compared
_NEEDS = re.compile(r"nodes:[0-9]+|compute>=[0-9]+\.[0-9]")

PATHS = ("attempt", "bridge", "mcore", "nemo_rl", "agent")  # folders of this attempt, filled in for every case
PLACEHOLDERS = ("model", "models", "data", *PATHS)  # and, in rehearsals, what the CPU environment prepares
NEEDS = {
    "network": "reaches out while it runs",
    "apt": "installs system packages while it runs",
    "hf_token": "its model or data is gated: HF_TOKEN",
    "nemo_gym": "the Gym submodule is checked out",
    "nccl_multicast": "NVLink multicast",
}
"""What a case may need beside GPUs and its model; `nodes:N` and `compute>=9.0` are the two with a number."""

# Set by the runner for every attempt; a case that sets them would undo the isolation or the imports that are proved.
_RUNNERS = {
    "PYTHONPATH": "the order of the trees on it is what the probe proves",
    "NRL_MEGATRON_CHECKPOINT_DIR": "a conversion of another attempt would be reused",
    "RAY_ADDRESS": "the run would join a foreign cluster",
}


class Notes:
    """Problems and warnings with their lines, collected while one file is checked."""

    def __init__(self, marked: Marked) -> None:
        self.marked = marked
        self.problems: list[tuple[int, str]] = []
        self.warnings: list[tuple[int, str]] = []

    def problem(self, place: Place, text: str) -> None:
        """Note a mistake: the file is refused."""
        self.problems.append((self.marked.line(place), text))

    def warning(self, place: Place, text: str) -> None:
        """Note something that works, but perhaps not as meant."""
        self.warnings.append((self.marked.line(place), text))


def case_rules(case: dict[str, Any], place: Place, notes: Notes) -> None:
    """Check one merged case."""
    if (case["script"] is None) == (case["command"] is None):
        have = "both" if case["script"] else "neither"
        notes.problem(place, f"{case['id']}: {have} of script and command; write exactly one")
    if case["steps"] is None and case["backend"] == "megatron" and not case["checks"] and not case["files"]:
        notes.warning(place, f"{case['id']}: no steps, no checks, no files; only its exit status and log could fail it")
    if case["nodes"] > 1 and case["gpus"] < case["nodes"]:
        notes.problem((*place, "gpus"), f"{case['id']}: gpus counts all nodes, so at least {case['nodes']}")
    if case["optional"] and case["quarantine"]:
        notes.warning((*place, "quarantine"), f"{case['id']}: optional and in quarantine; one of them is enough")
    _command(case, place, notes)
    _overrides(case["overrides"], (*place, "overrides"), script=case["script"] is not None, known=PATHS, notes=notes)
    _env(case["env"], (*place, "env"), notes)
    _checks(case["checks"], (*place, "checks"), notes, real_work=bool(case["real_work"]))
    for i, need in enumerate(case["needs"]):
        if need not in NEEDS and not _NEEDS.fullmatch(need):
            notes.problem(
                (*place, "needs", i), f"unknown need {need!r}{suggest(need, NEEDS)}; known: {', '.join(NEEDS)}"
            )
    for prefix in case["also_logs"]:
        if not re.fullmatch(r"[a-z0-9_]+", prefix):
            notes.problem((*place, "also_logs", prefix), f"prefix {prefix!r}: small letters, digits and _ only")
    plan = case["rehearsal"]
    if plan is None:
        return
    at = (*place, "rehearsal")
    if not plan["supported"] and not plan["reason"]:
        notes.problem(at, f"{case['id']}: a rehearsal that is not supported says why in `reason`")
    if plan["nodes"] > 1 and plan["gpus"] < plan["nodes"]:
        notes.problem((*at, "gpus"), f"{case['id']}: gpus counts all nodes, so at least {plan['nodes']}")
    script = case["script"] is not None
    _overrides(plan["overrides"], (*at, "overrides"), script=script, known=PLACEHOLDERS, notes=notes)
    _env(plan["env"], (*at, "env"), notes)
    if plan["checks"] != case["checks"]:
        _checks(plan["checks"], (*at, "checks"), notes, real_work=bool(plan["real_work"]))


def _command(case: dict[str, Any], place: Place, notes: Notes) -> None:
    argv = case["command"] or []
    shell = bool(argv) and argv[0].rpartition("/")[2] in {"sh", "bash", "dash"}
    if shell and argv[0].rpartition("/")[2] != "bash":
        notes.warning(
            (*place, "command", 0), f"{argv[0]}: only bash gets `-o pipefail`; a pipe under it hides failures"
        )
    for i, word in enumerate(argv):
        text = None
        if word in _SHELL:
            text = f"{word!r} reaches the program as an argument: no shell reads the command"
        elif (
            shell
            and i
            and argv[i - 1].endswith("c")
            and argv[i - 1].startswith("-")
            and re.search(r"(?<!\|)\|(?!\|)", word)
        ):
            text = "a pipe in a command: the log is kept anyway, and a pipe may hide an exit status"
        if text:
            notes.warning((*place, "command", i), text)


def _overrides(items: list[str], place: Place, *, script: bool, known: tuple[str, ...], notes: Notes) -> None:
    argument = False  # the element is the value of the option before it
    for i, item in enumerate(items):
        at = (*place, i)
        if argument or item.startswith("--"):
            argument = not argument and "=" not in item
            if item.startswith("--") and item.split("=")[0] != "--config":
                notes.problem(at, f"{item!r}: only --config may be passed to upstream's scripts beside overrides")
            continue
        if not _OVERRIDE.fullmatch(item):
            notes.problem(at, f"{item!r} is not a Hydra override; write KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY")
            continue
        key = item.partition("=")[0].lstrip("+~")
        if script and re.search(r"\s", item):
            notes.problem(at, f"{item!r} contains a blank; upstream's scripts pass $@ unquoted and would tear it apart")
        elif script and re.search(r"[*?]", item):
            notes.warning(
                at, f"{item!r} contains * or ?; upstream's scripts pass $@ unquoted, a matching file would replace it"
            )
        if script and key == "logger.log_dir":
            notes.problem(at, f"{key}: the script dumps the metrics of its own folder and would find nothing there")
        if key == "policy.megatron_cfg.converter_type":
            notes.warning(at, f"{key}: NeMo-RL reads it no more (removed 2026-06-07); current checkouts refuse it")
        for name in _PLACEHOLDER.findall(item):
            if name not in known:
                why = "that one belongs to rehearsals" if name in PLACEHOLDERS else f"known: {', '.join(known)}"
                notes.problem(at, f"{item!r}: {{{name}}} stands for nothing here{suggest(name, known)}; {why}")


def _env(values: dict[str, str], place: Place, notes: Notes) -> None:
    for name in values:
        at = (*place, name)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            notes.problem(at, f"{name!r} is not a name of an environment variable")
        elif _SECRET.fullmatch(name.upper()):
            notes.problem(
                at, f"{name}: secrets are passed on from the caller's environment by name, never written here"
            )
        elif name == "NRL_IGNORE_TP_ACCURACY_CHECK":
            notes.problem(at, f"{name} switches off a correctness guard of NeMo-RL; such a run is never evidence")
        elif name in _RUNNERS:
            notes.problem(at, f"{name} is set by the runner: otherwise {_RUNNERS[name]}")


def _checks(expressions: list[str], place: Place, notes: Notes, *, real_work: bool) -> None:
    """Refuse checks that cannot be read, fail or pass; warn of those that an empty run would pass.

    A one-sided check is no gap if another check of the case bounds the same tag, or if the case's real work must not be
    zero; only for ratios around one (probability errors and ratios) is the second not enough.
    """
    one_sided: list[tuple[int, str, tuple[str, ...]]] = []
    bounded: set[str] = set()
    for i, expression in enumerate(expressions):
        tags, weak, mistake = _tried(expression)
        if mistake:
            notes.problem((*place, i), f"check {expression!r}: {mistake}")
        elif "never fails" in weak or "never passes" in weak:
            notes.problem((*place, i), f"check {expression!r}: {weak[0]}, whatever is measured")
        elif any(text.startswith("one-sided") for text in weak):
            one_sided.append((i, expression, tags))
        else:
            bounded.update(tags)
    for i, expression, tags in one_sided:
        ratio = any(_RATIO.search(tag) for tag in tags)
        if not set(tags) <= bounded and (ratio or not real_work):
            hint = "; its natural value is 1, so bound it from both sides" if ratio else ""
            notes.warning((*place, i), f"check {expression!r}: one-sided, passes on 0.0{hint}")


@cache
def _tried(expression: str) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the tags of a check, its weaknesses, and what is wrong with it; tried once however often it is used."""
    from tasks.checks import CheckSyntaxError, parse
    from tasks.weaknesses import weaknesses

    try:
        check = parse(expression)
    except CheckSyntaxError as error:
        return (), (), str(error)
    return check.tags, weaknesses(check), ""
