"""The grammar of checks: one comparison over logged series, parsed with Python's `ast`, never evaluated by Python.

    check      = number OP number | value "==" "text" | "step" "in" series | truth
    OP         = "<" | "<=" | ">" | ">=" | "=="
    number     = constant | value | call | abs(number) | number ("-" | "*" | "/") number | (number)
    value      = data["tag"] | data["tag"]["step"]
    series     = data["tag"] | finite_only(data["tag"])
    call       = function(series, constants...)            functions and parameters: tasks/trends.py
    truth      = improves(series) and the other functions marked there as such

That is all which NeMo-RL's scripts use in any revision (310 calls of tests/check_metrics.py, 338 different expressions)
and the functions added here. Anything else is a CheckSyntaxError that points at its column. Length and depth are
bounded before and after Python's parser sees the text, so that a hostile one costs nothing.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.trends import FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasks.trends import Function, Parameter

MAX_LENGTH = 1000  # characters; the longest upstream expression has 92
MAX_DEPTH = 20  # nodes from the root; the deepest upstream expression has 7
MAX_NUMBER_TEXT = 40  # characters of a constant, "1e309" is refused by its value
SIGNS: dict[type[ast.operator], str] = {ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.In: "in",
}


class CheckSyntaxError(ValueError):
    """The expression is not in the grammar: `column` (from 1) says where, `problem` what is wrong."""

    def __init__(self, problem: str, expr: str, column: int) -> None:
        super().__init__(f"column {column}: {problem}")
        self.problem = problem
        self.expr = expr
        self.column = column

    def pointed(self) -> str:
        """Return the problem, the expression, and a mark under the column: three lines."""
        line = re.sub(r"\s", " ", self.expr)
        return f"{self}\n  {line}\n  {' ' * (self.column - 1)}^"


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, or a text."""

    value: float | str


@dataclass(frozen=True, slots=True)
class Value:
    """`data["tag"]` as a single value, or the value of one step of it."""

    tag: str
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """`data["tag"]` as a series; `only_finite` leaves out what is not finite."""

    tag: str
    only_finite: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the table on a series; `arguments` in the order of its parameters, None where left out."""

    name: str
    series: Series
    arguments: tuple[tuple[str, float | str], ...] = ()

    @property
    def function(self) -> Function:
        """The entry of the table."""
        return FUNCTIONS[self.name]


@dataclass(frozen=True, slots=True)
class Absolute:
    """`abs(number)`."""

    inner: Node


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Difference ("-"), product ("*") or quotient ("/") of two numbers."""

    op: str
    left: Node
    right: Node


Node = Constant | Value | Series | Call | Absolute | Arithmetic


@dataclass(frozen=True, slots=True)
class Check:
    """One parsed check: `expr` as given, `subject` the side of it that is limited, as written.

    `op` is "" for a truth function alone, whose call is `left`; `right` is then None.
    """

    expr: str
    subject: str
    left: Node
    op: str = ""
    right: Node | None = None

    def nodes(self) -> Iterator[Node]:
        """Yield every node, depth first."""
        waiting: list[Node | None] = [self.right, self.left]
        while waiting:
            node = waiting.pop()
            if node is None:
                continue
            yield node
            match node:
                case Absolute(inner):
                    waiting.append(inner)
                case Arithmetic(_, left, right):
                    waiting += [right, left]
                case Call(_, series, _):
                    waiting.append(series)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that the check reads, in the order of their first use."""
        return tuple(dict.fromkeys(node.tag for node in self.nodes() if isinstance(node, Value | Series)))


def parse(expr: str) -> Check:
    """Return the check that `expr` says; raise CheckSyntaxError with the column where it leaves the grammar."""
    text = expr.strip()
    shift = len(expr) - len(expr.lstrip())
    if not text:
        raise CheckSyntaxError("the check is empty", expr, 1)
    if len(expr) > MAX_LENGTH:
        raise CheckSyntaxError(f"the check has {len(expr)} characters, {MAX_LENGTH} are allowed", expr, MAX_LENGTH + 1)
    if bad := re.search(r"[\\\x00-\x08\x0e-\x1f\ud800-\udfff]", text):
        raise CheckSyntaxError("a backslash or control character is not part of a check", expr, shift + bad.start() + 1)
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise CheckSyntaxError(f"not an expression: {error.msg}", expr, shift + max(error.offset or 1, 1)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckSyntaxError(f"not an expression: {type(error).__name__}", expr, shift + 1) from error
    return _Reader(expr, text, shift).check(tree.body)


class _Reader:
    """Turns the allowed part of a Python syntax tree into nodes."""

    def __init__(self, expr: str, text: str, shift: int) -> None:
        self.expr, self.text, self.shift = expr, text, shift

    def error(self, node: ast.AST, problem: str) -> CheckSyntaxError:
        """Return the error at a node; ast counts UTF-8 bytes within a line, people count characters."""
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        lines = self.text.split("\n")
        before = sum(len(each) + 1 for each in lines[: line - 1])
        within = len(lines[line - 1].encode()[:offset].decode(errors="ignore"))
        return CheckSyntaxError(problem, self.expr, self.shift + before + within + 1)

    def check(self, node: ast.expr) -> Check:
        """Read the whole check."""
        if isinstance(node, ast.Call):
            left = self.number(node, 1)
            if not isinstance(left, Call) or not left.function.is_true:
                truths = ", ".join(name for name, function in FUNCTIONS.items() if function.is_true)
                raise self.error(node, f"a comparison is missing; only {truths} can stand alone")
            return Check(self.expr, self.text, left)
        if not isinstance(node, ast.Compare):
            raise self.error(node, 'a check is one comparison, as in max(data["train/loss"]) < 0.8')
        if len(node.ops) != 1:
            raise self.error(node.comparators[1], "one comparison a check; write a second check")
        op = OPERATORS.get(type(node.ops[0]))
        if op is None:
            raise self.error(node.comparators[0], "the comparison before this is not one of < <= > >= == in")
        right = node.comparators[0]
        checked = self.membership(node.left, right) if op == "in" else self.comparison(node.left, op, right)
        if not checked.tags:
            raise self.error(node, "the check reads no data")
        return checked

    def membership(self, left: ast.expr, right: ast.expr) -> Check:
        """Read `"3" in data["tag"]`."""
        if not (isinstance(left, ast.Constant) and isinstance(left.value, str)):
            raise self.error(left, 'a step is written as text: "3" in data["train/loss"]')
        return Check(self.expr, self.source(right), Constant(left.value), "in", self.series(right))

    def comparison(self, left: ast.expr, op: str, right: ast.expr) -> Check:
        """Read a comparison of numbers, or the equality of a value and a text."""
        sides = []
        for side, other in ((left, right), (right, left)):
            if not (isinstance(side, ast.Constant) and isinstance(side.value, str)):
                sides.append(self.number(side, 1))
                continue
            if op != "==":
                raise self.error(side, f"a text can be compared by == and in, not by {op}")
            if not isinstance(other, ast.Subscript):
                raise self.error(other, "only data[...] can be compared with a text")
            sides.append(Constant(side.value))
        subject = self.source(right if isinstance(sides[0], Constant) else left)
        return Check(self.expr, subject, sides[0], op, sides[1])

    def source(self, node: ast.expr) -> str:
        """Return a node as it was written."""
        return ast.get_source_segment(self.text, node) or self.text

    def number(self, node: ast.expr, depth: int) -> Node:
        """Read what stands for a number."""
        if depth > MAX_DEPTH:
            raise self.error(node, f"nested deeper than {MAX_DEPTH}")
        match node:
            case ast.Constant() | ast.UnaryOp():
                return Constant(self.constant(node))
            case ast.Subscript():
                return self.value(node)
            case ast.BinOp(left=left, op=ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
                return Arithmetic(SIGNS[type(op)], self.number(left, depth + 1), self.number(right, depth + 1))
            case ast.BinOp():
                raise self.error(node.right, "the operator before this is not - * or /")
            case ast.Call(func=ast.Name(id="abs"), args=[inner], keywords=[]):
                return Absolute(self.number(inner, depth + 1))
            case ast.Call():
                return self.call(node)
            case ast.Name(id="data"):
                raise self.error(node, 'data needs a tag: data["train/loss"]')
            case ast.Name(id=name):
                raise self.error(node, f"{name!r} has no meaning here{_meant(name)}")
        raise self.error(node, "this is not part of a check (numbers, data[...], functions of it, - * /)")

    def constant(self, node: ast.expr) -> float:
        """Read a number, with or without a minus."""
        inner = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
        value = inner.value if isinstance(inner, ast.Constant) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(node, "a number is expected here")
        if len(self.source(inner)) > MAX_NUMBER_TEXT or abs(value) > 1e308:
            raise self.error(inner, "the number is too long or not finite")
        return value if inner is node else -value

    def subscript(self, node: ast.Subscript) -> str:
        """Read the text in the brackets; a whole number stands for the same step as text."""
        key = node.slice
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            return key.value
        if isinstance(key, ast.Constant) and type(key.value) is int and isinstance(node.value, ast.Subscript):
            return str(key.value)
        raise self.error(key, 'a tag or step in quotes is expected: data["train/loss"]["3"]')

    def value(self, node: ast.Subscript) -> Value:
        """Read `data["tag"]` or `data["tag"]["step"]`."""
        match node.value:
            case ast.Name(id="data"):
                return Value(self.subscript(node))
            case ast.Subscript(value=ast.Name(id="data")):
                step = self.subscript(node)
                if not step.isdecimal():
                    raise self.error(node.slice, f"{step!r} is not a step: digits in quotes are")
                return Value(self.subscript(node.value), step)
            case ast.Name(id=name):
                raise self.error(node.value, f"{name!r} has no meaning here; did you mean data?")
        raise self.error(node, 'only data["tag"] and data["tag"]["step"] can be looked up')

    def series(self, node: ast.expr) -> Series:
        """Read `data["tag"]` or `finite_only(data["tag"])`."""
        match node:
            case ast.Subscript(value=ast.Name(id="data")):
                return Series(self.subscript(node))
            case ast.Call(func=ast.Name(id="finite_only"), args=[ast.Subscript() as inner], keywords=[]):
                return Series(self.series(inner).tag, only_finite=True)
        raise self.error(node, 'a series is expected here: data["train/loss"]')

    def call(self, node: ast.Call) -> Call:
        """Read the call of a function of the table."""
        if not isinstance(node.func, ast.Name):
            raise self.error(node.func, "only the functions of checks can be called")
        name = node.func.id
        function = FUNCTIONS.get(name)
        if function is None:
            raise self.error(node.func, f"{name!r} is not a function of checks{_meant(name)}")
        if not node.args:
            raise self.error(node, f'{name} needs a series: {name}(data["train/loss"])')
        series = self.series(node.args[0])
        if len(node.args) - 1 > len(function.parameters):
            raise self.error(
                node.args[len(function.parameters) + 1], f"{name} takes {len(function.parameters)} arguments more"
            )
        given: dict[str, float | str] = {}
        for parameter, argument in zip(function.parameters, node.args[1:], strict=False):
            given[parameter.name] = self.argument(parameter, argument)
        known = {parameter.name: parameter for parameter in function.parameters}
        for keyword in node.keywords:
            if keyword.arg not in known or keyword.arg in given:
                raise self.error(
                    keyword, f"{name} has no argument {keyword.arg!r} here; it takes {', '.join(known) or 'none'}"
                )
            given[keyword.arg] = self.argument(known[keyword.arg], keyword.value)
        for parameter in function.parameters:
            if parameter.required and parameter.name not in given:
                raise self.error(node, f"{name} needs {parameter.name}")
        return Call(name, series, tuple(given.items()))

    def argument(self, parameter: Parameter, node: ast.expr) -> float | str:
        """Read one argument after the series."""
        if parameter.kind == "direction":
            if isinstance(node, ast.Constant) and node.value in {"up", "down"}:
                return str(node.value)
            raise self.error(node, f'{parameter.name} is "up" or "down"')
        number = self.constant(node)
        if not parameter.low <= number <= parameter.high:
            raise self.error(node, f"{parameter.name} goes from {parameter.low:g} to {parameter.high:g}")
        return number


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, [*FUNCTIONS, "abs", "finite_only", "data"], n=1)
    return f"; did you mean {close[0]!r}?" if close else f" (known: {', '.join(FUNCTIONS)}, abs, finite_only)"
