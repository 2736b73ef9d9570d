"""More than one machine: the same application in Ray Serve, the same batches in Ray Data.

Ray brings routing, replicas, restarts and autoscaling; nothing here repeats that.

>>> from ray import serve
>>> from dllm.serve.ray import app
>>> serve.run(app("nano", replicas=2))
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import serve

from ..core.errors import ConfigError
from .settings import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from .batch import Line

APPLICATION = "dllm"
BLOCK = 64  # requests that a worker of a batch gets at a time, per row of its engine


def app(
    model: str = "nano",
    replicas: int = 1,
    settings: Settings | Mapping[str, Any] | None = None,
    loading: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The application for ``serve.run``: ``replicas`` copies of `create_app` of ``model``.

    ``settings``: see `Settings`; ``loading``: arguments of `dllm.load` such as ``dtype``.
    ``options`` are those of ``serve.deployment``, e.g. ``autoscaling_config`` (then ``replicas``
    does not count) or ``ray_actor_options={"num_gpus": 1}``.
    """
    chosen = settings if isinstance(settings, Settings) else Settings(**dict(settings or {}))

    def build() -> Starlette:
        """In the replica: load the model, there and not here."""
        from ..models import load
        from .app import create_app
        from .service import Service

        replica = serve.get_replica_context().replica_tag  # each scrape meets another one
        service = Service(load(model, **dict(loading or {})), chosen, replica=replica)
        service.verifying = None  # a device's next message could come to another replica
        return create_app(service)

    @serve.ingress(build)
    class Replica:
        """One copy of the model with an engine of its own."""

        async def ask(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
            """For `Front`, which keeps the connections."""
            from .front import asked

            async for part in asked(self.app, scope, body):  # type: ignore[attr-defined]
                yield part

    # A replica's own queue answers 429; Ray's must not hide it.
    room = (chosen.max_batch_size + chosen.max_waiting) * len(chosen.caches)
    given = {
        "name": APPLICATION, "max_ongoing_requests": 2 * room,
        "graceful_shutdown_timeout_s": chosen.drain, **options,
    }  # fmt: skip
    if "autoscaling_config" not in given:
        given.setdefault("num_replicas", replicas)
    deployment: Any = serve.deployment(Replica)
    return deployment.options(**given).bind()


def build(arguments: Mapping[str, Any]) -> Any:
    """For ``serve deploy``: the arguments of `app`, from a YAML file."""
    return app(**dict(arguments))


class Worker:
    """An engine for ``ray.data.Dataset.map_batches``: rows of requests in, results out.

    A row has ``request``, the JSON of an OpenAI body (or ``prompt``, a text), and gets ``response``
    (the body of the answer, or of the error, as JSON), ``status`` and ``text`` ("" for an error).
    ``defaults`` are fields of a request that do not stand in it.
    """

    def __init__(
        self, model: str = "nano", settings: Settings | Mapping[str, Any] | None = None,
        loading: Mapping[str, Any] | None = None, defaults: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        from ..models import load
        from .batch import batch_settings
        from .service import Service

        given = settings if isinstance(settings, Settings) else Settings(**dict(settings or {}))
        self.service = Service(load(model, **dict(loading or {})), batch_settings(given))
        self.defaults = dict(defaults or {})

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        from .batch import answer_all, line_of

        kind = next((name for name in ("request", "prompt") if name in batch), None)
        if kind is None:
            raise ConfigError("rows need a column 'request' (JSON) or 'prompt' (text)")
        texts = [str(item) if kind == "request" else json.dumps(str(item)) for item in batch[kind]]
        lines = [
            replace(line_of(text.encode(), i, True, self.defaults, kind == "prompt"), id=str(i))
            for i, text in enumerate(texts)
        ]
        entries: dict[str, dict[str, Any]] = {}
        asyncio.run(
            answer_all(self.service, lines, lambda line, entry: entries.update({line.id: entry}))
        )
        ordered = [entries[line.id] for line in lines]
        columns = {
            "response": [json.dumps(_body(entry), ensure_ascii=False) for entry in ordered],
            "status": [
                one["response"]["status_code"] if one["response"] else 400 for one in ordered
            ],
            "text": [_text(entry) for entry in ordered],
            "entry": [json.dumps(entry, ensure_ascii=False) for entry in ordered],
        }
        return {**batch, **{name: np.asarray(values) for name, values in columns.items()}}


def _body(entry: Mapping[str, Any]) -> Any:
    return entry["response"]["body"] if entry["response"] else {"error": entry["error"]}


def _text(entry: Mapping[str, Any]) -> str:
    for choice in _body(entry).get("choices", ()):
        return str(choice["message"]["content"] or "" if "message" in choice else choice["text"])
    return ""


def answer_with_ray(
    model: str, lines: Iterable[Line], done: Callable[[Line, dict[str, Any]], None],
    workers: int, settings: Settings, loading: Mapping[str, Any],
) -> None:  # fmt: skip
    """``dllm batch --ray``: the lines through ``workers`` engines of Ray Data.

    Results come block by block and are written here: an interrupted run goes on as without Ray.
    """
    from .batch import answer_unreadable

    by_id: dict[str, Line] = {}
    rows = []
    for line in lines:
        if line.body is None:
            done(line, answer_unreadable(line))
            continue
        by_id[line.id] = line
        rows.append({"id": line.id, "request": json.dumps({"url": line.url, "body": line.body})})
    if not rows:
        return
    size = max(1, min(BLOCK * settings.max_batch_size, -(-len(rows) // workers)))
    given = {"model": model, "settings": settings, "loading": dict(loading)}
    actors: Any = ray.data.ActorPoolStrategy  # has no types
    results = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // size)).map_batches(
        Worker, fn_constructor_kwargs=given, batch_size=size, compute=actors(size=workers)
    )
    for row in results.iter_rows():
        done(by_id[row["id"]], json.loads(row["entry"]))
