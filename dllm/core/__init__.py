"""The ground: what every other room may use, with nothing of dllm below it."""
