"""What people run: a Hugging Face Llama, eager and compiled, plain, under FSDP2 and under DeepSpeed
ZeRO-1, -2 and -3, on one rank: the step's time, the host's own time for it, its kernels by name.
One rank gathers and reduces nothing, so what differs is the programs' own work per parameter.

    python3 hf.py CASE...        one JSON per case: hf_CASE.json
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
import torch
import torch.distributed as dist
from common import SMALL, Results, Watch, device, gpu_alone, log, sync

DEVICE = device()
ON = DEVICE.type == "cuda"
SIZES = [(1, 16)] if SMALL else [(1, 512), (1, 2048), (4, 2048), (1, 8192)]


def build() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    wide = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "max_position_embeddings": 64,
    }
    if not SMALL:
        wide = {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 6,
            "vocab_size": 32000,
            "max_position_embeddings": 8192,
        }
    with DEVICE:
        return LlamaForCausalLM(LlamaConfig(**wide, attn_implementation="sdpa")).train()


def program(case: str):
    """(forward and backward of a batch, update) of a case."""
    if case.startswith("deepspeed"):
        import deepspeed

        if not ON:
            import deepspeed.ops

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        stage = int(case[-1])
        model = build()
        zero = {"stage": stage, "reduce_bucket_size": 500_000_000}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def both(tokens):
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)

        return both, engine.step
    model = build()
    if case == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(DEVICE.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        model = model.to(torch.bfloat16)
    if case.startswith("compiled"):
        for layer in model.model.layers:
            layer.compile()
    foreach = case.endswith("foreach")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not foreach, foreach=foreach)

    def both(tokens):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return both, update


def timed(run) -> tuple[float, float]:
    sync()
    start = time.perf_counter()
    run()
    issued = time.perf_counter() - start
    sync()
    return time.perf_counter() - start, issued


def kernels(both, tokens) -> dict:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        both(tokens)
        sync()
    sums: dict[str, list] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = sums[event.name[:110]]
            entry[0] += 1
            entry[1] += event.time_range.elapsed_us()
    top = sorted(sums.items(), key=lambda item: -item[1][1])
    return {
        "launches": sum(c for c, _ in sums.values()),
        "us": sum(u for _, u in sums.values()),
        "top": top[:60],
    }


def main() -> int:
    case = sys.argv[1]
    results = Results(f"hf_{case}.json")
    os.environ["MASTER_PORT"] = str(21000 + os.getpid() % 8000)
    with results.part("all"):
        if ON:
            torch.cuda.set_device(0)
        dist.init_process_group("nccl" if ON else "gloo", rank=0, world_size=1)
        torch.manual_seed(0)
        both, update = program(case)
        for batch, seq in SIZES:
            tokens = torch.randint(100, (batch, seq), device=DEVICE)
            for _ in range(2):
                both(tokens)
                update()
            with gpu_alone(f"{case} {batch} {seq}"), Watch() as watch:
                rows = [(timed(lambda: both(tokens)), timed(update)) for _ in range(5)]
                found = {
                    "passes_s": [r[0][0] for r in rows],
                    "passes_issued_s": [r[0][1] for r in rows],
                    "update_s": [r[1][0] for r in rows],
                    "update_issued_s": [r[1][1] for r in rows],
                    "clocks": watch.summary(),
                }
                if ON:
                    found |= {
                        "kernels": kernels(both, tokens),
                        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                    }
                    update()
            results.put(f"{batch} x {seq}", found)
    log("hf", case)
    return any(key.endswith("FAILED") for key in results)


code = main()
sys.stdout.flush()
os._exit(int(code))
