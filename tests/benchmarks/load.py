"""What one worker of the server bears: requests per second and their latency, memory, start-up. It stops by itself.

    python tests/benchmarks/load.py [--seconds 10] [--connections 16] [--requests 100000] [--plain]

A server is started on a free port of this machine and asked from this process over 16 kept connections, one request at a time
on each. Kinds of requests for estimates of all strategies:

- apart: any model, GPUs, GPU type, micro-batch, sequence, checkpointing and precision, no two alike;
- varied: as a person or a sweep asks: one job after the other, each with all its GPU types, then the next micro-batch; no two alike;
- cached: the same few again.

`--plain` also measures a machine's own pace: a loop of additions, to compare runs on machines that are not alike.
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
from statistics import quantiles
from urllib.parse import urlencode, urlsplit

import psutil

MODELS = (
    "openai-community/gpt2", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.1", "meta-llama/Llama-3.1-70B",
)  # fmt: skip
GPUS = (1, 2, 4, 8, 16, 32, 64)
GPU = ("A100-40GB", "A100-80GB", "H100-80GB", "H200", "L40S", "RTX-4090")
MICRO_BATCHES = tuple(range(1, 33))
SEQUENCES = tuple(256 * n for n in range(1, 33))
CHECKPOINTING = ("none", "full")
PRECISIONS = ("bf16-mixed", "bf16")
SAME = 64
"""How many questions `cached` is made of."""


def path(model: str, gpus: int, gpu: str, batch: int, seq_len: int, checkpointing: str, precision: str) -> bytes:
    asked = {
        "model": model,
        "gpus": gpus,
        "gpu": gpu,
        "micro_batch_size": batch,
        "seq_len": seq_len,
        "activation_checkpointing": checkpointing,
        "precision": precision,
    }
    return f"/api/v1/estimate?{urlencode(asked)}".encode()


def apart(seed: int) -> Iterator[bytes]:
    """A walk over the whole space in an order that jumps."""
    sizes = [len(v) for v in (MODELS, GPUS, GPU, MICRO_BATCHES, SEQUENCES, CHECKPOINTING, PRECISIONS)]
    seen: set[tuple[int, ...]] = set()
    chance = random.Random(seed)
    while True:
        at = tuple(chance.randrange(n) for n in sizes)
        if at in seen:
            continue
        seen.add(at)
        m, g, t, b, s, c, p = at
        yield path(MODELS[m], GPUS[g], GPU[t], MICRO_BATCHES[b], SEQUENCES[s], CHECKPOINTING[c], PRECISIONS[p])


def varied(seed: int) -> Iterator[bytes]:
    """Jobs one after the other, each looked at on every GPU type and at several micro-batches."""
    jobs = list(itertools.product(MODELS, GPUS, SEQUENCES, CHECKPOINTING, PRECISIONS))
    random.Random(seed).shuffle(jobs)
    for model, gpus, seq_len, checkpointing, precision in jobs:
        for batch, gpu in itertools.product((1, 2, 4, 8), GPU):
            yield path(model, gpus, gpu, batch, seq_len, checkpointing, precision)


def cached(seed: int) -> Iterator[bytes]:
    return itertools.cycle(list(itertools.islice(apart(seed), SAME)))


def mostly_cached(seed: int) -> Iterator[bytes]:
    """One in ten is new, the others are among the last 256 that were."""
    new, known, chance = apart(seed), [], random.Random(seed)
    for turn in itertools.count():
        if turn % 10 == 0:
            known = [*known[-255:], next(new)]
        yield known[-1] if turn % 10 == 0 else chance.choice(known)


@dataclass
class Measured:
    """What came of one kind of requests."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    failed: int = 0
    bytes: int = 0

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile(self, percent: int) -> float:
        return quantiles(self.latencies, n=100)[percent - 1] * 1e3


class Connection(asyncio.Protocol):
    """Asks one question after the other; answers have a Content-Length."""

    def __init__(self, paths: Iterator[bytes], until: float, most: int, into: Measured, ended: asyncio.Future[None]):
        self.paths, self.until, self.most, self.into, self.ended = paths, until, most, into, ended
        self.buffer, self.missing = b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        if time.perf_counter() > self.until or len(self.into.latencies) >= self.most:
            self.transport.close()
            return
        self.asked = time.perf_counter()
        self.transport.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n" % next(self.paths))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self.into.latencies.append(time.perf_counter() - self.asked)
        self.into.failed += not head.startswith(b"HTTP/1.1 200")
        self.into.bytes += length
        self.buffer = body[length:]
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def _measure(port: int, paths: Iterator[bytes], connections: int, seconds: float, most: int) -> Measured:
    loop, into = asyncio.get_running_loop(), Measured()
    begun = time.perf_counter()
    ends = []
    for _ in range(connections):
        ended: asyncio.Future[None] = loop.create_future()
        ends.append(ended)
        await loop.create_connection(
            lambda ended=ended: Connection(paths, begun + seconds, most, into, ended), "127.0.0.1", port
        )
    await asyncio.gather(*ends)
    into.seconds = time.perf_counter() - begun
    return into


def measure(
    port: int, paths: Iterator[bytes], *, connections: int, seconds: float = 1e9, most: int = 10**9
) -> Measured:
    return asyncio.run(_measure(port, paths, connections, seconds, most))


def started() -> tuple[subprocess.Popen[str], int, float]:
    """A server, its port, and the seconds until it had answered once."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "fsdp_advisor", "serve", "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = urlsplit(process.stdout.readline().split()[3]).port
    assert port is not None
    measure(port, itertools.repeat(b"/healthz"), connections=1, most=1)
    return process, port, time.perf_counter() - begun


def resident_mb(pid: int) -> float:
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True))) / 1e6


def pace() -> float:
    """Million additions a second in this interpreter, now."""
    begun = time.perf_counter()
    total = 0
    for n in range(5_000_000):
        total += n
    return 5 / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="of each kind of requests")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=100_000, help="of the look at memory; 0 leaves it out")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    if given.plain:
        print(f"{pace():.0f} million additions a second")
    starts = []
    for _ in range(3):
        process, port, seconds = started()
        starts.append(seconds)
        if len(starts) < 3:
            process.terminate()
            process.wait()
    try:
        print(f"start-up {min(starts):.2f} s (three times: {', '.join(f'{s:.2f}' for s in starts)})")
        measure(port, apart(1), connections=given.connections, most=1000)  # every model has been read
        print(
            f"{'requests':16} {'per second':>10} {'p50 ms':>8} {'p99 ms':>8} {'worst':>8} {'failed':>7} {'kB each':>8}"
        )
        for name, paths in (("apart", apart(2)), ("varied", varied(2)), ("cached", cached(1))):
            if name == "cached":
                measure(port, cached(1), connections=given.connections, most=2 * SAME)
            m = measure(port, paths, connections=given.connections, seconds=given.seconds)
            print(f"{name:16} {m.per_second:10,.0f} {m.percentile(50):8.1f} {m.percentile(99):8.1f} {max(m.latencies) * 1e3:8.1f} {m.failed:7} {m.bytes / len(m.latencies) / 1e3:8.1f}")  # fmt: skip
        if given.requests:
            paths, tenth = mostly_cached(3), given.requests // 10
            measure(port, paths, connections=given.connections, most=tenth)
            early = resident_mb(process.pid)
            measure(port, paths, connections=given.connections, most=given.requests - tenth)
            late = resident_mb(process.pid)
            print(
                f"resident {early:.0f} MB after {tenth:,} requests, {late:.0f} MB after {given.requests:,} (one in ten new)"
            )
    finally:
        process.terminate()
        process.wait(timeout=20)


if __name__ == "__main__":
    main()
