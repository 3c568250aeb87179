"""The text of one choice: token ids in, pieces of text out, cut at stop strings.

Streamed and non-streamed answers take this one path: the non-streamed text is the streamed pieces joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tercet_frontend.text.spans import TokenSpans
from tercet_frontend.text.stops import StopMatcher, StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from tercet_frontend.text.detokenizer import Detokenizer
    from tercet_frontend.text.spans import Span


class TextDelta(NamedTuple):
    """What one `TextStream.push` yielded.

    Attributes:
        text: what may be sent now; may be empty.
        stopped_by: the stop string that is complete with this push; then the choice has ended.
        output_tokens: output tokens so far, for usage; when stopped, up to and including the token that completed the
            stop string. Tokens that stay out of the text (end of sequence) count.
        spans: the tokens whose text this is, in order; only where they were asked for. Then a token's text is held
            back until all of it may be sent. At the end they are all that count: every output token is in the spans
            of one delta.
    """

    text: str
    stopped_by: str | None
    output_tokens: int
    spans: Sequence[Span] = ()


class TextStream:
    """Detokenizes one choice and finds its stop strings.

    Each piece depends only on the ids pushed so far, token by token; how they are grouped into pushes changes neither
    the joined text nor where it stops. Text is held back while it ends within a code point, or while its end could
    still become a stop string.

    Args:
        detokenizer: the model's; one per process, shared by all streams.
        prompt_ids: what the output continues (its end may be an unfinished code point, its beginning decides about a
            leading space).
        stop: stop strings, none of them empty; compiled once for several choices as `StopStrings`.
        skip_special_tokens: leave special tokens out of the text.
        include_stop: end the text with the stop string instead of before it.
        min_tokens: the text of that many first output tokens is not searched for stop strings.
        spans: say which token brought which bytes of the text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        prompt_ids: Sequence[int] | npt.NDArray[np.int32],
        *,
        stop: StopStrings | Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        spans: bool = False,
    ) -> None:
        self._decoder = detokenizer.decoder(prompt_ids, skip_special_tokens=skip_special_tokens)
        self._spans = TokenSpans() if spans else None
        self._decode = self._decoder.push if self._spans is None else self._decode_with_span
        self._given_out = 0  # characters that may be sent; counted with spans only
        self._rest = ""  # of them, what belongs to a token of which more is held back
        stops = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether a stop string was found or the last push was marked finished."""
        return self._ended

    @property
    def output_tokens(self) -> int:
        """Output tokens so far, as in `TextDelta`."""
        return self._count

    @property
    def plain(self) -> bool:
        """Whether `push_plain` may be used: there is nothing to search for, and nobody asks for spans."""
        return self._matcher is None and self._spans is None

    def push_plain(self, ids: Sequence[int]) -> str:
        """Does what `push` does, at less cost: adds tokens that are not the last, and returns their text."""
        self._count += len(ids)
        if len(ids) == 1:
            return self._decode(ids[0])
        return "".join([self._decode(token) for token in ids])

    def push(self, ids: Sequence[int], *, finished: bool = False, drop_last: bool = False) -> TextDelta:
        """Adds tokens and returns the text that may be sent now.

        Args:
            ids: the next output tokens, also none.
            finished: no more will come; what was held back is returned.
            drop_last: the last id is an end-of-sequence or stop token, which stays out of the text.

        Raises:
            RuntimeError: the stream has ended already.
        """
        if self._ended:
            raise RuntimeError("text was pushed to a stream that has ended")
        textual = len(ids) - 1 if drop_last and ids else len(ids)
        if self._matcher is None:
            delta = TextDelta(self._plain(ids, textual, finished=finished), None, self._count)
        else:
            delta = self._matched(self._matcher, ids, textual, finished=finished)
        return delta if self._spans is None else self._with_spans(self._spans, delta)

    def _plain(self, ids: Sequence[int], textual: int, *, finished: bool) -> str:
        decode = self._decode
        text = decode(ids[0]) if textual == 1 else "".join([decode(ids[index]) for index in range(textual)])
        self._count += len(ids)
        if finished:
            self._ended = True
            text += self._flush()
        if textual < len(ids):
            self._textless()
        return text

    def _matched(self, matcher: StopMatcher, ids: Sequence[int], textual: int, *, finished: bool) -> TextDelta:
        parts: list[str] = []
        for index in range(textual):
            self._count += 1
            piece = self._decode(ids[index])
            if self._count <= self._min_tokens:
                parts.append(piece)
            elif piece and self._feed(matcher, piece, parts):
                return self._stopped(matcher, parts)
        self._count += len(ids) - textual
        if finished:
            rest = self._flush()
            if textual < len(ids):
                self._textless()
            if rest and self._count > self._min_tokens and self._feed(matcher, rest, parts):
                return self._stopped(matcher, parts)
            self._ended = True
            parts.append(matcher.flush() if self._count > self._min_tokens else rest)
        return TextDelta("".join(parts), None, self._count)

    def _feed(self, matcher: StopMatcher, piece: str, parts: list[str]) -> bool:
        parts.append(matcher.push(piece))
        return matcher.stopped_by is not None

    def _stopped(self, matcher: StopMatcher, parts: list[str]) -> TextDelta:
        self._ended = True
        if self._include_stop and matcher.stopped_by is not None:
            parts.append(matcher.stopped_by)
        return TextDelta("".join(parts), matcher.stopped_by, self._count)

    def _decode_with_span(self, token: int) -> str:
        spelled = self._decoder.spell(token)
        if self._spans is not None:
            self._spans.add(spelled)
        return spelled.text

    def _flush(self) -> str:
        text = self._decoder.flush()
        if self._spans is not None:
            self._spans.finish(text)
        return text

    def _textless(self) -> None:
        """Notes a token that stays out of the text."""
        if self._spans is not None:
            self._spans.add_textless()

    def _with_spans(self, spans: TokenSpans, delta: TextDelta) -> TextDelta:
        self._given_out += len(delta.text)
        text = self._rest + delta.text
        if self._ended:
            self._rest = ""
            return delta._replace(text=text, spans=spans.cut(self._given_out))
        found = spans.released(self._given_out)
        # Text and tokens go out together, so what a token begins with waits for its end.
        whole = len(b"".join([raw for raw, _ in found]).decode("utf-8", "replace"))
        self._rest = text[whole:]
        return delta._replace(text=text[:whole], spans=found)
