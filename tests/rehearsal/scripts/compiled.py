"""Peaks of training steps whose layers `torch.compile` compiles, one after the other, as torchtitan does.

Argument: for each job the model's configuration, the engine, the precision, the checkpointing, the micro-batch and the length, as JSON.
Inductor generates the whole step's code; the compilation of its kernels, whose launches do nothing here, is left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import peak_of_steps, peak_of_trainer, print_peaks
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

RANKS = 2


def reduced(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """DDP's communication hook that leaves a bucket as it is, because the fake process group reduces nothing."""
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found


def layers_of(model: Any) -> Any:
    """The layers of a model, which may be in a PeftModel."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return base.model.layers


def prepared(model: Any, engine: str, precision: str) -> Any:
    """The model under an engine on the first of two ranks, or on one GPU. FSDP2 moves one unit at a time to the GPU."""
    if engine == "single":
        return model.cuda()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    if engine == "ddp":
        wrapped = DistributedDataParallel(model.cuda(), device_ids=[0], init_sync=False)
        wrapped.register_comm_hook(None, reduced)
        return wrapped
    halves = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if precision == "bf16-mixed" else {}
    for layer in layers_of(model):
        fully_shard(layer, reshard_after_forward=True, **halves)
    return fully_shard(model, reshard_after_forward=True, **halves)


def in_fp8(model: Any, recipe: str) -> None:
    """Convert the linear layers except the head with torchao, as its documentation and torchtitan do."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def takes(module: Any, name: str) -> bool:
        return name != "lm_head" and module.in_features % 16 == 0 and module.out_features % 16 == 0

    convert_to_float8_training(model, module_filter_fn=takes, config=Float8LinearConfig.from_recipe_name(recipe))


def in_mxfp8(model: Any) -> None:
    """Replace the linear layers except the head by torchao's, as torchtitan does. Its kernels run without their tuning."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from triton.runtime.autotuner import Autotuner

    Autotuner.run = lambda *args, **kwargs: None
    for parent in list(model.model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, torch.nn.Linear):
                converted = MXFP8Linear(
                    layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
                )
                converted.weight, converted.bias = layer.weight, layer.bias
                setattr(parent, name, converted)


def in_4_bits(config: Any, **loading: Any) -> Any:
    """The model with its linear layers in 4 bits, as transformers loads it."""
    half = {"dtype": torch.bfloat16}
    folder = f"base{os.environ.get('RANK', '')}"
    AutoModelForCausalLM.from_config(config, **half).save_pretrained(folder)
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    place = {"": torch.cuda.current_device()}
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed, device_map=place, **half, **loading)


def launch_nothing() -> None:
    """Leave out the compilation of kernels and their launches. Scalars are then False, such as whether a row is packed."""
    import torch._inductor.config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # importing it initializes CUDA

    def run(self: Any, *values: Any, **_: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.dtype == torch.bool and not value.dim():
                value.data.zero_()  # `data`: not counted as a change of the tensor

    CachingAutotuner.precompile = lambda *args, **kwargs: None
    CachingAutotuner.run = run
    torch._inductor.config.compile_threads = 1  # no workers, which would import PyTorch for each job


def peak_of(
    config: dict[str, Any], engine: str, precision: str, checkpointing: str, batch: int, length: int,
    compiled: str = "layer", fp8: str = "none", memory_budget: float = 1.0, attention: str = "sdpa",
    lora: dict[str, Any] | None = None, packs: bool = False, frozen: Sequence[str] = (),
) -> int:  # fmt: skip
    import torch._functorch.config

    launch_nothing()
    torch._functorch.config.activation_memory_budget = memory_budget
    dtype = torch.bfloat16 if precision == "bf16" or lora is not None else torch.float32
    settings = AutoConfig.for_model(**config)
    if packs:
        model = in_4_bits(settings, attn_implementation=attention)
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    else:
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention)
    model.train()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora is not None:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    if fp8 == "mxfp8":
        in_mxfp8(model)
    elif fp8 != "none":
        in_fp8(model, fp8)
    if compiled == "layer":
        for layer in layers_of(model):
            layer.compile()
    elif compiled == "model":
        model.compile()
    return peak_of_steps(prepared(model, engine, precision), precision, engine, batch, length)


def trainers_peak(config: dict[str, Any], precision: str, checkpointing: str, batch: int, length: int) -> int:
    """The peak of the Trainer's steps with `torch_compile`, which compiles the model as accelerate wraps it."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    tokens = [token % 50 + 1 for token in range(length)]
    checkpoints = checkpointing == "full"
    return peak_of_trainer(model, tokens, batch, precision, gradient_checkpointing=checkpoints, torch_compile=True)


def measured(job: list[Any]) -> int:
    if job[1] == "trainer":
        launch_nothing()
        return trainers_peak(job[0], *job[2:6])
    return peak_of(*job)


if __name__ == "__main__":
    print_peaks(measured)
