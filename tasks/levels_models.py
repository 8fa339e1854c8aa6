"""The pydantic models of levels.yaml: names, types and bounds of every key, as people write them.

What needs more than one key at a time (a kind that does not exist, an override that a shell would tear apart) is
checked in `tasks.levels_schema` and `tasks.levels_rules`; the former turns pydantic's errors into lines of the file.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Repo = Literal["bridge", "nemo_rl"]
Component = Literal["bridge", "mcore", "nemo_rl"]

MAX_TIMEOUT_S = 14 * 86400.0  # two weeks: longer than any allocation, so a slip of the unit shows
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


def seconds(text: Any) -> float:
    """Return the seconds of "45m", "60s", "2h", "1h30m". Raises ValueError for anything else, bare numbers included."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if not match or not any(match.groups()):
        raise ValueError(f"{text!r} is not a duration; write 60s, 45m, 2h or 1h30m")
    value = int(match[1] or 0) * 3600.0 + int(match[2] or 0) * 60.0 + float(match[3] or 0)
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ValueError(f"{text!r} is not between a moment and {MAX_TIMEOUT_S / 86400:.0f} days")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _pattern(text: str) -> str:
    try:
        matches_nothing = re.compile(text).search("") is not None
    except re.error as error:
        where = f" at column {error.pos + 1}" if error.pos is not None else ""
        raise ValueError(f"not a regular expression{where}: {error.msg}") from None
    if matches_nothing:
        raise ValueError(f"the regular expression {text!r} matches every line")
    return text


def _inside(text: str) -> str:
    parts = text.split("/")
    if text.startswith(("/", "~")) or ".." in parts or "\\" in text or not text.strip():
        raise ValueError(f"{text!r} must be a path inside the tree, without a leading / or ..")
    return text


def _cleanable(text: str) -> str:
    if text.startswith("/tmp/"):  # noqa: S108 - upstream's scripts leave their checkpoints there
        name = text.removeprefix("/tmp/").rstrip("/")  # noqa: S108
        if not name or ".." in name.split("/") or any(c in name for c in "*?["):
            raise ValueError(f"{text!r} would remove more than one folder of a script below /tmp")
        return text
    return _inside(text)


def _date(text: Any) -> str:
    try:
        return dt.date.fromisoformat(text).isoformat()
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not a date; write 2026-12-31") from None


Text = Annotated[str, AfterValidator(_filled)]
Texts = Annotated[list[Text], BeforeValidator(_listed)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Patterns = Annotated[list[Pattern], BeforeValidator(_listed)]
TreePath = Annotated[str, AfterValidator(_inside)]
TreePaths = Annotated[list[TreePath], BeforeValidator(_listed)]
Duration = Annotated[float, BeforeValidator(seconds)]
Minutes = Annotated[float, Field(ge=0, le=20160)]
Count = Annotated[int, Field(ge=0, le=100_000)]
Positive = Annotated[int, Field(ge=1, le=10_000_000)]
Env = dict[str, str]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SuiteModel(_Model):
    """One entry of `suites`."""

    title: str = ""
    repo: Repo
    paths: Annotated[TreePaths, Field(min_length=1)]
    min_tests: Positive = 1
    args: Texts = []
    reaches: list[Component] | None = None
    timeout: Duration = 1800.0
    interpreter: Literal["driver", "policy", "generation"] = "policy"
    env: Env = {}
    gpus: Count = 0


class QuarantineModel(_Model):
    """The `quarantine` of a case."""

    reason: Text
    owner: Text
    until: Annotated[str, BeforeValidator(_date)]


class ProfileModel(_Model):
    """One entry of `rehearsal_profiles`; a case's `rehearsal` may say all of it too."""

    extends: str | None = None
    overrides: Texts = []
    env: Env = {}
    gpus: Count | None = None
    timeout: Duration | None = None
    minutes: Minutes | None = None
    model: Text | None = None
    data: Text | None = None
    standins: Texts = []
    checks: Texts | None = None
    expect_log: Patterns | None = None
    forbid_log: Patterns | None = None
    files: TreePaths | None = None
    real_work: Texts | None = None


class RehearsalModel(ProfileModel):
    """The `rehearsal` of a case."""

    profile: str | None = None
    supported: bool = True
    reason: str = ""
    steps: Positive | None = None


class KindModel(_Model):
    """One entry of `kinds`: what the cases of one training algorithm share; every key may be in a case too."""

    step_tag: Text | None = None
    checks: Texts = []
    expect_log: Patterns = []
    forbid_log: Patterns = []
    done_pattern: Pattern | None = None
    grace: Duration | None = None
    real_work: Texts | None = None
    compares: str | None = None
    limitations: Texts = []
    needs: Texts = []


class CaseModel(KindModel):
    """One entry of a level's or variant's `cases`."""

    title: str = ""
    kind: str | None = None
    script: TreePath | None = None
    command: Annotated[list[Text], Field(min_length=1)] | None = None
    repo: Repo = "nemo_rl"
    overrides: Texts = []
    env: Env = {}
    gpus: Count = 0
    nodes: Positive = 1
    timeout: Duration = 2700.0
    minutes: Minutes | None = None
    steps: Positive | None = None
    logs: TreePath | None = None
    also_logs: dict[str, TreePath] = {}
    backend: Literal["megatron", "any"] = "megatron"
    conversion: Literal["fresh", "within_attempt", "none"] | None = None
    files: TreePaths = []
    clean: Annotated[list[Annotated[str, AfterValidator(_cleanable)]], BeforeValidator(_listed)] = []
    model: str = ""
    also_models: Texts = []
    optional: bool = False
    quarantine: QuarantineModel | None = None
    not_mapping_evidence: str = ""
    reaches: list[Component] | None = None
    rehearsal: RehearsalModel | None = None
    no_rehearsal: str = ""


class LevelModel(_Model):
    """One entry of `levels` or `variants`."""

    title: Text
    proves: str = ""
    does_not_prove: Texts = []
    required_when: str = ""
    suites: Texts = []
    includes: Texts = []
    cases: dict[str, CaseModel] = {}


class FileModel(_Model):
    """The whole file."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    suites: dict[str, SuiteModel] = {}
    kinds: dict[str, KindModel] = {}
    rehearsal_profiles: dict[str, ProfileModel] = {}
    levels: dict[str, LevelModel] = {}
    variants: dict[str, LevelModel] = {}
