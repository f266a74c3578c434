"""The only place of the library that opens files and URLs.

    paths.py      local paths and URLs; the typed error for whatever fails, with the path and the way out
    files.py      read, list, digest; write in one step
    remote.py     stores behind fsspec: bounded, retried (retry.py), never through a cached listing
    cache.py      whole remote files on the local disk, shared by many processes
    yaml_file.py  configurations, in which nothing is said twice

Tested: the local disk; `s3://` against a real S3 server on loopback, faults injected; `memory://` as a plain fsspec store. Any
other fsspec URL (`gs://`, `hf://`, `az://`) takes the same calls: info, glob, find, cat_file, put_file and rm_file are all that is used.
"""

from __future__ import annotations

from xtok.storage.cache import FileCache, default_cache_folder
from xtok.storage.files import (
    clean_staging,
    exists,
    fetch,
    glob,
    make_folder,
    open_append,
    open_arrow,
    open_read,
    read_bytes,
    remove,
    scratch_folder,
    sha256,
    size,
    staged,
    tree,
    version,
    write_atomic,
    write_new,
)
from xtok.storage.paths import absolute, is_no_damage, join, local_path, reported, storage_error
from xtok.storage.yaml_file import read_yaml

__all__ = [
    "FileCache",
    "absolute",
    "clean_staging",
    "default_cache_folder",
    "exists",
    "fetch",
    "glob",
    "is_no_damage",
    "join",
    "local_path",
    "make_folder",
    "open_append",
    "open_arrow",
    "open_read",
    "read_bytes",
    "read_yaml",
    "remove",
    "reported",
    "scratch_folder",
    "sha256",
    "size",
    "staged",
    "storage_error",
    "tree",
    "version",
    "write_atomic",
    "write_new",
]
