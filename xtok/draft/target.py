"""A Hugging Face decoder-only model as the target of a draft: features, embedding and head, all frozen for the draft.

Nothing of the model is changed, copied or registered; the draft works with the target's own modules, so that scaled embeddings and
softcapped logits are the target's.

Shapes: B samples, S sequence length, D documents packed in a row, H hidden size, V vocabulary size, T tapped layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtok.draft.anchors import document_counts
from xtok.draft.capture import HiddenStateCapture
from xtok.draft.config import DraftConfig
from xtok.errors import ConfigError
from xtok.losses.dspark_kernel import project

__all__ = ["FrozenTarget", "TargetFeatures"]


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What one target forward leaves for the draft, detached."""

    context: Tensor  # [B, S, T * H]
    final_hidden: Tensor  # [B, S, H], what the head reads


class FrozenTarget:
    """Access to a target model.

    Args:
        model: a causal language model with a list of decoder layers, a final norm and a linear head without bias.

    Raises:
        ConfigError: parts that cannot be found, or a head with a bias.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config: Any = _text_config(model)
        decoder = self.model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "model", None)
        self.layers = _part(model, decoder, "layers", nn.ModuleList)
        self.final_norm = _part(model, decoder, "norm", nn.Module)
        self.embedding: Any = self.model.get_input_embeddings()
        self.head: Any = self.model.get_output_embeddings()
        if not isinstance(self.head, nn.Linear) or self.head.bias is not None:
            raise ConfigError(f"{type(model).__name__} has no bias-free linear head: its logits cannot be made tile by tile")
        cap = getattr(self.config, "final_logit_softcapping", None)
        self.softcap: float | None = None if cap is None else float(cap)
        self._arguments: set[str] = set(inspect.signature(self.model.forward).parameters)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def keeps_every_position(self) -> bool:
        """Whether its cache can give tokens back: a recurrent state (linear attention, convolutions) cannot."""
        kinds = set(getattr(self.config, "layer_types", None) or [])
        return kinds <= {"full_attention", "sliding_attention", "chunked_attention"}

    @property
    def hidden_size(self) -> int:
        return int(self.head.weight.shape[1])

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])

    @property
    def device(self) -> torch.device:
        device: torch.device = self.head.weight.device
        return device

    def check_draft(self, config: DraftConfig) -> None:
        """Refuse a draft made for another target.

        Raises:
            ConfigError: hidden size, vocabulary, number of layers or mask token do not fit, with both values.
        """
        embedding_rows = int(self.embedding.weight.shape[0])
        for name, drafts, targets in (
            ("hidden_size", config.hidden_size, self.hidden_size),
            ("vocab_size", config.vocab_size, self.vocab_size),
            ("num_target_layers", config.num_target_layers, self.num_layers),
        ):
            if drafts != targets:
                raise ConfigError(
                    f"the draft was made for a target with {name} {drafts}, {type(self.model).__name__} has {targets}"
                )
        if config.mask_token_id >= embedding_rows:
            raise ConfigError(f"mask_token_id {config.mask_token_id} is beyond the target's {embedding_rows} embedding rows")

    def check_tokens(self, token_ids: Tensor) -> None:
        """Refuse ids that the target has no embedding for (labels of -100, a tokenizer with more tokens than the model).

        Raises:
            ValueError: an id outside the embedding's rows.
        """
        low, high = token_ids.aminmax()
        embedding_rows = int(self.embedding.weight.shape[0])
        if int(low) < 0 or int(high) >= embedding_rows:
            raise ValueError(
                f"token ids {int(low)}..{int(high)} go beyond the target's {embedding_rows} embedding rows: "
                "were they made with another tokenizer, or padded with a negative id?"
            )

    @torch.no_grad()
    def check_head(self) -> None:
        """Prove on four tokens that this class computes the target's logits (an unknown scale or cap would train a wrong draft).

        Raises:
            ConfigError: the target's own logits differ.
        """
        ids = torch.arange(4, device=self.device).unsqueeze(0) % self.vocab_size
        with self._capture([]) as capture:
            expected = self.model(input_ids=ids, use_cache=False).logits.float()
            got = self.logits(capture.final_hidden()).float()
        tolerance = 1e-4 if self.head.weight.dtype in (torch.float32, torch.float64) else 5e-2
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
            raise ConfigError(
                f"{type(self.model).__name__} does more to its logits than head and softcap (largest difference "
                f"{float((got - expected).abs().max()):.3g}): such targets are not supported"
            )

    @torch.no_grad()
    def features(self, input_ids: Tensor, layer_ids: Sequence[int], *, seq_lens: Tensor | None = None) -> TargetFeatures:
        """Run the target once and take its features; logits are made for one position only.

        Args:
            input_ids: int64 [B, S], padded on the right (causal attention never looks there).
            layer_ids: layers to tap.
            seq_lens: int64 [B, D] document lengths of packed rows: each document runs as a row of its own, so that any target
                sees exactly what it would see unpacked. Rows past the last document are zero.

        Raises:
            ValueError: document lengths that are negative or do not fit into S.
        """
        if seq_lens is None:
            return self._run(input_ids, layer_ids)
        document_counts(seq_lens=seq_lens, seq_len=input_ids.shape[1])  # refuses lengths that do not fit
        starts = seq_lens.cumsum(1) - seq_lens
        places = [
            (row, start, length)
            for row, (row_starts, lengths) in enumerate(zip(starts.tolist(), seq_lens.tolist(), strict=True))
            for start, length in zip(row_starts, lengths, strict=True)
            if length
        ]
        documents = input_ids.new_zeros(max(len(places), 1), max((length for _, _, length in places), default=1))
        for i, (row, start, length) in enumerate(places):
            documents[i, :length] = input_ids[row, start : start + length]
        separate = self._run(documents, layer_ids)
        packed = []
        for values in (separate.context, separate.final_hidden):
            out = values.new_zeros(*input_ids.shape, values.shape[-1])
            for i, (row, start, length) in enumerate(places):
                out[row, start : start + length] = values[i, :length]
            packed.append(out)
        return TargetFeatures(*packed)

    @torch.no_grad()
    def step(self, input_ids: Tensor, layer_ids: Sequence[int], cache: Any | None) -> tuple[Tensor, Tensor]:
        """Logits [n, V] and features [1, n, T * H] of the next n tokens [1, n] after what `cache` holds (None: from the start)."""
        extra: dict[str, Any] = {"use_cache": False}
        if cache is not None:
            extra = {"use_cache": True, "cache" if "cache" in self._arguments else "past_key_values": cache}
        with self._capture(layer_ids) as capture:
            logits = self.model(input_ids=input_ids, **extra).logits
            features = capture.context_features() if layer_ids else capture.final_hidden()[..., :0]
            return logits[0].float(), features

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's own embedding, scaling included: int64 [...] -> [..., H]."""
        weight = self.embedding.weight
        if isinstance(weight, DTensor):
            full = {"weight": weight.full_tensor()}
            out: Tensor = torch.func.functional_call(self.embedding, full, (token_ids,))
            return out
        embedded: Tensor = self.embedding(token_ids)
        return embedded

    def head_weight(self) -> Tensor:
        """[V, H] detached; gathered when the target is sharded."""
        weight: Tensor = self.head.weight.detach()
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    def logits(self, hidden: Tensor, head_weight: Tensor | None = None) -> Tensor:
        """Head and softcap: [..., H] -> [..., V] in fp32 (fp64 for fp64 inputs)."""
        weight = self.head_weight() if head_weight is None else head_weight
        flat = project(hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype), weight)
        return self.cap(flat).view(*hidden.shape[:-1], weight.shape[0])

    def cap(self, logits: Tensor) -> Tensor:
        """The target's softcap, if it has one."""
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def _capture(self, layer_ids: Sequence[int]) -> HiddenStateCapture:
        return HiddenStateCapture(self.layers, self.final_norm, layer_ids)

    def _run(self, input_ids: Tensor, layer_ids: Sequence[int]) -> TargetFeatures:
        extra = {"logits_to_keep": 1} if "logits_to_keep" in self._arguments else {}
        with self._capture(layer_ids) as capture:
            self.model(input_ids=input_ids, use_cache=False, **extra)
            return TargetFeatures(capture.context_features(), capture.final_hidden())


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        raise ConfigError(f"{type(model).__name__} has no config: the target must be a Hugging Face causal language model")
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _part(model: nn.Module, decoder: Any, name: str, kind: type) -> Any:
    part = getattr(decoder, name, None)
    if not isinstance(part, kind):
        raise ConfigError(f"no decoder `{name}` found in {type(model).__name__}: only decoder-only models of the Llama shape fit")
    return part
