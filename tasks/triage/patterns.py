"""Regular expressions as data: what literal text a match must contain, and a user's pattern made safe.

`needles` gives literals of which every match contains one, so that a fast search may skip lines; `compile_user` takes
what a user wrote and refuses what could hang the judge. The parser is CPython's own (`re._parser`).
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.errors import UserError
from tasks.triage.danger import cost, danger

if TYPE_CHECKING:
    from collections.abc import Iterable

_parser: Any = importlib.import_module("re._parser")
_c: Any = importlib.import_module("re._constants")

SHORTEST_NEEDLE = 3  # characters; shorter ones are in every line
MOST_NEEDLES = 12  # alternatives; with more the plain search is as good
# Characters of a line that a user's pattern may see, by the power of that number that a failing search may cost: about
# a second on a line made for it. Lines of a run are rarely longer than 1 KiB.
LONGEST = {0: 16384, 1: 16384, 2: 4096, 3: 512, 4: 128}


@dataclass(frozen=True, slots=True)
class UserPattern:
    """A regular expression of a user, safe to search in the first `longest` characters of a line."""

    text: str
    compiled: re.Pattern[str]
    needles: tuple[bytes, ...] | None
    longest: int

    def found_in(self, line: str) -> bool:
        """Tell whether `line` matches somewhere in its first `longest` characters."""
        return self.compiled.search(line, 0, self.longest) is not None


def compile_user(pattern: str, where: str) -> UserPattern:
    """Compile a regular expression that a user wrote in `where`.

    Raises UserError for a syntax error (with its column) and for a pattern whose time may explode.
    """
    body = pattern
    while body.startswith(".*"):  # changes nothing for a search but its time
        body = body[3:] if body[2:3] in ("?", "+") else body[2:]
    try:
        re.compile(pattern)
        compiled = re.compile(body)
        parsed = _parser.parse(body)
        problem = danger(parsed)
        literals = needles(body)
    except re.error as error:
        at = f" at column {error.colno}" if error.colno is not None else ""
        raise UserError(f"{where}: the regular expression {pattern!r} is not valid: {error.msg}{at}") from error
    except (OverflowError, RecursionError) as error:
        raise UserError(f"{where}: the regular expression {pattern!r} is too large") from error
    if problem:
        raise UserError(
            f"{where}: the regular expression {pattern!r} may take for ever on some line: {problem}; "
            "write it without a repetition inside a repetition, for example with a negated class such as [^,]*"
        )
    return UserPattern(pattern, compiled, literals, LONGEST[cost(parsed)])


def needles(pattern: str) -> tuple[bytes, ...] | None:
    """Return literals (UTF-8, three characters or more) of which every match of `pattern` contains at least one.

    None where there are none: a case-insensitive pattern, or one without a fixed part.
    """
    if re.compile(pattern).flags & re.IGNORECASE:
        return None
    found = _needles(_parser.parse(pattern))
    return tuple(sorted({text.encode() for text in found})) if found else None


def _needles(items: Iterable[Any]) -> list[str] | None:
    """Choose the best set of alternatives of one sequence: few, then rare ones."""
    options: list[list[str]] = []
    run = ""
    for op, value in [*items, (None, None)]:
        if op is _c.LITERAL:
            run += chr(value)
            continue
        if op is _c.AT:
            continue
        options.append([run])
        run = ""
        inner = _inside(op, value)
        if inner:
            options.append(inner)
    usable = [o for o in options if len(o) <= MOST_NEEDLES and min(map(len, o)) >= SHORTEST_NEEDLE]
    return min(usable, key=lambda o: (len(o), -min(map(_rarity, o)))) if usable else None


def _rarity(text: str) -> int:
    """Guess how rare a text is in a log: long ones are, capitals and signs count more."""
    return sum(1 if c.islower() or c == " " else 3 for c in text[:24])


def _inside(op: Any, value: Any) -> list[str] | None:
    """Return the needles of one compound item of a sequence."""
    if op is _c.SUBPATTERN:
        _group, added, _removed, body = value
        return None if added & re.IGNORECASE else _needles(body)
    if op is _c.ATOMIC_GROUP:
        return _needles(value)
    if op in (_c.MAX_REPEAT, _c.MIN_REPEAT, _c.POSSESSIVE_REPEAT):
        least, _most, body = value
        return _needles(body) if least else None
    if op is _c.BRANCH:
        each = [_needles(branch) for branch in value[1]]
        return None if any(e is None for e in each) else [text for e in each if e for text in e]
    return None
