"""From what a client sent to prompt ids: chat template and tokenizer, off the event loop when it takes long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from tercet_frontend.text import Detokenizer
from tercet_shared.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from tercet_frontend.cores.interface import ServedModel
    from tercet_frontend.schemas.chat import Message
    from tercet_frontend.schemas.completion import Prompt
    from tercet_shared.checkpoint import ChatTemplate, Checkpoint, GenerationDefaults, Tokenizer

T = TypeVar("T")

INLINE_CHARACTERS = 2_000
"""Text up to this size is tokenized at once: in well under a millisecond, less than a thread costs others."""

LONG_TEXT = 16
"""Characters per token of the context beyond which a text is tokenized piecemeal: it is too long unless its tokens are
unusually long, and tokenizing a body of 10 MB to the end takes seconds and gigabytes."""

DEFAULT_THREADS = 2


@dataclass(frozen=True, slots=True)
class ModelText:
    """What the front end knows of a model: everything about its text, nothing about its weights.

    Attributes:
        tokenizer: text to ids.
        detokenizer: ids to text, for all streams.
        chat_template: None where the checkpoint has none; then chat requests are refused.
        defaults: sampling parameters for requests that state none.
        eos_token_ids: any of them ends an answer.
    """

    tokenizer: Tokenizer
    detokenizer: Detokenizer
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> ModelText:
        """Reads what is needed of ``checkpoint``; blocks for as long as the tokenizer takes.

        Raises:
            CheckpointError: it cannot be read.
        """
        tokenizer = checkpoint.tokenizer
        return cls(
            tokenizer=tokenizer,
            detokenizer=Detokenizer(tokenizer.backend),
            chat_template=checkpoint.chat_template,
            defaults=checkpoint.generation_defaults,
            eos_token_ids=checkpoint.eos_token_ids,
        )


class PromptEncoder:
    """Makes prompt ids. A context manager: leaving it ends its threads."""

    def __init__(self, *, threads: int = DEFAULT_THREADS, inline_characters: int = INLINE_CHARACTERS) -> None:
        """Prepares the pool; threads start when they are first needed.

        Args:
            threads: long prompts that are tokenized at once.
            inline_characters: size up to which no thread is used.
        """
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._inline = inline_characters

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def chat(self, text: ModelText, model: ServedModel, messages: Sequence[Message]) -> npt.NDArray[np.int32]:
        """Returns the ids of a rendered conversation, int32[n].

        Raises:
            TemplateError: the template refused the messages.
            InvalidRequestError: the model has no template, or the conversation comes out empty.
            ContextLengthError: there are too many for the model.
        """
        template = text.chat_template
        if template is None:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
        conversation = [_for_template(template, message) for message in messages]
        size = sum(len(message["content"]) for message in conversation)

        def work() -> list[int]:
            return _encoded(text, template.render(conversation), model, "messages", add_special_tokens=False)

        # Templates loop over messages, so their number counts as well.
        return _checked(await self._run(work, size + 100 * len(conversation)), model, "messages")

    async def prompts(
        self, text: ModelText, model: ServedModel, prompts: Sequence[Prompt]
    ) -> list[npt.NDArray[np.int32]]:
        """Returns the ids of the prompts of a completion request, int32[n] each.

        Raises:
            InvalidRequestError: one has no tokens, or ids that the model does not have.
            ContextLengthError: one has too many for the model.
        """
        names = ["prompt"] if len(prompts) == 1 else [f"prompt[{index}]" for index in range(len(prompts))]

        def work() -> list[npt.NDArray[np.int32]]:
            return [
                _checked(_encoded(text, prompt, model, name) if isinstance(prompt, str) else prompt, model, name)
                for prompt, name in zip(prompts, names, strict=True)
            ]

        return await self._run(work, sum(len(prompt) for prompt in prompts))

    async def _run(self, work: Callable[[], T], size: int) -> T:
        if size <= self._inline:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _for_template(template: ChatTemplate, message: Message) -> dict[str, str]:
    role: str = message.role
    # OpenAI's newer name for the system role; most models were not trained on it.
    if role == "developer" and not any("developer" in source for source in template.sources.values()):
        role = "system"
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.text, **named}


def _encoded(
    text: ModelText, prompt: str, model: ServedModel, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Returns the ids of ``prompt``; one that cannot fit is given up at a beginning that is too long already.

    The beginnings double, so that all of them together cost at most as much again as the last.
    """
    length = LONG_TEXT * model.max_model_len
    while length < len(prompt):
        count = len(text.tokenizer.encode(prompt[:length], add_special_tokens=add_special_tokens))
        # The cut may split what would have been one token, which is far from making two of each.
        if count > 2 * model.max_model_len:
            raise ContextLengthError(
                f"This model's context is {model.max_model_len} tokens, and {param} alone has more than that.",
                param=param,
            )
        length *= 2
    return text.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)


def _checked(ids: list[int], model: ServedModel, param: str) -> npt.NDArray[np.int32]:
    if not ids:
        raise InvalidRequestError(f"{param} has no tokens.", param=param)
    if len(ids) >= model.max_model_len:
        raise ContextLengthError(
            f"This model's context is {model.max_model_len} tokens, and {param} alone has {len(ids)}; "
            "at least one must be left for the answer.",
            param=param,
        )
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        raise InvalidRequestError(
            f"{param} has a token id that is not in the vocabulary (0 to {model.vocab_size - 1}).", param=param
        )
    return np.array(ids, dtype=np.int32)
