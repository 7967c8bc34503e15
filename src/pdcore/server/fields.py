"""Field names of a request: what is known, what is known but not supported, what is a typo.

Rule (D47a: unknown fields were dropped in silence):
- a field we know but do not support is accepted with the value that changes nothing and is
  a 400 that names it with any other;
- a name we do not know is a 400 if it looks like a misspelt known one, with the suggestion;
- any other name is ignored, as OpenAI-compatible servers do: clients add their own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from pdcore.errors import InvalidRequest

#: Known, not supported: field -> values that leave the result as it is. Null always does.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "top_a": (0,),
    "typical_p": (1,),
    "priority": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": ({},),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "lora_path": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}

#: Known and without effect on the result, whatever their value.
WITHOUT_EFFECT: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)

#: More names than any client sends; each unknown one is compared with all known ones.
_MAX_FIELDS: Final = 128
_MAX_NAME: Final = 64
_LIKENESS: Final = 0.8


def check_names(fields: Mapping[str, msgspec.Raw], known: Iterable[str]) -> None:
    """Raises InvalidRequest naming the first field that is unsupported or misspelt.

    ``known`` are the fields this endpoint reads.
    """
    names = frozenset(known)
    if len(fields) > _MAX_FIELDS:
        raise InvalidRequest("body", f"has {len(fields)} fields, more than {_MAX_FIELDS}")
    if fields.keys() <= names:
        return
    for name, raw in fields.items():
        if name in names or name in WITHOUT_EFFECT:
            continue
        if name in NEUTRAL:
            _check_neutral(name, raw)
        elif len(name) <= _MAX_NAME:
            _check_spelling(name, names)


def _check_neutral(name: str, raw: msgspec.Raw) -> None:
    value: object = msgspec.json.decode(raw)
    allowed = NEUTRAL[name]
    if value is None or any(value == one for one in allowed):
        return
    words = [msgspec.json.encode(one).decode() for one in allowed]
    remedy = f"leave it out or send {' or '.join(words)}" if words else "leave it out"
    raise InvalidRequest(name, f"is not supported: {remedy}")


def _check_spelling(name: str, names: frozenset[str]) -> None:
    near = difflib.get_close_matches(name, sorted(names | NEUTRAL.keys()), 1, _LIKENESS)
    if near:
        raise InvalidRequest(name, f"unknown field: did you mean {near[0]!r}?")
