"""Does something in a forked process: it begins with all that is imported here, and leaves nothing behind here."""

import json
import os
import signal
import warnings


def in_fork(call, seconds=20):
    """What a function returns in a forked process, as JSON has it; `[name, message]` of what it raises there.

    Args:
        call: takes no arguments.
        seconds: after which it counts as hanging.
    """
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what Python thinks of forks beside threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            answer = call()
        except BaseException as problem:
            answer = [type(problem).__name__, str(problem)]
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        answer = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "it hangs"
    return json.loads(answer)
