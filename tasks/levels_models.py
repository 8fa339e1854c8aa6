"""The pydantic models of levels.yaml: names, types and bounds of every key, as people write them.

What needs more than one key at a time (a kind that does not exist, an override that a shell would tear apart) is
checked in `tasks.levels_schema` and `tasks.levels_rules`; the former turns pydantic's errors into lines of the file.
"""

from __future__ import annotations

import datetime as dt
import posixpath
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
    path, node, test = text.partition("::")
    return posixpath.normpath(path) + node + test  # `logs/` and `./logs` are `logs`, as everything is compared by name


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


# What an editor is told (docs/schema/levels-1.json): the text as people write it, one word for a list of one.
_LISTED = BeforeValidator(_listed, json_schema_input_type=str | list[str])
DurationText = Annotated[str, Field(pattern=r"^(\d+h)?(\d+m)?(\d+(\.\d+)?s)?$", min_length=2)]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]

Text = Annotated[str, AfterValidator(_filled)]
Texts = Annotated[list[Text], _LISTED]
Pattern = Annotated[str, AfterValidator(_pattern)]
Patterns = Annotated[list[Pattern], _LISTED]
TreePath = Annotated[str, AfterValidator(_inside)]
TreePaths = Annotated[list[TreePath], _LISTED]
Duration = Annotated[float, BeforeValidator(seconds, json_schema_input_type=DurationText)]
Minutes = Annotated[float, Field(ge=0, le=20160)]
Count = Annotated[int, Field(ge=0, le=100_000)]
Positive = Annotated[int, Field(ge=1, le=10_000_000)]
Env = dict[str, str]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class SuiteModel(_Model):
    """One entry of `suites`."""

    title: str = ""
    """Shown in lists and reports."""
    repo: Repo
    """The tree whose tests these are."""
    paths: Annotated[TreePaths, Field(min_length=1)]
    """What pytest is given, relative to the tree."""
    min_tests: Positive = 1
    """Fewer executed tests are no Pass."""
    args: Texts = []
    """Further arguments of pytest."""
    reaches: list[Component] | None = None
    """The trees whose change makes the suite stale; by default all that `repo` imports."""
    timeout: Duration = 1800.0
    """Time limit."""
    interpreter: Literal["driver", "policy", "generation"] = "policy"
    """The worker whose Python runs it."""
    env: Env = {}
    """Environment variables; never secrets."""
    gpus: Count = 0
    """GPUs it needs."""


class QuarantineModel(_Model):
    """The `quarantine` of a case."""

    reason: Text
    """Why a Fail is known."""
    owner: Text
    """Who mends it."""
    until: Annotated[str, BeforeValidator(_date, json_schema_input_type=Date)]
    """Last day on which a Fail does not count."""


class ProfileModel(_Model):
    """One entry of `rehearsal_profiles`; a case's `rehearsal` may say all of it too."""

    extends: str | None = None
    """Another profile whose keys come first."""
    overrides: Texts = []
    """Hydra overrides after the case's; {model}, {models} and {data} stand for what the CPU environment prepares."""
    env: Env = {}
    """Environment variables."""
    gpus: Count | None = None
    """GPUs that are pretended, of all nodes together."""
    nodes: Positive | None = None
    """Nodes that Slurm gives, one by default."""
    timeout: Duration | None = None
    """Time limit."""
    minutes: Minutes | None = None
    """Expected duration."""
    model: Text | None = None
    """Tiny model that the CPU environment prepares."""
    data: Text | None = None
    """Data set that the CPU environment prepares."""
    standins: Texts = []
    """Packages that stand in for what a CPU lacks."""
    checks: Texts | None = None
    """Instead of the case's checks."""
    expect_log: Patterns | None = None
    """Instead of the case's."""
    forbid_log: Patterns | None = None
    """Instead of the case's."""
    files: TreePaths | None = None
    """Instead of the case's."""
    real_work: Texts | None = None
    """Instead of the case's."""


class RehearsalModel(ProfileModel):
    """The `rehearsal` of a case."""

    profile: str | None = None
    """Entry of `rehearsal_profiles` to start from."""
    supported: bool = True
    """Whether the script runs on a CPU; if not, say why."""
    reason: str = ""
    """Why it is not supported."""
    steps: Positive | None = None
    """Steps instead of the case's."""


class KindModel(_Model):
    """One entry of `kinds`: what the cases of one training algorithm share; every key may be in a case too."""

    step_tag: Text | None = None
    """Series whose last step must be `steps`; train/loss by default."""
    checks: Texts = []
    """Expressions over metrics, each must be true: `max(data["train/loss"]) < 5`. Added to the kind's."""
    expect_log: Patterns = []
    """Regular expressions, each must match a line of the log. Added to the kind's."""
    forbid_log: Patterns = []
    """Regular expressions, none may match. Added to the kind's."""
    done_pattern: Pattern | None = None
    """Line after which only `grace` is allowed for the end."""
    grace: Duration | None = None
    """Time between `done_pattern` and the end; 60s by default."""
    real_work: Texts | None = None
    """Series that must not be zero throughout; `step_tag` by default."""
    compares: str | None = None
    """What the checks hold against what, in words."""
    limitations: Texts = []
    """What a Pass does not show; repeated in the report."""
    needs: Texts = []
    """What it needs beside GPUs and model: network, apt, hf_token, nemo_gym, nccl_multicast, nodes:N, compute>=9.0."""


class CaseModel(KindModel):
    """One entry of a level's or variant's `cases`."""

    title: str = ""
    """Shown in lists and reports."""
    kind: str | None = None
    """Entry of `kinds` to inherit from."""
    script: TreePath | None = None
    """Maintained script of the tree, run with the overrides as arguments. This or `command`."""
    command: Annotated[list[Text], Field(min_length=1)] | None = None
    """Arguments of a program; no shell reads them. This or `script`."""
    repo: Repo = "nemo_rl"
    """Working directory: the attempt's copy of that tree."""
    overrides: Texts = []
    """Hydra overrides, appended; {attempt}, {bridge}, {mcore} and {nemo_rl} stand for folders of the attempt."""
    env: Env = {}
    """Environment variables; never secrets."""
    gpus: Count = 0
    """GPUs, of all nodes together."""
    nodes: Positive = 1
    """Nodes."""
    timeout: Duration = 2700.0
    """Time limit of one attempt."""
    minutes: Minutes | None = None
    """Expected duration; the time limit by default."""
    steps: Positive | None = None
    """Last step that `step_tag` must have; without it the case has no steps."""
    logs: TreePath | None = None
    """Folder searched for event files; beside the script by default."""
    also_logs: dict[str, TreePath] = {}
    """Prefix to a further folder; its series are read as PREFIX/tag."""
    backend: Literal["megatron", "any"] = "megatron"
    """megatron: Megatron's worker must be in the log."""
    conversion: Literal["fresh", "within_attempt", "none"] | None = None
    """fresh: an import that was skipped is a Fail; within_attempt: a later phase may reuse this attempt's; none."""
    files: TreePaths = []
    """Globs, each must match a new, non-empty file."""
    clean: Annotated[list[Annotated[str, AfterValidator(_cleanable)]], _LISTED] = []
    """Paths removed before the start."""
    model: str = ""
    """Model, as Hugging Face names it."""
    also_models: Texts = []
    """Further models."""
    optional: bool = False
    """Impossible here is Skipped instead of Blocked, and its level does not need it."""
    quarantine: QuarantineModel | None = None
    """A known Fail that does not count until a day."""
    not_mapping_evidence: str = ""
    """Why a Pass says nothing about weight mappings."""
    reaches: list[Component] | None = None
    """The trees whose change makes it stale; all by default."""
    rehearsal: RehearsalModel | None = None
    """How the script runs on a CPU."""
    no_rehearsal: str = ""
    """Why it does not."""


class LevelModel(_Model):
    """One entry of `levels` or `variants`."""

    title: Text
    """Shown in lists and reports."""
    proves: str = ""
    """What a Pass shows."""
    does_not_prove: Texts = []
    """What it does not; repeated in the report."""
    required_when: str = ""
    """Which changes call for it."""
    suites: Texts = []
    """Unit suites that must pass first."""
    includes: Texts = []
    """Groups whose cases and suites belong to this one, too."""
    cases: dict[str, CaseModel] = {}
    """Case by name; `doit LEVEL.CASE`."""


class FileModel(_Model):
    """The whole file."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    """Version of this format."""
    suites: dict[str, SuiteModel] = {}
    """Unit suite by name; `doit unit:NAME`."""
    kinds: dict[str, KindModel] = {}
    """What cases of one kind share."""
    rehearsal_profiles: dict[str, ProfileModel] = {}
    """How scripts run on a CPU, by name."""
    levels: dict[str, LevelModel] = {}
    """Level by number; `doit levelN`."""
    variants: dict[str, LevelModel] = {}
    """Variant by name; `doit NAME`."""
