"""What the configurations share: frozen, no field but the declared ones, no number that is none; and which mistakes to tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

__all__ = ["MAX_COUNT", "Frozen", "mistakes_of"]

MAX_COUNT = 2**31 - 1  # of tokens or rows; more is a unit mistaken, or a tokenizer's "no limit"


class Frozen(BaseModel):
    """Base of every configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads `yes` and `on` as true, and pydantic would take true for 1."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            kinds = get_args(annotation) or (annotation,)
            if bool not in kinds and (int in kinds or float in kinds):
                raise ValueError("Input should be a number, not true or false")
        return value


def mistakes_of(error: ValidationError) -> list[Any]:
    """The error's problems, without the length of a list that is too short only because items with mistakes of their own are left
    out of it."""
    problems: list[Any] = list(error.errors())
    places: Sequence[tuple[int | str, ...]] = [problem["loc"] for problem in problems]

    def follows(problem: Any) -> bool:
        own = problem["loc"]
        return problem["type"] == "too_short" and any(len(place) > len(own) and place[: len(own)] == own for place in places)

    return [problem for problem in problems if not follows(problem)]
