from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from tercet_shared.checkpoint import ChatTemplate, Checkpoint
from tercet_shared.checkpoint.template import RenderLimits, TemplateBudgetError
from tercet_shared.errors import CheckpointError, InvalidRequestError, TemplateError
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
        endless.render(HI, limits=RenderLimits(characters=1000))
    assert (
        template("{{ messages[0].content }}").render(
            [{"role": "user", "content": "x" * 999}], limits=RenderLimits(characters=1000)
        )
        == "x" * 999
    )


SLOW = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over a generator": (
        "{% for i in range(9999) %}{% for j in range(99999) | map('string') %}{% endfor %}{% endfor %}"
    ),
    "a recursive loop": "{% for i in [1, 1] recursive %}{{ loop([1] * 100000) }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "long values": (
        "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{% for j in range(99) %}{% set t = s ~ j %}{% endfor %}"
        "{% endfor %}"
    ),
    "methods": "{% set s = 'x' * 9999999 %}{% for i in range(99999) %}{% set t = s.upper().lower() %}{% endfor %}",
}


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_work_is_bounded(text: str) -> None:
    with pytest.raises(TemplateBudgetError, match="takes too long"):
        template(text).render(HI)


def test_time_is_bounded() -> None:
    with pytest.raises(TemplateBudgetError):
        template("{% for i in range(10) %}x{% endfor %}").render(HI, limits=RenderLimits(seconds=0.0))


def test_the_budget_is_that_of_one_rendering() -> None:
    loops = template("{% for i in range(9) %}{{ i }}{% endfor %}")
    for _ in range(5):
        assert loops.render(HI, limits=RenderLimits(steps=20)) == "012345678"
    with pytest.raises(TemplateBudgetError):
        loops.render(HI, limits=RenderLimits(steps=5))


LARGE = {
    "doubling by ~": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by nesting": (
        "{% set n = namespace(s=['x' * 99]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
        "{{ n.s | USE }}"
    ),
    "numbers": "{% set n = namespace(s=7) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "replace": "{% set s = 'x' * 99999 %}{{ s.replace('x', s) }}",
    "replace nothing": "{% set s = 'x' * 99999 %}{{ s | replace('', s) }}",
    "join": "{% set s = 'x' * 99999 %}{{ s.join(range(9999) | map('string')) }}",
    "join in a filter": "{% set s = 'x' * 99999 %}{{ range(9999) | join(s) }}",
    "widths": "{{ 'x'.center(10 ** 9) }}",
    "widths in a filter": "{{ 'x' | center(1000000000) }}",
    "indents": "{{ messages | tojson(indent=100000000) }}",
    "formats": "{{ '{:>1000000000}'.format(1) }}",
    "nested formats": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "starred percent": "{{ '%*d' % (1000000000, 1) }}",
    "percent in a filter": "{{ '%*d' | format(1000000000, 1) }}",
    "batch": "{{ [1] | batch(100000000, 0) | list }}",
    "sums": "{{ [[1] * 99999] * 9999 | sum(start=[]) }}",
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_values_are_bounded(text: str) -> None:
    for use in ("string", "tojson", "join", "replace('x', 'y')") if "USE" in text else ("",):
        source = text.replace("| USE", "~ ''" if use == "string" else f"| {use}")
        with pytest.raises(TemplateError, match=r"refused the conversation: .* (long|large|wide|only)"):
            template(source).render(HI)


def test_what_is_bounded_works_as_before() -> None:
    text = (
        "{{ 1 ~ 'b' ~ [2] }} {{ f(a=1 ~ 2) }} {{ [1] + [2] }} {{ '%s-%05.1f' % ('x', 1.5) }} {{ '{:>5}|'.format('y') }}"
        " {{ ['a', 'b'] | join(', ') }} {{ ', '.join(['a', 'b']) }} {{ 'aXb' | replace('X', '-') }}"
        " {{ 'aXb'.replace('X', '+') }} {{ [1, 2, 3] | batch(2) | list }} {{ 'a\nb' | indent(2) }} {{ [1, 2] | sum }}"
        " {{ [{'a': 'x'}] | join(attribute='a') }} {{ 'x' | center(3) }}|{{ none }}|{{ missing }}|{{ 7 * 6 }}"
        "{% for a in [1, 2, 3] if a != 2 %}{{ loop.index }}/{{ loop.length }}"
        "{{ '' if loop.last else ', ' }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% else %}none{% endfor %}"
    )
    macro = "{% macro f(a) %}<{{ a }}>{% endmacro %}"
    assert template(macro + text).render(HI) == (
        "1b[2] <12> [1, 2] x-001.5     y| a, b a, b a-b a+b [[1, 2], [3]] a\n  b 3 x  x |None||421/2, 2/2a=1"
    )


CONTINUED = [*HI, {"role": "assistant", "content": "The answer is"}]


def test_continue_as_transformers(smollm2: Checkpoint, reference: Any) -> None:
    ours = smollm2.chat_template
    assert ours is not None
    for content in ("The answer is", "The answer is ", "A\nb\n"):
        messages = [*HI, {"role": "assistant", "content": content}]
        rendered = ours.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert rendered == reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert rendered.endswith(content)


def test_continue_where_the_template_trims() -> None:
    trims = template("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
    messages = [*HI, {"role": "assistant", "content": " The answer is \n"}]
    assert trims.render(messages, continue_final_message=True) == "<Hi><The answer is"
    assert messages[1]["content"] == " The answer is \n"


def test_what_cannot_be_continued() -> None:
    with pytest.raises(TemplateError, match="leaves it out"):
        template("{{ messages[0].content }}").render(CONTINUED, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="no text"):
        template("").render([{"role": "assistant", "content": None}], continue_final_message=True)


def test_documents_and_variables() -> None:
    text = "{{ documents[0].title if documents }}{{ enable_thinking }}{{ bos_token }}{{ add_generation_prompt }}"
    rendered = template(text, bos_token="<s>").render(
        HI,
        documents=[{"title": "T"}],
        variables={"enable_thinking": False, "documents": 1, "add_generation_prompt": 2},
        add_generation_prompt=False,
    )
    assert rendered == "TFalse<s>False"


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
