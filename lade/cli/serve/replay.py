"""`lade serve --replay`: the requests of a crash dump, sent to this server again."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from time import sleep
from urllib.request import Request, urlopen

from lade.server.access_log import facts_of
from lade.server.crash_dump import DumpedRequest
from lade.server.request_context import RequestContext
from lade.server.service import Service

POLL_S = 0.05


def replay(requests: Sequence[DumpedRequest], service: Service, url: str, write: Callable[[str], None]) -> None:
    """Begin to send the requests of a dump to a server in this process, which ends with them, or when it fails.

    Those that had ended are sent one by one, and those that had not, together: these met in the engine. One whose body
    was too long for the dump cannot be sent.

    Args:
        requests: those of the dump.
        service: state of the server, which may still load its model.
        url: where the server listens.
        write: function that takes a line.
    """
    for each in requests:
        if each.body is None:
            write(f"{each.id} {each.path} is left out: its body was too long for the dump\n")
    requests = [each for each in requests if each.body is not None]
    ids = {each.id for each in requests}

    def ended(context: RequestContext, route: str) -> None:
        if context.id in ids:
            facts = {"answer": 0, **facts_of(context)}
            write("{id} {path} status {status} {ms} ms {answer} tokens\n".format(**facts))

    service.observers.append(ended)
    threading.Thread(target=_send_all, args=[requests, service, url], daemon=True).start()


def _send_all(requests: Sequence[DumpedRequest], service: Service, url: str) -> None:
    while service.phase == "loading" and service.problem is None:
        sleep(POLL_S)
    keys = {key.name: key.secret for key in service.keys.all}
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        sent = list[Future[None]]()
        for each in [*requests, None]:
            if each is not None:
                sent.append(pool.submit(_send, each, url, keys.get(each.key, "")))
            awaited = sent if each is None else sent[-1:] if each.end else []
            while not all(one.done() for one in awaited):
                sleep(POLL_S)
                if service.health["status"] == "stuck":
                    sys.stdout.flush()
                    os._exit(1)  # nothing else ends the engine's thread
    if service.phase == "ready":
        signal.raise_signal(signal.SIGTERM)


def _send(each: DumpedRequest, url: str, key: str) -> None:
    headers = {"content-type": "application/json", "x-request-id": each.id, "x-api-key": key}
    request = Request(url + each.path, json.dumps(each.body).encode(), headers)
    with suppress(OSError), urlopen(request) as answer:  # raises statuses of errors, which `ended` writes
        answer.read()
