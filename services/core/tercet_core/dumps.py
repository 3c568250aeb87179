"""What is kept of a step that failed: one line in the log, and, where a directory is given, the whole plan as JSON."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tercet_shared.errors import bounded

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_core.scheduling.request import Request
    from tercet_shared.wire.step import StepPlan

_log = logging.getLogger(__name__)

MAX_FILES: Final = 16
"""Plans that one core writes at most, so that a fault that repeats does not fill the disk."""

_MAX_LINE: Final = 2_000
_MAX_NAMED: Final = 8  # requests that the log line names


class StepDumps:
    """Writes down failed steps.

    Args:
        directory: where whole plans go, prompts included; made when it is missing. None: only the log.
        name: of this core; the files begin with it.
    """

    def __init__(self, directory: Path | None, name: str) -> None:
        self._directory = directory
        self._name = name
        self._written = 0

    def write(self, plan: StepPlan, error: str, requests: list[Request]) -> None:
        """Writes one failed step down; ``requests`` are those in it that have not ended. Does not raise."""
        named = ", ".join(request.request_id for request in requests[:_MAX_NAMED])
        more = f" and {len(requests) - _MAX_NAMED} more" if len(requests) > _MAX_NAMED else ""
        rows = [
            f"slot {slot}: {count} tokens after {computed}{', samples' if samples else ''}"
            for slot, count, computed, samples in zip(
                plan.slots[:_MAX_NAMED].tolist(),
                plan.num_tokens[:_MAX_NAMED].tolist(),
                plan.computed[:_MAX_NAMED].tolist(),
                plan.samples[:_MAX_NAMED].tolist(),
                strict=True,
            )
        ]
        _log.error(
            "%s",
            bounded(
                f"step {plan.step_id} failed: {error}; {len(plan.slots)} rows, {int(plan.num_tokens.sum())} tokens, "
                f"requests {named or 'none'}{more}; {'; '.join(rows)}{'; …' if len(plan.slots) > _MAX_NAMED else ''}",
                _MAX_LINE,
            ),
        )
        if self._directory is not None and self._written < MAX_FILES:
            self._written += 1
            self._write_file(self._directory, plan, error, requests)

    def _write_file(self, directory: Path, plan: StepPlan, error: str, requests: list[Request]) -> None:
        path = directory / f"{self._name}-step-{plan.step_id}.json"
        content = {
            "error": error,
            "requests": [{"slot": request.slot, "request_id": request.request_id} for request in requests],
            "plan": dataclasses.asdict(plan),
        }
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(json.dumps(content, default=_plain))
        except OSError as failure:
            _log.warning("the plan of step %d cannot be written to %s: %s", plan.step_id, path, failure.strerror)
        else:
            _log.error("the plan of step %d is in %s", plan.step_id, path)


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a step plan holds a {type(value).__name__}")
