"""Requests of a wanted size, measured in the server's own tokens.

The probe has no tokenizer: it learns how many tokens a word of its filler costs from
the `input_tokens` of answers, and says how close it came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .fitting import OverLimits, ask_fitting
from .rows import Document
from .samples import criterion, filler
from .session import Probe, Reply, object_of
from .statistics import line_through

__all__ = ["Sizer", "call_tokens", "criteria", "one_question", "server_seconds"]

_CLOSE = 0.01  # a length within 1 % of the wanted one is taken
_NEAR = 0.2  # after a refusal one within 20 % will do
_STEP_BACK = 0.9
_FEW_WORDS, _MORE_WORDS = 20, 120
_TRIES = 3

Build = Callable[[str], tuple[str, Document]]


def one_question(state: str) -> tuple[str, Document]:
    """One binary criterion over a state, on `/decide`."""
    return "/decide", {"state": state, **criterion(0)}


def criteria(count: int) -> Build:
    """A builder of `count` binary criteria over a state, on `/decide/shared`."""
    decisions = [criterion(number) for number in range(count)]

    def build(state: str) -> tuple[str, Document]:
        return "/decide/shared", {"state": state, "decisions": decisions}

    return build


def call_tokens(reply: Reply) -> int:
    """The tokens of the longest call of an answer."""
    results = reply.get("results", [reply])
    return max(int(result["input_tokens"]) for result in results)


def server_seconds(reply: Reply) -> float:
    """The seconds the server says it scored, queueing left out."""
    timing = reply.get("timing", reply)
    return float(timing["total_seconds"])


@dataclass(slots=True)
class Sizer:
    """Finds how many words of state make a call of so many tokens."""

    probe: Probe
    build: Build
    expected: tuple[int, ...] = (200,)
    seen: dict[int, int] = field(default_factory=dict)

    def tokens(self, words: int) -> int:
        """The tokens of the call with that many words, asked once."""
        if words not in self.seen:
            path, body = self.build(filler(words, next(self.probe.numbers)))
            answer = ask_fitting(self.probe, path, body, self.expected)
            self.seen[words] = call_tokens(object_of(path, answer))
        return self.seen[words]

    def overhead(self) -> int:
        """The tokens of everything but the state's words."""
        self.tokens(_FEW_WORDS)
        try:
            self.tokens(_MORE_WORDS)
        except OverLimits:
            self.tokens(2 * _FEW_WORDS)
        return round(line_through(list(self.seen.items()))[1])

    def words_for(self, wanted: int) -> int:
        """Words for a call of about `wanted` tokens: a line, corrected by asking.

        OverLimits where the server takes none near it.
        """
        self.overhead()
        refusal, share = None, 1.0
        for _ in range(_TRIES):
            best = self._nearest(wanted)
            if abs(self.seen[best] - wanted) <= _CLOSE * wanted:
                return best
            slope, _ = line_through(list(self.seen.items()))
            step = share * (wanted - self.seen[best]) / max(slope, 0.01)
            try:
                self.tokens(max(best + round(step), 0))
            except OverLimits as error:  # the line led past MAX_TOKENS
                refusal, share = error, share * _STEP_BACK
        best = self._nearest(wanted)
        if refusal is not None and abs(self.seen[best] - wanted) > _NEAR * wanted:
            raise refusal
        return best

    def _nearest(self, wanted: int) -> int:
        return min(self.seen, key=lambda words: abs(self.seen[words] - wanted))
