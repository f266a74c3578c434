"""Storage: whole files or none, typed errors that name the path, local and remote alike."""

from __future__ import annotations

import errno
import os
import socket
import uuid
from pathlib import Path

import pytest

from xtok import storage
from xtok.errors import StorageError, TokenizerError


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder of the local file system, and one of another fsspec store."""
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def test_what_is_written_is_read(root: str) -> None:
    url = storage.join(root, "folder", "file.bin")
    assert not storage.exists(url)
    storage.write_atomic(url, b"first", storage.join(root, "staging"))
    storage.write_atomic(url, b"second", storage.join(root, "staging"))
    assert storage.exists(url)
    assert storage.read_bytes(url) == b"second"
    assert storage.size(url) == 6
    assert storage.sha256(url) == "16367aacb67a4a017c8da8ab95682ccb390863780f7114dda0a0e0c55644c7c4"
    with storage.open_read(url) as stream:
        assert stream.read(3) == b"sec"
    with storage.open_arrow(url) as handle:
        handle.seek(3)
        assert handle.read() == b"ond"
    storage.remove(url)
    storage.remove(url)
    assert not storage.exists(url)


def test_glob_is_sorted_and_knows_plain_names(root: str) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        storage.write_atomic(storage.join(root, name), b"x", storage.join(root, "staging"))
    found = storage.glob(storage.join(root, "*.jsonl"))
    assert [name.rsplit("/", 1)[1] for name in found] == ["a.jsonl", "b.jsonl"]
    assert all(storage.read_bytes(name) == b"x" for name in found)
    assert storage.glob(storage.join(root, "c.txt")) == [storage.join(root, "c.txt")]
    assert storage.glob(storage.join(root, "d.txt")) == []
    for name in ("e[1].jsonl", "e2.jsonl"):
        storage.write_atomic(storage.join(root, name), b"x", storage.join(root, "staging"))
    assert [name.rsplit("/", 1)[1] for name in storage.glob(storage.join(root, "e[1].jsonl"))] == ["e[1].jsonl"]
    assert [name.rsplit("/", 1)[1] for name in storage.glob(storage.join(root, "e[2].jsonl"))] == ["e2.jsonl"]
    assert storage.glob(storage.join(root, "e[3].jsonl")) == []


def test_tree_and_fetch(root: str, tmp_path: Path) -> None:
    for name in ("b/x[1].bin", "a.bin", "b/c/d e.bin"):
        storage.write_atomic(storage.join(root, "top", name), name.encode(), storage.join(root, "staging"))
    storage.write_atomic(storage.join(root, "topmost.bin"), b"", storage.join(root, "staging"))
    assert storage.tree(storage.join(root, "top")) == ["a.bin", "b/c/d e.bin", "b/x[1].bin"]
    assert storage.tree(storage.join(root, "none")) == []
    url = storage.join(root, "top", "a.bin")
    with storage.scratch_folder() as folder:
        assert storage.fetch(url, folder / "copy") == storage.sha256(url)
        assert (folder / "copy").read_bytes() == b"a.bin"
        with pytest.raises(StorageError, match=r"cannot write .*none/copy"):
            storage.fetch(url, folder / "none" / "copy")
    assert not folder.exists()


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(root: str) -> None:
    url, staging = storage.join(root, "file"), storage.join(root, "staging")
    storage.write_atomic(url, b"old", staging)

    def write(error: Exception) -> None:
        with storage.staged(url, staging) as temporary:
            temporary.write_bytes(b"half")
            raise error

    # Errors of the writing are typed; whatever else goes wrong meanwhile passes as it is.
    with pytest.raises(ZeroDivisionError):
        write(ZeroDivisionError())
    with pytest.raises(TokenizerError):
        write(TokenizerError("no id"))
    with pytest.raises(StorageError, match="no space left"):
        write(OSError(errno.ENOSPC, "full"))
    assert storage.read_bytes(url) == b"old"
    folder = storage.local_path(staging)
    assert folder is None or list(folder.iterdir()) == []


def test_errors_name_the_path_and_the_way_out(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.bin")
    for action in (storage.open_read, storage.read_bytes, storage.sha256, storage.size, storage.open_arrow):
        with pytest.raises(StorageError, match=r"missing\.bin: there is no such file"):
            action(missing)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="a file stands where a folder is needed"):
        storage.write_atomic(str(tmp_path / "file" / "below"), b"x")
    with pytest.raises(StorageError, match="folder, not a file"):
        storage.read_bytes(str(tmp_path))


def test_relative_paths_are_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage.absolute("a/../b") == str(tmp_path / "b")
    assert storage.absolute("s3://bucket/key") == "s3://bucket/key"
    with pytest.raises(StorageError, match=rf"that is, {tmp_path}/none"):
        storage.read_bytes("none")


def test_local_urls_are_paths() -> None:
    assert storage.local_path("file:///a/b") == Path("/a/b")
    assert storage.local_path("s3://a/b") is None
    assert storage.join("/", "a") == "/a"
    assert storage.join("s3://a/", "b", "c") == "s3://a/b/c"


def test_staging_is_cleaned_of_dead_writers_only(tmp_path: Path) -> None:
    dead = tmp_path / f"part.parquet.{socket.gethostname()}.{2**22 + 1}.aa.tmp"
    ours = tmp_path / f"part.parquet.{socket.gethostname()}.{os.getpid()}.bb.tmp"
    other = tmp_path / f"part.parquet.elsewhere.{2**22 + 1}.cc.tmp"
    for path in (dead, ours, other):
        path.write_bytes(b"")
    storage.clean_staging(str(tmp_path))
    storage.clean_staging(str(tmp_path / "none"))
    assert sorted(tmp_path.iterdir()) == sorted([ours, other])


@pytest.mark.parametrize("without_links", [False, True])
def test_a_new_file_is_written_over_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_links: bool) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "this file system has no links")

    if without_links:
        monkeypatch.setattr(os, "link", refuse)
    url, staging = str(tmp_path / "folder" / "plan.json"), tmp_path / "staging"
    assert storage.write_new(url, b"first", str(staging))
    assert storage.write_new(url, b"second", str(staging)) is without_links
    assert storage.read_bytes(url) == (b"second" if without_links else b"first")
    assert list(staging.iterdir()) == []
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(StorageError, match=r"cannot write .*file/plan\.json"):
        storage.write_new(str(tmp_path / "file" / "plan.json"), b"x", str(staging))
