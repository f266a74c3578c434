"""Models as training uses them: a body that gives hidden states and this rank's rows of the head, never logits.

Shapes: B samples, T positions, H hidden size, V vocabulary, Vl this rank's rows of the head, T_taps tapped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schemas.train_config import TeacherModel, TrainModel
from xtok.draft.capture import HiddenStateCapture
from xtok.draft.target import FrozenTarget
from xtok.errors import ConfigError, XtokError
from xtok.losses.cross_tokenizer import HiddenLogits
from xtok.losses.cross_tokenizer.collectives import SumHiddenGradient
from xtok.train.parallel import register_output, reshard, shard_module
from xtok.train.runtime import Runtime

__all__ = ["BodyOutput", "CausalBody", "Teacher", "check_head_size", "load_model"]


@dataclass(frozen=True)
class BodyOutput:
    """hidden `[B, T, H]` after the final norm; head `[Vl, H]`, both with the graph; context `[B, T, T_taps·H]`, detached, or None."""

    hidden: Tensor
    head: Tensor
    context: Tensor | None


register_output(BodyOutput)


def load_model(settings: TrainModel, *, dtype: torch.dtype, context_length: int) -> Any:
    """A causal language model on the CPU.

    ConfigError when it cannot be loaded, lacks weights or has some that are not finite, or has fewer positions than `context_length`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if settings.revision is not None:
        options["revision"] = settings.revision
    model: Any
    try:
        if settings.random_weights:
            config = AutoConfig.from_pretrained(settings.model, **options)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        else:
            loaded: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, output_loading_info=True, **options)
            model, loading = loaded
            _check_weights(settings.model, model, loading)
    except XtokError:
        raise
    except Exception as error:  # damaged files and impossible sizes raise whatever the library below happens to meet
        raise ConfigError(f"cannot load the model {settings.model}: {type(error).__name__}: {error}") from error
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and limit < context_length:
        raise ConfigError(f"{settings.model} has {limit} positions, but the dataset's rows have up to {context_length} tokens")
    return model


def _check_weights(name: str, model: Any, loading: dict[str, Any]) -> None:
    """The library below fills what the files lack with fresh random weights: here that is an incomplete download."""
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"{name} lacks {len(missing)} of its weights ({', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}): fetch it "
            "again, or set random_weights to start from fresh ones"
        )
    for key, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ConfigError(f"{name} has weights that are no finite numbers, first in {key}: take another checkpoint of it")


class CausalBody(nn.Module):
    """A causal language model without its logits: forward gives hidden states, this tp rank's head rows, and tapped layers.

    The gradient of the head rows is summed over `tp_group`, so that every tp rank holds the whole (possibly tied) head's gradient.
    Raises ConfigError for a model that is no decoder with a plain linear head, or does more to its logits than head and softcap.
    """

    def __init__(self, model: Any, *, tp_group: dist.ProcessGroup | None = None, tap_layer_ids: Sequence[int] = ()) -> None:
        super().__init__()
        self.model = model
        name = model.config.name_or_path or type(model).__name__
        try:
            self.target = FrozenTarget(model)
            self.target.check_head()
        except ValueError as error:
            raise ConfigError(f"{name} cannot be used: {error}") from error
        self.tap_layer_ids = list(tap_layer_ids)
        self._tp_group = tp_group
        vocab_size = self.target.vocab_size
        tp_rank, tp_size = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
        self.head_rows = slice(vocab_size * tp_rank // tp_size, vocab_size * (tp_rank + 1) // tp_size)

    def forward(self, input_ids: Tensor) -> BodyOutput:
        """input_ids int64 `[B, T]`, padded on the right: causal attention keeps padding away from every real token."""
        with HiddenStateCapture(self.target.layers, self.target.final_norm, self.tap_layer_ids) as capture:
            decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.model
            hidden = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
            context = capture.context_features() if self.tap_layer_ids else None
        weight = self.target.head.weight
        if self._tp_group is not None:
            weight = SumHiddenGradient.apply(weight, self._tp_group)  # type: ignore[no-untyped-call]
        return BodyOutput(hidden, weight[self.head_rows], context)


def check_head_size(settings: TrainModel, body: CausalBody, vocab_size: int) -> None:
    """ConfigError when the model has no logit for some id of its tokenizer."""
    if body.target.vocab_size < vocab_size:
        raise ConfigError(f"{settings.model} has {body.target.vocab_size} head rows for a tokenizer of {vocab_size} ids")


class Teacher:
    """A frozen teacher: rows of tokens in, `HiddenLogits` (or capped logits) out, no graph.

    vocab_size: ids of its tokenizer. Raises ConfigError when it cannot be loaded or used, or its head is smaller than that.
    """

    def __init__(self, settings: TeacherModel, runtime: Runtime, *, context_length: int, vocab_size: int) -> None:
        self.settings = settings
        self._device = runtime.device
        model = load_model(settings, dtype=getattr(torch, settings.dtype), context_length=context_length)
        model.eval().requires_grad_(False)
        self._body = CausalBody(model)
        check_head_size(settings, self._body, vocab_size)
        if not settings.offload:
            self._body.to(runtime.device)
        self._sharded = settings.shard and runtime.dp_size > 1
        if self._sharded:
            shard_module(self._body, self._body.target.layers, runtime.dp_mesh, precision=None)

    @torch.no_grad()
    def logits(self, input_ids: Tensor) -> HiddenLogits | Tensor:
        """`HiddenLogits`, or whole logits `[B, T, V]` for a model that caps them."""
        if self.settings.offload:
            self._body.to(self._device)
        out = self._body(input_ids)
        hidden, head = out.hidden, out.head
        if self._sharded:
            head = head.clone()  # the gathered storage goes back
            reshard([self._body])
        elif self.settings.offload:
            self._body.to("cpu")  # `head` keeps what it needs on the device
        target = self._body.target
        return HiddenLogits(hidden.to(head.dtype), head) if target.softcap is None else target.logits(hidden, head)
