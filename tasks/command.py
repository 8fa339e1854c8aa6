"""The command line on top of doit's: exit status 0, 1, 2, bare overrides, signals, and runs by another name."""

from __future__ import annotations

import difflib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doit import doit_cmd
from doit.cmd_run import Run as DoitRun
from doit.cmdparse import CmdParseError
from doit.exceptions import InvalidCommand, InvalidDodoFile, InvalidTask

from tasks import invocation, settings
from tasks.errors import UserError
from tasks.faces import undisturbed
from tasks.query import opt_json, say_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from tasks.reason import Verdict

USAGE = """\
doit level0 [name=value ...]     is NeMo-RL level 0 up to date for this Bridge? runs what is stale
doit levels | plan | status      what there is; what your change calls for; what is known
doit why NAME | doctor           why something is stale or Blocked; every precondition on one page
doit demo [fault=NAME]           the whole pipeline on generated miniatures, no GPU, no checkout
Settings and commands: README.md. doit's own: doit help, doit list."""


class Run(DoitRun):  # type: ignore[misc]  # doit has no types
    """doit's `run`, with our exit status and without tracebacks for a user's mistake."""

    cmd_options = (*DoitRun.cmd_options, opt_json)

    def prepare(self, names: list[str]) -> list[str]:
        """Return the tasks to run; commands that are runs by another name override this.

        `image build`, `image update` and `image show` are commands, though `image` alone is a stage.
        """
        if names[:1] == ["image"] and names[1:2] in (["build"], ["update"], ["show"]):
            from tasks import image_commands

            raise SystemExit(image_commands.main(names[1:], invocation.current().settings))
        return names

    def parse_execute(self, in_args: Sequence[str]) -> int:
        """Run and return 0 (Pass), 1 (Fail), 2 (Blocked or a mistake), 130 or 143 after a signal."""
        with undisturbed():
            return self._answer(in_args)

    def _answer(self, in_args: Sequence[str]) -> int:
        names = [word for word in in_args if not (word[:1] in "~+" and settings.is_override(word))]
        try:
            names = [task for name in self.prepare(names) for task in (_rehearsals() if name == "rehearse" else [name])]
            if not [word for word in names if not word.startswith("-")]:
                print(USAGE)
                return 0
            signal.signal(signal.SIGTERM, _stop)
            signal.signal(signal.SIGINT, _stop)
            super().parse_execute(sorted(names, key="--json".__ne__))  # doit takes its options before the tasks alone
        except UserError as error:
            return say_error(error)
        except (InvalidCommand, InvalidTask, InvalidDodoFile, CmdParseError) as error:
            return say_error(self._explain(error))
        except (KeyboardInterrupt, SystemExit) as end:
            code = end.code if isinstance(end, SystemExit) else 130
            return code if isinstance(code, int) else 2
        except OSError as error:  # a full or read-only disk: the environment's doing, and said so
            where = error.filename or "the build folder"
            return say_error(UserError(f"{where}: {error.strerror or error} (build=PATH puts the state elsewhere)"))
        except Exception as error:  # noqa: BLE001
            return say_error(_internal(error))
        return self.status()

    def _execute(  # doit passes what the signature names
        self, outfile: Any, verbosity: Any = None, always: bool = False, continue_: bool = False,
        reporter: Any = None, num_process: int = 0, par_type: str = "thread", single: bool = False,
        auto_delayed_regex: bool = False, force_verbosity: bool = False, failure_verbosity: int = 0, pdb: bool = False,
        as_json: bool = False,
    ) -> Any:  # fmt: skip
        """Make the reporter here, so that its answer is at hand for the exit status."""
        reporter.as_json = as_json
        self.reporter = reporter(outfile, {})
        return super()._execute(
            outfile, verbosity, always, continue_, self.reporter, num_process, par_type, single, auto_delayed_regex,
            force_verbosity, failure_verbosity, pdb,
        )  # fmt: skip

    def status(self) -> int:
        """Return the exit status of the answer; no answer is an error."""
        answer: tuple[Verdict, str] | None = getattr(getattr(self, "reporter", None), "answer", None)
        return invocation.EXIT[answer[0]] if answer else 2

    def _explain(self, error: Exception) -> UserError:
        wrong = getattr(error, "not_found", None)
        if wrong is None:
            return UserError(str(error))
        known = [*(task.name for task in getattr(self, "task_list", [])), *self.config.get("COMMAND", {})]
        near = difflib.get_close_matches(wrong, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if wrong in known:  # a command of its own, behind another one
            hint = f": it is a command, so it comes first (doit {wrong} ...)"
        return UserError(f"unknown level, case or command {wrong!r}{hint} (doit levels)")


def _rehearsals() -> list[str]:
    """Return what `doit rehearse` means: the rehearsals of the required cases that the difference calls for."""
    from tasks import queries

    now = invocation.current()
    called = {case for row in queries.plan_now(now).rows for case in row.cases}
    found = [f"rehearse:{c.id}" for c in now.levels.cases() if c.id in called and c.rehearsal and c.rehearsal.supported]
    if not found:
        print("Result: Pass - the change calls for no case that has a rehearsal (doit plan; doit rehearse:CASE)")
        raise SystemExit(0)
    return found


def _internal(error: Exception) -> UserError:
    """Keep the traceback of a fault of ours in a file, and say where."""
    import traceback

    path = Path(os.environ.get("E2E_BUILD_DIR") or settings.ROOT / "build") / "internal-error.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return UserError(f"internal error: {type(error).__name__}: {error}; please report {path}")


def _stop(number: int, _frame: FrameType | None) -> None:
    """Stop what runs: the runtime ends its job within seconds, the exception ends doit, which writes the report."""
    invocation.current().stop.set()
    if number == signal.SIGTERM:
        raise SystemExit(143)
    raise KeyboardInterrupt


class Demo(Run):
    """Run the pipeline on generated miniature repositories; `fault=NAME` breaks a copy of the demo Bridge first."""

    doc_purpose = "run the demo workspace's levels"
    doc_usage = "[TASK ...] [fault=NAME]"

    def prepare(self, names: list[str]) -> list[str]:
        """Make the repositories, point the settings at them, and return the demo's levels."""
        from tasks import demo

        given = settings.load(doit_cmd._CMDLINE_VARS or {})  # noqa: SLF001
        fault = given.arguments.get("fault")
        if fault == "list":
            for known in demo.FAULTS.values():
                print(f"{known.name:28} {known.description}")
            raise SystemExit(0)
        home = given.build / "demo"
        if fault is None:
            checkouts = demo.make(home / "repos")
        elif fault in demo.FAULTS:
            checkouts = demo.make_faulty(home, fault)
        else:
            near = difflib.get_close_matches(fault, demo.FAULTS, n=1)
            raise UserError(
                f"fault={fault}: unknown{f'; did you mean {near[0]}?' if near else ''} (doit demo fault=list)"
            )
        for name in ("MCORE_REPO", "NEMO_RL_IMAGE"):
            os.environ.pop(name, None)  # the demo is closed: nothing of the user's real set-up reaches it
        for name, value in {
            "bridge": checkouts.bridge, "nemo_rl": checkouts.nemo_rl, "runtime": "local", "levels": demo.LEVELS
        }.items():  # fmt: skip
            doit_cmd.set_var(name, str(value))
        print("demo: generated miniature repositories, real computation, no statement about Megatron-Bridge or NeMo-RL")
        wanted = [word for word in names if not word.startswith("-")]
        return [
            *(wanted or ["level0", "level1", "level2", "level3", "level6"]),
            *(w for w in names if w.startswith("-")),
        ]


class Changed(Run):
    """Run what `doit plan` shows."""

    doc_purpose = "run the levels that your change calls for (doit plan)"
    doc_usage = "[since=REV]"

    def prepare(self, names: list[str]) -> list[str]:
        """Return the levels of the plan."""
        from tasks import queries

        plan = queries.plan_now(invocation.current())
        found = plan.tasks()
        if not found:
            print("Result: Pass - the change calls for no level")
            raise SystemExit(0)
        return [*found, *(word for word in names if word.startswith("-"))]
