"""Settings of the cross-tokenizer distillation loss."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

__all__ = ["CrossTokenizerDistillationConfig", "DistillationMode"]

DistillationMode = Literal["p_kl", "gold", "h_kl", "alm"]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Beyond these a float32 softmax is one-hot or flat, and the loss's factor of temperature squared overflows or vanishes.
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]


class CrossTokenizerDistillationConfig(BaseModel):
    """What the loss compares, how teachers are combined, and how much work is in memory at once.

    mode: one for all teachers, or a list with one entry a teacher (an entry of a same-tokenizer teacher is not used).
    vocab_topk: how many teacher columns P-KL and the same-tokenizer KL compare; None = all that can be reached.
    token_tile_size: tokens whose logits exist at once (a chunk longer than that is a tile of its own).
    teacher_weighting: "fixed" uses `teacher_weights` (default 1 each); the others weigh each micro-batch by the teachers' own
        cross-entropy, entropy or highest probability with factor `teacher_weighting_alpha`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: DistillationMode | list[DistillationMode] = "p_kl"
    chunk_reduction: Literal["mixture", "geometric", "nemo"] = "mixture"
    temperature: Temperature = 1.0
    vocab_topk: PositiveInt | None = 8192
    uncommon_topk: PositiveInt = 8192
    relaxed_threshold: Annotated[float, Field(gt=0, le=1)] = 0.6
    exact_match_only: bool = False
    reverse_kl: bool = False
    alm_temperature: Temperature = 1.0
    alm_epsilon: Annotated[float, Field(gt=0, lt=0.5)] = 1e-6
    teacher_combination: Literal["sum", "averaged_logits", "select_teacher"] = "sum"
    teacher_weighting: Literal["fixed", "cross_entropy", "entropy", "max_probability"] = "fixed"
    teacher_weights: list[NonNegative] | None = None
    teacher_weighting_alpha: Positive = 1.0
    kd_weight: NonNegative = 1.0
    ce_weight: NonNegative = 0.1
    dynamic_scaling: bool = False
    token_tile_size: PositiveInt = 128

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.teacher_weights is not None and self.teacher_weighting != "fixed":
            raise ValueError(
                f"teacher_weights are fixed weights, but teacher_weighting is {self.teacher_weighting!r}: leave one of them out"
            )
        if self.teacher_combination == "averaged_logits" and self.teacher_weights is not None and sum(self.teacher_weights) == 0:
            raise ValueError(f"teacher_weights {self.teacher_weights} sum to zero: averaged_logits has nothing to average")
        return self

    def modes(self, num_teachers: int) -> list[DistillationMode]:
        """One mode a teacher. Raises ValueError when the list has another length."""
        if isinstance(self.mode, str):
            return [self.mode] * num_teachers
        if len(self.mode) != num_teachers:
            raise ValueError(f"mode lists {len(self.mode)} entries for {num_teachers} teachers")
        return list(self.mode)
