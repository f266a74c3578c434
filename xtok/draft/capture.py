"""Capture of a target's hidden states by hooks: the chosen layers and the final one, nothing else is kept.

Works under `torch.no_grad`, and under FSDP2 (`fully_shard`), which shards parameters and leaves layer outputs whole.

Shapes: B samples, S sequence length, H hidden size, T tapped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from xtok.draft.blocks import EMBEDDING_LAYER_ID

__all__ = ["HiddenStateCapture"]


class HiddenStateCapture:
    """Context manager; inside it each forward of the target overwrites what was captured, at its end every hook is gone.

    Args:
        layers: the target's decoder layers.
        final_norm: the target's final norm, whose output its head reads.
        layer_ids: -1 the embedding output (what enters the first layer), j the output of layer j before any final norm.
    """

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module, layer_ids: Sequence[int]) -> None:
        self._layers, self._final_norm, self._layer_ids = layers, final_norm, list(layer_ids)
        self._handles: list[RemovableHandle] = []
        self._captured: dict[int, Tensor] = {}
        self._final: Tensor | None = None

    def __enter__(self) -> HiddenStateCapture:
        for layer_id in self._layer_ids:
            if layer_id == EMBEDDING_LAYER_ID:
                self._handles.append(self._layers[0].register_forward_pre_hook(self._take_input, with_kwargs=True))
            else:
                self._handles.append(self._layers[layer_id].register_forward_hook(self._take_output(layer_id)))
        self._handles.append(self._final_norm.register_forward_hook(self._take_final))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._captured.clear()
        self._final = None

    def context_features(self) -> Tensor:
        """[B, S, T * H] detached, in the order of `layer_ids`.

        Raises:
            RuntimeError: no forward ran inside the context.
        """
        missing = [layer_id for layer_id in self._layer_ids if layer_id not in self._captured]
        if missing:
            raise RuntimeError(f"target layers {missing} were not captured: run the target inside the capture")
        return torch.cat([self._captured[layer_id] for layer_id in self._layer_ids], dim=-1)

    def final_hidden(self) -> Tensor:
        """[B, S, H] detached output of the final norm.

        Raises:
            RuntimeError: no forward ran inside the context.
        """
        if self._final is None:
            raise RuntimeError("the target's final norm was not captured: run the target inside the capture")
        return self._final

    def _take_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._captured[EMBEDDING_LAYER_ID] = (args[0] if args else kwargs["hidden_states"]).detach()

    def _take_output(self, layer_id: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._captured[layer_id] = (output if isinstance(output, Tensor) else output[0]).detach()

        return hook

    def _take_final(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._final = output.detach()
