"""Whole files of a remote store on the local disk, found by their digest, shared by any number of processes.

- A file appears by one rename, after its digest was checked: a reader sees a whole file or none. What a process finds there it
  checks once (a disk may have lost or changed it since); what is wrong is fetched anew.
- Processes that want the same file at once wait for the one that fetches it, on an advisory lock of the *folder* it goes to: no
  lock file exists, and the kernel lets the lock go when its holder dies.
- A hit makes a file the youngest; beyond `max_bytes` the oldest go. A file is opened before it may be evicted, a fetched one
  before it appears, and what is open stays readable, so eviction disturbs nobody.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from xtok.errors import StorageError
from xtok.storage.files import clean_staging, fetch, make_folder, staged
from xtok.storage.paths import reported

try:
    import fcntl
except ImportError:  # Windows: files may be fetched twice, which is slower and no worse
    fcntl = None  # type: ignore[assignment]

__all__ = ["FileCache", "default_cache_folder"]

_BLOCK_BYTES = 1 << 20


def default_cache_folder() -> str:
    """$XTOK_CACHE, else `xtok` in the user's cache folder."""
    chosen = os.environ.get("XTOK_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return chosen or os.path.join(base, "xtok")


class FileCache:
    """Files in `folder`, together at most `max_bytes` (the one in use aside)."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder, self._max_bytes = Path(folder), max_bytes
        self._checked: set[str] = set()
        try:
            with reported("use the cache", folder):
                self._staging.mkdir(parents=True, exist_ok=True)
            clean_staging(str(self._staging))
        except StorageError as error:
            raise StorageError(f"{error}. `cache_folder` or $XTOK_CACHE names another, `cache_bytes=0` does without") from error

    @property
    def _staging(self) -> Path:
        return self._folder / "staging"

    def open_arrow(self, url: str, sha256: str) -> pa.NativeFile:
        """A reader for Arrow of the file at `url`, fetched if it is not there; the caller closes it.

        sha256: hex digest of the bytes. Raises StorageError when the store gives others, or no answer.
        """
        path = self._folder / sha256[:2] / sha256
        handle = self._hit(path, sha256)
        if handle is not None:
            return handle
        make_folder(str(path.parent))
        with _locked(path.parent):
            handle = self._hit(path, sha256)  # another process may have fetched it meanwhile
            if handle is None:
                handle = self._fetch(url, sha256, path)
        self._evict()
        return handle

    def _hit(self, path: Path, sha256: str) -> pa.NativeFile | None:
        """The open file, now the youngest of the cache; None when it is not there, or not with the bytes it should have."""
        with reported("read", str(path)):
            try:
                handle = pa.OSFile(str(path), "rb")
            except FileNotFoundError:
                return None
            with suppress(FileNotFoundError, PermissionError):  # evicted just now; kept by another user
                os.utime(path)
            if sha256 in self._checked:
                return handle
            if _digest(handle) == sha256:
                self._checked.add(sha256)
                handle.seek(0)
                return handle
            handle.close()
            path.unlink(missing_ok=True)
        return None

    def _fetch(self, url: str, sha256: str, path: Path) -> pa.NativeFile:
        with staged(str(path), str(self._staging)) as temporary:
            found = fetch(url, temporary)
            if found != sha256:
                raise StorageError(f"{url} has the sha256 {found}, the manifest says {sha256}: it is damaged")
            handle = pa.OSFile(str(temporary), "rb")
        self._checked.add(sha256)
        return handle

    def _evict(self) -> None:
        """Removes the oldest files until the rest fits."""
        files = []
        for path in self._folder.glob("??/*"):
            try:
                found = path.stat()
            except FileNotFoundError:  # another process was faster
                continue
            files.append((found.st_mtime_ns, found.st_size, path))
        excess = sum(num_bytes for _, num_bytes, _ in files) - self._max_bytes
        for _, num_bytes, path in sorted(files)[:-1]:
            if excess <= 0:
                break
            with suppress(PermissionError):  # kept by another user
                path.unlink(missing_ok=True)
                excess -= num_bytes


def _digest(handle: pa.NativeFile) -> str:
    digest = hashlib.sha256()
    while block := handle.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
