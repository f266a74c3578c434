"""The local cache of remote files: whole files only, bounded, shared by processes, nothing left behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.s3_server import S3Server
from xtok import storage
from xtok.errors import StorageError

# Opens the files named on its command line in a random order, again and again, and checks every byte.
READER = """
import hashlib, random, sys
from xtok.storage import FileCache
folder, max_bytes, rounds, *urls = sys.argv[1:]
cache = FileCache(folder, int(max_bytes))
for _ in range(int(rounds)):
    for entry in random.sample(urls, len(urls)):
        url, digest = entry.split("|")
        with cache.open_arrow(url, digest) as handle:
            assert hashlib.sha256(handle.read()).hexdigest() == digest
print("sound", flush=True)
"""


def stored(root: str, name: str, num_bytes: int) -> tuple[str, str]:
    """(URL, digest) of a new file of bytes of its own."""
    data = (name.encode() * num_bytes)[:num_bytes]
    url = storage.join(root, name)
    storage.write_atomic(url, data)
    return url, hashlib.sha256(data).hexdigest()


def start_reader(
    repository: Path, folder: Path, max_bytes: int, rounds: int, files: list[tuple[str, str]]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READER, str(folder), str(max_bytes), str(rounds), *("|".join(file) for file in files)]
    return subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kept(folder: Path) -> dict[str, int]:
    """Digest -> size of what is in the cache; every other file is one too many."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert all(path.parent.name == path.name[:2] for path in files), files
    return {path.name: path.stat().st_size for path in files}


def test_a_file_is_fetched_once_and_stays_readable_when_evicted(tmp_path: Path) -> None:
    first = stored(str(tmp_path / "store"), "first", 1000)
    others = [stored(str(tmp_path / "store"), f"file-{index}", 1000) for index in range(5)]
    cache = storage.FileCache(str(tmp_path / "cache"), 2500)
    with cache.open_arrow(*first) as handle:
        os.remove(first[0])
        with cache.open_arrow(*first) as again:
            assert again.read() == handle.read()
        for other in others:
            cache.open_arrow(*other).close()
        handle.seek(0)
        assert hashlib.sha256(handle.read()).hexdigest() == first[1]
    assert sorted(kept(tmp_path / "cache")) == sorted(digest for _, digest in others[-2:])
    with pytest.raises(StorageError, match="there is no such file"):
        cache.open_arrow(*first)


def test_a_hit_makes_a_file_young(tmp_path: Path) -> None:
    files = [stored(str(tmp_path / "store"), f"file-{index}", 1000) for index in range(3)]
    cache = storage.FileCache(str(tmp_path / "cache"), 2500)
    for file in (files[0], files[1], files[0], files[2]):
        cache.open_arrow(*file).close()
        time.sleep(0.02)
    assert sorted(kept(tmp_path / "cache")) == sorted([files[0][1], files[2][1]])


def test_a_file_larger_than_the_cache_is_read_all_the_same(tmp_path: Path) -> None:
    files = [stored(str(tmp_path / "store"), f"file-{index}", 1000) for index in range(2)]
    cache = storage.FileCache(str(tmp_path / "cache"), 10)
    for file in files:
        with cache.open_arrow(*file) as handle:
            assert hashlib.sha256(handle.read()).hexdigest() == file[1]
    assert list(kept(tmp_path / "cache")) == [files[1][1]]


def test_damaged_bytes_are_not_kept(tmp_path: Path) -> None:
    url, digest = stored(str(tmp_path / "store"), "file", 1000)
    Path(url).write_bytes(b"other bytes")
    cache = storage.FileCache(str(tmp_path / "cache"), 10_000)
    with pytest.raises(StorageError, match=r"the manifest says .*damaged"):
        cache.open_arrow(url, digest)
    assert kept(tmp_path / "cache") == {}


@pytest.mark.parametrize("change", [lambda data: b"", lambda data: data[:-1], lambda data: data[:500] + b"!" + data[501:]])
def test_what_the_disk_lost_is_fetched_anew(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """The store is sound: an entry that a crash or the disk spoilt must not stand for it."""
    url, digest = stored(str(tmp_path / "store"), "file", 1000)
    storage.FileCache(str(tmp_path / "cache"), 10_000).open_arrow(url, digest).close()
    entry = tmp_path / "cache" / digest[:2] / digest
    entry.write_bytes(change(entry.read_bytes()))
    cache = storage.FileCache(str(tmp_path / "cache"), 10_000)
    for _ in range(2):
        with cache.open_arrow(url, digest) as handle:
            assert hashlib.sha256(handle.read()).hexdigest() == digest
    assert kept(tmp_path / "cache") == {digest: 1000}


def test_an_eviction_by_another_process_is_never_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come the moment the file appears: in a cache smaller than one file it does."""
    url, digest = stored(str(tmp_path / "store"), "file", 1000)
    replace = os.replace

    def replace_and_evict(source: str, target: str) -> None:
        replace(source, target)
        os.remove(target)

    monkeypatch.setattr(os, "replace", replace_and_evict)
    with storage.FileCache(str(tmp_path / "cache"), 10).open_arrow(url, digest) as handle:
        assert hashlib.sha256(handle.read()).hexdigest() == digest


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/cache")):
        with pytest.raises(StorageError, match=r"cannot use the cache .*cache_folder.*XTOK_CACHE.*cache_bytes=0"):
            storage.FileCache(str(folder), 1000)


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("XTOK_CACHE", raising=False)
    assert storage.default_cache_folder() == "/somewhere/xtok"
    monkeypatch.setenv("XTOK_CACHE", "/chosen")
    assert storage.default_cache_folder() == "/chosen"


@pytest.mark.slow
def test_processes_share_it(tmp_path: Path, repository: Path, bucket: str, s3_server: S3Server) -> None:
    files = [stored(bucket, f"file-{index}", 300_000) for index in range(6)]
    s3_server.requests.clear()
    readers = [start_reader(repository, tmp_path / "roomy", 10_000_000, 2, files) for _ in range(3)]
    answers = [reader.communicate(timeout=120) for reader in readers]
    assert [answer for answer, _ in answers] == ["sound\n"] * 3, answers
    assert len([method for method, _ in s3_server.requests if method == "GET"]) == len(files), "each is fetched by one process"
    assert kept(tmp_path / "roomy") == {digest: 300_000 for _, digest in files}

    # Too small for all: they evict under each other's hands.
    readers = [start_reader(repository, tmp_path / "narrow", 700_000, 2, files) for _ in range(3)]
    answers = [reader.communicate(timeout=120) for reader in readers]
    assert [answer for answer, _ in answers] == ["sound\n"] * 3, answers
    assert sum(kept(tmp_path / "narrow").values()) <= 700_000


@pytest.mark.slow
def test_a_killed_process_leaves_neither_lock_nor_half_file(
    tmp_path: Path, repository: Path, bucket: str, s3_server: S3Server
) -> None:
    file = stored(bucket, "large", 9_000_000)
    s3_server.requests.clear()
    s3_server.fault = lambda method, path: "hang" if method == "GET" and len(s3_server.requests) > 2 else None
    reader = start_reader(repository, tmp_path / "cache", 10**9, 1, [file])
    deadline = time.monotonic() + 60
    while len(s3_server.requests) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list((tmp_path / "cache" / "staging").iterdir()), "it is in the middle of the file"
    reader.kill()
    reader.communicate()
    s3_server.fault = lambda method, path: None
    other = start_reader(repository, tmp_path / "cache", 10**9, 1, [file])
    answer, errors = other.communicate(timeout=60)
    assert answer == "sound\n", errors
    assert kept(tmp_path / "cache") == {file[1]: 9_000_000}
