"""The dynamic programmes of a step as their formulas read, in logarithms and in loops."""

from collections.abc import Callable

import numpy as np

from dllm.structured.automaton import Automaton
from dllm.structured.joint import Chain


def backward(
    automaton: Automaton, weight: np.ndarray, final: np.ndarray, add: Callable[..., float]
) -> np.ndarray:
    """(L + 1, S): what the completions from a position on weigh, by the state before it."""
    ahead = np.full((len(weight) + 1, len(final)), -np.inf)
    ahead[-1, final] = 0.0
    for i in range(len(weight) - 1, -1, -1):
        for state, label in np.argwhere(automaton.next >= 0):
            here = weight[i, label] + ahead[i + 1, automaton.next[state, label]]
            ahead[i, state] = add(ahead[i, state], here)
    return ahead


def forward(automaton: Automaton, weight: np.ndarray, start: int) -> np.ndarray:
    """(L + 1, S): what the beginnings up to a position weigh in sum, by the state behind it."""
    behind = np.full((len(weight) + 1, len(automaton.accepting)), -np.inf)
    behind[0, start] = 0.0
    for i in range(len(weight)):
        for state, label in np.argwhere(automaton.next >= 0):
            to = automaton.next[state, label]
            behind[i + 1, to] = np.logaddexp(behind[i + 1, to], behind[i, state] + weight[i, label])
    return behind


def likeliest(automaton: Automaton, chain: Chain) -> np.ndarray:
    """(L,) classes."""
    ahead, state, path = backward(automaton, chain.weight, chain.final, max), chain.start, []
    for i, weight in enumerate(chain.weight):
        follow = automaton.next[state]
        values = np.where(follow >= 0, weight + ahead[i + 1, follow], -np.inf)
        path.append(int(values.argmax()))
        state = int(follow[path[-1]])
    return np.array(path)


def marginals(automaton: Automaton, chain: Chain, path: np.ndarray) -> np.ndarray:
    """(L,) log-probabilities of the classes of a path."""
    ahead = backward(automaton, chain.law, chain.final, np.logaddexp)
    behind, result = forward(automaton, chain.law, chain.start), []
    for i, label in enumerate(path):
        follow = automaton.next[:, label]
        through = np.where(follow >= 0, ahead[i + 1, follow], -np.inf) + behind[i]
        result.append(np.logaddexp.reduce(through) + chain.law[i, label] - ahead[0, chain.start])
    return np.array(result)
