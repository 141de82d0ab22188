"""Find a GPU of the table by the name that a user types or that `torch.cuda.get_device_name` prints."""

import difflib
import re
from functools import cache

from fsdp_advisor.errors import UnknownGpu
from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.hardware.gpus import GPUS
from fsdp_advisor.units import GIB, parse_bytes

# A family name selects the SXM board with the most memory: A100 -> A100-80GB, V100 -> V100-32GB, H100 -> H100-80GB.

_SMALLEST_BYTES = GIB
_LARGEST_BYTES = 1024 * GIB
_VENDOR_WORDS = re.compile(
    r"^(?:nvidia|amd|geforce|tesla|quadro|instinct|hgx|dgx)+|(?:generation|(?:workstation)?edition)$"
)
_COUNTED = re.compile(
    r"^(?P<count>\d+)\s*[x\u00d7*]\s*(?P<name>.+)|(?P<name_before>.+?)\s*[x\u00d7*]\s*(?P<count_after>\d+)$",
    re.IGNORECASE,
)
"""A number of GPUs and their name: 8xH100, H100 x 8."""
_SIMILAR = 0.75
"""The ratio of difflib from which a name is similar to another: RTX 5900 and RTX 5090 have 0.86."""
_NOT_MODELLED = (
    (
        r"(apple)?m[1-9](pro|max|ultra)?(\d+gb)?|mps|(apple|mac|imac).*",
        "Apple's GPUs, which run PyTorch's MPS, are not modelled",
    ),
    (
        r"(gtx)?(9[5678]0|10[3-8]0)(ti)?|titanx[p]?|[pkm](4|10|40|60|80|100)(16gb|24gb|pcie.*|sxm2.*)?",
        "GPUs before Volta are not modelled",
    ),
    (r"gtx16[56]0(ti|super)?", "the GTX 16 series, which has no tensor cores, is not modelled"),
    (r"(intel)?arc[ab]?\d+", "Intel's GPUs, which run PyTorch's XPU, are not modelled"),
    (r"(inferentia|inf|trainium|trn)\d?", "of AWS's devices only Trainium-2 is in the table"),
)
"""Patterns of canonical names of devices that are not in the table, with the reason."""
_HINT = "`fsdp-advisor gpus` lists all GPUs; a memory size such as 24GiB also works"


def canonical_name(name: str) -> str:
    """A name without its variable parts: case, separators, the vendor, and G, GB or GiB.

    >>> [canonical_name(n) for n in ("NVIDIA GeForce RTX 4090", "rtx4090", "h100_sxm", "A100 80 GiB PCIe")]
    ['rtx4090', 'rtx4090', 'h100sxm', 'a10080gbpcie']
    """
    key = re.sub(r"[^a-z0-9]", "", name.casefold())
    key = _VENDOR_WORDS.sub("", key)
    return re.sub(r"(?<=[0-9])g(?:i?b)?", "gb", key)


@cache
def _gpus_by_name() -> dict[str, Gpu]:
    return {canonical_name(name): gpu for gpu in GPUS for name in (gpu.name, gpu.full_name, *gpu.aliases)}


def lookup(name: str) -> Gpu | None:
    """The row of that name, also if its memory lacks the unit (H100-80), or None. Never guesses: RTX 3090 Ti is not RTX 3090."""
    key = canonical_name(name)
    return _gpus_by_name().get(key) or _gpus_by_name().get(f"{key}gb")


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, or an anonymous GPU with that memory size.

    GiB means 2^30 bytes, GB 10^9. An anonymous GPU has a memory size and no rates or links. Raises UnknownGpu with the
    nearest names as a hint.

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
        raise UnknownGpu(name, hint="a size needs a unit, such as 24GiB or 24GB, and must be between 1GiB and 1024GiB")
    return Gpu(
        name=name.strip(),
        full_name=f"a GPU with {name.strip()}",
        memory_bytes=memory_bytes,
        nominal_memory_bytes=memory_bytes,
        memory_source="as requested",
        source="as requested: only its memory is known",
    )


def list_gpus(pattern: str | None = None) -> tuple[Gpu, ...]:
    """All GPUs, or those with a name, alias or architecture that contains `pattern`, ignoring case and punctuation.

    >>> [gpu.name for gpu in list_gpus("H100 PCIe")], [gpu.name for gpu in list_gpus("cdna4")]
    (['H100-PCIe'], ['MI350X', 'MI355X'])
    """
    if pattern is None:
        return GPUS
    wanted = canonical_name(pattern) or pattern.casefold()
    return tuple(
        gpu
        for gpu in GPUS
        if any(
            wanted in canonical_name(name) or pattern.casefold() in name.casefold()
            for name in (gpu.name, gpu.full_name, *gpu.aliases, gpu.architecture or "")
        )
    )


def _size(text: str) -> int | None:
    """Bytes of a size, which may be negative; None if `text` is not a size."""
    text = text.strip()
    size = parse_bytes(text.lstrip("+-"))
    return None if size is None else -size if text.startswith("-") else size


def _nearest(name: str) -> str:
    """The hint about an unknown name: the GPUs of similar names, or the options for a number of GPUs.

    >>> _nearest("8x H100")
    '--gpus 8 --gpu H100-80GB'
    """
    key = canonical_name(name)[:64]
    if not key:
        return _HINT
    if (counted := _COUNTED.match(name.strip()[:64])) and (gpu := lookup(counted["name"] or counted["name_before"])):
        return f"--gpus {counted['count'] or counted['count_after']} --gpu {gpu.name}"
    if reason := next((why for pattern, why in _NOT_MODELLED if re.fullmatch(pattern, key)), None):
        return f"{reason}; a memory size such as 16GiB gives the memory as on other GPUs"
    by_key = _gpus_by_name()
    parts = _parts(name)
    if reordered := dict.fromkeys(gpu.name for gpu in GPUS for one in (gpu.name, *gpu.aliases) if _parts(one) == parts):
        return f"did you mean {' or '.join(reordered)}? {_HINT}"
    likeness = {
        candidate: difflib.SequenceMatcher(None, key.replace("o", "0"), candidate.replace("o", "0")).ratio()
        for candidate in by_key
    }
    keys = [one for one in by_key if likeness[one] >= _SIMILAR or _same_series(key, one)]
    keys.sort(key=lambda candidate: (not key.startswith(candidate), -likeness[candidate]))
    names = list(dict.fromkeys(by_key[candidate].name for candidate in keys))[:3]
    return f"did you mean {' or '.join(names)}? {_HINT}" if names else _HINT


def _parts(name: str) -> list[str]:
    """The words and numbers of a name in alphabetical order, which is the same for names whose words are in another order.

    >>> _parts("RTX 6000 Pro") == _parts("NVIDIA RTX-PRO-6000")
    True
    """
    words = (_VENDOR_WORDS.sub("", word) for word in re.findall(r"[a-z]+|[0-9]+", name.casefold()[:64]))
    return sorted(word for word in words if word)


def _same_series(key: str, other: str) -> bool:
    """Whether the names are of one series: one begins with the other, or both begin with the same four letters or more."""
    if min(len(key), len(other)) < 3:
        return False
    letters, others = (re.sub(r"[0-9].*", "", one) for one in (key, other))
    return key.startswith(other) or other.startswith(key) or (letters == others and len(letters) >= 4)
