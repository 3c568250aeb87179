"""What a process tells of itself: metrics, traces and logs.

`telemetry.Telemetry` is made once by whoever starts a service, and handed on: nothing is global. What measures gets a
`instruments.Meter` and a `tracing.Tracing`; where those numbers and spans go is decided here alone.

| file | what |
|---|---|
| `instruments.py` | counters, histograms and observed numbers, cheap enough for hot paths |
| `exposition.py` | them as Prometheus text, with exemplars |
| `collector.py`, `points.py`, `delivery.py` | them, and spans, by OTLP to a collector |
| `tracing.py`, `spans.py` | which requests are traced, and their spans |
| `endpoint.py` | ``/metrics``, ``/livez``, ``/readyz`` |
| `logs.py` | lines of text or JSON, with trace ids |
"""
