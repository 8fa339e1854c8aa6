"""The demo as it is made, for tests that only read it."""

from __future__ import annotations

import pytest

from tasks import demo


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> demo.Checkouts:
    return demo.make(tmp_path_factory.mktemp("good"))
