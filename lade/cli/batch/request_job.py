"""Job of `lade batch`: requests in OpenAI's batch format, answered by the server's handlers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from time import sleep
from typing import Any

from lade.cli.batch.files import Request, RequestResults, is_success
from lade.cli.batch.runner import POLL_S, Job
from lade.server.app import Reply, build_app, post
from lade.server.service import Service


class RequestJob(Job[Request]):
    """Answers requests; results are written in the order of completion.

    Args:
        service: not yet started; `running` starts and closes it.
        file: result file of the requests.
        total: number of requests, those answered by an earlier run included.
    """

    noun, ordered = "requests", False

    def __init__(self, service: Service, file: RequestResults, total: int) -> None:
        self._service, self._file, self._app = service, file, build_app(service)
        self.path, self.total, self.pending = file.path, total, file.unanswered
        self.rows = service.settings.max_rows

    @contextmanager
    def running(self) -> Iterator[None]:
        """Load the model and run the handlers in an event loop of their own.

        Raises:
            Exception: whatever kept the model from being loaded.
        """
        service = self._service
        try:
            service.start()
            while service.phase == "loading" and service.problem is None:
                sleep(POLL_S)
            if service.problem is not None:
                raise service.problem
            self._file.drop_failures()
            with _event_loop() as self._loop:
                yield
        finally:
            now = service.snapshot()
            self.new_tokens = 0 if now is None else now.new_tokens
            service.close()

    def submit(self, item: Request) -> Future[Reply]:
        """Post a request to its endpoint."""
        return asyncio.run_coroutine_threadsafe(post(self._app, item.url, item.body), self._loop)

    def write(self, item: Request, pending: Any) -> bool:
        """Append the response to a request."""
        reply: Reply = pending.result()
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
        line = {"id": item.id, "custom_id": item.custom_id, "response": response, "error": None}
        self._file.append(line)
        return is_success(line)

    def breakdown(self) -> str:
        """Return why the engine has died, if it has."""
        self._service.watch()
        return str(self._service.reason or "unknown reason") if self._service.phase == "dead" else ""

    def unsaved(self) -> bool:
        """Return True if the draft memory could not be saved."""
        return self._service.unsaved is not None


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread; on exit its tasks are cancelled and awaited."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="lade-batch", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
