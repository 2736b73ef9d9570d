"""A format as one request needs it: which positions of its canvas spell a text of which form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..core.canvas import PATH, BoolArray, Canvas, IntArray
from ..kernels.statistics.classes import TokenClasses
from .automaton import Automaton
from .joint import MOST_ARCS, Chain, Float64Array, Lattice, Pruned
from .literals import Literals

ROOM = 1 << 22  # terms of sums that are held at once


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
    ``literals``: which text it leaves no choice about, None where the model is to be asked anyway.
    """

    automaton: Automaton
    start: int | None = None
    holes: tuple[int | None, ...] = ()
    ends: bool = True
    literals: Literals | None = None

    @property
    def classes(self) -> TokenClasses:
        """Of tokens that are treated alike."""
        return self.automaton.classes

    def spans(self, canvas: Canvas) -> list[Span]:
        final = self.automaton.accepting
        low = canvas.prompt_length
        if self.start is not None:
            if self.ends:
                # A region that grows ends where the rest has room.
                rest = self.automaton.need <= self._room(canvas)
                return [Span(low, canvas.end, self.start, rest)]
            return [Span(low, canvas.length, self.start, final)]
        edges = np.flatnonzero(np.diff(np.concatenate([[True], canvas.given[low:], [True]])))
        spans = zip((edges + low).reshape(-1, 2).tolist(), self.holes, strict=True)
        return [Span(low, end, start, final) for (low, end), start in spans if start is not None]

    def _room(self, canvas: Canvas) -> int:
        """By how much the region may still grow; one that was cut off has ended."""
        whole = self.ends and canvas.end == canvas.region[1]
        return max(0, canvas.start + canvas.cap - canvas.end) if whole else 0

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

    def settled(self, canvas: Canvas, end: int) -> tuple[IntArray, IntArray]:
        """Positions before ``end`` whose text is without a choice, as far as it follows what is
        decided from the start of a span on, and the tokens to write there."""
        positions, written = list[int](), list[int]()
        for span in self.spans(canvas) if self.literals is not None else ():
            assert self.literals is not None
            free = canvas.masked[span.low : span.high]
            first = span.low + int(free.argmax())
            if first >= end or not free.any():
                continue
            here = free[first - span.low : end - span.low]
            most = len(here) if here.all() else int(here.argmin())
            state = self.automaton.run(span.start, canvas.tokens[span.low : first])
            tokens, state = self.literals.run(state, most)
            last = first + len(tokens)
            rest = canvas.tokens[last : span.high], canvas.masked[last : span.high]
            if tokens and self.automaton.leading(*rest, span.final)[state]:
                positions += range(first, last)
                written += tokens
        # A region grows in a step of the model that decides the last of it.
        full = len(positions) == np.count_nonzero(canvas.masked[canvas.start : canvas.end])
        kept = len(positions) - bool(full and self._room(canvas))
        return np.array(positions[:kept], np.int64), np.array(written[:kept], np.int64)

    def chain(
        self, canvas: Canvas, span: Span, targets: IntArray, weight: Float64Array,
        law: Float64Array,
    ) -> tuple[Chain, int]:  # fmt: skip
        """The chain from the first undecided position of a span to the last of the ``targets`` (n,)
        in it, whose class weights are ``weight`` and ``law`` (n, C), and where it begins.

        Undecided positions between that were not predicted may hold any token; what lies behind
        decides which states the chain may end in.
        """
        automaton, masked = self.automaton, canvas.masked
        first, last = int(masked[span.low : span.high].argmax()) + span.low, int(targets[-1]) + 1
        state = automaton.run(span.start, canvas.tokens[span.low : first])
        final = automaton.leading(
            canvas.tokens[last : span.high], masked[last : span.high], span.final
        )
        weights = np.tile(automaton.uniform, (2, last - first, 1))
        weights[:, targets - first] = weight, law
        decided = np.flatnonzero(~masked[first:last])
        label = automaton.class_of(canvas.tokens[first + decided])
        weights[:, decided] = -np.inf
        weights[:, decided[label >= 0], label[label >= 0]] = 0.0
        return Chain(weights[0], weights[1], state, final), first


class Completion(NamedTuple):
    """The classes (n,) that a joint completion gives to the targets of one span, whose indices in
    the prediction are ``at`` (n,), and their log-probabilities ``sure`` (n,).  ``exact``: it
    is the likeliest of all completions, or drawn from all of them."""

    at: IntArray
    classes: IntArray
    sure: Float64Array
    exact: bool


@dataclass(frozen=True)
class Question:
    """What a row asks for: a joint completion of the undecided ``positions`` (n,) of a canvas.

    ``weight`` (n, C) says how likely each class is when choosing, ``logprob`` (n, C) when judging.
    ``draw``: draw one in place of the likeliest.
    """

    form: Format
    canvas: Canvas
    positions: IntArray
    weight: Float64Array
    logprob: Float64Array
    draw: bool

    def parts(self) -> Iterator["Part"]:
        """Per span with such positions."""
        for span in self.form.spans(self.canvas):
            inside = (self.positions >= span.low) & (self.positions < span.high)
            at = (inside & self.canvas.masked[self.positions]).nonzero()[0]
            if at.size:
                weight, law = self.weight[at], self.logprob[at]
                chain, first = self.form.chain(self.canvas, span, self.positions[at], weight, law)
                drawn = chain
                if self.draw and self.weight is not self.logprob:
                    drawn = replace(chain, law=chain.weight)
                    chain = replace(chain, weight=chain.law)
                yield Part(self, at, first, chain, drawn)


class Part(NamedTuple):
    """A question about one span: the indices ``at`` (n,) of its targets in the question, and its
    ``chain``, which begins at position ``first``; ``drawn`` is the one to choose from, which may
    have another law."""

    question: Question
    at: IntArray
    first: int
    chain: Chain
    drawn: Chain


def complete(questions: Sequence[Question]) -> list[list[Completion] | None]:
    """Joint completions: for each question one per span; None where no text is possible."""
    groups: dict[Automaton, list[tuple[int, Part]]] = {}
    for i, asked in enumerate(questions):
        for part in asked.parts():
            groups.setdefault(asked.form.automaton, []).append((i, part))
    found: list[list[Completion | None]] = [[] for _ in questions]
    for automaton, members in groups.items():
        if len(automaton.arcs.source) > MOST_ARCS:
            for i, part in members:
                found[i].append(_pruned(automaton, part))
            continue
        size = max(len(part.chain.weight) for _, part in members) * len(automaton.arcs.source)
        step = max(1, ROOM // size)
        for low in range(0, len(members), step):
            here = members[low : low + step]
            chains = dict.fromkeys(chain for _, part in here for chain in part[3:])
            lattice = Lattice(automaton, list(chains))
            for i, part in here:
                found[i].append(_completion(dict.fromkeys(part[3:], lattice), part))
    return [None if None in each else [c for c in each if c is not None] for each in found]


def _pruned(automaton: Automaton, part: Part) -> Completion | None:
    """A completion through the likeliest states; through all where these lead to nothing."""
    pruned = {chain: Pruned(automaton, chain) for chain in dict.fromkeys(part[3:])}
    if all(lattice.possible(chain) for chain, lattice in pruned.items()):
        chosen = pruned[part.drawn if part.question.draw else part.chain]
        return _completion(pruned, part, chosen.whole if part.question.draw else chosen.certain)
    chains = list(pruned)
    lattice = Lattice(automaton, chains)
    return _completion(dict.fromkeys(chains, lattice), part)


def _completion(
    lattices: Mapping[Chain, Lattice], part: Part, exact: bool = True
) -> Completion | None:
    asked, first = part.question, part.first
    lattice = lattices[part.chain]
    if not lattice.possible(part.chain):
        return None
    if asked.draw:
        noise = asked.canvas.uniform(PATH, first + np.arange(len(part.chain.weight)))
        path = lattices[part.drawn].drawn(part.drawn, noise.astype(np.float64))
    else:
        path = lattice.likeliest(part.chain)
    here = asked.positions[part.at] - first
    return Completion(part.at, path[here], lattice.marginals(part.chain, path)[here], exact)
