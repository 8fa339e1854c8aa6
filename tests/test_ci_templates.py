"""The templates of ci/: each follows its service's schema, and its shell steps do what they say in a pretended job.

What the service does (checkout, caches, publishing) is not run; everything that is shell is, in the order and with the
environment of the template. All jobs share one place, so that the case runs once and is found again by the others.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.settings import ROOT
from tests import report_samples as samples
from tests.conftest import run_git
from tests.miniature import Miniature, write_tree

pytestmark = pytest.mark.slow

CI = ROOT / "ci"
SCHEMAS = {
    "github.yml": ["vendor.github-workflows"],
    "gitlab.yml": ["vendor.gitlab-ci", "--data-transform", "gitlab-ci"],
    "azure-pipelines.yml": ["vendor.azure-pipelines", "--data-transform", "azure-pipelines", "--regex-variant", "nonunicode"],
    "azure-steps.yml": ["vendor.azure-pipelines", "--data-transform", "azure-pipelines", "--regex-variant", "nonunicode"],
    "buildkite.yml": ["vendor.buildkite"],
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_template_follows_its_service_s_schema(name: str) -> None:
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed")
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", *SCHEMAS[name], CI / name]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_template_is_checked_and_asks_for_the_same() -> None:
    assert {p.name for p in CI.iterdir()} == {*SCHEMAS, "Jenkinsfile"}
    wanted = {p.name: re.findall(r"E2E_WHAT ?[:=] '?([^'\n]+)", p.read_text()) for p in CI.iterdir()}
    assert wanted.pop("azure-steps.yml") == []
    assert len({tuple(words) for words in wanted.values()}) == 1, wanted


def test_the_jenkinsfile_is_balanced_and_declarative() -> None:
    text = re.sub(r"//.*", "", re.sub(r"(?s)'''.*?'''|'[^'\n]*'", "", (CI / "Jenkinsfile").read_text()))
    for opened, closed in ("{}", "()", "[]"):
        assert text.count(opened) == text.count(closed)
    assert re.findall(r"^\w+", text, re.MULTILINE) == ["pipeline", "def", "def"]


# -- the shell of each template --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A shell script a step, each with the template's environment, and which steps run after a failure too."""

    steps: list[tuple[str, dict[str, str], bool]]
    cwd: str
    report: str


def expanded(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ *(.+?) *\}\}", lambda m: known.get(m[1], ""), text)


def github() -> Job:
    flow = yaml.safe_load((CI / "github.yml").read_text())
    job = flow["jobs"]["cpu"]
    known = {"github.workspace": "{place}", "vars.E2E_URL": "{e2e}", "github.event.pull_request.number": "7"}
    steps = [
        (step["run"], {k: expanded(v, known) for k, v in {**flow["env"], **job["env"], **step.get("env", {})}.items()}, "always()" in step.get("if", ""))
        for step in job["steps"]
        if "run" in step
    ]  # fmt: skip
    return Job(steps, "{place}", "{place}/report")


def gitlab() -> Job:
    flow = yaml.safe_load((CI / "gitlab.yml").read_text())
    base, job = flow[".nemo-rl"], flow["nemo-rl-cpu"]
    env = {"CI_PROJECT_DIR": "{place}/bridge", "E2E_URL": "{e2e}"}
    given = {**base["variables"], **job["variables"]}
    env |= {k: v.replace("$CI_PROJECT_DIR", env["CI_PROJECT_DIR"]) for k, v in given.items()}
    script = "\n".join([*base["before_script"], *base["script"]])
    return Job([(script, env, False)], "{place}/bridge", "{place}/bridge/nemo-rl-report")


def jenkins() -> Job:
    text = (CI / "Jenkinsfile").read_text()
    env = dict(re.findall(r"(\w+) = '([^']*)'", text.partition("stage('GPU')")[0]))
    shell = [a or b for a, b in re.findall(r"sh '''(.*?)'''|sh '(.*?)'", text, re.DOTALL)]
    place = {"WORKSPACE": "{place}/bridge", "E2E_URL": "{e2e}"}
    return Job([(s, {**env, **place}, False) for s in shell], "{place}/bridge", "{place}/bridge/nemo-rl-report")


def azure() -> Job:
    job = yaml.safe_load((CI / "azure-pipelines.yml").read_text())["jobs"][0]
    steps = yaml.safe_load((CI / "azure-steps.yml").read_text())["steps"]
    env = {
        **job["variables"], "E2E_URL": "{e2e}", "BUILD_SOURCESDIRECTORY": "{place}/bridge",
        "AGENT_TEMPDIRECTORY": "{place}/tmp", "BUILD_ARTIFACTSTAGINGDIRECTORY": "{place}/staging",
    }  # fmt: skip
    shell = [(step["bash"], {**env, **step.get("env", {})}, False) for step in steps if "bash" in step]
    return Job(shell, "{place}/bridge", "{place}/staging/nemo-rl")


def buildkite() -> Job:
    flow = yaml.safe_load((CI / "buildkite.yml").read_text())
    step = flow["steps"][0]
    env = {**flow["env"], **step["env"], "E2E_URL": "{e2e}", "BUILDKITE_BUILD_CHECKOUT_PATH": "{place}/bridge"}
    env["BUILDKITE_STEP_KEY"] = step["key"]
    script = "\n".join(step["command"]).replace("$$", "$")
    return Job([(script, env, False)], "{place}/bridge", "{place}/bridge/nemo-rl-report")


JOBS = {"github": github, "gitlab": gitlab, "jenkins": jenkins, "azure": azure, "buildkite": buildkite}


class Runner:
    """A machine of a CI service: the Bridge is checked out, this project and NeMo-RL can be cloned."""

    def __init__(self, home: Path) -> None:
        self.place, self.bin = home / "place", home / "bin"
        self.mini = Miniature(home)
        (self.mini.bridge / ".gitignore").write_text("__pycache__/\n")
        core = "3rdparty/Megatron-LM"
        run_git(self.mini.bridge, "submodule", "add", "-q", str(self.mini.bridge / core), core)
        run_git(self.mini.bridge, "commit", "-qam", "core is a submodule")
        self.e2e = home / "e2e"
        write_tree(self.e2e, {"doitw": f'#!/bin/sh\ncd "{ROOT}" && exec "{sys.executable}" -m doit "$@"\n'})
        (self.e2e / "doitw").chmod(0o755)
        run_git(self.e2e, "commit", "-qam", "executable")
        for name in ("gh", "buildkite-agent"):
            self.bin.mkdir(exist_ok=True)
            tool = self.bin / name
            tool.write_text(f'#!/bin/sh\n{{ echo "$0 $*"; case "$1" in annotate) cat;; esac; }} >> "{home}/told"\n')
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        self.told = home / "told"

    def run(self, job: Job, what: str) -> tuple[list[int], str, Path]:
        """Run the job's steps on a fresh checkout; return their exit statuses, the output, and the report's folder."""
        for left in (self.place, self.told):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        bridge = self.place / "bridge"
        run_git(self.mini.home, "clone", "-q", "--recurse-submodules", str(self.mini.bridge), str(bridge))
        fixed = {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "E2E_WHAT": what, "E2E_BUILD_DIR": str(self.mini.build),
            "E2E_LEVELS": str(self.mini.levels), "NEMO_RL_URL": self.mini.nemo_rl.as_uri(), "E2E_RUNTIME": "local",
            "GITHUB_STEP_SUMMARY": str(self.told), "GITHUB_REPOSITORY": "o/r", "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always",
        }  # fmt: skip
        codes, out = [], ""
        for script, env, always in job.steps:
            if any(codes) and not always:
                continue
            where = {
                k: v.replace("{place}", str(self.place)).replace("{e2e}", self.e2e.as_uri()) for k, v in env.items()
            }
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
                cwd=job.cwd.replace("{place}", str(self.place)), env={**self.mini.environment(), **where, **fixed},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
            )  # fmt: skip
            codes.append(done.returncode)
            out += done.stdout
        return codes, out, Path(job.report.replace("{place}", str(self.place)))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("ci"))


@pytest.mark.parametrize("name", JOBS)
def test_the_steps_of_a_template_give_the_answer_and_its_files(name: str, runner: Runner) -> None:
    codes, out, folder = runner.run(JOBS[name](), "level0")
    assert not any(codes), out
    report = json.loads((folder / "report.json").read_text())
    assert report["result"] == "Pass"
    assert Path(report["provenance"]["bridge"]["path"]) == runner.place / "bridge"
    assert {p.name for p in folder.iterdir()} == {"report.json", "junit.xml", "summary.md", "index.html"}
    told = runner.told.read_text() if runner.told.exists() else ""
    if name == "github":
        assert told.startswith("Result: Pass")
        assert "pr comment 7 --repo o/r --body-file report/summary.md" in told
    elif name == "buildkite":
        assert "annotate --context nemo-rl-cpu\nResult: Pass" in told
    elif name == "azure":
        assert f"##vso[task.uploadsummary]{folder}/summary.md" in out


@pytest.mark.parametrize("name", ["github", "azure"])
def test_a_job_that_could_not_ask_fails_and_shows_no_earlier_answer(name: str, runner: Runner) -> None:
    codes, out, folder = runner.run(JOBS[name](), "level9")
    assert 2 in codes, out
    assert "unknown level" in out
    assert not folder.exists()
    assert not (runner.told.exists() and "Result:" in runner.told.read_text())


# -- annotations: tasks/report/notices.py ------------------------------------------------------------------------------

FRAME = f"raised in the Bridge: {samples.BRIDGE}/src/megatron/bridge/models/a,b.py:412 in map:it"


@pytest.mark.parametrize(
    ("service", "case", "expected"),
    [
        ("github", samples.failing_case(reasons=[samples.reason("change", "x", "50% wrong\nKeyError"), samples.reason("bridge_frame", "x", FRAME)]),
         "::error file=src/megatron/bridge/models/a%2Cb.py,line=412,title=Fail%3A level0.grpo_megatron::50%25 wrong KeyError%0Araised"),
        ("azure", samples.failing_case(reasons=[samples.reason("bridge_frame", "x", FRAME)]),
         "##vso[task.logissue type=error;sourcepath=src/megatron/bridge/models/a,b.py;linenumber=412;]Fail: level0.grpo_megatron: raised"),
        ("github", samples.blocked_case(), "::warning title=Blocked%3A level2.noncolocated::OSError"),
        ("github", samples.quarantined_case(), "::notice title=Fail%3A level3.eval::"),
        ("azure", samples.blocked_case(reasons=[samples.reason("x", "x", "]##vso[task.complete result=Succeeded]\n##vso[x]100%")]),
         "##vso[task.logissue type=warning;]Blocked: level2.noncolocated: ]##vso[task.complete result=Succeeded] ##vso[x]100%AZP25"),
        ("github", samples.failing_case(reasons=[samples.reason("x", "x", "in /usr/lib/python3/x.py:3")]), "::error title=Fail%3A level0.grpo_megatron::in /usr"),
    ],
)  # fmt: skip
def test_annotations(service: str, case: dict[str, Any], expected: str) -> None:
    from tasks.report import notices

    (line,) = notices.lines(samples.report(case), service)
    assert line.startswith(expected), line
    assert "\n" not in line


def test_what_passed_waits_or_was_skipped_has_no_annotation() -> None:
    from tasks.report import notices

    report = samples.report(samples.case(), samples.dependent_case(), samples.skipped_case())
    assert notices.lines(report, "github") == []


def test_an_unknown_service_is_refused(runner: Runner) -> None:
    done = runner.mini.doit("report", "annotations=gitbub")
    assert done.rc == 2
    assert "choose github or azure" in done.out


def test_a_run_takes_the_reports_of_an_earlier_one_away_before_anything_runs(runner: Runner, tmp_path: Path) -> None:
    from tasks import invocation, settings

    for name in ("junit.xml", "report.json", "notes.txt"):
        (tmp_path / name).write_text("of an earlier job")
    mini = runner.mini
    given = {"bridge": mini.bridge, "nemo_rl": mini.nemo_rl, "build": mini.build, "levels": mini.levels}
    words = {**{k: str(v) for k, v in given.items()}, "runtime": "local", "reports": str(tmp_path)}
    now = invocation.Invocation(settings.load(words, environ={}))
    now.begin([], {})
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    now.finish()
    assert json.loads((tmp_path / "report.json").read_text())["result"] == "Blocked"
