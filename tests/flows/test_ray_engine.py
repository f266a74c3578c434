"""`engine: ray`: a real local cluster, the bytes of the local engine, typed errors, and nothing left running."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.flows.test_preprocess_flow import bundled_lines, start_alone, write_config
from tests.unit.shards.support import frozen_files

pytestmark = [pytest.mark.flow, pytest.mark.ray]

MARK = "XTOK_RAY_TEST"
IS_INSTALLED = importlib.util.find_spec("prefect_ray") is not None


def survivors(mark: str) -> list[str]:
    """Command lines of processes that a run started and left."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def run(folder: Path, mark: str, **variables: str) -> tuple[int, str, str]:
    """`python -m flows.preprocess` to its end: exit code, output, errors."""
    process = start_alone(folder, **variables, **{MARK: mark}, RAY_TMPDIR="/tmp")
    try:
        output, errors = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output, errors


if IS_INSTALLED:

    @pytest.mark.slow
    def test_ray_and_local_give_the_same_bytes(tmp_path: Path, kept_database: dict[str, str]) -> None:
        for engine in ("local", "ray"):
            (tmp_path / engine).mkdir()
            write_config(tmp_path / engine, bundled_lines(60), engine=engine)
            mark = f"{os.getpid()}-{engine}"
            code, output, errors = run(tmp_path / engine, mark, **kept_database)
            assert code == 0, output + errors
            assert survivors(mark) == []
        local, ray = (frozen_files(tmp_path / engine / "aligned") for engine in ("local", "ray"))
        assert len([name for name in local if name.startswith("student/")]) > 3
        assert ray == local

    @pytest.mark.slow
    def test_errors_on_the_cluster_are_ours(tmp_path: Path, kept_database: dict[str, str]) -> None:
        (tmp_path / "empty").mkdir()
        write_config(tmp_path, bundled_lines(5), engine="ray", student={"tokenizer": str(tmp_path / "empty")})
        mark = f"{os.getpid()}-error"
        code, output, errors = run(tmp_path, mark, **kept_database)
        assert code == 1, output + errors
        assert "TokenizerError" in errors
        assert "tokenizer.json" in errors
        assert survivors(mark) == []

else:

    def test_without_the_extra_the_way_out_is_told(tmp_path: Path, kept_database: dict[str, str]) -> None:
        write_config(tmp_path, bundled_lines(5), engine="ray")
        code, _, errors = run(tmp_path, "none", **kept_database)
        assert code == 1
        assert "ConfigError" in errors
        assert "pip install 'xtok[ray]'" in errors
