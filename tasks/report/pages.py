"""The templates of the pages: one file each in the end, style, curves and hover shared, everything escaped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return a compiled template: reports are written after every task, and compiling costs more than rendering."""
    import jinja2

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(autoescape=True, loader=loader, **options).get_template(name)
