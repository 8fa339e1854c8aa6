"""Cases wait in the cluster's queue side by side: what is stale and may run is submitted before the first is followed.

    first run of the call -> its job -> the others' suites, gates, configs; their jobs -> doit goes on, case by case

A case is submitted only when each stage that it waits for is a Pass; whatever else becomes of its submission, its own
turn tells (tasks/inflight.py finds the job). No job array: its tasks share one name, one time limit and one set of
GPUs, `--dependency=singleton` would run them one after another, and an attempt is found again by its job's name.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.inflight import InFlightError
from tasks.pipeline import Pipeline

if TYPE_CHECKING:
    from tasks.invocation import Invocation
    from tasks.runtimes.slurm import Slurm
    from tasks.stage import Stage


def submit(now: Invocation, first: Stage) -> None:
    """Submit the run `first`, then every other planned run of its environment that may; once an invocation.

    With `jobs=N` doit's threads submit side by side by themselves.
    """
    if now.settings.runtime != "slurm" or threading.current_thread() is not threading.main_thread():
        return
    from tasks.runtimes.slurm import Slurm

    environment = now.environment_of(now.case(first.name))
    runtime = now.place_of(environment).runtime
    if not isinstance(runtime, Slurm) or now.settings.detach or now.sent or first.task not in now.planned:
        return
    planned = (now.case(task.removeprefix("run:")) for task in now.planned if task.startswith("run:"))
    others = [now.run(case) for case in planned if now.environment_of(case) == environment and case.id != first.name]
    if not others:
        return
    _send(now, runtime, first)
    now.sent.add(first.task)
    for stage in others:
        if all(now.bring(need) for need in now.needs[stage.task]) and not now.is_fresh(stage):
            _send(now, runtime, stage)


def _send(now: Invocation, runtime: Slurm, stage: Stage) -> None:
    """Prepare the attempt and submit its job."""
    hours, runtime.ahead = now.gpu_hours, True
    try:
        Pipeline.execute(now, stage)  # ends here only where nothing could be submitted: a precondition
        now.early.add(stage.task)
    except InFlightError:
        if now.in_flight(stage.task) is None:
            now.gpu_hours = hours
        else:
            now.sent.add(stage.task)
    except (UserError, OSError) as error:
        now.tell("progress", stage.task, text=f"not submitted ahead: {error}")
    finally:
        runtime.ahead = False


def let_go(now: Invocation) -> None:
    """After a signal: do with the jobs that nobody follows yet what is done with the one that is followed."""
    place = vars(now).get("place")
    if place is not None and place.runtime.name == "slurm":
        place.runtime.interrupted()
