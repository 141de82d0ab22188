"""Loading a base that bitsandbytes quantizes: on the GPU of each rank by default, or on the host under FSDP.

Read in transformers 5.23, bitsandbytes 0.50.2 and accelerate 1.15. Every rank loads the whole base, with `cpu_ram_efficient_loading` and
with ZeRO-3 too: neither zero.Init nor accelerate's broadcast takes quantized weights.
Source: transformers/modeling_utils.py, `get_init_context`; accelerate/utils/fsdp_utils.py, fsdp2_prepare_model, `model_has_params4bit`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fsdp_advisor.engines.transfer import LoadMethod, private_bytes
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.policies.dtypes import HALF_BYTES, ITEM_BYTES, has_8_bit_weights
from fsdp_advisor.program.storages import WeightTransfer


def is_quantized_on_load(profile: Profile) -> bool:
    """Whether bitsandbytes quantizes the base. GPTQ's and AWQ's packed weights are buffers, which a checkpoint has as they are."""
    return any(_is_packed(p) for p, _ in profile.counted_parameters())


def on_gpu(
    profile: Profile,
    plan: Plan,
    *,
    whole_bytes: int,
    gpu_bytes: int,
    host_bytes: int = 0,
    transfers: tuple[WeightTransfer, ...] = (),
) -> LoadMethod:
    """The method that copies each weight to the GPU and quantizes it there, one after the other.

    `whole_bytes`: the loaded model on the GPU. `gpu_bytes`, `host_bytes`: what the engine needs after that.
    Source: transformers/quantizers/quantizer_bnb_4bit.py, `update_device_map`; core_model_loading.py,
    convert_and_load_state_dict_in_model, `has_on_the_fly_quantization`.
    """
    host = max(_in_conversion_bytes(profile), host_bytes)
    return LoadMethod(
        way="device_map",
        how="from_pretrained with a BitsAndBytesConfig on every rank: each weight goes straight to the rank's GPU and is quantized there",
        gpu_bytes=max(whole_bytes + HALF_BYTES * _largest_matrix(profile), gpu_bytes),
        first_rank_host_bytes=host,
        other_ranks_host_bytes=host,
        ranks_per_node=plan.ranks_per_node,
        mapped_bytes=_file_bytes(profile),
        transfers=transfers,
    )


def on_host(
    profile: Profile, plan: Plan, *, gpu_bytes: int, shards_on_host: int, transfers: tuple[WeightTransfer, ...]
) -> LoadMethod:
    """The method that quantizes on the host, so that FSDP moves one unit at a time to the GPU.

    Each rank has its own packed weights with their scales. Other weights are views of the file unless they are converted.
    """
    loaded = sum(private_bytes(profile, plan, p) * count for p, count in profile.counted_parameters())
    loaded += profile.scales_bytes
    host = max(loaded + _in_conversion_bytes(profile), shards_on_host)
    return LoadMethod(
        way="every_rank",
        how='from_pretrained(device_map={"": "cpu"}) on every rank quantizes on the host; FSDP moves one unit at a time',
        gpu_bytes=gpu_bytes,
        first_rank_host_bytes=host,
        other_ranks_host_bytes=host,
        ranks_per_node=plan.ranks_per_node,
        mapped_bytes=_file_bytes(profile),
        transfers=transfers,
    )


def scripts_load_on_host(plan: Plan) -> bool:
    """Whether a script of the plan's framework loads the base on the host. Exported scripts do so under FSDP, because then no GPU ever has
    the whole base; TRL, axolotl and LLaMA-Factory leave it to transformers, which loads it on each GPU.
    """
    return plan.backend in ("fsdp1", "fsdp2") and plan.framework in ("torch", "accelerate", "trainer")


def usual_first(plan: Plan, on_each_gpu: LoadMethod, on_hosts: LoadMethod) -> tuple[LoadMethod, LoadMethod]:
    """The two methods, first that of the plan's framework."""
    if scripts_load_on_host(plan):
        return replace(on_hosts, is_of_script=True), on_each_gpu
    return on_each_gpu, on_hosts


def _is_packed(p: Parameter) -> bool:
    return p.role == "quantized"


def _unpacked_elements(p: Parameter) -> int:
    return prod(p.matrix) if p.matrix is not None else p.elements


def _largest_matrix(profile: Profile) -> int:
    """Elements of the largest weight that is quantized."""
    return max(_unpacked_elements(p) for p, _ in profile.counted_parameters() if _is_packed(p))


def _file_bytes(profile: Profile) -> int | None:
    """Bytes of the checkpoint's tensors, which are not quantized. None if its dtype is unknown."""
    if profile.checkpoint_dtype is None:
        return None
    base = profile.base.counted_units()
    return ITEM_BYTES[profile.checkpoint_dtype] * sum(
        _unpacked_elements(p) * count for unit, count in base for p in unit.parameters
    )


def _in_conversion_bytes(profile: Profile) -> int:
    """Bytes of the copies that a rank makes on the host of one weight at a time.

    A weight of a checkpoint in another dtype than 16 bits is converted before it goes to the GPU. In 8 bits each quantized weight comes
    back to the host and is converted to float16 there. Source: transformers/integrations/bitsandbytes.py, Bnb8bitQuantize;
    bitsandbytes/nn/modules.py, Int8Params._quantize.
    """
    if has_8_bit_weights(profile):
        return 2 * HALF_BYTES * _largest_matrix(profile)
    if profile.checkpoint_dtype in ("bfloat16", "float16"):
        return 0
    sizes = (_unpacked_elements(p) for p, _ in profile.base.counted_parameters())
    return HALF_BYTES * max(sizes)
