"""Start the agent of a Slurm job exactly once for its attempt (standard library only, runs inside the container).

    python slurm_start.py STARTED.json COMMAND...

STARTED.json is made with O_EXCL: a job that Slurm starts again (requeue, preemption), or a submission that was accepted
twice, ends here with status 75 and touches nothing, because event files of two starts are no evidence. The command
replaces this process, so that Slurm's signals reach it; its standard input is /dev/null, never srun's pipe, whose end
the agent would take for its runner's death.
"""

import json
import os
import sys
import time

AGAIN = 75
SAID = "this attempt was started before"


def main(argv: list[str]) -> int:
    """Note the start and become the command; return 75 where there was an earlier start."""
    path, command = argv[0], argv[1:]
    names = {"job": "SLURM_JOB_ID", "restart": "SLURM_RESTART_COUNT", "node": "SLURMD_NODENAME"}
    note = {key: os.environ.get(name, "") for key, name in names.items()} | {"time": time.time()}
    try:
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        print(f"slurm_start: {SAID}; a start on top of it would mix two runs", file=sys.stderr)
        return AGAIN
    os.write(out, json.dumps(note).encode())
    os.fsync(out)
    os.close(out)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return os.execvp(command[0], command)  # noqa: S606 - argv, and it never returns


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
