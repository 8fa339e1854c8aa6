"""Copy a tree to this node's own storage, prove the copy, then become the command (standard library only).

    python local_copy.py LIST SOURCE TARGET NOTES [COMMAND...]
    python local_copy.py --proved NODES LIST NOTES COMMAND...     only if so many nodes have left their note

LIST is JSON, path -> [mode, SHA-256], as git has modes (120000: a link, whose text is hashed; 160000: an empty folder).
Each file of LIST, and no other, is copied from SOURCE, then read back from the copy; only when every hash is right does
the copy get its name, TARGET, and NOTES/<node>.json says which LIST is there. A wrong file, a full disk: status 74, no
TARGET, no note, no command. A TARGET of an earlier start of the same attempt is made anew.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

WRONG = 74  # EX_IOERR
LATENCY_S = 60.0  # until a note that another node wrote is seen here


def digest(path: str, mode: str) -> str:
    """Return the SHA-256 of a file's content, or of a link's text."""
    if mode == "120000":
        return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(files: Mapping[str, Sequence[str]], source: str, target: str) -> None:
    """Copy `files` and read them back; OSError where one cannot be had, or is not what it should be."""
    for path, (mode, sha) in files.items():
        new = f"{target}/{path}"
        if mode == "160000":
            os.makedirs(new, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(new), exist_ok=True)
        if mode == "120000":
            os.symlink(os.readlink(f"{source}/{path}"), new)
        else:
            shutil.copyfile(f"{source}/{path}", new)
            os.chmod(new, 0o755 if mode == "100755" else 0o644)
        if digest(new, mode) != sha:
            raise OSError(f"{path} is not what the snapshot's manifest says")


def proved(listed: str, notes: str) -> int:
    """Return how many nodes have proved a copy of LIST."""
    with open(listed, "rb") as file:
        wanted = hashlib.sha256(file.read()).hexdigest()
    count = 0
    for name in os.listdir(notes):
        if name.endswith(".json"):
            with open(f"{notes}/{name}", encoding="utf-8") as note:
                count += json.load(note)["list"] == wanted
    return count


def become(nodes: int, listed: str, notes: str, command: Sequence[str]) -> int:
    """Become the command where `nodes` copies are proved; WRONG where one is still missing after a while."""
    until = time.monotonic() + LATENCY_S
    while (found := proved(listed, notes)) < nodes and time.monotonic() < until:
        time.sleep(1.0)
    if found == nodes:
        return os.execvp(command[0], command)  # noqa: S606 - argv, and it never returns
    print(f"local_copy: {found} of {nodes} nodes proved their copy; nothing was started", file=sys.stderr)
    return WRONG


def main(argv: Sequence[str]) -> int:
    """Copy, note, and become the command."""
    if argv[0] == "--proved":
        return become(int(argv[1]), argv[2], argv[3], argv[4:])
    listed, source, target, notes, *command = argv
    began, making = time.monotonic(), f"{target}.{os.getpid()}.part"
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    try:
        with open(listed, "rb") as file:
            text = file.read()
        files = json.loads(text)
        for old in (target, making):
            shutil.rmtree(old, ignore_errors=True)
        os.makedirs(making)
        copy(files, source, making)
        os.rename(making, target)
    except (OSError, ValueError) as error:
        shutil.rmtree(making, ignore_errors=True)
        print(f"local_copy: {node}: {error}; nothing was started", file=sys.stderr)
        return WRONG
    note = {"node": node, "list": hashlib.sha256(text).hexdigest(), "files": len(files), "target": target}
    note["seconds"] = round(time.monotonic() - began, 3)
    part = f"{notes}/.{node}.{os.getpid()}.part"
    with open(part, "w", encoding="utf-8") as out:
        out.write(json.dumps(note, sort_keys=True) + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, f"{notes}/{node}.json")
    return os.execvp(command[0], command) if command else 0  # noqa: S606 - argv, and it never returns


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
