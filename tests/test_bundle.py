"""A bundle is verified before it is believed, has the same bytes each time, no secret, and can be run again elsewhere."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tasks import bundle, rebuild, reproduce
from tasks.digests import Entry, digest_of
from tasks.errors import UserError
from tests.miniature import Miniature
from tests.test_chain import now_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

Members = dict[str, bytes]


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Miniature:
    """A miniature with every kind of dirt in its NeMo-RL, whose level 0 has passed."""
    made = Miniature(tmp_path_factory.mktemp("bundle"))
    made.levels.write_text(made.levels.read_text().replace("    suites: [mapping]\n", ""))
    (made.nemo_rl / "train.py").write_text((made.nemo_rl / "train.py").read_text() + "# edited\n")
    (made.nemo_rl / "tool.sh").write_text("true\n")
    (made.nemo_rl / "tool.sh").chmod(0o755)
    (made.nemo_rl / "link").symlink_to("train.py")
    (made.bridge / "docs/guide.md").unlink()
    done = made.doit("level0", "run.note=1")
    assert done.rc == 0, done.out
    return made


@pytest.fixture(scope="module")
def packed(mini: Miniature) -> Path:
    now = now_of(mini)
    return bundle.pack(now, bundle.find(now, "level0.train"))


def test_a_bundle_has_the_evidence_and_what_the_commit_lacks(packed: Path, tmp_path: Path) -> None:
    described, wrong = bundle.read(packed, tmp_path)
    assert wrong == []
    assert (described["case"], described["verdict"], described["overrides"]) == ("level0.train", "Pass", ["run.note=1"])
    names = set(described["files"])
    assert {
        "attempt/run.log",
        "attempt/metrics.json",
        "attempt/spec.json",
        "records/check.json",
        "levels.yaml",
    } <= names
    assert {n for n in names if n.count("/") > 1 and n.startswith("trees/")} == {
        "trees/nemo_rl/train.py", "trees/nemo_rl/tool.sh", "trees/nemo_rl/link"
    }  # fmt: skip


def test_the_same_attempt_gives_the_same_bytes(mini: Miniature, packed: Path) -> None:
    before = packed.read_bytes()
    for path in mini.attempts()[0].rglob("*"):
        os.utime(path, (1, 1))
    now = now_of(mini)
    assert bundle.pack(now, bundle.find(now, mini.attempts()[0].name)).read_bytes() == before


def members_of(file: Path) -> Members:
    with tarfile.open(file) as tar:
        return {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]


def edited(members: Members, name: str, edit: Callable[[Any], None], *, listed: bool) -> None:
    """Change a JSON member; `listed` puts its new hash into bundle.json, as a careful forger would."""
    value = json.loads(members[name])
    edit(value)
    members[name] = json.dumps(value).encode()
    if listed:
        import hashlib

        described = json.loads(members["bundle.json"])
        described["files"][name] = hashlib.sha256(members[name]).hexdigest()
        members["bundle.json"] = json.dumps(described).encode()


FORGERIES: dict[str, tuple[Callable[[Members], object], str]] = {
    "a changed log": (lambda m: m.update({"attempt/run.log": b"good"}), "attempt/run.log: changed"),
    "a lost file": (lambda m: m.pop("attempt/exit.json"), "attempt/exit.json: missing"),
    "an extra file": (lambda m: m.update({"attempt/more": b""}), "attempt/more: not listed"),
    "a file outside": (lambda m: m.update({"../x": b""}), "../x: not a plain file"),
    "better metrics, hash put right": (
        lambda m: edited(m, "attempt/metrics.json", lambda v: v.update({"train/token_mult_prob_error": {"1": 1.01}}), listed=True),
        "the metrics inside give 1.01",
    ),
    "another exit, hash put right": (
        lambda m: edited(m, "attempt/exit.json", lambda v: v.update({"rc": 3}), listed=True),
        "attempt/exit.json: not what the run's record names",
    ),
    "another verdict": (
        lambda m: edited(m, "bundle.json", lambda v: v.update({"verdict": "Fail"}), listed=False),
        "the verdict is not that of its record",
    ),
    "another run's verdict": (
        lambda m: edited(m, "records/run.json", lambda v: v["evidence"].popitem(), listed=True), "of another run",
    ),
    "a record of another shape": (
        lambda m: edited(m, "records/check.json", lambda v: v.pop("artefact"), listed=True), "cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_bundle_is_not_believed(packed: Path, tmp_path: Path, name: str) -> None:
    forge, words = FORGERIES[name]
    members = members_of(packed)
    forge(members)
    file = tmp_path / "forged.tar.xz"
    file.write_bytes(bundle._archive(members))
    _, wrong = bundle.read(file, tmp_path / "out")
    assert any(words in text for text in wrong), wrong
    assert not (tmp_path / "x").exists()


def test_a_link_in_a_bundle_is_not_followed(tmp_path: Path) -> None:
    file = tmp_path / "links.tar.xz"
    with tarfile.open(file, "w:xz") as tar:
        info = tarfile.TarInfo("attempt")
        info.type, info.linkname = tarfile.SYMTYPE, str(tmp_path / "elsewhere")
        tar.addfile(info)
        data = json.dumps({"files": {}, "path": "p", "verdict": None}).encode()
        info = tarfile.TarInfo("bundle.json")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    assert bundle.read(file, tmp_path / "out")[1][0] == "attempt: not a plain file inside the bundle"
    assert not (tmp_path / "out/attempt").exists()


@pytest.mark.parametrize(
    "data", [b"", b"no archive", bundle._archive({"a": b""}), bundle._archive({"bundle.json": b"1"})]
)
def test_what_is_no_bundle_is_a_users_mistake(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(UserError, match="not a bundle"):
        bundle.read(tmp_path / "f")


def test_a_secret_stops_the_bundle(mini: Miniature, monkeypatch: pytest.MonkeyPatch) -> None:
    now = now_of(mini)
    found = bundle.find(now, "level0.train")
    monkeypatch.setenv("HF_TOKEN", "Initializing lm_policy workers")  # a line of run.log
    with pytest.raises(UserError, match=r"attempt/run\.log holds"):
        bundle.pack(now, found)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="attempt/spec.json holds"):
        bundle._no_secrets({"attempt/spec.json": b'{"HTTPS_PROXY": "http://me:word@proxy:3128"}'})
    bundle._no_secrets(
        {"trees/bridge/doc.md": b"http://user:password@host", "attempt/run.log": b"http://proxy:3128/x@y"}
    )
    with pytest.raises(UserError, match="looks like a token"):
        bundle._no_secrets({"trees/bridge/x": b"key = 'hf_" + b"a1" * 17 + b"'"})


def test_an_attempt_that_was_tried_again_has_no_verdict_of_its_own(mini: Miniature) -> None:
    now = now_of(mini)
    found = bundle.find(now, "level0.train")
    last = {**found.run.artefact["attempts"][-1], "path": "attempts/level0.train/later"}
    tried = {**found.run.artefact, "attempts": [*found.run.artefact["attempts"], last]}
    file = bundle.pack(now, replace(found, run=replace(found.run, artefact=tried)))
    assert bundle.read(file)[0]["verdict"] is None
    bundle.pack(now, found)


def test_changed_evidence_is_not_bundled(mini: Miniature) -> None:
    now = now_of(mini)
    found = bundle.find(now, "level0.train")
    record = replace(found.run, evidence={**found.run.evidence, next(iter(found.run.evidence)): "0" * 64})
    with pytest.raises(UserError, match="proves nothing"):
        bundle.pack(now, replace(found, run=record))
    with pytest.raises(UserError, match=r"unknown case 'level0\.trian'"):
        bundle.find(now, "level0.trian")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_signature_belongs_to_the_very_bytes(packed: Path, tmp_path: Path) -> None:
    key, file = tmp_path / "key", tmp_path / "b.tar.xz"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    shutil.copy(packed, file)
    assert bundle.signer(file) is None
    bundle.sign(file, str(key))
    assert "SHA256:" in str(bundle.signer(file))
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(UserError, match="check-novalidate failed"):
        bundle.signer(file)


# the trees again --------------------------------------------------------------------------------------------------------


def entry(data: bytes, mode: str = "100644") -> Entry:
    import hashlib

    return Entry(mode, hashlib.sha256(data).hexdigest())


def test_a_tree_comes_back_with_modes_links_and_submodules(tmp_path: Path) -> None:
    from tasks.digests import scan

    source = tmp_path / "bundle"
    source.mkdir()
    for name, text in {"run.sh": "true\n", "link": "run.sh"}.items():
        (source / name).write_text(text)  # a bundle keeps neither modes nor links
    files = {
        "link": entry(b"run.sh", "120000"), "run.sh": entry(b"true\n", "100755"), "sub": Entry("160000", "a" * 40),
        "gone": entry(b"nowhere"),
    }  # fmt: skip
    assert rebuild.rebuild(files, [tmp_path / "absent", source], tmp_path / "tree") == ["gone"]
    del files["gone"]
    again = scan("bridge", tmp_path / "tree", tmp_path / "cache.json")
    assert again.digest == digest_of(files)


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", ".git/hooks/post-commit", "a/.git/config"])
def test_a_manifest_stays_inside_its_tree(path: str) -> None:
    files = {path: ["100644", "0" * 64]}
    with pytest.raises(UserError, match="not inside its tree"):
        rebuild.entries(files, digest_of({path: Entry("100644", "0" * 64)}))
    with pytest.raises(UserError, match="not that of tree"):
        rebuild.entries({"a": ["100644", "0" * 64]}, "f" * 64)


def test_a_manifest_does_not_write_through_its_own_link(tmp_path: Path) -> None:
    (tmp_path / "bundle/a").mkdir(parents=True)
    (tmp_path / "bundle/a/x").write_text("bad")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/a").write_text(str(tmp_path / "outside"))
    (tmp_path / "outside").mkdir()
    files = {"a": entry(str(tmp_path / "outside").encode(), "120000"), "a/x": entry(b"bad")}
    with pytest.raises(UserError, match="leads out of its tree"):
        rebuild.rebuild(files, [tmp_path / "links", tmp_path / "bundle"], tmp_path / "tree")
    assert not list((tmp_path / "outside").iterdir())


# comparing ------------------------------------------------------------------------------------------------------------

OLD = {"train/loss": {"1": 1.0, "2": 0.5}, "timing/train/total": {"1": 9.0}, "train/reward": {"1": 0.0}}


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({**OLD, "train/loss": {"1": 1.0, "2": 0.52}}, []),
        ({**OLD, "timing/train/total": {"1": 900.0}}, []),
        ({**OLD, "train/reward": {"1": 1e-12}}, []),
        ({**OLD, "train/loss": {"1": 1.0, "2": 0.6}}, ["train/loss at step 2: 0.5 then, 0.6 now, beyond 5 %"]),
        ({**OLD, "train/loss": {"1": 1.0}}, ["train/loss: steps 1 to 2, 2 points then, steps 1 to 1, 1 points now"]),
        ({**OLD, "train/loss": {"1": 1.0, "2": "NaN"}}, ["train/loss at step 2: 0.5 then, NaN now, beyond 5 %"]),
        ({"train/loss": OLD["train/loss"]}, ["train/reward: steps 1 to 1, 1 points then, absent now"]),
        ({**OLD, "validation/accuracy": {}}, ["validation/accuracy: absent then, steps none now"]),
    ],
)
def test_series_are_compared_by_steps_exactly_and_by_value_within_tolerance(new, words):
    assert [d.text for d in reproduce.compare(OLD, new, reproduce.tolerances(None))] == words


def test_tolerances_are_the_users_where_given():
    assert reproduce.tolerances("0.1") == {"": 0.1}
    assert reproduce.tolerances("train/loss:0.2")["train/loss"] == 0.2
    assert reproduce.tolerances("train/loss:0.2,0.1")[""] == 0.1
    for wrong in ("x", "-1", "nan", "train/loss:"):
        with pytest.raises(UserError, match="write a number"):
            reproduce.tolerances(wrong)


def test_an_attempt_is_reproduced_elsewhere_from_its_bundle(mini: Miniature, packed: Path, tmp_path: Path) -> None:
    other = Miniature(tmp_path)  # equal commits, none of the dirt, another path, nothing of the first build folder
    other.levels.write_text(other.levels.read_text().replace("    suites: [mapping]\n", ""))
    done = other.doit("reproduce", str(packed))
    assert done.rc == 0, done.out
    assert "Result: Pass - reproduced: verdict Pass again, 2 series within tolerance" in done.out


@pytest.mark.parametrize(
    ("verdict", "value", "rc", "words"),
    [
        ("Pass", 1.0, 0, "Result: Pass - reproduced: verdict Pass again"),
        ("Pass", 1.04, 1, "differs: train/token_mult_prob_error at step 1: 1.0 then, 1.04 now, beyond 2 %"),
        ("Fail", 1.0, 1, "differs: verdict: Pass then, Fail now"),
        (None, 1.0, 2, "Result: Blocked - not reproduced"),
    ],
)
def test_the_answer_says_reproduced_or_where_it_differs(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    verdict: str | None, value: float, rc: int, words: str,
) -> None:  # fmt: skip
    asked = reproduce.Reproduce.__new__(reproduce.Reproduce)
    asked.packed, asked.case, asked.notes, asked.allowed = (
        tmp_path / "b",
        "level0.train",
        [],
        reproduce.tolerances(None),
    )
    asked.described, _ = bundle.read(packed, asked.packed)
    metrics = json.loads((asked.packed / "attempt/metrics.json").read_text())
    metrics["train/token_mult_prob_error"]["1"] = value
    (tmp_path / "again").mkdir()
    (tmp_path / "again/metrics.json").write_text(json.dumps(metrics))
    run = json.loads((asked.packed / "records/run.json").read_text())
    tried = [{"id": "a", "path": "again", "verdict": verdict}] if verdict else []
    record = SimpleNamespace(artefact={"attempts": tried}, inputs={**run["inputs"], "gpus": "8x H200"})
    now = SimpleNamespace(
        outcomes={"repeat:level0.train": SimpleNamespace(record=record, reasons=())},
        workspace=SimpleNamespace(root=tmp_path, report=tmp_path / "report"),
    )
    monkeypatch.setattr(reproduce.invocation, "current", lambda: now)
    assert asked.status() == rc
    said = capsys.readouterr().out
    assert words in said
    assert ("not as then: gpus: none then, 8x H200 now" in said) is (rc != 2)


def test_variables_are_those_of_the_attempt_and_an_absent_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_HOME": "/mine", "NCCL_DEBUG": "INFO", "MODEL_PATH": "/m"}.items():
        monkeypatch.setenv(name, value)
    then = {"HF_HOME": "/does/not/exist", "MODEL_PATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert reproduce.set_environment(then) == ["HF_HOME: /does/not/exist is not here, /mine is used"]
    now = {name: os.environ.get(name) for name in ("HF_HOME", "NCCL_DEBUG", "MODEL_PATH", "HF_HUB_OFFLINE")}
    assert now == {"HF_HOME": "/mine", "NCCL_DEBUG": None, "MODEL_PATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}


def test_a_file_that_nothing_has_any_more_is_named_with_what_to_do(packed: Path, tmp_path: Path) -> None:
    other = Miniature(tmp_path / "other")
    (other.nemo_rl / "nemo_rl/event_log.py").write_text("other\n")
    shutil.rmtree(other.nemo_rl / ".git")
    described, _ = bundle.read(packed, tmp_path / "bundle")
    with pytest.raises(UserError, match=r"nemo_rl: 1 files of tree .* nemo_rl/event_log.py first; .* lacks commit"):
        reproduce.trees(now_of(other).settings, described, tmp_path / "bundle", tmp_path / "home")
