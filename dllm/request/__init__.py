"""A call becomes requests: prompts, lengths, holes, constraints, stop strings."""
