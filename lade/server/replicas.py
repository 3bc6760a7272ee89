"""Several replicas of a server behind one port, by Ray Serve; each has its own app and engine."""

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
_EXCESS = 64
"""Requests that a replica receives beyond its rows and queue, so that it refuses them itself, as JSON."""
_LOAD = 0.75
"""Target share of busy rows for autoscaling."""
_CHECK_S, _POLL_S = 5.0, 0.1
_RAISED = re.compile(r"[\w.]*(?:Error|Exception): (.+)")
"""The last line of a traceback."""
_ATTEMPTS = 2
"""Attempts to start a replica, so that a broken model fails within minutes."""


@dataclass(frozen=True)
class Scale:
    """Number and size of replicas.

    Attributes:
        replicas: minimum number of replicas.
        most: maximum number of replicas under load.
        cpus: cores and threads per replica.
        gpus: devices per replica.
    """

    replicas: int = 1
    most: int = 1
    cpus: float = 1
    gpus: float = 0


class Replica:
    """One replica, in its own process; ready once its model is loaded and warm.

    Args:
        settings: the server's settings.
        load: function that loads the model, called in this process.

    Raises:
        Exception: the exception that kept the model from being loaded.
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
        """Return the ASGI app for Ray Serve."""
        return build_app(self._service)

    def check_health(self) -> None:
        """Raise if the engine has failed or hangs, so that Ray Serve replaces this replica."""
        self._service.watch()
        if "reason" in self._service.health:
            raise RuntimeError(self._service.health["reason"])


def application(settings: Settings, load: Callable[[], ServedModel], scale: Scale) -> Any:
    """Build the Ray Serve application.

    A session (header `x-session-id`) stays with the replica that has its texts cached; other requests are balanced. A
    replica accepts slightly more requests than its engine, so that excess is refused by the engine in the API's own
    error format, not by Ray's proxy.

    Args:
        settings: the settings of each replica.
        load: function that loads the model; sent to the replicas.
        scale: number and size of replicas.
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
        max_ongoing_requests=settings.max_rows + settings.max_waiting + _EXCESS,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        health_check_period_s=_CHECK_S,
        max_constructor_retry_count=_ATTEMPTS,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        **several,
    )(serve.ingress()(Replica))
    return deployed.bind(settings, load)


def run(made: Any, settings: Settings, port: int, scale: Scale, announce: Callable[[], None]) -> None:
    """Serve an application until SIGTERM or SIGINT, then let answers finish within the shutdown timeout.

    Args:
        made: the application from `application`.
        settings: the settings of each replica.
        port: port to listen on.
        scale: number and size of replicas.
        announce: called when all replicas are ready.

    Raises:
        InputError: the replicas could not be started.
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
        serve.delete(NAME)  # before the proxy, which still delivers answers
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
    """Return the exception that a replica raised on load, if known.

    Ray's own error only says that there are no replicas; the deployment's status ends with the replica's traceback.
    """
    from ray import serve

    found = serve.status().applications.get(NAME)
    for deployment in found.deployments.values() if found is not None else ():
        last = deployment.message.rstrip().rpartition("\n")[2]
        if raised := _RAISED.match(last):
            return raised[1]
    return None
