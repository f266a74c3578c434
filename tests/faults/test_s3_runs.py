"""A dataset that lives on S3: sources, plan, parts, manifest, verify, repair and loader; kills and failures on the way."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest
import torch
from torch.utils.data import DataLoader

from schemas.config import PreprocessConfig
from tests.s3_server import Fault, S3Server, stored_files
from tests.unit.shards.support import config_for, frozen_files, udhr_rows, write_lines
from xtok import storage
from xtok.errors import StorageError, StoreUnavailableError
from xtok.loader import AlignedShardLoader
from xtok.shards.pipeline import preprocess, rebuild_part
from xtok.shards.pool import SerialRunner
from xtok.shards.read import open_dataset
from xtok.shards.verify import damaged_parts, verify_dataset
from xtok.storage import cache, retry

PARTS = {"part_bytes": 16_000, "row_group_rows": 4}
RUNNER = SerialRunner()
SCRIPT = """
import sys
from schemas.config import PreprocessConfig
from xtok.shards.pipeline import preprocess
from xtok.shards.pool import SerialRunner
from xtok.storage import retry
if sys.argv[2] == "serial":  # to be killed: neither workers nor long waits
    retry.POLICY = retry.RetryPolicy(first_delay_s=0.02)
preprocess(PreprocessConfig.model_validate_json(sys.argv[1]), runner=SerialRunner() if sys.argv[2] == "serial" else None)
"""


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a fresh bucket; waits cut short."""
    monkeypatch.setattr(retry, "POLICY", retry.RetryPolicy(attempts=3, first_delay_s=0.01))
    s3_server.fault = lambda method, path: None
    return s3_server.new_bucket()


def launch(config: PreprocessConfig, repository: Path, runner: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, config.model_dump_json(), runner]
    return subprocess.Popen(command, cwd=repository, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_sources_and_dataset_on_s3_are_those_of_a_disk(tmp_path: Path, source: Path, bucket: str, s3_server: S3Server) -> None:
    preprocess(config_for(tmp_path / "whole", source, **PARTS), runner=RUNNER)
    storage.write_atomic(f"{bucket}/raw/in.jsonl", source.read_bytes())
    output = f"{bucket}/data/aligned"
    config = config_for(tmp_path, f"{bucket}/raw/*.jsonl", **PARTS).model_copy(update={"output": output})
    manifest = preprocess(config, runner=RUNNER)
    assert stored_files(s3_server, output) == frozen_files(tmp_path / "whole")
    dataset = open_dataset(output)
    s3_server.requests.clear()
    assert verify_dataset(dataset) == []
    read = [path for method, path in s3_server.requests if method == "GET" and path.endswith(".parquet")]
    assert sorted(read) == sorted(
        {f"{output[4:]}/{path}" for path in frozen_files(tmp_path / "whole") if path.endswith(".parquet")}
    )
    s3_server.requests.clear()
    assert preprocess(config, runner=RUNNER) == manifest
    written = [path for method, path in s3_server.requests if method == "PUT" and path.endswith(".parquet")]
    assert written == [], "a relaunch finds everything done"


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "plan"])
def test_damage_on_s3_is_found_and_repaired(tmp_path: Path, source: Path, bucket: str, s3_server: S3Server, damage: str) -> None:
    output = f"{bucket}/aligned"
    config = config_for(tmp_path, source, **PARTS).model_copy(update={"output": output})
    preprocess(config, runner=RUNNER)
    sound = stored_files(s3_server, output)
    path = "plan.json" if damage == "plan" else "teacher=0/part-00001.parquet"
    data = bytearray(sound[path])
    data[len(data) // 2] ^= 1
    client = boto3.client("s3", endpoint_url=s3_server.endpoint)
    place = {"Bucket": bucket.removeprefix("s3://"), "Key": f"aligned/{path}"}
    if damage == "delete":
        client.delete_object(**place)
    else:
        client.put_object(**place, Body=bytes(data[:-7] if damage == "cut" else data))
    findings = verify_dataset(open_dataset(output))
    assert {(finding.part, finding.path) for finding in findings} == {(None if damage == "plan" else 1, path)}
    if damage != "plan":
        assert damaged_parts(findings) == [1]
        rebuild_part(config, 1, runner=RUNNER)
        assert stored_files(s3_server, output) == sound


def test_a_store_that_is_away_is_no_damage(tmp_path: Path, source: Path, bucket: str, s3_server: S3Server) -> None:
    output = f"{bucket}/aligned"
    preprocess(config_for(tmp_path, source, **PARTS).model_copy(update={"output": output}), runner=RUNNER)
    dataset = open_dataset(output)
    loader = AlignedShardLoader(output, batch_size=4, cache_folder=str(tmp_path / "cache"))
    s3_server.fault = lambda method, path: 503
    for look in (lambda: open_dataset(output), lambda: verify_dataset(dataset), lambda: next(iter(loader))):
        with pytest.raises(StoreUnavailableError, match="tried 3 times"):
            look()
    s3_server.fault = lambda method, path: 403 if path.endswith(".parquet") else None
    with pytest.raises(StorageError, match="PermissionError"):
        verify_dataset(dataset)


def test_a_full_cache_disk_is_no_damage(tmp_path: Path, source: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = f"{bucket}/aligned"
    preprocess(config_for(tmp_path, source, **PARTS).model_copy(update={"output": output}), runner=RUNNER)

    def full(url: str, path: Path) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "fetch", full)
    with pytest.raises(StorageError, match=r"cannot write .*cache.*no space left"):
        next(iter(AlignedShardLoader(output, batch_size=4, cache_folder=str(tmp_path / "cache"))))


@pytest.mark.slow
def test_the_store_fails_for_good_at_every_put(tmp_path: Path, source: Path, bucket: str, s3_server: S3Server) -> None:
    preprocess(config_for(tmp_path / "whole", source, **PARTS), runner=RUNNER)
    whole = frozen_files(tmp_path / "whole")
    config = config_for(tmp_path, source, **PARTS)
    s3_server.requests.clear()
    preprocess(config.model_copy(update={"output": f"{bucket}/counted"}), runner=RUNNER)
    puts = [path for method, path in s3_server.requests if method == "PUT"]
    assert len(puts) == len(set(puts))
    for number, key in enumerate(puts):
        output = f"{bucket}/try-{number}"
        name = key.split("/counted/")[1]

        def refuse(method: str, path: str, tail: str = f"/try-{number}/{name}") -> Fault:
            return 500 if method == "PUT" and path.endswith(tail) else None

        s3_server.fault = refuse
        if not name.startswith("runs/timings/"):
            with pytest.raises(StorageError, match=rf"cannot write s3://.*{name}.*tried 3 times"):
                preprocess(config.model_copy(update={"output": output}), runner=RUNNER)
            assert not storage.exists(f"{output}/manifest.json"), name
        s3_server.fault = lambda method, path: None
        preprocess(config.model_copy(update={"output": output}), runner=RUNNER)
        assert stored_files(s3_server, output) == whole, name


@pytest.mark.slow
def test_kills_and_a_flaky_store(tmp_path: Path, repository: Path, bucket: str, s3_server: S3Server) -> None:
    """One request in twenty goes wrong all the while; the process is killed at four moments, and the last one has workers."""
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(80))
    changes = {"part_bytes": 6_000, "row_group_rows": 16, "workers": 2}
    manifest = preprocess(config_for(tmp_path / "whole", source, **changes), runner=RUNNER)
    assert 4 * len(manifest.parts) > 2 + 5 + 8 + 8, "the last kill comes before the end"
    output = f"{bucket}/aligned"
    config = config_for(tmp_path, source, **changes).model_copy(update={"output": output})
    seed = int.from_bytes(os.urandom(4), "big")
    chance = random.Random(seed)
    faults: list[Fault] = [500, 503, "drop"]
    s3_server.fault = lambda method, path: chance.choice(faults) if chance.random() < 0.05 else None
    for number_of_puts in (2, 5, 8, 8):
        s3_server.requests.clear()
        run = launch(config, repository, "serial")
        deadline = time.monotonic() + 60
        while run.poll() is None and time.monotonic() < deadline:
            if len([path for method, path in list(s3_server.requests) if method == "PUT"]) >= number_of_puts:
                break
            time.sleep(0.01)
        run.kill()
        run.communicate()
        assert not storage.exists(f"{output}/manifest.json") or run.returncode == 0, f"seed {seed}"
    last = launch(config, repository, "pool")
    _, errors = last.communicate(timeout=120)
    assert last.returncode == 0, f"seed {seed}: {errors}"
    s3_server.fault = lambda method, path: None
    assert stored_files(s3_server, output) == frozen_files(tmp_path / "whole"), f"seed {seed}"


@pytest.mark.parametrize("cache_bytes", [0, 30_000, 10**9])
def test_the_loader_gives_the_batches_of_a_disk(
    tmp_path: Path, source: Path, bucket: str, s3_server: S3Server, cache_bytes: int
) -> None:
    preprocess(config_for(tmp_path / "whole", source, **PARTS), runner=RUNNER)
    output = f"{bucket}/aligned"
    preprocess(config_for(tmp_path, source, **PARTS).model_copy(update={"output": output}), runner=RUNNER)
    expected = list(AlignedShardLoader(str(tmp_path / "whole"), batch_size=3, seed=5))
    folder = tmp_path / "cache"
    loader = AlignedShardLoader(output, batch_size=3, seed=5, cache_folder=str(folder), cache_bytes=cache_bytes)
    for num_workers in (0, 2):
        s3_server.requests.clear()
        found = list(DataLoader(loader, batch_size=None, num_workers=num_workers))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys()
            for key, value in other.items():
                assert torch.equal(one[key], value) if isinstance(value, torch.Tensor) else one[key] == value, key
    kept = [path for path in folder.rglob("*") if path.is_file()]
    if cache_bytes == 10**9:
        files = [path for path in frozen_files(tmp_path / "whole") if path.startswith(("student/", "teacher=0/"))]
        assert sorted(path.stat().st_size for path in kept) == sorted(
            (tmp_path / "whole" / path).stat().st_size for path in files
        )
        assert s3_server.requests == [], "the second pass reads the disk alone"
    elif cache_bytes:
        assert 0 < sum(path.stat().st_size for path in kept) <= cache_bytes
    else:
        assert kept == []
