"""The three checkouts of one invocation as it found them: scanned once, frozen, each with its revision.

    checkout -> manifest (digests.py) -> snapshot (snapshot.py), revision (provenance.py)

Core is looked for inside the Bridge and taken as a tree of its own; the baseline's trees are those inside NeMo-RL.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tasks import digests, provenance, snapshot, workspace
from tasks.attempts import Tree
from tasks.errors import UserError
from tasks.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tasks.settings import Settings
    from tasks.workspace import Workspace

CORE_IN_BRIDGE = "3rdparty/Megatron-LM"
VENDORED = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
TREES = ("bridge", "mcore", "nemo_rl")


class Checkouts:
    """Bridge, Core and NeMo-RL of the settings; nothing is read before it is asked for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @cached_property
    def workspace(self) -> Workspace:
        """Return the folders of this pair of checkouts; raises UserError when one is missing."""
        return workspace.of(self.settings)

    @cached_property
    def manifests(self) -> dict[str, digests.Manifest]:
        """Return the manifest of each checkout as it is now, taken once an invocation."""
        found = {}
        for kind in TREES:
            path = self.settings.checkout(kind)
            if kind == "mcore" and not any(path.iterdir()):
                raise UserError(
                    f"{path} is empty: the submodule is not checked out; git -C {self.settings.bridge} submodule "
                    "update --init --recursive (or name another Core with mcore=PATH)"
                )
            exclude = (CORE_IN_BRIDGE,) if kind == "bridge" else ()
            found[kind] = digests.scan(kind, path, self.workspace.root / "cache" / f"{kind}.json", exclude)
            _refuse_own_state(found[kind], self.settings.build)
        return found

    def named(self, kind: str, component: str, words: Iterable[str]) -> dict[str, digests.Entry]:
        """Return the files of a checkout that `words` name and `component` leaves out: a test, a script among docs.

        A word may be a file, a folder, a pytest node (`file.py::test`) or an option or override with one as its value.
        """
        files, patterns = self.manifests[kind].files, digests.COMPONENTS[component]
        parts = {part.partition("::")[0] for word in words for part in (word, word.partition("=")[2])}
        paths = {os.path.normpath(part) for part in parts if part}
        found = {path for path in paths if path in files}
        folders = tuple(f"{path}/" for path in paths - found if (self.manifests[kind].root / path).is_dir())
        if folders:
            found |= {path for path in files if path.startswith(folders)}
        return {path: files[path] for path in found if not digests.matches(path, patterns)}

    def tree(self, kind: str) -> Tree:
        """Return the frozen tree of "bridge", "mcore" or "nemo_rl"."""
        manifest = self.manifests[kind]
        path = snapshot.take(manifest, self.workspace.snapshots, verify=False)
        return Tree(kind, path, manifest.digest, manifest.components)

    def revision(self, kind: str) -> Mapping[str, Any]:
        """Return what bridge.json (mcore.json, nemo_rl.json) says; git is asked only when digest or HEAD moved."""
        manifest, artefact = self.manifests[kind], self.workspace.artefact(kind)
        known = read_json(artefact) or {}
        if known.get("digest") == manifest.digest and known.get("sha") == manifest.head:
            return dict(known)
        exclude = (CORE_IN_BRIDGE,) if kind == "bridge" else ()
        fresh = {
            "path": os.fspath(manifest.root),
            "digest": manifest.digest,
            "components": dict(manifest.components),
            **provenance.revision(manifest, exclude).as_dict(),
            **({"core_pin": provenance.gitlink(manifest.root, CORE_IN_BRIDGE)} if kind == "bridge" else {}),
        }
        write_json(artefact, fresh, only_if_changed=True)
        return fresh

    def sound_trees(self, *, baseline: bool = False) -> dict[str, Tree]:
        """Return the trees for an execution: a snapshot that was damaged since is made again first."""
        for kind in TREES:
            snapshot.take(self.manifests[kind], self.workspace.snapshots)
        return self.trees(baseline=baseline)

    def trees(self, *, baseline: bool = False) -> dict[str, Tree]:
        """Return the trees of a run: those under test, or with the Bridge that NeMo-RL vendors."""
        found = {kind: self.tree(kind) for kind in TREES}
        if baseline:
            vendored = found["nemo_rl"].path / VENDORED
            if not (vendored / "src").is_dir():
                raise UserError(
                    f"{self.settings.nemo_rl}/{VENDORED} is empty: no baseline; "
                    "git submodule update --init --recursive there"
                )
            part = found["nemo_rl"].components["vendored"]
            parts = dict.fromkeys(("bridge", "bridge-tests", "bridge-work"), part)
            found["bridge"] = Tree("bridge", vendored, part, parts)
            core = vendored / CORE_IN_BRIDGE
            if (core / "megatron").is_dir():
                found["mcore"] = Tree("mcore", core, part, {"mcore": part})
        return found


def _refuse_own_state(manifest: digests.Manifest, build: Path) -> None:
    """Raise UserError if what we write is part of what is tested: then no result could ever be fresh."""
    try:
        inside = build.resolve().relative_to(manifest.root.resolve()).as_posix()
    except ValueError:
        return
    if inside == "." or any(path.startswith(f"{inside}/") for path in manifest.files):
        raise UserError(
            f"{build} lies in the checkout {manifest.root}, where git does not ignore it, so it would become part of "
            "what is tested: build=PATH (or E2E_BUILD_DIR) names a folder elsewhere"
        )
