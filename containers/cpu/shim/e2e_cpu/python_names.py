"""Names of Python 3.12 that the trees under test take from `typing`, supplied on 3.11.

NeMo-RL asks for 3.13 and Megatron-Bridge for 3.12. On 3.11 two names are all that is missing: `typing.override`
(Megatron-Core 2a75ac12, training/models/gpt.py and hybrid.py) and a `typing.TypedDict` that pydantic accepts (pydantic
refuses the one of Python below 3.12). Both come from typing_extensions, which defines them for this purpose.
"""

from __future__ import annotations

import sys
import typing


def apply() -> None:
    """Supply the names; nothing on 3.12 and later, or in an interpreter without typing_extensions."""
    if sys.version_info >= (3, 12):
        return
    try:
        import typing_extensions
    except ImportError:
        return  # an interpreter without it (a build step of pip) does not import the trees either
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment, misc]
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
