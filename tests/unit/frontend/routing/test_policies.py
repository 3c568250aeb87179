"""What each policy chooses, while cores come, go and lie."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from tercet_frontend.routing import CoreFacts, LoadReport, Router, chains, policy_names, routing_policy
from tercet_frontend.routing.prefix import Prefix
from tercet_shared.errors import ConfigurationError
from tercet_shared.hashing import BlockKey, extend
from tercet_shared.pooling import Pooling
from tercet_shared.registry.interface import BlockBatch
from tercet_shared.sampling_params import SamplingParams
from tests.unit.frontend.routing.fleet import Fleet, facts, keys, prompt, request, snapshot

LIES = [
    LoadReport(running=-5, waiting=-(10**30), pending_tokens=-1, token_ms=-3.0),
    LoadReport(running=math.nan, waiting=math.nan, pending_tokens=math.nan, token_ms=math.nan),
    LoadReport(running=-math.inf, waiting=0, pending_tokens=-math.inf, token_ms=-math.inf),
    LoadReport(running=0, waiting=0, pending_tokens=0, token_ms=1e-300),
]


def prefix(**options: object) -> Fleet:
    return Fleet(Prefix(random.Random(7)), **options)  # type: ignore[arg-type]


def test_a_policy_of_another_name_is_refused() -> None:
    assert policy_names() == ["least_loaded", "prefix", "round_robin", "session"]
    with pytest.raises(ConfigurationError, match=r"least_loaded, prefix, round_robin, session"):
        routing_policy("fastest")


@pytest.mark.parametrize("name", policy_names())
def test_equal_cores_are_chosen_equally_often(name: str) -> None:
    fleet = Fleet(Prefix(random.Random(7)) if name == "prefix" else routing_policy(name), [str(n) for n in range(10)])
    counts = Counter(fleet.place(prompt(seed), session=f"session-{seed}").core_id for seed in range(400))
    assert len(counts) == 10
    assert max(counts.values()) <= (41 if name != "session" else 80), "sessions are spread by chance"


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("lie", LIES, ids=["negative", "nan", "infinite", "fast"])
def test_a_core_that_lies_about_its_load_attracts_little_more_than_the_others(name: str, lie: LoadReport) -> None:
    names = [str(number) for number in range(10)]
    fleet = Fleet(Prefix(random.Random(7)) if name == "prefix" else routing_policy(name), names, slots=8)
    honest = LoadReport(running=2, pending_tokens=500, token_ms=0.5)
    for other in names[1:]:
        fleet.members[other].report(honest)
    counts: Counter[str] = Counter()
    for seed in range(200):
        fleet.members["0"].report(lie)
        counts[fleet.place(prompt(seed), session=str(seed)).core_id] += 1
        fleet.seconds += 0.001
    assert counts["0"] <= 3 * 20


@pytest.mark.parametrize("name", policy_names())
def test_a_core_that_claims_the_greatest_load_breaks_nothing(name: str) -> None:
    fleet = Fleet(routing_policy(name))
    fleet.members["a"].report(LoadReport(running=10**40, waiting=math.inf, pending_tokens=10**40, token_ms=math.inf))
    counts = Counter(fleet.place(prompt(seed), session=str(seed)).core_id for seed in range(60))
    assert counts["b"] >= 15
    assert counts["c"] >= 15
    fleet.members["a"].report(LoadReport())
    assert "a" in {fleet.place(prompt(seed), session=str(seed)).core_id for seed in range(60)}


@pytest.mark.parametrize("name", policy_names())
def test_a_core_that_fails_at_once_is_not_taken_for_an_idle_one(name: str) -> None:
    fleet = Fleet(routing_policy(name))
    failures = 0
    for seed in range(100):
        placement = fleet.place(prompt(seed), session=str(seed))
        if placement.core_id == "a":
            failures += 1
            placement.ended(failed=True)
    assert failures <= 5
    fleet.seconds += 60.0
    assert "a" in {fleet.place(prompt(seed), session=str(seed)).core_id for seed in range(60)}


@pytest.mark.parametrize("name", policy_names())
def test_only_cores_that_are_there_are_chosen(name: str) -> None:
    fleet = Fleet(routing_policy(name), [])
    draw = random.Random(3)
    for step in range(300):
        if fleet.members and draw.random() < 0.45:
            fleet.leave(draw.choice(sorted(fleet.members)))
        else:
            fleet.join(f"core-{step}")
        placement = fleet.router.place(request(prompt(step % 5), session=str(step % 7)), "m")
        assert (placement is None) == (not fleet.members)
        if placement is not None:
            assert placement.core_id in fleet.members
            if draw.random() < 0.5:
                placement.ended()


def test_round_robin_takes_turns_for_each_model() -> None:
    router: Router[str] = Router(routing_policy("round_robin"))
    for name, models in {"a": ["x"], "b": ["x", "y"], "c": ["y"], "d": ["x", "y"]}.items():
        router.join(name, facts(name), models)
    chosen: dict[str, list[str]] = {"x": [], "y": []}
    for _ in range(6):
        for model, cores in chosen.items():
            placement = router.place(request(prompt(0)), model)
            assert placement is not None
            cores.append(placement.core)
    for cores in chosen.values():
        assert Counter(cores) == dict.fromkeys(cores, 2)


def test_least_loaded_weighs_load_by_slots() -> None:
    router: Router[str] = Router(routing_policy("least_loaded"))
    small, large = (router.join(name, facts(name, slots=slots), ["m"]) for name, slots in (("small", 4), ("large", 16)))
    small.report(LoadReport(running=1, waiting=1))
    large.report(LoadReport(running=7))
    placement = router.place(request(prompt(0)), "m")
    assert placement is not None
    assert placement.core == "large"


# -- session


def homes(fleet: Fleet, sessions: int = 300) -> dict[str, str]:
    placements = {str(n): fleet.place(prompt(n), session=str(n)) for n in range(sessions)}
    for placement in placements.values():
        placement.ended()
    return {session: placement.core_id for session, placement in placements.items()}


def test_a_session_stays_and_only_those_of_a_core_that_leaves_move() -> None:
    fleet = Fleet(routing_policy("session"), list("abcdef"), slots=1_000)
    before = homes(fleet)
    assert homes(fleet) == before
    fleet.leave("c")
    after = homes(fleet)
    assert all(after[session] == home for session, home in before.items() if home != "c")
    assert len({after[session] for session, home in before.items() if home == "c"}) > 1
    fleet.join("c", "second")
    assert homes(fleet) == before
    fleet.join("g")
    joined = homes(fleet)
    moved = {session for session in before if joined[session] != before[session]}
    assert {joined[session] for session in moved} == {"g"}
    assert 300 / 7 / 2 < len(moved) < 300 / 7 * 2


def test_front_ends_agree_on_sessions_whatever_the_order_in_which_cores_came() -> None:
    one, other = (Fleet(routing_policy("session"), names, slots=1_000) for names in ("abcdef", "fdbeca"))
    assert homes(one) == homes(other)


def test_tenants_do_not_share_sessions() -> None:
    fleet = Fleet(routing_policy("session"), [str(number) for number in range(50)])
    assert len({fleet.place(prompt(0), session="chat", tenant=str(tenant)).core_id for tenant in range(20)}) > 5


def test_a_session_overflows_from_a_core_that_is_overloaded_and_comes_back() -> None:
    fleet = Fleet(routing_policy("session"), list("abcd"), slots=4)
    placements = [fleet.place(prompt(0), session="busy") for _ in range(12)]
    chosen = [placement.core_id for placement in placements]
    home = chosen[0]
    assert chosen[:4] == [home] * 4
    assert max(Counter(chosen).values()) <= 6
    for placement in placements:
        placement.ended()
    assert fleet.place(prompt(0), session="busy").core_id == home


def test_requests_without_a_session_go_to_the_least_loaded() -> None:
    fleet = Fleet(routing_policy("session"))
    for name in ("a", "c"):
        fleet.members[name].report(LoadReport(running=3))
    assert [fleet.place(prompt(0)).core_id for _ in range(3)] == ["b"] * 3


# -- prefix


def test_the_core_with_the_longest_cached_prefix_is_chosen() -> None:
    fleet = prefix()
    ids = prompt(1)
    fleet.router.blocks("a", "first", snapshot(keys(ids)[:5], first=1))
    fleet.router.blocks("b", "first", snapshot(keys(ids)[:12], first=1))
    placement = fleet.place(ids)
    assert (placement.core_id, placement.tokens) == ("b", 320 - 12 * 16)


def test_a_prompt_that_is_cached_whole_has_its_last_token_computed() -> None:
    fleet = prefix(names=["a"])
    ids = prompt(1)
    fleet.router.blocks("a", "first", snapshot(keys(ids), first=1))
    assert fleet.place(ids).tokens == 1
    assert fleet.place(ids[:319]).tokens == 319 - 19 * 16
    assert fleet.place(ids[:1]).tokens == 1


@pytest.mark.parametrize(("pending", "chosen"), [(0, "a"), (1_400, "a"), (1_600, "b")])
def test_a_load_that_costs_more_than_the_prefix_saves_outweighs_it(pending: int, chosen: str) -> None:
    fleet = prefix(names=["a", "b"])
    ids = prompt(1, tokens=1_000)
    fleet.router.blocks("a", "first", snapshot(keys(ids), first=1))
    fleet.report(0.5, a=pending)  # to be worked off first; 1,000 tokens weigh as 1,500
    assert fleet.place(ids).core_id == chosen


def test_time_works_off_what_is_pending() -> None:
    fleet = prefix(names=["a", "b"])
    ids = prompt(1, tokens=1_000)
    fleet.router.blocks("a", "first", snapshot(keys(ids), first=1))
    fleet.report(0.5, a=3_000)
    fleet.seconds += 1.0  # 2,000 tokens
    assert fleet.place(ids).core_id == "a"


def test_a_burst_with_one_system_prompt_keeps_together_before_any_event_came() -> None:
    fleet = prefix(names=[str(number) for number in range(50)])
    system = prompt(1, tokens=2_000)
    placements = [fleet.place(np.concatenate([system, prompt(seed, tokens=20)])) for seed in range(100, 140)]
    chosen = {placement.core_id for placement in placements}
    assert 2 <= len(chosen) <= 16
    assert sum(placement.tokens for placement in placements) <= 2_020 * len(chosen) + 40 * (20 + 7 * 16 + 16)


def test_a_burst_does_not_pile_up_on_the_core_that_has_the_prefix() -> None:
    fleet = prefix(names=[str(number) for number in range(10)])
    ids = prompt(1, tokens=200)
    fleet.router.blocks("3", "first", snapshot(keys(ids), first=1))
    counts = Counter(fleet.place(ids).core_id for _ in range(200))
    assert len(counts) == 10
    assert max(counts.values()) <= 40


def test_salts_and_models_keep_prefixes_apart() -> None:
    fleet = prefix(names=["a", "b"])
    ids = prompt(1)
    fleet.router.blocks("a", "first", snapshot(keys(ids, salt="theirs"), first=1))
    assert fleet.place(ids, cache_salt="theirs").tokens == 1
    for salt in ("", "others"):
        assert fleet.place(ids, cache_salt=salt).tokens == 320


def test_cores_of_different_block_sizes_are_compared_in_tokens() -> None:
    fleet = prefix(names=["a"])
    ids = prompt(1)
    member = fleet.router.join("large", facts("large", block_size=64), ["m"])
    fleet.router.blocks("a", "first", snapshot(keys(ids)[:10], first=1))
    fleet.router.blocks("large", "first", snapshot(keys(ids, block_size=64)[:3], first=1))
    placement = fleet.place(ids)
    assert (placement.core_id, placement.tokens) == ("large", 320 - 192)
    member.leave()
    assert fleet.place(ids).tokens == 160


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_block_size_that_is_none_breaks_nothing(block_size: int) -> None:
    router: Router[str] = Router(routing_policy("prefix"))
    router.join("a", facts("a", block_size=block_size, slots=-3), ["m"])
    router.blocks("a", "first", snapshot([]))
    assert router.place(request(prompt(1)), "m") is not None


@pytest.mark.parametrize(
    "fields", [{"params": SamplingParams(prompt_logprobs=1)}, {"pooling": Pooling.MEAN}], ids=["logprobs", "mean"]
)
def test_what_reads_no_cache_is_not_expected_to(fields: dict[str, object]) -> None:
    fleet = prefix(names=["a"])
    ids = prompt(1)
    fleet.router.blocks("a", "first", snapshot(keys(ids), first=1))
    assert fleet.place(ids, **fields).tokens == 320


def test_a_restart_under_the_same_name_loses_what_was_cached() -> None:
    fleet = prefix(names=["a"])
    ids = prompt(1)
    fleet.router.blocks("a", "first", snapshot(keys(ids), first=1))
    fleet.leave("a")
    fleet.router.blocks("a", "first", BlockBatch(2, [True], keys(ids)[:1]))  # a straggler
    fleet.router.join("a", facts("a", incarnation="second"), ["m"])
    assert fleet.place(ids).tokens == 320
    fleet.router.blocks("a", "second", BlockBatch(1, [True] * 4, keys(ids)[:4]))
    assert fleet.place(prompt(1)).tokens == 320 - 64


def test_a_gap_in_the_events_makes_a_core_look_empty_until_its_snapshot() -> None:
    fleet = prefix(names=["a"])
    ids = prompt(1)
    fleet.router.blocks("a", "first", BlockBatch(1, [True] * 20, keys(ids)))
    assert fleet.place(ids).tokens == 1
    fleet.router.blocks("a", "first", BlockBatch(25, [False], keys(ids)[:1]))
    assert fleet.place(ids).tokens == 320
    fleet.router.blocks("a", "first", snapshot(keys(ids)[:10], first=25))
    assert fleet.place(ids.copy()).tokens == 160


def test_front_ends_do_not_all_choose_the_same_of_many_equals() -> None:
    firsts = {
        Fleet(Prefix(random.Random(seed)), [str(number) for number in range(20)]).place(prompt(0)).core_id
        for seed in range(20)
    }
    assert len(firsts) > 5


def test_the_choices_of_one_request_hash_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = prefix()
    hashed = 0

    def counted(parent: BlockKey, tokens: bytes, width: int) -> list[BlockKey]:
        nonlocal hashed
        hashed += len(tokens) // width
        return extend(parent, tokens, width)

    monkeypatch.setattr(chains, "extend", counted)
    ids = prompt(1, tokens=160)
    for _ in range(4):
        fleet.place(ids)
    assert hashed == 10


def test_a_fleet_of_two_models_is_compared_by_each_ones_fingerprint() -> None:
    router: Router[str] = Router(Prefix(random.Random(1)))
    ids = prompt(1)
    for name, fingerprint in (("a", "weights"), ("b", "others")):
        core = CoreFacts(core_id=name, incarnation="1", model_fingerprint=fingerprint, block_size=16, slots=8)
        router.join(name, core, ["m"])
        router.blocks(name, "1", snapshot(keys(ids), first=1))
    placement = router.place(request(ids), "m")
    assert placement is not None
    assert (placement.core_id, placement.tokens) == ("a", 1)
