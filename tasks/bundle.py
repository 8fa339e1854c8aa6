"""`doit bundle ATTEMPT`: one file that a colleague can open, verify and run again; `doit bundle FILE verify=1`.

A .tar.xz (the standard library writes and reads it), the same bytes for the same attempt: sorted names, no times, no
owners. Inside: `bundle.json` (what it is, SHA-256 of every other member), `attempt/` (all evidence), `records/`,
`trees/KIND.json` (manifests) and those files under `trees/KIND/` that the named commit does not have, `levels.yaml`.
A member that holds a secret stops it. Verifying is reading: nothing of a bundle is run.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import re
import subprocess
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tasks import __version__, environment, rebuild
from tasks.errors import UserError
from tasks.files import json_bytes, read_json, sha256_file, sha256_json, write_bytes
from tasks.query import Query
from tasks.reason import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.invocation import Invocation
    from tasks.records import Record

SCHEMA = 1
NAMESPACE = "nemo-rl-e2e"  # of signatures
TOKENS = re.compile(rb"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|glpat-[\w-]{20,}|nvapi-[\w-]{30,})")
LOGIN = re.compile(rb"://[^/\s:@\"']+:[^/\s@\"']+@")  # of a proxy; in sources it is an example
MOST_BYTES = 1 << 30  # of one member of a bundle that is read


@dataclass(frozen=True, slots=True)
class Found:
    """An attempt of the workspace: its folder, its run's record, and what attempt.json says."""

    folder: Path
    run: Record
    facts: Mapping[str, Any]


def find(now: Invocation, word: str) -> Found:
    """Return the attempt called `word`: its id, its folder, or a case; UserError otherwise.

    Of a case it is the attempt that speaks for the trees as they are now, else the newest: as `doit why` has it.
    """
    from tasks import why

    root = now.workspace.root
    matches = [p for p in root.glob("attempts/*/*") if word in (p.name, os.fspath(p), os.fspath(p.relative_to(root)))]
    if not matches and (speaks := why.record_of(now, now.run(now.case(word)))):
        matches = [root / one["path"] for one in speaks.artefact["attempts"][-1:]]
    if len(matches) != 1:
        raise UserError(f"{word}: no attempt of {now.workspace.name}; `doit why CASE` and the report name them")
    folder, path = matches[0], os.fspath(matches[0].relative_to(root))
    history = now.records.history("run", folder.parent.name)
    run = next((r for r in history if any(a["path"] == path for a in r.artefact["attempts"])), None)
    facts = read_json(folder / "attempt.json")
    if run is None or facts is None:
        raise UserError(f"{folder}: not a finished attempt of a case")
    if "passed" not in facts:
        raise UserError(f"{folder}: made by an earlier version, which did not note commits and overrides: run it again")
    return Found(folder, run, facts)


def pack(now: Invocation, found: Found) -> Path:
    """Write the bundle of an attempt and return its path. Raises UserError for changed evidence or a secret inside."""
    damage = now.records.damaged(found.run)
    if damage is not None:
        raise UserError(f"{found.folder}: {damage.text}: it proves nothing any more")
    members: dict[str, bytes] = {}
    for path in sorted(found.folder.rglob("*")):
        relative = path.relative_to(found.folder)
        if path.is_file() and not path.is_symlink() and relative.parts[0] not in ("work", "home", "cpu"):
            members[f"attempt/{relative.as_posix()}"] = path.read_bytes()
    evidence, kept = sha256_json(dict(found.run.evidence)), {"run": found.run}
    judged = found.run.artefact["attempts"][-1]["path"].endswith(f"/{found.folder.name}")  # else it was tried again
    for stage in ("metrics", "check") if judged else ():
        of_run = [r for r in now.records.history(stage, found.run.name) if r.inputs.get("run") == evidence]
        kept |= {stage: of_run[-1]} if of_run else {}
    members |= {f"records/{stage}.json": json_bytes(asdict(record)) for stage, record in kept.items()}
    notes: list[str] = []
    for kind, tree in found.facts["trees"].items():
        members |= _tree(now, kind, tree, notes)
    case = now.case(found.facts["case"])
    if sha256_json(case.run_definition()) == found.run.inputs["definition"]:
        members["levels.yaml"] = now.settings.levels.read_bytes()
    else:
        notes.append("levels.yaml has changed since: the definition of the case is not in the bundle")
    _no_secrets(members)
    checked = kept.get("check")
    described = {
        "schema": SCHEMA, "attempt": found.folder.name, "case": found.facts["case"],
        "path": os.fspath(found.folder.relative_to(now.workspace.root)),
        "verdict": checked.artefact["verdict"] if checked else None, "finished": found.run.finished,
        "host": found.run.host, "gpus": list(found.run.gpus), "runtime": found.facts["runtime"],
        "image": found.facts["image"], "overrides": found.facts["overrides"], "trees": found.facts["trees"],
        "demo": now.workspace.demo, "runner": __version__, "notes": notes,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in members.items()},
    }  # fmt: skip
    target = now.workspace.root / "bundles" / f"{found.facts['case']}-{found.folder.name}.tar.xz"
    write_bytes(target, _archive({"bundle.json": json_bytes(described), **members}))
    return target


def _tree(now: Invocation, kind: str, tree: Mapping[str, str], notes: list[str]) -> dict[str, bytes]:
    """Return the manifest of a tree and those of its files that its commit does not have."""
    home = now.workspace.snapshots / f"{kind}-{tree['digest'][:20]}"
    manifest = read_json(home / "manifest.json")
    if manifest is None:
        notes.append(f"{kind}: the snapshot is gone; only digest and commit are in the bundle")
        return {}
    files = rebuild.entries(manifest["files"], tree["digest"])
    with tempfile.TemporaryDirectory() as folder:
        try:
            rebuild.export(now.settings.checkout(kind), tree["sha"], Path(folder))
        except UserError:
            notes.append(
                f"{kind}: commit {tree['sha'][:12]} is not in the checkout any more: all files are in the bundle"
            )
        own = rebuild.missing_from(Path(folder), files)
    found = {f"trees/{kind}.json": json_bytes({**tree, "files": manifest["files"]})}
    for path in own:
        source = home / "tree" / path
        link = os.fsencode(os.readlink(source)) if source.is_symlink() else None
        found[f"trees/{kind}/{path}"] = source.read_bytes() if link is None else link
    return found


def _no_secrets(members: Mapping[str, bytes]) -> None:
    """Raise UserError for a member that holds the value of a secret of this environment, or what looks like a token."""
    values = [os.environ[name].encode() for name in environment.SECRETS if len(os.environ.get(name, "")) >= 8]
    for name, data in members.items():
        login = not name.startswith("trees/") and LOGIN.search(data)
        if any(value in data for value in values) or TOKENS.search(data) or login:
            raise UserError(
                f"{name} holds what looks like a token or the value of a secret: not bundled; remove it there"
            )


def _archive(members: Mapping[str, bytes]) -> bytes:
    """Return a .tar.xz whose bytes depend on names and contents only."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(members):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(members[name]), 0o644
            tar.addfile(info, io.BytesIO(members[name]))
    return lzma.compress(out.getvalue(), preset=6)


def read(file: Path, into: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return what a bundle says of itself, and what is wrong with it; write its members below `into` if given.

    Wrong: a member that is not listed, lacks, has another hash, or leaves the folder; records that do not belong to
    the evidence; checks that the metrics inside do not give. Raises UserError for a file that is no bundle.
    """
    hashes: dict[str, str] = {}
    kept: dict[str, bytes] = {}
    wrong: list[str] = []
    try:
        with tarfile.open(file, "r:xz") as tar:
            for info in tar:
                pure = PurePosixPath(info.name)
                if not info.isreg() or pure.is_absolute() or ".." in pure.parts or info.size > MOST_BYTES:
                    wrong.append(f"{info.name}: not a plain file inside the bundle")
                    continue
                data = tar.extractfile(info).read()  # type: ignore[union-attr]  # a regular file has content
                if info.name in hashes:
                    wrong.append(f"{info.name}: twice")
                hashes[info.name] = hashlib.sha256(data).hexdigest()
                if len(pure.parts) <= 2 and pure.suffix == ".json":
                    kept[info.name] = data
                if into is not None:
                    write_bytes(into / info.name, data)
        described = json.loads(kept["bundle.json"])
        listed = dict(described["files"])
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{file}: not a bundle of this program ({type(error).__name__}: {error})") from error
    del hashes["bundle.json"]
    for name in sorted({*listed, *hashes}):
        if listed.get(name) != hashes.get(name):
            how = "not listed" if name not in listed else "missing" if name not in hashes else "changed"
            wrong.append(f"{name}: {how}")
    try:
        wrong += _belongs(described, {k: json.loads(v) for k, v in kept.items()}, hashes)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        wrong.append(f"its records cannot be read ({type(error).__name__}: {error})")
    return described, wrong


def _belongs(described: Mapping[str, Any], content: Mapping[str, Any], hashes: Mapping[str, str]) -> list[str]:
    """Return where records, evidence and verdict of a bundle do not belong together."""
    from tasks.checks import evaluate, parse

    wrong = []
    run, prefix = content["records/run.json"], f"{described['path']}/"
    for name, sha in run["evidence"].items():
        if name.startswith(prefix) and hashes.get(f"attempt/{name.removeprefix(prefix)}") != sha:
            wrong.append(f"attempt/{name.removeprefix(prefix)}: not what the run's record names")
    check = content.get("records/check.json")
    if check is None:
        return [*wrong, *(["a verdict without a record"] if described["verdict"] else [])]
    if check["inputs"]["run"] != sha256_json(run["evidence"]):
        wrong.append("records/check.json: of another run")
    if check["artefact"]["verdict"] != described["verdict"]:
        wrong.append("the verdict is not that of its record")
    if described["verdict"] == "Pass" and content["attempt/exit.json"]["rc"] != 0:
        wrong.append("a Pass with another rc than 0")
    metrics = content.get("attempt/metrics.json", {})
    for known in check["artefact"]["checks"]:
        now = evaluate(parse(known["expr"]), metrics).as_dict()
        if (now["verdict"], now["value"]) != (known["verdict"], known["value"]):
            wrong.append(f"{known['expr']}: the metrics inside give {now['value']}, the record says {known['value']}")
    return wrong


def sign(file: Path, key: str) -> Path:
    """Sign a bundle with the user's SSH key; return the signature, FILE.sig. UserError as ssh-keygen says."""
    _ssh("-Y", "sign", "-q", "-f", key, "-n", NAMESPACE, os.fspath(file))
    return Path(f"{file}.sig")


def signer(file: Path) -> str | None:
    """Return who signed a bundle, as ssh-keygen says, or None where there is no FILE.sig. UserError for a wrong one.

    That the signature is good says nothing about whose the key is: compare the fingerprint.
    """
    if not Path(f"{file}.sig").exists():
        return None
    return _ssh("-Y", "check-novalidate", "-n", NAMESPACE, "-s", f"{file}.sig", data=file.read_bytes()).strip()


def _ssh(*words: str, data: bytes | None = None) -> str:
    try:
        done = subprocess.run(["ssh-keygen", *words], input=data, capture_output=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise UserError(f"ssh-keygen: {error}; without key= a bundle is not signed") from error
    if done.returncode:
        raise UserError(f"ssh-keygen {words[1]} failed: {os.fsdecode(done.stderr or done.stdout).strip()}")
    return os.fsdecode(done.stdout)


class Bundle(Query):
    """Pack an attempt into one file, or verify such a file."""

    name = "bundle"
    doc_purpose = "one file with evidence, records and trees of an attempt; FILE verify=1 verifies it; key=KEY signs"
    doc_usage = "ATTEMPT|CASE|FILE [verify=1] [key=SSH_KEY] [--json]"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Pack or verify; exit status 1 for a bundle that is wrong."""
        if len(words) != 1:
            raise UserError("bundle what? name one attempt, case or file: doit bundle level0.grpo_megatron")
        given = now.settings.arguments
        if given.get("verify", "0") in ("0", "no", "false"):
            file = pack(now, find(now, words[0]))
            if "key" in given:
                sign(file, given["key"])
            described, wrong = read(file)
            notes = described["notes"]
        else:
            file = Path(words[0]).absolute()
            described, wrong = read(file)
            who = signer(file)
            notes = [*described.get("notes", []), who or "not signed"]
        verdict = Verdict.FAIL if wrong else Verdict.PASS
        told = {"file": os.fspath(file), "sha256": sha256_file(file), "notes": notes, "wrong": wrong}
        if as_json:
            print(json.dumps({**told, "bundle": described}, indent=1))
            return 1 if wrong else 0
        for line in [*(f"note: {text}" for text in notes), *(f"WRONG: {text}" for text in wrong)]:
            print(line)
        what = f"{described['case']} {described['verdict'] or 'not judged'}, attempt {described['attempt']}"
        print(f"sha256 {told['sha256']}")
        print(f"Result: {verdict} - " + (f"{len(wrong)} members or records are wrong" if wrong else f"{what}: {file}"))
        return 1 if wrong else 0
