"""``python -m tercet_core.grammar.prover``: a process that tries grammars out before the core lets them in.

Grammars come from strangers. A compilation can recurse until the stack ends, fill the memory, or not end; none of that
can be stopped from within a process. Here it does not matter: the core ends this process and refuses the grammar.

It reads the tokenizer from its standard input, says that it is ready, and answers each grammar with its translation, or
with why it is refused. It ends with its input.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import BinaryIO, Final

from tercet_core.grammar.frames import READY, pack, read
from tercet_core.grammar.matchers import make_tokenizer, try_out
from tercet_core.grammar.threads import start
from tercet_core.grammar.translate import translate
from tercet_shared.errors import InvalidRequestError
from tercet_shared.structured import Grammar, GrammarKind

MEMORY: Final = 1 << 30
"""Bytes that a grammar may take here, besides the tokenizer and the stack."""


def main() -> None:
    """Serves standard input and output until the input ends."""
    start(lambda: _serve(sys.stdin.buffer, sys.stdout.buffer), "prover").join()


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    os.nice(10)  # what it does is never as urgent as what the core does
    text, vocab_size, end_ids = read(source)
    tokenizer = make_tokenizer(text, vocab_size, end_ids)
    _limit()
    _say(sink, READY)
    while True:
        try:
            kind, text, param = read(source)
        except EOFError:
            return
        grammar = Grammar(GrammarKind(kind), text, param)
        try:
            translated = translate(grammar)
            try_out(tokenizer, grammar, translated)
        except InvalidRequestError as error:
            _say(sink, [False, error.message])
        else:
            _say(sink, [True, translated])


def _say(sink: BinaryIO, message: object) -> None:
    sink.write(pack(message))
    sink.flush()


def _limit() -> None:
    """Has allocations fail beyond `MEMORY`, and leaves no core dump when the process dies of it."""
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: PTH123, SIM115  # closed at once
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
