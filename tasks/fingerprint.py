"""Does an image fit a NeMo-RL checkout? NeMo-RL's own fingerprint of both, compared by its own rules.

The image keeps the output of tools/generate_fingerprint.py (MD5 of pyproject.toml and uv.lock, commits of submodules);
the checkout's own copy of that program is asked for the other side. nemo_rl/__init__.py only warns of a difference, and
its warning is in a log that nobody reads; here each one says whether it can change a result. Only dependencies count:
the code is mounted from the checkout, the Bridge is the one under test. What matters is a limitation of the report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tasks.files import sha256_json
from tasks.stage import Done, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tasks.pipeline import Pipeline

TOOL = "tools/generate_fingerprint.py"
TOOL_S = 60
DEPENDENCIES = ("pyproject.toml", "uv.lock")
BRIDGE = "Megatron-Bridge"
ABSENT = "missing"  # NeMo-RL's word for a key that one side lacks


@dataclass(frozen=True, slots=True)
class Difference:
    """One key of the two fingerprints; `matters`: the run's packages may not be those that the checkout asks for."""

    key: str
    image: str
    checkout: str
    matters: bool
    text: str


def stage(pipe: Pipeline) -> Stage:
    """Return the stage `image`: which image it is and how it fits the checkout, asked when either has changed."""

    def inputs() -> dict[str, str]:
        found = {"image": sha256_json(pipe.place.image)}
        if pipe.place.image.get("fingerprint") or pipe.place.image.get("nemo_rl_sha"):
            manifest = pipe.manifests["nemo_rl"]
            named = {name: manifest.files[name].sha for name in (*DEPENDENCIES, TOOL) if name in manifest.files}
            found["checkout"] = sha256_json({"head": manifest.head, **named})
        return found

    def execute() -> Done:
        found = notes(pipe.place.image, pipe.settings.nemo_rl)
        for text in sentences(found):
            pipe.tell("progress", "image", text=text)
        return Done({**pipe.place.image, **({"differences": found} if found else {})})

    return Stage("image", "", inputs, execute)


def sentences(differences: Sequence[Mapping[str, Any]], *, all_of_them: bool = True) -> list[str]:
    """Return the differences of an image's record as people read them, all or those that matter."""
    return [
        f"{'matters' if one['matters'] else 'no matter'}: {one['text']}"
        for one in differences
        if all_of_them or one["matters"]
    ]


def notes(image: Mapping[str, Any], checkout: Path | None) -> list[dict[str, Any]]:
    """Return `drift` as the image's record keeps it; nothing without a checkout."""
    return [asdict(one) for one in drift(image, checkout)] if checkout else []


def compare(image: Mapping[str, str], checkout: Mapping[str, str]) -> list[Difference]:
    """Return what differs, what matters first; pure."""
    found = []
    for key in sorted({*image, *checkout}):
        theirs, ours = str(image.get(key, ABSENT)), str(checkout.get(key, ABSENT))
        if theirs == ours:
            continue
        if key in DEPENDENCIES:
            text = (
                f"{key} is not the one that the image was built from: its packages may be others than this NeMo-RL "
                "asks for. Build one that fits (doit image build), or count the result as about the test environment"
            )
        elif BRIDGE in key:
            text = f"{key}: the image vendors another Bridge; the one under test is mounted over it"
        else:
            text = (
                f"{key}: the checkout's own is mounted; matters only where the image compiled it "
                f"({theirs[:9]}, checkout {ours[:9]})"
            )
        found.append(Difference(key, theirs, ours, key in DEPENDENCIES, text))
    return sorted(found, key=lambda d: (not d.matters, d.key))


def drift(image: Mapping[str, Any], checkout: Path) -> list[Difference]:
    """Return how an image (its record: fingerprint, nemo_rl_sha) differs from the checkout; unknown is said, too."""
    from tasks.provenance import head

    found, commit = [], str(image.get("nemo_rl_sha") or "")
    if commit and not (ours := head(checkout)).startswith(commit):
        text = f"the image was built from NeMo-RL {commit[:9]}, the checkout is at {ours[:9]}; its code is mounted"
        found.append(Difference("commit", commit, ours, matters=False, text=text))
    if image.get("fingerprint"):
        try:
            theirs = json.loads(image["fingerprint"])
        except ValueError:
            theirs = None
        current = of_checkout(checkout) if isinstance(theirs, dict) else None
        if current is not None:
            return [*compare(theirs, current), *found]
        asked = f"{checkout}/{TOOL}" if isinstance(theirs, dict) else "the image's fingerprint"
        text = f"{asked} gives no answer: whether the image's packages fit this NeMo-RL is unknown"
        return [Difference("fingerprint", "?", "?", matters=True, text=text), *found]
    if found:  # another commit, and nothing that tells of its dependencies
        text = "the image has no fingerprint: whether its packages fit this NeMo-RL is unknown"
        found.insert(0, Difference("fingerprint", ABSENT, "?", matters=True, text=text))
    return found


def of_checkout(checkout: Path) -> dict[str, str] | None:
    """Return what NeMo-RL's own program says of the checkout; None where it is not there or fails."""
    program = checkout / TOOL
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GIT_"))}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(program)], cwd=checkout, env=environment, capture_output=True, text=True,
            timeout=TOOL_S, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return {str(k): str(v) for k, v in told.items()} if isinstance(told, dict) else None
