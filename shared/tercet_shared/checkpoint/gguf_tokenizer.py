"""Building a tokenizer from GGUF metadata.

A GGUF file names its pre-tokenizer instead of carrying it. The ones below are those of the original models, as
llama.cpp implements them by the same names (``llama-vocab.cpp``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from tercet_shared.checkpoint.tokenizer import SpecialTokens, Tokenizer
from tercet_shared.errors import CheckpointError, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tercet_shared.checkpoint.gguf_file import GgufFile

_KEY = "tokenizer.ggml."

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT_SPLIT = r"\p{N}"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before merging.

    Attributes:
        splits: Expressions, each applied to the pieces of the one before.
        adds_bos: Whether a file that does not say gets a BOS.
        whole_words: A piece that is in the vocabulary is one token even where the merges would not lead there.
    """

    splits: tuple[str, ...]
    adds_bos: bool = False
    whole_words: bool = False


_LLAMA3 = _PreTokenizer((_LLAMA3_SPLIT,), adds_bos=True, whole_words=True)
_QWEN2 = _PreTokenizer((_QWEN2_SPLIT,))
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "gpt-2": _PreTokenizer((_GPT2_SPLIT,)),
    "smollm": _PreTokenizer((_DIGIT_SPLIT, _GPT2_SPLIT)),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def build(file: GgufFile) -> Tokenizer:
    """Builds the tokenizer that the metadata of ``file`` describes.

    Raises:
        CheckpointError: It is missing, damaged, or of a kind that is not supported.
    """
    kind = file.text(f"{_KEY}model")
    if kind is None:
        raise CheckpointError(f"{file.path} carries no tokenizer.")
    if kind != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizers of kind {bounded(kind, 40)!r} are not supported (byte-level BPE is)."
        )
    name = file.text(f"{_KEY}pre") or "gpt-2"
    pre_tokenizer = _PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise CheckpointError(f"{file.path}: the pre-tokenizer {bounded(name, 40)!r} is not supported.")
    tokens = file.strings(f"{_KEY}tokens")
    backend = _byte_level_bpe(file, tokens, pre_tokenizer)
    _add_tokens(file, backend, tokens)
    special = _special_tokens(file, tokens)
    adds_bos, adds_eos = file.flag(f"{_KEY}add_bos_token"), file.flag(f"{_KEY}add_eos_token")
    adds_bos = pre_tokenizer.adds_bos if adds_bos is None else adds_bos
    _put_around(
        backend,
        before=_pair(special.bos, special.bos_id, wanted=adds_bos),
        after=_pair(special.eos, special.eos_id, wanted=adds_eos),
    )
    return Tokenizer(backend, special)


def _byte_level_bpe(file: GgufFile, tokens: list[str], pre_tokenizer: _PreTokenizer) -> Backend:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise CheckpointError(f"{file.path} is damaged: its vocabulary is empty or has a token twice.")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in file.strings(f"{_KEY}merges"))]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre_tokenizer.whole_words)
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception for a merge that leads nowhere
        raise CheckpointError(f"{file.path} is damaged: its merges do not fit its tokens: {error}.") from None
    backend = Backend(model)
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre_tokenizer.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_tokens(file: GgufFile, backend: Backend, tokens: list[str]) -> None:
    types = file.numbers(f"{_KEY}token_type")
    if types and len(types) != len(tokens):
        raise CheckpointError(f"{file.path} is damaged: it has {len(tokens)} tokens and {len(types)} token types.")
    # Added tokens are matched in the text as they are spelled, so control and user-defined tokens stay whole; being in
    # the vocabulary already, they keep their ids.
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and token
        ]
    )


def _special_tokens(file: GgufFile, tokens: list[str]) -> SpecialTokens:
    def token_id(name: str) -> int | None:
        found = file.integer(f"{_KEY}{name}_token_id")
        if found is not None and not 0 <= found < len(tokens):
            raise CheckpointError(f"{file.path}: the {name} token {found} is not in the vocabulary of {len(tokens)}.")
        return found

    def text(name: str) -> str | None:
        found = token_id(name)
        return None if found is None else tokens[found]

    return SpecialTokens(
        bos=text("bos"),
        eos=text("eos"),
        unk=text("unknown"),
        pad=text("padding"),
        bos_id=token_id("bos"),
        eos_id=token_id("eos"),
    )


def _pair(text: str | None, token_id: int | None, *, wanted: bool | None) -> tuple[str, int] | None:
    return None if not wanted or text is None or token_id is None else (text, token_id)


def _put_around(backend: Backend, *, before: tuple[str, int] | None, after: tuple[str, int] | None) -> None:
    # Tokens can hold spaces and colons, which the template's text form cannot.
    template = [*([before[0]] if before else []), "$A", *([after[0]] if after else [])]
    backend.post_processor = TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=[token for token in (before, after) if token]
    )
