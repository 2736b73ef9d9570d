"""Structured output: regular languages over tokens, and how a step's proposals stay in them.

The worker process imports this package, so that it imports nothing by itself.
"""
