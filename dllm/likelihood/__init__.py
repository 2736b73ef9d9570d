"""How likely a model finds a text: `score` for text, `score_requests` for token ids."""

from __future__ import annotations

from .api import score
from .scoring import Request, Score, Scoring, score_requests

__all__ = ["Request", "Score", "Scoring", "score", "score_requests"]
