"""`check_metrics.py FILE EXPR...`: evaluates each expression over the metrics, exit status 1 if one is false or fails.

As in the original, max and min are Python's own: a NaN that is not the first value goes unnoticed here.
"""

import json
import statistics
import sys

FUNCTIONS = {
    "max": lambda series: max(series.values()),
    "min": lambda series: min(series.values()),
    "mean": lambda series, first=1, end=None: statistics.fmean(
        value for step, value in series.items() if int(step) >= first and (end is None or int(step) < end)
    ),
}


def main():
    """Print one line an expression."""
    with open(sys.argv[1]) as file:
        data = json.load(file)
    failed = False
    for expression in sys.argv[2:]:
        try:
            passed = bool(eval(expression, {"__builtins__": {}}, {**FUNCTIONS, "data": data}))
            print(f"{'PASS' if passed else 'FAIL'}  {expression}")
        except (KeyError, ValueError, statistics.StatisticsError) as error:
            passed = False
            print(f"FAIL  {expression}  ({type(error).__name__}: {error})")
        failed |= not passed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
