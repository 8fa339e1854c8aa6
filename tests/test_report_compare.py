"""Two attempts side by side: found by id or Bridge revision, differences named, nothing judged; and the page's server."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tasks.errors import UserError
from tasks.report import compare, serve
from tasks.workspace import Workspace
from tests import report_samples as samples
from tests.miniature import ROOT, Miniature
from tests.test_report_html import NASTY, Page

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "0a1b2c3d" * 5, "f9e8d7c6" * 5


def write_attempt(
    root: Path, case: str, name: str, sha: str, *, bad: bool = False, digest: str = "", **more: Any
) -> None:
    """Write what an attempt leaves behind."""
    folder = root / "attempts" / case / name
    folder.mkdir(parents=True)
    checks = [samples.check(verdict="Fail" if bad else "Pass", value=3.2 if bad else 1.02)]
    verdict = {
        "case": case,
        "verdict": "Fail" if bad else "Pass",
        "reasons": [],
        "steps": {"requested": 20, "reached": 20},
    }
    trees = {"bridge": {"sha": sha, "digest": digest or f"sha256:{sha}"}}
    known = {"id": name, "path": f"attempts/{case}/{name}", "rc": int(bad), "reason": "exited", "trees": trees, **more}
    tags = ("train/token_mult_prob_error", "train/loss")
    metrics = {tag: samples.series(tag, bad=bad) for tag in tags}
    for file, content in (("verdict", verdict), ("attempt", known), ("checks", checks), ("metrics", metrics)):
        (folder / f"{file}.json").write_text(json.dumps(content))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for case in ("level0.a", "level0.b"):
        write_attempt(tmp_path, case, f"20261201-0100-{case[-1]}1", OLD)
        write_attempt(tmp_path, case, f"20261201-0200-{case[-1]}2", OLD)
        write_attempt(tmp_path, case, f"20261202-0300-{case[-1]}3", NEW, bad=case == "level0.a")
    write_attempt(tmp_path, "level0.c", "20261202-0300-c3", NEW)
    return Workspace("here", tmp_path, demo=False)


def ids(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[str, str]]:
    return [(a["id"][-2:], b["id"][-2:]) for a, b in pairs]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("20261201-0100-a1,20261202-0300-a3", [("a1", "a3")]),
        ("20261201-0100-a,attempts/level0.b/20261201-0100-b1/", [("a1", "b1")]),
        (f"{OLD[:7]},{NEW}", [("a2", "a3"), ("b2", "b3")]),
        (f"sha256:{OLD[:12]}, sha256:{NEW[:12]}", [("a2", "a3"), ("b2", "b3")]),
        (f"{OLD},20261202-0300-b3", [("b2", "b3")]),
    ],
)
def test_attempts_and_revisions_are_found(workspace: Workspace, words: str, expected: list[tuple[str, str]]) -> None:
    assert ids(compare.find(workspace, words)) == expected


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "name two attempts"),
        ("a", "name two attempts"),
        ("a,b,c", "name two attempts"),
        ("20261201-01,20261202-0300-a3", "is the beginning of 2 attempts"),
        (f"{OLD[:6]},{NEW}", "no attempt and no Bridge revision 0a1b2c"),
        (f"{OLD},20261202-0300-c3", "no case ran with both"),
    ],
)
def test_a_name_that_fits_nothing_or_too_much_is_a_mistake(workspace: Workspace, words: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        compare.find(workspace, words)


def test_the_page_names_every_difference(workspace: Workspace) -> None:
    text = compare.render(workspace, f"{OLD},{NEW}")
    page = Page(text)
    assert "Pass with A, Fail with B level0.a" in page.text
    assert "both Pass level0.b" in page.text
    assert "+2.18 (+214 %)" in page.text
    assert '<polyline class="base"' in text
    assert text.count("<svg") == 4
    assert "a snapshot is gone" in page.text
    rows = text.split("<tr")
    assert "<mark>" not in next(row for row in rows if ">Attempt</th>" in row)
    assert next(row for row in rows if ">Bridge</th>" in row).count("<mark>") == 1
    assert next(row for row in rows if ">Runtime</th>" in row).startswith(' class="same"')
    assert "src" not in {name for _, attrs in page.tags for name in attrs}


def test_the_files_that_differ_are_listed_from_the_snapshots(tmp_path: Path) -> None:
    for sha, files in ((OLD, {"a.py": ["100644", "1"], "b.py": ["100644", "1"]}), (NEW, {"a.py": ["100644", "2"]})):
        write_attempt(tmp_path, "level0.a", f"x-{sha[:3]}", sha)
        home = tmp_path / "snapshots" / f"bridge-{sha[:12]}"
        home.mkdir(parents=True)
        (home / "manifest.json").write_text(json.dumps({"digest": f"sha256:{sha}", "files": files}))
    assert "M a.py\nD b.py" in compare.render(Workspace("w", tmp_path, demo=False), f"{OLD},{NEW}")


def test_text_from_outside_is_never_markup(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_attempt(
            tmp_path, "level0.a", name, OLD, overrides=[NASTY], runtime=NASTY, gpus=[NASTY], image={"ref": NASTY}
        )
        folder = tmp_path / "attempts/level0.a" / name
        (folder / "checks.json").write_text(json.dumps([samples.check(NASTY, value=NASTY, tags=[NASTY])]))
        (folder / "metrics.json").write_text(json.dumps({NASTY: {"1": 1.0, "2": 2.0}}))
    text = compare.render(Workspace(NASTY, tmp_path, demo=False), "one,two")
    Page(text)
    assert text.count("<script") == 1
    assert "<img" not in text


def test_attempts_without_verdict_or_metrics_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "attempts/level0.a" / name).mkdir(parents=True)
        (tmp_path / "attempts/level0.a" / name / "attempt.json").write_text(json.dumps({"id": name, "path": "x"}))
    text = compare.render(Workspace("w", tmp_path, demo=False), "one,two")
    assert "both Blocked</b> level0.a" in text
    assert "<svg" not in text


def ask(port: int, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_only_this_machine_gets_the_folder_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("no")
    (tmp_path / "report").mkdir()
    (tmp_path / "report/page.html").write_text("yes")
    with serve.server(tmp_path / "report") as serving:
        assert serving.server_address[0] == "127.0.0.1"
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        port = serving.server_port
        assert ask(port, "/page.html") == (200, b"yes")
        assert ask(port, "/../secret")[0] == 404
        assert ask(port, "/%2e%2e/secret")[0] == 404
        assert ask(port, "/")[0] == 404
        assert ask(port, "/page.html", f"evil.example:{port}")[0] == 403
        serving.shutdown()


@pytest.mark.slow
def test_the_command_writes_the_page_serves_it_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    mini = Miniature(tmp_path)
    assert mini.doit("sync").rc == 0
    for sha in (OLD, NEW):
        write_attempt(mini.workspace, "level0.train", f"at-{sha[:2]}", sha)
    argv = mini.argv("report", "compare=at-0a,at-f9", "open=1")
    env = {k: v for k, v in mini.environment().items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    doit = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert doit.stdout is not None
        assert doit.stdout.readline() == f"Report: {mini.workspace}/report/compare.html\n"
        address = doit.stdout.readline().split()[1]
        assert address.startswith("http://127.0.0.1:")
        assert address.endswith("/compare.html")
        status, page = ask(int(address.split(":")[2].split("/")[0]), "/compare.html")
        assert status == 200
        assert b"both Pass</b> level0.train" in page
        doit.send_signal(signal.SIGINT)
        assert doit.wait(20) == 0
    finally:
        doit.kill()
        doit.communicate()
