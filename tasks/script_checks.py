"""Read the checks out of a NeMo-RL functional or suite script, so that nobody copies them by hand.

    python -m tasks.script_checks SCRIPT      prints them as a YAML list for levels.yaml

The script is read, never run. What is understood is the part of the shell in which these scripts write their calls
of tests/check_metrics.py: quotes, continuation lines, comments, here documents, assignments and arrays,
`${name:-default}`, functions with literal arguments, `for` over literal words, `read <<<`. Both branches of an `if`
are read: a script that checks only after the last step still means its checks. What it computes (`$(...)`,
`$((...))`, variables of a sourced file) stays in the text as `${name}`, and `unresolved` names it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.grammar import CheckSyntaxError, parse
from tasks.shell_words import Word, commands

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tasks.levels import Case
    from tasks.shell_words import Command

PROGRAM = "check_metrics.py"
PREFIXES = frozenset(
    {"if", "then", "else", "elif", "while", "until", "do", "!", "{", "(", "time", "&&", "||", "done", "fi"}
)
DECLARES = frozenset({"local", "export", "readonly", "declare", "typeset"})
VALUE_OPTIONS = frozenset({"--table-width"})
MAX_CALLS = 2000  # commands looked at, functions and loops unrolled: a script that calls itself ends here
MAX_NESTING = 30  # functions and loops inside each other
MAX_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|[0-9]|\*|@)(\[[@*]\])?(?::?-([^}]*))?\}|([A-Za-z_]\w*|[0-9@*]))")
_FROM = re.compile(r"\$\{@:([0-9]+)\}")
_REDIRECT = re.compile(r"[0-9]*(<<<|>>|>&|<&|>|<)")


def read_checks(script: Path) -> tuple[str, ...]:
    """Return the check expressions of a script in order, each once; () where it calls check_metrics.py nowhere.

    Raises UserError where the script cannot be read or a quote is never closed.
    """
    try:
        data = script.read_bytes()
    except OSError as error:
        raise UserError(f"{script}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{script}: {len(data)} bytes are no test script; give the script that calls {PROGRAM}")
    try:
        found = commands(data.decode("utf-8", "replace"))
    except ValueError as error:
        raise UserError(f"{script}: {error}") from error
    shell = Shell()
    shell.run(found, {})
    return tuple(dict.fromkeys(shell.checks))


def unresolved(expr: str) -> tuple[str, ...]:
    """Return the names of shell variables left in an expression."""
    return tuple(dict.fromkeys(m[1] or m[4] for m in _VARIABLE.finditer(expr)))


def drift(levels_checks: Iterable[str], script: Path) -> tuple[str, ...]:
    """Return one sentence for each check of the script that `levels_checks` lacks; () where all are there.

    Spelling does not count (blanks, kind of quotes, 1.050). Further checks are no drift: levels.yaml adds its own.
    """
    ours = {_canonical(expr): expr for expr in levels_checks}
    told = []
    for expr in read_checks(script):
        if _canonical(expr) in ours:
            continue
        if names := unresolved(expr):
            told.append(f"{script.name}: {expr}: the script computes {', '.join(names)}; compare by hand")
            continue
        near = [other for key, other in ours.items() if key[:1] == _canonical(expr)[:1] and len(key) > 1]
        told.append(f"{script.name}: {expr}: " + (f"levels.yaml has {near[0]}" if near else "not in levels.yaml"))
    return tuple(told)


def as_upstream(case: Case) -> tuple[str, ...]:
    """Return a case's checks and, without their prefix, those on a further run's series: a script has no prefixes."""
    plain = [
        expr.replace(f"{prefix}/", "") for prefix in case.also_logs for expr in case.checks if f"{prefix}/" in expr
    ]
    return (*case.checks, *plain)


def _canonical(expr: str) -> tuple[object, ...]:
    """Return what two spellings of one check share: what is limited, then the rest."""
    try:
        check = parse(expr)
    except CheckSyntaxError:
        return ("".join(expr.split()),)
    return check.left, check.op, check.right


class Shell:
    """Follows assignments, functions and loops far enough to know the words of each call of check_metrics.py."""

    def __init__(self) -> None:
        self.variables: dict[str, list[str]] = {}
        self.functions: dict[str, list[Command]] = {}
        self.checks: list[str] = []
        self.calls = self.nesting = 0

    def run(self, script: Sequence[Command], positional: Mapping[str, str]) -> None:
        """Go through commands in order."""
        self.nesting += 1
        if self.nesting <= MAX_NESTING:
            self.follow(script, positional)
        self.nesting -= 1

    def follow(self, script: Sequence[Command], positional: Mapping[str, str]) -> None:
        """Take one command after the other: definitions and loops with their bodies, all others as they are."""
        at = 0
        while at < len(script):
            self.calls += 1
            if self.calls > MAX_CALLS:
                return
            command = list(script[at])
            while command and command[0].plain() in PREFIXES:
                command.pop(0)
            at += 1
            if not command:
                continue
            names = [word.plain() for word in command]
            if name := _defined(names):
                end = _closing(script, at - 1, "{", "}")
                first = command[names.index("{") + 1 :] if "{" in names else []
                self.functions[name] = [first, *script[at:end]] if first else list(script[at:end])
                at = end + 1
            elif names[0] == "for" and "in" in names[:3]:
                end = _closing(script, at, "do", "done")
                for item in self.expand(command[3:], positional):
                    self.variables[names[1]] = [item]
                    self.run(script[at:end], positional)
                at = end + 1
            else:
                self.simple(command, names, positional)

    def simple(self, command: Command, names: list[str], positional: Mapping[str, str]) -> None:
        """Take note of one assignment, `read`, function call or call of the program."""
        words = command[1:] if names[0] in DECLARES else command
        if words and _ASSIGN.match(words[0].plain()):
            self.assign(words, positional)
        elif names[0] == "read" and "<<<" in "".join(names):
            self.read(command, positional)
        elif names[0] in self.functions:
            arguments = self.expand(command[1:], positional)
            inner = {str(i): text for i, text in enumerate(arguments, 1)} | {"@": " ".join(arguments)}
            self.run(self.functions[names[0]], inner)
        else:
            place = next((i for i, name in enumerate(names) if name.endswith(PROGRAM)), None)
            if place is not None:
                self.note(self.expand(command[place + 1 :], positional))

    def note(self, words: list[str]) -> None:
        """Keep the checks of one call: what follows the options and the file."""
        rest: list[str] = []
        skip = False
        for word in words:
            if skip:
                skip = False
            elif word in VALUE_OPTIONS:
                skip = True
            elif not word.startswith("--"):
                rest.append(word)
        self.checks += rest[1:]

    def assign(self, words: Command, positional: Mapping[str, str]) -> None:
        """Set variables from `NAME=value`, `NAME+=(...)` and `NAME=(a b)`."""
        match = _ASSIGN.match(words[0].plain())
        if match and [word.plain() for word in words[1:2]] == ["("]:
            items = self.expand([word for word in words[2:] if word.plain() != ")"], positional)
            self.variables[match[1]] = (self.variables.get(match[1], []) if match[2] else []) + items
            return
        for word in words:
            if not (match := _ASSIGN.match(word.plain())):
                return
            literal, first = word.pieces[0]
            value = Word([(literal, first[match.end() :]), *word.pieces[1:]])
            self.variables[match[1]] = [self.one(value, positional)]

    def read(self, command: Command, positional: Mapping[str, str]) -> None:
        """Set variables from `read -r a b <<< "words"`."""
        at = next(i for i, word in enumerate(command) if "<<<" in word.plain())
        names = [word.plain() for word in command[1:at] if _NAME.fullmatch(word.plain())]
        given = " ".join(self.expand(command[at + 1 :], positional)).split()
        self.variables |= {name: [text] for name, text in zip(names, given, strict=False)}

    def expand(self, words: Sequence[Word], positional: Mapping[str, str]) -> list[str]:
        """Return words with variables replaced, arrays spread, redirections left out."""
        out: list[str] = []
        skip = False
        for word in words:
            if skip:
                skip = False
                continue
            plain = word.plain()
            if not word.pieces[0][0] and (match := _REDIRECT.match(plain)):
                skip = match.end() == len(plain)
                continue
            array = _VARIABLE.fullmatch(plain) if len(word.pieces) == 1 and not word.pieces[0][0] else None
            if array and array[2] and array[1] in self.variables:
                out += self.variables[array[1]]
            elif array and "@" in (array[1], array[4]) and "@" in positional:
                out += [text for name, text in positional.items() if name != "@"]
            elif (rest := _FROM.fullmatch(plain)) and "@" in positional:
                out += [text for name, text in positional.items() if name != "@" and int(name) >= int(rest[1])]
            else:
                out.append(self.one(word, positional))
        return out

    def one(self, word: Word, positional: Mapping[str, str]) -> str:
        """Return one word with its variables replaced where they are known."""

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[4]
            if name in positional:
                return positional[name]
            known = self.variables.get(name)
            if known is not None and not any("$(" in text or "`" in text for text in known):
                return " ".join(known)
            return match[3] if match[3] is not None else match[0]

        text = "".join(
            piece
            if literal
            else re.sub(r"\x00\$|" + _VARIABLE.pattern, lambda m: "$" if m[0] == "\0$" else value(m), piece)
            for literal, piece in word.pieces
        )
        return text.replace("\0", "")


def _defined(names: list[str]) -> str | None:
    """Return the name of the function whose definition a command begins, or None."""
    if names[0] == "function" and len(names) > 1:
        return names[1]
    return names[0] if names[1:3] == ["(", ")"] and _NAME.fullmatch(names[0].replace("-", "_")) else None


def _closing(script: Sequence[Command], at: int, opening: str, closing: str) -> int:
    """Return the index of the command with the word that closes what is opened at or after `at`."""
    depth = 0
    for index in range(at, len(script)):
        for position, word in enumerate(script[index]):
            plain = word.plain()
            if plain == opening and (position == 0 or opening == "{"):
                depth += 1
            elif plain == closing and position == 0:
                depth -= 1
                if depth <= 0:
                    return index
    return len(script)


def as_yaml(checks: Iterable[str]) -> str:
    """Return checks as a YAML list of single-quoted texts."""
    return "".join("- '" + expr.replace("'", "''") + "'\n" for expr in checks)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the checks of one script as YAML; exit status 0, or 2 where there are none or it cannot be read."""
    given = list(sys.argv[1:] if argv is None else argv)
    if len(given) != 1:
        print("usage: python -m tasks.script_checks SCRIPT", file=sys.stderr)
        return 2
    try:
        checks = read_checks(Path(given[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not checks:
        print(f"error: {given[0]}: no call of {PROGRAM}", file=sys.stderr)
        return 2
    print(as_yaml(checks), end="")
    for expr in checks:
        if names := unresolved(expr):
            print(f"warning: the script computes {', '.join(names)} in: {expr}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
