"""What is submitted: argv, environment, time, and what cannot be."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import runs, slurm_image
from tasks.errors import UserError
from tasks.runtimes import slurm_submission
from tasks.runtimes.job import Mount
from tasks.runtimes.slurm_commands import Site, site_of
from tasks.settings import load


def test_site_options_are_argv_and_time_is_a_cap(cluster):
    site = site_of({"partition": "a b", "qos": "high", "exclusive": True, "time": "1h"})
    assert site.options == ("--partition=a b", "--qos=high", "--exclusive")
    assert "--time=40" in slurm_submission.options(cluster.job(), site, "i", ())
    assert "--time=60" in slurm_submission.options(cluster.job(timeout_s=1e5), site, "i", ())


@pytest.mark.parametrize(
    "given", [{"job-name": "x"}, {"--qos": "x"}, {"gres": "gpu:4"}, {"qos": ["a"]}, {"time": "soon"}]
)
def test_site_options_that_are_ours_or_no_options_are_refused(given):
    with pytest.raises(UserError, match="slurm: "):
        site_of(given)


def test_site_yaml_and_command_line_reach_the_settings(tmp_path):
    (tmp_path / "site.yaml").write_text("runtime: slurm\nslurm: {partition: p, gres: false}\n")
    found = load({"detach": "1", "max_gpu_hours": "12.5"}, environ={}, root=tmp_path)
    assert (dict(found.slurm), found.detach, found.max_gpu_hours) == ({"partition": "p", "gres": False}, True, 12.5)
    with pytest.raises(UserError, match="max_gpu_hours=much"):
        load({"max_gpu_hours": "much"}, environ={}, root=tmp_path)
    (tmp_path / "site.yaml").write_text("slurm: p\n")
    with pytest.raises(UserError, match="must be a mapping"):
        load({}, environ={}, root=tmp_path)


def test_one_node_goes_through_srun_with_mounts_and_never_a_secret(cluster, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    job = cluster.job(secrets=("HF_TOKEN",))
    argv = slurm_submission.options(job, Site(), "i.sqsh", {"n3", "n2"})
    assert {"--gres=gpu:2", "--exclude=n2,n3", "--no-requeue", "--dependency=singleton", "--nodes=1"} < set(argv)
    inside = argv[argv.index(str(slurm_submission.STEP)) + 1 :]
    assert f"--container-mounts={cluster.home / 'src'}:/opt/nemo-rl" in inside
    assert "--input=none" in inside  # else the agent takes the end of srun's pipe for its runner's death
    assert "hf_secret" not in " ".join(argv)
    assert slurm_submission.environment(job, "i.sqsh")["HF_TOKEN"] == "hf_secret"
    assert "1.3 GPU-hours" in slurm_submission.plan(job, Site())


def test_several_nodes_go_through_the_checkouts_ray_sub(cluster):
    ray = {"RAY_X": "1", "RAY_ADDRESS": "local", "RAY_TMPDIR": "/tmp", "OTHER": "2"}
    job, site = cluster.job(nodes=2, gpus=16, env=ray), site_of({"account": "a", "partition": "p"})
    assert "no ray.sub" in slurm_submission.refusal(job, site)
    (cluster.home / "src/ray.sub").write_text("")
    assert "account" in slurm_submission.refusal(job, Site())
    assert slurm_submission.refusal(job, site) == ""
    assert slurm_submission.options(job, site, "i.sqsh", ())[-1] == str(cluster.home / "src/ray.sub")
    assert "ray.sub" in slurm_submission.plan(job, site)
    env = slurm_submission.environment(job, "i.sqsh")
    assert (env["GPUS_PER_NODE"], env["CONTAINER"]) == ("8", "i.sqsh")
    assert [name for name in ray if name in env] == ["RAY_X"]  # for `ray start`, before the agent gives the rest
    assert env["MOUNTS"].endswith(f",{cluster.folder}/slurm:{cluster.folder}/slurm")  # ray.sub's logs, same path
    assert env["COMMAND"].endswith("python3 -E -s -S -B /e2e/agent/agent.py /e2e/attempt/spec.json")


def test_a_local_copy_is_made_before_the_agent_and_under_ray_sub_on_every_node_before_ray(cluster):
    (cluster.home / "src/ray.sub").write_text("")
    job = cluster.job(local_copy=("/l", "/s", "/t", "/n"))
    argv = " ".join(slurm_submission.options(job, Site(), "i.sqsh", ()))
    assert "local_copy.py /l /s /t /n python3 -E -s -S -B /e2e/agent/slurm_start.py" in argv
    env = slurm_submission.environment(dataclasses.replace(job, nodes=2, gpus=16), "i.sqsh")
    assert env["SETUP_COMMAND"].endswith("local_copy.py /l /s /t /n || kill -TERM $PPID")
    assert "local_copy.py --proved 2 /l /n python3 -E -s -S -B /e2e/agent/slurm_start.py" in env["COMMAND"]


def test_paths_that_pyxis_cannot_name_are_refused(cluster):
    odd = cluster.home / "a:b"
    odd.mkdir()
    job = cluster.job(mounts=(Mount(odd, "/opt/x", read_only=True),))
    assert "cannot name" in slurm_submission.refusal(job, Site())
    assert cluster.run(cluster.runtime(), job=job).reason == "not_started"
    assert not cluster.calls("sbatch")


def test_gpu_hours_over_the_limit_are_refused_before_anything_is_started():
    case: Any = SimpleNamespace(id="level4.x", gpus=8, minutes=60)
    pipe: Any = SimpleNamespace(settings=SimpleNamespace(max_gpu_hours=12.0), gpu_hours=0.0)
    assert runs.over_budget(pipe, case) is None
    pipe.gpu_hours = 8.0
    assert "max_gpu_hours=12" in str(runs.over_budget(pipe, case))


def test_an_image_that_could_change_unseen_is_refused(tmp_path):
    with pytest.raises(UserError, match="REPO@sha256"):
        slurm_image.resolve("nvcr.io/nvidia/nemo-rl:v1", tmp_path / "c.json")
    digest = "sha256:" + "a" * 64
    image, name = slurm_image.resolve(f"nvcr.io/nvidia/nemo-rl@{digest}", tmp_path / "c.json")
    assert (image.id, name) == (digest, f"nvcr.io#nvidia/nemo-rl@{digest}")
    squashed = tmp_path / "i.sqsh"
    squashed.write_text("one")
    first = slurm_image.resolve(str(squashed), tmp_path / "c.json")[0].id
    squashed.write_text("two and more")
    assert slurm_image.resolve(str(squashed), tmp_path / "c.json")[0].id != first
    with pytest.raises(UserError, match="No such file"):
        slurm_image.resolve(str(tmp_path / "absent.sqsh"), tmp_path / "c.json")
