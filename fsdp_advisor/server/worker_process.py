"""The child process of `workers.Worker`: `python -m fsdp_advisor.server.worker_process [MEMORY_BYTES]`.

It reads calls from standard input and writes a pickled reply for each to standard output. A call is the pickled bytes of a
pickled `(function, arguments)`. The process ends when standard input closes, also during a call: it does not outlive the server.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
import threading
import traceback
from queue import SimpleQueue
from typing import Any, Literal

from fsdp_advisor.errors import AdvisorError, ErrorPayload, to_payload

Reply = tuple[Literal["result"], Any] | tuple[Literal["error"], ErrorPayload] | tuple[Literal["crash"], str]
"""The outcome of a call: its value, an AdvisorError for the user, or another exception's traceback for the log."""


def main() -> None:
    """Answer calls until standard input closes."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    if len(sys.argv) > 1:
        limit_memory(int(sys.argv[1]))
    with contextlib.suppress(Exception):  # the first call will report it
        import fsdp_advisor.server.page_home  # noqa: F401  # most of what calls need
    gc.set_threshold(50_000, 20, 20)  # programs have no cycles, and collections took a fifth of an estimate's time
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(calls,), daemon=True).start()
    while True:
        replies.write(pickled_reply(calls.get()))
        replies.flush()


def _read(calls: SimpleQueue[bytes]) -> None:
    """Read calls until standard input closes, then end the process."""
    with contextlib.suppress(EOFError):
        while True:
            calls.put(pickle.load(sys.stdin.buffer))
    os._exit(0)


def pickled_reply(call: bytes) -> bytes:
    """The pickled Reply to a pickled call; never raises."""
    reply: Reply
    try:
        function, arguments = pickle.loads(call)
        return pickle.dumps(("result", function(*arguments)))
    except AdvisorError as error:
        reply = "error", to_payload(error)
    except Exception:
        reply = "crash", traceback.format_exc()
    return pickle.dumps(reply)


def limit_memory(memory_bytes: int) -> None:
    """Limit this process's private memory; not possible on Windows. Files that libraries map do not count."""
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
