"""What a generated task is: seeded examples with one prompt, one reference answer and a checker.

The train and the test split never share an instance: an instance belongs to the test split when
the hash of its content (the numbers, the list, the grid; not the wording) falls into a fixed
residue class, so a phrasing seen in training never carries a memorised answer into the test.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

TEST_MODULUS = 8  # one instance in eight is held out


@dataclass(frozen=True)
class Example:
    """One instance: what to ask, one right answer, and the facts the checker needs."""

    task: str
    prompt: str
    answer: str
    facts: tuple[object, ...]


@dataclass(frozen=True)
class Task:
    """A named generator with its checker.

    ``draw(rng)`` returns an `Example`; ``check(example, text)`` says whether ``text`` answers it
    (several answers may be right, e.g. for a shuffle).
    """

    name: str
    draw: Callable[[random.Random], Example]
    check: Callable[[Example, str], bool]

    def sample(self, rng: random.Random, split: str = "train") -> Example:
        """Draw one instance of ``split`` ("train" or "test")."""
        if split not in ("train", "test"):
            raise ValueError(f"unknown split {split!r}: use 'train' or 'test'")
        while True:
            example = self.draw(rng)
            content = repr((example.task, example.facts)).encode()
            digest = hashlib.blake2b(content, digest_size=8).digest()
            held_out = int.from_bytes(digest, "little") % TEST_MODULUS == 0
            if held_out == (split == "test"):
                return example

    def stream(self, seed: int = 0, split: str = "test") -> Iterator[Example]:
        """Instances of ``split`` without end, the same for the same seed."""
        rng = random.Random(f"{self.name}/{split}/{seed}")
        while True:
            yield self.sample(rng, split)

    def examples(self, n: int, seed: int = 0, split: str = "test") -> list[Example]:
        return list(islice(self.stream(seed, split), n))
