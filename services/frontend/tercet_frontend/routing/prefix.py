"""Takes the core on which the request is expected to be served soonest: cached prefixes weighed against load.

    cost = wait for others + WORK * prompt tokens that are not cached there * milliseconds per token    [ms]

The wait (`CoreColumns.wait_ms`) grows with every request that is placed, so a core that has a popular prefix takes
requests until another one, which would have to compute the prefix first, is as soon; then that one has it too.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from tercet_frontend.routing.chains import ChainMemory, PromptChain
from tercet_frontend.routing.choice import Choice
from tercet_frontend.routing.index import PrefixIndex
from tercet_shared.hashing import root_key
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import OFF

if TYPE_CHECKING:
    import numpy.typing as npt

    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.routing.columns import F64, CoreColumns, Group, Rows
    from tercet_shared.hashing import BlockKey

MOST_BLOCKS = 2_048
"""Of a prompt's blocks, so many are compared at most; more would hold up the event loop for milliseconds."""

EXPECTED_BLOCKS = 128
"""Of what a core will have cached soon, so many blocks behind those it has are noted at least: hashing is most of the
work of a decision. The next request with the same long prompt goes on where this one left off."""

WORK = 1.5
"""What it weighs to have a token computed, by the time that takes: those who come behind wait for it too."""

MOST_ROOTS = 1_024

ALIKE_MS = 2.0
"""Costs that differ by less are taken for equal: no estimate is better, and several front ends must not all agree."""


class Prefix:
    """See the module.

    Args:
        rng: draws among equals; front ends should not draw the same.
        index: what cores have cached.
    """

    def __init__(self, rng: random.Random | None = None, index: PrefixIndex | None = None) -> None:
        self.sink = PrefixIndex() if index is None else index
        self._random = random.Random() if rng is None else rng  # noqa: S311  # no secret
        self._memory = ChainMemory()
        self._latest: tuple[npt.NDArray[np.int32], str, _Chains] | None = None
        self._roots: dict[tuple[str, str], BlockKey] = {}
        self._noise = np.zeros(0)
        self._numbers = np.zeros(0, np.int64)  # of each row in the index; `width` where it knows nothing
        self._numbered = (-1, -1)

    def choose(self, request: GenerationRequest, group: Group, columns: CoreColumns, now: float) -> Choice:
        """See `RoutingPolicy.choose`."""
        prompt = len(request.prompt_ids)
        chains = self._chains(request, group)
        missing: F64 | None = None
        if request.params.prompt_logprobs == OFF and request.pooling is not Pooling.MEAN:  # others read no cache
            missing = self._missing(chains, group, columns, prompt, now)
        cost = columns.wait_ms(group.at, now)
        cost += columns.token_ms[group.at] * (WORK * prompt if missing is None else WORK * missing)
        place = self._least(cost)
        row = int(group.rows[place])
        tokens = prompt if missing is None else int(missing[place])
        self._expect(chains, columns, row, prompt - tokens, now)
        return Choice(row, tokens)

    def _least(self, cost: F64) -> int:
        """Returns the place of the least cost, drawn among those less than `ALIKE_MS` apart; ``cost`` is spoilt."""
        if len(self._noise) < 2 * len(cost):
            self._noise = np.array([self._random.random() * ALIKE_MS for _ in range(4 * len(cost))])
        begin = int(self._random.random() * (len(self._noise) - len(cost)))
        cost += self._noise[begin : begin + len(cost)]
        return int(cost.argmin())

    def _chains(self, request: GenerationRequest, group: Group) -> _Chains:
        """Returns the prompt's chain for each kind of core; only blocks that can be matched.

        The choices of one request, and its further attempts, share the prompt.
        """
        latest = self._latest
        if latest is not None and latest[0] is request.prompt_ids and latest[1] == request.cache_salt:
            chains = latest[2]
        else:
            chains = {}
            self._latest = (request.prompt_ids, request.cache_salt, chains)
        for fingerprint, block_size, _ in group.kinds:
            if (fingerprint, block_size) not in chains:
                blocks = min(len(request.prompt_ids) // block_size, MOST_BLOCKS)
                root = self._root(fingerprint, request.cache_salt)
                chain = PromptChain(root, request.prompt_ids, block_size, blocks, self._memory)
                chains[fingerprint, block_size] = chain
        return chains

    def _root(self, fingerprint: str, salt: str) -> BlockKey:
        root = self._roots.get((fingerprint, salt))
        if root is None:
            if len(self._roots) >= MOST_ROOTS:
                self._roots.clear()
            root = self._roots[fingerprint, salt] = root_key(fingerprint, salt=salt)
        return root

    def _missing(self, chains: _Chains, group: Group, columns: CoreColumns, prompt: int, now: float) -> F64 | None:
        """Returns how many tokens of the prompt each core has to compute, float64[n]; None: none has any cached."""
        missing: F64 | None = None
        for fingerprint, block_size, places in group.kinds:
            match = self.sink.match(chains[fingerprint, block_size], now)
            if not match.ends:
                continue
            left = [prompt, *[max(prompt - end * block_size, 1) for end in match.ends]]  # by count
            found: F64 = np.array(left, np.float64).take(
                match.counts(self.sink.width).take(self._row_numbers(columns)[group.at])
            )
            if len(group.kinds) == 1:
                return found
            if missing is None:
                missing = np.full(len(group.rows), float(prompt))
            missing[places] = found[places]
        return missing

    def _expect(self, chains: _Chains, columns: CoreColumns, row: int, cached: int, now: float) -> None:
        facts = columns.facts[row]
        if facts is None:
            return
        number = self.sink.number_of(facts.core_id, facts.incarnation)
        if number is None:
            return
        chain, begin = chains[facts.model_fingerprint, facts.block_size], cached // facts.block_size
        while len(chain.keys) < begin + EXPECTED_BLOCKS and chain.grow():
            pass
        self.sink.expect(number, chain.keys, begin, now)

    def _row_numbers(self, columns: CoreColumns) -> Rows:
        version = (columns.version, self.sink.version)
        if self._numbered != version:
            number_of, nobody = self.sink.number_of, self.sink.width
            numbers = [
                nobody if facts is None else number_of(facts.core_id, facts.incarnation) for facts in columns.facts
            ]
            self._numbers = np.array([nobody if number is None else number for number in numbers], np.int64)
            self._numbered = version
        return self._numbers


_Chains = dict[tuple[str, int], PromptChain]
