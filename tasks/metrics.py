"""Event files of one run to metrics.json, `{tag: {"<step>": value}}`: NeMo-RL's tests/json_dump_tb_logs.py again.

    python -m tasks.metrics LOG_DIR --output_path FILE [--error-on-conflicts] [--require-tag-prefix P] [--allow-nan]

Byte for byte the same file on sound logs, with these differences, all on purpose:
- Files are ordered by the wall time of their first event, then by name; never by the time stamp of the file.
- A number that is not finite is written as the string "NaN", "Infinity" or "-Infinity", which every JSON parser reads
  and Python's float() turns back; `--allow-nan` writes the bare words of the original.
- Scalars written as tensors of the scalars plugin (TensorFlow 2's form) are merged too; the original leaves them out.
- A NaN at the same step in two files is no conflict.
- Exit status 1, after the file was written, where a record is corrupt, a file unreadable, or no scalar exists at all.
- The output is replaced atomically.

Peak memory is 16 bytes a point (32 for tags that several files share) besides one block of a file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tasks.eventfiles import FileSeries

SECONDS_TAGS = "ray/"  # their "step" is seconds since the monitor's start (nemo_rl/utils/logger.py), not a step
NO_SCALARS = "no scalars"


class ConflictError(ValueError):
    """Two values for one tag and step where the caller said that there must not be any."""


@dataclass(frozen=True, slots=True)
class EventFile:
    """One merged file: its scalars, the range of their steps (without ray/*, whose steps are seconds), what is wrong.

    `problem`: None, "empty", "no scalars", "ends inside a record at offset N", "corrupt record at offset N",
    "unreadable: ...". `skipped` counts summary values that are no scalars (histograms, text, images).
    """

    path: str
    scalars: int
    first_step: int | None
    last_step: int | None
    skipped: int
    problem: str | None

    @property
    def is_damaged(self) -> bool:
        """Whether points may be missing in the middle: such a run must not pass (a cut tail or no scalars is less)."""
        return self.problem is not None and self.problem.startswith(("corrupt", "unreadable"))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Steps that two files both hold (equal paths: one file twice); the later file's values were taken.

    `largest_relative_difference` is |a-b| / max(|a|, |b|) over all their points, found at `tag`; None where one of the
    two values is not finite and the other differs. `conflicts` counts the points whose values differ.
    """

    earlier: str
    later: str
    first_step: int
    last_step: int
    points: int
    conflicts: int
    largest_relative_difference: float | None
    tag: str


class Series(Mapping[str, Mapping[str, float]]):
    """Tag -> {"step": value} in order; the inner dictionaries are made when asked for, so that long runs stay small."""

    __slots__ = ("_points",)

    def __init__(self, points: Mapping[str, tuple[array[int], array[float]]]) -> None:
        self._points = {tag: points[tag] for tag in sorted(points)}

    def __getitem__(self, tag: str) -> dict[str, float]:
        steps, values = self._points[tag]
        return dict(zip(map(str, steps), values, strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def points(self, tag: str) -> tuple[array[int], array[float]]:
        """Return the steps (ascending, each once) and the values of a tag, without copying; KeyError if absent."""
        return self._points[tag]


@dataclass(frozen=True, slots=True)
class Merged:
    """The series of a run, the files they came from in merging order, and what overlapped between them."""

    series: Mapping[str, Mapping[str, float]]
    files: tuple[EventFile, ...]
    overlaps: tuple[Overlap, ...]
    tags: frozenset[str] = frozenset()  # of every plugin kind, as `--require-tag-prefix` counts them

    @property
    def problems(self) -> tuple[str, ...]:
        """What a reader must be told, one sentence per file, worst first."""
        told = sorted((f for f in self.files if f.problem), key=lambda f: not f.is_damaged)
        return tuple(f"{f.path}: {f.problem}" for f in told)


def find_event_files(log_dir: Path) -> list[Path]:
    """Return the event files below a folder (or the file itself), sorted by path.

    Names may hold any character (no glob is applied to the folder). Hidden folders are left out and links to folders
    followed, each folder once, as Python's recursive glob does. A folder that cannot be listed is returned itself, so
    that reading it reports it.
    """
    if log_dir.is_file():
        return [log_dir]
    found: list[Path] = []
    unlisted: list[Path] = []
    seen: set[str] = set()

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            unlisted.append(Path(error.filename))

    for folder, subfolders, names in os.walk(log_dir, followlinks=True, onerror=note):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        found += [Path(folder, name) for name in names if name.startswith("events") and "tfevents" in name[6:]]
    return sorted([*unlisted, *(path for path in found if path.is_file())])


def merge(log_dir: Path | Sequence[Path], *, conflicts_are_errors: bool = False) -> Merged:
    """Merge all event files below `log_dir`; of two values for one tag and step the later file's is taken.

    A sequence of folders declares attempts of one run, earliest first; inside a folder files are ordered by the wall
    time of their first event, then by path. No event file at all gives an empty result (`files == ()`).

    Raises ConflictError with `conflicts_are_errors` where values differ. Damage is reported in `files`, never raised.
    """
    from tasks.eventfiles import read_event_file

    merging = _Merging(conflicts_are_errors)
    for folder in [log_dir] if isinstance(log_dir, Path) else log_dir:
        read = [(path, read_event_file(path)) for path in find_event_files(folder)]
        read.sort(key=lambda entry: (_sortable(entry[1].first_wall_time), str(entry[0])))
        for path, content in read:
            merging.add(str(path), content)
    return merging.result()


def _sortable(wall_time: float | None) -> float:
    return math.inf if wall_time is None or math.isnan(wall_time) else wall_time


class _Merging:
    """The state of a merge: per tag the points so far and which file each came from."""

    def __init__(self, conflicts_are_errors: bool) -> None:
        self.strict = conflicts_are_errors
        self.points: dict[str, tuple[array[int], array[float]]] = {}
        self.sources: dict[str, Any] = {}  # tag -> index of the file, or an array of them, one a point
        self.tags: set[str] = set()
        self.files: list[EventFile] = []
        self.overlaps: dict[tuple[int, int], Overlap] = {}

    def add(self, path: str, content: FileSeries) -> None:
        """Lay one file over those before it."""
        index = len(self.files)
        low, high = _step_range(content)
        scalars = sum(len(steps) for steps, _ in content.points.values())
        problem = content.problem or (None if scalars else NO_SCALARS)
        self.files.append(EventFile(path, scalars, low, high, content.skipped, problem))
        self.tags |= content.tags
        for tag in sorted(content.points):
            steps, values = content.points[tag]
            if len(steps) and (tag in self.points or not _ascending(steps)):
                self._lay_over(tag, steps, values, index)
            elif len(steps):
                self.points[tag], self.sources[tag] = (steps, values), index

    def _lay_over(self, tag: str, steps: array[int], values: array[float], index: int) -> None:
        """Merge points in order: sort by step, keep the last of equal steps, note what the others held."""
        import numpy as np

        before_steps, before_values = self.points.get(tag, (array("q"), array("d")))
        all_steps = np.concatenate([np.frombuffer(before_steps, np.int64), np.frombuffer(steps, np.int64)])
        all_values = np.concatenate([np.frombuffer(before_values, np.float64), np.frombuffer(values, np.float64)])
        sources = np.full(len(all_steps), index, dtype=np.int32)
        sources[: len(before_steps)] = self.sources.get(tag, index)
        order = np.argsort(all_steps, kind="stable")
        all_steps, all_values, sources = all_steps[order], all_values[order], sources[order]
        repeated = all_steps[1:] == all_steps[:-1]
        for at in np.flatnonzero(repeated).tolist():
            pair = (int(sources[at]), int(sources[at + 1]))
            self._overlap(tag, pair, int(all_steps[at]), float(all_values[at]), float(all_values[at + 1]))
        kept = np.append(~repeated, True)
        merged = (array("q"), array("d"))
        merged[0].frombytes(all_steps[kept].tobytes())
        merged[1].frombytes(all_values[kept].tobytes())
        self.points[tag] = merged
        self.sources[tag] = sources[kept] if len(self.files) > 1 else index

    def _overlap(self, tag: str, pair: tuple[int, int], step: int, old: float, new: float) -> None:
        """Record one repeated step."""
        earlier, later = self.files[pair[0]].path, self.files[pair[1]].path
        differs = old != new and not (math.isnan(old) and math.isnan(new))
        if differs and self.strict:
            raise ConflictError(
                f"Conflict detected for metric '{tag}' at step {step}: {earlier} has {old!r}, {later} has {new!r}; "
                "without --error-on-conflicts the later file's value is taken"
            )
        difference: float | None = 0.0
        if differs:
            difference = abs(old - new) / max(abs(old), abs(new))
            difference = difference if math.isfinite(difference) else None
        known = self.overlaps.get(pair)
        if known is None:
            self.overlaps[pair] = Overlap(earlier, later, step, step, 1, int(differs), difference, tag)
            return
        largest = known.largest_relative_difference
        worse = largest is not None and (difference is None or difference > largest)
        self.overlaps[pair] = Overlap(
            earlier,
            later,
            min(known.first_step, step),
            max(known.last_step, step),
            known.points + 1,
            known.conflicts + differs,
            difference if worse else largest,
            tag if worse else known.tag,
        )

    def result(self) -> Merged:
        """Return what was merged."""
        overlaps = tuple(self.overlaps[pair] for pair in sorted(self.overlaps))
        return Merged(Series(self.points), tuple(self.files), overlaps, frozenset(self.tags))


def _ascending(steps: array[int]) -> bool:
    import numpy as np

    return bool((np.diff(np.frombuffer(steps, np.int64)) > 0).all())


def _step_range(content: FileSeries) -> tuple[int | None, int | None]:
    """Return the smallest and largest step, of tags whose steps are seconds only if there is nothing else."""
    by_step = [s for tag, (s, _) in content.points.items() if s and not tag.startswith(SECONDS_TAGS)]
    ranges = by_step or [s for s, _ in content.points.values() if s]
    if not ranges:
        return None, None
    return min(map(min, ranges)), max(map(max, ranges))


def json_chunks(series: Mapping[str, Mapping[str, float]], *, allow_nan: bool = False) -> Iterator[bytes]:
    """Yield metrics.json tag by tag: `json.dump(series, indent=2)`, and see the module for what is not finite."""
    opening = "{"
    for tag in sorted(series):
        if isinstance(series, Series):
            steps, numbers = series.points(tag)
            points: dict[Any, Any] = dict(zip(steps, numbers, strict=True))
        else:
            points = dict(series[tag])
        if not allow_nan and not all(map(math.isfinite, points.values())):
            points = {step: value if math.isfinite(value) else _word(value) for step, value in points.items()}
        # Only without `indent` does json use its C encoder; the separator brings the line breaks.
        inner = json.dumps(points, separators=(",\n    ", ": "))[1:-1]
        block = f"{{\n    {inner}\n  }}" if inner else "{}"
        yield f"{opening}\n  {json.dumps(tag)}: {block}".encode()
        opening = ","
    yield b"{}" if opening == "{" else b"\n}"


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def to_json(merged: Merged, *, allow_nan: bool = False) -> bytes:
    """Return metrics.json as bytes; `json_chunks` gives the same in pieces."""
    return b"".join(json_chunks(merged.series, allow_nan=allow_nan))


def write_json(merged: Merged, path: Path, *, allow_nan: bool = False) -> None:
    """Write metrics.json atomically, tag by tag; links are followed, devices (/dev/stdout) written to as they are."""
    chunks = json_chunks(merged.series, allow_nan=allow_nan)
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            device.writelines(chunks)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as out:
            out.writelines(chunks)
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Stand in for NeMo-RL's json_dump_tb_logs.py; return the exit status (0, or 1 with the reason on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m tasks.metrics", description="Merge event files into one JSON file")
    parser.add_argument("log_dir", help="folder that is searched for TensorBoard event files, recursively")
    parser.add_argument("--output_path", "--output-path", default=None, help="where to write the merged metrics")
    parser.add_argument("--error-on-conflicts", action="store_true", help="differing values for one step are an error")
    parser.add_argument("--require-tag-prefix", default=None, help="require a tag of any kind with this prefix")
    parser.add_argument("--allow-nan", action="store_true", help="write NaN and Infinity as bare words, not JSON")
    given = parser.parse_args(argv)
    try:
        merged = merge(Path(given.log_dir), conflicts_are_errors=given.error_on_conflicts)
        if not merged.files:
            return _failed(f"no TensorBoard event files found under {given.log_dir}")
        prefix = given.require_tag_prefix
        if prefix is not None and not any(tag.startswith(prefix) for tag in merged.tags):
            return _failed(f"no TensorBoard tag starts with '{prefix}' under {given.log_dir}")
        if given.output_path:
            write_json(merged, Path(given.output_path), allow_nan=given.allow_nan)
    except (ConflictError, OSError) as error:
        return _failed(str(error))
    _print_summary(merged, given.output_path)
    for problem in merged.problems:
        print(f"Warning: {problem}", file=sys.stderr)
    if any(file.is_damaged for file in merged.files):
        return _failed("event files are damaged, metrics are incomplete")
    if not merged.series:
        return _failed(f"no scalars in the event files under {given.log_dir}")
    return 0


def _failed(text: str) -> int:
    print(f"Error: {text}", file=sys.stderr)
    return 1


def _print_summary(merged: Merged, output_path: str | None) -> None:
    lines: Iterable[str] = [
        *(f"{file.path}: {file.scalars} scalars, steps {file.first_step} to {file.last_step}" for file in merged.files),
        *(
            f"steps {o.first_step} to {o.last_step} are "
            + (f"twice in {o.later}" if o.earlier == o.later else f"in {o.earlier} and in {o.later}")
            + f": {o.conflicts} of {o.points} points differ, the later ones were taken"
            for o in merged.overlaps
        ),
    ]
    print("\n".join(lines))
    print(
        f"{len(merged.series)} metrics written to {output_path}" if output_path else "--output_path saves the metrics"
    )


if __name__ == "__main__":
    sys.exit(main())
