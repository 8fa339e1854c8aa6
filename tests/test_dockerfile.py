"""What a Dockerfile takes from outside, for one target."""

from __future__ import annotations

import pytest

from tasks.dockerfile import copied, instructions, needs, needs_buildkit
from tasks.errors import UserError

TEXT = """\
# syntax=docker/dockerfile:1
ARG BASE=repo/cuda:1
ARG EMPTY
FROM scratch AS source
ADD --keep-git-dir=true https://example.org/x.git#main /
FROM scratch AS seed
FROM --platform=linux/amd64 ${BASE} AS base
ARG DIRECTORY=tools
RUN <<"EOF" bash -ex
COPY this is no instruction
FROM neither/is:this
EOF
COPY ${DIRECTORY}/a.sh \\
     conf/*.toml /opt/
FROM base AS release
COPY --from=source --exclude=uv.lock --exclude=docs/** . /opt/src
COPY --from=tool/image:2 /bin/x /bin/x
RUN --mount=type=bind,from=seed,source=.,target=/x --mount=type=cache,id=a,from=helper,target=/y true
FROM base AS helper
COPY ["only helper.txt", "/"]
FROM release AS last
"""
FILES = (
    "tools/a.sh",
    "tools/b.sh",
    "conf/x.toml",
    "conf/y.json",
    "conf/sub/z.toml",
    "uv.lock",
    "docs/a/b.md",
    "src/uv.lock",
)


def test_only_stages_that_the_target_reaches_count() -> None:
    assert needs(TEXT, "base").bases == ("repo/cuda:1",)
    assert copied(FILES, needs(TEXT, "base").sources) == ["conf/x.toml", "tools/a.sh"]
    assert needs(TEXT, "seed").bases == ()
    assert needs(TEXT, "release") == needs(TEXT)
    assert needs(TEXT).bases == ("repo/cuda:1", "tool/image:2")


def test_a_checkout_in_place_of_a_stage_makes_its_copies_files_of_the_context() -> None:
    found = copied(FILES, needs(TEXT, "release", contexts=["source"]).sources)
    assert found == sorted(set(FILES) - {"uv.lock", "docs/a/b.md"})


def test_arguments_reach_base_and_sources() -> None:
    found = needs(TEXT, "base", {"BASE": "mine@sha256:1", "DIRECTORY": "conf"})
    assert found.bases == ("mine@sha256:1",)
    assert found.sources[0][0] == ("conf/a.sh", "conf/*.toml")
    assert needs("ARG A\nFROM ${A:-x:1} AS s\n").bases == ("x:1",)
    with pytest.raises(UserError, match="empty without a value"):
        needs("ARG A\nFROM $A\n")


def test_an_unknown_target_is_a_users_error_that_names_those_there_are() -> None:
    with pytest.raises(UserError, match="no such stage.*source, seed, base, release, helper, last"):
        needs(TEXT, "relase")
    with pytest.raises(UserError, match="none"):
        needs("# empty\n")


@pytest.mark.parametrize(
    ("line", "feature"),
    [
        ("RUN true", ""), ("COPY --chown=1:1 a b", ""), ("COPY --from=x a b", ""), ("RUN --mount=type=cache,target=/x y", "--mount="),
        ("COPY --link a b", "--link"), ("RUN <<EOF", "<<EOF"), ("# RUN --mount=x", ""),
    ],
)  # fmt: skip
def test_features_that_the_classic_builder_lacks_are_named(line: str, feature: str) -> None:
    assert needs_buildkit(f"FROM x\n{line}\nEOF\n") == feature


def test_continued_lines_and_comments_between_them_are_one_instruction() -> None:
    assert list(instructions("RUN a \\\n# no\n  b\nLABEL x=1")) == [("RUN", "a b"), ("LABEL", "x=1")]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("tools/", ["tools/a.sh", "tools/b.sh"]), ("./tools", ["tools/a.sh", "tools/b.sh"]), ("uv.lock", ["uv.lock"]),
        ("conf/*", ["conf/sub/z.toml", "conf/x.toml", "conf/y.json"]), ("nothing", []), ("tool", []),
    ],
)  # fmt: skip
def test_sources_are_files_folders_and_patterns(pattern: str, expected: list[str]) -> None:
    assert copied(FILES, [((pattern,), ())]) == expected
