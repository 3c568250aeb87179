"""Shows what an operator sees: starts `tercet serve` with a collector, asks once, prints the trace and what moved.

    python -m tests.bench.observe MODEL [--prompt TEXT] [--tokens 24]

The collector is the one of the tests; with ``--otlp-endpoint`` of your own, `tercet serve` sends the same to yours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from secrets import token_hex

from tests.fakes.otlp import Collector, Point, Span

READY_S = 600.0
_WHOLE = {"tercet.choice", "tercet.core.request", "tercet.worker.request"}
_SHOWN = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "gen_ai.response.finish_reasons",
    "tercet.cached_tokens",
    "tercet.core.id",
    "tercet.step.id",
    "tercet.step.tokens",
    "tercet.steps",
    "tercet.worker.wait_ms",
    "tercet.worker.run_ms",
    "tercet.end",
)


@contextlib.contextmanager
def serving(model: str, collector: Collector, flags: list[str]) -> Iterator[str]:
    """Runs `tercet serve` and yields its URL."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as runs:
        command = [sys.executable, "-m", "tercet_shared.cli", "serve", "--port=0", f"--run-dir={runs}"]
        command += ["--log-level=warning", f"--otlp-endpoint={collector.endpoint}", "--trace-ratio=0", *flags, model]
        quick = {"OTEL_METRIC_EXPORT_INTERVAL": "250", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | quick)
        try:
            assert process.stdout is not None
            found = (re.search(r"http://\S+", line) for line in process.stdout)
            url = next((match[0] for match in found if match is not None), None)
            if url is None:
                raise SystemExit(process.wait() or 1)  # it has said why
            yield url
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def ask(url: str, prompt: str, tokens: int, traceparent: str) -> str:
    """Sends one streamed request and returns the text of its answer."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:  # noqa: S310  # our own server
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True}
    headers = {"content-type": "application/json", "traceparent": traceparent}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
    text = ""
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        for line in answer:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return text


def all_ready(collector: Collector) -> bool:
    """Returns whether every service has told of itself, and of the others."""
    ready = [point.value for point in collector.points("tercet.frontend.cores") if point.attributes["state"] == "ready"]
    linked = [point.value for point in collector.points("tercet.worker.linked")]
    workers = [point.value for point in collector.points("tercet.workers")]
    return ready == linked == workers == [1]


def print_tree(spans: list[Span]) -> None:
    """Prints spans below each other, with the milliseconds at which they began and that they took."""
    known = {span.span_id for span in spans}
    begin = min(span.start for span in spans)

    def below(parent: str | None, depth: int) -> None:
        for span in spans:
            mine = span.parent_id == parent if parent is not None else span.parent_id not in known
            if not mine:
                continue
            name = "  " * depth + span.name
            shown = {key: span.attributes[key] for key in _SHOWN if key in span.attributes}
            detail = " ".join(f"{key.rpartition('.')[2]}={_short(value)}" for key, value in shown.items())
            at, took = (span.start - begin) / 1e6, span.seconds * 1e3
            print(f"{name:<34}{span.service:<17}{at:>9.1f}{took:>10.1f}  {detail}")
            for event in span.events:
                print(f"{'  ' * (depth + 1) + '· ' + event.name:<51}{(event.time - begin) / 1e6:>9.1f}")
            below(span.span_id, depth + 1)

    print(f"{'span':<34}{'service':<17}{'at ms':>9}{'took ms':>10}")
    below(None, 0)


def _short(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def print_moved(before: list[Point], after: list[Point]) -> None:
    """Prints the series that the request changed."""

    def key(point: Point) -> tuple[str, str, str]:
        return point.service, point.name, json.dumps(point.attributes, sort_keys=True)

    earlier = {key(point): point.value for point in before}
    print(f"\n{'metric':<42}{'service':<17}{'before':>10}{'after':>10}  labels")
    for point in sorted(after, key=key):
        was = earlier.get(key(point), 0.0)
        if point.value != was:
            labels = " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in point.attributes.items())
            exemplar = "  ◆ trace" if point.exemplars else ""
            print(f"{point.name:<42}{point.service:<17}{was:>10g}{point.value:>10g}  {labels}{exemplar}")


def main() -> None:
    """Does what the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", default="Name three rivers of France.")
    parser.add_argument("--tokens", type=int, default=24)
    options, flags = parser.parse_known_args()
    trace_id = token_hex(16)
    with Collector() as collector, serving(options.model, collector, flags) as url:
        collector.wait_for(lambda: all_ready(collector), READY_S)
        before = collector.all_points()
        text = ask(url, options.prompt, options.tokens, f"00-{trace_id}-{token_hex(8)}-01")

        def whole() -> bool:
            names = {span.name for span in collector.trace(trace_id)}
            return names >= _WHOLE and any(span.service == _SERVICES[0] for span in collector.trace(trace_id))

        collector.wait_for(whole)
        told = "gen_ai.server.request.duration"
        collector.wait_for(lambda: any(point.value for point in collector.points(told)))
        collector.wait_for(lambda: any(point.value for point in collector.points("tercet.worker.tokens")))
        after = collector.all_points()
    print(f"{options.prompt!r} → {text!r}\ntrace {trace_id}\n")
    print_tree(collector.trace(trace_id))
    print_moved(before, after)


_SERVICES = ("tercet-frontend", "tercet-core", "tercet-worker")


if __name__ == "__main__":
    main()
