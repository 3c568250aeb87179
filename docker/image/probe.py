"""``python -ISE probe.py URL``: exit code 0 when ``GET URL`` answers 200, else 1 with the reason on one line.

The health check of every image. It imports little, because an orchestrator runs it every few seconds.
"""

import sys
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

TIMEOUT_S = 4.0
"""Below the timeout of the health checks, so that the reason is printed."""


def reason_of_failure(url: str) -> str | None:
    """Returns None when ``url`` answers 200, else what it does instead."""
    opener = build_opener(ProxyHandler({}))  # the container's own port, whatever proxies its environment names
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except HTTPError as error:
        return f"status {error.code}: {error.read(300).decode(errors='replace')}"
    except (OSError, HTTPException, ValueError) as error:
        return str(error) or type(error).__name__


def main(arguments: list[str]) -> int:
    """Probes the one URL in ``arguments``; returns the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: probe.py URL\n")
        return 2
    reason = reason_of_failure(arguments[0])
    if reason is not None:
        sys.stdout.write(f"{arguments[0]}: {' '.join(reason.split())}\n")
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
