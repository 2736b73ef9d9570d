"""Serving over HTTP: an OpenAI API on one `dllm.Session` per cache.

`create_app` is an ASGI application; ``dllm serve`` runs it with uvicorn, `dllm.serve.ray` in Ray
Serve.
"""
