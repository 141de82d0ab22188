"""Any transformers configuration as a source. Only classes of the installed library are built; remote code is never run."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import huggingface_hub.constants  # noqa: F401  # reads the environment before the switch below
import torch
from torch import nn

from fsdp_advisor.errors import AdvisorError, MissingExtra, NoSuchAttention, NotRecordable, UnreadableConfig
from fsdp_advisor.model.multimodal import TRAINED_WHOLE
from fsdp_advisor.model.tape_key import TapeCheckpointing
from fsdp_advisor.model.tasks import AUTO_CLASSES
from fsdp_advisor.recording.checkpointing import arguments as checkpointing_arguments
from fsdp_advisor.recording.inputs import batch_of_task
from fsdp_advisor.recording.positions import keep_positions, mark_positions
from fsdp_advisor.recording.roles import is_norm
from fsdp_advisor.recording.sorted_sets import sorted_sets
from fsdp_advisor.recording.source import LayerStack, RootModules

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers must not download: a configuration is enough
import transformers  # after the switch above
from transformers.initialization import no_init_weights

TASKS = tuple(AUTO_CLASSES)
_POSITIONS_WITHOUT_BUCKETS = {"prophetnet": 2}
"""Model type -> number of last positions for which its code has no relative positions. Source: prophetnet/modeling_prophetnet.py,
ProphetNetDecoder.compute_buffered_relative_buckets: of 512 positions it uses 1 to 511, and those of the second stream begin at the 512th.
"""
_READ_VALUES = frozenset({
    "ctc", "audio-classification", "flaubert", "fsmt", "led", "longformer", "speech-encoder-decoder", "speecht5", "xlm",
    "xmod",
})  # fmt: skip
"""Tasks and model types whose code reads values of the batch, such as the largest label, lengths or masked tokens."""
_NAMED_ALONE = ("sequence-classification", "token-classification", "audio-classification")
"""Tasks that a configuration has only if it names a class for them, because most model types have such classes."""


class TransformersSource:
    """A model that transformers builds from a configuration."""

    inventory_dtype = torch.float32
    min_seq_len = 1
    expert_imbalance: float | None = None

    def __init__(
        self, config: Mapping[str, Any], *, name: str, task: str | None = None, labels: int | None = None
    ) -> None:
        """Check the configuration. `config` is as in config.json: `model_type` and the values that differ from its defaults.

        `labels`: the number of labels of a classifier, instead of the configuration's. Raises UnreadableConfig if transformers does not
        know the model type or refuses the values.
        """
        self.name = name
        self._values = {
            k: v for k, v in config.items() if k not in ("auto_map", "quantization_config", "_name_or_path")
        }
        model_type = self._values.pop("model_type", None)
        if not isinstance(model_type, str):
            raise UnreadableConfig("the configuration names no model_type", hint="is it a transformers config.json?")
        self._model_type = model_type
        with _errors_explained(self.name):
            self._config = self._configuration()
        _check_class(self.name, self._config, self._values)
        self.task = task or _task(self._config, self._values)
        self._labels = labels
        self._inputs = _inputs(type(self._config), self.task)
        self.needs_values = (
            self.task in _READ_VALUES or self._model_type in _READ_VALUES or "spatial_shapes" in self._inputs
        )
        text = getattr(self._config, "text_config", None) or self._config
        self.max_seq_len = _max_seq_len(text)
        self.alike_up_to: int | None = _original_max_seq_len(text)

    def _configuration(self) -> Any:
        # a copy, because transformers modifies nested dicts
        config = transformers.AutoConfig.for_model(self._model_type, **copy.deepcopy(self._values))
        config.use_cache = False
        return config

    def is_added(self, parameter: str) -> bool:
        return False

    def config(self) -> dict[str, object]:
        return {"model_type": self._model_type, **self._values}

    @property
    def drops_out(self) -> bool:
        """Whether the configuration sets a dropout rate above 0."""
        values = self._configuration().to_dict()
        return any(
            isinstance(v, float) and v > 0
            for k, v in values.items()
            if "drop" in k and not k.startswith(("layer", "classifier"))
        )

    def build(self, dtype: torch.dtype) -> nn.Module:
        auto = getattr(transformers, AUTO_CLASSES[self.task])
        with _errors_explained(self.name), torch.device("meta"), no_init_weights(), sorted_sets():
            config = self._configuration()
            if self._labels is not None:
                config.num_labels = self._labels
            text = config.get_text_config()
            if self.task == "sequence-classification" and getattr(text, "pad_token_id", None) is None:
                text.pad_token_id = 0  # the model searches for the last token before padding
            model: nn.Module = auto.from_config(config, dtype=dtype)
            model.tie_weights()  # type: ignore[operator]  # of every PreTrainedModel
            if self._values.get("tie_word_embeddings") is False:
                _untie_head(model)
        for module in model.modules():
            setattr(module, "_is_hf_initialized", True)  # noqa: B010  # transformers' own mark, unknown to nn.Module
        mark_positions(model)
        return model.train()

    def stacks(self, module: nn.Module) -> list[LayerStack]:
        """The lists of layers whose classes transformers names in `_no_split_modules`. If such a layer contains another such list, as
        ConvNeXt's stages do, only the inner list.
        """
        names = set(getattr(module, "_no_split_modules", None) or ())
        found = [
            LayerStack(path, tuple(layers))
            for path, layers in module.named_modules()
            if isinstance(layers, nn.ModuleList) and len(layers) > 1 and type(layers[0]).__name__ in names
        ]
        return [stack for stack in found if not any(other.path.startswith(f"{stack.path}.") for other in found)]

    def keep_layers(self, module: nn.Module, kept: Mapping[str, list[int]]) -> None:
        own = {path: _nearest_config(module, path) for path in kept}
        configs = list(
            {id(c): c for m in module.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}.values()
        )
        for path, indices in kept.items():
            layers = module.get_submodule(path)
            assert isinstance(layers, nn.ModuleList)
            depth = len(layers)
            parent = module.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], nn.ModuleList([layers[i] for i in indices]))
            for position, index in enumerate(indices):
                for inner in layers[index].modules():
                    if hasattr(inner, "layer_idx"):
                        setattr(inner, "layer_idx", position)  # noqa: B010  # transformers' own attribute, unknown to nn.Module
            keep_positions(module, parent, depth, indices)
            # a vision tower may be as deep as the text model
            of_others = [c for c in own.values() if c is not own[path]]
            for config in (c for c in configs if not any(c is other for other in of_others)):
                _keep_entries(config, depth, indices)

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: TapeCheckpointing, window_filled: bool | None = None
    ) -> None:
        from fsdp_advisor.recording import compiled_flash, flash

        if window_filled is not None:
            _bind_windows(module, window_filled)
        with _errors_explained(self.name):
            needed = {
                "sdpa": "_supports_sdpa",
                "flash_attention_2": "_supports_flash_attn",
                flash.VARLEN: "_supports_flash_attn",
                compiled_flash.COMPILED: "_supports_flash_attn",
            }.get(attention)
            if needed is not None and not getattr(module, needed, False):
                base: Any = getattr(module, "get_base_model", lambda: module)()  # of a PeftModel
                raise NoSuchAttention(type(base).__name__, attention)
            if attention == "flash_attention_2":
                attention = flash.NAME
            module.set_attn_implementation(_of_parts(module, attention))  # type: ignore[operator]  # of every PreTrainedModel
            if checkpointing not in ("none", "every"):
                keywords = checkpointing_arguments(checkpointing, attention)
                module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)  # type: ignore[operator]  # likewise
            if checkpointing == "reentrant":  # otherwise no gradient reaches layers after frozen embeddings
                module.enable_input_require_grads()  # type: ignore[operator]  # of every PreTrainedModel
            # accelerate's wrappers do not make the embedding's output require a gradient
            if checkpointing == "full-accelerate":
                module.disable_input_require_grads()  # type: ignore[operator]  # of every PreTrainedModel

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor | None = getattr(module(**batch), "loss", None)
        if loss is None:
            raise NotRecordable(
                f"{type(module).__name__} returns no loss, so transformers cannot train it",
                hint="record it as a module with a loss of your own (fsdp_advisor.record_module)",
            )
        return loss

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        return batch_of_task(self.task, self._config, self._inputs, micro_batch_size, seq_len)

    def root_modules(self, module: nn.Module) -> RootModules:
        """The root's modules, found by accelerate's rules. Source: accelerate/utils/fsdp_utils.py, fsdp2_prepare_model and
        _find_final_norm.
        """
        embedding = None
        with contextlib.suppress(NotImplementedError):  # a model without embeddings, such as ResNet
            embedding = module.get_input_embeddings()  # type: ignore[operator]  # of every PreTrainedModel
        head = module.get_output_embeddings()  # type: ignore[operator]  # of every PreTrainedModel
        base = getattr(module, str(getattr(module, "base_model_prefix", "")), None)
        norms = [m for m in base.children() if is_norm(m)] if isinstance(base, nn.Module) else []
        return RootModules(
            embedding=embedding if isinstance(embedding, nn.Module) else None,
            final_norm=norms[-1] if norms else None,
            head=head if isinstance(head, nn.Module) else None,
        )


def _keep_entries(config: Any, depth: int, indices: Sequence[int]) -> None:
    """Reduce a configuration's lists with one entry per layer (`depth` entries) to the kept layers. Computed lists are reduced too."""
    computed = {
        name: value
        for base in type(config).__mro__
        for name, found in vars(base).items()
        if name.startswith("layer") and isinstance(found, property) and len(value := getattr(config, name)) == depth
    }
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, [value[i] for i in indices])
    if computed:  # for example Bamba's layer types, which a property computes from the indices of attention layers
        fixed = {name: [value[i] for i in indices] for name, value in computed.items()}
        config.__class__ = type(type(config).__name__, (type(config),), fixed)


def _of_parts(module: nn.Module, attention: str) -> str | dict[str, str]:
    """The attention of a model's parts. With sdpa, parts that do not support it, such as Gemma 4's audio encoder, use eager attention.

    transformers does the same if a model is loaded without a choice of attention. If sdpa is chosen explicitly, it refuses such a model.
    """
    if attention != "sdpa":
        return attention
    config: Any = module.config
    lacking = [m.config for m in module.modules() if getattr(m, "_supports_sdpa", True) is False]
    eager = {name: "eager" for name in config.sub_configs if any(getattr(config, name) is c for c in lacking)}
    return {"": attention, **dict.fromkeys(config.sub_configs, attention), **eager} if eager else attention


def _nearest_config(module: nn.Module, path: str) -> Any:
    """The configuration for the submodule at `path`: that of the innermost module around it that has one."""
    names = path.split(".")
    for end in range(len(names) - 1, -1, -1):
        config = getattr(module.get_submodule(".".join(names[:end])), "config", None)
        if config is not None:
            return config
    return None


def _untie_head(model: Any) -> None:
    """Untie the head. T5 classes always tie it; loading an untied checkpoint (Flan-T5) unties it."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(torch.empty_like(head.weight))


def _bind_windows(module: nn.Module, bind: bool) -> None:
    """Make every sequence fill the sliding windows, or none. A filled window needs a mask, whose size depends on the sequence."""
    for config in {id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None}.values():
        if vars(config).get("sliding_window") is not None:
            config.sliding_window = 1 if bind else sys.maxsize


def _inputs(config: type, task: str) -> frozenset[str]:
    """The arguments of the forward of transformers' class for this configuration and task; empty if there is none."""
    found = getattr(transformers, AUTO_CLASSES[task])._model_mapping.get(config, None)
    kind = found[0] if isinstance(found, (list, tuple)) else found
    return frozenset(inspect.signature(kind.forward).parameters) if kind is not None else frozenset()


def _check_class(name: str, config: Any, values: Mapping[str, Any]) -> None:
    """Raise UnreadableConfig if `architectures` names a class that transformers lacks, and transformers' model of the same `model_type` is
    another model. This is so if the class is named differently than the type (Grok-2's file has model_type git). It is also so if values
    of the language model are not in text_config, where transformers reads them (files of LLaVA's own repository).
    """
    begin = re.sub(r"[^a-z]", "", config.model_type.lower())[:3]
    is_flat = "hidden_size" in values and "text_config" not in values and hasattr(config, "text_config")
    for named in values.get("architectures") or ():
        if hasattr(transformers, named):
            continue
        lacking = f"{name}: architectures names {named}, which transformers {transformers.__version__} lacks"
        if begin not in named.lower():
            raise UnreadableConfig(
                f"{lacking}; its {config.model_type} is another model",
                hint=f"correct model_type; if the layers are those of transformers' {config.model_type}, remove architectures",
            )
        if is_flat:
            raise UnreadableConfig(
                f"{lacking}; its {config.model_type} reads the language model's sizes from text_config, which is missing",
                hint="give the config.json of a repository for transformers, such as one of llava-hf",
            )


def _task(config: Any, values: Mapping[str, Any]) -> str:
    """The task of the configuration's `architectures`. Without them, that of a multimodal model if the configuration describes its vision
    tower, or else the first task that supports its model type.
    """
    named = " ".join(values.get("architectures") or ())
    trained = {task: getattr(transformers, auto)._model_mapping for task, auto in AUTO_CLASSES.items()}
    able = [task for task, models in trained.items() if type(config) in models]
    known = [task for task in able if task not in _NAMED_ALONE]
    hints = {
        "ForTokenClassification": ("token-classification",),
        "ForAudioClassification": ("audio-classification",),
        "ForSequenceClassification": (
            "audio-classification",
            "sequence-classification",
        ),  # Wav2Vec2ForSequenceClassification
        "ForCTC": ("ctc",),
        "ForMaskedLM": ("masked-lm",),
        "ForPreTraining": ("masked-lm",),
        "ForImageClassification": ("image-classification",),
        "ForSpeechSeq2Seq": ("speech-seq2seq",),
        "ForConditionalGeneration": ("seq2seq-lm", "image-text-to-text"),
        "ForCausalLM": ("causal-lm",),
    }
    for hint, tasks in hints.items():
        if hint in named and (meant := [task for task in tasks if task in able]):
            return meant[0]
    if not named and config.model_type in TRAINED_WHOLE and isinstance(values.get("vision_config"), Mapping):
        return "image-text-to-text"
    if config.is_encoder_decoder:
        known.sort(key=lambda task: "seq2seq" not in task)
    elif (
        "masked-lm" in known
        and not getattr(config, "is_decoder", False)
        and not any(head in named for head in ("CausalLM", "LMHead"))
    ):
        return "masked-lm"
    if not known:
        raise UnreadableConfig(
            f"transformers {transformers.__version__} trains no {config.model_type} model on a task this tool knows",
            hint="known tasks: " + ", ".join(trained),
        )
    return known[0]


def _max_seq_len(config: Any) -> int | None:
    for key in ("max_position_embeddings", "n_positions", "max_target_positions", "seq_length", "max_seq_len"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value - _POSITIONS_WITHOUT_BUCKETS.get(config.model_type, 0)
    return None


def _original_max_seq_len(config: Any) -> int | None:
    """The sequence length above which longrope and dynamic ropes change their frequencies. A longer step allocates one more table of a few
    kilobytes. None for other ropes.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("default", "linear", "yarn", "llama3", "proportional"):
        return None
    value = rope.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
    return value if isinstance(value, int) and value > 0 else None


def _line(error: Exception) -> str:
    """The first line of an error; if it ends with a colon, also the next text."""
    first, *more = str(error).strip().splitlines() or [""]
    while more and first.endswith(":"):
        first = f"{first} {more.pop(0).strip()}"
    return first[:200]


@contextlib.contextmanager
def _errors_explained(name: str) -> Iterator[None]:
    """Context that turns any error of transformers or torch about a configuration into an error of one line."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about methods that transformers will rename
            yield
    except AdvisorError:
        raise
    except ImportError as error:
        package = re.search(r"pip install `?([\w-]+)", str(error))
        raise MissingExtra(
            f"{name}: {_line(error)}",
            hint=f"pip install {package[1]}" if package else "install what its code imports",
        ) from error
    except Exception as error:
        raise UnreadableConfig(
            f"{name}: transformers {transformers.__version__} cannot build it: {type(error).__name__}: {_line(error)}",
            hint="check the configuration's model_type and its sizes",
        ) from error
