"""A model's chat template: downloaded code, run in a sandbox on what a request sent.

Whatever it raises is the request's error, never the server's: the template sees the
request's messages and ``chat_template_kwargs``, and may do anything with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, NoReturn

from pdcore.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    import jinja2

#: A message as the chat endpoints receive it: role, content, perhaps more.
Message = Mapping[str, object]

#: Names that the server sets, or that jinja2 means something else by.
RESERVED: Final = ("add_generation_prompt", "messages", "self", "tokenize")


def compile_template(source: str) -> jinja2.Template:
    """Sandboxed, and with the names templates of the field expect (raise_exception,
    strftime_now, tojson without HTML escapes). Raises EngineError for a broken template."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as exc:
        raise EngineError(
            "the chat template needs jinja2: run `pip install 'pdcore[model]'`"
        ) from exc

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError, SyntaxError, MemoryError) as exc:
        raise EngineError(f"the model's chat template is broken: {exc}") from exc


def render(
    template: jinja2.Template,
    messages: Sequence[Message],
    given: Mapping[str, object],
    special_texts: Mapping[str, str],
    *,
    add_generation_prompt: bool,
) -> str:
    """Text of a conversation; ``given`` is the request's ``chat_template_kwargs``.

    Raises InvalidRequest naming ``chat_template_kwargs`` when a reserved name is among
    them or rendering with them fails, ``messages`` when it fails without any.
    """
    from jinja2 import TemplateError

    for name in RESERVED:
        if name in given:
            raise InvalidRequest(f"chat_template_kwargs.{name}", "is set by the server")
    variables = {
        **special_texts,
        **given,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        # One mapping, not keywords: a request's names must not meet render's own.
        return template.render(variables)
    except (
        TemplateError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        NameError,
        RuntimeError,  # RecursionError too
        StopIteration,
        TypeError,
        ValueError,
    ) as exc:
        field = "chat_template_kwargs" if given else "messages"
        why = str(exc) or type(exc).__name__
        raise InvalidRequest(field, f"the model's chat template failed: {why}") from exc
