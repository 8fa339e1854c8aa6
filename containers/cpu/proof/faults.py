"""Faults that a mapping or provider can have, made one at a time from the source of a module; pure.

`faults(source, lines, most)` yields (operator, line, what, mutated source). `lines`: those that a proof ran;
faults lie in these. Texts are replaced in place: lines keep their numbers.
"""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

AXES = {"cat", "stack", "chunk", "split", "unbind", "sum", "concat"}
SILENT = (ast.Raise, ast.Assert, ast.FunctionDef, ast.ClassDef)  # no computing of the function itself


class _Text:
    """Source with nodes found by their place in it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Any) -> str:
        first, last = self.span(node)
        return self.source.encode()[first:last].decode()

    def replaced(self, *changes: tuple[Any, str]) -> str:
        made = self.source.encode()
        for node, new in sorted(changes, key=lambda change: self.span(change[0]), reverse=True):
            first, last = self.span(node)
            made = made[:first] + new.encode() + made[last:]
        return made.decode()


def faults(
    source: str, lines: set[int], most: int, fields: frozenset[str] = frozenset()
) -> Iterator[tuple[str, int, str, str]]:
    """Yield at most `most` faults, spread evenly over `lines`; each parses.

    `fields`: those of the model's configuration; an entry of a class's CONFIG_MAPPING for one of them is dropped.
    """
    text, seen = _Text(source), set()
    tree = ast.parse(source)
    found = [*_candidates(tree, lines), *_fields(tree, fields)]
    if len(found) > most:
        found = [found[index * len(found) // most] for index in range(most)]
    for operator, node, changes in found:
        mutated = text.replaced(*changes)
        what = "; ".join(f"{_short(text.text(old))} -> {_short(new) or 'nothing'}" for old, new in changes)
        try:
            ast.parse(mutated)
        except SyntaxError:
            continue
        if mutated not in seen and mutated != source:
            seen.add(mutated)
            yield operator, node.lineno, what, mutated


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def _candidates(tree: ast.Module, lines: set[int]) -> Iterator[tuple[str, Any, tuple[tuple[Any, str], ...]]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in _walk(statement, lines):
                    yield from _of(node)


def _fields(tree: ast.Module, fields: frozenset[str]) -> Iterator[tuple[str, Any, tuple[tuple[Any, str], ...]]]:
    """Yield the loss of each pair ("field of the configuration", "field of the provider") that the model has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONFIG_MAPPING":
            pairs = [pair for pair in ast.walk(node) if isinstance(pair, ast.Tuple)]
            for pair in pairs:
                if _texts(pair.elts) and _texts(pair.elts)[0].value in fields:
                    yield "config dropped", pair, ((pair, "*()"),)


def _walk(node: ast.AST, lines: set[int]) -> Iterator[ast.AST]:
    """Walk what ran, without messages: what is raised, asserted or logged changes nothing that is computed."""
    if isinstance(node, SILENT) or _is_talk(node):
        return
    if isinstance(node, ast.stmt):
        last = node.body[0].lineno - 1 if isinstance(node, ast.If | ast.For | ast.With | ast.Try) else node.end_lineno
        if not lines.intersection(range(node.lineno, (last or node.lineno) + 1)) and not isinstance(node, ast.Try):
            return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, lines)


def _is_talk(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True  # a docstring
    call = node.value
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(
        ("logger.", "logging.", "warnings.", "print")
    )


def _texts(nodes: list[Any]) -> list[Any]:
    return [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _of(node: Any) -> Iterator[tuple[str, Any, tuple[tuple[Any, str], ...]]]:
    if isinstance(node, ast.Call):
        yield from _call(node)
    if isinstance(node, ast.Dict):
        values = _texts(node.values)
        for one, other in itertools.pairwise(values):
            yield "swap", one, ((one, repr(other.value)), (other, repr(one.value)))
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None and isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield "dropped entry", key, ((key, repr(f"{key.value}.unknown")),)
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and ".*." in value.value:
                yield "wildcard", value, ((value, repr(value.value.replace(".*.", ".0.", 1))),)
    if isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1 and isinstance(node.ctx, ast.Load):
        plain = [e for e in node.elts if isinstance(e, ast.Name)]
        for one, other in itertools.pairwise(plain):
            yield "swap", one, ((one, other.id), (other, one.id))
        calls = [e for e in node.elts if isinstance(e, ast.Call)]
        if len(calls) == len(node.elts) and isinstance(node, ast.List):
            for call in calls:
                yield "dropped entry", call, ((call, "*()"),)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        yield "config dropped", node, ((node, "pass"),)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        yield "config dropped", node, ((node, "pass"),)
    if isinstance(node, ast.Constant):
        yield from _constant(node)
    if isinstance(node, ast.If | ast.IfExp):
        yield "branch", node, ((node.test, f"(not ({ast.unparse(node.test)}))"),)
    if isinstance(node, ast.BinOp) and type(node.op) in {ast.Mult: 0, ast.FloorDiv: 0, ast.Add: 0, ast.Sub: 0}:
        yield "arithmetic", node, ((node, f"({ast.unparse(node)} + 1)"),)


def _call(node: ast.Call) -> Iterator[tuple[str, Any, tuple[tuple[Any, str], ...]]]:
    words = [k for k in node.keywords if isinstance(k.value, ast.Constant) and isinstance(k.value.value, str)]
    for one, other in itertools.pairwise(words):
        if "megatron_param" not in (one.arg, other.arg):
            yield "swap", node, ((one.value, ast.unparse(other.value)), (other.value, ast.unparse(one.value)))
    for word in words:
        value: Any = word.value
        if ".*." in value.value:
            yield "wildcard", value, ((value, repr(value.value.replace(".*.", ".0.", 1))),)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name in AXES:
        axes: list[Any] = [k.value for k in node.keywords if k.arg == "dim"]
        axes += [a for a in node.args[1:] if isinstance(a, ast.Constant) and type(a.value) is int][-1:]
        for axis in axes:
            yield "axis", axis, ((axis, f"(1 - ({ast.unparse(axis)}))"),)
    if name in {"cat", "view", "reshape"}:
        yield "scale", node, ((node, f"({ast.unparse(node)} * 1.01)"),)
        yield "order", node, ((node, f"({ast.unparse(node)}).flip(0)"),)
        yield "transposed", node, ((node, f"({ast.unparse(node)}).transpose(0, -1)"),)


def _constant(node: ast.Constant) -> Iterator[tuple[str, Any, tuple[tuple[Any, str], ...]]]:
    if isinstance(node.value, bool):
        yield "constant", node, ((node, repr(not node.value)),)
    elif isinstance(node.value, int):
        yield "constant", node, ((node, repr(node.value + 1)),)
    elif isinstance(node.value, float):
        yield "constant", node, ((node, repr(node.value * 2 + 1e-3)),)
    elif node.value in ("RMSNorm", "LayerNorm"):
        yield "constant", node, ((node, repr({"RMSNorm": "LayerNorm", "LayerNorm": "RMSNorm"}[node.value])),)
