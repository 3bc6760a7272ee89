"""A replica, and what Ray Serve is told of it; with Ray itself they are tried by `make test-scale`."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from served import SERVED, SETTINGS

from lade.errors import InputError
from lade.server import replicas
from lade.server.replicas import Replica, Scale, application


@pytest.fixture
def told(monkeypatch):
    """The options of the deployment; what is asked of Ray beside that is answered here."""
    options = {}

    def deployment(**given):
        options.update(given)
        return lambda made: SimpleNamespace(bind=lambda *arguments: (made, arguments))

    ray, config = ModuleType("ray"), ModuleType("ray.serve.config")
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one-of-two"))
    ray.serve = ModuleType("ray.serve")
    ray.serve.deployment, ray.serve.ingress = deployment, lambda: lambda made: made
    ray.serve.get_replica_context = lambda: context
    config.RequestRouterConfig = lambda **given: given
    for name, module in {"ray": ray, "ray.serve": ray.serve, "ray.serve.config": config}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return options


def test_ray_is_told_what_a_replica_takes(told):
    settings = replace(SETTINGS, max_rows=4, max_waiting=10, shutdown_timeout=7.0)
    made, arguments = application(settings, lambda: SERVED, Scale(replicas=2, most=2, cpus=3, gpus=1))
    assert (made, arguments[0]) == (Replica, settings)
    assert told["num_replicas"] == 2 and "autoscaling_config" not in told
    assert told["ray_actor_options"] == {"num_cpus": 3, "num_gpus": 1}
    assert told["max_ongoing_requests"] > 14, "what is too much is refused by the replica, as JSON"
    assert told["graceful_shutdown_timeout_s"] == 7.0
    assert told["request_router_config"]["request_router_class"].endswith(".ConsistentHashRouter")


def test_ray_is_told_when_there_are_to_be_more(told):
    application(replace(SETTINGS, max_rows=8), lambda: SERVED, Scale(replicas=1, most=3))
    wanted = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 6.0}
    assert told["autoscaling_config"] == wanted and "num_replicas" not in told
    application(replace(SETTINGS, max_rows=1), lambda: SERVED, Scale(replicas=1, most=2))
    assert told["autoscaling_config"]["target_ongoing_requests"] == 1.0


def test_a_replica_answers_under_its_name_until_its_engine_breaks_down(told, monkeypatch):
    replica = Replica(SETTINGS, lambda: SERVED)
    replica.check_health()
    with TestClient(replica.__serve_build_asgi_app__(), base_url="http://localhost") as client:
        assert client.get("/v1/lade/status").json()["replica"] == "one-of-two"
        assert 'replica="one-of-two"' in client.get("/metrics").text
        monkeypatch.setattr(type(replica._service._engine), "problem", MemoryError("nothing left"))
        with pytest.raises(RuntimeError, match="nothing left"):
            replica.check_health()


def test_a_replica_whose_model_cannot_be_loaded_says_why(told):
    def load():
        raise InputError("there is no such model")

    with pytest.raises(InputError, match="no such model"):
        Replica(SETTINGS, load)


def refused(told, monkeypatch, message):
    """What a user is told where Ray Serve has tried in vain."""

    def run(made, **arguments):
        raise RuntimeError("Deploying application lade failed: Failed to update the deployments ['lade'].")

    deployments = {"lade": SimpleNamespace(message=message)}
    status = SimpleNamespace(applications={"lade": SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr(sys.modules["ray.serve"], "run", run, raising=False)
    monkeypatch.setattr(sys.modules["ray.serve"], "status", lambda: status, raising=False)
    with pytest.raises(InputError) as raised:
        replicas._start("an application")
    return str(raised.value)


def test_what_kept_the_replicas_from_starting_is_told_in_its_own_words(told, monkeypatch):
    # as Ray 2.60 has it: the traceback of the last attempt, in colours
    of_ray = (
        "The deployment failed to start 2 times in a row. See controller logs for details. Error:\n"
        "\x1b[36mray::ServeReplica:lade:lade.initialize_and_get_metadata()\x1b[39m (pid=1)\n"
        "RuntimeError: Traceback (most recent call last):\n"
        '  File "model.py", line 1, in find\n'
        "lade.errors.InputError: model folder 'x' does not exist: check the path\n"
    )
    why = refused(told, monkeypatch, of_ray)
    assert why == "the replicas cannot be started: model folder 'x' does not exist: check the path"
    assert refused(told, monkeypatch, "no cores").endswith("['lade'].; try lade serve without --replicas")
