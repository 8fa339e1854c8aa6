"""A command beside the pipeline: it answers in words or --json, and a user's mistake is one line and exit status 2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from doit.cmd_base import Command

from tasks import invocation
from tasks.errors import UserError
from tasks.faces import undisturbed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tasks.invocation import Invocation

opt_json = {
    "name": "as_json", "short": "", "long": "json", "type": bool, "default": False, "help": "one JSON event a line"
}  # fmt: skip


def say_error(error: Exception, verdict: str = "Blocked") -> int:
    """Print a user's mistake as the contract asks: `error: ...`, then the Result line; return 2."""
    text = str(error).strip() or type(error).__name__
    print(f"error: {text}", file=sys.stderr)
    print(f"Result: {verdict} - {text.splitlines()[0]}", flush=True)
    return 2


class Query(Command):  # type: ignore[misc]  # doit has no types
    """A command that only looks. `answer` prints and returns the exit status."""

    cmd_options = (opt_json,)
    doc_usage = "[--json]"
    doc_description = None

    def execute(self, opt_values: Mapping[str, Any], pos_args: Sequence[str]) -> int:
        """Answer; a user's mistake is one line and exit status 2."""
        words = [word for word in pos_args if word != "--json"]  # doit reads options in front of words only
        as_json = bool(opt_values["as_json"]) or len(words) < len(pos_args)
        with undisturbed():
            try:
                return self.answer(invocation.current(), words, as_json=as_json)
            except UserError as error:
                return say_error(error)
            except OSError as error:  # an unreadable checkout, a build folder that cannot be made
                return say_error(UserError(f"{error.filename or 'a file'}: {error.strerror or error}"))

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Print the answer."""
        raise NotImplementedError


def table(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> None:
    """Print rows in columns; the last one takes what it needs."""
    for row in rows:
        print("  ".join([*(f"{cell[:w]:{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]).rstrip())
