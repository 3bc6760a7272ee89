"""State of a server: its phase and in-flight requests, and the model that it serves."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from time import perf_counter
from traceback import format_exception
from typing import Literal, TypeVar
from weakref import WeakValueDictionary

from lade.config import resolve
from lade.errors import InputError
from lade.server.access_log import AccessLog
from lade.server.chat_template import ChatTemplate
from lade.server.errors import ApiError, overloaded
from lade.server.failures import CrashDump, FailedRequests, Watchdog, described
from lade.server.metrics import Metrics
from lade.server.output_parser import Markup
from lade.server.request_context import RequestContext
from lade.server.served_model import ServedModel, TokenText
from lade.server.settings import Settings
from lade.server.structured_output import ServedGrammars
from lade.server.tenants import Quotas, TenantMemories
from lade.serving.engine import Engine
from lade.serving.snapshot import EngineSnapshot
from lade.version import __version__

logger = logging.getLogger(__name__)
T = TypeVar("T")
_VERSION, _TOKENS = f"lade-{__version__}", 12


def warm_up(engine: Engine, model: ServedModel, settings: Settings) -> None:
    """Decode short texts in batches of 1, 2, 4, ... rows.

    Each batch size has step costs of its own, measured once per machine; otherwise requests would wait for that. What
    these texts teach about drafting is forgotten.
    """
    ids = model.ids("The") or [0]
    rows = 1
    while rows <= settings.max_rows:
        logger.info("warming up with %d of %d rows", rows, settings.max_rows)
        # one by one, so that the batch passes through every size
        handles = [
            engine.add(ids, lookahead=model.lookahead, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS)
            for _ in range(min(rows, settings.max_rows))
        ]
        for handle in handles:
            handle.result()
        rows *= 2
    engine.forget_texts()  # these say nothing about those to come
    # exempt what lives as long as the server from garbage collection, which stops all threads
    gc.collect()
    gc.freeze()


class Serving:
    """A loaded model with its engine, and what requests share."""

    def __init__(self, model: ServedModel, settings: Settings, several_keys: Callable[[], bool]) -> None:
        model.ids("")  # resets truncation and padding once, before other threads encode
        self.model, self._settings = model, settings
        limits = [limit for limit in (settings.context, model.context) if limit is not None]
        self.context = min(limits, default=None)  # most tokens of prompt and answer
        self.template = ChatTemplate(model, settings.template_arguments)
        self.markup, self.token_text = Markup(model), TokenText(model.tokenizer)
        self.memories = TenantMemories(model.lookahead, settings.share, several_keys)
        self.idle: EngineSnapshot | None = None  # after the warm-up; totals count from there
        self.engine = Engine(
            model.model,
            max_rows=settings.max_rows,
            max_waiting=settings.max_waiting,
            max_tokens=settings.max_tokens,
            prefix_cache=0 if settings.share == "none" else settings.prefix_cache,
        )
        self.grammars = ServedGrammars(model)
        if model.save is not None and not self.memories.serves_file:
            of = "--share none" if settings.share == "none" else "several keys"
            logger.warning("with %s the file of --memory is neither read nor filled: its key is  --share all", of)
        if model.lookahead is not None and (note := self.engine.precision_note()):
            logger.warning("%s", note)

    @property
    def fingerprint(self) -> str:
        """A digest of the facts that answers depend on: versions, model, dtype and template."""
        model = self.model.model
        facts = (self._settings.name, repr(model.config), str(model.dtype), self.model.chat_template)
        return f"{_VERSION}-{hashlib.sha256(chr(10).join(facts).encode(errors='replace')).hexdigest()[:12]}"

    @property
    def info(self) -> dict[str, str]:
        """Labels of `lade_info`."""
        model, (config, _) = self.model.model, resolve(self.model.lookahead)
        method = "plain" if config is None else config.method.name
        return {"device": str(model.device), "dtype": str(model.dtype).removeprefix("torch."), "method": method}


class FairExecutor:
    """Runs tasks in one thread, round robin over clients. Belongs to one event loop.

    A client with many tasks delays another one by the running task only, since no more than one of them waits for the
    thread.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._thread = asyncio.Lock()  # first come, first served
        self._of_client = WeakValueDictionary[str, asyncio.Lock]()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Run a task and return its result; a task cancelled before its turn never starts."""
        own = self._of_client.setdefault(client, asyncio.Lock())
        async with own, self._thread:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Start no further tasks."""
        self._pool.shutdown(wait=False, cancel_futures=True)


Phase = Literal["loading", "ready", "draining", "dead"]
PREPARING, PREPARING_LARGE = 4, 2
"""Threads that validate, render and tokenize requests; more would only compete for the interpreter."""
SMALL = 64 * 2**10
"""Body size in bytes up to which requests are small; larger ones have threads of their own."""

_BODY, _BODY_WITH_IMAGES = 4 * 2**20, 16 * 2**20


class Service:
    """State shared by the routes of a server.

    `load` is called once, in a thread of its own, and `announce` with the model when the server is ready. `settings`
    are those at the start; the attribute has the current ones.
    """

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], ServedModel],
        announce: Callable[[ServedModel], None] = lambda model: None,
        log: AccessLog | None = None,
    ) -> None:
        self._given, self.settings = settings, settings.current()
        self._load, self._announce, self._log = load, announce, log
        self.phase: Phase = "loading"
        self.reason = ""  # of the engine's failure, if the phase is "dead"
        self.problem: BaseException | None = None  # that kept the model from being loaded
        self.unsaved: Exception | None = None  # of the last save
        self._saved = (perf_counter(), 0)  # time and token count of the last save
        self.created = int(time.time())
        self.keys = settings.keys
        self.reload = False  # set to make `watch` read the files of keys and limits again
        self.in_flight: list[RequestContext] = []
        self.body_bytes = 0  # of all requests in memory
        self.failed, self.quotas = FailedRequests(), Quotas()
        self.metrics = Metrics(settings.name, self.snapshot, lambda: self.phase == "ready", settings.replica)
        self.fingerprint = _VERSION  # with a digest of the model once it is ready
        self._preparing = ThreadPoolExecutor(PREPARING, thread_name_prefix="lade.serve")
        self._preparing_large = ThreadPoolExecutor(PREPARING_LARGE, thread_name_prefix="lade.serve large")
        self.trials = FairExecutor("lade.serve trial")  # prepares requests whose grammars need a trial
        self._serving: Serving | None = None
        self._watchdog = Watchdog(self.settings.pass_timeout)
        self._crash_dump = None if (at := settings.crash_dump) is None else CrashDump(at, settings.name)
        # called with the context and the route of each response that has ended
        self.observers = [each.add for each in (self._crash_dump, log) if each is not None]
        self._flush: Callable[[], None] = lambda: None
        if settings.otel:
            from lade.server.tracing import Tracing  # of an extra

            tracing = Tracing(settings.name)
            self._flush = tracing.close
            self.observers.append(tracing.add)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start loading the model, unless started already; return at once."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._begin, name="lade.serve loading", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        try:
            model = self._load()
            try:
                self._serving = serving = Serving(model, self.settings, lambda: len(self.keys.all) > 1)
            except BaseException:
                model.close()
                raise
            warm_up(serving.engine, model, self.settings)
            serving.idle = serving.engine.snapshot()
        except BaseException as problem:  # noqa: BLE001 - whatever it is, the thread that waits tells the user
            stopped = self.phase == "draining" and isinstance(problem, CancelledError)  # while it warmed up
            self.problem = None if stopped else problem
            return
        self.fingerprint, self.metrics.info = serving.fingerprint, serving.info
        if self.phase == "loading":
            self.phase = "ready"
            self._announce(model)

    @property
    def serving(self) -> Serving:
        """The model and all that comes with it; raises `ApiError` if requests are not accepted now."""
        match self.phase:
            case "loading":
                raise overloaded("the model is loading: retry later", "model_loading", 5)
            case "draining":
                raise overloaded("this server is shutting down", "server_shutting_down", close=True)
            case "dead":
                raise ApiError(500, "server_error", f"the engine failed: {self.reason}", code="engine_dead")
        assert self._serving is not None  # since it is ready
        return self._serving

    @property
    def max_body(self) -> int:
        """Maximum size of a request body in bytes."""
        serving = self._serving  # unknown until the model is loaded
        takes_images = serving is None or serving.model.encode_images is not None
        return self.settings.max_body or (_BODY_WITH_IMAGES if takes_images else _BODY)

    def snapshot(self) -> EngineSnapshot | None:
        """Return the engine's snapshot without the warm-up; None before that is over."""
        serving = self._serving
        if serving is None or serving.idle is None:
            return None
        return serving.engine.snapshot().since(serving.idle)

    @property
    def health(self) -> dict[str, str]:
        """Body of the health probes: `status`, "ok" if requests are accepted, and `reason` if something is wrong."""
        if self.phase == "dead":
            return {"status": "dead", "reason": self.reason}
        if self._watchdog.reason:
            return {"status": "stuck", "reason": self._watchdog.reason}
        return {"status": "ok" if self.phase == "ready" else self.phase}

    def watch(self) -> None:
        """Do periodic work: detect failure and hung passes, read files, log, save. Call it ten times a second."""
        if self.reload:
            self.reload = False
            self._reload()
        if self._serving is not None:
            self._watch_engine(self._serving)
        if self._log is not None:
            self._log.tick(self.snapshot())
        if perf_counter() - self._saved[0] > self.settings.save_s:
            self._save()

    def _watch_engine(self, serving: Serving) -> None:
        engine = serving.engine
        if (problem := engine.problem) is not None and self.phase != "dead":
            self.phase, self.reason = "dead", f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
            logger.error("the engine failed", exc_info=problem)
            self.dump("dead", self.reason, "".join(format_exception(problem)))
        if serving.idle is not None:
            work, before = engine.current_work(), self._watchdog.reason
            self._watchdog.look(work)
            if self._watchdog.reason and not before and work is not None:
                self.dump("stuck", self._watchdog.reason, described(work))

    def dump(self, kind: str, reason: str, details: str) -> None:
        """Write the last requests to the folder of crash dumps, if there is one; see `CrashDump.write`."""
        if self._crash_dump is not None:
            self._crash_dump.write(kind, reason, details, list(self.in_flight))

    def _reload(self) -> None:
        """Read the files of keys and limits again; an error in one leaves its settings as they were."""
        try:
            self.keys = self.keys if self.settings.read_keys is None else self.settings.read_keys()
            logger.info("reloaded the API keys: %d", len(self.keys.all))
        except InputError as problem:
            logger.error("keeping the previous API keys: %s", problem)
        try:
            self.settings = self._given.current()
        except InputError as problem:
            logger.error("keeping the previous limits: %s", problem)
        else:
            logger.info("reloaded the limits")
            self._watchdog.limit_s = self.settings.pass_timeout
            if self._serving is not None:
                self._serving.engine.limit_waiting(self.settings.max_waiting)

    def _save(self) -> None:
        """Save draft memories if anything was decoded since the last time."""
        now, save = self.snapshot(), None if self._serving is None else self._serving.model.save
        tokens = 0 if now is None else now.new_tokens + now.prompt_tokens
        before, self._saved = self._saved[1], (perf_counter(), tokens)
        if save is None or (tokens == before and self.unsaved is None):
            return
        try:
            save()
            self.unsaved = None
        except Exception as problem:  # noqa: BLE001 - tried again, and told of in the exit code
            self.unsaved = problem
            logger.error("the draft memory was not saved: %s", problem)

    async def in_worker(self, size: int, work: Callable[[], T]) -> T:
        """Run work for a request with a body of `size` bytes in a worker thread; cancelled before its start, never."""
        pool = self._preparing if size <= SMALL else self._preparing_large
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def track(self, context: RequestContext, endpoint: str) -> None:
        """Register an in-flight request, which is aborted if it exceeds the queue timeout."""
        context.endpoint = endpoint
        self.in_flight.append(context)
        limit = self.settings.queue_timeout
        if limit is not None:
            context.call_later(limit, _expire, context, limit)

    def ended(self, context: RequestContext, known_path: str) -> None:
        """Count and log a response that has ended; a fault in this costs no answer."""
        self.body_bytes -= context.size
        if context.endpoint and context.limits.tokens_per_minute is not None:
            tokens = sum(handle.prompt_tokens + handle.stats.new_tokens for handle in context.handles)
            self.quotas.use(context.owner, tokens)
        try:
            self.metrics.add(context, known_path)
            for observe in self.observers:
                observe(context, known_path)
        except Exception:
            logger.exception("%s was not counted", context.id)
        if context.endpoint:  # after the observers: a dump by another thread finds it at one of the two places
            self.in_flight.remove(context)

    def drain(self) -> None:
        """Stop accepting requests; running ones continue."""
        if self.phase in ("loading", "ready"):
            self.phase = "draining"

    def abort(self) -> None:
        """Abort all in-flight requests."""
        for context in self.in_flight:
            context.abort(overloaded("this server is shutting down", "server_shutting_down", close=True))

    def close(self) -> None:
        """Stop all threads, save draft memories and close the model."""
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._preparing_large.shutdown(wait=False, cancel_futures=True)
        self.trials.close()
        if self._serving is not None:
            self._serving.engine.close()
            self._serving.grammars.close()
            self._save()
            self._serving.model.close()
        self._flush()


def _expire(context: RequestContext, seconds: float) -> None:
    if context.outcome is None and context.waiting:
        why = f"no row became free within {seconds:g} s: retry later"
        context.abort(overloaded(why, "queue_timeout"))
