"""What the router counts, for whoever holds the streams."""

from __future__ import annotations

import pytest

from tercet_frontend.routing import LoadReport, Router, policy_names, routing_policy
from tests.unit.frontend.routing.fleet import Fleet, facts, prompt, request


def load(fleet: Fleet, name: str) -> float:
    row = fleet.members[name].row
    assert row is not None
    return float(fleet.router.columns.load[row])


def wait(fleet: Fleet, name: str) -> float:
    """Returns the milliseconds that a core's new request would wait for others."""
    row = fleet.members[name].row
    assert row is not None
    columns, now = fleet.router.columns, fleet.router.now()
    found = float(columns.wait_ms(slice(row, row + 1), now)[0])
    assert found == columns.expected_ms(row, 0, now)
    return found


def test_only_the_prefix_policy_wants_to_hear_of_blocks() -> None:
    assert {name: Router[str](routing_policy(name)).wants_blocks for name in policy_names()} == {
        "prefix": True,
        "least_loaded": False,
        "round_robin": False,
        "session": False,
    }


def test_no_core_for_a_model_is_no_placement() -> None:
    fleet = Fleet(routing_policy("prefix"), ["a"])
    assert fleet.router.place(request(prompt(0)), "another") is None
    assert fleet.router.place(request(prompt(0)), "m", avoid=["a"]) is None
    assert fleet.router.place(request(prompt(0)), "m", avoid=["b"]) is not None


def test_a_core_may_change_what_it_is_called() -> None:
    fleet = Fleet(routing_policy("round_robin"), ["a"])
    fleet.members["a"].serve(["new", "newer"])
    assert fleet.router.place(request(prompt(0)), "m") is None
    assert fleet.router.place(request(prompt(0)), "newer") is not None
    fleet.members["a"].serve([])
    assert fleet.router.place(request(prompt(0)), "newer") is None


def test_cores_that_are_to_be_avoided_are() -> None:
    fleet = Fleet(routing_policy("least_loaded"))
    assert {fleet.place(prompt(0), avoid=["a", "c"]).core_id for _ in range(5)} == {"b"}


def test_placements_count_until_they_end_and_each_once() -> None:
    fleet = Fleet(routing_policy("round_robin"), ["a"])
    first, second = fleet.place(prompt(0)), fleet.place(prompt(1))
    assert load(fleet, "a") == 2
    first.started()
    first.started()
    assert load(fleet, "a") == 2
    first.ended()
    first.ended(failed=True)
    assert load(fleet, "a") == 1
    second.ended()
    assert load(fleet, "a") == 0
    fleet.seconds += 60.0
    assert wait(fleet, "a") == 0


def test_a_report_counts_own_requests_once() -> None:
    fleet = Fleet(routing_policy("round_robin"), ["a"])
    own = [fleet.place(prompt(0)) for _ in range(3)]
    fleet.members["a"].report(LoadReport(running=4, waiting=1))
    assert load(fleet, "a") == 5
    for placement in own:
        placement.ended()
    assert load(fleet, "a") == 2


def test_what_a_departure_has_overtaken_is_ignored() -> None:
    fleet = Fleet(routing_policy("round_robin"), ["a"])
    member, placement = fleet.members["a"], fleet.place(prompt(0))
    fleet.leave("a")
    fleet.join("b")  # takes the row
    late = fleet.place(prompt(0))
    placement.started()
    placement.ended(failed=True)
    member.report(LoadReport(running=50))
    member.leave()
    assert load(fleet, "b") == 1
    late.ended()
    assert load(fleet, "b") == 0


def test_what_was_placed_counts_whatever_the_core_reports() -> None:
    fleet = Fleet(routing_policy("round_robin"), ["a"])
    placements = [fleet.place(prompt(0, tokens=1_000)) for _ in range(4)]
    fleet.members["a"].report(LoadReport(token_ms=0.2))
    assert wait(fleet, "a") >= 0.5 * 4_000 * 0.2
    for placement in placements:
        placement.ended()
    assert wait(fleet, "a") == 0


@pytest.mark.parametrize("answers", [True, False])
def test_a_core_that_is_far_slower_than_it_says_looks_slower_for_a_while(answers: bool) -> None:
    fleet = Fleet(routing_policy("prefix"), ["a", "b"])
    columns, rows = fleet.router.columns, fleet.router._group("m").rows
    placement = fleet.place(prompt(0, tokens=100))
    row = fleet.members[placement.core_id].row
    fleet.seconds += 8.0
    if answers:
        placement.started()
    else:
        fleet.members[placement.core_id].report(LoadReport())
    shunned = dict(zip(rows.tolist(), columns.shun_ms(rows, fleet.router.now()).tolist(), strict=True))
    assert row is not None
    assert 7_000 < shunned.pop(row) <= 8_000
    assert list(shunned.values()) == [0]
    fleet.seconds += 9.0
    assert not columns.shun_ms(rows, fleet.router.now()).any()


def test_a_few_cores_do_not_speak_for_the_speed_of_all() -> None:
    fleet = Fleet(routing_policy("prefix"), [str(number) for number in range(9)])
    for name in "0123":
        fleet.members[name].report(LoadReport(token_ms=1e-9))
    fleet.place(prompt(0))
    speeds = fleet.router.columns.token_ms[fleet.router._group("m").rows]
    assert speeds.max() == 0.2
    assert speeds.min() == 0.1
    for name in "45678":
        fleet.members[name].report(LoadReport(token_ms=3.0))
    fleet.seconds += 2.0
    fleet.place(prompt(0))
    speeds = fleet.router.columns.token_ms[fleet.router._group("m").rows]
    assert speeds.max() == 3.0
    assert speeds.min() == 1.5


def test_many_cores_keep_their_columns_as_the_table_grows() -> None:
    fleet = Fleet(routing_policy("least_loaded"), [])
    for number in range(300):
        fleet.join(str(number)).report(LoadReport(running=number))
    assert [load(fleet, str(number)) for number in range(300)] == [min(number, 1e6) for number in range(300)]
    fleet.router.join("slow", facts("slow", slots=10**12), ["m"])
    assert fleet.place(prompt(0)).core_id in {"0", "slow"}
