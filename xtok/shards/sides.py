"""One model's tokenizer inside a worker: loaded once a process, described for the plan, and encoding under proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from schemas.config import ModelSide
from schemas.plan import PlannedSide
from schemas.tables import reject_side
from xtok import storage
from xtok.errors import ConfigError, FingerprintMismatchError, TokenizerError
from xtok.shards.spans import SpanFinder
from xtok.shards.timing import stage
from xtok.tokenizers import FastokensBackend, FlatTokens, ProvenEncoder, TokenizerAdapter, load_tokenizer, prove_backend

__all__ = ["BackendDiffers", "LoadedSide", "SideJob", "describe_side", "load_side", "same_side"]

Backend = Literal["auto", "fastokens", "tokenizers"]
_MAX_LOADED = 16
_LOADED: dict[tuple[object, ...], TokenizerAdapter] = {}


@dataclass(frozen=True, slots=True)
class SideJob:
    """What `describe_side` needs. label: `student` or `teacher <index>`; sample: texts of the user's own data."""

    label: str
    side: ModelSide
    backend: Backend
    sample: tuple[str, ...]


def load_side(side: ModelSide) -> TokenizerAdapter:
    """The side's tokenizer, kept for the life of the process; its template replaced where the side gives another."""
    key = (side.tokenizer, side.revision, side.trust_remote_code, side.chat_template, _stamp(side))
    adapter = _LOADED.get(key)
    if adapter is None:
        adapter = load_tokenizer(side.tokenizer, revision=side.revision, trust_remote_code=side.trust_remote_code)
        if side.chat_template is not None:
            adapter.chat_template = storage.read_bytes(side.chat_template).decode("utf-8")
        if len(_LOADED) >= _MAX_LOADED:
            _LOADED.pop(next(iter(_LOADED)))
        _LOADED[key] = adapter
    return adapter


def _stamp(side: ModelSide) -> tuple[int, int]:
    """Changes when a local tokenizer is replaced while this process lives."""
    folder = storage.local_path(side.tokenizer)
    try:
        found = (folder / "tokenizer.json").stat() if folder is not None else None
    except OSError:
        found = None
    return (found.st_mtime_ns, found.st_size) if found is not None else (0, 0)


def describe_side(job: SideJob) -> PlannedSide:
    """The side as the plan records it, its backend chosen by proof on the sample.

    Raises TokenizerError for a tokenizer that cannot be used, ConfigError for a context without room or a backend that differs.
    """
    side, adapter = job.side, load_side(job.side)
    prefix = tuple(adapter.prefix_ids.tolist()) if side.add_special_tokens else ()
    suffix = tuple(adapter.suffix_ids.tolist()) if side.add_special_tokens else ()
    if len(prefix) + len(suffix) >= side.context_length:
        raise ConfigError(
            f"{job.label}: context_length {side.context_length} leaves no room beside the {len(prefix) + len(suffix)} "
            f"special tokens that {side.tokenizer} adds"
        )
    backend, note = _choose_backend(job, adapter)
    return PlannedSide(
        name=side.tokenizer.rstrip("/").rsplit("/", 1)[-1] if storage.exists(side.tokenizer) else side.tokenizer,
        content_fingerprint=adapter.content_fingerprint,
        environment=dict(sorted(adapter.environment.items())),
        context_length=side.context_length,
        add_special_tokens=side.add_special_tokens,
        prefix_ids=prefix,
        suffix_ids=suffix,
        pad_token_id=adapter.pad_token_id,
        vocab_size=adapter.vocab_size,
        route=adapter.route,
        route_reason=adapter.route_reason,
        backend=backend,
        backend_note=note,
    )


def _choose_backend(job: SideJob, adapter: TokenizerAdapter) -> tuple[str, str | None]:
    if job.backend == "tokenizers":
        return "tokenizers", None
    try:
        proof = prove_backend(adapter, job.sample)
    except TokenizerError as error:
        if job.backend == "fastokens":
            raise
        return "tokenizers", f"the fast backend refuses this tokenizer: {error}"
    if proof.equal:
        return FastokensBackend.name, None
    if job.backend == "fastokens":
        raise ConfigError(f"{job.label}: fastokens differs from the reference: {proof.first_difference}; use backend: auto")
    return "tokenizers", f"the fast backend differs on the data: {proof.first_difference}"


def _planned_encoder(adapter: TokenizerAdapter, planned: PlannedSide, proof_every: int, *, reference: bool) -> ProvenEncoder:
    """The encoder that the plan chose; reference: the reference's, after a difference."""
    fast = planned.backend == FastokensBackend.name and not reference
    return ProvenEncoder(adapter, backend=adapter.fast_backend() if fast else adapter.reference, proof_every=proof_every)


def _check_side(label: str, adapter: TokenizerAdapter, planned: PlannedSide) -> None:
    """Raises FingerprintMismatchError when the tokenizer at hand is not the one of the plan."""
    if adapter.content_fingerprint != planned.content_fingerprint:
        raise FingerprintMismatchError(
            f"{label}: the tokenizer {adapter.name} has the fingerprint {adapter.content_fingerprint}, "
            f"the plan was made with {planned.content_fingerprint}: it changed meanwhile; use another output"
        )


def same_side(student: PlannedSide, teacher: PlannedSide) -> bool:
    """True when the teacher sees exactly the student's ids, so that it needs no files."""
    return (
        teacher.content_fingerprint == student.content_fingerprint
        and teacher.add_special_tokens == student.add_special_tokens
        and teacher.context_length >= student.context_length
        and teacher.chat == student.chat
    )


class BackendDiffers(Exception):
    """The fast backend gave other ids than the reference: the part is to be done again. side: None for the student."""

    def __init__(self, side: int | None, difference: str) -> None:
        super().__init__(difference)
        self.side = side
        self.difference = difference


class LoadedSide:
    """One side ready to encode, as the plan describes it. capacity: content ids that its context holds."""

    def __init__(self, side: ModelSide, planned: PlannedSide, index: int | None, proof_every: int, *, reference: bool) -> None:
        self.index = index
        with stage("load tokenizers"):
            self.adapter = load_side(side)
        self.name = planned.name
        _check_side(reject_side(index), self.adapter, planned)
        self.encoder = _planned_encoder(self.adapter, planned, proof_every, reference=reference)
        self.spans = SpanFinder(self.adapter)
        self.prefix = np.array(planned.prefix_ids, dtype=np.int32)
        self.suffix = np.array(planned.suffix_ids, dtype=np.int32)
        self.capacity = planned.context_length - len(self.prefix) - len(self.suffix)

    def encode(self, texts: list[str]) -> FlatTokens:
        """Content ids of a new block of texts. Raises BackendDiffers."""
        self.spans.new_block()
        with stage("tokenize"):
            tokens = self.encoder.encode_flat(texts)
        if self.encoder.fell_back:
            raise BackendDiffers(self.index, str(self.encoder.difference))
        return tokens

    def wrapped(self, tokens: FlatTokens) -> FlatTokens:
        """With the specials around every row."""
        return tokens.with_specials(self.prefix, self.suffix)

    def num_special_in(self, tokens: FlatTokens) -> int:
        """Special ids among content ids."""
        return int(self.adapter.table.is_special[tokens.ids].sum())
