"""Answers of ``/v1/responses``: output items that grow with the model's text, and the events that say so."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Any

from tercet_frontend.parsing.events import Content, Reasoning, ToolCallArguments, ToolCallBegin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.parsing.events import Event

Happening = dict[str, Any]
"""An event of a stream, without its number."""


class OutputItems:
    """The items of one response. An item is open from its first event to the first one of another kind.

    Attributes:
        items: as they stand now; the last may be open.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: type[Event] | None = None  # what the open item is made of: for calls, ToolCallBegin
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []

    def add(self, event: Event, logprobs: Sequence[dict[str, Any]] = ()) -> list[Happening]:
        """Adds what the model wrote.

        Args:
            event: what it is.
            logprobs: of its tokens, in OpenAI's form; kept for text alone.
        """
        if isinstance(event, ToolCallBegin):
            return self._begin(
                ToolCallBegin,
                {
                    "id": f"fc_{token_hex(16)}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": event.id,
                    "name": event.name,
                    "arguments": "",
                },
            )
        found: list[Happening] = []
        if isinstance(event, ToolCallArguments):
            kind, extra = "response.function_call_arguments.delta", {}
        elif isinstance(event, Content):
            if self._open is not Content:
                message = {"id": f"msg_{token_hex(16)}", "type": "message", "status": "in_progress"}
                found = self._begin(Content, message | {"role": "assistant", "content": []})
            self._logprobs += logprobs
            kind, extra = "response.output_text.delta", {"content_index": 0, "logprobs": list(logprobs)}
        else:
            if self._open is not Reasoning:
                thoughts = {"id": f"rs_{token_hex(16)}", "type": "reasoning", "status": "in_progress"}
                found = self._begin(Reasoning, thoughts | {"summary": [], "content": []})
            kind, extra = "response.reasoning_text.delta", {"content_index": 0}
        self._texts.append(event.text)
        found.append({"type": kind, **self._place(), "delta": event.text, **extra})
        return found

    def close(self, status: str = "completed") -> list[Happening]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        item = self.items[-1]
        place = self._place()
        text = "".join(self._texts)
        item["status"] = status
        if self._open is ToolCallBegin:
            item["arguments"] = text
            done = [{"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": text}]
        else:
            part = self._part(text)
            item["content"] = [part]
            in_item = {**place, "content_index": 0}
            if self._open is Content:
                ended = {"type": "response.output_text.done", "text": text, "logprobs": part["logprobs"]}
            else:
                ended = {"type": "response.reasoning_text.done", "text": text}
            done = [{**ended, **in_item}, {"type": "response.content_part.done", **in_item, "part": part}]
        self._open = None
        self._texts = []
        self._logprobs = []
        return [*done, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}]

    def _begin(self, kind: type[Event], item: dict[str, Any]) -> list[Happening]:
        found = self.close()
        self.items.append(item)
        self._open = kind
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        found.append(added)
        if kind is not ToolCallBegin:
            place = {**self._place(), "content_index": 0}
            found.append({"type": "response.content_part.added", **place, "part": self._part("")})
        return found

    def _part(self, text: str) -> dict[str, Any]:
        if self._open is Content:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}
        return {"type": "reasoning_text", "text": text}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
