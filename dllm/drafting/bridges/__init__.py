"""Drafters inside transformers, and in another process over HTTP."""
