"""Where a server and its clients find the key that it asks for."""

KEY = "DLLM_API_KEY"  # environment variable
