"""The question, as data: every option of the command line, of the REST API and of `estimate()`, under the same words.

Declared with the standard library alone: a command that only asks starts without pydantic, which `reading` builds from these
same fields for whatever is not plainly right, and for REST.
"""

# no postponed annotations: `fields_of` reads the fields' types as they are

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from fsdp_advisor.units import parse_bytes, parse_count, parse_fraction

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
Backend = Literal["ddp", "fsdp2", "fsdp1", "deepspeed"]
Offload = Literal["none", "optimizer", "parameters"]
Precision = Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"]
OptimizerName = Literal[
    "adamw_torch_fused", "adamw_torch", "sgd", "sgd_momentum", "adafactor", "adamw_bnb_8bit",
]  # fmt: skip
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Checkpointing = Literal["none", "full"]
Framework = Literal["torch", "accelerate", "trainer", "deepspeed"]
Find = Literal["gpus", "batch", "sequence", "gpu-type"]

MAX_GPUS = 65_536
MAX_BATCH = 1_048_576
MAX_SEQ_LEN = 16_777_216


@dataclass(frozen=True)
class Rule:
    """What a field may hold, in the words of pydantic's `Field`. `parse` reads text that has a unit; None is what it cannot read."""

    description: str | None = None
    ge: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    parse: Callable[[str], float | None] | None = None

    def allows(self, value: Any) -> bool:
        if isinstance(value, str):
            return (self.min_length or 0) <= len(value) and (self.max_length is None or len(value) <= self.max_length)
        least, most, below = self.ge, self.le, self.lt
        return (
            (least is None or value >= least) and (most is None or value <= most) and (below is None or value < below)
        )


def check_nodes(gpus: int, nnodes: int) -> None:
    """ValueError unless each node has the same number of GPUs."""
    if gpus % nnodes:
        raise ValueError(f"gpus {gpus} is not divisible by nnodes {nnodes}")


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """One job, or one job under every strategy. Field names are the command line's options with underscores.

    `estimator.make_request` makes one of text and says what is wrong; the class takes values of the right type, else
    ValueError. `given` are the names of the fields that were given, also where that is the default.
    """

    model: Annotated[str, Rule(min_length=1, max_length=4096)]
    gpus: Annotated[int, Rule("total ranks", ge=1, le=MAX_GPUS)] = 1
    nnodes: Annotated[int, Rule("nodes", ge=1, le=MAX_GPUS)] = 1
    gpu: Annotated[str | None, Rule("a name, or a size such as 24GiB", max_length=128)] = None
    interconnect: Annotated[
        str | None, Rule("a name such as InfiniBand NDR, or a rate such as 400Gb/s", max_length=128)
    ] = None
    strategy: Literal[Strategy, "all"] = "all"
    backend: Literal[Backend, "auto"] = "auto"
    offload: Offload = "none"
    offload_device: Literal["cpu", "nvme"] = "cpu"
    precision: Precision = "bf16-mixed"
    optim: OptimizerName = "adamw_torch_fused"
    micro_batch_size: Annotated[int, Rule("sequences per rank per forward", ge=1, le=MAX_BATCH)] = 1
    seq_len: Annotated[int | None, Rule("tokens per sequence", ge=1, le=MAX_SEQ_LEN)] = None
    gradient_accumulation_steps: Annotated[int, Rule(ge=1, le=MAX_BATCH)] = 1
    activation_checkpointing: Checkpointing = "none"
    attention: Attention = "sdpa"
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    reserved: Annotated[bool, Rule("walk the caching allocator through the job's steps")] = False
    allocator_conf: Annotated[str | None, Rule("as in PYTORCH_ALLOC_CONF", max_length=1024)] = None
    host_memory: Annotated[int | None, Rule("of one node, such as 512GiB", ge=2**30, le=2**60, parse=parse_bytes)] = (
        None
    )
    framework: Framework = "torch"
    wrap: Literal["layer", "none"] = "layer"

    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, option in fields_of(type(self)).items():
            if not option.holds(getattr(self, name)):
                raise ValueError(f"{name} cannot be {getattr(self, name)!r}")
        check_nodes(self.gpus, self.nnodes)

    def as_dict(self) -> dict[str, Any]:
        """Every option, under its own name."""
        return {name: getattr(self, name) for name in fields_of(type(self))}

    @property
    def changed(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        return {name: v for name, v in self.as_dict().items() if v != fields_of(type(self))[name].default}

    def but(self: "AnyRequest", **changes: Any) -> "AnyRequest":
        """The same with these fields given."""
        return replace(self, **changes, given=self.given | set(changes))


AnyRequest = TypeVar("AnyRequest", bound=EstimateRequest)


@dataclass(frozen=True, kw_only=True)
class RecommendRequest(EstimateRequest):
    """A job of which some things are still open: those in SEARCHED, wherever they are None, `auto` or `all`."""

    SEARCHED: ClassVar[tuple[str, ...]] = (
        "strategy", "backend", "offload", "offload_device",
        "micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing",
    )  # fmt: skip

    # mypy: wider than in an estimate, where nothing is open
    offload: Literal[Offload, "auto"] = "auto"  # type: ignore[assignment]
    offload_device: Literal["cpu", "nvme", "auto"] = "auto"  # type: ignore[assignment]
    micro_batch_size: Annotated[int | None, Rule("sequences per rank", ge=1, le=MAX_BATCH)] = None  # type: ignore[assignment]
    gradient_accumulation_steps: Annotated[int | None, Rule(ge=1, le=MAX_BATCH)] = None  # type: ignore[assignment]
    activation_checkpointing: Literal[Checkpointing, "auto"] = "auto"  # type: ignore[assignment]

    global_batch_size: Annotated[
        int | None, Rule("sequences per optimizer step, over all ranks", ge=1, le=MAX_BATCH * MAX_GPUS)
    ] = None
    find: Annotated[Find | None, Rule("what to find the largest or smallest of that fits")] = None
    margin: Annotated[float, Rule("of the GPU's memory, left free: 0.08 or 8%", ge=0, lt=1, parse=parse_fraction)] = (
        0.08
    )
    tokens: Annotated[int | None, Rule("to train on, such as 10e9 or 10B", ge=1, le=10**18, parse=parse_count)] = None
    price: Annotated[float | None, Rule("of one GPU for one hour, in any currency", ge=0, le=1e6)] = None

    @property
    def as_estimate(self) -> EstimateRequest:
        """The same job with the estimate's defaults for what is open."""
        values = {name: getattr(self, name) for name in fields_of(EstimateRequest)}
        closed = {name: v for name, v in values.items() if v not in (None, "auto")}
        return EstimateRequest(**closed, given=frozenset(closed))


NOT_READ: Any = object()


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field of a request, as every face needs to know it. `kind` is what a value is, None left out."""

    name: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    required: bool
    default: Any
    rule: Rule

    def read(self, value: Any) -> Any:
        """A value as it is usually written, case and blanks apart; NOT_READ for anything else, which is pydantic's to judge."""
        if isinstance(value, str):
            value = self._from_text(value.strip())
        return value if self.holds(value) else NOT_READ

    def holds(self, value: Any) -> bool:
        """Whether this is a possible value, of the right type."""
        if value is None:
            return self.optional
        return type(value) is self.kind and (not self.choices or value in self.choices) and self.rule.allows(value)

    def _from_text(self, text: str) -> Any:
        if self.choices:
            return text.lower()
        if self.kind is str:
            return text
        if self.rule.parse is not None:
            return NOT_READ if (number := self.rule.parse(text)) is None else number
        return int(text) if self.kind is int and text.isascii() and text.isdigit() and len(text) < 20 else NOT_READ


def dashed(field: str) -> str:
    """The option of the command line that a field is.

    >>> dashed("micro_batch_size")
    '--micro-batch-size'
    """
    return "--" + field.replace("_", "-")


_FIELDS: dict[type, Mapping[str, Option]] = {}


def fields_of(kind: type[EstimateRequest]) -> Mapping[str, Option]:
    """What can be asked, in the order of its declaration.

    >>> fields_of(EstimateRequest)["offload"].choices
    ('none', 'optimizer', 'parameters')
    """
    if kind not in _FIELDS:
        _FIELDS[kind] = {f.name: _option(f.name, f.type, f.default) for f in fields(kind) if f.name != "given"}
    return _FIELDS[kind]


def _option(name: str, annotation: Any, default: Any) -> Option:
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    parts = get_args(bare) if get_origin(bare) in (Union, UnionType) else (bare,)
    (kind,) = (part for part in parts if part is not type(None))
    words = get_args(kind) if get_origin(kind) is Literal else ()
    return Option(
        name=name,
        kind=str if words else kind,
        choices=words,
        optional=type(None) in parts,
        required=default is MISSING,
        default=None if default is MISSING else default,
        rule=next((part for part in getattr(annotation, "__metadata__", ()) if isinstance(part, Rule)), Rule()),
    )


def plainly(given: Mapping[str, Any], kind: type[AnyRequest]) -> AnyRequest | None:
    """The request of what is plainly right: known names, each with a value as it is usually written; None for anything else."""
    known = fields_of(kind)
    if not given.keys() <= known.keys():
        return None
    values = {name: known[name].read(value) for name, value in given.items()}
    if any(value is NOT_READ for value in values.values()) or any(
        o.required and n not in values for n, o in known.items()
    ):
        return None
    try:
        return kind(**values, given=frozenset(values))
    except ValueError:
        return None
