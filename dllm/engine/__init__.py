"""The engine: canvases in, one forward per step for all of them, decisions out."""

from .loop import Engine
from .recipe import MaskedRecipe, Recipe, check_pair
from .rows import Row, Step

__all__ = ["Engine", "MaskedRecipe", "Recipe", "Row", "Step", "check_pair"]
