"""A router with a clock of the test's own, and requests for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tercet_frontend.cores.interface import GenerationRequest
from tercet_frontend.routing import CoreFacts, LoadReport, Member, Router
from tercet_shared.hashing import chain, root_key
from tercet_shared.registry.interface import BlockBatch
from tercet_shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.routing import Placement, RoutingPolicy
    from tercet_shared.hashing import BlockKey

BLOCK = 16


def facts(name: str, *, incarnation: str = "first", slots: int = 64, block_size: int = BLOCK) -> CoreFacts:
    """Returns those of a core."""
    return CoreFacts(
        core_id=name, incarnation=incarnation, model_fingerprint="weights", block_size=block_size, slots=slots
    )


def prompt(seed: int, tokens: int = 320) -> np.ndarray:
    """Returns int32[tokens]; the same seed begins in the same way."""
    return np.random.default_rng(seed).integers(0, 50_000, tokens, dtype=np.int32)


def request(ids: np.ndarray, **fields: object) -> GenerationRequest:
    """Returns a request with the prompt ``ids``."""
    values: dict[str, object] = {
        "request_id": "1",
        "model": "m",
        "prompt_ids": ids,
        "params": SamplingParams(),
    } | fields
    return GenerationRequest(**values)  # type: ignore[arg-type]


def keys(ids: np.ndarray, *, salt: str = "", block_size: int = BLOCK) -> list[BlockKey]:
    """Returns those of the whole blocks of ``ids``, as a core has them."""
    return chain(root_key("weights", salt=salt), ids, block_size)


def snapshot(known: Sequence[BlockKey], first: int = 0) -> BlockBatch:
    """Returns a snapshot."""
    return BlockBatch(first, (), known, snapshot=True)


@dataclass
class Fleet:
    """A router with some cores, by name; ``seconds`` is its time."""

    policy: RoutingPolicy
    names: Sequence[str] = ("a", "b", "c")
    slots: int = 64
    seconds: float = 100.0
    members: dict[str, Member[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.router: Router[str] = Router(self.policy, clock=lambda: self.seconds)
        for name in self.names:
            self.join(name)

    def join(self, name: str, incarnation: str = "first") -> Member[str]:
        """Adds a core, with an empty cache."""
        core = facts(name, incarnation=incarnation, slots=self.slots)
        member = self.members[name] = self.router.join(name, core, ["m"])
        self.router.blocks(name, incarnation, snapshot([]))
        return member

    def leave(self, name: str) -> None:
        """Takes a core away."""
        self.members.pop(name).leave()
        self.router.forget(name)

    def report(self, token_ms: float, **pending: int) -> None:
        """Has all cores say how fast they are, and then how many tokens are pending on each."""
        for member in self.members.values():
            member.report(LoadReport(token_ms=token_ms))
        self.seconds += 2.0
        self.place(prompt(0, tokens=1)).ended()  # what they say is believed now
        for name, member in self.members.items():
            member.report(LoadReport(token_ms=token_ms, pending_tokens=pending.get(name, 0)))

    def place(self, ids: np.ndarray, avoid: Sequence[str] = (), **fields: object) -> Placement[str]:
        """Places a request."""
        placement = self.router.place(request(ids, **fields), "m", avoid)
        assert placement is not None
        return placement
