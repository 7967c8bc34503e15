"""Chat templates: sandboxed, and whatever they raise is the request's error (400)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcore.engine.chat_template import RESERVED, compile_template, render
from pdcore.engine.gguf import GGUFFile
from pdcore.engine.tokenizer import Tokenizer
from pdcore.errors import EngineError, InvalidRequest
from tests.unit.engine.files import tokenizer_metadata, write_gguf

MESSAGES = [{"role": "user", "content": "x"}]


def text_of(template: str, **given: object) -> str:
    return render(
        compile_template(template),
        MESSAGES,
        given,
        {"bos_token": "<s>"},
        add_generation_prompt=True,
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['absent'] + 'x' }}", "has no attribute 'absent'"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ 1e300 ** 9 }}", "out of range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10 ** 9) | list }}", "[Rr]ange"),
        ("{{ 'x' * 10 ** 18 }}", "MemoryError|memory|fit"),
        ("{{ strftime_now(5) }}", "str"),
        ("{{ [1] | tojson(indent='a', x=1) }}", "x"),
        ("{{ {}.popitem() }}", "."),
        ("{{ 'a' | int(base=99) + [] }}", "."),
        ("{{ messages | first | first | last | attr('__class__') + 1 }}", "."),
        ("{{ cycler() }}", "."),
        ("{% include 'x' %}", "."),
        ("{{ super() }}", "."),
        ("{{ messages | groupby('no') | map(attribute='z') | sum }}", "."),
    ],
)
@pytest.mark.parametrize("given", [{}, {"enable_thinking": True}])
def test_whatever_a_template_raises_is_the_requests_error(
    template: str, message: str, given: dict[str, object]
) -> None:
    """Templates are downloaded code: sandboxed, and a 500 would blame the server."""
    with pytest.raises(
        InvalidRequest, match=f"(?s)the model's chat template failed: .*{message}"
    ) as e:
        text_of(template, **given)
    assert e.value.field == ("chat_template_kwargs" if given else "messages")


def test_what_a_request_gives_is_what_breaks_it() -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs: the model's chat template"):
        text_of("{{ 10 // n }}", n=0)
    assert text_of("{{ 10 // n }}", n=3) == "3"


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_are_refused(tmp_path: Path, name: str) -> None:
    """Names of a method's own arguments among them: ``self`` was a TypeError, a 500."""
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", tokenizer_metadata(512), {}))
    tokenizer = Tokenizer.from_gguf(file)
    given: dict[str, object] = {name: 1}
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs.{name}: is set by the server"):
        text_of("x", **given)
    if name != "add_generation_prompt":
        with pytest.raises(InvalidRequest, match=rf"kwargs\.{name}: is set by the server"):
            tokenizer.render_chat(MESSAGES, **given)  # type: ignore[arg-type]


def test_a_requests_value_wins_over_the_models_token() -> None:
    assert text_of("{{ bos_token }}") == "<s>"
    assert text_of("{{ bos_token }}{{ args }}", bos_token="b", args=1) == "b1"


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 5000 + " }}", "{% break %}"])
def test_a_broken_template_is_the_models_error(source: str) -> None:
    with pytest.raises(EngineError, match="chat template is broken"):
        compile_template(source)
