"""Where a checkpoint keeps its chat templates: own files, the tokenizer's configuration, or GGUF metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tercet_shared.checkpoint.jsonfile import read_object, read_text
from tercet_shared.checkpoint.source import CheckpointSource, SourceKind
from tercet_shared.checkpoint.template import ChatTemplate
from tercet_shared.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_shared.checkpoint.gguf_file import GgufFile
    from tercet_shared.checkpoint.tokenizer import SpecialTokens

_DEFAULT = "default"
_GGUF_KEY = "tokenizer.chat_template"


def read_chat_template(source: CheckpointSource, special: SpecialTokens) -> ChatTemplate | None:
    """Reads and compiles the chat templates; None if the checkpoint has none, as base models do.

    Args:
        source: The checkpoint.
        special: The named tokens of its tokenizer, which templates refer to.

    Raises:
        CheckpointError: A file is damaged, a template is not valid Jinja, or there are several and no default.
    """
    found = _from_gguf(source.gguf) if source.kind is SourceKind.GGUF else _from_directory(source.path)
    if not found:
        return None
    if _DEFAULT not in found:
        if len(found) != 1:
            raise CheckpointError(f"{source.path} has several chat templates and none is the default.")
        found = {_DEFAULT: next(iter(found.values()))}
    return ChatTemplate(found, special.template_variables(), str(source.path))


def _from_gguf(file: GgufFile) -> dict[str, str]:
    names = {_DEFAULT: _GGUF_KEY, **{name: f"{_GGUF_KEY}.{name}" for name in file.strings("tokenizer.chat_templates")}}
    texts = {name: file.text(key) for name, key in names.items()}
    return {name: text for name, text in texts.items() if text}


def _from_directory(directory: Path) -> dict[str, str]:
    # A file of its own counts before the legacy places, as in Transformers.
    own = directory / "chat_template.jinja"
    named = {path.stem: _template(path) for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if own.is_file():
        return {**named, _DEFAULT: _template(own)}
    if named:
        return named
    for path in (directory / "chat_template.json", directory / "tokenizer_config.json"):
        if path.is_file():
            found = _stated(read_object(path).get("chat_template"), path)
            if found:
                return found
    return {}


def _template(path: Path) -> str:
    try:
        return read_text(path).decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8.") from None


def _stated(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    if not isinstance(value, dict) or not all(isinstance(part, str) for item in value.items() for part in item):
        raise CheckpointError(f"{path}: 'chat_template' is neither a template nor a list of named ones.")
    return value
