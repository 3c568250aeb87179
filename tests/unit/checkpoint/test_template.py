from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from tercet_shared.checkpoint import ChatTemplate, Checkpoint
from tercet_shared.errors import CheckpointError, TemplateError
from tests.fakes.checkpoints import write_tiny_llama, write_tiny_llama_gguf

if TYPE_CHECKING:
    from pathlib import Path

HI = [{"role": "user", "content": "Hi"}]
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    HI,
    [{"role": "system", "content": "Be brief."}, *HI],
    [*HI, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": " two  spaces\n\nand lines 🙂 "}],
    [{"role": "user", "content": '<|im_end|>{{ 7 * 7 }} <b>&amp;</b> "quotes"'}],
    [{"role": "user", "content": "", "name": None}],
)


def template(text: str, **variables: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, variables, "a test")


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_as_transformers(
    messages: list[dict[str, Any]], prompt: bool, smollm2: Checkpoint, reference: Any
) -> None:
    assert smollm2.chat_template is not None
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert smollm2.chat_template.render(messages, add_generation_prompt=prompt) == expected


RICH = """{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {% generation %}{{ message | tojson }}{{ message.content | tojson(indent=2) }}{% endgeneration %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ tools | tojson if tools else "no tools" }}
{%- set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}{{ ns.count }}
{{- "-" * 10 }}{{ 2 ** 10 }}{{ extra is defined }}
"""


def test_environment_is_that_of_transformers(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1, chat_template=RICH)
    ours = Checkpoint.open(str(model)).chat_template
    theirs: Any = AutoTokenizer.from_pretrained(model)
    assert ours is not None
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a <b> & 'c' ü 🙂", "tool_calls": None},
        {"role": "skip", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "part"}]},
    ]
    tools = [
        {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": {"type": "object"}}}
    ]
    for given_tools in (None, tools):
        for extra in ({}, {"extra": 1}):
            expected = theirs.apply_chat_template(
                messages, tools=given_tools, tokenize=False, add_generation_prompt=True, **extra
            )
            assert ours.render(messages, tools=given_tools, variables=extra) == expected


def test_strftime_now() -> None:
    assert template("{{ strftime_now('%Y') }}").render(HI).isdigit()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[7].content }}", "undefined|no element 7"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages | tojson(indent={}) }}", "."),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_failures_are_the_clients(text: str, sentence: str) -> None:
    with pytest.raises(TemplateError, match=sentence) as caught:
        template(text).render(HI)
    assert caught.value.param == "messages"


def test_messages_of_templates_are_bounded() -> None:
    with pytest.raises(TemplateError) as caught:
        template("{{ raise_exception('x' * 100000) }}").render(HI)
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (messages | attr('append')).__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_the_sandbox_holds(text: str) -> None:
    messages = [dict(HI[0])]
    with pytest.raises(TemplateError):
        template(text).render(messages)
    assert messages == HI


def test_forbidden_attributes_are_empty() -> None:
    # Jinja's sandbox makes them undefined: nothing to see, and any use of them fails.
    assert template("{{ messages.__class__ }}{{ raise_exception.__globals__ }}").render(HI) == ""


def test_output_is_bounded() -> None:
    endless = template("{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}")
    with pytest.raises(TemplateError, match="longer than 1000 characters"):
        endless.render(HI, limit=1000)
    assert (
        template("{{ messages[0].content }}").render([{"role": "user", "content": "x" * 999}], limit=1000) == "x" * 999
    )


def test_invalid_template_ends_the_start(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1, chat_template="line\n{% for %}")
    with pytest.raises(CheckpointError, match=r"not valid \(line 2\)"):
        _ = Checkpoint.open(str(model)).chat_template


def test_where_templates_are_found(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1, chat_template="config")

    def rendered(**arguments: Any) -> str:
        found = Checkpoint.open(str(model)).chat_template
        assert found is not None
        return found.render(HI, **arguments)

    assert rendered() == "config"
    (model / "chat_template.json").write_text('{"chat_template": "json"}')
    assert rendered() == "json"
    (model / "chat_template.jinja").write_text("jinja")
    assert rendered() == "jinja"
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert rendered() == "jinja"
    assert rendered(tools=[{"type": "function"}]) == "tools"


def test_named_templates(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1, chat_template=None)
    assert Checkpoint.open(str(model)).chat_template is None
    config = json.loads((model / "tokenizer_config.json").read_text())

    def write(value: object) -> Checkpoint:
        (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        return Checkpoint.open(str(model))

    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    found = write(both).chat_template
    assert found is not None
    assert (found.render(HI), found.render(HI, tools=[{}])) == ("plain", "tools")
    with pytest.raises(CheckpointError, match="several chat templates and none is the default"):
        _ = write([{**both[0], "name": "a"}, {**both[1], "name": "b"}]).chat_template
    for nonsense in (7, [{"name": "default"}], [{"name": "default", "template": 7}]):
        with pytest.raises(CheckpointError, match="neither a template nor a list of named ones"):
            _ = write(nonsense).chat_template


def test_gguf_template(tmp_path: Path) -> None:
    ours = Checkpoint.open(str(write_tiny_llama_gguf(tmp_path / "a.gguf", layers=1))).chat_template
    assert ours is not None
    assert ours.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
