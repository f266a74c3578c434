"""The only place of the library that opens files and URLs.

Local paths take the operating system's own calls; every other URL goes through fsspec. A file is never written under its final
name: it is written in full under a temporary name that carries a nonce, then moved (local: one rename; object store: one put), so
that a reader sees the old bytes, the new bytes or nothing. Every failure is a StorageError that names the path and the way out.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa

from xtok.errors import StorageError, XtokError

__all__ = [
    "absolute",
    "clean_staging",
    "exists",
    "glob",
    "join",
    "local_path",
    "make_folder",
    "open_append",
    "open_arrow",
    "open_read",
    "read_bytes",
    "remove",
    "sha256",
    "size",
    "staged",
    "storage_error",
    "write_atomic",
]

_BLOCK_BYTES = 1 << 20
_ADVICE = {
    errno.ENOSPC: "no space left: free some and run the same command again, it continues where it stopped",
    errno.EDQUOT: "the disk quota is used up: free some and run the same command again, it continues where it stopped",
    errno.EFBIG: "the file would exceed the size limit of this process or file system (`ulimit -f`)",
    errno.EACCES: "permission denied: choose another path or change its permissions",
    errno.EPERM: "operation not permitted: choose another path or change its permissions",
    errno.EROFS: "the file system is read-only: choose another path",
    errno.ENOENT: "there is no such file",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another path",
    errno.EISDIR: "it is a folder, not a file",
    errno.EEXIST: "a file stands where a folder is needed: choose another path",
}


def local_path(url: str) -> Path | None:
    """The local path that `url` means, or None when it is a URL of another store."""
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            return Path(url.removeprefix(scheme))
    return None if "://" in url or "::" in url else Path(url)


def absolute(url: str) -> str:
    """`url` with a relative local path resolved against the current directory."""
    path = local_path(url)
    return url if path is None else os.path.abspath(path)


def join(url: str, *names: str) -> str:
    """`url` with path components appended."""
    return "/".join([url.rstrip("/"), *names])


def storage_error(action: str, url: str, error: BaseException) -> StorageError:
    """The typed error for a failure of the operating system or of a remote store. Keeps errno."""
    number = getattr(error, "errno", None)
    advice = _ADVICE.get(number, str(error) or type(error).__name__) if number is not None else f"{type(error).__name__}: {error}"
    place = url if local_path(url) is None or os.path.isabs(url) else f"{url} (that is, {os.path.abspath(url)})"
    typed = StorageError(f"cannot {action} {place}: {advice}")
    typed.errno = number
    return typed


@contextmanager
def _reported(action: str, url: str) -> Iterator[None]:
    """Turns whatever a store raises into a StorageError."""
    try:
        yield
    except XtokError:
        raise
    except (OSError, pa.ArrowException, ImportError, ValueError) as error:
        raise storage_error(action, url, error) from error
    except Exception as error:
        # Clients of remote stores have error trees of their own (botocore, aiohttp).
        if local_path(url) is not None:
            raise
        raise storage_error(action, url, error) from error


def _remote(url: str) -> tuple[Any, str]:
    return cast(tuple[Any, str], fsspec.core.url_to_fs(url))


def open_read(url: str) -> BinaryIO:
    """A binary reader of the stored bytes; the caller closes it."""
    with _reported("read", url):
        path = local_path(url)
        if path is not None:
            return open(path, "rb")
        system, name = _remote(url)
        return cast(BinaryIO, system.open(name, "rb"))


def open_arrow(url: str) -> pa.NativeFile:
    """A random-access reader for Arrow; the caller closes it."""
    with _reported("read", url):
        path = local_path(url)
        return pa.OSFile(str(path), "rb") if path is not None else pa.PythonFile(open_read(url), mode="r")


def open_append(path: str) -> BinaryIO:
    """A writer at the end of a local file (logs that grow while a run goes on); the caller closes it."""
    with _reported("append to", path):
        return open(path, "ab")


def exists(url: str) -> bool:
    """True when a file or folder is there."""
    with _reported("look at", url):
        path = local_path(url)
        if path is not None:
            return path.exists()
        system, name = _remote(url)
        return bool(system.exists(name))


def size(url: str) -> int:
    """Stored bytes of a file."""
    with _reported("read", url):
        path = local_path(url)
        if path is not None:
            return path.stat().st_size
        system, name = _remote(url)
        return int(system.size(name))


def glob(pattern: str) -> list[str]:
    """Files that match, sorted; a pattern without wildcards matches that one file, if it is there."""
    with _reported("list", pattern):
        path = local_path(pattern)
        system, name = (fsspec.filesystem("file"), str(path)) if path is not None else _remote(pattern)
        if not any(mark in name for mark in "*?["):
            return [pattern] if system.isfile(name) else []
        found = sorted(match for match in system.glob(name) if system.isfile(match))
        return found if path is not None else [system.unstrip_protocol(match) for match in found]


def read_bytes(url: str) -> bytes:
    """All bytes of a file."""
    with _reported("read", url), open_read(url) as stream:
        return stream.read()


def sha256(url: str) -> str:
    """Hex digest of the stored bytes, read in blocks."""
    with _reported("read", url), open_read(url) as stream:
        digest = hashlib.sha256()
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
        return digest.hexdigest()


def make_folder(url: str) -> None:
    """Makes a local folder and its parents; a remote store has no folders."""
    path = local_path(url)
    if path is not None:
        with _reported("make the folder", url):
            path.mkdir(parents=True, exist_ok=True)


def remove(url: str) -> None:
    """Removes a file; nothing happens when it is not there."""
    with _reported("remove", url):
        path = local_path(url)
        if path is not None:
            path.unlink(missing_ok=True)
            return
        system, name = _remote(url)
        if system.exists(name):
            system.rm_file(name)


@contextmanager
def staged(final_url: str, staging_url: str) -> Iterator[Path]:
    """A local path to write to; on leaving the block without an error the file is moved to `final_url` in one step.

    staging_url: a folder on the same store as `final_url` (ignored for remote stores, which stage in the system's own temporary
    folder and put the whole file under its final key). The caller verifies the file inside the block.
    """
    final, staging = local_path(final_url), local_path(staging_url)
    nonce = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    if final is None or staging is None:
        folder = Path(tempfile.mkdtemp(prefix="xtok-"))
        temporary = folder / nonce
    else:
        folder = None
        make_folder(str(staging))
        temporary = staging / f"{final.name}.{nonce}"
    try:
        try:
            yield temporary
        except (OSError, pa.ArrowException) as error:
            raise error if isinstance(error, XtokError) else storage_error("write", final_url, error) from error
        with _reported("write", final_url):
            if final is None:
                system, name = _remote(final_url)
                system.put_file(str(temporary), name)
            else:
                final.parent.mkdir(parents=True, exist_ok=True)
                os.replace(temporary, final)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def write_atomic(url: str, data: bytes, staging_url: str | None = None) -> None:
    """Writes a whole file in one step, durably where the store is local. staging_url: default, the file's own folder."""
    parent = url.rsplit("/", 1)[0] if "/" in url else "."
    with staged(url, staging_url or parent) as temporary, open(temporary, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def clean_staging(staging_url: str) -> None:
    """Removes what dead processes of this machine left in a staging folder; files of live writers stay."""
    staging = local_path(staging_url)
    if staging is None or not staging.is_dir():
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
