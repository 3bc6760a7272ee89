"""Several servers of one model behind one port, by Ray Serve: each replica has an app and an engine of its own."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI

from lade.errors import InputError
from lade.server.app import build_app
from lade.server.served_model import ServedModel
from lade.server.service import Service
from lade.server.settings import Settings

NAME = "lade"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_REFUSED_AT_A_TIME = 64
"""Requests that a replica gets beyond those that it decodes and lets wait: it refuses them itself, as JSON."""
_LOAD = 0.75
"""Of its rows that a replica should have taken before there is another one."""
_CHECK_S, _POLL_S = 5.0, 0.1
_RAISED = re.compile(r"[\w.]*(?:Error|Exception): (.+)")
"""The last line of a traceback."""
_ATTEMPTS = 2
"""To load a model: one that cannot be loaded is not to be tried for minutes."""


@dataclass(frozen=True)
class Scale:
    """How many replicas there are, and what each of them takes.

    Attributes:
        replicas: that there are at least.
        most: that there may be, as the number of requests asks for it.
        cpus: cores of each, which is also its number of threads.
        gpus: devices of each.
    """

    replicas: int = 1
    most: int = 1
    cpus: float = 1
    gpus: float = 0


class Replica:
    """One of them, in a process of its own: ready when its model is loaded and warm.

    Args:
        settings: of the server.
        load: loads the model; called in this process.

    Raises:
        Exception: what kept the model from being loaded.
    """

    def __init__(self, settings: Settings, load: Callable[[], ServedModel]) -> None:
        from ray import serve

        name = serve.get_replica_context().replica_id.unique_id
        self._service = Service(replace(settings, replica=name), load)
        self._service.start()
        while self._service.phase == "loading" and self._service.problem is None:
            time.sleep(_POLL_S)
        if self._service.problem is not None:
            raise self._service.problem

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Ray Serve hands requests to."""
        return build_app(self._service)

    def check_health(self) -> None:
        """Raise when the engine has broken down: Ray Serve starts another replica in its place."""
        self._service.watch()
        if self._service.phase == "dead":
            raise RuntimeError(self._service.reason)


def application(settings: Settings, load: Callable[[], ServedModel], scale: Scale) -> Any:
    """What Ray Serve runs.

    A session (header `x-session-id`) stays with its replica, which knows its texts; requests without one are spread. A
    replica has as many requests as its engine takes and a few more, so that what is too much is refused by the engine,
    in the form that clients know, and not by Ray's proxy.

    Args:
        settings: of each replica.
        load: loads the model; it is sent to the replicas.
        scale: how many there are.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    several: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.most > scale.replicas:
        target = max(1.0, _LOAD * settings.max_rows)
        limits = {"min_replicas": scale.replicas, "max_replicas": scale.most}
        several = {"autoscaling_config": {**limits, "target_ongoing_requests": target}}
    deployed = serve.deployment(
        name=NAME,
        max_ongoing_requests=settings.max_rows + settings.max_waiting + _REFUSED_AT_A_TIME,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        health_check_period_s=_CHECK_S,
        max_constructor_retry_count=_ATTEMPTS,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        **several,
    )(serve.ingress()(Replica))
    return deployed.bind(settings, load)


def run(made: Any, settings: Settings, port: int, scale: Scale, announce: Callable[[], None]) -> None:
    """Serve an application on this machine until SIGTERM or SIGINT; answers may end then, as long as settings say.

    Args:
        made: by `application`.
        settings: of each replica.
        port: to listen on.
        scale: as it was made with.
        announce: is called when all replicas are ready.

    Raises:
        InputError: they cannot be started, for the reason that it names.
    """
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    stop = threading.Event()
    ray.init(
        address="local", num_cpus=max(1, int(scale.most * scale.cpus)), log_to_driver=False, include_dashboard=False
    )
    try:
        serve.start(http_options=HTTPOptions(host=settings.host, port=port))
        _start(made)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        announce()
        stop.wait()
        serve.delete(NAME)  # while the proxy is there still, which brings answers to their clients
    finally:
        serve.shutdown()
        ray.shutdown()


def _start(made: Any) -> None:
    from ray import serve

    try:
        serve.run(made, name=NAME, route_prefix="/")
    except RuntimeError as problem:
        why = _reason() or f"{problem}; try lade serve without --replicas"
        raise InputError(f"the replicas cannot be started: {why}") from problem


def _reason() -> str | None:
    """What a replica raised when it loaded its model, if that is known.

    Ray's own error says only that there are no replicas; a deployment's status ends with the replica's traceback.
    """
    from ray import serve

    found = serve.status().applications.get(NAME)
    for deployment in found.deployments.values() if found is not None else ():
        last = deployment.message.rstrip().rpartition("\n")[2]
        if raised := _RAISED.match(last):
            return raised[1]
    return None
