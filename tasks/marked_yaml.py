"""YAML as people write it here: plain data with line numbers, and none of YAML 1.1's surprises.

`read(path)` returns the value and a map from each place in it to its line. PyYAML only composes the nodes; what a plain
scalar means is decided below (the JSON-like core of YAML 1.2), because YAML 1.1 makes `1e-3` text, `on` and `no`
booleans, `012` ten and `1:30` ninety. Where one spelling has two readings the file is refused, never guessed.
Duplicate keys, merge keys, tags, non-finite numbers and recursive aliases are errors too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from yaml.nodes import Node

Place = tuple[str | int, ...]
"""Where in a document: keys of mappings (as text) and positions in lists, outermost first."""

MAX_BYTES = 4 << 20  # a levels file has some 60 KiB; anything near this is the wrong file
MAX_VALUES = 100_000  # aliases can multiply a small file into an endless one

_INT = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|\.[0-9]+)")
_BOOLEAN_11 = re.compile(r"yes|no|on|off", re.IGNORECASE)
_SIXTY = re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?")
_ODD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+|[0-9][0-9_]*_[0-9_]*)|\+[0-9.]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE)


class FileError(UserError):
    """Mistakes in a file that people write; the text has one line `FILE:LINE: what, and what to do` for each."""

    def __init__(self, path: Path, problems: list[tuple[int, str]]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(f"{path}:{line}: {text}" for line, text in self.problems))


@dataclass(frozen=True, slots=True)
class Marked:
    """A parsed file: its plain value and the line (from 1) of every key and list element."""

    path: Path
    value: Any
    lines: Mapping[Place, int]

    def line(self, place: Place) -> int:
        """Return the line of `place` or of the nearest thing around it that is in the file."""
        at = tuple(str(p) if not isinstance(p, int) else p for p in place)
        while at and at not in self.lines:
            at = at[:-1]
        return self.lines.get(at, 1)


def read(path: Path) -> Marked:
    """Parse the one YAML document in `path`. Raises FileError with line numbers, UserError if it cannot be read."""
    try:
        with path.open("rb") as source:
            data = source.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES >> 20} MiB, which no such file is")
    return parse(data, path)


def parse(data: bytes, path: Path) -> Marked:
    """Parse the bytes of `path` (which is only named in messages)."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser is 10x faster and limits nesting
    # With no implicit resolvers every scalar arrives as text, and whatever has another tag was tagged by hand.
    plain = type("PlainLoader", (loader,), {"yaml_implicit_resolvers": {}})
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FileError(path, [(line, "not UTF-8; save the file as UTF-8")]) from None
    try:
        node = yaml.compose(text, Loader=plain)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = getattr(error, "position", None)
        line = mark.line + 1 if mark else text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
        raise FileError(path, [(line, f"not YAML: {what}")]) from None
    except RecursionError:
        raise FileError(path, [(1, "nested too deeply")]) from None
    if node is None:
        raise FileError(path, [(1, "the file is empty")])
    reader = _Reader(path)
    value = reader.value(node, ())
    if reader.problems:
        raise FileError(path, reader.problems)
    return Marked(path, value, reader.lines)


class _Reader:
    """Turns composed nodes into plain values, noting lines and collecting every problem rather than the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[Place, int] = {}
        self.problems: list[tuple[int, str]] = []
        self._open: set[int] = set()  # nodes being read: meeting one again means an alias inside itself
        self._count = 0

    def value(self, node: Node, place: Place) -> Any:
        line = _line(node)
        self.lines.setdefault(place, line)
        self._count += 1
        if self._count > MAX_VALUES:
            raise FileError(self.path, [(line, f"more than {MAX_VALUES:,} values (aliases inside aliases?)")])
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rpartition(":")[2] not in {"str", "map", "seq"}:
            self._problem(line, f"tag {node.tag.rpartition(':')[2]!r}: tags are not read here; remove it")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, line)
        if id(node) in self._open:
            self._problem(line, "an alias contains itself")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, place)
            return [self.value(child, (*place, i)) for i, child in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: MappingNode, place: Place) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, child in node.value:
            line = _line(key_node)
            if not isinstance(key_node, ScalarNode):
                self._problem(line, "a key must be one word, not a list or mapping")
                continue
            if key_node.value == "<<" and not key_node.style:
                self._problem(line, "merge keys (<<) are not read here; write the keys out")
                continue
            self._scalar(key_node, line)  # for its objections: `00` and `on` are no keys
            key = key_node.value
            if key in result:
                first = self.lines[(*place, key)]
                self._problem(line, f"key {key!r} twice (first on line {first}); the second would hide the first")
                continue
            self.lines[(*place, key)] = line
            result[key] = self.value(child, (*place, key))
        return result

    def _scalar(self, node: ScalarNode, line: int) -> Any:
        text: str = node.value
        if node.style:  # quoted or a block: text, whatever it looks like
            return text
        if text in {"", "~", "null", "Null", "NULL"}:
            return None
        if text in {"true", "True", "TRUE", "false", "False", "FALSE"}:
            return text.lower() == "true"
        if _INT.fullmatch(text):
            return int(text) if len(text) < 300 else self._problem(line, "a number of more than 300 digits")
        if _FLOAT.fullmatch(text):
            number = float(text)
            return number if abs(number) != float("inf") else self._problem(line, f"{text} is beyond every number")
        if _BOOLEAN_11.fullmatch(text):
            return self._problem(line, f"{text}: a boolean in YAML 1.1, text elsewhere; write true, false or {text!r}")
        if _SIXTY.fullmatch(text):
            return self._problem(line, f"{text}: YAML 1.1 reads this in base 60; write 90s, 45m, 1h30m or '{text}'")
        if _ODD_NUMBER.fullmatch(text):
            return self._problem(line, f"{text}: YAML 1.1 and 1.2 disagree on it; write it in decimal or as '{text}'")
        if _NOT_FINITE.fullmatch(text):
            return self._problem(line, f"{text}: not a finite number")
        return text

    def _problem(self, line: int, text: str) -> None:
        self.problems.append((line, text))


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
