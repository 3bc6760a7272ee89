"""The files of the chat page, without a browser: nothing comes from elsewhere, and nothing was changed."""

import hashlib
import re
import tomllib
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

import lade
from lade.server.app import mount_page

PAGE = Path(lade.__file__).parent / "server" / "page"
VENDOR = PAGE / "vendor"
OWN = sorted(path for path in PAGE.iterdir() if path.is_file())
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
FILES = {f"/page/{path.relative_to(PAGE).as_posix()}": path for path in PAGE.rglob("*") if path.is_file()}
FILES["/"] = FILES.pop("/page/index.html")


@pytest.fixture(scope="module")
def client():
    app = Starlette()
    mount_page(app)
    return TestClient(app)


def test_every_vendored_file_is_listed_with_its_checksum():
    lines = [line.split() for line in (VENDOR / "VENDORED.txt").read_text().splitlines() if not line.startswith("#")]
    files = [path for path in VENDOR.iterdir() if path.name != "VENDORED.txt"]
    checksums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert {line[0]: line[-1] for line in lines} == checksums
    assert {package for _, package, *_ in lines} == {"marked", "dompurify", "@highlightjs/cdn-assets"}
    assert all((VENDOR / f"{name.partition('.')[0]}.LICENSE").is_file() for name, *_ in lines)
    licences = {licence for *_, licence, _ in lines}
    stated = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["license"]
    assert licences <= set(stated.split(" AND "))


def test_the_page_stays_small():
    """What a browser loads, without compression."""
    assert sum(path.stat().st_size for path in FILES.values()) < 400_000


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_the_page_names_no_address_elsewhere(path):
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"')]*", path.read_text()))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of a vocabulary, which nothing fetches


def test_every_file_that_the_page_asks_for_is_there():
    html = (PAGE / "index.html").read_text()
    asked = {f"/{path}" for path in re.findall(r"(?:src|href)=\"([^\"#]+)\"", html)}
    for script in SCRIPTS:
        asked |= {f"/page/{name}" for name in re.findall(r"(?:from \"\./|new URL\(\")([^\"]+)\"", script.read_text())}
    assert asked <= set(FILES)
    assert {f"/page/{script.name}" for script in SCRIPTS} <= asked, "a script that nothing uses"


def test_the_page_has_no_code_and_no_style_in_its_markup():
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)|javascript:", html)


def test_every_icon_that_is_used_is_drawn():
    html = (PAGE / "index.html").read_text()
    drawn = set(re.findall(r"symbol id=\"i-([a-z]+)\"", html))
    used = set(re.findall(r"href=\"#i-([a-z]+)\"", html))
    for script in SCRIPTS:
        used |= set(re.findall(r"\b(?:(?:icon|iconButton|step)\(|drawing: )\"([a-z]+)\"", script.read_text()))
    assert used == drawn


def test_every_element_that_the_scripts_look_up_is_in_the_page():
    html = (PAGE / "index.html").read_text()
    there = set(re.findall(r"\sid=\"([^\"]+)\"", html))
    asked = {name for script in SCRIPTS for name in re.findall(r"byId\(\"([^\"]+)\"\)", script.read_text())}
    assert {name for name in asked if not name.startswith(("field-", "set-"))} <= there


def test_every_source_of_tokens_has_a_name_on_the_page():
    sources = {"prefill", "window", "pool", "prompt", "text", "memory", "bonus"}  # as `lade.stats.Step` lists them
    assert all(f"`{source}`" in (lade.stats.Step.__doc__ or "") for source in sources)
    named = set(re.findall(r"name: \"(\w+)\"", (PAGE / "sources.js").read_text()))
    assert sources <= named
    colours = set(re.findall(r"^\.(\w+) \{ --hue", (PAGE / "tokens.css").read_text(), re.MULTILINE))
    assert named - {"bonus", "prefill"} == colours


@pytest.mark.parametrize("path", sorted(FILES))
def test_each_file_has_its_type_and_the_headers_of_security(client, path):
    answer = client.get(path)
    assert answer.status_code == 200 and answer.content == FILES[path].read_bytes()
    kinds = {"html": "text/html", "js": "text/javascript", "mjs": "text/javascript", "css": "text/css"}
    kinds |= {"svg": "image/svg+xml", "txt": "text/plain", "LICENSE": "text/plain"}
    assert answer.headers["content-type"].startswith(kinds["html" if path == "/" else path.rpartition(".")[2]])
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy.pop("img-src") == "'self' data:"
    assert {policy.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy == dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_file_that_the_browser_has_is_not_sent_again(client):
    tag = client.get("/page/app.js").headers["etag"]
    again = client.get("/page/app.js", headers={"if-none-match": tag})
    assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
    assert client.get("/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/page/", "/page/vendor", "/page/%2e%2e/static.py", "/index.html"])
def test_nothing_else_is_served(client, path):
    assert client.get(path).status_code == 404


def test_the_routes_of_the_app_stay_its_own():
    app = Starlette()
    app.add_route("/v1/models", lambda _: PlainTextResponse("own"))
    mount_page(app)
    assert TestClient(app).get("/v1/models").text == "own"
    assert TestClient(app).post("/").status_code == 405
