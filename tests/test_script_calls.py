"""Training calls read out of scripts: what bash would pass to the program, and what is said not to be known."""

from __future__ import annotations

import pytest

from tasks.errors import UserError
from tasks.script_calls import Call, of_command, of_script

RUN = "uv run $PROJECT_ROOT/examples/run_grpo.py "
HEAD = 'SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" && pwd)\nPROJECT_ROOT=$(realpath $SCRIPT_DIR/../..)\n'


def calls(text: str, *arguments: str, name: str = "tests/functional/a.sh", **known: str) -> list[Call]:
    return list(of_script(name, HEAD + text, arguments, known))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RUN + "--config $PROJECT_ROOT/examples/configs/a.yaml a.b=1 \\\n  c=2 $@ 2>&1 | tee log",
         [["--config", "examples/configs/a.yaml", "a.b=1", "c=2", "x.y=1", "z=a b"]]),
        (RUN + '"$@"', [["x.y=1", "z=a b"]]),
        (RUN + "a=1", [["a=1"]]),
        ("uv run coverage run -a --data-file=$PROJECT_ROOT/c \\\n " + RUN + "a=1", [["a=1"]]),
        ('EXTRA=("$@")\nA=(a=1 b=$N)\nN=2\n' + RUN + '"${A[@]}" "${EXTRA[@]}"', [["a=1", "b=e2e-unread", "x.y=1", "z=a b"]]),
        ("run() {\n local name=$1\n shift 2\n " + RUN + "n=$name $@\n}\nrun one two a=1\nrun three four", [["n=one", "a=1"], ["n=three"]]),
        ("run() { " + RUN + '"${@:2}"; }\nrun one a=1 b=2', [["a=1", "b=2"]]),
        ("( " + RUN + "a=1 )", [["a=1"]]),
        (RUN + "logger.log_dir=$LOG_DIR d=$EXP_DIR/x", [["logger.log_dir=tests/functional/a/logs", "d=tests/functional/a/x"]]),
        (RUN + "m=${MODEL:-Qwen/Qwen3}", [["m=Qwen/Qwen3"]]),
        (RUN + "a=1\n" + RUN + "a=1", [["a=1"]]),
        ("echo " + RUN, []),
        ("python tests/check_metrics.py", []),
    ],
)  # fmt: skip
def test_arguments_are_what_the_shell_passes(text: str, expected: list[list[str]]) -> None:
    assert [list(call.arguments) for call in calls(text, "x.y=1", "z=a b")] == expected


def test_a_suite_takes_the_config_of_its_own_name() -> None:
    (call,) = calls(
        "source $SCRIPT_DIR/common.env\nuv run examples/run_sft.py --config $CONFIG_PATH logger.log_dir=$LOG_DIR",
        name="tests/test_suites/llm/sft-x.v1.sh",
    )
    assert call == Call(
        "examples/run_sft.py",
        (
            "--config",
            "examples/configs/recipes/llm/sft-x.v1.yaml",
            "logger.log_dir=tests/test_suites/llm/sft-x.v1/logs",
        ),
    )


def test_what_is_computed_is_named_not_guessed() -> None:
    (call,) = calls("T=$(mktemp)\n" + RUN + "--config $T a=$(date) b=1 ${EXTRA}")
    assert call.arguments == ("--config", "e2e-unread", "a=e2e-unread", "b=1")
    assert call.unread == ("$T", "a=$(date)", "${EXTRA}")


def test_hydra_interpolations_are_no_shell_variables() -> None:
    (call,) = calls(RUN + "'a=${policy.x}' 'b=${mul:1,2}'")
    assert call.arguments == ("a=${policy.x}", "b=${mul:1,2}")
    assert call.unread == ()


def test_variables_of_the_case_and_of_the_script_are_known() -> None:
    (call,) = calls("export NRL_A=1\nNRL_B=2 " + RUN + "m=$MODEL", MODEL="tiny")
    assert call.arguments == ("m=tiny",)
    assert dict(call.variables) == {"NRL_A": "1", "NRL_B": "2"}


def test_a_command_is_its_own_call() -> None:
    assert of_command(["uv", "run", "examples/run_sft.py", "a=1"]) == (Call("examples/run_sft.py", ("a=1",)),)
    assert of_command(["python", "train.py"]) == ()


def test_a_quote_that_is_never_closed_is_told_with_its_script() -> None:
    with pytest.raises(UserError, match=r"tests/functional/a\.sh: line 3"):
        calls("echo 'x")
