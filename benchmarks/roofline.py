"""What a step cannot beat: arithmetic over peak, bytes over bandwidth, whichever is larger.

Layers, attention and head are taken one after the other, each at its own bound; nothing overlaps,
and there are no gaps between kernels.  Half-precision weights, keys and values: two bytes each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Sustained FLOP per second and bytes per second; defaults assumed of an H200 in bfloat16."""

    flops: float = 800e12
    bandwidth: float = 4.8e12

    def seconds(self, flops: float, moved: float) -> float:
        return max(flops / self.flops, moved / self.bandwidth)


@dataclass(frozen=True)
class Shape:
    """Sizes of a network; ``mask`` is its mask token."""

    family: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    mask: int

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    @property
    def weights(self) -> int:
        """Parameters of all layers, without embedding, head and norms."""
        attention = 2 * self.width**2 + 2 * self.width * self.kv_width
        return self.layers * (attention + 3 * self.width * self.inner)

    def floor(self, queries: int, keys: float, scored: int, rows: int, peak: Peak) -> float:
        """Seconds of a step that computes ``queries`` positions in all and scores ``scored``;
        each of ``rows`` rows reads ``keys`` keys."""
        cached = 2 * 2 * self.layers * self.kv_width * keys * rows
        return (
            peak.seconds(2 * self.weights * queries, 2 * self.weights)
            + peak.seconds(4 * queries * keys * self.width * self.layers, cached)
            + self.head_floor(scored, peak)
        )

    def head_floor(self, scored: int, peak: Peak) -> float:
        """Seconds of the head alone."""
        head = self.width * self.vocabulary
        return peak.seconds(2 * head * scored, 2 * head)


SHAPES = {
    "LLaDA-8B": Shape("llada", 4096, 32, 32, 32, 12288, 126_464, 126_336),
    "Dream-7B": Shape("dream", 3584, 28, 28, 4, 18944, 152_064, 151_666),
}
DRY = {"dry": Shape("llada", 64, 2, 4, 2, 96, 500, 499)}
