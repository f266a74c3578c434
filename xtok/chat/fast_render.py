"""Rendering fast and provably the same: `minijinja` behind the reference renderer.

`ProvenRenderer` gives the reference's text for every row. It takes minijinja only where that is proven:
- a template minijinja cannot compile, or that renders a sample differently (`prove`), goes to Jinja altogether;
- a row that holds what the engines treat differently (`engines_differ`: a float, an odd blank) goes to Jinja;
- a row minijinja refuses is decided by Jinja, so the reason on record is the reference's;
- one row in `proof_every` is rendered by both; the first difference sets `difference`, sends everything after to Jinja, and a caller
  that renders whole parts renders the part again (`fell_back`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any, Final, Literal

import minijinja

from xtok.chat.conversation import engines_differ
from xtok.chat.templates import ReferenceRenderer, TemplateFailure, fixed_clock, json_text, template_context

__all__ = ["FastRenderer", "ProvenRenderer"]

RenderArguments = tuple[list[dict[str, Any]], list[dict[str, Any]] | None, Mapping[str, Any]]

# minijinja knows no `generation` tag. `if true` has the same body and the same white-space control.
_GENERATION: Final = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


class FastRenderer:
    """One template in minijinja. Construction raises TemplateFailure where minijinja cannot compile it."""

    name = "minijinja"

    def __init__(self, source: str, *, render_date: date, special_tokens: Mapping[str, Any]) -> None:
        self.special_tokens = dict(special_tokens)
        self._environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, pycompat=True)
        self._environment.add_filter("tojson", json_text)
        self._environment.add_test("iterable", _is_iterable)  # minijinja's own says yes to none
        self._environment.add_test("sequence", _is_sequence)  # and no to text and objects
        self._environment.add_global("raise_exception", _raise)
        self._environment.add_global("strftime_now", fixed_clock(render_date))
        portable = _GENERATION.sub(lambda m: m[1] + ("endif" if m[2] else "if true") + m[3], source)
        try:
            self._environment.add_template("chat", portable)
        except Exception as error:
            raise TemplateFailure(str(error).splitlines()[0]) from error

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any]) -> str:
        """The whole conversation, without a generation prompt. Raises TemplateFailure."""
        try:
            return self._environment.render_template("chat", **template_context(self.special_tokens, messages, tools, kwargs))
        except Exception as error:
            raise TemplateFailure(str(error).splitlines()[0]) from error


class ProvenRenderer:
    """The reference's text, by minijinja where proven equal.

    engine "auto" tries minijinja, "jinja" is the reference alone. `difference` says why minijinja is out of use, or is None.
    """

    def __init__(
        self,
        source: str,
        *,
        render_date: date,
        special_tokens: Mapping[str, Any],
        engine: Literal["auto", "jinja"] = "auto",
        proof_every: int = 200,
    ) -> None:
        if proof_every < 1:
            raise ValueError(f"proof_every must be at least 1, got {proof_every}")
        self.reference = ReferenceRenderer(source, render_date=render_date, special_tokens=special_tokens)
        self.proof_every = proof_every
        self.difference: str | None = None
        self.num_checked = 0
        self._count = 0
        self._fast: FastRenderer | None = None
        if engine == "auto":
            try:
                self._fast = FastRenderer(source, render_date=render_date, special_tokens=special_tokens)
            except TemplateFailure as error:
                self.difference = f"minijinja cannot compile the template: {error}"

    @property
    def name(self) -> str:
        """The engine in use now."""
        return self.reference.name if self._fast is None else self._fast.name

    def prove(self, rows: Iterable[RenderArguments]) -> bool:
        """Render each row by both engines. A row minijinja renders otherwise puts it out of use; so do refusals of more than half the rows,
        which cost time and nothing else, since Jinja decides those rows. Returns whether minijinja stays in use."""
        num_rows = num_refused = 0
        for messages, tools, kwargs in rows:
            if self._fast is None:
                return False
            if engines_differ(messages, tools, kwargs):
                continue
            num_rows += 1
            num_refused += not self._compare(messages, tools, kwargs)
        if self._fast is not None and num_refused * 2 > num_rows:
            self._stop(f"minijinja refuses {num_refused} of {num_rows} sample rows")
        return self._fast is not None

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any], *, by_reference: bool
    ) -> str:
        """The reference's text; by_reference: `engines_differ` of the arguments. TemplateFailure with the reference's reason."""
        if self._fast is None or by_reference:
            return self.reference.render(messages, tools, kwargs)
        self._count += 1
        if self._count % self.proof_every == 0:
            self._compare(messages, tools, kwargs)
            return self.reference.render(messages, tools, kwargs)
        try:
            return self._fast.render(messages, tools, kwargs)
        except TemplateFailure:
            return self.reference.render(messages, tools, kwargs)

    def _compare(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any]) -> bool:
        """Whether minijinja renders the row at all; what it renders must be the reference's text."""
        assert self._fast is not None
        self.num_checked += 1
        expected, got = (_outcome(engine, messages, tools, kwargs) for engine in (self.reference, self._fast))
        if got is not None and expected != got:
            self._stop(_describe(expected, got))
        return got is not None or expected is None

    def _stop(self, difference: str) -> None:
        self.difference = difference
        self._fast = None


def _outcome(
    engine: ReferenceRenderer | FastRenderer, messages: list[dict[str, Any]], tools: Any, kwargs: Mapping[str, Any]
) -> str | None:
    try:
        return engine.render(messages, tools, kwargs)
    except TemplateFailure:
        return None


def _describe(expected: str | None, got: str) -> str:
    if expected is None:
        return f"jinja refuses a row that minijinja renders {got[:40]!r}"
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    return f"at character {at}: jinja {expected[at : at + 40]!r}, minijinja {got[at : at + 40]!r}"


def _is_iterable(value: object) -> bool:
    return hasattr(value, "__iter__")


def _is_sequence(value: object) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _raise(message: object) -> str:
    raise minijinja.TemplateError(str(message))
