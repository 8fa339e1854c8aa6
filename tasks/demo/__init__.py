"""The demo workspace: two generated git repositories that keep the interface of Megatron-Bridge and NeMo-RL.

`make` generates them, `make_faulty` generates a copy with one of `FAULTS` in it, `LEVELS` is the levels file for both.
The templates beside this module are ordinary code; their GRPO is a real, tiny one in NumPy. See `repositories` for what
is done to a checkout that a user has edited (nothing), `faults` for what can be broken and who must notice.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.demo.faults import FAULTS, Edit, Fault, apply, find, is_exactly
from tasks.demo.repositories import Checkouts, edited_files, is_current, is_demo, make, set_aside

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAULTS", "LEVELS", "Checkouts", "Edit", "Fault", "apply", "is_demo", "make", "make_faulty"]

LEVELS = Path(__file__).with_name("levels.yaml")
"""The levels file of the demo workspace."""


def make_faulty(folder: Path, fault: str | Fault, *, tell: Callable[[str], None] = print) -> Checkouts:
    """Return checkouts `folder/fault-<name>/{bridge,nemo-rl}` that hold the fault as an uncommitted edit, nothing else.

    A copy that is so already is left alone; one that a user has edited further is renamed, never overwritten, and
    `tell` is given the new name. Raises UserError for an unknown fault.
    """
    known = fault if isinstance(fault, Fault) else find(fault)
    home = folder / f"fault-{known.name}"
    made = Checkouts(home / "bridge", home / "nemo-rl")
    broken, sound = (made.bridge, made.nemo_rl) if known.repo == "bridge" else (made.nemo_rl, made.bridge)
    if home.exists():
        changed = [edited_files(checkout) if is_demo(checkout) else None for checkout in (sound, broken)]
        as_made = changed == [frozenset(), frozenset(known.paths)] and is_exactly(known, broken)
        if as_made and is_current(broken) and is_current(sound):
            return made
        moved = set_aside(home, edited=not as_made and changed != [frozenset(), frozenset()])
        if moved:
            tell(f"demo: {home} was not as generated; it is now {moved}")
    make(home)
    apply(known, broken)
    return made
