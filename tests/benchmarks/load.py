"""Measure a running server: answers per second, latency, health checks under load, memory and start-up time.

    python tests/benchmarks/load.py [--seconds 10] [--connections 16] [--workers 2]

A server is started on a free port of this machine. Requests are sent over kept-alive connections, one at a time on each:

- new: estimates of all strategies, no two the same;
- repeated: the same 64 estimates again and again;
- heavy: new estimates with reserved memory, recommendations and exports, while another connection requests /healthz.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

import psutil

SPACE: dict[str, tuple[object, ...]] = {
    "model": (
        "openai-community/gpt2", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B",
        "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.1", "meta-llama/Llama-3.1-70B",
    ),
    "gpus": (1, 2, 4, 8, 16, 32, 64),
    "gpu": ("A100-40GB", "A100-80GB", "H100-80GB", "H200", "L40S", "RTX-4090"),
    "micro_batch_size": tuple(range(1, 33)),
    "seq_len": tuple(256 * n for n in range(1, 33)),
    "activation_checkpointing": ("none", "full"),
    "precision": ("bf16-mixed", "bf16"),
}  # fmt: skip
"""The options from which random requests are made."""


def new_estimates(seed: int, **fixed: object) -> Iterator[str]:
    """Paths of estimates, each requested once."""
    seen, chance = set(), random.Random(seed)
    while True:
        job = {name: chance.choice(values) for name, values in SPACE.items()} | fixed
        path = f"/api/v1/estimate?{urlencode(job)}"
        if path not in seen:
            seen.add(path)
            yield path


def repeated_estimates(seed: int) -> Iterator[str]:
    return itertools.cycle(list(itertools.islice(new_estimates(seed), 64)))


def heavy_requests(seed: int) -> Iterator[str]:
    """Paths of requests that take long to answer, each requested once."""
    for path in new_estimates(seed, reserved=True):
        query = path.partition("?")[2]
        yield path
        yield f"/api/v1/recommend?{query}"
        yield f"/api/v1/export/torchrun?{query}"


@dataclass
class Measured:
    """The measurements of one kind of requests."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    statuses: dict[bytes, int] = field(default_factory=dict)

    def row(self, name: str) -> str:
        """A line of the table: requests per second, latency in milliseconds, and how many had which status."""
        ordered = sorted(self.latencies)
        at = [1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99, 1)]
        statuses = ", ".join(f"{n} x {status.decode()}" for status, n in sorted(self.statuses.items()))
        return f"{name:10} {len(ordered) / self.seconds:10,.0f} {at[0]:8.1f} {at[1]:8.1f} {at[2]:8.1f}   {statuses}"


async def _ask(port: int, paths: Iterator[str], until: float, into: Measured, pause: float) -> None:
    """Send requests over one connection until the time `until`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (begun := time.perf_counter()) < until:
        writer.write(f"GET {next(paths)} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        into.latencies.append(time.perf_counter() - begun)
        status = head.split(maxsplit=2)[1]
        into.statuses[status] = into.statuses.get(status, 0) + 1
        await asyncio.sleep(pause)
    writer.close()


async def measure(
    port: int, paths: Iterator[str], *, connections: int, seconds: float, health: bool = False
) -> tuple[Measured, Measured]:
    """Request `paths`, and with `health` also /healthz every 20 ms. Returns the measurements of both."""
    asked, checked = Measured(seconds=seconds), Measured(seconds=seconds)
    until = time.perf_counter() + seconds
    tasks = [_ask(port, paths, until, asked, 0) for _ in range(connections)]
    if health:
        tasks.append(_ask(port, itertools.repeat("/healthz"), until, checked, 0.02))
    await asyncio.gather(*tasks)
    return asked, checked


def start(workers: int) -> tuple[subprocess.Popen[str], int]:
    """Start a server. Returns its process and its port."""
    options = ["--port", "0", "--log-level", "warning", "--workers", str(workers)]
    process = subprocess.Popen([sys.executable, "-m", "fsdp_advisor", "serve", *options], stdout=-1, text=True)
    assert process.stdout is not None
    port = urlsplit(process.stdout.readline().split()[3]).port
    assert port is not None
    return process, port


def resident_mb(pid: int) -> list[int]:
    """Resident memory of the server and of each of its processes."""
    server = psutil.Process(pid)
    return [round(p.memory_info().rss / 1e6) for p in (server, *server.children(recursive=True))]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="for each kind of requests")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    begun = time.perf_counter()
    process, port = start(given.workers)
    try:
        asyncio.run(measure(port, itertools.repeat("/healthz"), connections=1, seconds=0.01))
        print(f"start-up {time.perf_counter() - begun:.2f} s, {resident_mb(process.pid)} MB")
        load = {"connections": given.connections, "seconds": given.seconds}
        asyncio.run(measure(port, new_estimates(1), **load))  # workers read every model
        print(f"{'requests':10} {'per second':>10} {'p50 ms':>8} {'p99 ms':>8} {'worst':>8}   status")
        print(asyncio.run(measure(port, new_estimates(2), **load))[0].row("new"))
        asyncio.run(measure(port, repeated_estimates(3), **load))  # computed once
        print(asyncio.run(measure(port, repeated_estimates(3), **load))[0].row("repeated"))
        heavy, health = asyncio.run(measure(port, heavy_requests(4), **load, health=True))
        print(heavy.row("heavy"), health.row("healthz"), sep="\n")
        print(f"then {resident_mb(process.pid)} MB")
    finally:
        process.terminate()
        process.wait(timeout=60)


if __name__ == "__main__":
    main()
