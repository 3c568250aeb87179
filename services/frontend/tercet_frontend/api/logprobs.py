"""Log-probabilities and tokens as JSON values: OpenAI's two shapes, and vLLM's for those of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tercet_frontend.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from tercet_frontend.api.answers import Detail, PromptDetail
    from tercet_frontend.cores.interface import TokenLogProbs
    from tercet_frontend.text import Detokenizer

LOWEST = -9999.0
"""What stands for minus infinity, which JSON does not have; OpenAI's value."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written.

    Attributes:
        detokenizer: the model's.
        as_ids: write ``token_id:5`` instead of the token's text.
    """

    detokenizer: Detokenizer
    as_ids: bool = False

    def raw(self, token: int) -> bytes:
        """Returns the bytes of a token by itself, special tokens included."""
        return self.detokenizer.raw(token)

    def name(self, token: int, escape: str = "") -> str:
        """Returns a token's text; one that ends within a code point is ``escape`` and its bytes in hexadecimal."""
        if self.as_ids:
            return f"token_id:{token}"
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return escape + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(names: TokenNames, detail: Detail, count: int) -> dict[str, Any] | None:
    """Returns the ``logprobs`` of a chat choice with ``count`` alternatives per token; None when there is no token.

    ``token`` is what the model drew, ``bytes`` what of it is in the answer: nothing of an end-of-sequence token or of a
    stop string.
    """
    if not detail.ids:
        return None

    def alternative(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.name(token), "logprob": max(logprob, LOWEST), "bytes": list(names.raw(token))}

    content = []
    for token, raw, found in zip(detail.ids, detail.raw, detail.logprobs or (), strict=True):
        tops = zip(found.top_ids[:count], found.top_logprobs[:count], strict=True)
        content.append(
            {
                "token": names.name(token),
                "logprob": max(found.logprob, LOWEST),
                "bytes": list(raw),
                "top_logprobs": [alternative(*top) for top in tops],
            }
        )
    return {"content": content, "refusal": None}


class LegacyLogProbs:
    """The ``logprobs`` of a plain completion: four columns.

    Args:
        names: how tokens are written.
        count: alternatives per token; the token itself is always among them.
    """

    def __init__(self, names: TokenNames, count: int) -> None:
        self._names = names
        self._count = count
        self._columns: dict[str, list[Any]] = {
            "text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []
        }  # fmt: skip

    def add_prompt(self, prompt: PromptDetail, offsets: Sequence[int]) -> None:
        """Adds the tokens of an echoed prompt, which begin at ``offsets`` in the text; the first is given no value."""
        ids: list[int] = prompt.ids.tolist()
        self._add(ids[0], None, offsets[0])
        for token, found, offset in zip(ids[1:], prompt.logprobs or (), offsets[1:], strict=True):
            self._add(token, found, offset)

    def add(self, detail: Detail, offset: int) -> None:
        """Adds output tokens, before whose text the choice's has ``offset`` more characters."""
        for token, found, at in zip(detail.ids, detail.logprobs or (), detail.offsets, strict=True):
            self._add(token, found, at + offset)

    def as_json(self) -> dict[str, Any] | None:
        """Returns the columns; None when there is no token."""
        return self._columns if self._columns["tokens"] else None

    def _add(self, token: int, found: TokenLogProbs | None, offset: int) -> None:
        columns = self._columns
        name = self._names.name(token, "bytes:")
        columns["tokens"].append(name)
        columns["text_offset"].append(offset)
        columns["token_logprobs"].append(None if found is None else max(found.logprob, LOWEST))
        if found is None:
            columns["top_logprobs"].append(None)
            return
        tops: dict[str, float] = {}
        for top, logprob in zip(found.top_ids[: self._count], found.top_logprobs[: self._count], strict=True):
            tops.setdefault(self._names.name(top, "bytes:"), max(logprob, LOWEST))
        tops.setdefault(name, max(found.logprob, LOWEST))
        columns["top_logprobs"].append(tops)


def prompt_logprobs(names: TokenNames, prompt: PromptDetail, count: int) -> list[dict[str, Any] | None]:
    """Returns vLLM's ``prompt_logprobs``: null for the first token, then a table by token id for each."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = names.raw(token).decode("utf-8", "replace")
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text}

    tables: list[dict[str, Any] | None] = [None]
    ids: list[int] = prompt.ids[1:].tolist()
    for token, found in zip(ids, prompt.logprobs or (), strict=True):
        table = {str(token): entry(token, found.logprob, found.rank)}
        tops = zip(found.top_ids[:count], found.top_logprobs[:count], strict=True)
        for rank, (top, logprob) in enumerate(tops, 1):
            if top != token:
                table[str(top)] = entry(top, logprob, rank)
        tables.append(table)
    return tables


def echo_of(detokenizer: Detokenizer, prompt_ids: npt.NDArray[np.int32], text: str | None) -> tuple[str, list[int]]:
    """Returns the text of a prompt as an answer repeats it, and where in it each token begins.

    Args:
        detokenizer: the model's.
        prompt_ids: int32[p].
        text: the prompt as it was sent; None where it came as ids, or not all of it was kept.
    """
    found = ("", [0] * len(prompt_ids))
    # A prompt that was sent as text may spell special tokens out; those that the tokenizer added are not in it.
    for skip in (True, False) if text is None else (False, True):
        stream = TextStream(detokenizer, (), skip_special_tokens=skip, spans=True)
        delta = stream.push(prompt_ids.tolist(), finished=True)
        found = (delta.text, [offset for _, offset in delta.spans])
        if text is None or delta.text == text:
            return found
    return text or "", [min(offset, len(text or "")) for offset in found[1]]
