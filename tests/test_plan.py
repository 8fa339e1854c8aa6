"""From a difference to levels: nothing that can run is left out, and every row says why it is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import changes, levels, plan, surfaces
from tasks.changes import Change, changed, definitions_changed
from tasks.errors import UserError
from tests.conftest import run_git

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
SRC = "src/megatron/bridge"
MAP = surfaces.load()
LEVELS = levels.load(ROOT / "levels.yaml")


def groups(*paths: str | Change) -> list[str]:
    return [row.level for row in plan.plan_for(paths, MAP, LEVELS).rows]


# -- path -> component -> level --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (f"{SRC}/models/conversion/param_mapping.py", ["level0", "level1", "level2", "level4", "moe"]),
        (f"{SRC}/models/conversion/model_bridge.py", ["level0", "level1", "level2", "level4", "moe", "fp8"]),
        (f"{SRC}/models/conversion/quant_mapping.py", ["level0", "level2", "fp8", "modelopt"]),
        (f"{SRC}/training/checkpointing.py", ["level0", "level1"]),
        (f"{SRC}/training/optim.py", ["level0", "level1", "level4", "level6"]),
        (f"{SRC}/peft/lora.py", ["level0", "level1", "level6"]),
        (f"{SRC}/models/llama/llama_bridge.py", ["level0", "level2"]),
        (f"{SRC}/models/qwen_vl/qwen25_vl_bridge.py", ["level0", "level2", "level4", "vlm", "moe"]),
        (f"{SRC}/models/qwen/qwen3_moe_bridge.py", ["level0", "level2", "level4", "moe"]),
        (f"{SRC}/utils/cuda_graph.py", ["level0", "level3"]),
        (f"{SRC}/diffusion/models/x.py", ["probe"]),
        (f"{SRC}/recipes/llama/llama3.py", []),
        (f"{SRC}/training/gpt_step.py", []),
        ("tests/unit_tests/recipes/test_x.py", []),
        ("tests/unit_tests/models/test_param_mapping.py", ["unit"]),
        ("docs/index.md", []),
        (f"{SRC}/models/llama/README.md", []),
        ("3rdparty/Megatron-LM", ["level0", "level1", "level2", "level3", "level4", "moe"]),
        ("3rdparty/Megatron-LM/megatron/core/x.py", ["level0", "level1", "level2", "level3", "level4", "moe"]),
        ("pyproject.toml", ["level0"]),
    ],
)
def test_path_calls_for_its_levels(path: str, wanted: list[str]) -> None:
    found = groups(path)
    assert [g for g in found if g != "unit" or "unit" in wanted] == wanted


@pytest.mark.parametrize(
    "path",
    ["src/megatron/other/x.py", f"{SRC}/new_thing/x.py", "setup.py", "conftest.py", f"{SRC}/training/new.py", "x", "src",
     f"{SRC}/training/utils/new_utils.py"],
)  # fmt: skip
def test_unknown_path_widens(path: str) -> None:
    found = plan.plan_for([path], MAP, LEVELS)
    assert [row.level for row in found.rows] == ["level0", "level1", "level2", "level4"]
    assert found.unknown == (path,)


def test_new_model_family_is_taken_for_one_with_experts() -> None:
    assert groups(f"{SRC}/models/brand_new/brand_new_bridge.py") == ["level0", "level2", "level4", "moe"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["src", "megatron", "bridge", "models", "training", "x.py", "**", "a b", "..", "é"]), min_size=1
    )
)
def test_every_path_has_a_component_and_a_reason(parts: list[str]) -> None:
    found = plan.plan_for(["/".join(parts)], MAP, LEVELS)
    assert found.rows or found.ignored
    assert all(why.text for row in found.rows for why in row.reasons)
    assert all(why.text for why in found.ignored)


def test_more_paths_never_narrow_the_plan() -> None:
    paths = [f"{SRC}/training/optim.py", "docs/x.md", f"{SRC}/recipes/x.py", f"{SRC}/peft/lora.py", "zzz"]
    for i in range(len(paths)):
        assert set(groups(*paths[:i])) - {"unit"} <= set(groups(*paths[: i + 1]))


def test_row_has_cases_reasons_and_cost() -> None:
    found = plan.plan_for([f"{SRC}/models/llama/x.py"], MAP, LEVELS)
    row = next(r for r in found.rows if r.level == "level0")
    assert row.cases == ("level0.grpo_megatron",)
    assert (row.gpus, row.gpu_minutes) == (2, 20.0)
    assert str(row.reasons[0]).startswith(f"{SRC}/models/llama/x.py -> dense text family: ")
    assert found.gpu_minutes == sum(r.gpu_minutes for r in found.rows)
    assert found.tasks() == tuple(r.level for r in found.rows)


def test_suites_of_the_levels_are_not_listed_twice() -> None:
    found = plan.plan_for([f"{SRC}/training/checkpointing.py"], MAP, LEVELS)  # level 1 has the checkpoint suites anyway
    assert "unit" not in [row.level for row in found.rows]


@pytest.mark.parametrize(
    ("definitions", "extra"),
    [(("MegatronModelBridge.mtp_layers",), {"mtp"}), (("MegatronModelBridge.load_weights",), set()), ((), set())],
)
def test_changed_definition_adds_a_variant(definitions: tuple[str, ...], extra: set[str]) -> None:
    path = f"{SRC}/models/conversion/model_bridge.py"
    assert set(groups(Change(path, definitions=definitions))) - set(groups(path)) == extra


def test_change_that_cannot_matter_calls_for_nothing_and_is_shown() -> None:
    change = Change(f"{SRC}/peft/lora.py", ignored="only comments, layout or docstrings differ")
    found = plan.plan_for([change], MAP, LEVELS)
    assert (found.rows, found.gpu_minutes) == ((), 0)
    assert found.ignored == (plan.Why(change.path, "LoRA", change.ignored),)


def test_dependency_change_says_that_the_image_may_not_fit() -> None:
    assert "keeps the image's dependencies" in plan.plan_for(["pyproject.toml"], MAP, LEVELS).notes[0]


def test_level_that_the_levels_file_lacks_is_told(tmp_path: Path) -> None:
    path = tmp_path / "l.yaml"
    path.write_text("schema: 1\nlevels:\n  0:\n    title: t\n    cases:\n      a: {script: a.sh, steps: 1, gpus: 1}\n")
    found = plan.plan_for([f"{SRC}/peft/lora.py"], MAP, levels.load(path))
    assert [row.level for row in found.rows] == ["level0"]
    assert any(note.startswith("level6 is called for") for note in found.notes)


def test_every_group_and_suite_of_the_map_exists() -> None:
    rules = [*MAP.rules, MAP.unknown]
    assert {g for r in rules for g in (*r.groups, *(x for e in r.also for x in e.groups))} <= set(LEVELS.levels)
    assert {s for r in rules for s in r.suites} <= set(LEVELS.suites)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema: 1\nrules: []\nunknown: {component: u, levels: [0]}", "must be a list of components"),
        ("schema: 1\nrules:\n- {component: a, paths: [x]}\nunknown: {component: u, levels: [0]}", "does not say why"),
        ("schema: 1\nrules:\n- {component: a, paths: [x], levels: [0]}\nunknown: {component: u, why: w}", "widens"),
        ("schema: 1\nrules:\n- {component: a, path: [x], levels: [0]}\nunknown: {component: u, levels: [0]}", "'path'"),
    ],
)
def test_mistake_in_the_map_has_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        surfaces.load(path)


# -- Python, compared by what can run --------------------------------------------------------------------------------

BEFORE = b'''"""Doc."""
import os

X = 1


class A(Base):
    """Doc."""

    def f(self, x):
        """Doc."""
        return x + 1

    def g(self):
        return 2
'''


@pytest.mark.parametrize(
    ("after", "names"),
    [
        (BEFORE, ()),
        (BEFORE.replace(b'"""Doc."""', b'"""Other."""'), ()),
        (BEFORE.replace(b'"""Doc."""', b""), ()),
        (b"# a comment\n" + BEFORE.replace(b"import os\n", b"import os  # why\n\n\n"), ()),
        (BEFORE.replace(b"\n", b"\r\n"), ()),
        (BEFORE.replace(b"x + 1", b"x + 2"), ("A.f",)),
        (BEFORE.replace(b"def g(self)", b"def g(self, y=3)"), ("A.g",)),
        (BEFORE.replace(b"def g", b"@cached\n    def g"), ("A.g",)),
        (BEFORE.replace(b"def g", b"def h"), ("A.g", "A.h")),
        (BEFORE.replace(b"A(Base)", b"A(Other)"), ("A",)),
        (BEFORE.replace(b"X = 1", b"X = 2"), ("<module>",)),
        (BEFORE.replace(b"import os", b"import os, sys"), ("<module>",)),
        (BEFORE.replace(b"return x + 1", b"return 'x + 1'"), ("A.f",)),
        (BEFORE + b"    def f(self, x):\n        return 9\n", ("A.f",)),
        (BEFORE + b"x = (\n", None),
        (b"\x00", None),
        (b"a: \xff", None),
        (b"(" * 3000 + b")" * 3000, None),
    ],
)
def test_only_what_can_run_differently_counts(after: bytes, names: tuple[str, ...] | None) -> None:
    assert definitions_changed(BEFORE, after) == names


def test_order_of_definitions_counts() -> None:
    swapped = BEFORE.replace(b"import os\n\nX = 1\n", b"").replace(b'"""Doc."""\n', b"", 1) + b"\nimport os\nX = 1\n"
    assert definitions_changed(BEFORE, swapped) == ("<order>",)


@pytest.mark.parametrize("reader", [b"print(__doc__)", b"inspect.getdoc(A)", b"@auto_docstring\ndef f(): pass"])
def test_docstring_counts_where_the_file_reads_docstrings(reader: bytes) -> None:
    before, after = BEFORE + reader, BEFORE.replace(b'"""Doc."""', b'"""Other."""') + reader
    assert definitions_changed(before, after) not in ((), None)


# -- the difference itself -------------------------------------------------------------------------------------------


def test_every_kind_of_difference_is_found(make_repo: Callable[..., Path]) -> None:
    repo = make_repo("bridge", {
        "a.py": "x = 1\n", "comment.py": "x = 1\n", "gone.py": "", "moved.py": "a = 1\n" * 9, "run.sh": "", "data.json": "1",
        "broken.py": "x = 1\n", ".gitignore": "ignored\n", "with blank.py": "x = 1\n", "staged.py": "x = 1\n",
    })  # fmt: skip
    (repo / "a.py").write_text("x = 2\n")
    (repo / "comment.py").write_text("x = 1  # one\n")
    (repo / "gone.py").unlink()
    run_git(repo, "mv", "moved.py", "there.py")
    (repo / "run.sh").chmod(0o755)
    (repo / "data.json").write_text("2")
    (repo / "broken.py").write_text("x = (\n")
    (repo / "with blank.py").write_text("x = 3\n")
    (repo / "staged.py").write_text("x = 4\n")
    run_git(repo, "add", "staged.py")
    (repo / "new.py").write_text("")
    (repo / "é\n.py").write_text("")
    (repo / "ignored").write_text("")
    found = {c.path: c for c in changed(repo, "HEAD")}
    assert {p: c.status for p, c in found.items()} == {
        "a.py": "modified", "comment.py": "modified", "gone.py": "deleted", "moved.py": "deleted", "there.py": "added",
        "run.sh": "mode", "data.json": "modified", "broken.py": "modified", "with blank.py": "modified",
        "staged.py": "modified", "new.py": "untracked", "é\n.py": "untracked",
    }  # fmt: skip
    assert {p for p, c in found.items() if c.ignored} == {"comment.py"}
    assert found["a.py"].definitions == ("<module>",)
    assert found["broken.py"].definitions == ()


def test_default_is_the_merge_base_with_main(make_repo: Callable[..., Path]) -> None:
    repo = make_repo("bridge", {"a.txt": "1", "b.txt": "1"})
    run_git(repo, "switch", "-q", "-c", "work")
    (repo / "a.txt").write_text("2")
    run_git(repo, "commit", "-q", "-a", "-m", "mine")
    run_git(repo, "switch", "-q", "main")
    (repo / "b.txt").write_text("2")
    run_git(repo, "commit", "-q", "-a", "-m", "theirs")
    run_git(repo, "switch", "-q", "work")
    assert [c.path for c in changed(repo)] == ["a.txt"]
    run_git(repo, "branch", "-m", "main", "elsewhere")
    with pytest.raises(UserError, match=r"no merge base.*since=REV"):
        changed(repo)
    assert [c.path for c in changed(repo, "elsewhere")] == ["a.txt", "b.txt"]
    assert [c.path for c in changed(repo, "elsewhere", "work")] == ["a.txt", "b.txt"]


def test_submodule_bump_and_dirt_are_found(make_repo: Callable[..., Path]) -> None:
    core = make_repo("core", {"megatron/core/x.py": "a = 1\n"})
    repo = make_repo("bridge", {"a.txt": ""})
    run_git(repo, "submodule", "--quiet", "add", str(core), "3rdparty/Megatron-LM")
    run_git(repo, "commit", "-q", "-m", "sub")
    nested = repo / "3rdparty/Megatron-LM"
    assert changed(repo, "HEAD") == ()
    (nested / "megatron/core/y.py").write_text("")
    (untracked,) = changed(repo, "HEAD")
    assert (untracked.path, untracked.status, untracked.detail) == (
        "3rdparty/Megatron-LM", "submodule", "changed inside: megatron/core/y.py",
    )  # fmt: skip
    run_git(nested, "add", "-A")
    run_git(nested, "commit", "-q", "-m", "two")
    (bump,) = changed(repo, "HEAD")
    assert bump.detail.endswith(run_git(nested, "rev-parse", "HEAD")[:9])
    assert "level3" in groups(bump)


def test_symbolic_link_to_code_counts_as_changed(make_repo: Callable[..., Path]) -> None:
    repo = make_repo("bridge", {"a.py": "x = 1\n", "b.py": "x = 1\n"})
    (repo / "b.py").unlink()
    (repo / "b.py").symlink_to("a.py")
    (change,) = changed(repo, "HEAD")
    assert not change.ignored
    run_git(repo, "add", "-A")
    run_git(repo, "commit", "-q", "-m", "link")
    (repo / "b.py").unlink()
    (repo / "b.py").symlink_to("(a.py)")  # as Python the two targets would be equal
    run_git(repo, "add", "-A")
    run_git(repo, "commit", "-q", "-m", "other link")
    (change,) = changed(repo, "HEAD~1", "HEAD")
    assert not change.ignored


def test_wrong_repositories_and_revisions_are_told(make_repo: Callable[..., Path], tmp_path: Path) -> None:
    repo = make_repo("bridge", {"sub/a.txt": ""})
    unborn = make_repo("unborn", {"a": ""}, commit=False)
    plain = tmp_path / "plain"
    plain.mkdir()
    with pytest.raises(UserError, match="no commit 'nowhere'"):
        changed(repo, "nowhere")
    with pytest.raises(UserError, match="not a revision"):
        changed(repo, "--output=/tmp/x")
    with pytest.raises(UserError, match="no commit yet"):
        changed(unborn)
    with pytest.raises(UserError, match="not a git repository of its own"):
        changed(repo / "sub")
    with pytest.raises(UserError, match="git"):
        changed(plain)
    with pytest.raises(UserError, match="git"):
        changed(tmp_path / "absent")


def test_nothing_in_the_checkout_is_run_or_written(make_repo: Callable[..., Path], tmp_path: Path) -> None:
    repo = make_repo("bridge", {"a.py": "x = 1\n", "b.py": "", ".gitattributes": "*.py diff=evil\n"})
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    trap.chmod(0o755)
    for name in ("core.fsmonitor", "diff.evil.textconv", "diff.evil.command", "diff.external"):
        run_git(repo, "config", name, str(trap))
    os.utime(repo / "b.py", (1, 1))  # the index entry is stale now: a refresh would rewrite it
    before = (repo / ".git/index").stat().st_mtime_ns
    (repo / "a.py").write_text("x = 2\n")
    assert [c.path for c in changed(repo, "HEAD")] == ["a.py"]
    assert not (tmp_path / "ran").exists()
    assert (repo / ".git/index").stat().st_mtime_ns == before


def test_change_in_the_same_tick_as_the_index_is_seen(make_repo: Callable[..., Path]) -> None:
    repo = make_repo("bridge", {"a.txt": "1"})
    tick = 10**18
    run_git(repo, "config", "core.trustctime", "false")
    os.utime(repo / "a.txt", ns=(tick, tick))
    run_git(repo, "update-index", "--refresh")
    (repo / "a.txt").write_text("2")  # same size and time: only the time of the index itself tells git to look inside
    os.utime(repo / "a.txt", ns=(tick, tick))
    os.utime(repo / ".git/index", ns=(tick, tick))
    assert [c.path for c in changed(repo, "HEAD")] == ["a.txt"]


def test_git_that_hangs_is_given_up(make_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **kwargs: float) -> None:
        raise subprocess.TimeoutExpired("git", kwargs["timeout"])

    repo = make_repo("bridge", {"a": ""})
    monkeypatch.setattr(changes.subprocess, "run", slow)
    with pytest.raises(UserError, match="did not answer within"):
        changed(repo, "HEAD")


def test_rehearse_alone_is_what_the_difference_calls_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of that only what has a rehearsal; where nothing has one the answer says so and runs nothing."""
    from types import SimpleNamespace

    from tasks import command, invocation, queries

    monkeypatch.setattr(invocation, "current", lambda: SimpleNamespace(levels=LEVELS))
    rows = [SimpleNamespace(cases=("level0.grpo_megatron", "level2.nccl_reshard"))]
    monkeypatch.setattr(queries, "plan_now", lambda now: SimpleNamespace(rows=rows))
    assert command._rehearsals() == ["rehearse:level0.grpo_megatron"]
    rows[0].cases = ("level2.nccl_reshard",)
    with pytest.raises(SystemExit) as end:
        command._rehearsals()
    assert end.value.code == 0
