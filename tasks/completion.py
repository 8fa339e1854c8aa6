"""`doit completion bash|zsh|fish`: a script that completes tasks, levels, cases, commands and settings.

The names are in the script, so that completing starts no process; a shell that sources it at its start has those of
the day: `source <(./doitw completion bash)`. Names with a colon or an equals sign are completed as one word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from doit.cmd_base import DoitCmdBase

from tasks import settings
from tasks.errors import UserError
from tasks.query import say_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAMS = ("doit", "doitw", "nemo-rl-e2e")
# stages of a case that nobody asks for by name: the case itself does
HIDDEN = ("run:", "metrics:", "check:", "probe-")
CHOICES = {
    "runtime": settings.RUNTIMES,
    "annotations": ("github", "azure"),
    **dict.fromkeys(("fresh", "require_executed", "require_pinned", "keep_work", "undo", "open"), ("1",)),
}
PATHS = ("bridge", "nemo_rl", "mcore", "levels", "build", "python", "reports")

BASH = """\
_nemo_rl_e2e() {
  local line=${COMP_LINE:0:COMP_POINT} word cut
  local -a reply
  word=${line##*[[:space:]]}
  case $word in
    @PATHS@) mapfile -t reply < <(compgen -f -P "${word%%=*}=" -- "${word#*=}"); compopt -o filenames ;;
    *=*) mapfile -t reply < <(compgen -W '@VALUES@' -- "$word") ;;
    *) mapfile -t reply < <(compgen -W '@NAMES@ @SETTINGS@' -- "$word") ;;
  esac
  # readline replaces only what follows the last of its word breaks
  cut=${word%"${word##*[:=]}"}
  [[ $COMP_WORDBREAKS == *:* && $COMP_WORDBREAKS == *=* ]] || cut=
  COMPREPLY=("${reply[@]#"$cut"}")
  [[ ${#reply[@]} == 1 && ${reply[0]} == *= ]] && compopt -o nospace
  return 0
}
complete -F _nemo_rl_e2e @PROGRAMS@
"""
ZSH = """\
#compdef @PROGRAMS@
_nemo_rl_e2e() {
  local -a names settings values
  names=(@NAMES@)
  settings=(@SETTINGS@)
  values=(@VALUES@)
  case $PREFIX in
    @PATHS@) compset -P '*='; _files ;;
    *=*) compadd -a values ;;
    *) compadd -a names; compadd -S '' -a settings ;;
  esac
}
whence compdef >/dev/null || { autoload -Uz compinit && compinit -u; }
compdef _nemo_rl_e2e @PROGRAMS@
"""
FISH = """\
for program in @PROGRAMS@
  complete -c $program -f -n 'not string match -q -- "*=*" (commandline -ct)' -a '@NAMES@ @SETTINGS@'
  complete -c $program -f -n 'string match -q -- "*=*" (commandline -ct)' -a '@VALUES@'
  complete -c $program -n 'string match -qr -- "^(@PATHNAMES@)=" (commandline -ct)' -F
end
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def script(shell: str, names: Sequence[str], values: Mapping[str, Sequence[str]] = CHOICES) -> str:
    """Return the script for `shell` that completes `names`, every setting, and the settings' known values."""
    known = [f"{name}={value}" for name, given in values.items() for value in given]
    parts = {
        "NAMES": " ".join(names),
        "SETTINGS": " ".join(f"{name}=" for name in settings.SETTINGS),
        "VALUES": " ".join(known),
        "PATHNAMES": "|".join(PATHS),
        "PATHS": "|".join(f"{name}=*" for name in PATHS),
        "PROGRAMS": " ".join(PROGRAMS),
    }
    text = SCRIPTS[shell]
    for key, value in parts.items():
        text = text.replace(f"@{key}@", value)
    return text


class Completion(DoitCmdBase):  # type: ignore[misc]  # doit has no types
    """Print a completion script; loads the tasks as `doit list` does."""

    name = "completion"
    doc_purpose = "a script that completes tasks, cases, commands and settings: source <(doit completion bash)"
    doc_usage = "bash|zsh|fish"
    doc_description = None

    def _execute(self, pos_args: Sequence[str]) -> int:
        """Print the script for the shell that is named."""
        if len(pos_args) != 1 or pos_args[0] not in SCRIPTS:
            return say_error(UserError(f"doit completion {'|'.join(SCRIPTS)}"))
        from tasks import demo

        tasks = [task.name for task in self.task_list if not task.name.startswith(HIDDEN)]
        names = sorted({*tasks, *self.config.get("COMMAND", {})})
        print(script(pos_args[0], names, {**CHOICES, "fault": ("list", *demo.FAULTS)}), end="")
        return 0
