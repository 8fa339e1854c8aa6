"""`check_metrics.py FILE EXPR...`: decides `FUNCTION(data["TAG"]) < NUMBER` for each, exit status 1 if one is false.

As in the original, max and min are Python's own: a NaN that is not the first value goes unnoticed here.
"""

import json
import operator
import re
import statistics
import sys

FUNCTIONS = {"max": max, "min": min, "mean": statistics.fmean}
OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
CHECK = re.compile(r"""(max|min|mean)\(data\["([^"]+)"\]\) (<=?|>=?) (\S+)""")


def decide(expression, data):
    """Return whether the check holds; KeyError for an absent tag, ValueError for what is no check or has no points."""
    match = CHECK.fullmatch(expression)
    if not match:
        raise ValueError("not a check of the form FUNCTION(data[TAG]) < NUMBER")
    function, tag, comparison, limit = match.groups()
    return OPERATORS[comparison](FUNCTIONS[function](data[tag].values()), float(limit))


def main():
    """Print one line an expression."""
    with open(sys.argv[1]) as file:
        data = json.load(file)
    failed = False
    for expression in sys.argv[2:]:
        try:
            passed = decide(expression, data)
            print(f"{'PASS' if passed else 'FAIL'}  {expression}")
        except (KeyError, ValueError) as error:
            passed = False
            print(f"FAIL  {expression}  ({type(error).__name__}: {error})")
        failed |= not passed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
