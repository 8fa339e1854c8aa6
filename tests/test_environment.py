"""What reaches a run is listed; what is a secret is passed by name."""

from __future__ import annotations

import pytest

from tasks import environment


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "hf_x", True),
        ("HTTPS_PROXY", "http://me:password@proxy:3128", True),
        ("HF_ENDPOINT", "https://token@mirror/hf", True),
        ("HTTPS_PROXY", "http://proxy:3128", False),
        ("HF_ENDPOINT", "https://mirror/a@b", False),
        ("HF_HOME", "/home/me@site/hf", False),
    ],
)
def test_a_login_in_an_address_is_a_secret_like_a_token(name: str, value: str, secret: bool) -> None:
    environ = {name: value, "SHELL": "/bin/sh"}
    assert environment.secret_names(environ) == ((name,) if secret else ())
    assert environment.passed(environ) == ({} if secret else {name: value})


def test_a_run_has_places_of_its_own_and_meets_no_ray_but_the_one_it_starts() -> None:
    user = environment.passed({"RAY_ADDRESS": "10.0.0.1:6379", "HF_HOME": "/hf", "HOME": "/home/me"})
    env = environment.compose(
        user=user, case={"A": "1"}, pythonpath=("/bridge/src", "/core"), attempt="/e2e/attempt", interpreter="/v/bin/python",
        local=False, ray_folder=None,
    )  # fmt: skip
    assert "RAY_ADDRESS" not in env
    assert env["RAY_ENABLE_AUTO_CONNECT"] == "0", "a driver that died would start Ray anew in its destructors"
    assert (env["HOME"], env["HF_HOME"], env["A"]) == ("/e2e/attempt/home", "/hf", "1")
    assert env["PYTHONPATH"] == "/bridge/src:/core"
    assert env["UV_NO_SYNC"] == "1"
