"""Aliases and splits: what is understood, what is refused, and which model a request gets."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_frontend.models import Aliases
from tercet_shared.errors import ConfigurationError

names = st.text("abcdef", min_size=1, max_size=3)


def test_names_that_lead_somewhere() -> None:
    aliases = Aliases(
        ["chat=org/model:7b", "old=chat", "test = canary"],
        ["canary=chat:3,new:1", "both=canary:0.5,new:0.5,off:0"],
        models=["org/model:7b", "new", "off"],
        complete=True,
    )
    assert aliases.targets["old"] == [("org/model:7b", 1.0)]
    assert aliases.targets["test"] == aliases.targets["canary"] == [("org/model:7b", 0.75), ("new", 0.25)]
    assert aliases.targets["both"] == [("org/model:7b", 0.375), ("new", 0.625)]
    assert [aliases.parent(name) for name in ("old", "test", "canary", "new")] == ["chat", "canary", None, None]
    assert "both" in aliases
    assert "new" not in aliases


@pytest.mark.parametrize(
    ("aliases", "splits", "message"),
    [
        (["chat"], [], "--model-alias: 'chat' is not of the form NAME=MODEL."),
        (["=a"], [], "--model-alias: .* form"),
        (["a="], [], "--model-alias: .* form"),
        (["a=x", "a=y"], [], "--model-alias: the name 'a' is given twice"),
        (["a=x"], ["a=y:1"], "--model-split: the name 'a' is given twice"),
        (["x=y"], [], "--model-alias: 'x' is the name of a model"),
        (["a=a"], [], "--model-alias: a → a leads in a circle"),
        (["a=b", "b=c"], ["c=x:1,a:1"], "leads in a circle"),
        (["a=nothing"], [], "--model-alias: 'a' leads to 'nothing', which is no model here"),
        ([], ["a=x"], "--model-split: 'a': 'x' has no weight; the form is NAME=MODEL:WEIGHT,MODEL:WEIGHT"),
        ([], ["a=x:1,x:2"], "--model-split: 'a': 'x' is given twice"),
        ([], ["a=x:"], "no weight"),
        ([], ["a=x:-1"], "no weight"),
        ([], ["a=x:nan"], "no weight"),
        ([], ["a=x:inf"], "no weight"),
        ([], ["a=x:many"], "--model-split: 'a': 'many' is no weight"),
        ([], ["a=x:0,y:0"], "--model-split: 'a': all weights are 0"),
        ([], ["a=x:1,,y:1"], "form"),
        ([], ["a=" + ",".join(f"m{n}:1" for n in range(65))], "more than 64"),
    ],
)
def test_what_is_refused_names_the_flag(aliases: list[str], splits: list[str], message: str) -> None:
    known = ["x", "y", *(f"m{n}" for n in range(65))]
    with pytest.raises(ConfigurationError, match=message) as caught:
        Aliases(aliases, splits, models=known, complete=True)
    assert caught.value.param in {"model_alias", "model_split"}
    assert len(caught.value.message) < 300


def test_models_that_are_not_known_yet_may_be_named() -> None:
    aliases = Aliases(["a=later"])
    assert aliases.choose("a", []) is None
    assert aliases.choose("a", ["later"]) == "later"


@settings(max_examples=40, deadline=None)
@given(
    weights=st.dictionaries(names, st.integers(1, 100), min_size=1, max_size=6),
    session=st.text(max_size=20),
    data=st.data(),
)
def test_a_request_gets_a_model_that_is_served(weights: dict[str, int], session: str, data: st.DataObject) -> None:
    split = "split=" + ",".join(f"{model}:{weight}" for model, weight in weights.items())
    aliases = Aliases([], [split], draw=random.Random(0))
    served = data.draw(st.sets(st.sampled_from(sorted(weights))))
    chosen = aliases.choose("split", served | {"other"}, session)
    assert chosen in served if served else chosen is None
    if session and served:
        assert aliases.choose("split", served, session) == chosen
        # Others come and go: the session stays where it is.
        for left in served - {chosen}:
            assert aliases.choose("split", served - {left}, session) == chosen


@pytest.mark.parametrize("with_sessions", [True, False])
def test_each_model_gets_its_share(with_sessions: bool) -> None:
    aliases = Aliases([], ["split=a:0.7,b:0.2,c:0.1"], draw=random.Random(5))
    served = ["a", "b", "c"]
    count = 4_000
    drawn = Counter(aliases.choose("split", served, f"s{n}" if with_sessions else "") for n in range(count))
    shares = {model: number / count for model, number in drawn.items()}
    assert shares == pytest.approx({"a": 0.7, "b": 0.2, "c": 0.1}, abs=0.03)
    without = Counter(aliases.choose("split", ["b", "c"], f"s{n}" if with_sessions else "") for n in range(count))
    assert without["b"] / count == pytest.approx(2 / 3, abs=0.03)


def test_splits_do_not_divide_sessions_alike() -> None:
    aliases = Aliases([], ["one=a:1,b:1", "two=a:1,b:1"])
    same = sum(aliases.choose("one", "ab", f"s{n}") == aliases.choose("two", "ab", f"s{n}") for n in range(2_000))
    assert 900 < same < 1_100
