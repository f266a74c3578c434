"""Data parallelism by FSDP2, activation checkpointing, and what they leave for checkpoints: parameters under stable names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import register_pytree_node

from xtok.draft.model import BlockStates

# Outputs here are views that nothing changes in place (a slice of the head), which is all the warning is about.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")

__all__ = [
    "checkpoint_activations",
    "register_output",
    "reshard",
    "set_gradient_sync",
    "shard_module",
    "trainable_parameters",
]


def register_output(kind: type) -> None:
    """Let PyTorch look into a dataclass that a sharded module returns: FSDP2 hooks its backward to the tensors it finds in there, and
    without them (before torch 2.13) a module's gradients would silently never be reduced."""
    names = [field.name for field in fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def unflatten(values: Iterable[Any], _: None) -> Any:
        return kind(**dict(zip(names, values, strict=True)))

    register_pytree_node(kind, flatten, unflatten)


register_output(BlockStates)


def shard_module(module: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, *, precision: torch.dtype | None) -> None:
    """Divide the parameters of `layers` one by one, then the rest of `module`, over `mesh`. Gradients are averaged over it.

    precision: dtype of computation and of gathered parameters (reductions stay float32); None = the parameters' own.
    """
    policy = (
        MixedPrecisionPolicy() if precision is None else MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def set_gradient_sync(modules: Iterable[nn.Module], is_last: bool) -> None:
    """Reduce gradients only in the last micro-batch of a step."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Free whole parameters that a forward without backward left gathered."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def checkpoint_activations(model: Any) -> None:
    """Make a layer's activations again in backward instead of keeping them."""
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the newer name of the same
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def trainable_parameters(student: nn.Module, draft: nn.Module | None) -> dict[str, nn.Parameter]:
    """`student.<name>` and `draft.<name>` -> parameter, those with a gradient only; after sharding the objects stay the same."""
    modules = {"student": student} if draft is None else {"student": student, "draft": draft}
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
