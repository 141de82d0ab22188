"""Peaks of steps of torchtitan 0.3 by its own model, FlexAttention, checkpointing, compilation, sharding, loss and clipping.

Arguments: a folder with its package, the model's configuration, and for each job its checkpointing, whether it is compiled, the precision,
the micro-batch, the length, the recipe of torchao (`none` without) and whether forward and backward are captured as a CUDA graph, as JSON.
The step is that of torchtitan's `Trainer.train_step`.
"""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import print_peaks

RANKS = 2


def model_of(config: dict[str, Any], fp8: str) -> Any:
    """The model, as models/llama3/__init__.py and models/qwen3/__init__.py configure it. `fp8`: a recipe of torchao, or `none`."""
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.common.nn_modules import RMSNorm

    dim, head_dim, length = config["hidden_size"], config["head_dim"], config["max_position_embeddings"]
    vocabulary = config["vocab_size"]
    if config["model_type"] == "llama":
        from torchtitan.models.llama3.model import Llama3Model as Model
        from torchtitan.models.llama3.model import Llama3TransformerBlock as Block

        rope, norm = ComplexRoPE.Config(dim=head_dim, max_seq_len=length), None
    else:
        from torchtitan.models.qwen3.model import Qwen3Model as Model
        from torchtitan.models.qwen3.model import Qwen3TransformerBlock as Block

        rope = CosSinRoPE.Config(dim=head_dim, max_seq_len=length)
        norm = RMSNorm.Config(normalized_shape=head_dim)

    def layer() -> Any:
        attention = make_gqa_config(
            dim=dim, n_heads=config["num_attention_heads"], n_kv_heads=config["num_key_value_heads"], head_dim=head_dim, wqkv_param_init={},
            wo_param_init={}, inner_attention=get_attention_config("flex"), fuse_qkv=True, qk_norm=norm, rope=rope,
        )  # fmt: skip
        return Block.Config(
            attention_norm=RMSNorm.Config(normalized_shape=dim),
            ffn_norm=RMSNorm.Config(normalized_shape=dim),
            attention=attention,
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=config["intermediate_size"], w1_param_init={}, w2w3_param_init={}
            ),
        )

    found = Model.Config(
        dim=dim, vocab_size=vocabulary, enable_weight_tying=config["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim), norm=RMSNorm.Config(normalized_shape=dim),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary), layers=[layer() for _ in range(config["num_hidden_layers"])],
    )  # fmt: skip
    if fp8 != "none":
        from torchtitan.components.quantization import Float8LinearConverter, MXFP8LinearConverter

        of_fp8 = Float8LinearConverter.Config(recipe_name=fp8, filter_fqns=["lm_head"])  # type: ignore[arg-type]
        converter = MXFP8LinearConverter.Config() if fp8 == "mxfp8" else of_fp8
        found = converter.build().convert(found)
    return found.build()


def prepared(model: Any, checkpointing: str, compiles: Any, precision: str, mesh: Any) -> Any:
    """The model on the GPU as `parallelize_llama` prepares it."""
    from torchtitan.distributed import activation_checkpoint, fsdp
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.models.common import RoPE

    policies = {"full": activation_checkpoint.FullAC, "selective": activation_checkpoint.SelectiveAC}
    if checkpointing in policies:
        policies[checkpointing].Config().build().apply(model)
    if compiles.enable:
        apply_compile(model, compile_config=compiles, parallel_dims=SimpleNamespace(tp_enabled=False))  # type: ignore[arg-type]
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    fsdp.apply_fsdp_to_decoder(model, mesh, dtype, torch.float32, pp_enabled=False)
    if precision == "bf16":
        model.to(torch.bfloat16)
    fsdp.disable_fsdp_gradient_division(model)
    model.to_empty(device="cuda")
    for module in model.modules():
        if isinstance(module, RoPE):
            module.init_states(buffer_device=torch.device("cuda"))
    return model


def measured(folder: str, config: dict[str, Any], job: tuple[str, bool, str, int, int, str, bool]) -> int:
    sys.path.insert(0, folder)
    checkpointing, compiles, precision, batch, length, fp8, captures = job
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.nn.attention.flex_attention import flex_attention
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import utils
    from torchtitan.distributed.cudagraph import wrap_with_cuda_graph
    from torchtitan.models.common.attention import FlexAttention
    from triton.runtime.autotuner import Autotuner

    Autotuner.run = lambda *args, **kwargs: None  # torchao's kernels of MXFP8
    for name in ("precompile", "run"):
        setattr(CachingAutotuner, name, lambda *args, **kwargs: None)
    torch._inductor.config.compile_threads = 1  # no workers, which would import PyTorch for each job
    untuned = FlexAttention.inductor_configs | {"max_autotune": False, "coordinate_descent_tuning": False}
    FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=untuned)
    torch.autograd.set_multithreading_enabled(False)  # distributed/utils.py, init_distributed
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("fsdp",))
    settings = CompileConfig(enable=compiles)
    with torch.device("meta"):
        model = model_of({**config, "max_position_embeddings": length}, fp8)
    model = prepared(model, checkpointing, settings, precision, mesh)
    loss_of = ChunkedLossWrapper.Config().build(compile_config=settings)
    loss_of.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def forward_backward(tokens: Any, labels: Any, valid: Any, more: dict[str, Any]) -> Any:
        hidden = model(tokens, **more)
        loss, _ = loss_of(hidden, labels, valid, positions=more["positions"])
        del hidden
        loss.backward()
        return loss.detach()

    run = wrap_with_cuda_graph(forward_backward) if captures else forward_backward
    peak = 0
    for step in range(3):
        gc.collect()  # the compiler's cycles of references keep tensors
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=not captures)
        valid = torch.full((), batch * length * RANKS, device="cuda")
        tokens, labels, positions = (torch.zeros(batch, length, dtype=torch.long, device="cuda") for _ in range(3))
        masks = model.get_attention_masks(positions)
        loss = run(tokens, labels, valid, {"positions": positions, "attention_masks": masks})
        utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        del loss
        peak = max(peak, torch.cuda.max_memory_allocated()) if step else 0
    return peak


if __name__ == "__main__":
    print_peaks(measured)
