"""Decide checks on metrics.json as NeMo-RL's tests/check_metrics.py does, without `eval` and without its traps.

    python -m tasks.checks FILE 'EXPR'... [--json]      exit status 0: all hold, 1: some do not, 2: unusable input

The grammar is tasks/grammar.py, the functions are tasks/trends.py. Same decision as the original for every expression
that NeMo-RL ever used, with these exceptions, all of them failures here:
- a value that is not finite anywhere in a series that the check names (the original's max and min pass over a NaN that
  does not come first); `finite_only(data["tag"])` says that this is meant, `finite(data["tag"])` asks for it;
- a series without a point (the original's ratio_above is 0.0 then);
- `ignore_top_p` that leaves a single point of several.
A missing metric or step fails in both; here with the last step that was logged.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import operator
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.grammar import Absolute, Arithmetic, Call, Check, CheckSyntaxError, Constant, Series, Value, parse
from tasks.reason import Verdict
from tasks.trends import NoAnswerError, Points, window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.grammar import Node

__all__ = ["Check", "CheckResult", "CheckSyntaxError", "evaluate", "history", "main", "parse"]

NON_FINITE = ("NaN", "Infinity", "-Infinity")  # how metrics.json spells them (tasks/metrics.py)
WORST_IS_LARGEST = frozenset({"<", "<="})
WORST_IS_SMALLEST = frozenset({">", ">="})
OF_VALUES = frozenset(
    {"min", "max", "mean", "median", "ratio_above", "share_above", "trimmed_mean"}
)  # have a worst step
WINDOW = (("range_start", 1), ("range_end", 0))
OPERATIONS = {"-": operator.sub, "*": operator.mul, "/": operator.truediv}
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check gave. `text` is one sentence; `margin_percent` the distance to the limit, negative beyond it.

    `steps` says which steps were used ("1 to 20, 20 points"), `worst_step` where the value nearest to or farthest
    beyond the limit was. Whatever does not apply is None, as is all but `text` where the check could not be evaluated.
    """

    expr: str
    verdict: Verdict
    value: float | str | None
    limit: float | str | None
    op: str
    margin_percent: float | None
    text: str
    tags: tuple[str, ...]
    steps: str | None = None
    worst_step: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the result as checks.json has it; numbers that JSON does not have are texts."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else NON_FINITE[1] if value > 0 else NON_FINITE[2]
    return list(value) if isinstance(value, tuple) else value


def evaluate(check: Check, data: Mapping[str, Any]) -> CheckResult:
    """Decide one check on `{tag: {"<step>": value}}` (or `{name: value}`): PASS or FAIL, never an exception."""
    try:
        return _Evaluation(check, data).result()
    except (NoAnswerError, statistics.StatisticsError) as reason:
        text = str(reason)
    except ZeroDivisionError:
        text = "division by zero"
    except OverflowError:
        text = "a number is too large"
    return CheckResult(check.expr, Verdict.FAIL, None, None, check.op, None, text, check.tags)


class _Evaluation:
    """One check on one set of data: looks values up, and notes which points were used."""

    def __init__(self, check: Check, data: Mapping[str, Any]) -> None:
        self.check, self.data = check, data
        self.points: dict[str, Points] = {}
        self.used: list[Points] = []
        self.left_out: list[str] = []
        self.tolerant = {
            node.series.tag for node in check.nodes() if isinstance(node, Call) and node.function.accepts_non_finite
        }

    def result(self) -> CheckResult:
        """Return the decision; NoAnswerError where there is none."""
        check = self.check
        if isinstance(check.left, Constant) and isinstance(check.right, Series):
            return self.membership(str(check.left.value), self.series(check.right))
        left = self.number(check.left)
        if check.right is None:
            return self.truth(bool(left))
        right, op = self.number(check.right), check.op
        holds = _compare(left, op, right)
        if isinstance(check.left, Constant):
            left, op, right = right, MIRRORED[op], left
        margin = _margin(left, op, right)
        worst = self.worst(op)
        shown, limit = _two(left, right)
        where = f", worst at step {worst}" if worst and self.used and len(self.used[0].values) > 1 else ""
        if margin is None:
            text = f"{check.subject} is {shown}, {'as' if holds else 'not as'} required: {op} {limit}{where}"
        elif holds:
            text = f"{check.subject} is {shown}, {_percent(margin)} inside the limit {limit}{where}"
        else:
            text = f"{check.subject} is {shown}, {_percent(-margin)} beyond the limit {limit}{where}"
        return self.finish(holds, left, right, text=text, op=op, margin=margin, worst=worst)

    def finish(
        self,
        holds: bool,
        value: Any,
        limit: Any,
        *,
        text: str,
        op: str | None = None,
        margin: float | None = None,
        worst: str | None = None,
    ) -> CheckResult:
        """Return the result with the steps that were used."""
        steps = "; ".join(dict.fromkeys(_steps(points) for points in self.used)) or None
        if self.left_out:
            text += f"; left out as not finite: {', '.join(self.left_out)}"
        check, verdict = self.check, Verdict.PASS if holds else Verdict.FAIL
        op = check.op if op is None else op
        return CheckResult(check.expr, verdict, value, limit, op, margin, text, check.tags, steps, worst)

    def membership(self, step: str, points: Points) -> CheckResult:
        """Decide `"3" in data["tag"]`."""
        there = step in points.steps
        text = f"step {step} of {points.tag} is there" if there else _absent(points, step)
        return self.finish(there, _last(points), step, text=text)

    def truth(self, holds: bool) -> CheckResult:
        """Decide a function that stands alone."""
        text = f"{self.check.expr.strip()} is {'true' if holds else 'false'}"
        return self.finish(holds, "true" if holds else "false", "true", text=text)

    def number(self, node: Node) -> Any:
        """Return the number (or, of a value, the text) that a node stands for."""
        match node:
            case Constant(value):
                return value
            case Value(tag, step):
                return self.single(tag, step)
            case Absolute(inner):
                return abs(self.arithmetic(inner))
            case Arithmetic(sign, left, right):
                return OPERATIONS[sign](self.arithmetic(left), self.arithmetic(right))
            case Call(_, series, arguments):
                points = self.series(series)
                result = node.function.call(points, **dict(arguments))
                bounds = [float(dict(arguments).get(name, default)) for name, default in WINDOW]
                self.used.append(window(points, *bounds) if bounds != [1, 0] else points)
                return result
        raise NoAnswerError("a series is not a number")

    def arithmetic(self, node: Node) -> float:
        """Return a number to calculate with."""
        number = self.number(node)
        if isinstance(number, str):
            raise NoAnswerError(f"{number!r} is a text, not a number")
        return float(number) if isinstance(number, bool) else number

    def lookup(self, tag: str) -> Any:
        """Return what is logged under a tag."""
        if tag in self.data:
            return self.data[tag]
        close = difflib.get_close_matches(tag, list(self.data)[:10_000], n=1, cutoff=0.8)
        raise NoAnswerError(f"metric {tag} absent" + (f"; {close[0]} was logged" if close else ""))

    def single(self, tag: str, step: str | None) -> Any:
        """Return `data["tag"]` as a value, or one step of it after a look at the whole series."""
        found = self.lookup(tag)
        if step is None:
            if isinstance(found, Mapping):
                raise NoAnswerError(f"{tag} is a series; name a step or use a function of it")
            value = found
        else:
            points = self.series(Series(tag))
            if step not in points.steps:
                raise NoAnswerError(_absent(points, step))
            self.used.append(Points(tag, (step,), (points.values[points.steps.index(step)],)))
            value = found[step]
        if value is None or not isinstance(value, int | float | str):
            raise NoAnswerError(f"{tag} holds {type(value).__name__}, neither number nor text")
        if (isinstance(value, float) and not math.isfinite(value)) or value in NON_FINITE:
            raise NoAnswerError(f"{tag} is {value}, not a finite number")
        return value

    def series(self, node: Series) -> Points:
        """Return a series, complete and finite unless the check says otherwise."""
        found = self.lookup(node.tag)
        if not isinstance(found, Mapping):
            raise NoAnswerError(f"{node.tag} is a single value, not a series")
        if not found:
            raise NoAnswerError(f"no points in {node.tag}")
        try:
            points = Points(node.tag, tuple(map(str, found)), tuple(map(float, found.values())))
        except (TypeError, ValueError) as error:
            raise NoAnswerError(f"{node.tag} holds something that is no number: {error}") from error
        bad = [i for i, value in enumerate(points.values) if not math.isfinite(value)]
        if not bad or (node.tag in self.tolerant and not node.only_finite):
            return points
        if not node.only_finite:
            first = min(bad, key=lambda i: _order(points.steps[i]))
            raise NoAnswerError(
                f"{node.tag} is {points.values[first]} at step {points.steps[first]} "
                f"({len(bad)} of {len(points.values)} values are not finite)"
            )
        good = [i for i, value in enumerate(points.values) if math.isfinite(value)]
        if not good:
            raise NoAnswerError(f"no finite value in {node.tag}")
        self.left_out += [f"{node.tag} at step {points.steps[i]}" for i in bad[:5]]
        return Points(node.tag, tuple(points.steps[i] for i in good), tuple(points.values[i] for i in good))

    def worst(self, op: str) -> str | None:
        """Return the step whose value lies nearest to or farthest beyond the limit, for functions of values."""
        calls = [node for node in self.check.nodes() if isinstance(node, Call | Arithmetic | Value)]
        if len(calls) != 1 or not isinstance(calls[0], Call) or calls[0].name not in OF_VALUES or len(self.used) != 1:
            return None
        absolute = any(isinstance(node, Absolute) for node in self.check.nodes())
        points = self.used[0]
        values = [abs(value) for value in points.values] if absolute else list(points.values)
        if op in WORST_IS_LARGEST:
            return points.steps[values.index(max(values))]
        return points.steps[values.index(min(values))] if op in WORST_IS_SMALLEST else None


def _order(step: str) -> tuple[float, str]:
    try:
        return float(step), step
    except ValueError:
        return math.inf, step


def _compare(left: Any, op: str, right: Any) -> bool:
    if op == "==":
        return bool(left == right)
    if isinstance(left, str) or isinstance(right, str):
        raise NoAnswerError(f"{left!r} {op} {right!r} compares a text with a number")
    return bool(COMPARISONS[op](left, right))


def _percent(value: float) -> str:
    """Return two digits that a person reads at once: 0.031 %, 4.7 %, 910 %; no 9.1e+02."""
    return f"{float(f'{value:.2g}'):,.10g} %".replace(",", " ")


def _margin(value: Any, op: str, limit: Any) -> float | None:
    """Return the distance to the limit in percent of it: positive inside, None without a limit to divide by."""
    if op == "==" or isinstance(value, str) or isinstance(limit, str) or not limit:
        return None
    inside = limit - value if op in WORST_IS_LARGEST else value - limit
    margin = float(inside / abs(limit) * 100)
    return margin if math.isfinite(margin) else None


def _two(value: Any, limit: Any) -> tuple[str, str]:
    """Return both as text, with as many digits as it takes to tell them apart."""
    for digits in (4, 6, 9, 17):
        shown = tuple(f"{x:.{digits}g}" if isinstance(x, float) else str(x) for x in (value, limit))
        if shown[0] != shown[1] or value == limit:
            break
    return shown[0], shown[1]


def _last(points: Points) -> str:
    return max(points.steps, key=_order)


def _absent(points: Points, step: str) -> str:
    return f"step {step} absent from {points.tag}, last logged {_last(points)}"


def _steps(points: Points) -> str:
    ordered = sorted(points.steps, key=_order)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}, {len(ordered)} points"


def history(value: float | str | None, earlier: Sequence[float]) -> str | None:
    """Return how a value compares with those of earlier records of the same case, None with fewer than two of them."""
    known = [number for number in earlier if math.isfinite(number)]
    if not isinstance(value, int | float) or len(known) < 2:
        return None
    middle, now = _two(float(statistics.median(known)), float(value))
    low, high = min(known), max(known)
    outside = "" if low <= value <= high else f", outside {low:.4g} to {high:.4g}"
    return f"usually {middle} ({len(known)} earlier records), now {now}{outside}"


def main(argv: Sequence[str] | None = None) -> int:
    """Stand in for NeMo-RL's check_metrics.py; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tasks.checks", description="Check conditions on a metrics file")
    parser.add_argument("json_file", help="metrics.json")
    parser.add_argument("checks", nargs="+", help="conditions; see tasks/grammar.py")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--table-width", type=int, default=None, help="accepted as in the original, without effect")
    given = parser.parse_args(argv)
    try:
        data = json.loads(Path(given.json_file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        print(f"error: {given.json_file}: {error}", file=sys.stderr)
        return 2
    if not isinstance(data, dict):
        print(f"error: {given.json_file}: an object with metrics is expected", file=sys.stderr)
        return 2
    results, unusable = [], False
    for expr in given.checks:
        try:
            results.append(evaluate(parse(expr), data))
        except CheckSyntaxError as error:
            unusable = True
            print(f"error: {error.pointed()}", file=sys.stderr)
    if given.json:
        print(json.dumps({"schema": 1, "checks": [result.as_dict() for result in results]}, indent=1, allow_nan=False))
    else:
        for result in results:
            print(f"{result.verdict.upper():4}  {result.expr}\n      {result.text}")
    failed = any(result.verdict is not Verdict.PASS for result in results)
    return 2 if unusable else int(failed)


if __name__ == "__main__":
    sys.exit(main())
