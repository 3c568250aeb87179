"""What the command line says of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet_frontend.backend import named_of
from tercet_frontend.models import NamedModel, named_models
from tercet_shared.config import FrontendSettings, parse
from tercet_shared.errors import ConfigurationError


def test_sources_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    found = named_models(["a=b", "small=org/one", "/x=y", "tiny=org/one", "big= ./two"])
    assert found == [
        NamedModel("a=b"),
        NamedModel("org/one", ("small", "tiny")),
        NamedModel("/x=y"),
        NamedModel("./two", ("big",)),
    ]
    assert named_models([]) == []


def test_the_only_model_may_have_several_names_and_a_revision() -> None:
    assert named_models(["org/one"], served_names=["a", "b", "a"], revision="v1") == [
        NamedModel("org/one", ("a", "b"), "v1")
    ]
    assert named_models(["c=org/one"], served_names=["a"]) == [NamedModel("org/one", ("c", "a"))]


@pytest.mark.parametrize(
    ("models", "more", "message"),
    [
        (["a=x", "a=y"], {}, "Two models are named 'a'"),
        (["=x"], {}, "is no model"),
        (["a="], {}, "is no model"),
        (["a=x", "b=y"], {"served_names": ["c"]}, "--served-model-name is for one MODEL"),
        (["a=x", "b=y"], {"revision": "v1"}, "--revision is for one MODEL"),
        ([], {"served_names": ["c"]}, "--served-model-name"),
    ],
)
def test_what_does_not_go_together(models: list[str], more: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        named_models(models, **more)  # type: ignore[arg-type]


def test_a_front_end_without_models_needs_a_place_to_find_them() -> None:
    with pytest.raises(ConfigurationError, match="No model is given"):
        named_of(parse(FrontendSettings, ["--core=x:1"]))
    with pytest.raises(ConfigurationError, match="No model is given"):
        named_of(parse(FrontendSettings, ["--redis-url=redis://x", "--no-discover-cores"]))
    assert named_of(parse(FrontendSettings, ["--redis-url=redis://x"])) == []


def test_settings_survive_a_command_line() -> None:
    given = ["a=/x", '"/with, comma"', "--model-split=s=a:1,b:2", "--model-split=t=a:1", "--model-alias=c=s,d=t"]
    settings = parse(FrontendSettings, given)
    assert settings.model == ["a=/x", "/with, comma"]
    assert settings.model_split == ["s=a:1,b:2", "t=a:1"]
    assert settings.model_alias == ["c=s", "d=t"]
    assert parse(FrontendSettings, settings.arguments()) == settings


def test_splits_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_MODEL_SPLIT", "s=a:1, b:2,t=a:1")
    monkeypatch.setenv("TERCET_MODEL", "a=/x,b=/y")
    settings = parse(FrontendSettings, [])
    assert (settings.model_split, settings.model) == (["s=a:1,b:2", "t=a:1"], ["a=/x", "b=/y"])
