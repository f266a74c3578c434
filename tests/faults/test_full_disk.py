"""No room on the way: the file that has none is named, nothing half-written stays, and the same command goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from schemas.tables import REJECT_SCHEMA, STUDENT_SCHEMA, TEACHER_SCHEMA
from tests.unit.shards.support import config_for, frozen_files
from xtok.errors import StorageError
from xtok.shards.pipeline import preprocess
from xtok.shards.pool import SerialRunner

PARTS = {"part_bytes": 16_000, "row_group_rows": 4}
RUNNER = SerialRunner()
# A process whose files may not grow beyond so many bytes: the kernel's own refusal, as of a quota.
SCRIPT = """
import resource, sys
from schemas.config import PreprocessConfig
from xtok.shards.pipeline import preprocess
from xtok.shards.pool import SerialRunner
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
preprocess(PreprocessConfig.model_validate_json(sys.argv[1]), runner=SerialRunner())
"""


@pytest.mark.parametrize(
    ("schema", "table"), [(STUDENT_SCHEMA, "student"), (TEACHER_SCHEMA, "teacher=0"), (REJECT_SCHEMA, "rejects")]
)
def test_the_file_without_room_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, schema: Any, table: str
) -> None:
    real = pq.ParquetWriter.write_table

    def full(writer: pq.ParquetWriter, *arguments: Any, **options: Any) -> None:
        if writer.schema.equals(schema):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(writer, *arguments, **options)

    config = config_for(tmp_path / "out", source, **PARTS)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(StorageError, match=rf"cannot write .*/{table}/part-\d+\.parquet: no space left") as caught:
        preprocess(config, runner=RUNNER)
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "out" / "runs" / "staging").iterdir()) == []
    monkeypatch.undo()
    preprocess(config, runner=RUNNER)
    preprocess(config_for(tmp_path / "whole", source, **PARTS), runner=RUNNER)
    assert frozen_files(tmp_path / "out") == frozen_files(tmp_path / "whole")


def test_a_quota_that_is_reached_and_raised(tmp_path: Path, source: Path, repository: Path) -> None:
    preprocess(config_for(tmp_path / "whole", source, **PARTS), runner=RUNNER)
    whole = frozen_files(tmp_path / "whole")
    config = config_for(tmp_path / "out", source, **PARTS)
    sizes = sorted({len(data) for name, data in whole.items() if name.endswith(".parquet")})
    for limit in (sizes[0] - 1, sizes[len(sizes) // 2], sizes[-1] - 1):
        command = [sys.executable, "-c", SCRIPT, config.model_dump_json(), str(limit)]
        run = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120)
        assert run.returncode != 0
        assert "StorageError: cannot write" in run.stderr, run.stderr
        assert "size limit" in run.stderr
        assert not (tmp_path / "out" / "manifest.json").exists()
        staging = tmp_path / "out" / "runs" / "staging"
        assert not staging.is_dir() or list(staging.iterdir()) == []
        written = frozen_files(tmp_path / "out") if (tmp_path / "out").exists() else {}
        assert all(whole[name] == data for name, data in written.items()), "what is there is whole"
    preprocess(config, runner=RUNNER)
    assert frozen_files(tmp_path / "out") == whole
