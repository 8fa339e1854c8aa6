"""Jobs on a cluster: submitted with sbatch, followed with squeue, decided by the agent's exit.json.

The protocol differs from the other runtimes in one thing: a job outlives its runner. slurm.json in the attempt's folder
(tasks/inflight.py) says what was submitted; `run` of a folder that has one follows that job and submits nothing. So a
run may end as "detached": the job goes on, and the same command picks it up later.

Signals: at a terminal the first Ctrl-C leaves the job running and says how to pick it up, a second one cancels; without
a terminal Ctrl-C and SIGTERM cancel, unless `detach=1`. A controller that does not answer is waited for; what it may
have accepted is looked for by name before anything is submitted again.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tasks import inflight, local_copy
from tasks.files import read_json
from tasks.reason import Reason
from tasks.records import utc_now
from tasks.runtimes import slurm_submission as submission
from tasks.runtimes.container import TARGETS
from tasks.runtimes.job import POLL_S, Ended, Job
from tasks.runtimes.slurm_commands import Controller, NoAnswerError, RefusedError, Site
from tasks.runtimes.slurm_states import HOPELESS, WAITING, Seen, judge

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

GONE = 3  # looks without the job until it is believed to be gone


class Slurm:
    """Runs jobs through one Slurm controller in one image; what it learns is which nodes failed (`bad`)."""

    name = "slurm"
    latency_s = 30.0  # how long a file that a node wrote may take to be seen here
    refuse_s = 120.0  # without an answer before anything was submitted: not started
    lost_s = 1800.0  # without an answer after that: the job is left in flight
    settle_s = 10.0  # after a submission without an answer, until a look tells whether it was accepted
    look_s = 10.0  # between two looks at a job, at most
    second_thought_s = 5.0  # after the first Ctrl-C

    def __init__(
        self, image: str = "", *, site: Site | None = None, detach: bool = False, say: Callable[[str], None] = print
    ) -> None:
        self.image, self.detach, self.say = image, detach, say
        self.site = site or Site()
        self.local_copy = self.site.local_copy
        self.controller = Controller(self.site)
        self.bad: set[str] = set()
        self.ahead = False  # submit and follow nothing: the job's own turn follows it (tasks/ahead.py)
        self.open: dict[str, Job] = {}  # submitted or followed by this process, and not over

    def target(self, kind: str, host: Path) -> str:
        """Return the path of `kind` in the container, fixed but for a Core on the node's own storage."""
        if kind == "mcore" and self.local_copy:
            return f"{local_copy.root(self.local_copy, host.parent.parent)}/mcore"  # host: <attempt>/work/mcore
        return TARGETS[kind]

    def use(self, image: str) -> None:
        """Run later jobs in `image`, as pyxis names it: a .sqsh file, or registry#repo@digest."""
        self.image = image

    def available(self) -> Reason | None:
        """Return why no job can be submitted: no Slurm here, or a controller that does not answer."""
        try:
            self.controller.call("sinfo", "-h", "-o", "%P")
        except (NoAnswerError, RefusedError) as error:
            return Reason("engine", "slurm", f"{error}. Log in to the cluster, or use another runtime.")
        return None

    def collect_orphans(self) -> list[str]:
        """Do nothing: a job without a runner is in flight, not an orphan."""
        return []

    def run(self, job: Job, *, stop: threading.Event, poll: Callable[[], None]) -> Ended:
        """Submit the job, or pick it up where its folder has a slurm.json, and follow it to its end."""
        try:
            if self.ahead:
                return self._submitted(job, stop, poll)
            waits = (job.folder / inflight.FILE).exists()
            if not waits and (problem := submission.refusal(job, self.site)):
                return Ended(None, "not_started", problem)
            self.open[job.id] = job  # before a word is said: whoever reads it may stop us at once
            self.say(f"picking up {_id(job) or submission.name(job)}" if waits else submission.plan(job, self.site))
            ended = _Following(self, job, stop, poll).follow()
        except (KeyboardInterrupt, SystemExit):
            self.interrupted()
            raise
        self.open.pop(job.id, None)
        return ended

    def _submitted(self, job: Job, stop: threading.Event, poll: Callable[[], None]) -> Ended:
        """Submit once and return "detached", whatever came of it: the job's own turn finds it, or submits it."""
        if (job.folder / inflight.FILE).exists():  # an earlier call's
            self.open[job.id] = job
        elif not submission.refusal(job, self.site):
            self.open[job.id] = job
            self.say(submission.plan(job, self.site))
            _Following(self, job, stop, poll).step(done=False)
        return self.left(job, "submitted ahead")

    def keeps(self) -> bool:
        """Return whether a signal leaves the job running: `detach=1`, or somebody at a terminal who can come back."""
        return self.detach or sys.stdin.isatty()

    def left(self, job: Job, why: str) -> Ended:
        """Return the end of a run whose job goes on."""
        number = _id(job) or f"{submission.name(job)} (whether Slurm accepted it is not known)"
        return Ended(None, "detached", f"in flight: job {number} ({why}); the same command picks it up")

    def interrupted(self) -> None:
        """Cancel all that is open, or say that it goes on and give a second Ctrl-C the time to cancel it."""
        jobs = [job for job in self.open.values() if inflight.is_open(job.folder)]
        self.open.clear()
        if not jobs:
            return
        if not self.keeps():
            self._cancel(jobs)
            return
        for job in jobs:
            self.say(f"{self.left(job, 'interrupted').detail}; scancel --name={submission.name(job)} ends it")
        if sys.stdin.isatty():
            self.say(f"Ctrl-C again within {self.second_thought_s:g} s cancels {'it' if len(jobs) == 1 else 'them'}")
            try:
                time.sleep(self.second_thought_s)
            except (KeyboardInterrupt, SystemExit):
                self._cancel(jobs)

    def _cancel(self, jobs: list[Job]) -> None:
        """Cancel all at once, then wait for the end of each: whoever stops us may not wait for long."""
        for job in jobs:
            try:
                self.controller.cancel(submission.name(job))
            except (NoAnswerError, RefusedError) as error:
                self.say(f"scancel: {error}")
        for job in jobs:
            self.cancelled(job)

    def cancelled(self, job: Job) -> Ended:
        """Cancel the job and wait until nothing of it is alive; a silent controller leaves it in flight."""
        if not _id(job):
            time.sleep(self.settle_s)  # a submission may be on its way
        until = time.monotonic() + self.latency_s + self.refuse_s
        while time.monotonic() < until:
            try:
                self.controller.cancel(submission.name(job))
                if all(seen.is_over for seen in self.controller.look(submission.name(job))):
                    inflight.close(job.folder)
                    return Ended(None, "stopped", f"{submission.name(job)} was cancelled by this tool")
            except (NoAnswerError, RefusedError) as error:
                self.say(f"scancel: {error}")
            time.sleep(POLL_S * 5)
        return self.left(job, f"it could not be cancelled: scancel --name={submission.name(job)}")


class _Following:
    """One job from its submission to its end; a look at most every `look_s`, at once when exit.json is there."""

    def __init__(self, runtime: Slurm, job: Job, stop: threading.Event, poll: Callable[[], None]) -> None:
        self.runtime, self.job, self.stop, self.poll = runtime, job, stop, poll
        self.controller, self.name = runtime.controller, submission.name(job)
        self.tried = (job.folder / inflight.FILE).exists()  # whether Slurm may have the job
        self.answered, self.settle_until = time.monotonic(), 0.0
        self.said, self.gone, self.pause = "", 0, POLL_S
        self.released = False  # whether we ended the job after its agent had: ray.sub lingers for a minute

    def follow(self) -> Ended:
        """Look, submit where Slurm surely does not have the job, and return its end."""
        next_look, done = 0.0, False
        while True:
            if not done and (self.job.folder / "exit.json").exists():
                next_look, done = 0.0, True
            if time.monotonic() >= next_look:
                ended = self.step(done=done)
                if ended is not None:
                    return ended
                self.pause = min(self.pause * 2, self.runtime.look_s)
                next_look = time.monotonic() + (POLL_S if done else self.pause)
            if self.stop.is_set():
                if not self.tried:
                    return Ended(None, "stopped", "stopped before anything was submitted")
                return (
                    self.runtime.left(self.job, "interrupted")
                    if self.runtime.keeps()
                    else (self.runtime.cancelled(self.job))
                )
            self.poll()
            time.sleep(POLL_S)

    def step(self, *, done: bool) -> Ended | None:
        """Ask the controller once and act on the answer; None while the job goes on."""
        try:
            seen = self.look()
            self.answered = time.monotonic()
            if seen is None and not _id(self.job) and not submission.started(self.job):
                return self.submit() if time.monotonic() >= self.settle_until else None
            self.gone = self.gone + 1 if seen is None else 0
            if self.gone >= GONE or (seen and seen.is_over):
                return self.over(seen)
            return self.settled(seen) if seen else None
        except RefusedError as error:
            return Ended(None, "not_started", f"nothing was submitted: {error}")
        except NoAnswerError as error:
            if not error.sure:
                self.settle_until = time.monotonic() + self.runtime.settle_s
            silent_s = time.monotonic() - self.answered
            if done and silent_s > self.runtime.latency_s:
                return self.over(None)
            if not self.tried and silent_s > self.runtime.refuse_s:
                return Ended(None, "not_started", f"nothing was submitted: {error}")
            if silent_s > self.runtime.lost_s:
                return self.runtime.left(self.job, f"the controller does not answer: {error}")
            self.tell("silent", f"waiting for the controller: {error}")
            return None

    def look(self) -> Seen | None:
        """Return the job; a second one of its name is cancelled: it could only find that the first has started."""
        try:
            jobs = self.controller.look(self.name)
            for extra in jobs[1:]:
                if not extra.is_over:
                    self.runtime.say(f"{extra}: accepted twice, the later one is cancelled")
                    self.controller.cancel_id(extra.id)
        except RefusedError as error:
            if not self.tried:
                raise
            raise NoAnswerError(str(error), sure=False) from error  # whatever is wrong, the job may be alive
        return jobs[0] if jobs else None

    def submit(self) -> Ended | None:
        """Submit; a refusal is the end, no answer is not."""
        facts = {"name": self.name, "task": self.job.labels.get(inflight.TASK), "submitted": utc_now()}
        inflight.note(self.job.folder, state="submitting", key=self.job.labels.get(inflight.KEY), **facts)
        submission.home(self.job).mkdir(exist_ok=True)
        argv = submission.options(self.job, self.runtime.site, self.runtime.image, self.runtime.bad)
        env = submission.environment(self.job, self.runtime.image)
        self.tried, self.pause = True, POLL_S
        try:
            number = self.controller.submit(argv, env=env, cwd=submission.home(self.job))
        except RefusedError as error:
            inflight.close(self.job.folder)
            return Ended(None, "not_started", str(error))
        inflight.note(self.job.folder, state="submitted", job=number)
        return None

    def settled(self, seen: Seen) -> Ended | None:
        """Note what was seen; return the end of a job that can come to nothing any more, after cancelling it."""
        if seen.state != self.said:
            inflight.note(self.job.folder, state="submitted", job=seen.id, seen=seen.state)
            self.pause = POLL_S
            self.tell(seen.state, str(seen))
        if self.job.nodes > 1 and not self.released and (self.job.folder / "exit.json").exists():
            self.cancel()
            self.released = True
        if seen.state in WAITING and submission.started(self.job):
            reason, text = "requeued", "Slurm put it back into the queue; a second start would mix two runs"
        elif seen.state == "PENDING" and seen.reason in HOPELESS:
            reason, text = "not_started", "it can never start"
        else:
            return self.runtime.left(self.job, "detach=1") if self.runtime.detach else None
        self.cancel()
        inflight.close(self.job.folder)
        return Ended(None, reason, f"{seen}: {text}; cancelled")

    def cancel(self) -> None:
        """Cancel the job; whatever scancel says against it, the next look tells."""
        try:
            self.controller.cancel(self.name)
        except RefusedError as error:
            raise NoAnswerError(str(error), sure=True) from error

    def over(self, seen: Seen | None) -> Ended:
        """Wait for what the node wrote last, then judge."""
        job, began = self.job, time.monotonic()
        while (record := read_json(job.folder / "exit.json")) is None:
            never_began = seen and seen.state != "COMPLETED" and not submission.started(job)
            if time.monotonic() > began + (POLL_S * 5 if never_began else self.runtime.latency_s):
                break
            os.listdir(job.folder)  # makes a network file system look again
            self.poll()
            time.sleep(POLL_S)
        seen = seen or next(iter(self.controller.remembered(self.name)), None)
        if seen and self.released and seen.state == "CANCELLED":
            seen = replace(seen, state="released after the agent's end")
        started, output = submission.started(job), submission.tail(job)
        ended = judge(seen, record, started=started, output=output, waited_s=self.runtime.latency_s)
        if seen and seen.nodes and ended.reason in ("node_fail", "not_started"):
            self.runtime.bad.add(seen.nodes)
        if ended.reason != "exited":
            self.tell(ended.reason, ended.detail)
        return ended

    def tell(self, what: str, text: str) -> None:
        """Say `text` unless the last thing said was of the same kind."""
        if what != self.said:
            self.runtime.say(text)
        self.said = what


def _id(job: Job) -> str:
    """Return the id that Slurm gave, "" where it is not known."""
    return str((read_json(job.folder / inflight.FILE) or {}).get("job") or "")
