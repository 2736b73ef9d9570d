"""Answers with a form: regular languages over tokens, and how a step's proposals stay in them."""

from __future__ import annotations

from .building import format_of, holes_format
from .format import Format
from .patterns import choice_pattern, regex_pattern
from .schema import schema_of, schema_pattern

__all__ = [
    "Format",
    "choice_pattern",
    "format_of",
    "holes_format",
    "regex_pattern",
    "schema_of",
    "schema_pattern",
]
