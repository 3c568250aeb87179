"""From what a client sent to prompt ids: chat template and tokenizer, off the event loop when it takes long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from tercet_frontend.parsing.registry import AUTO, reasoning_format, tool_format
from tercet_frontend.rendering import compiled
from tercet_frontend.text import Detokenizer
from tercet_shared.checkpoint.template import RenderLimits, TemplateBudgetError
from tercet_shared.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from tercet_frontend.cores.interface import ServedModel
    from tercet_frontend.parsing.reasoning import ReasoningFormat
    from tercet_frontend.parsing.tools.base import ToolFormat
    from tercet_frontend.rendering import Conversation
    from tercet_frontend.schemas.completion import Prompt
    from tercet_shared.checkpoint import ChatTemplate, Checkpoint, GenerationDefaults, Tokenizer

T = TypeVar("T")

INLINE_CHARACTERS = 2_000
"""Text up to this size is tokenized at once: in well under a millisecond, less than a thread costs others."""

SHORT_CHARACTERS = 64_000
"""Text up to this size is tokenized in some ten milliseconds, and does not wait for longer ones."""

LONG_TEXT = 16
"""Characters per token of the context beyond which a text is tokenized piecemeal: it is too long unless its tokens are
unusually long, and tokenizing a body of 10 MB to the end takes seconds and gigabytes."""

_MARGIN = 64
"""Tokens next to a cut in a text that may differ from those of the whole text."""

DEFAULT_THREADS = 2

_INLINE_LIMITS = RenderLimits(steps=20_000, seconds=0.1)
"""Work of a template that may be done at once; what takes more is begun again in a thread."""

_END = 500
"""Characters at the end of a rendered prompt that say how the answer begins."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """What the front end knows of a model: everything about its text, nothing about its weights.

    Attributes:
        tokenizer: text to ids.
        detokenizer: ids to text, for all streams.
        chat_template: None where the checkpoint has none; then chat requests are refused.
        defaults: sampling parameters for requests that state none.
        eos_token_ids: any of them ends an answer.
        tool_format: how it writes tool calls; None where nothing reads them.
        reasoning_format: how it marks what it thinks; None where nothing reads that.
        trust_request_template: whether requests may bring a chat template along.
    """

    tokenizer: Tokenizer
    detokenizer: Detokenizer
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    trust_request_template: bool = False

    @classmethod
    def read(
        cls,
        checkpoint: Checkpoint,
        *,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        trust_request_template: bool = False,
    ) -> ModelText:
        """Reads what is needed of ``checkpoint``; blocks for as long as the tokenizer takes.

        Args:
            checkpoint: of the model.
            tool_call_parser: a name as in `tercet_frontend.parsing.registry`.
            reasoning_parser: the same.
            trust_request_template: whether requests may bring a chat template along.

        Raises:
            CheckpointError: it cannot be read.
            ConfigurationError: there is no parser of that name.
        """
        tokenizer = checkpoint.tokenizer
        template = None if checkpoint.chat_template is None else checkpoint.chat_template.text
        return cls(
            tokenizer=tokenizer,
            detokenizer=Detokenizer(tokenizer.backend),
            chat_template=checkpoint.chat_template,
            defaults=checkpoint.generation_defaults,
            eos_token_ids=checkpoint.eos_token_ids,
            tool_format=tool_format(tool_call_parser, template),
            reasoning_format=reasoning_format(reasoning_parser, template),
            trust_request_template=trust_request_template,
        )

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token that is written ``text``; None where there is none."""
        token = self.tokenizer.backend.token_to_id(text)
        return token if token is not None and token in self.tokenizer.special_ids else None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        ids: int32[n].
        end: the last characters of its text, which say how the answer begins.
    """

    ids: npt.NDArray[np.int32]
    end: str


class PromptEncoder:
    """Makes prompt ids. A context manager: leaving it ends its threads."""

    def __init__(self, *, threads: int = DEFAULT_THREADS, inline_characters: int = INLINE_CHARACTERS) -> None:
        """Prepares the pool; threads start when they are first needed.

        Args:
            threads: long prompts that are tokenized at once.
            inline_characters: size up to which no thread is used.
        """
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        # Of its own, so that what takes milliseconds does not wait for what takes a tenth of a second.
        self._short_pool = ThreadPoolExecutor(1, thread_name_prefix="short")
        self._inline = inline_characters

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self._pool, self._short_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def chat(
        self,
        text: ModelText,
        model: ServedModel,
        conversation: Conversation,
        *,
        add_special_tokens: bool = False,
        keep: int | None = None,
    ) -> ChatPrompt:
        """Returns a rendered conversation.

        Args:
            text: of the model.
            model: as it is served now.
            conversation: for its template.
            add_special_tokens: add what the tokenizer adds around a text; templates write it themselves.
            keep: so many of the last ids at most; None keeps all.

        Raises:
            TemplateError: the template refused the messages.
            InvalidRequestError: the model has no template, or the conversation comes out empty.
            ContextLengthError: there are too many for the model.
        """

        def work(limits: RenderLimits | None = None) -> ChatPrompt:
            rendered = compiled(text, conversation).render(
                conversation.messages,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                tools=conversation.tools,
                documents=conversation.documents,
                variables=conversation.variables,
                limits=limits,
            )
            ids = _encoded(text, rendered, model, "messages", add_special_tokens=add_special_tokens, keep=keep)
            return ChatPrompt(_checked(ids, model, "messages"), rendered[-_END:])

        # The template of a request may do anything within its limits.
        if conversation.template is None and conversation.size <= self._inline:
            try:
                return work(_INLINE_LIMITS)
            except TemplateBudgetError:
                pass
        return await self._in_thread(work, conversation.size)

    async def prompts(
        self,
        text: ModelText,
        model: ServedModel,
        prompts: Sequence[Prompt],
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        param: str = "prompt",
    ) -> list[npt.NDArray[np.int32]]:
        """Returns the ids of the prompts of a completion request, int32[n] each.

        Args:
            text: of the model.
            model: as it is served now.
            prompts: at least one.
            add_special_tokens: add what the tokenizer adds around a text.
            keep: so many of the last ids of each at most; None keeps all.
            param: the request's field that has them, which errors name.

        Raises:
            InvalidRequestError: one has no tokens, or ids that the model does not have.
            ContextLengthError: one has too many for the model.
        """
        names = [param] if len(prompts) == 1 else [f"{param}[{index}]" for index in range(len(prompts))]

        def ids(prompt: Prompt, name: str) -> list[int]:
            if isinstance(prompt, str):
                return _encoded(text, prompt, model, name, add_special_tokens=add_special_tokens, keep=keep)
            return prompt if keep is None else prompt[-keep:]

        def work() -> list[npt.NDArray[np.int32]]:
            return [_checked(ids(prompt, name), model, name) for prompt, name in zip(prompts, names, strict=True)]

        return await self.run(work, sum(len(prompt) for prompt in prompts))

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Returns what ``work`` returns: at once, or in a thread when it has more than a few characters to do.

        Args:
            work: is safe to run beside others.
            size: of what it works on, in characters.
        """
        if size <= self._inline:
            return work()
        return await self._in_thread(work, size)

    async def beside(self, work: Callable[[], T]) -> T:
        """Returns what ``work`` returns, which takes some milliseconds and is done in a thread."""
        return await self._in_thread(work, 0)

    async def _in_thread(self, work: Callable[[], T], size: int) -> T:
        pool = self._short_pool if size <= SHORT_CHARACTERS else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def _encoded(
    text: ModelText,
    prompt: str,
    model: ServedModel,
    param: str,
    *,
    add_special_tokens: bool = True,
    keep: int | None = None,
) -> list[int]:
    """Returns the ids of ``prompt``, or the last ``keep`` of them.

    One that cannot fit is given up at a beginning that is too long already; of one that is cut, only the end is read.
    The pieces double, so that all of them together cost at most as much again as the last.
    """
    length = LONG_TEXT * (model.max_model_len if keep is None else keep + _MARGIN)
    while length < len(prompt):
        piece = prompt[:length] if keep is None else prompt[-length:]
        ids = text.tokenizer.encode(piece, add_special_tokens=add_special_tokens)
        # The cut may split what would have been one token, which is far from making two of each, and changes tokens
        # next to it, not those far behind.
        if keep is not None and len(ids) >= keep + _MARGIN:
            return ids[-keep:]
        if keep is None and len(ids) > 2 * model.max_model_len:
            raise ContextLengthError(
                f"This model's context is {model.max_model_len} tokens, and {param} alone has more than that.",
                param=param,
            )
        length *= 2
    ids = text.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    return ids if keep is None else ids[-keep:]


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
