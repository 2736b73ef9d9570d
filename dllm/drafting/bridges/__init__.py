"""Drafters on a device, for a verifier behind HTTP."""
