"""Which regular expressions may take for ever: read from the parsed pattern, without running it.

Python's engine backtracks. Time explodes where one text can be divided among repetitions in many ways: a repetition
inside a repetition (exponential: refused), or several side by side (a power of the line's length: the line is bounded).
The parser is CPython's own (`re._parser`).
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_c: Any = importlib.import_module("re._constants")

UNBOUNDED = 64  # repetitions from here on count as "any number"
MOST_SIDE_BY_SIDE = 3
ANY_BYTE = frozenset(range(256))


def danger(items: Sequence[Any]) -> str:
    """Return why searching this parsed pattern may take exponential time, or an empty string.

    A repetition is harmless around another one only if a mandatory character parts the turns of the outer one and
    none of the inner ones can match that character. This refuses some harmless patterns, and no exponential one that
    is built from repetitions and alternatives.
    """
    for body in _unbounded(items):
        inner = list(_unbounded(body))
        clash = _overlapping_branch(body)
        if clash:
            return clash
        if not inner and not _varies(body):
            continue
        separators = [chars for chars in map(_characters, _flat(body)) if chars]
        swallowed = frozenset[int]().union(*(_all_characters(b) for b in inner), _optional_characters(body))
        if not any(chars.isdisjoint(swallowed) for chars in separators):
            return "a repetition inside a repetition can match the same text in many ways"
    if degree(items) > MOST_SIDE_BY_SIDE:
        return f"more than {MOST_SIDE_BY_SIDE} repetitions side by side can match the same text in many ways"
    return ""


def degree(items: Sequence[Any]) -> int:
    """Return how many unbounded repetitions side by side may share one text: time grows with that power of its length.

    Two literal characters in a row, or a character that none of them can match, part them.
    """
    most = count = literals = 0
    swallowed: frozenset[int] = frozenset()
    for op, value in _flat(items):
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT) and value[1] >= UNBOUNDED:
            count, swallowed, literals = count + 1, swallowed | _all_characters(value[2]), 0
        else:
            most = max([most, *(degree(part) for part in _parts(op, value))])
            literals = literals + 1 if op is _c.LITERAL else 0
            known = _characters((op, value))
            if literals > 1 or (known and known.isdisjoint(swallowed)):
                count, swallowed = 0, frozenset()
        most = max(most, count)
    return most


def cost(items: Sequence[Any]) -> int:
    """Return the power of a line's length that a failing search may cost at worst."""
    start = [op for op, value in list(_flat(items))[:2]]
    fixed = start[:1] == [_c.AT] or start == [_c.LITERAL, _c.LITERAL]
    return degree(items) + (0 if fixed else 1)


def _parts(op: Any, value: Any) -> list[Any]:
    """Return the sequences inside one compound item."""
    if op is _c.SUBPATTERN:
        return [value[3]]
    if op is _c.ATOMIC_GROUP:
        return [value]
    if op in (_c.MAX_REPEAT, _c.MIN_REPEAT, _c.POSSESSIVE_REPEAT):
        return [value[2]]
    if op is _c.BRANCH:
        return list(value[1])
    if op in (_c.ASSERT, _c.ASSERT_NOT):
        return [value[1]]
    if op is _c.GROUPREF_EXISTS:
        return [part for part in value[1:] if part]
    return []


def _unbounded(items: Iterable[Any]) -> Iterable[Any]:
    """Yield the body of every unbounded backtracking repetition, at any depth."""
    for op, value in items:
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT) and value[1] >= UNBOUNDED:
            yield value[2]
        for part in _parts(op, value):
            yield from _unbounded(part)


def _flat(items: Iterable[Any]) -> Iterable[Any]:
    """Yield the mandatory items of a sequence, groups opened."""
    for op, value in items:
        if op is _c.SUBPATTERN:
            yield from _flat(value[3])
        elif op in (_c.MAX_REPEAT, _c.MIN_REPEAT) and value[0] == value[1] == 1:
            yield from _flat(value[2])
        else:
            yield op, value


def _varies(items: Any) -> bool:
    """Tell whether the length of a match of `items` is not fixed."""
    least, most = items.getwidth()
    return bool(least != most)


def _characters(item: Any) -> frozenset[int]:
    """Return the Latin-1 characters that a one-character item matches; empty for anything else."""
    op, value = item
    if op is _c.LITERAL:
        return frozenset({min(value, 255)})
    if op is _c.NOT_LITERAL:
        return ANY_BYTE - {value}
    if op is _c.ANY:
        return ANY_BYTE
    if op is _c.IN:
        return _class_characters(value)
    return frozenset()


_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


def _class_characters(members: Sequence[Any]) -> frozenset[int]:
    found: set[int] = set()
    negated = False
    for op, value in members:
        if op is _c.NEGATE:
            negated = True
        elif op is _c.LITERAL:
            found.add(min(value, 255))
        elif op is _c.RANGE:
            found.update(range(min(value[0], 255), min(value[1], 255) + 1))
        else:
            name = str(value).removeprefix("CATEGORY_")
            category = re.compile(_CATEGORIES[name.removeprefix("NOT_")])
            found.update(n for n in range(256) if bool(category.match(chr(n))) != name.startswith("NOT_"))
    return ANY_BYTE - found if negated else frozenset(found)


def _all_characters(items: Iterable[Any]) -> frozenset[int]:
    """Return every character that a sequence may match anywhere."""
    result: frozenset[int] = frozenset()
    for op, value in items:
        parts = _parts(op, value)
        known = _characters((op, value))
        if op is _c.GROUPREF:
            return ANY_BYTE
        result |= known.union(*(_all_characters(part) for part in parts))
    return result


def _optional_characters(items: Iterable[Any]) -> frozenset[int]:
    """Return the characters of the parts of a sequence that have no fixed length."""
    result: frozenset[int] = frozenset()
    for op, value in _flat(items):
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT, _c.BRANCH):
            result |= _all_characters([(op, value)])
    return result


def _first_characters(items: Sequence[Any]) -> frozenset[int]:
    """Return the characters that a match may begin with; everything if that is not plain to see."""
    for op, value in _flat(items):
        if op in (_c.AT, _c.ASSERT, _c.ASSERT_NOT):
            continue
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT) and value[0] > 0:
            return _first_characters(value[2])
        return _characters((op, value)) or ANY_BYTE
    return ANY_BYTE  # an empty alternative


def _overlapping_branch(items: Iterable[Any]) -> str:
    """Return a complaint if alternatives inside a repetition can begin with the same character."""
    for op, value in items:
        if op is _c.BRANCH:
            seen: frozenset[int] = frozenset()
            for branch in value[1]:
                first = _first_characters(branch)
                if first & seen:
                    return "alternatives inside a repetition can begin with the same character"
                seen |= first
        for part in _parts(op, value):
            if clash := _overlapping_branch(part):
                return clash
    return ""
