"""Requests become results: the queue, what is told while they run, and what comes of them."""
