"""Many developers on one cluster, simulated: GPU-hours a day and queue time, with and without this tool.

python bench/bench_cluster.py [--gpus 32] [--days 60] [--seed 1] [--repo BRIDGE] [--json FILE] [--svg FILE]

A model, no measurement. What is taken from where:
    cases' GPUs and minutes   levels.yaml (what upstream allows a run: an upper bound)
    share of commits a level  500 first-parent commits of the Bridge through tasks/surfaces.yaml (SHARES)
    edits that reach a run    335 of those 500 commits changed src or the Core (EDIT_REACHES)
    commits by hour and day   `git log` of --repo where it has 500 commits, else weekdays 9 to 18, evenly
    assumed                   a developer makes one commit a day and validates it three times on the way, and looks
                              once a day whether main is sound (level 0): COMMITS, RUNS
Three ways of working: "all" runs levels 0 to 3 each time; "plan" runs what the commit's paths call for, each time;
"tool" runs of those what the last edit made stale, and one record of main serves everybody.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tasks import levels  # noqa: E402 - after the path

SHARES = {"level0": 0.41, "level1": 0.21, "level2": 0.22, "level3": 0.03, "level4": 0.24, "level6": 0.03}
NOTHING = 0.47
EDIT_REACHES = 335 / 500
COMMITS, RUNS = 1.0, 3
ALL = ("level0", "level1", "level2", "level3")
DEVELOPERS = (1, 10, 100)
WAYS = {"all": "#b0413e", "plan": "#c9a227", "tool": "#2f6f8f"}


@dataclass(frozen=True, order=True)
class Job:
    """A case that wants `gpus` GPUs for `hours`, from `at` (hours since the first midnight)."""

    at: float
    gpus: int
    hours: float


def hours_of_commits(repo: Path | None) -> list[float]:
    """Return hours since Monday 0:00 UTC at which commits were made; evenly over weekdays 9 to 18 without history."""
    argv = ["git", "-C", str(repo), "log", "--first-parent", "-500", "--format=%ct"]
    log = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split() if repo else []
    if len(log) < 500:
        return [24 * day + 9 + hour for day in range(5) for hour in range(9)]
    return [(int(stamp) / 3600 - 96) % 168 for stamp in log]  # the epoch was a Thursday


def wanted(rng: random.Random) -> list[str]:
    """Return the levels that a commit calls for; shares are those of all commits, so given that it calls for any."""
    if rng.random() < NOTHING:
        return []
    return [level for level, share in SHARES.items() if rng.random() < share / (1 - NOTHING)]


def arrivals(way: str, developers: int, days: int, when: list[float], rng: random.Random) -> list[Job]:
    """Return the jobs of all developers."""
    catalogue = levels.load(ROOT / "levels.yaml", None)
    cases = {name: [(c.gpus, c.minutes / 60) for c in level.required] for name, level in catalogue.levels.items()}
    jobs = []

    def submit(at: float, names: list[str] | tuple[str, ...]) -> None:
        jobs.extend(Job(at, gpus, hours) for name in names for gpus, hours in cases[name])

    workdays = [day for day in range(days) if day % 7 < 5]
    checked_main = set()
    for _ in range(developers):
        for day in workdays:
            if way != "tool" or day not in checked_main:  # the first one's record of main is everybody's
                checked_main.add(day)
                submit(24 * day + 9, ("level0",))
            for _ in range(int(COMMITS) + (rng.random() < COMMITS % 1)):
                begin = 24 * 7 * (day // 7) + rng.choice(when)
                called = wanted(rng)
                for run in range(RUNS):
                    stale = run == 0 or rng.random() < EDIT_REACHES
                    if way == "all":
                        submit(begin + 1.5 * run, ALL)
                    elif way == "plan" or stale:
                        submit(begin + 1.5 * run, called)
    return sorted(jobs)


def simulate(jobs: list[Job], gpus: int) -> list[float]:
    """Return the hours that each job waits on a cluster of `gpus`, first come, first served."""
    free, now, running, waits = gpus, 0.0, list[tuple[float, int]](), []
    for job in jobs:
        now = max(now, job.at)
        while running and (running[0][0] <= now or free < job.gpus):
            end, given = heapq.heappop(running)
            now, free = max(now, end), free + given
        waits.append(now - job.at)
        free -= job.gpus
        heapq.heappush(running, (now + job.hours, job.gpus))
    return waits


def rows(gpus: int, days: int, seed: int, when: list[float]) -> list[dict[str, float | str]]:
    """Return one row a way of working and number of developers; equal arguments, equal rows."""
    found: list[dict[str, float | str]] = []
    for developers in DEVELOPERS:
        for way in WAYS:
            jobs = arrivals(way, developers, days, when, random.Random(seed))  # noqa: S311 - a simulation
            waits = sorted(simulate(jobs, gpus)) or [0.0]
            used = sum(job.gpus * job.hours for job in jobs) / len([d for d in range(days) if d % 7 < 5])
            found.append({
                "bench": "cluster", "developers": developers, "way": way, "gpus": gpus,
                "gpu_hours_a_workday": round(used, 1), "wait_mean_min": round(60 * sum(waits) / len(waits), 1),
                "wait_p95_min": round(60 * waits[int(0.95 * (len(waits) - 1))], 1),
            })  # fmt: skip
    return found


def plot(table: list[dict[str, float | str]]) -> str:
    """Return the rows as an SVG of two panels with a logarithmic scale, 0.1 to 1,000,000."""
    panels = (("gpu_hours_a_workday", "GPU-hours a workday"), ("wait_mean_min", "mean wait in the queue, minutes"))
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" font-family="sans-serif" font-size="12">']
    for index, (key, title) in enumerate(panels):
        left = 20 + 370 * index
        out.append(f'<text x="{left}" y="20" font-size="14">{title} (log scale; simulated)</text>')
        for number, row in enumerate(table):
            value = float(row[key])
            height = 28 * max(0.0, math.log10(max(value, 0.1)) + 1)
            x = left + 38 * number + 12 * (number // 3)
            colour = WAYS[str(row["way"])]
            out.append(f'<rect x="{x}" y="{250 - height:.1f}" width="30" height="{height:.1f}" fill="{colour}"/>')
            out.append(
                f'<text x="{x + 15}" y="{245 - height:.1f}" text-anchor="middle" font-size="10">{value:g}</text>'
            )
            if number % 3 == 1:
                out.append(f'<text x="{x + 15}" y="268" text-anchor="middle">{row["developers"]} dev.</text>')
    for number, (way, colour) in enumerate(WAYS.items()):
        out.append(f'<rect x="{20 + 90 * number}" y="280" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{38 + 90 * number}" y="291">{way}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    """Simulate, print the table, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=32)
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repo", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    started, when = time.perf_counter(), hours_of_commits(given.repo)
    table = rows(given.gpus, given.days, given.seed, when)
    print(f"{'developers':>10} {'way':>5} {'GPU-hours a workday':>20} {'mean wait, min':>15} {'p95 wait, min':>14}")
    for row in table:
        print(
            f"{row['developers']:>10} {row['way']:>5} {row['gpu_hours_a_workday']:>20} {row['wait_mean_min']:>15} "
            f"{row['wait_p95_min']:>14}"
        )
    source = f"{len(when)} commit times of {given.repo}" if len(when) >= 500 else "no history: weekdays 9 to 18"
    print(f"{given.gpus} GPUs, {given.days} days, seed {given.seed}, {source}; {time.perf_counter() - started:.1f} s")
    if given.json:
        given.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if given.svg:
        given.svg.write_text(plot(table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
