"""One end of a link as a process of its own: ``peer.py core|worker PATH LOOP [frames to send before dying]``, or
``peer.py attach ADDRESS LOOP`` for a worker of a core on another host.

Prints a line for what happens: "listening", "joined", "closed: KIND: TEXT". Both kinds send back each frame that they
get; a worker marks masks. A worker given a number sends that many results at once and is then killed without a goodbye.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.connect_remote import connect_remote
from tercet_shared.ipc.link import Stream
from tercet_shared.ipc.listener import Accepted, LinkListener
from tercet_shared.ipc.settings import HeartbeatSettings, ListenerSettings

if TYPE_CHECKING:
    from tercet_shared.ipc.link import FrameLink


def say(line: str) -> None:
    print(line, flush=True)


def echo(connection: FrameLink, stream: Stream = Stream.STEPS, mark: bytes = b"") -> None:
    def send_back(frames: list[bytes]) -> None:
        for frame in frames:
            connection.send(mark + frame)

    connection.on_frames(send_back, stream)


async def run_core(path: Path) -> None:
    joined: asyncio.Queue[FrameLink] = asyncio.Queue()
    settings = ListenerSettings(heartbeat=HeartbeatSettings(30.0, 90.0))
    with LinkListener(path, settings) as listener:
        async with asyncio.TaskGroup() as tasks:
            serve = tasks.create_task(listener.serve(Accepted, lambda connection, _: joined.put_nowait(connection)))
            say("listening")
            connection = await joined.get()
            echo(connection)
            say("joined")
            reason = await connection.wait_closed()
            say(f"closed: {reason.kind}: {reason}")
            serve.cancel()


async def run_worker(where: str, results: int, *, remote: bool) -> None:
    hello = b"peer process"
    joined = await (connect_remote(where, hello) if remote else connect(Path(where), hello))
    connection = joined.connection
    if results:
        for number in range(results):
            connection.send(number.to_bytes(4, "little"))
        os.kill(os.getpid(), signal.SIGKILL)
    echo(connection)
    echo(connection, Stream.MASKS, b"mask ")
    say("joined")
    reason = await connection.wait_closed()
    say(f"closed: {reason.kind}: {reason}")


def main() -> None:
    role, where, loop = sys.argv[1:4]
    results = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        if role == "core":
            runner.run(run_core(Path(where)))
        else:
            runner.run(run_worker(where, results, remote=role == "attach"))


if __name__ == "__main__":
    main()
