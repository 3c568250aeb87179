"""A core and front ends of other versions: what one version apart works, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from tercet_core.streams.connection import OLDEST_PROTOCOL, PROTOCOL_VERSION
from tercet_proto.v1 import engine_pb2 as pb
from tests.contract.protocol.frozen import Messages, frozen
from tests.fakes.stream_client import TIMEOUT
from tests.fakes.worker import FakeWorker, expected
from tests.integration.core.conftest import StartCore

old = Messages(1)


class Stream:
    """A stream of a version-1 front end, in the raw."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        connect = self._channel.stream_stream(
            "/tercet.v1.Engine/Connect",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=old.EngineFrame.FromString,
        )
        self.call: Any = connect()
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, int] = {}
        self.rejected: dict[int, str] = {}
        self.draining = ""
        self.stats: Any = None

    async def write(self, **fields: Any) -> None:
        await self.call.write(old.ClientFrame(**fields))

    async def read(self) -> Any:
        frame = await asyncio.wait_for(self.call.read(), TIMEOUT)
        step = frame.step
        handles = np.frombuffer(step.handles, "<u8").tolist()
        offsets = np.frombuffer(step.token_offsets, "<i4").tolist()
        ids = np.frombuffer(step.token_ids, "<i4").tolist()
        for row, handle in enumerate(handles):
            self.tokens.setdefault(handle, []).extend(ids[offsets[row] : offsets[row + 1]])
        for row, reason in zip(np.frombuffer(step.finish_rows, "<i4").tolist(), step.finish_reasons, strict=True):
            self.reasons[handles[row]] = reason
        for item in frame.rejected:
            self.rejected[item.handle] = item.message
        self.draining = self.draining or frame.draining.reason
        if frame.HasField("stats"):
            self.stats = frame.stats
        return frame

    async def read_until(self, condition: Any) -> None:
        while not condition():
            await self.read()

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


def submit(handle: int, prompt: list[int], *, resumed: list[int] | None = None, count: int = 8) -> Any:
    return old.Submit(
        handle=handle,
        attempt=int(resumed is not None),
        request_id=f"r{handle}",
        prompt_ids=np.array(prompt, "<i4").tobytes(),
        resumed_ids=np.array(resumed or [], "<i4").tobytes(),
        sampling=old.Sampling(temperature=0, top_p=1, max_tokens=count, logprobs=1),
    )


async def test_a_front_end_of_version_1_has_its_whole_conversation(start_core: StartCore) -> None:
    async with start_core(served_model_name=["chat"], grace=0.2) as core, FakeWorker(core.link) as worker:
        stream = Stream(core.settings.listen)
        await stream.write(hello=old.Hello(frontend_id="old", protocol=1))
        while not (frame := await stream.read()).HasField("welcome"):
            pass
        assert frame.welcome.protocol == 1
        assert (frame.welcome.model_name, frame.welcome.block_size) == ("fake", 16)
        texts = {handle: list(range(handle + 3, handle + 40)) for handle in (1, 2, 3)}
        await stream.write(submits=[submit(1, texts[1]), submit(2, texts[2], resumed=expected(texts[2], 3))])
        await stream.read_until(lambda: stream.reasons.keys() == {1, 2})
        assert stream.tokens[1] == expected(texts[1], 8)
        assert stream.tokens[2] == expected(texts[2], 8)[3:]
        assert set(stream.reasons.values()) == {2}
        await stream.read_until(lambda: stream.stats.output_tokens == 13)
        worker.hold()
        await stream.write(submits=[submit(3, texts[3], count=500), submit(4, [])])
        await stream.read_until(lambda: stream.rejected)
        assert "prompt" in stream.rejected[4]
        await stream.write(aborts=[old.Abort(handle=3, reason="test")])
        worker.release()
        await stream.read_until(lambda: stream.stats.running == 0)
        core.stop.set()
        await stream.read_until(lambda: stream.draining)
        await core.ended()
        await stream.close()


@pytest.mark.parametrize(
    ("newest", "oldest", "spoken"),
    [(1, 0, 1), (2, 0, 2), (2, 1, 2), (3, 2, 2), (9, 1, 2), (1, 1, 1)],
)
async def test_the_newest_version_that_both_speak(start_core: StartCore, newest: int, oldest: int, spoken: int) -> None:
    async with start_core() as core, FakeWorker(core.link), grpc.aio.insecure_channel(core.settings.listen) as channel:
        call: Any = _connect(channel)
        await call.write(pb.ClientFrame(hello=pb.Hello(frontend_id="f", protocol=newest, oldest_protocol=oldest)))
        while not (frame := await asyncio.wait_for(call.read(), TIMEOUT)).HasField("welcome"):
            pass
        assert frame.welcome.protocol == spoken
        call.cancel()


@pytest.mark.parametrize(("newest", "oldest"), [(0, 0), (3, 0), (9, 3)])
async def test_no_version_in_common_is_said_so(start_core: StartCore, newest: int, oldest: int) -> None:
    async with start_core() as core, grpc.aio.insecure_channel(core.settings.listen) as channel:
        call: Any = _connect(channel)
        await call.write(pb.ClientFrame(hello=pb.Hello(frontend_id="f", protocol=newest, oldest_protocol=oldest)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), TIMEOUT)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = caught.value.details() or ""
        assert f"versions {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}" in details
        assert f"{oldest or newest} to {newest}" in details


def _connect(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        "/tercet.v1.Engine/Connect",
        request_serializer=pb.ClientFrame.SerializeToString,
        response_deserializer=pb.EngineFrame.FromString,
    )()


def _shape(field: FieldDescriptor) -> tuple[object, ...]:
    of = field.message_type or field.enum_type
    return field.name, field.type, field.is_repeated, field.has_presence, of.full_name if of else None


def _kept(before: Descriptor, now: Descriptor) -> list[str]:
    numbers = now.fields_by_number
    return [
        f"{before.full_name}.{field.name}"
        for field in before.fields
        if field.number not in numbers or _shape(numbers[field.number]) != _shape(field)
    ]


def test_every_field_of_version_1_is_what_it_was() -> None:
    before, now = frozen(1), pb.DESCRIPTOR
    changed = [
        fault
        for name, message in before.message_types_by_name.items()
        for fault in _kept(message, now.message_types_by_name[name])
    ]
    assert not changed
    for name, enum in before.enum_types_by_name.items():
        present: EnumDescriptor = now.enum_types_by_name[name]
        assert {value.name: value.number for value in enum.values}.items() <= {
            value.name: value.number for value in present.values
        }.items()
    methods = [method.name for method in before.services_by_name["Engine"].methods]
    assert set(methods) <= {method.name for method in now.services_by_name["Engine"].methods}
