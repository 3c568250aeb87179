"""The chat page's scripts that need no browser: Markdown as trees, server-sent events, files of conversations.

They run in Node, from the path or as playwright brings it, and are skipped without both. Nothing else is needed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import tercet_frontend.pages

ASSETS = Path(tercet_frontend.pages.__file__).parent / "assets"


def _node() -> str | None:
    spec = importlib.util.find_spec("playwright")
    bundled = Path(spec.origin or "").parent / "driver" / "node" if spec else None
    return str(bundled) if bundled and bundled.exists() else shutil.which("node")


NODE = _node()
pytestmark = pytest.mark.skipif(NODE is None, reason="neither playwright, which brings Node, nor Node is installed")

# Trees as short texts: <em>…</em> for nodes, line breaks as ⏎.
_SHOW = """
const inline = (nodes) => nodes.map((node) => {
  if (node.type === 'text') return node.text;
  if (node.type === 'break') return '⏎';
  if (node.type === 'link') return `<a ${node.href}>${inline(node.children)}</a>`;
  return `<${node.type}>${node.text ?? inline(node.children)}</${node.type}>`;
}).join('');
const block = (node) => {
  switch (node.type) {
    case 'heading': return `<h${node.level}>${inline(parseInline(node.text))}</h${node.level}>`;
    case 'code': return `<code ${node.language}${node.open ? ' open' : ''}>${node.text}</code>`;
    case 'quote': return `<quote>${node.blocks.map(block).join('')}</quote>`;
    case 'rule': return '<rule>';
    case 'list': {
      const items = node.items.map(({ blocks, checked }) =>
        `<li${checked === null ? '' : checked ? ' done' : ' open'}>${blocks.map(block).join('')}</li>`);
      return `<${node.ordered ? `ol ${node.start}` : 'ul'}${node.tight ? '' : ' loose'}>${items.join('')}</list>`;
    }
    case 'table': {
      const rows = [node.head, ...node.rows].map((row) => row.map((cell) => inline(parseInline(cell))).join('|'));
      return `<table ${node.align.map((side) => side ?? '-').join(' ')}>${rows.join('⏎')}</table>`;
    }
    default: return `<p>${inline(parseInline(node.text))}</p>`;
  }
};
"""


def run(module: str, names: str, code: str, cases: Any) -> Any:
    """Returns what ``code``, a function of one case, makes of each."""
    script = f"import {{ {names} }} from '{(ASSETS / module).as_uri()}';\n{_SHOW if module == 'markdown.js' else ''}"
    script += f"import {{ readFileSync }} from 'node:fs';\nconst make = {code};\n"
    script += "console.log(JSON.stringify(JSON.parse(readFileSync(0, 'utf8')).map((value) => make(value))));\n"
    command = [str(NODE), "--input-type=module", "-e", script]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


INLINE = {
    "plain": "plain",
    "*a* **b** ***c*** _d_ __e__ ~~f~~": "<em>a</em> <strong>b</strong> <em><strong>c</strong></em> <em>d</em> "
    "<strong>e</strong> <del>f</del>",
    "snake_case_name and 2 * 3 * 4": "snake_case_name and 2 * 3 * 4",
    "**a *b* c** *d": "<strong>a <em>b</em> c</strong> *d",
    "*a **b***": "<em>a <strong>b</strong></em>",
    "***a** b*": "<em><strong>a</strong> b</em>",
    "**“甲”**乙": "<strong>“甲”</strong>乙",
    "~one~ ~~~two~~~": "~one~ ~~~two~~~",
    r"\*no\* \_no\_ \q": r"*no* _no_ \q",
    "`a *b*` ``c ` d`` `open": "<code>a *b*</code> <code>c ` d</code> `open",
    "` `` ` `` x": "<code>``</code> `` x",
    "a\nb  \nc\\\nd<br>e<br/>f": "a⏎b⏎c⏎d⏎e⏎f",
    "<b>x</b> <script>": "<b>x</b> <script>",
    "&lt;b&gt; &amp; &#65; &#x42; &nope; &#0; &#xd800;": "<b> & A B &nope; &#0; &#xd800;",
    "[a](https://x.y) [*b*](<https://x.y/a b> 'title')": "<a https://x.y/>a</a> <a https://x.y/a%20b><em>b</em></a>",
    "[a](https://x.y/b_(c))": "<a https://x.y/b_(c)>a</a>",
    "[a](javascript:alert(1)) [b](JAVASCRIPT:x) [c](data:text/html,x) [d](/here) [e](java\tscript:x)": "a b c d "
    "[e](java\tscript:x)",
    "[a](&#106;avascript:x) [b](vbscript:x) [c](file:///etc) [d](blob:x)": "a b c d",
    "![a](https://x.y/i.png) ![](https://x.y/j.png)": "<a https://x.y/i.png>a</a> <a https://x.y/j.png>"
    "https://x.y/j.png</a>",
    "[a [b](https://x.y) c](https://z.z)": "[a <a https://x.y/>b</a> c](<a https://z.z/>https://z.z</a>)",
    "[[a]] [b] [c](": "[[a]] [b] [c](",
    "**a [b**](https://x.y)": "**a <a https://x.y/>b**</a>",
    "<https://x.y> <mailto:a@b.c> <javascript:x>": "<a https://x.y/>https://x.y</a> <a mailto:a@b.c>a@b.c</a> "
    "<javascript:x>",
    "see https://x.y/a_b, (http://z.z/c_(d)). xhttps://no": "see <a https://x.y/a_b>https://x.y/a_b</a>, "
    "(<a http://z.z/c_(d)>http://z.z/c_(d)</a>). xhttps://no",
    "**https://x.y**": "<strong><a https://x.y/>https://x.y</a></strong>",
    r"\(a_1*b*\) \[x\] $$y_1 _z_$$ $5 and $6": "<math>a_1*b*</math> <math>x</math> <math>y_1 _z_</math> $5 and $6",
}

BLOCKS = {
    "": "",
    "one\ntwo\n\nthree": "<p>one⏎two</p><p>three</p>",
    "# A #\n## B\n####### C\n#D": "<h1>A</h1><h2>B</h2><p>####### C⏎#D</p>",
    "a\n---\n* * *\n- - -": "<p>a</p><rule><rule><rule>",
    "```py\nx = 1\n\n  y\n```\nz": "<code py>x = 1\n\n  y</code><p>z</p>",
    "```\nopen": "<code  open>open</code>",
    "~~~~ a b\n```\n~~~\n~~~~": "<code a>```\n~~~</code>",
    "  ```\n    a\n  ```": "<code >  a</code>",
    "``` not `a` fence": "<p>``` not <code>a</code> fence</p>",
    "    indented\n\n      more\n\nend": "<code >indented\n\n  more</code><p>end</p>",
    "> a\nlazy\n> > b\n\nc": "<quote><p>a⏎lazy</p><quote><p>b</p></quote></quote><p>c</p>",
    "- a\n- b\n  c\n\nd": "<ul><li><p>a</p></li><li><p>b⏎c</p></li></list><p>d</p>",
    "- a\n\n- b": "<ul loose><li><p>a</p></li><li><p>b</p></li></list>",
    "1. a\n   1. b\n2. c": "<ol 1><li><p>a</p><ol 1><li><p>b</p></li></list></li><li><p>c</p></li></list>",
    "1. a\n  - b\n  - c\n2. d": "<ol 1><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></list></li>"
    "<li><p>d</p></li></list>",
    "3) a\n4) b": "<ol 3><li><p>a</p></li><li><p>b</p></li></list>",
    "- a\n1. b": "<ul><li><p>a</p></li></list><ol 1><li><p>b</p></li></list>",
    "1. a\n\n   ```\n   x\n\n   y\n   ```\n2. b": "<ol 1 loose><li><p>a</p><code >x\n\ny</code></li>"
    "<li><p>b</p></li></list>",
    "- ```\n  x\n\n  y\n  ```\n- b": "<ul><li><code >x\n\ny</code></li><li><p>b</p></li></list>",
    "- [x] a\n- [ ] b\n- [y] c": "<ul><li done><p>a</p></li><li open><p>b</p></li><li><p>[y] c</p></li></list>",
    "in\n1986. a year\n- but a list": "<p>in⏎1986. a year</p><ul><li><p>but a list</p></li></list>",
    "a\n-": "<p>a⏎-</p>",
    "| a | *b* |\n|:--|--:|\n| 1 | 2\\|3 |\n| 4 |\n\nc": "<table left right>a|<em>b</em>⏎1|2|3⏎4|</table><p>c</p>",
    "a | b\n:-: | -\nc | d": "<table center ->a|b⏎c|d</table>",
    "a | b\n-": "<p>a | b⏎-</p>",
    "|\n|": "<p>|⏎|</p>",
    "\tcode\r\nb\r\rc": "<code >code</code><p>b</p><p>c</p>",
}


def test_inline() -> None:
    results = run("markdown.js", "parseInline", "(text) => inline(parseInline(text))", list(INLINE))
    assert dict(zip(INLINE, results, strict=True)) == INLINE


def test_blocks() -> None:
    code = "(text) => parseBlocks(text).map(block).join('')"
    results = run("markdown.js", "parseBlocks, parseInline", code, list(BLOCKS))
    assert dict(zip(BLOCKS, results, strict=True)) == BLOCKS


def test_finished_blocks_do_not_change_while_the_text_grows() -> None:
    text = "# A\n\nb *c*\n\n- d\n- e\n\n```\nf\n\ng\n```\n\n> h\n\n| i |\n|---|\n| j |\n\nend"
    prefixes = [text[:length] for length in range(len(text) + 1)]
    sources = run("markdown.js", "parseBlocks", "(text) => parseBlocks(text).map(({ source }) => source)", prefixes)
    for before, after in pairwise(sources):
        # All but the last block, which grows or is cut in two, are what they were.
        assert after[: len(before) - 1] == before[:-1]
    assert len(sources[-1]) == 7


def test_no_text_takes_long_or_nests_without_end() -> None:
    many = 30_000
    texts = [
        "*a " * many, "**a " * many + "b** " * many, "[" * many, "](" * many, "[a](b " * many, "> " * many + "x",
        "$$" * many, "\\(" * many, "_a_b" * many, "|" * many + "\n" + "|-" * many, "http://" * many, "<" * many,
        "*" * many, "a**b" * many, "~~a" * many, "https://a" + ")" * many, "`" * many + "a", "&" * many, "# " * many,
        "".join("`" * length + " " for length in range(400)), "- " * many, "1. " * many, "![" * many,
        "\n".join(" " * 2 * level + "- x" for level in range(400)), "a|b\n" * many, ">\n" * many,
    ]  # fmt: skip
    depth = """(text) => {
      const begin = performance.now();
      const deep = (nodes) => nodes.length ? 1 + Math.max(...nodes.map((node) =>
        Math.max(deep(node.children ?? node.blocks ?? []), ...(node.items ?? []).map(({ blocks }) => deep(blocks)),
                 ['paragraph', 'heading'].includes(node.type) ? deep(parseInline(node.text)) : 0)
      ).slice(0, 1_000)) : 0;
      const found = deep(parseBlocks(text));
      return [found, performance.now() - begin];
    }"""
    results = run("markdown.js", "parseBlocks, parseInline", depth, texts)
    assert max(levels for levels, _ in results) < 150
    # Quadratic time would be minutes.
    assert max(milliseconds for _, milliseconds in results) < 20_000


def test_events_however_they_are_cut() -> None:
    stream = 'data: {"a": 1}\r\n\r\n: comment\n\ndata:two\ndata: lines\n\nevent: x\nid: 3\ndata: [DONE]\n\ndata: rest'
    cuts = [[stream], list(stream), [stream[:7], stream[7:15], stream[15:]]]
    code = "(pieces) => { const parser = new EventParser(); return pieces.flatMap((piece) => parser.push(piece)); }"
    assert run("sse.js", "EventParser", code, cuts) == [['{"a": 1}', "two\nlines", "[DONE]"]] * 3


def test_files_are_checked_field_by_field() -> None:
    conversation = {
        "id": "abc", "title": "T", "named": True, "created": 1, "updated": 2, "model": "m", "system": "s",
        "params": {"temperature": 9, "top_p": 0.5, "max_tokens": 1.5, "seed": 3, "stop": ["a", 1], "evil": 1},
        "messages": [
            {"role": "user", "content": "q", "extra": 1},
            {"role": "assistant", "content": "a", "reasoning": "r", "stats": {"tokens": 1, "seconds": 2, "first": "x"},
             "error": {"title": "t", "message": "m", "status": 500}},
        ],
        "more": 1,
    }  # fmt: skip

    def document(**changes: Any) -> str:
        return json.dumps({"format": "tercet-chat", "version": 1, "conversations": [conversation | changes]})

    code = "(text) => { try { return parseFile(text); } catch (error) { return error.message; } }"
    good, *bad = run(
        "store.js",
        "parseFile",
        code,
        [
            document(), document(id="a/b"), document(messages=[{"role": "system", "content": "x"}]),
            document(messages=None), "[]", "nonsense", document().replace('"version": 1', '"version": 9'),
        ],
    )  # fmt: skip
    assert good == [
        {
            "id": "abc", "title": "T", "named": True, "created": 1, "updated": 2, "model": "m", "system": "s",
            "params": {"top_p": 0.5, "seed": 3, "stop": ["a"]},
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "reasoning": "r",
                 "error": {"title": "t", "message": "m", "advice": "", "status": 500}},
            ],
        }
    ]  # fmt: skip
    assert bad == [
        "Conversation 1 of this file is damaged: it has no id.",
        "Conversation 1 of this file is damaged: a message has no text.",
        "Conversation 1 of this file is damaged: it has no messages.",
        "This file does not hold conversations of Tercet.",
        "This file is not JSON.",
        "This file was written by another version of Tercet.",
    ]
