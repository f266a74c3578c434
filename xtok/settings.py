"""Checks of the numbers that a caller hands over."""

from __future__ import annotations

import operator
from typing import Any

from schemas.base import MAX_COUNT
from xtok.errors import ConfigError

__all__ = ["whole_number"]


def whole_number(name: str, value: Any, least: int | None = None, most: int | None = MAX_COUNT) -> int:
    """`value` as an int: an int of any library, never a fraction cut off nor a truth value. least, most: bounds, both included.

    Raises ConfigError naming the setting.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, got {value!r:.80}")
    if least is not None and number < least:
        raise ConfigError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ConfigError(f"{name} must be at most {most}, got {number}")
    return number
