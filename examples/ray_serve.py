"""Several replicas of a model behind one port, by Ray Serve; each has an app and an engine of its own.

pip install '.[scale]'
python examples/ray_serve.py Qwen/Qwen3-0.6B 2 8000        # until Ctrl-C
serve run examples.ray_serve:app model=Qwen/Qwen3-0.6B replicas=2        # on a cluster
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig

from lade.cli.options import Output
from lade.cli.options.decoding import Speed
from lade.cli.options.model import Loading
from lade.cli.serve import load_served
from lade.cli.terminal import Terminal
from lade.server.app import build_app
from lade.server.service import Service
from lade.server.settings import Settings

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"  # `x-session-id` stays with a replica
EXCESS = 64  # requests beyond an engine's rows and queue, so that the engine refuses them itself, in the API's words


class Replica:
    """One replica, in its own process; ready once its model is loaded and warm."""

    def __init__(self, settings: Settings, model: str) -> None:
        name = serve.get_replica_context().replica_id.unique_id  # a label of its metrics
        made = replace(settings, replica=name)
        self._service = Service(
            made, lambda: load_served(Loading(model=model), Speed(), None, Terminal(Output(quiet=True)))
        )
        self._service.start()
        while self._service.phase == "loading" and self._service.problem is None:
            time.sleep(0.1)
        if self._service.problem is not None:
            raise self._service.problem

    def __serve_build_asgi_app__(self) -> Any:
        """Return the app that Ray Serve puts behind its port."""
        return build_app(self._service)

    def check_health(self) -> None:
        """Raise if the engine has failed or hangs, so that Ray Serve replaces this replica."""
        self._service.watch()
        if "reason" in self._service.health:
            raise RuntimeError(self._service.health["reason"])


def app(args: dict[str, str]) -> Any:
    """Return the application: `model` and `replicas`, which divide the cores of this machine."""
    replicas = int(args.get("replicas", 2))
    settings = Settings(names=(args["model"],))
    deployed = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=settings.max_rows + settings.max_waiting + EXCESS,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        ray_actor_options={"num_cpus": max(1, (os.cpu_count() or 1) // replicas)},  # and "num_gpus": 1
    )(serve.ingress()(Replica))
    return deployed.bind(settings, args["model"])


if __name__ == "__main__":
    given = dict(zip(("model", "replicas", "port"), sys.argv[1:], strict=False))
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False)
    serve.start(http_options=HTTPOptions(port=int(given.get("port", 8000))))
    serve.run(app(given), blocking=True)
