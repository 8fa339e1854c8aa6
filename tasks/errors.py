"""The one error that a user of the command line may see without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A mistake or a missing precondition that the user can mend; the text says what, where and what to do.

    Raised anywhere below the command line; shown as `error: TEXT`, exit status 2. Subclass it next to the code
    that raises it when a caller needs to tell the kind apart.
    """
