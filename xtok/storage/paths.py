"""Where things lie: local paths and URLs of other stores, and the typed error for whatever goes wrong with either."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from xtok.errors import StorageError, StoreUnavailableError, XtokError

__all__ = ["absolute", "is_no_damage", "join", "local_path", "reported", "storage_error"]

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
_OF_THE_LOCAL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # where files for a remote store are staged
_OF_THE_READER = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def local_path(url: str) -> Path | None:
    """The local path that `url` means, or None when it is a URL of another store."""
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            return Path(url.removeprefix(scheme))
    return None if "://" in url or ("::" in url and not url.startswith("/")) else Path(url)


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
    is_local = local_path(url) is not None
    # A store's client maps the store's own words to the nearest errno: there the words say more.
    if number is not None and (is_local or number in _OF_THE_LOCAL_DISK):
        advice = _ADVICE.get(number, str(error))
    else:
        advice = f"{type(error).__name__}: {error}"
    place = url if not is_local or os.path.isabs(url) else f"{url} (that is, {os.path.abspath(url)})"
    typed = StorageError(f"cannot {action} {place}: {advice or type(error).__name__}")
    typed.errno = number
    return typed


def is_no_damage(error: BaseException) -> bool:
    """True for a failure that tells nothing of the file: a store that is away, no permission, no room or handles left here."""
    if isinstance(error, StoreUnavailableError | PermissionError) or isinstance(error.__cause__, PermissionError):
        return True
    return getattr(error, "errno", None) in (*_OF_THE_LOCAL_DISK, *_OF_THE_READER)


@contextmanager
def reported(action: str, url: str) -> Iterator[None]:
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
