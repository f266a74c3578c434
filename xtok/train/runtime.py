"""Who this rank is: process groups and device mesh (data parallel × tensor parallel).

Ranks that share a vocabulary (tp) are neighbours; they see the same rows. Ranks of one tp place are data parallel (dp).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from schemas.train_config import ParallelSettings
from xtok.errors import ConfigError

__all__ = ["Runtime", "start_runtime", "stop_runtime"]


@dataclass(frozen=True)
class Runtime:
    """This rank's place. dp_mesh: the data-parallel mesh of its tp place. tp_group: None when there is one tp rank.

    checkpoint_group: gloo, for the thread that writes checkpoints alone; what the step's thread agrees on meanwhile takes
    control_group: two threads that share one group would pair each other's messages.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    device: torch.device
    dp_mesh: DeviceMesh
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup | None
    checkpoint_group: dist.ProcessGroup
    control_group: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        """Whether this rank writes logs and files that are written once."""
        return self.rank == 0


def start_runtime(settings: ParallelSettings, *, timeout_seconds: float = 600.0) -> Runtime:
    """Join the process group that torchrun describes in the environment (alone without it), unless there is one; lay out the mesh.

    Raises ConfigError when the world size is no multiple of `tensor_parallel`, or CUDA is asked for and missing.
    """
    joined = dist.is_initialized()
    world_size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    tp_size = settings.tensor_parallel
    if world_size % tp_size:
        raise ConfigError(f"parallel.tensor_parallel {tp_size} does not divide the world size {world_size}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("parallel.device is cuda, but torch sees no CUDA device; use cpu or auto")
    use_cuda = settings.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cpu")
    if use_cuda:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {local_rank} of this machine has no device: there are {torch.cuda.device_count()}; lower parallel.processes"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not joined:
        _join(world_size, use_cuda, timeout_seconds)
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (world_size // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
    return Runtime(
        rank=rank,
        world_size=world_size,
        dp_rank=rank // tp_size,
        dp_size=world_size // tp_size,
        tp_rank=rank % tp_size,
        tp_size=tp_size,
        device=device,
        dp_mesh=mesh["dp"],
        dp_group=mesh.get_group("dp"),
        tp_group=mesh.get_group("tp") if tp_size > 1 else None,
        checkpoint_group=dist.new_group(backend="gloo"),
        control_group=dist.new_group(backend="gloo"),
    )


def _join(world_size: int, use_cuda: bool, timeout_seconds: float) -> None:
    """Join the group that the environment describes; gloo stands beside NCCL, since asynchronous checkpoints talk from the CPU."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0" if world_size == 1 else "29500")
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", timeout=timedelta(seconds=timeout_seconds))


def stop_runtime() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
