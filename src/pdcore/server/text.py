"""Text in the leader: token ids from a prompt, text and stop strings from token ids.

Workers know no text. Any tokenizer with the shape of :class:`Tokenizer` works;
:class:`IdTokenizer` serves a model that has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import attrs

from pdcore.errors import InvalidRequest
from pdcore.server.pending import NewTokens

#: R37: what a logprob that JSON cannot hold becomes (the most negative float32).
_LOWEST_LOGPROB: Final = -3.4028234663852886e38


class Tokenizer(Protocol):
    """Thread-safe: long texts are rendered and encoded in a thread, which helps only if
    ``encode`` releases the GIL for them."""

    @property
    def max_token_bytes(self) -> int:
        """Most UTF-8 bytes that one token stands for: a text that cannot fit is refused
        without encoding it."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The text of a conversation, to be encoded; ``kwargs`` are the request's
        ``chat_template_kwargs``, whatever their names. Raises InvalidRequest where the
        model's template refuses them."""
        ...


class Detokenizer(Protocol):
    """Text of a growing id sequence; an incomplete character is held back."""

    def push(self, ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


@attrs.frozen
class TextModel:
    """What a leader serves: the name clients use, text to ids, ids to text."""

    name: str
    tokenizer: Tokenizer
    new_detokenizer: Callable[[], Detokenizer]


class IdTokenizer:
    """Text is token ids in decimal, separated by spaces: for engines without a vocabulary."""

    #: A 63-bit number and a space.
    max_token_bytes: Final = 20

    def encode(self, text: str) -> list[int]:
        """Raises InvalidRequest for anything but numbers."""
        words = text.split()
        if not all(word.isascii() and word.isdigit() for word in words):
            raise InvalidRequest("prompt", "this model has no tokenizer: send a list of token ids")
        return [int(word) for word in words]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")


class IdDetokenizer:
    """The counterpart of :class:`IdTokenizer`."""

    def push(self, ids: Iterable[int]) -> str:
        return "".join([f"{i} " for i in ids])

    def finish(self) -> str:
        return ""


class StopStrings:
    """Cuts text at the first stop string that completes, whatever the pieces it comes in.

    "First" is by the position where a match ends (the longest of several that end there), so
    the result does not depend on how the text was split. A piece that might begin a stop
    string is held back until that is decided.
    """

    __slots__ = ("_held", "_stops", "has_stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """Text that is certain to be output. Nothing follows once ``has_stopped``."""
        if self.has_stopped:
            return ""
        if not self._stops:
            return text
        data = self._held + text
        cut: tuple[int, int] | None = None
        for stop in self._stops:
            at = data.find(stop)
            if at >= 0 and (cut is None or (at + len(stop), at) < cut):
                cut = (at + len(stop), at)
        if cut is not None:
            self.has_stopped = True
            self._held = ""
            return data[: cut[1]]
        hold = max(self._overlap(data, stop) for stop in self._stops)
        self._held = data[len(data) - hold :]
        return data[: len(data) - hold]

    def finish(self) -> str:
        """What was held back and has not become a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(data: str, stop: str) -> int:
        """Longest proper prefix of ``stop`` that ``data`` ends with."""
        for size in range(min(len(stop) - 1, len(data)), 0, -1):
            if data.endswith(stop[:size]):
                return size
        return 0


class TokenLogprob(NamedTuple):
    token_id: int
    text: str
    logprob: float


class Piece(NamedTuple):
    """A part of the output: text that became certain, the ids that were read for it, and
    their logprobs (empty unless asked for)."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]


class OutputText:
    """Turns one request's token ids into text and applies its stop strings.

    Stop strings count only from ``min_tokens`` on. After ``has_stopped`` further tokens are
    not part of the output.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_model", "_stops", "num_tokens")

    def __init__(self, model: TextModel, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._model = model
        self._detokenizer = model.new_detokenizer()
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def has_stopped(self) -> bool:
        return self._stops.has_stopped

    def push(self, new: NewTokens) -> Piece:
        """Tokens up to the one that completes a stop string."""
        texts: list[str] = []
        logprobs: list[TokenLogprob] = []
        stops = self._stops
        for i, token_id in enumerate(new.token_ids):
            text = self._detokenizer.push((token_id,))
            self.num_tokens += 1
            texts.append(stops.feed(text) if self.num_tokens >= self._min_tokens else text)
            if i < len(new.logprobs):
                logprobs.append(self._logprob(token_id, new.logprobs[i]))
            if stops.has_stopped:
                break
        return Piece("".join(texts), new.token_ids[: len(texts)], logprobs)

    def finish(self) -> str:
        """Text still held back, at the end of a request that was not cut."""
        if self.has_stopped:
            return ""
        return self._stops.feed(self._detokenizer.finish()) + self._stops.finish()

    def _logprob(self, token_id: int, logprob: float | None) -> TokenLogprob:
        detokenizer = self._model.new_detokenizer()
        text = detokenizer.push((token_id,)) + detokenizer.finish()
        return TokenLogprob(token_id, text, _finite(logprob))


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else _LOWEST_LOGPROB
