"""Ranges of numbers that `SamplingParams.check` checks, for the OpenAPI document alone."""

from __future__ import annotations

from typing import Any

_Range = dict[str, Any]

TEMPERATURE: _Range = {"minimum": 0, "maximum": 100}
TOP_P: _Range = {"exclusiveMinimum": 0, "maximum": 1}
TOP_K: _Range = {"minimum": -1, "maximum": 2**31 - 1}
MIN_P: _Range = {"minimum": 0, "maximum": 1}
PENALTY: _Range = {"minimum": -2, "maximum": 2}
REPETITION_PENALTY: _Range = {"exclusiveMinimum": 0, "maximum": 100}
TOKENS: _Range = {"minimum": 0}
SOME_TOKENS: _Range = {"minimum": 1}
