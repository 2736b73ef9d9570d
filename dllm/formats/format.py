"""A format as one request needs it: which positions of its canvas spell a text of which form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..canvas import PATH, Canvas
from .automaton import Automaton, BoolArray, IntArray
from .joint import Chain, Float64Array, drawn, likeliest, marginals


@dataclass(frozen=True)
class Span:
    """Positions [``low``, ``high``) of a canvas that spell a text: from state ``start`` to one of
    the ``final`` (S,) states."""

    low: int
    high: int
    start: int
    final: BoolArray


@dataclass(frozen=True, eq=False)
class Format:
    """Which texts a canvas may hold.

    ``start``: the state in which the text behind the prompt begins, None where only holes have a
    form.  ``holes``: the state in which each hole's text begins, None for a hole without a form;
    empty where the text as a whole has one.  ``ends``: whether a stop id may end the text early.
    """

    automaton: Automaton
    start: int | None = None
    holes: tuple[int | None, ...] = ()
    ends: bool = True

    def spans(self, canvas: Canvas) -> list[Span]:
        """The spans of a canvas, as it stands now."""
        final = self.automaton.accepting
        low = canvas.prompt_length
        if self.start is not None:
            if self.ends:
                return [Span(low, canvas.end, self.start, final | self.automaton.closed)]
            return [Span(low, canvas.length, self.start, final)]
        edges = np.flatnonzero(np.diff(np.concatenate([[True], canvas.given[low:], [True]])))
        runs = (edges + low).reshape(-1, 2).tolist()
        return [
            Span(first, last, start, final)
            for (first, last), start in zip(runs, self.holes, strict=True)
            if start is not None
        ]

    def least(self) -> int:
        """Fewest tokens of a text that has the form as a whole; 0 where only holes have one."""
        return 0 if self.start is None else int(self.automaton.need[self.start])

    def fits(self, canvas: Canvas) -> bool:
        """Whether what is decided can be completed within the canvas."""
        return all(
            self.automaton.leading(
                canvas.tokens[span.low : span.high], canvas.masked[span.low : span.high], span.final
            )[span.start]
            for span in self.spans(canvas)
        )

    def chain(
        self, canvas: Canvas, span: Span, targets: IntArray, weight: Float64Array
    ) -> tuple[Chain, int]:
        """The chain from the first undecided position of a span to the last of the ``targets`` (n,)
        in it, whose class weights are ``weight`` (n, C), and where it begins.

        Undecided positions between that were not predicted may hold any token; what lies behind
        decides which states the chain may end in.
        """
        automaton, masked = self.automaton, canvas.masked
        first, last = int(masked[span.low : span.high].argmax()) + span.low, int(targets[-1]) + 1
        state = automaton.run(span.start, canvas.tokens[span.low : first])
        final = automaton.leading(
            canvas.tokens[last : span.high], masked[last : span.high], span.final
        )
        weights = np.tile(automaton.uniform, (last - first, 1))
        weights[targets - first] = weight
        decided = np.where(masked[first:last], -1, automaton.class_of(canvas.tokens[first:last]))
        return Chain(weights, decided, state, final), first


class Completion(NamedTuple):
    """The classes (n,) that a joint completion gives to the targets of one span, whose indices in
    the prediction are ``at`` (n,), and their log-probabilities ``sure`` (n,)."""

    at: IntArray
    classes: IntArray
    sure: Float64Array


def complete(
    form: Format, canvas: Canvas, positions: IntArray, weight: Float64Array,
    logprob: Float64Array, draw: bool, confident: bool,
) -> list[Completion] | None:  # fmt: skip
    """One joint completion of the undecided ``positions`` (n,) that have a form: per span.

    ``weight`` (n, C) says how likely each class is when choosing, ``logprob`` (n, C) when judging.
    ``draw``: draw one in place of the likeliest; ``confident``: ask for marginals.
    None where no text of the form is possible.
    """
    result = []
    for span in form.spans(canvas):
        inside = (positions >= span.low) & (positions < span.high) & canvas.masked[positions]
        at = inside.nonzero()[0]
        if not at.size:
            continue
        here = positions[at]
        chain, first = form.chain(canvas, span, here, weight[at])
        if draw:
            noise = canvas.uniform(PATH, np.arange(first, first + len(chain.decided)))
            path = drawn(form.automaton, chain, noise.astype(np.float64))
        else:
            path = likeliest(form.automaton, chain)
        if path is None:
            return None
        sure = np.zeros(len(at))
        if confident:
            judged = chain
            if logprob is not weight:
                weights = chain.weight.copy()
                weights[here - first] = logprob[at]
                judged = replace(chain, weight=weights)
            sure = marginals(form.automaton, judged, path)[here - first]
        result.append(Completion(at, path[here - first], sure))
    return result
