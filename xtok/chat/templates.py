"""Chat templates, compiled once and rendered under a fixed clock: the reference renderer.

A template is code from a stranger, so it runs in Jinja's immutable sandbox with what transformers gives it and nothing more:
`tojson` that does not escape HTML, `raise_exception`, `strftime_now`, `namespace` and `dict` without dunder access, `break` and
`continue`, and the `generation` tag. For canonical messages the text equals `apply_chat_template(..., tokenize=False)`, save
that `strftime_now` reads `render_date` at midnight instead of the machine's clock, so that two days give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date, datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ReferenceRenderer", "TemplateFailure", "fixed_clock", "json_text", "template_context", "template_variables"]


class TemplateFailure(Exception):
    """A template raised: through `raise_exception`, or because the conversation does not fit it. Holds the first line only."""


class ReferenceRenderer:
    """One compiled template. `render` is a pure function of its arguments, the template and `render_date`."""

    name = "jinja"

    def __init__(self, source: str, *, render_date: date, special_tokens: Mapping[str, Any]) -> None:
        self.source = source
        self.render_date = render_date
        self.special_tokens = dict(special_tokens)
        self._template = _compiled(source, render_date)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any]) -> str:
        """The whole conversation, without a generation prompt. Raises TemplateFailure."""
        try:
            text = self._template.render(template_context(self.special_tokens, messages, tools, kwargs))
            text.encode()  # a template can write half of a surrogate pair; no tokenizer can read it
            return text
        except Exception as error:  # a template is foreign code: whatever it raises refuses the row, not the run
            raise TemplateFailure(_first_line(error)) from error


def template_context(
    special_tokens: Mapping[str, Any],
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The variables a template sees, in the order of precedence of `apply_chat_template`: arguments over special tokens."""
    return {
        **special_tokens,
        **kwargs,
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": False,
    }


@lru_cache(maxsize=64)
def _compiled(source: str, render_date: date) -> jinja2.Template:
    """Kept for the life of the process: compiling a production template takes as long as rendering a hundred chats."""
    return _environment(render_date).from_string(source)


@lru_cache(maxsize=64)
def template_variables(source: str) -> frozenset[str]:
    """Names the template reads from outside: tells which switches (`enable_thinking` ...) it knows."""
    tree = _environment(date(2000, 1, 1)).parse(source)
    return frozenset(node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "load")


def json_text(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The `tojson` filter of chat templates: no HTML escapes, non-ASCII as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def fixed_clock(render_date: date) -> Callable[[str], str]:
    """The `strftime_now` of a template: `render_date` at midnight, whatever the day."""
    moment = datetime(render_date.year, render_date.month, render_date.day)
    shown: dict[str, str] = {}  # templates ask for the same few formats in every row

    def strftime_now(format: str) -> str:
        text = shown.get(format)
        if text is None:
            text = moment.strftime(format)
            if len(shown) < 64:
                shown[format] = text
        return text

    return strftime_now


def _raise_exception(message: object) -> str:
    raise jinja2.TemplateError(str(message))


def _environment(render_date: date) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = json_text
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = fixed_clock(render_date)
    environment.globals["dict"] = _SafeDict()
    environment.globals["namespace"] = _SafeNamespace
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here it renders its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _SafeDict:
    """`dict(...)` without the class behind it, whose attributes would lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(jinja2.utils.Namespace):
    """`namespace(...)` that refuses underscore names, which reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        names = dict(*rest, **kwargs)
        for name in names:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the namespace attribute {name!r}")


def _first_line(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    kind = "" if isinstance(error, jinja2.TemplateError) and type(error) is jinja2.TemplateError else f"{type(error).__name__}: "
    return kind + text
