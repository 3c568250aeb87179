"""One answer of ``/v1/responses``: the response object as it grows, whole or as OpenAI's numbered events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

from tercet_frontend.api.logprobs import chat_logprobs
from tercet_frontend.api.response_items import OutputItems
from tercet_frontend.parsing.events import Content
from tercet_shared.errors import CancelledByClientError, OverloadedError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tercet_frontend.api.answers import AnswerHead, Detail, Ending, FinishedChoice, Usage
    from tercet_frontend.api.logprobs import TokenNames
    from tercet_frontend.api.response_items import Happening
    from tercet_frontend.parsing.events import Event
    from tercet_frontend.schemas.responses import ResponsesRequest
    from tercet_shared.errors import TercetError
    from tercet_shared.sampling_params import SamplingParams


class ResponseAnswer:
    """`AnswerShape` and `ChunkEncoder` of one request, and its response object at any time.

    The event that ends a stream says whether the response was stored, which takes a while to find out. So `done` and
    `error` return nothing: when that is known, `last_event` is what is left to send.

    Attributes:
        stored: whether the response is kept for what follows it.
        when_begun: called with the id of the response once it has one.

    Args:
        fields: the request.
        names: how tokens are written.
        stored: see above.
    """

    identity_prefix = "resp_"

    def __init__(self, fields: ResponsesRequest, names: TokenNames, *, stored: bool) -> None:
        self.stored = stored
        self.when_begun: Callable[[str], None] | None = None
        self._fields = fields
        self._names = names
        self._params: SamplingParams | None = None
        self._items = OutputItems()
        self._head: AnswerHead | None = None
        self._status = "in_progress"
        self._incomplete: dict[str, str] | None = None
        self._error: dict[str, str] | None = None
        self._usage: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self._number = 0  # of the next event

    @property
    def identity(self) -> str:
        """The id of the response; empty until it has one."""
        return self._head.identity if self._head is not None else ""

    def drawn_with(self, params: SamplingParams) -> None:
        """Takes the parameters that are used, which the response states."""
        self._params = params

    # ------------------------------------------------------------------------------------------------ AnswerShape

    def chunks(self, head: AnswerHead) -> ResponseAnswer:
        """Returns the encoder of a streamed answer."""
        self._head = head
        if self.when_begun is not None:
            self.when_begun(head.identity)
        return self

    def body(self, head: AnswerHead, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]:
        """Returns a whole answer."""
        self._head = head
        (choice,) = choices
        self._add(choice.events, choice.detail)
        self.end(0, choice.ending, None)
        self.usage(usage)
        return self.response()

    # ------------------------------------------------------------------------------------------------ ChunkEncoder

    def opening(self, index: int) -> bytes:  # noqa: ARG002  # see ChunkEncoder
        """Returns the first events."""
        response = self.response()
        return self._written(
            [{"type": kind, "response": response} for kind in ("response.created", "response.in_progress")]
        )

    def events(self, index: int, events: Sequence[Event], detail: Detail | None) -> bytes:  # noqa: ARG002
        """Returns the events for more of the output."""
        return self._written(self._add(events, detail))

    def end(self, index: int, ending: Ending, detail: Detail | None) -> bytes:  # noqa: ARG002
        """Ends the last item, and notes how the response has ended."""
        cut = ending.reason == "length"
        self._status = "incomplete" if cut else "completed"
        self._incomplete = {"reason": "max_output_tokens"} if cut else None
        self._completed_at = int(time.time())
        return self._written(self._items.close(self._status))

    def usage(self, usage: Usage) -> bytes:
        """Takes the usage; the last event has it."""
        self._usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return b""

    def done(self) -> bytes:
        """Returns nothing: see the class."""
        return b""

    def error(self, error: TercetError) -> bytes:
        """Ends the last item as it is, and notes why the response failed."""
        if isinstance(error, CancelledByClientError):
            self._status = "cancelled"
        else:
            self._status = "failed"
            self._error = {"code": _error_code(error), "message": error.message}
        return self._written(self._items.close("incomplete"))

    # ------------------------------------------------------------------------------------------------ the response

    def last_event(self) -> bytes:
        """Returns the event that ends the stream."""
        # There is no event of its own for a response that was cancelled; its status says so.
        kind = {"completed": "completed", "incomplete": "incomplete"}.get(self._status, "failed")
        return self._written([{"type": f"response.{kind}", "response": self.response()}])

    def response(self) -> dict[str, Any]:
        """Returns the response object as it is now."""
        fields, head, params = self._fields, self._head, self._params
        if head is None or params is None:
            raise RuntimeError("the answer has not begun")
        choice = fields.tool_choice
        return {
            "id": head.identity,
            "object": "response",
            "created_at": head.created,
            "completed_at": self._completed_at,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata or {},
            "model": head.model,
            "output": list(self._items.items),
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {
                "effort": fields.reasoning.effort if fields.reasoning is not None else None,
                "summary": None,
            },
            "service_tier": "default",
            "store": self.stored,
            "temperature": params.temperature,
            "text": _text(fields),
            "tool_choice": choice if isinstance(choice, str) else "auto" if choice is None else choice.model_dump(),
            "tools": [tool.model_dump() for tool in fields.tools or ()],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": fields.truncation or "disabled",
            "usage": self._usage,
            "user": fields.user,
        }

    def _add(self, events: Sequence[Event], detail: Detail | None) -> list[Happening]:
        logprobs: list[dict[str, Any]] = []
        if detail is not None and self._fields.wants_logprobs:
            found = chat_logprobs(self._names, detail, self._fields.top_logprobs or 0)
            logprobs = found["content"] if found is not None else []
        happenings: list[Happening] = []
        for event in events:
            if isinstance(event, Content):
                # The tokens come together; the first text among the events has them.
                happenings += self._items.add(event, logprobs)
                logprobs = []
            else:
                happenings += self._items.add(event)
        return happenings

    def _written(self, happenings: Sequence[Happening]) -> bytes:
        found: list[bytes] = []
        for happening in happenings:
            event = {**happening, "sequence_number": self._number}
            self._number += 1
            found.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)))
        return b"".join(found)


def _text(fields: ResponsesRequest) -> dict[str, Any]:
    form = fields.text.format if fields.text is not None else None
    verbosity = fields.text.verbosity if fields.text is not None else None
    return {
        "format": {"type": "text"} if form is None else form.model_dump(by_alias=True),
        "verbosity": verbosity or "medium",
    }


def _error_code(error: TercetError) -> str:
    if isinstance(error, OverloadedError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"
