"""``dllm serve --replicas``: Ray, replicas in it, and processes before them that listen."""

import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from ..core.errors import ConfigError, one_line
from .settings import Settings

log = logging.getLogger("dllm.serve")
LOOPBACK = "127.0.0.1"
FRONTS = 2  # processes that listen: while one is started again, the other answers
LOOK = 0.5  # seconds between two looks at them


def join(host: str = LOOPBACK) -> bool:
    """Connect to the cluster that ``RAY_ADDRESS`` names, or start one at ``host``: then True.

    Whoever reaches a port of Ray could run programs, so that a cluster of ours asks for Ray's
    token, and on `LOOPBACK` opens no port to other machines.
    """
    ours = os.environ.get("RAY_ADDRESS") in (None, "", "local")
    if ours:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray gives them what all others leave
        if host == LOOPBACK:  # Ray's word for "this machine alone", on Linux too
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray  # reads these when it is imported

    if ray.is_initialized():
        return False
    where: dict[str, Any] = {}
    if ours:
        where = {"address": "local", "include_dashboard": False}
        if host != LOOPBACK:
            where["_node_ip_address"] = host
    ray.init(log_to_driver=False, logging_level=logging.WARNING, **where)
    return ours


def serve_replicas(
    model: str, settings: Settings, replicas: int, host: str, port: int, loading: Mapping[str, Any],
    note: Callable[[str], None], ray_host: str = LOOPBACK, log_level: str = "info",
) -> None:  # fmt: skip
    """Until SIGTERM or SIGINT, after which what runs is answered.  Of a cluster that was there
    before only the application of this server ends."""
    from .run import address_of, listen

    with listen(host, port, settings.write_patience) as sock:
        ours = join(ray_host)
        import ray
        from ray import serve

        from .ray import app

        # Nobody else listens here: what a killed server left has this name, and is replaced.
        name = f"dllm-{socket.gethostname()}-{sock.getsockname()[1]}"
        try:
            options = share(replicas, ray.cluster_resources(), loading) if ours else {}
            serve.start(proxy_location="Disabled")
            try:
                serve.run(app(model, replicas, settings, loading, ray_actor_options=options),
                          name=name, route_prefix=None)  # fmt: skip
            except RuntimeError as error:
                raise ConfigError(f"the replicas did not start: {one_line(error, 500)}") from error
            cluster = ray.get_runtime_context().gcs_address

            def opened() -> None:
                where = "" if ours and ray_host == LOOPBACK else f", in the Ray at {cluster}"
                url = address_of(sock, host)
                note(f"{replicas} replicas of {settings.name or model} at {url}/v1{where}")

            watch((sock, settings, cluster, name, log_level), opened)
            note("stopping")
            serve.delete(name)
        finally:
            if ours:
                serve.shutdown()
            ray.shutdown()


def share(
    replicas: int, resources: Mapping[str, float], loading: Mapping[str, Any]
) -> dict[str, float]:
    """A replica's share of a machine's ``resources``: Ray gives it a thread per processor."""
    cores, gpus = resources.get("CPU", 1), resources.get("GPU", 0)
    result = {"num_cpus": cores // replicas or cores / replicas}
    if gpus and loading.get("device") != "cpu":
        result["num_gpus"] = min(1.0, gpus / replicas)
    return result


def watch(arguments: tuple[Any, ...], opened: Callable[[], None]) -> None:
    """Keep `FRONTS` processes of `front` at work until a signal comes, which they get."""
    context = multiprocessing.get_context("spawn")
    ready, signals = context.Event(), list[int]()

    def start() -> Any:
        process = context.Process(target=front, args=(*arguments, ready))
        process.start()
        return process

    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda number, _: signals.append(number))
    fronts = [start() for _ in range(FRONTS)]
    try:
        while not ready.wait(LOOK) and not signals:
            if not any(process.is_alive() for process in fronts):
                raise ConfigError("no process began to listen: the lines before this one say why")
        if not signals:
            opened()
        while not signals:
            wait([process.sentinel for process in fronts], LOOK)
            for at, process in enumerate(fronts):
                if not process.is_alive() and not signals:
                    log.warning("a process that listens has ended: another starts")
                    fronts[at] = start()
        told = 0
        while alive := [process for process in fronts if process.is_alive()]:
            for process in alive * (told < len(signals)):
                process.terminate()
            told = len(signals)
            wait([process.sentinel for process in alive], LOOK)
    finally:
        for process in fronts:
            process.kill()


def front(
    sock: socket.socket, settings: Settings, cluster: str, name: str, level: str, ready: Any
) -> None:
    """A process that listens at ``sock`` for the application ``name`` of a cluster."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C is for the process that watches this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import ray
    from ray import serve
    from starlette.middleware.cors import CORSMiddleware

    from .front import Front
    from .http import origins
    from .run import Server, log_to_stderr

    log_to_stderr(level)
    ray.init(address=cluster, log_to_driver=False, logging_level=logging.WARNING)
    replicas = serve.get_app_handle(name).options(method_name="ask", stream=True)
    behind = Front(settings, replicas)
    ready.set()
    with suppress(KeyboardInterrupt, SystemExit):  # uvicorn raises signals again
        Server(CORSMiddleware(behind, **origins(settings.cors)), behind).run(sockets=[sock])


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
