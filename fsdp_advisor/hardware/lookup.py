"""From what people type, or what `torch.cuda.get_device_name` prints, to a row of the table."""

import re
from functools import cache

from fsdp_advisor.errors import UnknownGpu
from fsdp_advisor.hardware.gpus import GPUS, Gpu
from fsdp_advisor.units import GIB, parse_bytes

# A bare family name means its SXM board with the most memory: A100 -> A100-80GB, V100 -> V100-32GB, H100 -> H100-80GB.

_SMALLEST_BYTES = GIB
_LARGEST_BYTES = 1024 * GIB
_WORDS_WITHOUT_MEANING = re.compile(r"^(?:nvidia|amd|geforce|tesla|quadro|instinct)+|generation$")
_ELSEWHERE = "`fsdp-advisor gpus` lists them all; a size such as 24GiB does too"


def _key(name: str) -> str:
    """A name without what people write differently: case, separators, the maker, G or GB or GiB.

    >>> _key("NVIDIA GeForce RTX 4090"), _key("rtx4090"), _key("h100_sxm"), _key("A100 80 GiB PCIe")
    ('rtx4090', 'rtx4090', 'h100sxm', 'a10080gbpcie')
    """
    key = re.sub(r"[^a-z0-9]", "", name.casefold())
    key = _WORDS_WITHOUT_MEANING.sub("", key)
    return re.sub(r"(?<=[0-9])g(?:i?b)?", "gb", key)


@cache
def _by_key() -> dict[str, Gpu]:
    return {_key(name): gpu for gpu in GPUS for name in (gpu.name, gpu.full_name, *gpu.aliases)}


def lookup(name: str) -> Gpu | None:
    """The row of that name, or None. Never an anonymous GPU and never a guess: RTX 3090 Ti is not RTX 3090."""
    return _by_key().get(_key(name))


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, or an anonymous one of that size.

    Sizes are read as written: GiB is 2^30 bytes, GB is 10^9. An anonymous GPU has a memory and nothing else.
    Raises UnknownGpu, with the nearest names as a hint.

    >>> find_gpu("rtx 4090").name
    'RTX-4090'
    >>> find_gpu("24GiB").memory_bytes == 24 * 2**30
    True
    """
    gpu = lookup(name)
    if gpu is not None:
        return gpu
    memory_bytes = _size(name)
    if memory_bytes is None:
        raise UnknownGpu(name, hint=_nearest(name))
    if not _SMALLEST_BYTES <= memory_bytes <= _LARGEST_BYTES:
        raise UnknownGpu(name, hint="a size needs its unit, as in 24GiB or 24GB, and lies between 1GiB and 1024GiB")
    return Gpu(
        name=name.strip(),
        full_name=f"a GPU with {name.strip()}",
        memory_bytes=memory_bytes,
        nominal_memory_bytes=memory_bytes,
        memory_source="as asked for",
        source="as asked for: nothing but its memory is known",
    )


def list_gpus(pattern: str | None = None) -> tuple[Gpu, ...]:
    """The table, or the rows one of whose names contains `pattern`, whatever the case."""
    if pattern is None:
        return GPUS
    wanted = pattern.casefold()
    return tuple(
        gpu for gpu in GPUS if any(wanted in name.casefold() for name in (gpu.name, gpu.full_name, *gpu.aliases))
    )


def _size(text: str) -> int | None:
    """Bytes of a size, negative where it is signed so, None where it is none."""
    text = text.strip()
    size = parse_bytes(text.lstrip("+-"))
    return None if size is None else -size if text.startswith("-") else size


def _nearest(name: str) -> str:
    key = _key(name)[:64]
    if not key:
        return _ELSEWHERE
    import difflib  # costs 1 ms, needed only here

    by_key = _by_key()
    keys = [candidate for candidate in by_key if len(key) > 2 and (candidate in key or key in candidate)]
    keys += difflib.get_close_matches(key, by_key, n=6, cutoff=0.5)
    keys.sort(key=lambda candidate: -difflib.SequenceMatcher(None, key, candidate).ratio())
    names = list(dict.fromkeys(by_key[candidate].name for candidate in keys))[:3]
    return f"did you mean {' or '.join(names)}? {_ELSEWHERE}" if names else _ELSEWHERE
