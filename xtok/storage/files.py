"""Whole files: reading, listing, digests, and writing in one step.

A file is never written under its final name: it is written in full under a temporary name that carries a nonce, then moved
(local: one rename; object store: one put), so that a reader sees the old bytes, the new bytes or nothing.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import fsspec
import pyarrow as pa

from xtok.errors import StorageError, XtokError
from xtok.storage import remote
from xtok.storage.paths import local_path, reported, storage_error

__all__ = [
    "clean_staging",
    "exists",
    "fetch",
    "glob",
    "make_folder",
    "open_append",
    "open_arrow",
    "open_read",
    "read_bytes",
    "remove",
    "scratch_folder",
    "sha256",
    "size",
    "staged",
    "tree",
    "version",
    "write_atomic",
    "write_new",
]

Move = Callable[[Path, Path], None]
_BLOCK_BYTES = 1 << 20
_WITHOUT_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


def open_read(url: str) -> BinaryIO:
    """A binary reader of the stored bytes; the caller closes it."""
    with reported("read", url):
        path = local_path(url)
        if path is not None:
            return open(path, "rb")
        return cast(BinaryIO, io.BufferedReader(remote.RemoteReader(url), remote.BLOCK_BYTES))


def open_arrow(url: str) -> pa.NativeFile:
    """A random-access reader for Arrow; the caller closes it."""
    with reported("read", url):
        path = local_path(url)
        return pa.OSFile(str(path), "rb") if path is not None else pa.PythonFile(remote.RemoteReader(url), mode="r")


def open_append(path: str) -> BinaryIO:
    """A writer at the end of a local file (logs that grow while a run goes on); the caller closes it."""
    with reported("append to", path):
        return open(path, "ab")


def exists(url: str) -> bool:
    """True when a file or folder is there. Raises StorageError when a store does not say."""
    with reported("look at", url):
        path = local_path(url)
        return path.exists() if path is not None else remote.info(url) is not None


def size(url: str) -> int:
    """Stored bytes of a file."""
    with reported("read", url):
        path = local_path(url)
        if path is not None:
            return path.stat().st_size
        found = remote.info(url)
        if found is None:
            raise FileNotFoundError(f"there is no such file: {url}")
        return int(found["size"])


def version(url: str) -> str:
    """What differs once a file was written anew: its size and time, or the marks that its store keeps."""
    with reported("look at", url):
        path = local_path(url)
        if path is not None:
            found = path.stat()
            return f"{found.st_size} bytes, {found.st_mtime_ns}"
        return remote.version(url)


def glob(pattern: str) -> list[str]:
    """Files that match, sorted. What matches nothing else may be a file's own name, as in a shell: `texts[1].jsonl`."""
    with reported("list", pattern):
        path = local_path(pattern)
        is_plain = not any(mark in pattern for mark in "*?[")
        found: list[str] = []
        if not is_plain and path is None:
            found = remote.find(pattern)
        elif not is_plain:
            system = fsspec.filesystem("file")
            found = sorted(match for match in system.glob(str(path)) if system.isfile(match))
        return found or ([pattern] if _is_file(pattern) else [])


def _is_file(url: str) -> bool:
    path = local_path(url)
    if path is not None:
        return path.is_file()
    found = remote.info(url)
    return found is not None and found["type"] == "file"


def tree(url: str) -> list[str]:
    """Paths, relative to the folder `url`, of all files below it, sorted."""
    with reported("list", url):
        path = local_path(url)
        if path is None:
            return remote.tree(url)
        return sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())


def read_bytes(url: str) -> bytes:
    """All bytes of a file."""
    with reported("read", url), open_read(url) as stream:
        return stream.read()


def sha256(url: str) -> str:
    """Hex digest of the stored bytes, read in blocks."""
    digest = hashlib.sha256()
    for block in _blocks(url):
        digest.update(block)
    return digest.hexdigest()


def fetch(url: str, path: Path) -> str:
    """Copies a file to a local path; the hex digest of its bytes."""
    digest = hashlib.sha256()
    with reported("write", str(path)), open(path, "wb") as copy:  # what goes wrong with `url` is reported as that
        for block in _blocks(url):
            digest.update(block)
            copy.write(block)
    return digest.hexdigest()


def _blocks(url: str) -> Iterator[bytes]:
    with reported("read", url), open_read(url) as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A local folder that is gone when the block is left."""
    with reported("make a folder in", tempfile.gettempdir()):
        folder = tempfile.TemporaryDirectory(prefix="xtok-", ignore_cleanup_errors=True)
    with folder as name:
        yield Path(name)


def make_folder(url: str) -> None:
    """Makes a local folder and its parents; a remote store has no folders."""
    path = local_path(url)
    if path is not None:
        with reported("make the folder", url):
            path.mkdir(parents=True, exist_ok=True)


def remove(url: str) -> None:
    """Removes a file; nothing happens when it is not there."""
    with reported("remove", url):
        path = local_path(url)
        if path is not None:
            path.unlink(missing_ok=True)
        else:
            remote.remove_file(url)


@contextmanager
def staged(final_url: str, staging_url: str, *, move: Move | None = None) -> Iterator[Path]:
    """A local path to write to; on leaving the block without an error the file is moved to `final_url` in one step.

    staging_url: a folder on the same store as `final_url` (for remote stores a folder of the system's temporary one is taken, and
    the whole file put under its final key). move: how a local file gets its name (default: renamed). The caller verifies the file
    inside the block.
    """
    final, staging = local_path(final_url), local_path(staging_url)
    folder = staging if final is not None and staging is not None else _remote_staging()
    make_folder(str(folder))
    name = final_url.rsplit("/", 1)[-1]
    temporary = folder / f"{name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        try:
            yield temporary
        except (OSError, pa.ArrowException) as error:
            raise error if isinstance(error, XtokError) else storage_error("write", final_url, error) from error
        with reported("write", final_url):
            if final is None:
                remote.put(temporary, final_url)
            else:
                final.parent.mkdir(parents=True, exist_ok=True)
                (move or os.replace)(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def _remote_staging() -> Path:
    return Path(tempfile.gettempdir()) / f"xtok-staging-{os.getuid() if hasattr(os, 'getuid') else os.getlogin()}"


def write_atomic(url: str, data: bytes, staging_url: str | None = None, *, move: Move | None = None) -> None:
    """Writes a whole file in one step, durably where the store is local. staging_url: default, the file's own folder."""
    parent = url.rsplit("/", 1)[0] if "/" in url else "."
    with staged(url, staging_url or parent, move=move) as temporary, open(temporary, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def write_new(url: str, data: bytes, staging_url: str) -> bool:
    """As `write_atomic`, but never over a file: False where one is there, even since a moment ago. (A remote store, and a file system
    without links, cannot tell: of two writers at once the last wins there.)"""
    try:
        write_atomic(url, data, staging_url, move=os.link)
    except StorageError as error:
        if error.errno == errno.EEXIST and exists(url):
            return False
        if error.errno not in _WITHOUT_LINKS:
            raise
        write_atomic(url, data, staging_url)
    return True


def clean_staging(staging_url: str) -> None:
    """Removes what dead processes of this machine left in a staging folder; files of live writers stay."""
    staging = local_path(staging_url) or _remote_staging()
    if not staging.is_dir():
        return
    for path in staging.glob(f"*.{socket.gethostname()}.*.tmp"):
        process = path.name.split(".")[-3]
        if process.isdigit() and not _is_alive(int(process)):
            remove(str(path))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
