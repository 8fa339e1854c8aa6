"""The training calls of a NeMo-RL functional or suite script: which program it starts, with which arguments.

The script is read, never run (`tasks.script_checks` says how much of the shell is understood). The folders that every
script computes about itself are known here; whatever else it computes stays unread: the call then has the marker
`UNREAD` in its place and says so, and nobody pretends to know it. Both branches of an `if` are read.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from tasks.errors import UserError
from tasks.script_checks import Shell
from tasks.shell_words import commands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.shell_words import Command

UNREAD = "e2e-unread"
_PROGRAM = re.compile(r"(?:.*/)?(examples/(?:\w+/)*run_\w+\.py)")
_COMPUTED = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\$\{[^}]*\}|\$\w+")
_HYDRA = re.compile(r"\$\{(?:\w+:|\w+\.)[^}]*\}")  # `${a.b}` and `${mul:1,2}` are the config's own language


@dataclass(frozen=True, slots=True)
class Call:
    """One start of a training program: its path in the checkout and what follows it, as the program gets it.

    `unread` has the arguments of which some part is computed by the script, as written; `variables` what the script
    sets of NeMo-RL's own environment variables.
    """

    program: str
    arguments: tuple[str, ...]
    unread: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the call as plain JSON."""
        return asdict(self) | {"variables": dict(self.variables)}


def of_command(words: Sequence[str]) -> tuple[Call, ...]:
    """Return the training call in a command line; () where it starts none of NeMo-RL's programs."""
    at = next((i for i, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
    return () if at is None else (_call(words[at], words[at + 1 :], {}),)


def of_script(name: str, text: str, arguments: Sequence[str], known: Mapping[str, str]) -> tuple[Call, ...]:
    """Return the training calls of the script `name` (a path in the checkout), in order, each once.

    `arguments` are what the script is called with, `known` are variables of its environment. Raises UserError where a
    quote is never closed.
    """
    shell = _Calls(name, known)
    try:
        found = commands(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    shell.run(found, {str(i): word for i, word in enumerate(arguments, 1)} | {"@": " ".join(arguments)})
    return tuple(dict.fromkeys(shell.found))


class _Calls(Shell):
    """Notes calls of training programs; what a script computes about its own place is known beforehand."""

    def __init__(self, name: str, known: Mapping[str, str]) -> None:
        super().__init__()
        path = PurePosixPath(name)
        folder = str(path.with_suffix(""))
        config = path.with_suffix(".yaml").as_posix().replace("tests/test_suites", "examples/configs/recipes")
        # what tests/test_suites/*/common.env derives from the script's name; functional scripts assign the same names
        place = {
            "PROJECT_ROOT": ".", "SCRIPT_DIR": str(path.parent), "EXP_NAME": path.stem, "EXP_DIR": folder,
            "LOG_DIR": f"{folder}/logs", "CKPT_DIR": f"{folder}/ckpts", "JSON_METRICS": f"{folder}/metrics.json",
            "RUN_LOG": f"{folder}/run.log", "CONFIG_PATH": config,
        }  # fmt: skip
        self.fixed = frozenset(place)
        self.variables |= {key: [value] for key, value in {**known, **place}.items()}
        self.found: list[Call] = []

    def assign(self, words: Command, positional: Mapping[str, str]) -> None:
        """Set variables as ever, but let no computed value hide what is known of the script's own place."""
        before = {key: self.variables[key] for key in self.fixed}
        super().assign(words, positional)
        for key, value in before.items():
            if _computed("".join(self.variables[key])):
                self.variables[key] = value

    def simple(self, command: Command, names: list[str], positional: Mapping[str, str]) -> None:
        """Note the call of a training program; anything else as ever. `shift N` moves the function's arguments."""
        if names[0] == "shift" and isinstance(positional, dict):
            count = int(names[1]) if len(names) > 1 and names[1].isdecimal() else 1
            rest = [text for name, text in positional.items() if name != "@"][count:]
            positional.clear()
            positional |= {str(i): text for i, text in enumerate(rest, 1)} | {"@": " ".join(rest)}
            return
        at = next((i for i, name in enumerate(names) if _PROGRAM.fullmatch(name)), None)
        if at is None or names[0] in ("echo", "printf", "cp", "cat", "grep"):
            super().simple(command, names, positional)
            return
        words = self.expand(command[at:], positional)
        for word in command[:at]:  # NAME=value before the program
            self.assign([word], positional)
        known = {key: " ".join(value) for key, value in self.variables.items() if key.startswith("NRL_")}
        words = [word for word in words if word not in ("", "(", ")")]
        self.found.append(_call(words[0], words[1:], known))


def _computed(word: str) -> bool:
    return _COMPUTED.search(_HYDRA.sub("", word)) is not None


def _call(program: str, words: Sequence[str], variables: Mapping[str, str]) -> Call:
    kept: dict[str, None] = {}
    clean: list[str] = []
    for word in words:
        text = word.removeprefix("./")
        if _computed(text):
            kept[text] = None
            text = _COMPUTED.sub(UNREAD, text)
            if text == UNREAD and clean[-1:] != ["--config"]:
                continue  # any number of arguments
        clean.append(text.replace("=./", "=", 1))
    return Call(_PROGRAM.sub(r"\1", program), tuple(clean), tuple(kept), tuple(sorted(variables.items())))
