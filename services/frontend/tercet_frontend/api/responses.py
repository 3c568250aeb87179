"""``/v1/responses``: OpenAI's newer API, and what it keeps of answers for those that follow."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import TypeAdapter

from tercet_frontend.api.chat_job import MESSAGE_BYTES, chat_job
from tercet_frontend.api.endpoint import ApiContext, Sender, receive
from tercet_frontend.api.errors import JsonResponse
from tercet_frontend.api.generation import GenerationResponse, head_of, run_whole
from tercet_frontend.api.logprobs import TokenNames
from tercet_frontend.api.openapi import body_of
from tercet_frontend.api.renaming import renamed
from tercet_frontend.api.response_answer import ResponseAnswer
from tercet_frontend.conversations import StoredResponse
from tercet_frontend.edge import tenant_of
from tercet_frontend.schemas.responses import Item, MessageItem, ResponsesChat, ResponsesRequest
from tercet_frontend.schemas.validation import validate
from tercet_shared.errors import ContextLengthError, InvalidRequestError, NotFoundError, UnavailableError, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import Message, Receive, Scope, Send

    from tercet_frontend.admission import Serving
    from tercet_frontend.api.generation import Job
    from tercet_frontend.conversations import ResponseStore

logger = logging.getLogger(__name__)

_ID = re.compile(r"resp_[0-9a-f]{32}")
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
MAX_LISTED = 100

_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    r"messages\b.*": "input",
    r"(tools\[\d+\])\.function": r"\1",
}
"""Fields of the chat request, and of the one that it is made of."""


def responses_router(context: ApiContext, store: ResponseStore) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["responses"])
    responses = Responses(context, store)

    @router.post("/v1/responses", response_class=Response, openapi_extra=body_of(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        """Answers input, by itself or after an earlier response."""
        return await responses.create(request)

    @router.get("/v1/responses/{response_id}", response_class=JsonResponse)
    async def retrieve_response(
        response_id: str,
        request: Request,
        stream: bool = False,  # noqa: FBT001, FBT002, RUF100  # FastAPI passes it by name
    ) -> Response:
        """Returns a response that is stored, or that is being streamed by this front end."""
        if stream:
            raise InvalidRequestError("stream is not supported here.", param="stream")
        running = responses.running.get((tenant_of(request.scope), response_id))
        if running is not None:
            return JsonResponse(running.response())
        return JsonResponse((await responses.stored(tenant_of(request.scope), response_id)).response)

    @router.delete("/v1/responses/{response_id}", response_class=JsonResponse)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forgets a stored response; those that follow it stay complete."""
        if not _ID.fullmatch(response_id) or not await store.delete(tenant_of(request.scope), response_id):
            raise _unknown(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel", response_class=JsonResponse)
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Ends a response that is being streamed by this front end."""
        tenant = tenant_of(request.scope)
        running = responses.running.get((tenant, response_id))
        if running is None:
            status = (await responses.stored(tenant, response_id)).response["status"]
            raise InvalidRequestError(f"The response is not running any more; its status is {status}.")
        context.admission.running.cancel(tenant, response_id)
        return JsonResponse({**running.response(), "status": "cancelled"})

    @router.get("/v1/responses/{response_id}/input_items", response_class=JsonResponse)
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """Lists the items that the request of a stored response brought."""
        stored = await responses.stored(tenant_of(request.scope), response_id)
        return JsonResponse(_page(stored.input_items, limit, order, after))

    return router


class Responses:
    """Makes responses, and keeps them where that is asked for.

    Attributes:
        running: answers that are being streamed, by tenant and id.
    """

    def __init__(self, context: ApiContext, store: ResponseStore) -> None:
        self.running: dict[tuple[str, str], ResponseAnswer] = {}
        self._context = context
        self._store = store

    async def create(self, request: Request) -> Response:
        """Returns the response to a request for one.

        Raises:
            RequestError: the request cannot be served as it was sent.
            UnavailableError: nothing can be served now, or the store that it needs cannot be reached.
        """
        context = self._context
        serving, fields = await receive(request, context, ResponsesRequest)
        sender = Sender.of(request)
        history: list[dict[str, Any]] = []
        if fields.previous_response_id is not None:
            history = (await self.stored(sender.tenant, fields.previous_response_id, following=True)).conversation()
        answer = ResponseAnswer(fields, TokenNames(serving.text.detokenizer), stored=await self._keeps(fields))
        items = _ITEMS.validate_python(history) if history else []
        job = await self._job(serving, fields, [*items, *fields.items], answer, sender)
        answer.drawn_with(job.params[0])
        kept = _Kept(self._store, sender.tenant, answer, [_as_stored(item) for item in fields.items], history)
        if job.stream:
            return _Streamed(job, serving, context, self.running, kept)
        head = head_of(job)
        ids = (head.identity, sender.request_id)
        work = run_whole(job, serving, head)
        whole = await context.admission.run(request.receive, work, tenant=sender.tenant, ids=ids)
        answer.body(*whole)
        await kept.keep()
        return JsonResponse(answer.response())

    async def stored(self, tenant: str, response_id: str, *, following: bool = False) -> StoredResponse:
        """Returns what is kept of a response.

        Raises:
            NotFoundError: there is none, or it is another tenant's; ``following`` names the request's field.
            UnavailableError: the store cannot be reached.
        """
        record = await self._store.get(tenant, response_id) if _ID.fullmatch(response_id) else None
        if record is None:
            raise _unknown(response_id, "previous_response_id" if following else None)
        return StoredResponse.decode(record)

    async def _keeps(self, fields: ResponsesRequest) -> bool:
        """Returns whether the answer is to be kept.

        Who does not say so gets an answer also when it cannot be; ``store`` in it tells.
        """
        if fields.store is False:
            return False
        try:
            await self._store.check()
        except UnavailableError:
            if fields.store:
                raise
            return False
        return True

    async def _job(
        self, serving: Serving, fields: ResponsesRequest, items: list[Item], answer: ResponseAnswer, sender: Sender
    ) -> Job:
        async def job(items: list[Item]) -> Job:
            with renamed(_NAMES):
                chat = await self._context.beside(
                    lambda: validate(ResponsesChat, fields.chat(items)), len(items) * MESSAGE_BYTES
                )
                return await chat_job(self._context, serving, chat, shape=answer, sender=sender)

        try:
            return await job(items)
        except ContextLengthError:
            # Turns begin with the user's messages: a cut elsewhere could part a call from its output.
            starts = [
                index for index, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"
            ]
            cuts = starts[1:]
            if fields.truncation != "auto" or not cuts:
                raise
        system = items[: next(index for index, item in enumerate(items) if not _is_system(item))]
        fitting = await job([*system, *items[cuts[-1] :]])
        low, high = 0, len(cuts) - 1
        while low < high:  # the first cut that leaves little enough is in cuts[low:high + 1]
            middle = (low + high) // 2
            try:
                fitting = await job([*system, *items[cuts[middle] :]])
            except ContextLengthError:
                low = middle + 1
            else:
                high = middle
        return fitting


@dataclass(slots=True)
class _Kept:
    """An answer, and what is stored with it."""

    store: ResponseStore
    tenant: str
    answer: ResponseAnswer
    input_items: list[dict[str, Any]]
    history: list[dict[str, Any]] = field(default_factory=list)

    async def keep(self) -> None:
        """Stores the answer as it is now, if that is asked for and possible; the answer then says whether it is."""
        answer = self.answer
        if not answer.stored:
            return
        response = answer.response()
        record = StoredResponse(response, self.input_items, self.history).encode()
        try:
            answer.stored = await self.store.put(self.tenant, response["id"], record)
        except UnavailableError:
            answer.stored = False
        if not answer.stored:
            logger.warning("response %s could not be stored", response["id"])


class _Streamed(Response):
    """A streamed response: known while it runs, stored before its last event."""

    def __init__(
        self,
        job: Job,
        serving: Serving,
        context: ApiContext,
        running: dict[tuple[str, str], ResponseAnswer],
        kept: _Kept,
    ) -> None:
        super().__init__()
        self._generation = GenerationResponse(job, serving, context.admission)
        self._running = running
        self._kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request; raises as `GenerationResponse` does."""
        kept = self._kept
        answer = kept.answer

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await kept.keep()
                message = {**message, "body": message.get("body", b"") + answer.last_event()}
            await send(message)

        def begun(response_id: str) -> None:
            self._running[kept.tenant, response_id] = answer

        answer.when_begun = begun
        try:
            await self._generation(scope, receive, send_closing)
        finally:
            answer.when_begun = None  # it knows the answer: a circle
            if answer.identity:
                self._running.pop((kept.tenant, answer.identity), None)


def _is_system(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in {"system", "developer"}


def _unknown(response_id: str, param: str | None = None) -> NotFoundError:
    return NotFoundError(f"There is no response with the id {bounded(response_id, 100)!r}.", param=param)


def _as_stored(item: Item) -> dict[str, Any]:
    """Returns an item of the input with what listings have beyond it: a type, an id, content in parts."""
    found = item.model_dump(mode="json", exclude_none=True)
    kind = found.setdefault("type", "message")
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        extra: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
        found["content"] = [{"type": part, "text": item.content, **extra}]
    found["id"] = f"{_PREFIXES[kind]}_{token_hex(16)}"
    found["status"] = "completed"
    return found


def _page(items: Sequence[Mapping[str, Any]], limit: int, order: str, after: str | None) -> dict[str, Any]:
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        position = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if position is None:
            raise NotFoundError(f"There is no item with the id {bounded(after, 100)!r}.", param="after")
        ordered = ordered[position + 1 :]
    data = ordered[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > limit,
    }
