"""Core on the node's own storage: the copy is what the manifest says and proved, or nothing is started."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import local_copy, runs
from tasks.attempts import Attempt
from tasks.errors import UserError
from tasks.files import sha256_file
from tasks.runtimes.slurm import Slurm
from tasks.runtimes.slurm_commands import Site, site_of
from tasks.settings import ROOT


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Node:
    """A shared tree, and the script that copies it."""

    def __init__(self, home: Path) -> None:
        self.source, self.target, self.notes = home / "shared", home / "node" / "mcore", home / "attempt" / "copies"
        (self.source / "megatron/core").mkdir(parents=True)
        (self.source / "megatron/core/a.py").write_text("A = 1\n")
        (self.source / "run").write_text("#!/bin/sh\n")
        (self.source / "link").symlink_to("run")
        (self.source / "unlisted").write_text("left by somebody")
        self.notes.mkdir(parents=True)
        self.list = home / "attempt" / local_copy.LIST
        files = {
            "megatron/core/a.py": ["100644", sha("A = 1\n")], "run": ["100755", sha("#!/bin/sh\n")],
            "link": ["120000", sha("run")], "sub": ["160000", "0" * 40],
        }  # fmt: skip
        self.list.write_text(json.dumps(files))

    def copy(self, *command: str) -> subprocess.CompletedProcess[str]:
        argv = [ROOT / "containers/local_copy.py", self.list, self.source, self.target, self.notes, *command]
        env = {"SLURMD_NODENAME": "n7"}
        return subprocess.run(
            [sys.executable, *argv], capture_output=True, text=True, check=False, timeout=30, env=env
        )  # fmt: skip


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_listed_files_and_no_others_are_there_before_the_command_starts(node):
    done = node.copy("cat", str(node.target / "megatron/core/a.py"))
    assert (done.returncode, done.stdout) == (0, "A = 1\n"), done.stderr
    assert {p.relative_to(node.target).as_posix() for p in node.target.rglob("*")} == {
        "megatron", "megatron/core", "megatron/core/a.py", "run", "link", "sub",
    }  # fmt: skip
    assert (node.target / "run").stat().st_mode & 0o111
    assert (node.target / "link").is_symlink()
    assert local_copy.unproved(node.list.parent, 1) is None
    (node.target / "compiled.so").touch()
    assert node.copy().returncode == 0  # a second start: made anew
    assert not (node.target / "compiled.so").exists()


def other_content(node: Node) -> None:
    (node.source / "megatron/core/a.py").write_text("A = 2\n")


def other_link(node: Node) -> None:
    (node.source / "link").unlink()
    (node.source / "link").symlink_to("unlisted")


def lost(node: Node) -> None:
    (node.source / "run").unlink()


def no_list(node: Node) -> None:
    node.list.write_text("{")


@pytest.mark.parametrize("damage", [other_content, other_link, lost, no_list])
def test_a_copy_that_is_not_the_tree_under_test_is_no_copy(node, damage):
    damage(node)
    done = node.copy("echo", "started")
    assert (done.returncode, done.stdout) == (74, "")
    assert "nothing was started" in done.stderr
    assert not node.target.exists()
    assert not list(node.target.parent.glob("*"))
    assert "0 of 1 nodes" in (local_copy.unproved(node.list.parent, 1) or "")


def note(node: Node, name: str, **facts: object) -> None:
    (node.notes / f"{name}.json").write_text(json.dumps({"list": sha256_file(node.list), **facts}))


def test_each_node_must_have_proved_its_copy(node):
    folder = node.list.parent
    note(node, "n1")
    assert "1 of 2 nodes" in (local_copy.unproved(folder, 2) or "")
    note(node, "n2", list="of another tree")
    assert "1 of 2 nodes" in (local_copy.unproved(folder, 2) or "")
    note(node, "n2")
    assert local_copy.unproved(folder, 2) is None
    assert local_copy.unproved(folder / "copies", 1) is None  # an attempt that ran in the tree itself


@pytest.mark.parametrize("proved", [True, False])
def test_a_run_on_a_copy_that_nobody_proved_is_damaged(node, monkeypatch, proved):
    folder = node.list.parent
    if proved:
        note(node, "n1")
    monkeypatch.setattr(runs, "collect", lambda *_: [])
    pipe: Any = SimpleNamespace(
        folder=lambda *_: folder, workspace=SimpleNamespace(root=folder), gpus=SimpleNamespace(models=()), manifests={},
        perform=lambda *_: Attempt("1", folder, {"reason": "exited", "rc": 0}, "exited", ""), path_map=lambda *_: {},
        settings=SimpleNamespace(overrides=()),
    )  # fmt: skip
    place: Any = SimpleNamespace(root=lambda *_: "/x", runtime=SimpleNamespace(name="slurm"), image={})
    trees: Any = {"bridge": SimpleNamespace(path=folder / "none" / "tree")}
    facts = runs._attempt(pipe, SimpleNamespace(id="c", nodes=1, gpus=0), place, trees)
    assert (facts["damage"] is None) is proved


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_driver_over_several_nodes_starts_only_when_each_has_proved_its_copy(node, monkeypatch, capsys, nodes):
    spec = importlib.util.spec_from_file_location("node_copy", ROOT / "containers/local_copy.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    started: list[str] = []
    monkeypatch.setattr(module.os, "execvp", lambda _, command: started.extend(command) or 0)
    monkeypatch.setattr(module, "LATENCY_S", 0.0)
    note(node, "n1")
    note(node, "n2", list="of another tree")
    status = module.main(["--proved", str(nodes), str(node.list), str(node.notes), "agent"])
    assert (status, started) == ((0, ["agent"]) if nodes == 1 else (74, []))
    assert ("1 of 2 nodes" in capsys.readouterr().err) is (nodes == 2)


def test_core_has_a_path_of_its_own_for_each_attempt_and_the_others_keep_theirs():
    runtime, attempt = Slurm(site=site_of({"local_copy": "/tmp", "qos": "x"})), Path("/b/ws/attempts/c/20261201-1")
    assert runtime.target("mcore", attempt / "work" / "mcore") == "/tmp/e2e-20261201-1/mcore"
    assert runtime.target("bridge", Path("/b/snap")) == "/opt/Megatron-Bridge"
    assert runtime.site.options == ("--qos=x",)
    assert Slurm(site=Site()).target("mcore", attempt / "work" / "mcore") == "/opt/Megatron-LM"


@pytest.mark.parametrize("value", ["tmp", True, "/a b", "/a,b", "/a:b", "/"])
def test_a_place_that_a_mount_or_a_shell_would_take_apart_is_refused(value):
    with pytest.raises(UserError, match="local_copy"):
        site_of({"local_copy": value})
