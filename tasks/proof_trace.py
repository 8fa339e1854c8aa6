"""Which files of the Bridge a proof rests on, so that an edit elsewhere does not make it stale.

`remember` keeps, beside the digest of the Bridge that was measured, which files the proof imported and which of them it
entered. `measured` gives that digest back as long as nothing that counts has changed, and the record is found by it:

    every path                                  the set of names: an added or removed file counts
    anything but Python, pyproject.toml         content
    imported                                    content
    imported, of a model family, not entered    all but the bodies of its functions: they were defined and never run
    not imported                                nothing

Where in doubt, a proof runs again. Core counts as a whole.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from typing import TYPE_CHECKING, Any

from tasks.files import read_json, sha256_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tasks.pipeline import Pipeline

KEPT = 8  # traces a family: going back to an earlier tree finds its proof
FAMILY_FILE = re.compile(r"src/megatron/bridge/models/[^/]+/.+\.py")
SHARED = ("src/megatron/bridge/models/conversion/", "src/megatron/bridge/models/hf_pretrained/")


def measured(pipe: Pipeline, family: str) -> str:
    """Return the digest of the Bridge whose proof still holds for the tree under test, or else that of the tree."""
    now = pipe.tree("bridge").components["bridge"]
    for trace in reversed(_traces(pipe, family)):
        if trace["bridge"] == now or digest(_files(pipe), pipe.tree("bridge").path, trace["files"]) == trace["digest"]:
            return str(trace["bridge"])
    return now


def remember(pipe: Pipeline, family: str, files: Mapping[str, str]) -> None:
    """Keep what a proof that was just measured rests on; `files`: path in the Bridge -> "executed" or "imported"."""
    now = pipe.tree("bridge").components["bridge"]
    trace = {"bridge": now, "files": dict(files), "digest": digest(_files(pipe), pipe.tree("bridge").path, files)}
    older = [t for t in _traces(pipe, family) if t["bridge"] != now]
    write_json(_place(pipe, family), {"traces": [*older, trace][-KEPT:]})


def digest(tree: Mapping[str, str], root: Path, files: Mapping[str, str]) -> str:
    """Return the digest of what counts of `tree` (path -> SHA-256), whose files lie below `root`; see the module."""
    counted: dict[str, str] = {}
    for path, sha in tree.items():
        how = files.get(path)
        if not path.endswith(".py") or how == "executed":
            counted[path] = sha
        elif how is None:
            counted[path] = ""
        elif FAMILY_FILE.fullmatch(path) and not path.startswith(SHARED):
            counted[path] = skeleton(root / path, sha)
        else:
            counted[path] = sha
    return sha256_json(counted)


@functools.lru_cache(maxsize=4096)
def skeleton(path: Path, sha: str) -> str:
    """Return a digest of a module without the bodies of its functions; `sha` itself where it does not parse."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return sha
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _files(pipe: Pipeline) -> dict[str, str]:
    kept = pipe.manifests["bridge"].files
    return {p: f"{e.mode} {e.sha}" for p, e in kept.items() if p.startswith("src/") or p == "pyproject.toml"}


def _place(pipe: Pipeline, family: str) -> Path:
    return pipe.workspace.root / "cache" / f"proof-{family}.json"


def _traces(pipe: Pipeline, family: str) -> list[dict[str, Any]]:
    kept = read_json(_place(pipe, family))
    found = kept.get("traces") if isinstance(kept, dict) else None
    return [t for t in found or [] if isinstance(t, dict) and t.keys() == {"bridge", "files", "digest"}]
