"""A small real program that plays a service for the supervisor: it reports, logs, stops or dies as it is told.

It notes what happens to it in a file, one line each: ``start NAME PID``, ``term NAME``, ``end NAME``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Front(BaseHTTPRequestHandler):
    """Answers what the supervisor asks a front end."""

    def __init__(self, *args: object, ready: bool) -> None:
        self._ready = ready
        super().__init__(*args)  # type: ignore[arg-type]  # handed through

    def do_GET(self) -> None:  # the base class's name
        bodies = {
            "/readyz": (200, b"ok") if self._ready else (503, b"no core"),
            "/v1/models": (200, json.dumps({"data": [{"id": "played"}]}).encode()),
        }
        status, body = bodies.get(self.path, (404, b""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--http", action="store_true", help="serve HTTP and report the port")
    parser.add_argument("--unready", action="store_true", help="/readyz answers 503")
    parser.add_argument("--log", default="", help="write this to standard error")
    parser.add_argument("--progress", default="", help="report this stage")
    parser.add_argument("--fatal", default="", help="report this, then exit 1")
    parser.add_argument("--fatal-if", nargs=2, help="a file, and what to report when it exists, as with --fatal")
    parser.add_argument("--asks", type=Path, help="for every process id in this FIFO, ask that the worker be restarted")
    parser.add_argument("--exit", type=int, help="exit with this code at once")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--outlives", type=Path, help="do not die with the supervisor; end when this FIFO is written")
    parser.add_argument("--orphan", action="store_true", help="start a process that outlives this one, and note it")
    parser.add_argument("--socket", type=Path, help="leave a file here, as a socket would be")
    parser.add_argument("--holds", type=Path, help="keep this FIFO open for writing, as one keeps a link")
    parser.add_argument(
        "--follows", type=Path, help="at SIGUSR1 let go of what is held; die when nobody holds this FIFO"
    )
    parser.add_argument("--loses", type=Path, help="report a fatal error when nobody holds this FIFO any more")
    options = parser.parse_args()

    def note(line: str) -> None:
        with options.notes.open("a") as notes:
            notes.write(line + "\n")

    def report(**event: object) -> None:
        os.write(options.report_fd, json.dumps(event).encode() + b"\n")

    def follow(other: Path) -> None:
        with other.open("rb") as followed:
            signal.sigwait({signal.SIGUSR1})
            os.close(held[0])
            followed.read()
        os.kill(os.getpid(), signal.SIGKILL)

    def lose(link: Path) -> None:
        with link.open("rb") as held:
            held.read()
        report(event="fatal", message="The peer is gone.")
        os._exit(1)

    def ask(pids: Path) -> None:
        with pids.open() as lines:
            for count, line in enumerate(lines, 1):
                report(event="restart", child="worker", pid=int(line), message="It hangs.")
                os.write(2, f"asked {count}\n".encode())

    def outlive(fifo: Path) -> None:
        fifo.read_text()
        (options.socket.parent / "late").touch()
        os._exit(0)

    # Waited for below, by all threads alike: a handler does not run if its signal comes while the interpreter is about
    # to block.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    held: list[int] = []
    note(f"start {options.name} {os.getpid()}")
    if options.socket:
        options.socket.touch()
    if options.orphan:
        note(f"start orphan {subprocess.Popen(['sleep', '600']).pid}")  # noqa: S607  # any will do
    if options.log:
        os.write(2, options.log.encode() + b"\n")
    if options.outlives:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: none
        threading.Thread(target=outlive, args=(options.outlives,), daemon=True).start()
    if options.follows:
        threading.Thread(target=follow, args=(options.follows,), daemon=True).start()
    if options.holds:
        held.append(os.open(options.holds, os.O_WRONLY))
    if options.loses:
        threading.Thread(target=lose, args=(options.loses,), daemon=True).start()
    if options.asks:
        threading.Thread(target=ask, args=(options.asks,), daemon=True).start()
    if options.fatal_if and Path(options.fatal_if[0]).exists():
        options.fatal = options.fatal_if[1]
    if options.progress:
        report(event="progress", stage=options.progress, fraction=0.5)
    if options.fatal:
        report(event="fatal", message=options.fatal)
        os._exit(1)
    if options.exit is not None:
        os._exit(options.exit)
    detail: dict[str, object] = {}
    if options.http:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Front, ready=not options.unready))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        detail["port"] = server.server_port
    report(event="ready", detail=detail)
    while True:
        signal.sigwait({signal.SIGTERM})
        note(f"term {options.name}")
        if not options.stubborn:
            break
    note(f"end {options.name}")


if __name__ == "__main__":
    main()
