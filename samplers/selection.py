"""What the selectors make of a step: where, how sure, which, and whether to give up."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..core.canvas import BoolArray, Canvas
from ..core.errors import ConfigError
from .base import EosRule, Prediction, Scorer, Selector, Stop, Transform, View, Window


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The parts that every step asks, in their order.  ``stop_ids`` are the ids that end a text."""

    window: Window
    scorer: Scorer
    selectors: tuple[Selector, ...]
    eos: EosRule
    stops: tuple[Stop, ...] = ()
    transforms: tuple[Transform, ...] = ()
    stop_ids: tuple[int, ...] = ()

    @cached_property
    def settles(self) -> bool:
        """Whether the window changes by what is predicted."""
        return type(self.window).settle is not Window.settle

    @cached_property
    def reads_more(self) -> bool:
        """Whether predictions may be of other positions than the window's masks."""
        return True

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a text, none where nothing does."""
        return self.stop_ids if self.eos.ends else ()

    def view(self, canvas: Canvas, prediction: Prediction) -> View:
        """What the parts see of a step."""
        if self.settles:
            self.window.settle(canvas, prediction)
        for transform in self.transforms:
            prediction = transform.apply(canvas, prediction)
        here = prediction.of_window(canvas) if self.reads_more else prediction
        score = self.scorer.score(canvas, here)
        view = View(canvas, here, score, prediction, self.ends)
        rescored = self.eos.rescore(view)
        return view if rescored is score else replace(view, score=rescored)

    def gives_up(self, view: View) -> bool:
        """Whether a part gives up refining: then all is committed as it is proposed."""
        return any(stop.fill(view) for stop in self.stops)

    def choose(self, view: View, force: bool = True) -> tuple[BoolArray, bool]:
        """(n,) bool over the view's positions: which are committed; and whether one had to be
        forced, which happens where ``force`` is set and nothing else was chosen."""
        if not len(view.score):  # a decided window that a reviser holds open
            return np.zeros(0, np.bool_), False
        chosen = checked(self.selectors[0], view)
        for selector in self.selectors[1:]:
            left = (~chosen).nonzero()[0]
            chosen[left] = checked(selector, view.take(left))
        return chosen, force and forced(view, chosen)


def forced(view: View, chosen: BoolArray) -> bool:
    """The progress guarantee: a step that was paid for decides something."""
    if not len(chosen) or np.count_nonzero(chosen):
        return False
    chosen[view.score.argmax()] = True
    return True


def checked(selector: Selector, view: View) -> BoolArray:
    """What a selector selects; an error that names it where that is no choice of positions."""
    chosen: object = selector.select(view)
    n = len(view.score)
    if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_ and chosen.shape == (n,):
        return chosen
    if isinstance(chosen, np.ndarray):
        got = f"an array of {chosen.dtype}, shape {chosen.shape}"
    else:
        got = "None" if chosen is None else f"a {type(chosen).__name__}"
    raise ConfigError(
        f"{selector.name or type(selector).__name__}.select returned {got}, not one bool per "
        f"position of the view, shape ({n},); for indices: chosen = np.zeros({n}, bool); "
        "chosen[indices] = True"
    )
