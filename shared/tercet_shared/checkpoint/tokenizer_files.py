"""Reads the tokenizer of a checkpoint of either format; ``tokenizer.json`` is read here, GGUF in `gguf_tokenizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tercet_shared.checkpoint import gguf_tokenizer
from tercet_shared.checkpoint.config import MAX_TOKEN_ID
from tercet_shared.checkpoint.jsonfile import read_object, read_text
from tercet_shared.checkpoint.source import CheckpointSource, SourceKind
from tercet_shared.checkpoint.tokenizer import SpecialTokens, Tokenizer
from tercet_shared.errors import CheckpointError, bounded

if TYPE_CHECKING:
    from pathlib import Path

_TOKENIZER_LIMIT = 256 << 20


def read_tokenizer(source: CheckpointSource) -> Tokenizer:
    """Loads the tokenizer.

    Raises:
        CheckpointError: It is missing, damaged, or of a kind that is not supported.
    """
    if source.kind is SourceKind.GGUF:
        return gguf_tokenizer.build(source.gguf)
    return _from_directory(source.path)


def _from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; other kinds of tokenizer files are not read.")
    content = read_text(path, _TOKENIZER_LIMIT)
    try:
        backend = Backend.from_buffer(content)
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception for every damaged file
        raise CheckpointError(f"{path} is not a tokenizer: {bounded(str(error), 300)}.") from None
    backend.no_truncation()
    backend.no_padding()
    config_path = directory / "tokenizer_config.json"
    config = read_object(config_path) if config_path.is_file() else {}
    _add_missing_tokens(backend, config, config_path)
    # What is put around a text is up to tokenizer.json; `add_bos_token` beside one has no say, as in Transformers.
    return Tokenizer(backend, _special_tokens(backend, config, directory))


def _add_missing_tokens(backend: Backend, config: dict[str, Any], path: Path) -> None:
    stated = config.get("added_tokens_decoder") or {}
    if not isinstance(stated, dict):
        raise CheckpointError(f"{path}: 'added_tokens_decoder' is not an object.")
    known = set(backend.get_added_tokens_decoder())
    try:
        wanted = sorted((int(key), value) for key, value in stated.items() if int(key) not in known)
        for token_id, value in wanted:
            flags = {
                name: bool(value.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
            }
            backend.add_tokens([AddedToken(value["content"], **flags)])
            if backend.token_to_id(value["content"]) != token_id:
                raise CheckpointError(f"{path}: added token {token_id} cannot have that id.")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path}: 'added_tokens_decoder' is not a table of tokens by id.") from None


def _special_tokens(backend: Backend, config: dict[str, Any], directory: Path) -> SpecialTokens:
    map_path = directory / "special_tokens_map.json"
    named = {**(read_object(map_path) if map_path.is_file() else {}), **config}

    def text(name: str) -> str | None:
        value = named.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) and value else None

    def token_id(token: str | None) -> int | None:
        found = None if token is None else backend.token_to_id(token)
        return found if found is not None and found < MAX_TOKEN_ID else None

    bos, eos = text("bos_token"), text("eos_token")
    return SpecialTokens(bos, eos, text("unk_token"), text("pad_token"), token_id(bos), token_id(eos))
