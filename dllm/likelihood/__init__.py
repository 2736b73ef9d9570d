"""How likely a model finds a text: `score` for text, `score_requests` for token ids."""

from .api import score
from .scoring import Score, ScoreRequest, Scoring, score_requests

__all__ = ["ScoreRequest", "Score", "Scoring", "score", "score_requests"]
