"""A hub on this machine: serves folders as repositories, so that downloads are tried without a network."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHUNK = 2**14


class FakeHub:
    """Repositories by id and revision.

    Attributes:
        url: of the hub.
        requests: method, path and token of each request.
        slowness: seconds that each chunk of a file takes.
    """

    def __init__(self, repositories: dict[str, dict[str, Path]], *, slowness: float = 0.0) -> None:
        self.repositories, self.requests, self.slowness = repositories, list[tuple[str, str, str]](), slowness
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        thread = threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.requests.append((request.command, path, token))
        if "/tree/" in path or not ("/resolve/" in path or path.startswith("/api/models/")):
            self._send(request, 404, {"X-Error-Code": "EntryNotFound"})
        elif path.startswith("/api/models/"):
            self._describe(request, path.removeprefix("/api/models/"))
        else:
            name, _, rest = path.lstrip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._send_file(request, name, revision, file)

    def commit(self, name: str, revision: str) -> str:
        return self._folder(name, revision)[1]

    def _folder(self, name: str, revision: str) -> tuple[Path | None, str]:
        """The folder of a revision, which may be a commit, and its commit."""
        for known, folder in self.repositories.get(name, {}).items():
            commit = hashlib.sha1(f"{name} {known}".encode()).hexdigest()
            if revision in (known, commit):
                return folder, commit
        return None, ""

    def _describe(self, request: BaseHTTPRequestHandler, path: str) -> None:
        name, _, revision = path.partition("/revision/")
        folder, commit = self._folder(name, revision or "main")
        if folder is None:
            kind = "RevisionNotFound" if name in self.repositories else "RepoNotFound"
            return self._send(request, 404, {"X-Error-Code": kind}, b"{}")
        files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
        found = {"id": name, "modelId": name, "sha": commit, "siblings": files, "tags": [], "downloads": 0, "likes": 0}
        return self._send(request, 200, {"Content-Type": "application/json"}, json.dumps(found).encode())

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, revision: str, file: str) -> None:
        folder, commit = self._folder(name, revision)
        if folder is None or not (folder / file).is_file():
            kind = "EntryNotFound" if folder else "RepoNotFound"
            return self._send(request, 404, {"X-Error-Code": kind, "X-Repo-Commit": commit})
        data = (folder / file).read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        return self._send(request, 200, headers, data)

    def _send(self, request: BaseHTTPRequestHandler, code: int, headers: dict[str, str], data: bytes = b"") -> None:
        request.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        for start in range(0, len(data) if request.command == "GET" else 0, CHUNK):
            request.wfile.write(data[start : start + CHUNK])
            time.sleep(self.slowness)
