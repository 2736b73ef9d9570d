"""The key that a server asks for, and where its clients find it."""

import os

KEY = "DLLM_API_KEY"  # environment variable


def json_headers(key: str | None = None) -> dict[str, str]:
    """Headers of a request with a JSON body; ``key`` (default: the environment's) goes along."""
    key = key or os.environ.get(KEY)
    headers = {"Content-Type": "application/json"}
    return {**headers, "Authorization": f"Bearer {key}"} if key else headers
