"""SuffixDecoding: continue the longest suffix that was seen before, here or in earlier requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ...canvas import IntArray
from ...errors import ConfigError
from ..base import DRAFTERS, EMPTY, Budget, Draft, Drafter, Drafting, Feedback, Request, chain


class Node:
    """A node of a suffix tree: how often its path occurred, and what came next."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}


class SuffixTree:
    """All substrings of up to ``depth`` tokens of the texts added, with their counts."""

    def __init__(self, depth: int) -> None:
        self.depth, self.root = depth, Node()

    def extend(self, text: list[int], fresh: int) -> None:
        """Count the substrings that end in the last ``fresh`` tokens of ``text``."""
        for end in range(len(text) - fresh, len(text)):
            for start in range(max(0, end - self.depth + 1), end + 1):
                self._add(text[start : end + 1], 1)

    def forget(self, text: list[int]) -> None:
        """Undo `extend` of a whole text.

        From its end on, so that a path is gone before the shorter one that leads to it.
        """
        for end in reversed(range(len(text))):
            for start in range(max(0, end - self.depth + 1), end + 1):
                self._add(text[start : end + 1], -1)

    def _add(self, path: list[int], amount: int) -> None:
        node = self.root
        for token in path[:-1]:
            node = node.children[token]
        child = node.children.setdefault(path[-1], Node())
        child.count += amount
        if child.count == 0:
            del node.children[path[-1]]

    def find(self, suffix: list[int]) -> Node | None:
        """The node at the end of ``suffix``, if it occurred."""
        node = self.root
        for token in suffix:
            result = node.children.get(token)
            if result is None:
                return None
            node = result
        return node


@DRAFTERS.register("suffix", paper="SuffixDecoding: Extreme Speculative Decoding for Emerging AI "
                   "Applications", arxiv="2411.04975")  # fmt: skip
@dataclass
class SuffixDecoding(Drafter):
    """Follow the most frequent continuations of the longest known suffix.

    One tree holds the present text, one the outputs of the last ``requests`` sequences.  The draft
    has at most ``factor`` times as many tokens as the suffix that matched, and ends where the
    product of the empirical probabilities falls below ``least``.
    """

    depth: int = 24
    factor: float = 1.0
    least: float = 0.1
    requests: int = 1_000

    def __post_init__(self) -> None:
        if self.depth < 2 or self.factor <= 0 or self.requests < 0:
            raise ConfigError("suffix takes depth >= 2, factor > 0 and requests >= 0")
        self.shared = SuffixTree(self.depth)
        self.texts: deque[list[int]] = deque()

    def open(self, request: Request) -> Drafting:
        return _Suffixes(self, request)

    def remember(self, text: list[int]) -> None:
        """Keep an output for later requests; the oldest makes room."""
        if self.requests == 0 or not text:
            return
        while len(self.texts) >= self.requests:
            self.shared.forget(self.texts.popleft())
        self.texts.append(text)
        self.shared.extend(text, len(text))


class _Suffixes(Drafting):
    def __init__(self, part: SuffixDecoding, request: Request) -> None:
        self.part, self.tree = part, SuffixTree(part.depth)
        self.start, self.known = len(request.prompt), 0
        self.text: list[int] = request.prompt.tolist()

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        self._follow(prefix)
        best: tuple[float, list[int]] = (0.0, [])
        for tree in (self.tree, self.part.shared):
            best = max(best, self._continue(tree, budget.length), key=lambda result: result[0])
        return chain(best[1], self.part.name) if best[1] else EMPTY

    def _follow(self, prefix: IntArray) -> None:
        self.text = prefix.tolist()
        self.tree.extend(self.text, len(self.text) - self.known)
        self.known = len(self.text)

    def _continue(self, tree: SuffixTree, length: int) -> tuple[float, list[int]]:
        """Expected accepted tokens, and the continuation of the longest suffix with one."""
        for size in range(min(self.part.depth - 1, len(self.text)), 0, -1):
            node = tree.find(self.text[-size:])
            if node is None or not node.children:
                continue
            most = min(length, max(1, int(self.part.factor * size)))
            return self._walk(tree, size, most)
        return 0.0, []

    def _walk(self, tree: SuffixTree, size: int, most: int) -> tuple[float, list[int]]:
        tokens: list[int] = []
        alive, expected = 1.0, 0.0
        while len(tokens) < most:
            node = None  # the tree is only so deep: shorten the suffix until it has a successor
            context = (self.text + tokens)[-min(self.part.depth - 1, size + len(tokens)) :]
            while context and (node is None or not node.children):
                node, context = tree.find(context), context[1:]
            alternatives = {} if node is None else node.children
            if not alternatives:
                break
            total = sum(child.count for child in alternatives.values())
            token, count = max(((t, c.count) for t, c in alternatives.items()),
                               key=lambda pair: (pair[1], -pair[0]))  # fmt: skip
            alive *= count / total
            if alive < self.part.least:
                break
            tokens.append(token)
            expected += alive
        return expected, tokens

    def observe(self, feedback: Feedback) -> None:
        # also when another drafter was asked; the tree grows when this one is
        self.text += feedback.emitted

    def close(self) -> None:
        self.part.remember(self.text[self.start :])
