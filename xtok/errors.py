"""Every error the library raises on purpose, in one tree.

    XtokError
    ├── ConfigError (ValueError)        a setting is wrong; said before any work begins
    ├── TokenizerError (ValueError)     a tokenizer cannot be used, with the reason
    ├── RowRefused (ValueError)         one row cannot be used: raised online, a counted reject offline
    ├── StorageError (OSError)          a file cannot be read or written
    │   └── StoreUnavailableError       a remote store does not answer, after all attempts
    ├── DatasetError
    │   ├── UnpublishedDatasetError     no manifest: never published, or still being written
    │   ├── DatasetMismatchError        the folder holds a dataset of another configuration
    │   ├── FingerprintMismatchError    tokenizer or template differ from those the dataset was made with
    │   └── DamagedPartError            a file is missing, cut or changed
    ├── PublicationRefusedError         too many rejects, or too little coverage, to publish
    ├── WorkerDiedError                 a worker process ended without an answer
    ├── ProjectionError (ValueError)    a vocabulary projection that does not fit
    └── TrainingError                   a training run that cannot start or go on

Each message carries the offending value, where it came from, and the way out. Losses raise ValueError, TypeError and IndexError
as PyTorch users expect.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DamagedPartError",
    "DatasetError",
    "DatasetMismatchError",
    "FingerprintMismatchError",
    "ProjectionError",
    "PublicationRefusedError",
    "RowRefused",
    "StorageError",
    "StoreUnavailableError",
    "TokenizerError",
    "TrainingError",
    "UnpublishedDatasetError",
    "WorkerDiedError",
    "XtokError",
]


class XtokError(Exception):
    """Root of the tree: `except XtokError` catches all that xtok raises on purpose."""


class ConfigError(XtokError, ValueError):
    """A setting is wrong or contradicts another; nothing was started."""


class TokenizerError(XtokError, ValueError):
    """A tokenizer is slow, incomplete or inconsistent."""


class RowRefused(XtokError, ValueError):
    """One row cannot be used.

    stage: "read", "render", "tokenize" or "align". side: "source", "student" or "teacher=<index>".
    reason: a value of `schemas.tables.RejectReason`. message: a sentence with the offending value. sample_id: the row's own id, where
    whoever refuses it can read that.
    """

    def __init__(self, reason: str, message: str, *, stage: str, side: str) -> None:
        super().__init__(f"{side}: {reason} ({stage}): {message}")
        self.reason = str(reason)
        self.message = message
        self.stage = stage
        self.side = side
        self.sample_id: str | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not survive a process pool by themselves.
        return (_rebuild_row_refused, (self.reason, self.message, self.stage, self.side, self.sample_id))


def _rebuild_row_refused(reason: str, message: str, stage: str, side: str, sample_id: str | None) -> RowRefused:
    refused = RowRefused(reason, message, stage=stage, side=side)
    refused.sample_id = sample_id
    return refused


class StorageError(XtokError, OSError):
    """A file cannot be read or written: permission, space, network, or it is not there."""


class StoreUnavailableError(StorageError):
    """A remote store is busy or out of reach; nothing is known of the file. The same command may work later."""


class DatasetError(XtokError):
    """A dataset cannot be used as it is."""


class UnpublishedDatasetError(DatasetError):
    """The folder has no manifest: it was never published, or is still being written."""


class DatasetMismatchError(DatasetError):
    """The folder holds a dataset of another configuration."""


class FingerprintMismatchError(DatasetError):
    """The tokenizer or template in hand is not the one that made the dataset."""


class DamagedPartError(DatasetError):
    """A file of a published dataset is missing, cut or changed."""


class PublicationRefusedError(XtokError):
    """Publication stopped: too many rejects, or too little coverage."""


class WorkerDiedError(XtokError):
    """A worker process ended without an answer (killed, or out of memory)."""


class ProjectionError(XtokError, ValueError):
    """A vocabulary projection that does not fit its tokenizers or the logits."""


class TrainingError(XtokError):
    """A training run that cannot start or go on."""
