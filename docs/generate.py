"""Write the pages and schemas that follow from the code: `python docs/generate.py`; `--check` only tells what is stale.

Nothing here is written by hand twice: settings, commands, keys, levels, signatures and schemas are read from the
modules that use them. tests/test_docs.py fails while a generated file is not what this program would write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))


def levels_schema() -> str:
    """Return the JSON Schema of levels.yaml, for editors; what needs more than one key is checked by tasks.levels."""
    from tasks.levels_models import FileModel

    schema = _plain(FileModel.model_json_schema())
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:nemo-rl-e2e:levels:1",
        "title": "levels.yaml of nemo-rl-e2e, version 1",
    }
    return json.dumps({**head, **schema}, indent=1) + "\n"


def _plain(node: Any) -> Any:
    """Return a schema without the titles that pydantic derives from names, and durations as people write them."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {k: _plain(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}
    if isinstance(kept.get("default"), float):
        kept["default"] = duration(kept["default"])
    return kept


def duration(seconds: float) -> str:
    """Return 2700.0 as 45m."""
    return f"{seconds / 60:g}m" if seconds >= 60 else f"{seconds:g}s"


GENERATED: dict[str, Callable[[], str]] = {"schema/levels-1.json": levels_schema}


def stale() -> list[str]:
    """Return the generated files that are not what the code says."""
    return [
        name for name, made in GENERATED.items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != made()
    ]


def main(words: list[str]) -> int:
    """Write what is stale, or with --check only name it; 1 if anything was."""
    found = stale()
    for name in found:
        print(f"{'stale' if '--check' in words else 'written'}: docs/{name}")
        if "--check" not in words:
            (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / name).write_text(GENERATED[name](), encoding="utf-8")
    return 1 if found and "--check" in words else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
