"""Source files: finding them, naming them portably, and opening the decompressed stream.

A source is one file of JSON lines (plain, gzip or zstd) or Parquet. Its portable name is the shortest trailing path that no other
source of the run has: it stands in the plan and the tables, the full URL never does.

A plain file is opened at a part's first byte. A compressed one has no such place: it is decompressed from its start for every part
that it spans, so many compressed files of a few parts each are better than one of a thousand.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal, cast

import zstandard

from xtok import storage
from xtok.errors import ConfigError, StorageError

__all__ = ["HashingReader", "SourceFile", "decompressed", "find_sources", "portable_names", "why_no_file"]

Format = Literal["jsonl", "parquet"]
Compression = Literal["gzip", "zstd"] | None
_LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_BLOCK_BYTES = 1 << 20
_ZSTD_READ_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source: where it lies, what it is called in the dataset, and how it is stored."""

    url: str
    name: str
    format: Format
    compression: Compression


def find_sources(patterns: Sequence[str]) -> list[SourceFile]:
    """The files of all patterns, in the order of the patterns, a glob's matches sorted, none twice.

    Raises ConfigError for a pattern that matches nothing and for a file of an unknown kind.
    """
    urls: dict[str, None] = {}
    for pattern in patterns:
        found = storage.glob(storage.absolute(pattern))
        if not found:
            raise ConfigError(f"sources: {pattern!r} (that is, {storage.absolute(pattern)}) {why_no_file(pattern)}")
        urls.update(dict.fromkeys(found))
    names = portable_names(list(urls))
    return [SourceFile(url, name, *_kind(url)) for url, name in zip(urls, names, strict=True)]


def why_no_file(pattern: str) -> str:
    """What is to be said of a pattern that no file matches."""
    if not storage.exists(pattern):
        return "matches no file"
    return f"is no regular file; of a folder, name the files to read: {storage.join(pattern, '*.jsonl')}"


def portable_names(urls: Sequence[str]) -> list[str]:
    """The shortest trailing path of each URL that no other URL has."""
    trails = [["/".join(pieces[-depth:]) for depth in range(1, len(pieces) + 1)] for pieces in map(_pieces, urls)]
    count = Counter(trail for own in trails for trail in own)
    return [next((trail for trail in own if count[trail] == 1), own[-1]) for own in trails]


def _pieces(url: str) -> list[str]:
    return url.strip("/").split("/")


def _kind(url: str) -> tuple[Format, Compression]:
    name = url.lower()
    compression: Compression = None
    for suffix, method in _COMPRESSIONS.items():
        if name.endswith(suffix):
            compression, name = method, name.removesuffix(suffix)
    if name.endswith(_LINE_SUFFIXES):
        return "jsonl", compression
    if name.endswith((".parquet", ".pq")) and compression is None:
        return "parquet", None
    raise ConfigError(f"sources: {url} is of no known kind: use .jsonl, .jsonl.gz, .jsonl.zst or .parquet")


class HashingReader(io.RawIOBase):
    """Passes reads through and keeps the digest and the count of the stored bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def readable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, buffer: object) -> int:
        """Fills `buffer`; the number of bytes read, 0 at the end."""
        view = memoryview(cast(bytearray, buffer)).cast("B")
        block = self._stream.read(len(view))
        view[: len(block)] = block
        self._digest.update(block)
        self.num_bytes += len(block)
        return len(block)

    def finish(self) -> str:
        """Reads what the decompressor left behind, and gives the hex digest of the whole file."""
        while self.read(_BLOCK_BYTES):
            pass
        return self._digest.hexdigest()


class _ZstdReader(io.RawIOBase):
    """Decompresses frame after frame. (zstandard's own stream reader ends without a word where a file is cut.)"""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._fed = False
        self._held = memoryview(b"")

    def readable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, buffer: object) -> int:
        """Fills `buffer`; the number of bytes read, 0 at the end. EOFError where the last frame is cut."""
        view = memoryview(cast(bytearray, buffer)).cast("B")
        while not self._held:
            # Read little at a time: well-packed data grows ten-thousandfold.
            data = self._frame.unused_data if self._frame.eof else b""
            data = data or self._stream.read(_ZSTD_READ_BYTES)
            if not data:
                if self._fed and not self._frame.eof:
                    raise EOFError("the last frame is cut")
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._held, self._fed = memoryview(self._frame.decompress(data)), True
        count = min(len(view), len(self._held))
        view[:count] = self._held[:count]
        self._held = self._held[count:]
        return count


@contextmanager
def decompressed(url: str, compression: Compression, raw: io.RawIOBase | BinaryIO | None = None) -> Iterator[BinaryIO]:
    """The decompressed byte stream of a source. raw: an open reader of the stored bytes, instead of opening `url`.

    Raises StorageError naming the file when it is cut or damaged.
    """
    stream = cast(BinaryIO, raw) if raw is not None else storage.open_read(url)
    try:
        if compression == "gzip":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb"))
        elif compression == "zstd":
            yield cast(BinaryIO, io.BufferedReader(_ZstdReader(stream), _BLOCK_BYTES))
        else:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise StorageError(f"{url} is no whole {compression} file: {error}") from error
    except OSError as error:
        raise error if isinstance(error, StorageError) else storage.storage_error("read", url, error) from error
    finally:
        if raw is None:
            stream.close()
