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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.grammar import CheckSyntaxError, parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PROGRAM = "check_metrics.py"
PREFIXES = frozenset(
    {"if", "then", "else", "elif", "while", "until", "do", "!", "{", "(", "time", "&&", "||", "done", "fi"}
)
DECLARES = frozenset({"local", "export", "readonly", "declare", "typeset"})
OPERATORS = ("&&", "||", ";;", "|&", "|", ";", "&", "(", ")", "\n")
VALUE_OPTIONS = frozenset({"--table-width"})
MAX_CALLS = 2000  # commands looked at, functions and loops unrolled: a script that calls itself ends here
MAX_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|[0-9]|\*|@)(\[[@*]\])?(?::?-([^}]*))?\}|([A-Za-z_]\w*|[0-9@*]))")
_REDIRECT = re.compile(r"[0-9]*(<<<|>>|>&|<&|>|<)")
_HEREDOC = re.compile(r"[0-9]*<<(-?)\s*(['\"]?)([A-Za-z_]\w*)\2")


@dataclass(slots=True)
class Word:
    """One word before expansion: pieces of literal text (True) and of text in which variables count (False)."""

    pieces: list[tuple[bool, str]] = field(default_factory=list)

    def plain(self) -> str:
        """Return the text without expansion."""
        return "".join(text for _, text in self.pieces)


Command = list[Word]


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
        commands = _Lexer(data.decode("utf-8", "replace")).commands()
    except ValueError as error:
        raise UserError(f"{script}: {error}") from error
    shell = _Shell()
    shell.run(commands, {})
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


def _canonical(expr: str) -> tuple[str, ...]:
    """Return what two spellings of one check share: what is limited, then the rest."""
    try:
        check = parse(expr)
    except CheckSyntaxError:
        return ("".join(expr.split()),)
    return repr(check.left), check.op, repr(check.right)


class _Lexer:
    """Splits a script into simple commands of words."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text.replace("\\\n", ""), 0
        self.awaited: list[tuple[str, bool]] = []  # here documents that begin after this line

    def commands(self) -> list[Command]:
        """Return all commands; the words "(" and ")" of arrays and functions are words of their own."""
        found: list[Command] = [[]]
        word: Word | None = None
        text, in_array = self.text, False
        while self.at < len(text):
            char = text[self.at]
            if char in " \t\r" or (in_array and char == "\n"):
                word, self.at = None, self.at + 1
            elif char == "#" and word is None:
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif word is None and (match := _HEREDOC.match(text, self.at)):
                self.awaited.append((match[3], match[1] == "-"))
                self.at = match.end()
            elif operator := next((o for o in OPERATORS if text.startswith(o, self.at)), None):
                in_array = operator == "(" and word is not None and word.plain().endswith("=")
                word = None
                self.at += len(operator)
                if operator in "()":
                    found[-1].append(Word([(True, operator)]))
                    continue
                found.append([])
                if operator == "\n":
                    self.skip_documents()
            else:
                if word is None:
                    word = Word()
                    found[-1].append(word)
                word.pieces.append(self.piece(char))
        return [command for command in found if command]

    def piece(self, char: str) -> tuple[bool, str]:
        """Read one quoted or unquoted piece of a word."""
        text, start = self.text, self.at
        if char == "'":
            end = text.find("'", start + 1)
            if end < 0:
                raise ValueError(f"line {text.count(chr(10), 0, start) + 1}: a ' is never closed")
            self.at = end + 1
            return True, text[start + 1 : end]
        if char == '"':
            return False, self.double_quoted()
        if char == "\\":
            self.at += 2
            return True, text[start + 1 : start + 2]
        if text.startswith(("$(", "${", "`"), start):
            self.at = self.balanced(start)
            return False, text[start : self.at]
        self.at += 1
        while self.at < len(text) and text[self.at] not in " \t\r\n'\"\\`;&|()$":
            self.at += 1
        return False, text[start : self.at]

    def double_quoted(self) -> str:
        """Read to the closing quote; a backslash hides quote, backslash, dollar and back tick, and stays otherwise."""
        text, start = self.text, self.at
        out: list[str] = []
        self.at += 1
        while self.at < len(text):
            char = text[self.at]
            if char == '"':
                self.at += 1
                return "".join(out)
            if char == "\\" and text[self.at + 1 : self.at + 2] in set('"\\$`'):
                out.append(("\0" if text[self.at + 1] == "$" else "") + text[self.at + 1])
                self.at += 2
            elif text.startswith(("$(", "${", "`"), self.at):
                end = self.balanced(self.at)
                out.append(text[self.at : end])
                self.at = end
            else:
                out.append(char)
                self.at += 1
        raise ValueError(f'line {text.count(chr(10), 0, start) + 1}: a " is never closed')

    def balanced(self, start: int) -> int:
        """Return where a `$(...)`, `${...}` or back-ticked text ends; quotes inside are skipped as a whole."""
        text = self.text
        if text[start] == "`":
            end = text.find("`", start + 1)
            return len(text) if end < 0 else end + 1
        opening, closing = text[start + 1], ")" if text[start + 1] == "(" else "}"
        depth, at = 0, start + 1
        while at < len(text):
            char = text[at]
            if char == "\\":
                at += 1
            elif char in "'\"" and opening == "(":
                end = text.find(char, at + 1)
                at = len(text) if end < 0 else end
            elif char in (opening, closing):
                depth += 1 if char == opening else -1
                if not depth:
                    return at + 1
            at += 1
        return len(text)

    def skip_documents(self) -> None:
        """Step over the here documents that the line before announced."""
        for delimiter, tabs in self.awaited:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = end + 1
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self.awaited.clear()


class _Shell:
    """Follows assignments, functions and loops far enough to know the words of each call of check_metrics.py."""

    def __init__(self) -> None:
        self.variables: dict[str, list[str]] = {}
        self.functions: dict[str, list[Command]] = {}
        self.checks: list[str] = []
        self.calls = 0

    def run(self, commands: Sequence[Command], positional: Mapping[str, str]) -> None:
        """Go through commands in order."""
        at = 0
        while at < len(commands):
            self.calls += 1
            if self.calls > MAX_CALLS:
                return
            command = list(commands[at])
            while command and command[0].plain() in PREFIXES:
                command.pop(0)
            at += 1
            if not command:
                continue
            names = [word.plain() for word in command]
            if name := _defined(names):
                end = _closing(commands, at - 1, "{", "}")
                first = command[names.index("{") + 1 :] if "{" in names else []
                self.functions[name] = [first, *commands[at:end]] if first else list(commands[at:end])
                at = end + 1
            elif names[0] == "for" and "in" in names[:3]:
                end = _closing(commands, at, "do", "done")
                for item in self.expand(command[3:], positional):
                    self.variables[names[1]] = [item]
                    self.run(commands[at:end], positional)
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


def _closing(commands: Sequence[Command], at: int, opening: str, closing: str) -> int:
    """Return the index of the command with the word that closes what is opened at or after `at`."""
    depth = 0
    for index in range(at, len(commands)):
        for position, word in enumerate(commands[index]):
            plain = word.plain()
            if plain == opening and (position == 0 or opening == "{"):
                depth += 1
            elif plain == closing and position == 0:
                depth -= 1
                if depth <= 0:
                    return index
    return len(commands)


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
