"""The bare-name plugin rewrites one argument of one command and leaves every other command line alone."""

from __future__ import annotations

import pytest

from flows.plugin import rewrite


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("deployment run preprocess", "deployment run preprocess/preprocess"),
        ("deployments run --watch train --param a=b", "deployments run --watch train/train --param a=b"),
        ("--profile local deployment run -p config=x a", "--profile local deployment run -p config=x a/a"),
        ("deployment run --param=config=x preprocess", "deployment run --param=config=x preprocess/preprocess"),
        ("deployment run --tag deployment --tag run name", "deployment run --tag deployment --tag run name/name"),
    ],
)
def test_a_bare_name_is_completed(given: str, meant: str) -> None:
    argv = ["prefect", *given.split()]
    rewrite(argv)
    assert argv == ["prefect", *meant.split()]


@pytest.mark.parametrize(
    "given",
    [
        "deployment run flow/deployment",
        "deployment run --id 1234",
        "deployment run",
        "deployment ls",
        "flow run preprocess",
        "config set deployment run",
        "--help",
        "",
    ],
)
def test_anything_else_is_left_alone(given: str) -> None:
    argv = ["prefect", *given.split()]
    rewrite(argv)
    assert argv == ["prefect", *given.split()]
