"""Serving over HTTP: an OpenAI API on one `dllm.Session` per cache.

`create_app` is an ASGI application; ``dllm serve`` runs it by uvicorn, `dllm.serve.ray` in Ray.
"""
