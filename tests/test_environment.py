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
