"""Text to token ids and back: byte-level BPE from GGUF metadata or tokenizer.json.

Why not the conversion of other packages: SmolLM2's pre-tokenizer (``smollm``) splits
every digit *before* the byte-level split; leaving that out changes the ids wherever
white space precedes a digit ("list:\\n 1"), silently.

Some raw bytes are not in a vocabulary (SmolLM2 lacks 21, among them the control
characters 0x04, 0x06, 0x13, 0x14, 0x16, 0x1d). ``encode`` drops them, as llama.cpp does. A
prompt of nothing else encodes to no ids.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pdcore.engine.chat_template import Message, compile_template, render
from pdcore.engine.gguf import GGUFFile
from pdcore.engine.hf_model import hf_eos_token_ids
from pdcore.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    import jinja2
    import tokenizers

#: GGUF token types that are markup, not text: control and user defined.
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

#: Pre-tokenizers of ``tokenizer.ggml.pre`` that we know exactly; a guess would be silent.
_DIGITS_FIRST: Final = {"smollm": True, "gpt-2": False}

#: From here on a text is encoded as a batch of one. A 1 MiB text takes seconds, and only
#: the batch call lets the process's other threads run meanwhile; for short texts it costs
#: more than it frees.
LONG_TEXT_CHARS: Final = 2048


def byte_symbols() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte: symbol -> byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(kept)]
    symbols = {chr(byte): byte for byte in kept}
    symbols.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return symbols


class Tokenizer:
    """One model's tokenizer. Thread-safe: nothing changes after construction.

    ``eos_token_ids`` end a generation; ``vocab_size`` counts special tokens too.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int],
        chat_template: str | None,
        special_texts: Mapping[str, str],
    ) -> None:
        self.backend = backend
        self.eos_token_ids = frozenset(eos_token_ids)
        self.chat_template = chat_template
        self.special_texts = dict(special_texts)
        self.vocab_size: int = backend.get_vocab_size()

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Raises EngineError for a tokenizer kind that is not known exactly."""
        backend = _gguf_backend(file)
        tokens = file.texts("tokenizer.ggml.tokens")
        texts = {}
        eos = []
        for key, name in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        ):
            token = file.integer(f"tokenizer.ggml.{name}_token_id", -1)
            if 0 <= token < len(tokens):
                texts[key] = tokens[token]
        for name in ("eos", "eot"):
            token = file.integer(f"tokenizer.ggml.{name}_token_id", -1)
            if token >= 0:
                eos.append(token)
        template = file.metadata.get("tokenizer.chat_template")
        return cls(
            backend,
            eos_token_ids=eos,
            chat_template=template if isinstance(template, str) else None,
            special_texts=texts,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From tokenizer.json and tokenizer_config.json of a Hugging Face folder.

        Raises EngineError when they are missing or the tokenizer is not byte-level BPE.
        """
        path = folder / "tokenizer.json"
        try:
            text = path.read_text("utf-8")
            kind = msgspec.json.decode(text, type=_TokenizerJson)
            config = _TokenizerConfig()
            if (config_path := folder / "tokenizer_config.json").is_file():
                config = msgspec.json.decode(config_path.read_bytes(), type=_TokenizerConfig)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as exc:
            raise EngineError(f"{path}: cannot read the tokenizer: {exc}") from exc
        if kind.model.type != "BPE" or not kind.is_byte_level():
            raise EngineError(
                f"{path}: a {kind.model.type} tokenizer without ByteLevel decoder is not "
                "supported, only byte-level BPE"
            )
        _require_package()
        from tokenizers import Tokenizer as Backend

        backend = _built(path, lambda: Backend.from_str(text))
        texts = config.special_texts()
        eos = hf_eos_token_ids(folder)
        if not eos and "eos_token" in texts:
            found = backend.token_to_id(texts["eos_token"])
            eos = () if found is None else (found,)
        return cls(
            backend,
            eos_token_ids=eos,
            chat_template=config.template(folder),
            special_texts=texts,
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens spelled out in it become special tokens.

        A long text is encoded without the GIL: in a thread, it keeps nobody waiting.
        """
        if len(text) < LONG_TEXT_CHARS:
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        else:
            ids = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out; invalid UTF-8 becomes U+FFFD."""
        detokenizer = IncrementalDetokenizer(self)
        return detokenizer.push(ids) + detokenizer.finish()

    def render_chat(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """Text of a conversation, to be encoded; ``kwargs`` are the request's
        ``chat_template_kwargs``. Raises InvalidRequest naming these or ``messages`` when
        the model's template refuses them, whatever it raised."""
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")
        return render(
            self._template,
            messages,
            kwargs,
            self.special_texts,
            add_generation_prompt=add_generation_prompt,
        )

    @cached_property
    def _template(self) -> jinja2.Template | None:
        return None if self.chat_template is None else compile_template(self.chat_template)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of every id; empty for special tokens and holes in the numbering."""
        symbols = byte_symbols()
        table = [b""] * (max(self.backend.get_vocab(True).values(), default=-1) + 1)
        for token, index in self.backend.get_vocab(True).items():
            if all(symbol in symbols for symbol in token):
                table[index] = bytes(symbols[symbol] for symbol in token)
            else:
                table[index] = token.encode()
        for index, added in self.backend.get_added_tokens_decoder().items():
            table[index] = b"" if added.special else added.content.encode()
        return table

    @cached_property
    def max_token_bytes(self) -> int:
        """Most UTF-8 bytes of text that one id stands for, special tokens included. A text
        of more than n times as many has more than n tokens (bytes that ``encode`` drops
        not counted), so it can be refused before it is encoded."""
        added = self.backend.get_added_tokens_decoder().values()
        special = max((len(token.content.encode()) for token in added), default=0)
        return max(special, *map(len, self.token_bytes), 1)

    def export(self, folder: Path, *, max_model_len: int = 8192) -> None:
        """Write tokenizer.json, tokenizer_config.json and a minimal config.json.

        For benchmark clients that count tokens: they must use this tokenizer, not a
        conversion of their own (see the module's text).
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_model_len,
            **self.special_texts,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        model = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocab_size,
            "max_position_embeddings": max_model_len,
            "eos_token_id": sorted(self.eos_token_ids),
        }
        for name, content in (("tokenizer_config.json", config), ("config.json", model)):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


class IncrementalDetokenizer:
    """Text of a growing id sequence, each id looked at once.

    Bytes of an incomplete UTF-8 character are held back until it is complete or proves
    invalid; the concatenation of all pieces equals ``Tokenizer.decode`` of all ids.
    """

    __slots__ = ("_decoder", "_table")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._table = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that has become certain. Ids outside the vocabulary add nothing."""
        table = self._table
        return self._decoder.decode(b"".join([table[i] for i in ids if 0 <= i < len(table)]))

    def finish(self) -> str:
        """What was held back, as U+FFFD; the detokenizer is then empty again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _require_package() -> None:
    if importlib.util.find_spec("tokenizers") is None:
        raise EngineError("text needs the tokenizers package: run `pip install 'pdcore[model]'`")


def _built(path: Path, build: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    try:
        return build()
    except Exception as exc:  # the package knows no other type for a file it refuses
        raise EngineError(f"{path}: broken tokenizer: {exc}") from exc


def _gguf_backend(file: GGUFFile) -> tokenizers.Tokenizer:
    model, pre = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre", "")
    if model != "gpt2" or pre not in _DIGITS_FIRST:
        raise EngineError(
            f"{file.path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported in "
            f"GGUF (known: gpt2 with {', '.join(_DIGITS_FIRST)}); use the model's Hugging Face "
            "folder with tokenizer.json"
        )
    _require_package()
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    tokens = file.texts("tokenizer.ggml.tokens")
    kinds = file.integers("tokenizer.ggml.token_type")
    merges = [pair.split(" ", 1) for pair in file.texts("tokenizer.ggml.merges")]
    if len(kinds) != len(tokens) or any(len(pair) != 2 for pair in merges):
        raise EngineError(f"{file.path}: tokenizer tables do not fit each other")
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in merges]
    backend = _built(file.path, lambda: Backend(models.BPE(vocab=vocab, merges=pairs)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if _DIGITS_FIRST[pre]:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    marked = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text, k in marked if k == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(text, normalized=False) for text, k in marked if k == _USER_DEFINED]
    )
    return backend


class _Typed(msgspec.Struct, frozen=True):
    type: str = ""
    decoders: list[_Typed] = []


class _TokenizerJson(msgspec.Struct, frozen=True):
    model: _Typed
    decoder: _Typed | None = None

    def is_byte_level(self) -> bool:
        decoder = self.decoder or _Typed()
        return any(part.type == "ByteLevel" for part in (decoder, *decoder.decoders))


class _Special(msgspec.Struct, frozen=True):
    content: str


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _Special | None = None
    eos_token: str | _Special | None = None
    unk_token: str | _Special | None = None
    pad_token: str | _Special | None = None

    def special_texts(self) -> dict[str, str]:
        tokens = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self.pad_token,
        }
        return {
            name: token.content if isinstance(token, _Special) else token
            for name, token in tokens.items()
            if token is not None
        }

    def template(self, folder: Path) -> str | None:
        """The default template; newer folders keep it in a file of its own."""
        if isinstance(self.chat_template, str):
            return self.chat_template
        for named in self.chat_template or ():
            if named.name == "default":
                return named.template
        path = folder / "chat_template.jinja"
        try:
            return path.read_text("utf-8") if path.is_file() else None
        except (OSError, UnicodeDecodeError) as exc:
            raise EngineError(f"{path}: cannot read the chat template: {exc}") from exc
