"""Which jobs are modelled with compiled layers (`--compile`)."""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import Adaptation, adaptation_of
from fsdp_advisor.job.batch_layout import flattens
from fsdp_advisor.job.checkpointing import policies_of_changed_layers
from fsdp_advisor.job.choices import Backend, Framework, TrainingTask
from fsdp_advisor.job.conflicts import check_conflicts
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest

COMPILING: tuple[Backend, ...] = ("ddp", "fsdp2")
"""The backends whose compiled steps were compared with PyTorch's own."""
COMPILING_FRAMEWORKS: tuple[Framework, ...] = ("torch", "torchtitan", "accelerate", "trainer", "trl", "llamafactory")
"""The frameworks whose compiled steps were compared with their own code. torchtitan compiles its layers and its loss; the
Trainer (`torch_compile`) and accelerate compile the model, in DDP's wrapper or before FSDP2 shards it, and TRL also without its loss.

Source: torchtitan 0.3.0, distributed/compile.py and, in components/loss.py, `_maybe_compile`; accelerate 1.15, accelerator.py,
prepare_model and _prepare_fsdp2.
"""


def compiled_text(job: EstimateRequest | Plan) -> str:
    """The compiled parts of a job as text, such as `layers compiled with memory budget 0.5`."""
    budget = f" with memory budget {job.memory_budget:g}" if job.memory_budget != 1 else ""
    facts = FRAMEWORKS[job.framework]
    layers = "layers and loss" if facts.own_models else "regions" if facts.uses_accelerate else "layers"
    return f"{layers if job.compile == 'layer' else 'model'} compiled{budget}"


def check_graphs(request: EstimateRequest) -> None:
    """Raises UsageError if CUDA graphs are asked of a framework that captures none."""
    if request.cuda_graphs and not FRAMEWORKS[request.framework].captures_graphs:
        raise UsageError(
            f"framework {request.framework} captures no CUDA graph of a step",
            hint="leave --cuda-graphs out, or use --framework torchtitan",
        )


def check_compile(request: EstimateRequest) -> None:
    """Raises UsageError for a job that is not modelled with compiled layers under any strategy."""
    if request.compile == "none":
        if request.memory_budget != 1:
            raise UsageError("--memory-budget has no effect without --compile", hint="add --compile layer or model")
        return
    if request.memory_budget != 1 and request.activation_checkpointing != "none":
        raise UsageError(
            "--memory-budget already recomputes within compiled code, so the layers cannot also be checkpointed",
            hint="leave --activation-checkpointing out",
        )
    own_models = FRAMEWORKS[request.framework].own_models
    if own_models and request.compile == "model":
        raise UsageError(f"framework {request.framework} does not compile the whole model", hint="use --compile layer")
    policies = policies_of_changed_layers(own_models=own_models)
    others = {
        f"--framework {request.framework}": request.framework not in COMPILING_FRAMEWORKS,
        "--task grpo without --use-vllm, whose generation would be compiled": request.task == "grpo" and not request.use_vllm,
        f"--task {request.task} --framework llamafactory": request.framework == "llamafactory" and request.task != "sft",
        f"--attention {request.attention}": request.attention == "eager",
        f"--activation-checkpointing {request.activation_checkpointing}": request.activation_checkpointing not in policies,
        "--activation-offload": request.activation_offload,
        "--use-liger-kernel": request.use_liger_kernel,
        f"--wrap {request.wrap}": request.wrap != "layer",
        **_batches(request),
        **({} if own_models else _changes(request)),
    }  # fmt: skip
    check_conflicts(f"--compile {request.compile}", others)


def check_compiled_base(request: EstimateRequest, adaptation: Adaptation) -> None:
    """Raises UsageError for compiled layers on the packed weights of a GPTQ or AWQ checkpoint. `adaptation`: of that checkpoint."""
    check_conflicts(
        f"--compile {request.compile}",
        {f"a {adaptation.packed_by} checkpoint": request.compile != "none" and bool(adaptation.packed_by)},
    )


def _batches(request: EstimateRequest) -> dict[str, bool]:
    """What a batch has that is not modelled with compiled code -> whether it has it.

    With flash_attention_2, TRL passes the boundaries of the sequences in a row, so nothing is read from its positions.
    """
    flash = request.attention == "flash_attention_2"
    bounded = flash and FRAMEWORKS[request.framework].names_sequences
    flattened = flattens(request.packing, request.padding_free)
    return {
        "packed or padded batches": (flattened and not bounded) or request.padding_fraction > 0,
        "images in --attention flash_attention_2": flash and request.images_per_sample > 0,
    }


_WITH_ADAPTERS: tuple[Framework, ...] = ("torch", "accelerate", "trainer", "trl")
"""The frameworks whose compiled steps with adapters were compared with their own code."""
_TASKS_WITH_ADAPTERS: tuple[TrainingTask, ...] = ("sft", "dpo", "kto")
"""The tasks whose compiled steps with adapters were compared with TRL's."""
_WITH_4_BITS: tuple[Framework, ...] = ("torch", "trainer", "trl")
"""The frameworks whose compiled steps with adapters on a base in 4 bits were compared with their own code: of TRL those of SFT."""


def _changes(request: EstimateRequest) -> dict[str, bool]:
    """What changes a model that is not modelled with compiled code -> whether it does. Frozen parameters are modelled, and LoRA on linear
    layers, whose base may be in 4 bits if no backend shards it.
    """
    adaptation = adaptation_of(request)
    is_adapted, is_packed = bool(adaptation.peft), bool(adaptation.quantization)
    is_other = adaptation.method not in (None, "LORA") or bool(adaptation.peft.get("use_dora"))
    is_sharded = request.strategy not in ("ddp", "all") or request.backend not in ("auto", "ddp")
    is_regional, is_sft = request.compile == "layer", request.task == "sft"
    framework, task = request.framework, request.task
    return {
        "adapters other than LoRA": is_other,
        f"adapters in --framework {framework}": is_adapted and framework not in _WITH_ADAPTERS,
        f"adapters in --task {task}": is_adapted and task not in _TASKS_WITH_ADAPTERS,
        # under FSDP2, TRL does not recognize the compiled PeftModel and calls a reference that does not exist
        f"adapters in --task {task}, except with --strategy ddp": is_adapted and not is_sft and is_sharded,
        "a base in 8 bits": "load_in_8bit" in adaptation.quantization,
        f"a base in 4 bits in --task {task}": is_packed and not is_sft,
        f"adapters in --task {task}, except as a whole": is_adapted and not is_sft and is_regional,
        "--lora-target-parameters": bool(adaptation.peft.get("target_parameters")),
        "a base in 4 bits, except with --strategy ddp": is_packed and is_sharded,
        f"a base in 4 bits in --framework {framework}": is_packed and framework not in _WITH_4_BITS,
        f"a base in 4 bits in --framework {framework}, except as a whole": is_packed and framework != "torch" and is_regional,
    }  # fmt: skip


def compiles_embedding(plan: Plan) -> bool:
    """Whether the embedding is compiled: with the whole model, or as a region of accelerate's. Its gradient then needs no workspace.

    Source: torch 2.13, _inductor/decomposition.py, `_embedding_dense_backward`: atomic additions.
    """
    return plan.compile == "model" or (plan.compile == "layer" and plan.uses_accelerate)


def leaves_layers_uncompiled(plan: Plan) -> bool:
    """Whether the layers run without compiled code. Under accelerate, the hooks of FSDP2 are within the checkpoints and break the graph,
    and PyTorch disables the compiler in a checkpoint that is not part of a graph.

    Source: accelerate 1.15, accelerator.py, `_prepare_fsdp2`, and utils/fsdp_utils.py, `fsdp2_apply_ac`; torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_common.py, `_dynamo_disable`, and utils/checkpoint.py, `checkpoint`.
    """
    wrapped = plan.framework == "accelerate" and plan.backend == "fsdp2" and plan.checkpointing == "full"
    return wrapped and plan.compile != "none"


def compile_refusal(plan: Plan) -> UsageError | None:
    """Why the plan's backend is not modelled with compiled code. None if it is."""
    if plan.compile == "none":
        return None
    if plan.backend in COMPILING:
        return None
    return UsageError(
        f"--compile {plan.compile} is not modelled with backend {plan.backend}",
        hint=f"use --backend {' or '.join(COMPILING)}, or leave --compile out",
    )
