"""Trying again when a remote store is busy, slow or out of reach, a bounded number of times and ever less often.

Every call that is retried may be repeated without harm: whole reads, ranged reads, whole puts, removals. What lasts (no such
bucket, no permission, a wrong name) is told at once; what does not is told when the attempts are used up.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from xtok.errors import StoreUnavailableError

__all__ = ["RetryPolicy", "is_transient", "retried"]

Result = TypeVar("Result")
_STATUSES = frozenset([408, 425, 429, 500, 502, 503, 504])
_NUMBERS = frozenset(
    [errno.EIO, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE, getattr(errno, "EREMOTEIO", errno.EIO)]
)
# Clients bring trees of their own, and we import none of them: aiohttp, botocore (HTTPClientError: time-outs, lost connections;
# ResponseParserError: half an answer), requests and httpx, huggingface_hub.
_NAMES = frozenset(
    [
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectionError",
        "HTTPClientError",
        "IncompleteRead",
        "IncompleteReadError",
        "ResponseParserError",
        "Timeout",
        "TimeoutError",
        "TransportError",
    ]
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """attempts: calls in all. Before call n + 1 passes half to all of first_delay_s * 2^(n - 1), at most max_delay_s."""

    attempts: int = 7
    first_delay_s: float = 0.25
    max_delay_s: float = 8.0

    def delays(self) -> Iterator[float]:
        """Seconds before the second call, the third, ...; random, so that many workers do not come back at once."""
        for attempt in range(self.attempts - 1):
            yield min(self.max_delay_s, self.first_delay_s * 2**attempt) * random.uniform(0.5, 1.0)


POLICY = RetryPolicy()


def retried(action: str, url: str, call: Callable[[], Result]) -> Result:
    """The result of `call`, repeated while the store says that it is busy or does not answer.

    Raises StoreUnavailableError saying how often it was tried; what lasts passes as it is.
    """
    began = time.monotonic()
    delays = POLICY.delays()
    while True:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            delay = next(delays, None)
            if delay is None:
                raise _gave_up(action, url, error, time.monotonic() - began) from error
        time.sleep(delay)


def is_transient(error: BaseException) -> bool:
    """True when the same call may succeed later. The store's own status decides where an error carries one."""
    chain = list(_chain(error))
    statuses = [status for link in chain if (status := _status(link)) is not None]
    if statuses:
        return any(status in _STATUSES for status in statuses)
    return any(_looks_transient(link) for link in chain)


def _looks_transient(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _NAMES) or getattr(error, "errno", None) in _NUMBERS


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of botocore, aiohttp, requests, httpx or gcsfs carries."""
    response: Any = getattr(error, "response", None)
    found: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    for holder, name in ((response, "status_code"), (error, "status"), (error, "status_code"), (error, "code")):
        if found is None:
            found = getattr(holder, name, None)
    return int(found) if isinstance(found, int) or (isinstance(found, str) and found.isdigit()) else None


def _gave_up(action: str, url: str, error: BaseException, seconds: float) -> StoreUnavailableError:
    typed = StoreUnavailableError(
        f"cannot {action} {url}: tried {POLICY.attempts} times in {seconds:.0f} s, the last answer was {type(error).__name__}: {error}. "
        "Run the same command again when the store answers: it continues where it stopped."
    )
    typed.errno = getattr(error, "errno", None)
    return typed
