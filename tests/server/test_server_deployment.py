"""What the documentation gives to orchestrators fits the server: paths, ports, times, options."""

import re
from pathlib import Path

import pytest
import typer.main
import yaml

from lade.cli.main import app
from lade.server.middleware import OPEN
from lade.server.routes import router

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "replicas.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def manifests():
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def container(manifests):
    (found,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def test_probes_ask_paths_that_there_are_and_need_no_key(container):
    asked = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [each["path"] for each in asked] == ["/live", "/live", "/ready"]
    assert {each["path"] for each in asked} <= OPEN & {getattr(route, "path", "") for route in router.routes}
    names = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {each["port"] for each in asked} <= names.keys() and names["http"] == 8000


def test_the_command_is_one_and_there_is_time_to_drain(container, manifests):
    words = container["args"]
    assert words[:2] == ["lade", "serve"]
    command = typer.main.get_command(app).commands["serve"]
    values = command.make_context("serve", list(words[2:])).params
    assert values["host"] == "0.0.0.0" and values["port"] == 8000
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (_, before) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > float(before) + values["shutdown_timeout"]
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    assert str(Path(values["api_key_file"]).parent) in mounted  # of older typer a text
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_the_service_finds_the_pods(container, manifests):
    service, deployment = manifests["Service"]["spec"], manifests["Deployment"]["spec"]
    assert service["selector"] == deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    assert service["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
