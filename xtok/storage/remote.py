"""Stores that are not the local disk, through fsspec: `s3://` (extra `[s3]`), `hf://`, `gs://`, any other that fsspec knows.

Every call is bounded in time and repeated by `xtok.storage.retry`; the client's own retries are turned down where they would
multiply ours. Listings are never cached: other machines write to the same place.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import fsspec

from xtok.storage.retry import retried

__all__ = ["RemoteReader", "find", "info", "put", "remove_file", "tree", "version"]

Result = TypeVar("Result")
_S3_SCHEMES = ("s3://", "s3a://")
_VERSION_MARKS = ("size", "ETag", "etag", "generation", "md5Hash", "blob_id", "LastModified", "last_modified", "created", "mtime")
_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60
BLOCK_BYTES = 4 << 20


def filesystem(url: str) -> tuple[Any, str]:
    """(fsspec file system, path in it). Call it anew each time: instances belong to one process and thread."""
    system, name = fsspec.core.url_to_fs(url, **_options(url))
    if url.startswith(_S3_SCHEMES):
        system.retries = 1
    return cast(tuple[Any, str], (system, name))


def _options(url: str) -> dict[str, Any]:
    options: dict[str, Any] = {"use_listings_cache": False}
    if url.startswith(_S3_SCHEMES):
        own = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        limits = {"connect_timeout": _CONNECT_TIMEOUT_S, "read_timeout": _READ_TIMEOUT_S, "retries": {"total_max_attempts": 1}}
        options["config_kwargs"] = limits | own
    return options


def _call(action: str, url: str, function: Callable[[Any, str], Result]) -> Result:
    return retried(action, url, lambda: function(*filesystem(url)))


def info(url: str) -> dict[str, Any] | None:
    """What the store says about a file or folder, None when it is not there. (fsspec's own `exists` calls any error absence.)"""
    try:
        return _call("look at", url, lambda system, name: cast(dict[str, Any], system.info(name)))
    except FileNotFoundError:
        return None


def version(url: str) -> str:
    """The marks by which a store tells one content of a file from another, as far as it keeps any."""
    found = info(url)
    if found is None:
        raise FileNotFoundError(f"there is no such file: {url}")
    return ", ".join(f"{name} {found[name]}" for name in _VERSION_MARKS if found.get(name) is not None)


def find(pattern: str) -> list[str]:
    """URLs of the files that a pattern matches, sorted."""

    def look(system: Any, name: str) -> list[str]:
        found = system.glob(name, detail=True)
        return sorted(system.unstrip_protocol(match) for match, entry in found.items() if entry["type"] == "file")

    return _call("list", pattern, look)


def tree(url: str) -> list[str]:
    """Paths, relative to `url`, of all files below it, sorted."""

    def look(system: Any, name: str) -> list[str]:
        root = name.rstrip("/") + "/"
        return sorted(found.removeprefix(root) for found in system.find(name) if found.startswith(root))

    return _call("list", url, look)


def put(path: Path, url: str) -> None:
    """Puts a whole local file under its final key; a reader sees the old bytes or the new ones."""
    _call("write", url, lambda system, name: system.put_file(str(path), name))


def remove_file(url: str) -> None:
    """Removes a file; nothing happens when it is not there."""
    try:
        _call("remove", url, lambda system, name: system.rm_file(name))
    except FileNotFoundError:
        pass


class RemoteReader(io.RawIOBase):
    """Random access to a remote file, one ranged read a call; each is retried by itself, so that a long file survives a bad hour."""

    def __init__(self, url: str) -> None:
        found = info(url)
        if found is None:
            raise FileNotFoundError(f"there is no such file: {url}")
        if found["type"] != "file":
            raise IsADirectoryError(f"it is a folder, not a file: {url}")
        self._url, self._size, self._position = url, int(found["size"]), 0

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True."""
        return True

    def tell(self) -> int:
        """Bytes from the start."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position; nothing is read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readall(self) -> bytes:
        """The rest of the file, in large blocks (the inherited one asks for 8 kB a call)."""
        blocks = []
        while block := self.read(BLOCK_BYTES):
            blocks.append(block)
        return b"".join(blocks)

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer` as far as the file goes; the number of bytes read, 0 at the end."""
        view = memoryview(buffer).cast("B")
        start, end = self._position, min(self._position + len(view), self._size)
        if start >= end:
            return 0
        data = _call("read", self._url, lambda system, name: cast(bytes, system.cat_file(name, start=start, end=end)))
        if len(data) != end - start:
            raise OSError(f"the store gave {len(data)} bytes for the range {start} to {end}: the file changed meanwhile")
        view[: len(data)] = data
        self._position = end
        return len(data)
