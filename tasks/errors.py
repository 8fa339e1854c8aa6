"""The one error that a user of the command line may see without a traceback, and what was probably meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class UserError(Exception):
    """A mistake or a missing precondition that the user can mend; the text says what, where and what to do.

    Raised anywhere below the command line; shown as `error: TEXT`, exit status 2. Subclass it next to the code
    that raises it when a caller needs to tell the kind apart.
    """


def suggest(text: str, known: Iterable[object]) -> str:
    """Return `; did you mean 'x'?` for the nearest of `known`, or nothing."""
    import difflib  # only for a mistake

    near = difflib.get_close_matches(text, [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
