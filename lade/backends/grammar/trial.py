"""Compile untrusted grammars in a separate process first, which can be killed when it takes too long.

Nothing else can be: llguidance compiles in threads of its own, and its limits do not cover all of the work, such as
multiples of several numbers, and proofs that a pattern matches anything at all. The process has a byte-level
vocabulary, so it is small, and only tells about time and memory; other errors are found with the tokenizer.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from time import process_time, sleep
from typing import NoReturn
from weakref import finalize

from lade.backends.grammar.compiled import LIMITS
from lade.grammar import GrammarError

logger = logging.getLogger(__name__)

SECONDS = 0.5  # CPU seconds allowed for compiling a grammar
WALL_SECONDS = 30.0
"""Seconds of silence, in a machine with many other processes too, after which the process is given up."""
_ATTEMPTS = 2
_SLOW = 3
_BY_ITSELF = (_SLOW, -signal.SIGABRT, 134)
"""How the process ends by a grammar's fault: its own watch, or Rust's abort where memory is refused."""
_BYTES, _LOOK_EVERY_S = 2 * 2**30, 0.02
_TOKEN_IDS = re.compile(r"<\[[\d,*^-]*\]>")
_NAME = re.compile(r"<[^<>\s]+>")  # of a token in a grammar; other added tokens, such as Gemma's "\n", are text there
_ANY_TOKEN = "<[*]>"


class TrialError(OSError):
    """A grammar could not be tried, whatever it is like."""


class GrammarTrial:
    """Called with grammars before they are compiled. Thread-safe; grammars are tried one at a time.

    Grammars may name the special tokens of these texts.
    """

    def __init__(self, specials: Iterable[str] = ()) -> None:
        self._specials = sorted((json.dumps(text)[1:-1] for text in filter(_NAME.fullmatch, specials)), key=len)[::-1]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, grammar: str) -> None:
        """Return once the grammar has compiled in time.

        Raises:
            GrammarError: the grammar takes too long or too much memory.
            TrialError: it was not tried to the end: the process was killed or stopped, or cannot be started.
        """
        line = self._neutral(json.dumps(grammar))
        with self._lock:
            for _ in range(_ATTEMPTS):  # another one tells a grammar's fault from a fate of the process
                try:
                    process = self._running()
                except OSError as problem:
                    raise TrialError(f"grammars cannot be tried now: {problem}") from problem
                assert process.stdin is not None
                with suppress(OSError):  # it has ended, and will not answer
                    process.stdin.write(f"{line}\n")
                    process.stdin.flush()
                if self._answers(process):
                    return
                ended = process.poll()
                self._end()
                if ended in _BY_ITSELF:
                    raise GrammarError(
                        f"it takes more than {SECONDS:g} s, or {_BYTES >> 30} GiB, to compile: give a simpler one"
                    )
                logger.warning("the trial of a grammar ended early (%s)", "no answer" if ended is None else ended)
            raise TrialError("the grammar could not be tried: try again later")

    def close(self) -> None:
        """Kill the process; the next call starts a new one."""
        with self._lock:
            self._end()

    def _neutral(self, grammar: str) -> str:
        """Replace special tokens, which the process does not have, by a wildcard."""
        for text in self._specials:
            grammar = grammar.replace(text, _ANY_TOKEN)
        return _TOKEN_IDS.sub(_ANY_TOKEN, grammar)

    @staticmethod
    def _answers(process: subprocess.Popen[str]) -> bool:
        """Return True if the process reports success; False if it has exited, or says nothing for long."""
        assert process.stdout is not None
        if os.name == "posix" and not select.select([process.stdout], [], [], WALL_SECONDS)[0]:
            return False  # stopped, or starved
        if process.stdout.readline():
            return True
        with suppress(subprocess.TimeoutExpired):
            process.wait(WALL_SECONDS)  # it has closed its output, and is about to exit
        return False

    def _running(self) -> subprocess.Popen[str]:
        """Return the process, started again if it has exited. Raises `OSError` if it cannot be started."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
            )
            self._ending = finalize(self, _end, self._process)
            if not self._answers(self._process):
                self._end()
                raise OSError(f"{sys.executable} ends at once")
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._ending()
            self._process = None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()  # closes its pipes


class _Watch(threading.Thread):
    """Kills this process when a grammar takes too long."""

    begun: float | None = None  # CPU time when the present grammar was started

    def run(self) -> NoReturn:
        while True:
            begun = self.begun
            if begun is not None and process_time() - begun > SECONDS:
                os._exit(_SLOW)
            sleep(_LOOK_EVERY_S)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES if most == resource.RLIM_INFINITY else min(_BYTES, most), most))


def main() -> None:
    """Compile one grammar per line of stdin, and report each on stdout."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    _limit_memory()
    tokens, limits, watch = LLTokenizer("byte"), LLParserLimits(**LIMITS), _Watch(daemon=True)
    watch.start()
    sys.stdout.write("ready\n")  # python -u holds nothing back
    for line in sys.stdin:
        grammar, watch.begun = json.loads(line), process_time()
        LLMatcher(tokens, grammar, log_level=0, limits=limits).compute_bitmask()
        watch.begun = None
        sys.stdout.write("done\n")
