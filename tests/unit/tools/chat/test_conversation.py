"""Conversations and their files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tercet_tools.chat.conversation import Conversation, ConversationFileError, Message, load
from tercet_tools.chat.session import CommandError, changed_params

if TYPE_CHECKING:
    from pathlib import Path


def talk() -> Conversation:
    return Conversation(
        model="m",
        system="Be kind.",
        params={"temperature": 0.5, "stop": ["a, b"]},
        messages=[
            Message("user", "One\ntwo"), Message("assistant", "", "only thoughts"), Message("user", "Three"),
            Message("assistant", "Four", "Hm."),
        ],
    )  # fmt: skip


def test_a_request_has_the_system_prompt_the_parameters_and_no_empty_answer() -> None:
    assert talk().request() == {
        "model": "m",
        "temperature": 0.5,
        "stop": ["a, b"],
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "One\ntwo"},
            {"role": "user", "content": "Three"},
            {"role": "assistant", "content": "Four"},
        ],
    }


def test_taking_back() -> None:
    conversation = talk()
    assert conversation.drop_answer()
    assert conversation.messages[-1] == Message("user", "Three")
    assert conversation.drop_question() == "Three"
    assert conversation.drop_question() == "One\ntwo"
    assert conversation.messages == []
    assert conversation.drop_question() is None
    assert not conversation.drop_answer()


def test_a_file_holds_everything(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    conversation = talk()
    conversation.save(path)
    assert load(path) == conversation
    assert json.loads(path.read_text())["conversations"][0]["title"] == "One"


def test_of_several_conversations_the_latest_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    talk().save(path)
    document = json.loads(path.read_text())
    (first,) = document["conversations"]
    document["conversations"].append({**first, "id": "later", "updated": first["updated"] + 1})
    document["conversations"].append({**first, "id": "earlier", "updated": 0})
    path.write_text(json.dumps(document))
    assert load(path).id == "later"


@pytest.mark.parametrize(
    "document",
    [
        *("no JSON", "[]", "3", "{}", '{"format": "other"}', "[" * 100_000),
        *({"version": 2}, {"conversations": []}, {"conversations": [3]}, {"conversations": [{}]}),
    ],
)
def test_files_that_hold_no_conversation(tmp_path: Path, document: Any) -> None:
    path = tmp_path / "talk.json"
    if isinstance(document, dict):
        document = json.dumps({"format": "tercet-chat", "version": 1, "conversations": []} | document)
    path.write_text(document)
    with pytest.raises(ConversationFileError, match=r"talk\.json"):
        load(path)


@pytest.mark.parametrize(
    "change", [{"messages": [{"role": "system", "content": "x"}]}, {"messages": 3}, {"params": []}]
)
def test_damaged_conversations(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "talk.json"
    talk().save(path)
    document = json.loads(path.read_text())
    document["conversations"][0] |= change
    path.write_text(json.dumps(document))
    if change == {"params": []}:
        assert load(path).params == {}
    else:
        with pytest.raises(ConversationFileError):
            load(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConversationFileError, match="cannot be read: No such file"):
        load(tmp_path / "none")
    with pytest.raises(ConversationFileError, match="cannot be written: No such file"):
        talk().save(tmp_path / "none" / "talk.json")


def test_parameters_are_set_and_taken_back() -> None:
    assert changed_params({"seed": 1, "top_p": 0.5}, "temperature=0.2 seed= stop=END") == {
        "top_p": 0.5,
        "temperature": 0.2,
        "stop": ["END"],
    }
    assert changed_params({"seed": 1}, "") == {"seed": 1}


@pytest.mark.parametrize("text", ["heat=1", "temperature", "temperature=warm", "max_tokens=1.5", "=1"])
def test_parameters_that_cannot_be_set(text: str) -> None:
    with pytest.raises(CommandError):
        changed_params({}, text)
