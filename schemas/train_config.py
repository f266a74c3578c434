"""What a user may ask of training: one frozen, typed configuration.

Units are in the names (`_tokens`, `_steps`, `_rows`). Relative paths are relative to the current directory of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from schemas.base import Frozen

__all__ = [
    "CheckpointSettings",
    "DraftSettings",
    "EvaluationSettings",
    "Objectives",
    "OptimizerSettings",
    "ParallelSettings",
    "TeacherModel",
    "TrainConfig",
    "TrainModel",
]


MAX_PORT = 65_535
MAX_LEARNING_RATE = 1e30  # AdamW's step must still be a float32


def _check_finite(value: Any) -> Any:
    """A free-form object without an infinity or a NaN anywhere: neither JSON nor a digest could hold one."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"holds {value}, which is no finite number")
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _check_finite(inner)
    return value


FreeForm = Annotated[dict[str, Any], AfterValidator(_check_finite)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class TrainModel(Frozen):
    """A model to train or to learn from.

    model: a folder or hub id (then `revision` pins it). tokenizer: where its tokenizer is; default the model's own folder.
    random_weights: build the model from its config.json alone, with fresh weights.
    """

    model: str = Field(min_length=1)
    tokenizer: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    random_weights: bool = False


class TeacherModel(TrainModel):
    """A teacher, frozen. Its place in the list is its `teacher_index` in the dataset.

    dtype: of its weights. offload: keep it on the CPU between uses. shard: divide its weights over the data-parallel ranks; one of the
    two, for teachers that do not fit beside the student.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    offload: bool = False
    shard: bool = False

    @model_validator(mode="after")
    def _one_way_to_save_memory(self) -> Self:
        if self.offload and self.shard:
            raise ValueError(f"teacher {self.model}: choose offload or shard, not both")
        return self


class Objectives(Frozen):
    """Weights of the parts of the loss; None leaves a part out. Without `distill` and `ce` the student is frozen."""

    distill: float | None = Field(default=1.0, ge=0)
    ce: float | None = Field(default=0.1, ge=0)
    draft: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if not any((self.distill, self.ce, self.draft)):
            raise ValueError("objectives leave nothing to train: give at least one of distill, ce, draft a weight above 0")
        return self


class DraftSettings(Frozen):
    """The speculative-decoding draft. mask_token_id: a reserved id of the student that is neither padding nor end of text.

    settings: further fields of `xtok.draft.config.DFlashConfig` or `DSparkConfig`. load: start from this exported draft.
    """

    kind: Literal["dflash", "dspark"] = "dflash"
    mask_token_id: int | None = Field(default=None, ge=0)
    num_draft_layers: int = Field(default=2, ge=1)
    block_size: int | None = Field(default=None, ge=2)
    num_anchors: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=6e-4, gt=0, le=MAX_LEARNING_RATE)
    settings: FreeForm = Field(default_factory=dict)
    load: str | None = None

    @model_validator(mode="after")
    def _told_once(self) -> Self:
        twice = sorted({"mask_token_id", "num_draft_layers", "block_size"} & set(self.settings))
        if twice:
            raise ValueError(f"settings hold {twice}: give {' and '.join(f'draft.{name}' for name in twice)} instead")
        return self


class OptimizerSettings(Frozen):
    """AdamW and its schedule: linear warm-up, then `schedule` down to `min_learning_rate_ratio` of the peak at the last step."""

    learning_rate: float = Field(default=2e-5, gt=0, le=MAX_LEARNING_RATE)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    clip_norm: float | None = Field(default=1.0, gt=0)


class CheckpointSettings(Frozen):
    """When to save, and what to keep. The end is always saved.

    every_steps: None for the end only. keep_last: checkpoints kept, newest first. keep_best: where there is evaluation, also save and
    keep the step of the lowest evaluation loss so far (`checkpoints/best.json` names it). asynchronous: write while training goes on.
    """

    every_steps: int | None = Field(default=100, ge=1)
    keep_last: int = Field(default=2, ge=1)
    keep_best: bool = True
    asynchronous: bool = True


class EvaluationSettings(Frozen):
    """A held-out dataset, evaluated at the start, every `every_steps` and at the end."""

    dataset: str = Field(min_length=1)
    every_steps: int | None = Field(default=100, ge=1)
    max_rows: int | None = Field(default=None, ge=1)


class ParallelSettings(Frozen):
    """The ranks and their layout.

    processes: ranks of one machine. num_nodes: machines, which meet at `rendezvous` ("host:port" of one of them; the same everywhere).
    tensor_parallel: neighbouring ranks that share one vocabulary; the rest is data parallel. device: auto takes CUDA (NCCL) where it
    is, else the CPU (gloo).
    """

    processes: int = Field(default=1, ge=1)
    num_nodes: int = Field(default=1, ge=1)
    rendezvous: str | None = None
    tensor_parallel: int = Field(default=1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _layout_divides(self) -> Self:
        world_size = self.processes * self.num_nodes
        if world_size % self.tensor_parallel:
            raise ValueError(f"tensor_parallel {self.tensor_parallel} does not divide the {world_size} ranks")
        if self.num_nodes > 1 and self.rendezvous is None:
            raise ValueError(f"num_nodes {self.num_nodes} needs rendezvous: host:port of the first machine")
        host, _, port = (self.rendezvous or "node0:29500").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
            raise ValueError(f"rendezvous {self.rendezvous!r} should read host:port, for example node0:29500")
        return self


class TrainConfig(Frozen):
    """From a published dataset to a trained student and a trained draft.

    teachers: one for each teacher of the dataset, in its order; may be empty without `distill`.
    output: folder of the run: checkpoints/, metrics.jsonl, tensorboard/, export/. A run goes on from its newest checkpoint.
    batch_tokens: student tokens of one global batch: it takes rows of the dataset's order until they are reached, the last of an
    epoch what is left. accumulation: micro-batches a rank and step. steps: optimizer steps.
    distillation: further fields of `CrossTokenizerDistillationConfig` (its two weights come from `objectives`).
    projections: one Parquet file a teacher, None where the dataset's own is used or none is needed.
    precision: of the student's and draft's computation; master weights are float32.
    cache_folder, cache_bytes: where files of a remote dataset are kept on this machine (default: the user's cache, shared by all
    processes), and how many bytes at most; 0 keeps none.
    """

    student: TrainModel
    teachers: tuple[TeacherModel, ...] = ()
    dataset: str = Field(min_length=1)
    output: str = Field(min_length=1)
    objectives: Objectives = Objectives()
    distillation: FreeForm = Field(default_factory=dict)
    projections: tuple[str | None, ...] | None = None
    draft: DraftSettings = DraftSettings()

    batch_tokens: int = Field(default=65_536, ge=1)
    accumulation: int = Field(default=1, ge=1)
    steps: int = Field(default=1000, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**32)
    precision: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    shuffle_row_groups: int = Field(default=8, ge=1)
    cache_folder: str | None = Field(default=None, min_length=1)
    cache_bytes: int = Field(default=20_000_000_000, ge=0)

    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings | None = None
    parallel: ParallelSettings = ParallelSettings()
    log_every_steps: int = Field(default=1, ge=1)
    export_student: bool = True

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.objectives.distill and not self.teachers:
            raise ValueError(
                "objectives.distill needs teachers, one for each teacher of the dataset; to train without, make it null"
            )
        if "://" in self.output:
            raise ValueError(f"output {self.output!r} must be a local or mounted folder: checkpoints are moved into place there")
        if self.accumulation > self.batch_tokens:
            raise ValueError(f"accumulation {self.accumulation} is more micro-batches than the {self.batch_tokens} batch_tokens")
        given = {"kd_weight", "ce_weight"} & set(self.distillation)
        if given:
            raise ValueError(f"distillation sets {sorted(given)}: the weights are objectives.distill and objectives.ce")
        if self.projections is not None and len(self.projections) != len(self.teachers):
            raise ValueError(
                f"projections lists {len(self.projections)} entries for {len(self.teachers)} teachers: give one each"
            )
        if self.objectives.draft and self.draft.mask_token_id is None and self.draft.load is None:
            raise ValueError("objectives.draft needs draft.mask_token_id: a reserved id of the student's vocabulary")
        return self

    @property
    def trains_student(self) -> bool:
        """Whether the student's weights change."""
        return bool(self.objectives.distill or self.objectives.ce)

    @property
    def trains_draft(self) -> bool:
        """Whether there is a draft."""
        return bool(self.objectives.draft)
