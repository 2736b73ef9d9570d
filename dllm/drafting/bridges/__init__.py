"""Drafters inside other engines: transformers, vLLM, and another process over HTTP."""
