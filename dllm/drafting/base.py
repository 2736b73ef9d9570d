"""What drafting is made of: a draft and its distribution, budgets, and parts named in strings.

One round: a *length controller* grants a budget, a *drafter* proposes tokens (often found by a
*search* through a lattice, helped by a causal *proxy*), the verifier scores them in one forward,
and an *accept rule* says how many are kept and which token follows.  A draft can cost time; it can
change the output only if the accept rule does not match the draft's *distribution*, i.e. the
distribution that its tokens were drawn from.  `AcceptRule.check` refuses that.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..core.canvas import IntArray
from ..core.errors import ConfigError, short
from ..core.registry import Registry
from ..core.spec import parse_one

Array = npt.NDArray[np.float64]
ROOT = -1  # the parent of a draft's first tokens: the last committed token


def clock_of(device: Any) -> Callable[[], float]:
    """The clock that rounds are measured by: processor time where a torch ``device`` is a CPU,
    whose other work must not decide how much is drafted; else time that passes."""
    return time.process_time if device.type == "cpu" else time.perf_counter


class Distribution(Enum):
    """Where the tokens of a draft come from, given everything known before each of them.

    POINT: anything that is not plain sampling (argmax, search, lookup, best of several).
    MARGINALS: each token was drawn from a distribution that depends on its depth only.
    """

    POINT = "point"
    MARGINALS = "marginals"


@dataclass(frozen=True, eq=False)
class Draft:
    """Proposed tokens: a chain, or a tree in topological order.

    ``tokens`` (n,) int64; ``parents`` (n,) int64 are node indices, `ROOT` for children of the last
    committed token, None for a chain.  ``log_q`` are log-probabilities over the verifier's
    vocabulary, (depths, V), row ``d`` for tokens at depth ``d``.  ``confidence`` (n,) is the
    drafter's largest probability where each token stands.  ``end`` is the number of tokens before
    the drafter's own end of text, if it expects one.
    """

    tokens: IntArray
    parents: IntArray | None = None
    distribution: Distribution = Distribution.POINT
    log_q: npt.NDArray[np.floating[Any]] | None = None
    confidence: npt.NDArray[np.floating[Any]] | None = None
    end: int | None = None
    source: str = ""
    search_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every token follows the one before it."""
        return self.parents is None

    def parent(self, node: int) -> int:
        """The node before ``node``, `ROOT` for the first ones."""
        return node - 1 if self.parents is None else int(self.parents[node])

    def children(self, node: int) -> list[int]:
        """Nodes below ``node`` (`ROOT` for the first), in drawing order."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self) else []
        return np.flatnonzero(self.parents == node).tolist()

    def depth(self, node: int) -> int:
        """0 for children of the root; -1 for the root itself."""
        if self.parents is None or node == ROOT:
            return node
        return 1 + self.depth(int(self.parents[node]))

    def path(self, node: int) -> list[int]:
        """Nodes from the first one down to ``node``; empty for the root."""
        result: list[int] = []
        while node != ROOT:
            result.append(node)
            node = self.parent(node)
        return result[::-1]

    def ancestry(self) -> npt.NDArray[np.bool_]:
        """(n, n): whether the node of a row comes from the node of a column, or is it."""
        if self.parents is None:
            return np.tri(len(self), dtype=np.bool_)
        result = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ROOT:
                result[node] |= result[parent]
        return result

    def q(self, node: int) -> Array:
        """The distribution (V,) from which the children of ``node`` were drawn."""
        assert self.log_q is not None
        return cast(Array, np.exp(self.log_q[self.depth(node) + 1].astype(np.float64)))

    def checked(self, vocab_size: int) -> Self:
        """The draft, its ids and parents as arrays.  Raises `ConfigError` for one that cannot be
        scored, which could end all texts of a GPU, or not be judged as its distribution says."""
        ids, at = np.asarray(self.tokens), np.arange(len(self.tokens))
        above = at - 1 if self.parents is None else np.asarray(self.parents)
        if len(ids) and not (ids.dtype.kind in "iu" and ((ids >= 0) & (ids < vocab_size)).all()):
            raise ConfigError(f"a draft has token ids below {vocab_size}, not {short(ids)}")
        if above.shape != ids.shape or not ((above >= ROOT) & (above < at)).all():
            raise ConfigError(f"parents of a draft are {ROOT} or one before it, not {short(above)}")
        if self.distribution is Distribution.MARGINALS and self.is_chain:
            q = np.zeros((0, 0)) if self.log_q is None else self.log_q
            if q.shape != (max(len(q), len(ids)), vocab_size) or not np.isfinite(q[at, ids]).all():
                raise ConfigError(f"a sampled draft has finite log_q, {vocab_size} for each token")
        return replace(self, tokens=ids, parents=None if self.is_chain else above)

    def cut(self, length: int) -> Self:
        """A chain shortened to ``length`` tokens."""
        if not self.is_chain or length >= len(self):
            return self
        few = None if self.confidence is None else self.confidence[:length]
        return replace(self, tokens=self.tokens[:length], confidence=few)


def chain(
    tokens: Sequence[int] | IntArray, source: str = "", confidence: Array | None = None
) -> Draft:
    """A chain found by lookup: distribution POINT."""
    return Draft(np.asarray(tokens, np.int64), confidence=confidence, source=source)


EMPTY = chain([])


@dataclass(frozen=True)
class Budget:
    """What a round may use: ``length`` of a chain or depth of a tree (0 = do not draft), ``room``
    that the sequence leaves; ``refine`` turns the drafter's largest probability per position (w,)
    into the length of a chain, once the drafter has run, and ``nodes`` the probabilities (n,) that
    the nodes of a tree are accepted, best first, into how many of them are worth their time."""

    length: int
    room: int
    refine: Callable[[Array], int] | None = None
    nodes: Callable[[Array], int] | None = None

    def chain_length(self, confidence: Array) -> int:
        """Tokens to send to the verifier, given the drafter's confidences."""
        length = self.length if self.refine is None else self.refine(confidence)
        return max(0, min(length, self.room, len(confidence)))

    def tree_size(self, alive: Array) -> int:
        """Nodes to send to the verifier: the first of those whose chances are ``alive`` (n,)."""
        return len(alive) if self.nodes is None else max(0, min(self.nodes(alive), len(alive)))

    def chain(self, tokens: Sequence[int] | IntArray, sure: Sequence[float], source: str) -> Draft:
        """As many ``tokens`` as are worth their time, each right with the chance in ``sure`` if
        those before it are."""
        confidence = np.asarray(sure, np.float64)
        n = self.chain_length(confidence)
        return chain(tokens[:n], source, confidence[:n])


@dataclass(frozen=True)
class Outcome:
    """What the verifier made of a draft: accepted nodes from the root down, and one more token;
    ``deviations`` of the accepted ones differ from the verifier's, which lossy rules allow."""

    path: list[int]
    extra: int
    deviations: int = 0


@dataclass(frozen=True)
class RoundStats:
    """One round.  ``drafted`` nodes and ``depth`` of the draft, ``accepted`` tokens (without the
    extra one), ``emitted`` tokens; ``extra`` is "correction", "bonus" or "none" (cut off).
    ``first``: the round read the prompt; ``attempted``: the drafter was asked.  Seconds by
    `clock_of`, spent drafting (search included), searching, verifying (accept rule included) and on
    everything else.  In a batch ``verify_seconds`` are those of the whole forward, which also fed
    ``beside`` tokens of other texts that got ``beside_emitted`` tokens from it."""

    drafted: int
    depth: int
    accepted: int
    emitted: int
    extra: str
    source: str
    draft_seconds: float
    search_seconds: float
    verify_seconds: float
    other_seconds: float
    context: int
    first: bool = False
    attempted: bool = False
    beside: int = 0
    beside_emitted: int = 0
    deviations: int = 0


@dataclass(frozen=True)
class Feedback:
    """What a drafter, a proxy or a controller learns from a round.  ``path``: the nodes of the
    draft that were kept; ``emitted``: the new tokens.  ``hidden`` (m, layers * D) are the hidden
    states behind the layers `Drafter.target_layer_ids` at every token that was fed: those that were
    committed and not yet fed (in the first round the prompt), then the nodes of the draft."""

    draft: Draft
    path: list[int]
    emitted: list[int]
    hidden: Any = None

    @property
    def accepted(self) -> int:
        """How many drafted tokens were kept."""
        return len(self.path)


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter is told when a sequence begins.  ``prompt`` (P,) int64; ``vocab_size`` and
    ``stop_ids`` are the verifier's; ``limit`` is the longest the sequence can get; ``noise_key`` is
    (seed, stream) of the verifier's emission noise, for drafters that share it; ``trees``: whether
    verifier and accept rule take trees; ``verifier`` is the verifier's model where it runs in this
    process, else None."""

    prompt: IntArray
    vocab_size: int
    stop_ids: tuple[int, ...]
    limit: int
    temperature: float = 0.0
    noise_key: tuple[int, int] = (0, 0)
    draft_key: tuple[int, int] = (0, 3)
    trees: bool = False
    verifier: Any = None


class Drafting:
    """A drafter at work on one sequence; ``part`` is the drafter."""

    part: Any

    @property
    def waits(self) -> bool:
        """Whether it has nothing to propose yet, and the text has to wait for it."""
        return False

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        """Tokens that may follow ``prefix`` (n,), or none; by default of `Drafter.propose_all`."""
        if type(self.part).propose_all is Drafter.propose_all:  # which calls this one
            raise NotImplementedError
        draft: Draft = self.part.propose_all([(self, prefix, budget)])[0]
        return draft

    def observe(self, feedback: Feedback) -> None:
        """What became of the last proposal."""

    def close(self) -> None:
        """The sequence is complete."""


@dataclass
class DraftPart:
    """A piece named in a string.  Class attributes describe it to listings."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""


@dataclass
class Drafter(DraftPart):
    """Something that proposes tokens.  What outlives a sequence is kept in the drafter itself.

    ``target_layer_ids``: the verifier's layers whose hidden states it reads, in `Feedback.hidden`.
    ``outside``: its drafts come from elsewhere, when they come; its texts wait for them, and take
    nobody's place meanwhile.  ``trees``: it drafts trees whatever the verifier takes.
    """

    distributions: ClassVar[frozenset[Distribution]] = frozenset({Distribution.POINT})
    target_layer_ids: ClassVar[tuple[int, ...]] = ()
    outside: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def open(self, request: DraftRequest) -> Drafting:
        """Start on a new sequence."""
        raise NotImplementedError

    def propose_all(self, work: Sequence[tuple[Drafting, IntArray, Budget]]) -> list[Draft]:
        """One round of drafts for several sequences that it has open.  Override it where drafting
        for all of them at once is cheaper than one after the other."""
        return [drafting.propose(prefix, budget) for drafting, prefix, budget in work]


@dataclass
class AcceptRule(DraftPart):
    """Which drafted tokens are kept.  ``accepts`` are the distributions for which it is
    lossless; a ``lossy`` rule is so for none, and says so wherever its results are shown.
    ``beyond``: tokens that it emits behind a draft whose tokens are all accepted."""

    accepts: ClassVar[frozenset[Distribution]] = frozenset(Distribution)
    trees: ClassVar[bool] = False
    lossy: ClassVar[bool] = False
    beyond: ClassVar[int] = 1

    def check(self, distribution: Distribution, tree: bool) -> None:
        """The distribution guard: raise when the rule would bias the output."""
        if distribution not in self.accepts:
            raise ConfigError(
                f"accept rule {self.name!r} is lossless only for tokens sampled from a known "
                f"distribution, not for a draft of distribution {distribution.value!r}; use "
                "'keyed' or 'greedy', or search='sample'"
            )
        if tree and not self.trees:
            raise ConfigError(
                f"accept rule {self.name!r} judges chains, the draft is a tree; use 'keyed' or "
                "'greedy', or a search that returns a chain"
            )

    def judge(self, rows: Any, draft: Draft) -> Outcome:
        """Accepted path and extra token; ``rows`` are `Rows` of the verifier."""
        raise NotImplementedError


T = TypeVar("T", bound=DraftPart)

DRAFTERS: Registry[Drafter] = Registry("drafter", Drafter)
RULES: Registry[AcceptRule] = Registry("accept rule")


def single(spec: str | T, registry: Registry[T], kind: type[T]) -> T:
    """The one part that ``spec`` names; objects pass."""
    return spec if isinstance(spec, kind) else parse_one(spec, registry)
