"""What kernels take, beside what the cost model says: products (bf16 out, fp32 sums), attention,
norms, non-linearities, loss, casts, Adam; whole blocks as the engine runs them (F, I, W, and a full
backward), eager and compiled. One JSON, written after every group, most valuable first."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
import torch
from common import SMALL, Results, Watch, device, gpu_alone, log, per_call, sync
from torch.nn import functional as F

from baselines.model import build_piece, cross_entropy, rope_angles, rotate
from benchmarks.specification.reading import preset
from zeropp.engine.layers.deferred import WeightGradStore, backward_of_chunk, defer_weight_grads
from zeropp.engine.update.update_rules import build_optimizer
from zeropp.price.cluster import Cluster
from zeropp.price.kernels import (
    fused_attention_backward_s,
    fused_attention_s,
    matmul_s,
    stream_s,
)
from zeropp.price.pieces import Work, linears, piece_times
from zeropp.price.programs import program_as_run, program_named
from zeropp.types.operators import Attention
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

DEVICE, BF16 = device(), torch.bfloat16
ON = DEVICE.type == "cuda"
MODEL = preset("cluster", os.environ.get("CLUSTER", "h100"), Cluster).device.of_year(2025)
results = Results("prices.json")
MODELS = ["gpt_6_2b", "gpt_14_6b", "gpt_28_3b", "llama_8b", "gpt_76b", "llama_70b"]
if SMALL:
    MODELS = ["gpt_tiny", "llama_tiny"]


def shape_of(name: str) -> ModelShape:
    return preset("model", name, ModelShape)


def random(*sizes: int, dtype=BF16, grad: bool = False):
    return torch.randn(sizes, device=DEVICE, dtype=dtype, requires_grad=grad)


def row(into: list, name: str, run, model_s: float | None = None, **more: object) -> None:
    try:
        seconds, spread = per_call(run)
        into.append(
            {
                "what": name,
                "s": seconds,
                "spread": round(spread, 4),
                "model_s": model_s,
                "model_over_measured": model_s / seconds if model_s else None,
                **more,
            }
        )
    except Exception as error:
        into.append({"what": name, "failed": f"{type(error).__name__}: {str(error)[:200]}", **more})


def right() -> None:
    """Whether the product that adds 16-bit factors in fp32 is right, also into a view."""
    from zeropp.engine.layers.deferred import add_wide_product

    errors = {}
    for rows, m, n in ((64, 96, 160), (2048, 4096, 1024), (8192, 1000, 1001)):
        left, right_ = random(rows, m), random(rows, n)
        buffer = torch.randn(m * n + 8, device=DEVICE)
        total = buffer[8:].view(m, n)
        want = total.double() + left.double().t() @ right_.double()
        add_wide_product(total, left.t(), right_)
        errors[f"{rows} {m} {n}"] = float((total.double() - want).norm() / want.norm())
    results.put("add_wide_product relative errors", errors)


def ceilings() -> None:
    rows: list = []
    side = 512 if SMALL else 8192
    a, b, out = random(side, side), random(side, side), random(side, side)
    row(
        rows,
        "bf16 8192 cubed",
        partial(torch.mm, a, b, out=out),
        2 * side**3 / MODEL.matmul_bf16_tflops / 1e12,
    )
    x = torch.empty(2**20 if SMALL else 2**30, device=DEVICE, dtype=torch.uint8)
    y = torch.empty_like(x)
    row(rows, "copy 1 GiB", lambda: y.copy_(x), 2 * x.numel() / MODEL.memory_bandwidth_gb_s / 1e9)
    half = random(x.numel() // 8)
    row(rows, "mul bf16", lambda: half.mul(2.0), stream_s(MODEL, 2 * half.numel() * 2))
    if ON:
        few = torch.randn(64, device=DEVICE)
        for _ in range(300):
            few.mul_(1.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(300):
                few.mul_(1.0)
        seconds, _ = per_call(graph.replay)
        rows.append(
            {
                "what": "tiny kernel in a graph",
                "s": seconds / 300,
                "model_s": MODEL.kernel_us * 1e-6,
            }
        )
        start = time.perf_counter()
        for _ in range(3000):
            few.mul_(1.0)
        rows.append(
            {
                "what": "host per launch, mul_",
                "s": (time.perf_counter() - start) / 3000,
                "model_s": MODEL.launch_us * 1e-6,
            }
        )
        sync()
    results.put("ceilings", rows)


def products() -> None:
    rows: list = []
    seen = set()
    for name in MODELS:
        shape = shape_of(name)
        for tp in (1, 8):
            for tokens in (shape.seq, 4 * shape.seq):
                if tokens > 8192 and name != "llama_8b":
                    continue
                work = Work(
                    shape=shape,
                    device=MODEL,
                    program=program_named("zeropp"),
                    precision="bf16",
                    recompute="none",
                    microbatch=1,
                    tp=tp,
                    sequence_parallel=False,
                    accumulated=0.0,
                )
                for k, n in sorted(set(linears(work))):
                    if (tokens, k, n) in seen or tokens * max(k, n) > 2**29:
                        continue
                    seen.add((tokens, k, n))
                    x, w, dy = random(tokens, k), random(n, k), random(tokens, n)
                    y, dx = random(tokens, n), random(tokens, k)
                    total = torch.zeros(n, k, device=DEVICE)
                    key = {"model": name, "tp": tp, "tokens": tokens, "k": k, "n": n}
                    row(
                        rows,
                        "forward",
                        lambda: torch.mm(x, w.t(), out=y),
                        matmul_s(MODEL, "bf16", m=tokens, k=k, n=n),
                        **key,
                    )
                    row(
                        rows,
                        "dX",
                        lambda: torch.mm(dy, w, out=dx),
                        matmul_s(MODEL, "bf16", m=tokens, k=n, n=k),
                        **key,
                    )
                    weight = matmul_s(MODEL, "bf16", m=n, k=tokens, n=k)
                    if ON:
                        added = weight + stream_s(MODEL, (2 * 4 - 2) * n * k, 0)
                        row(
                            rows,
                            "dW fp32 sum in the product",
                            lambda: torch.addmm(
                                total, dy.t(), x, out_dtype=torch.float32, out=total
                            ),
                            added,
                            **key,
                        )
                    row(rows, "dW bf16", lambda: dy.t() @ x, weight, **key)
                    row(rows, "dW bf16 then add", lambda: total.add_(dy.t() @ x), None, **key)
        results.put("products", rows)


def attention() -> None:
    rows: list = []
    cases = [
        (1, 32, 32, 2048, 128),
        (4, 32, 32, 2048, 128),
        (1, 40, 40, 2048, 128),
        (1, 32, 8, 8192, 128),
        (1, 8, 1, 8192, 128),
        (4, 4, 4, 2048, 128),
        (1, 24, 24, 2048, 96),
        (1, 64, 8, 4096, 128),
    ]
    cases = [(1, 2, 1, 64, 16)] if SMALL else cases
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for batch, heads, kv, seq, width in cases:
        q, k, v = (
            random(batch, heads, seq, width, grad=True),
            random(batch, kv, seq, width, grad=True),
            random(batch, kv, seq, width, grad=True),
        )
        asked = Attention(heads=batch * heads, queries=seq, keys=seq, width=width, causal=True)
        key = {"batch": batch, "heads": heads, "kv": kv, "seq": seq, "width": width}
        ways = {"default": None}
        if ON:
            ways |= {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        for way, backend in ways.items():

            def forward():
                if backend is None:
                    return F.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=heads != kv
                    )
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=heads != kv
                    )

            row(rows, f"forward {way}", forward, fused_attention_s(MODEL, "bf16", asked), **key)
            try:
                out = forward()
                g = torch.randn_like(out)
                row(
                    rows,
                    f"backward {way}",
                    lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True),
                    fused_attention_backward_s(MODEL, "bf16", asked),
                    **key,
                )
            except Exception as error:
                rows.append({"what": f"backward {way}", "failed": str(error)[:200], **key})
        results.put("attention", rows)


def elementwise() -> None:
    rows: list = []
    tokens, h, ffn, vocab = (64, 64, 128, 256) if SMALL else (8192, 4096, 16384, 51200)
    x, wide = random(tokens, h, grad=True), random(tokens, ffn, grad=True)
    gate = random(tokens, ffn, grad=True)
    both = 2 * tokens * h * 2

    def with_backward(name, module, *inputs, moved: float, back: float) -> None:
        row(rows, f"{name} forward", lambda: module(*inputs), stream_s(MODEL, moved))
        out = module(*inputs)
        g = torch.randn_like(out)
        leaves = [i for i in inputs if i.requires_grad] + [*getattr(module, "parameters", list)()]
        row(
            rows,
            f"{name} backward",
            lambda: torch.autograd.grad(out, leaves, g, retain_graph=True),
            stream_s(MODEL, back),
        )

    with_backward(
        "LayerNorm", torch.nn.LayerNorm(h).to(DEVICE, BF16), x, moved=both, back=2.5 * both
    )
    with_backward("RMSNorm", torch.nn.RMSNorm(h).to(DEVICE, BF16), x, moved=both, back=2.5 * both)
    with_backward(
        "gelu",
        partial(F.gelu, approximate="tanh"),
        wide,
        moved=2 * wide.numel() * 2,
        back=3 * wide.numel() * 2,
    )
    with_backward(
        "silu times",
        lambda a, b: F.silu(a) * b,
        gate,
        wide,
        moved=5 * wide.numel() * 2,
        back=7.5 * wide.numel() * 2,
    )
    row(rows, "residual add", lambda: x.detach() + x.detach(), stream_s(MODEL, 1.5 * both))
    heads = random(
        4 if not SMALL else 1,
        32 if not SMALL else 2,
        2048 if not SMALL else 32,
        128 if not SMALL else 16,
    )
    angles = rope_angles(heads.shape[-1], heads.shape[2], DEVICE)
    row(rows, "rotate eager", lambda: rotate(heads, angles), stream_s(MODEL, 2 * heads.numel() * 2))
    compiled = torch.compile(rotate)
    row(
        rows,
        "rotate compiled",
        lambda: compiled(heads, angles),
        stream_s(MODEL, 2 * heads.numel() * 2),
    )
    logits = random(1, 2048 if not SMALL else 32, vocab, grad=True)
    targets = torch.randint(vocab, (1, logits.shape[1]), device=DEVICE)
    from zeropp.price.pieces import loss_s

    loss_f, loss_b = loss_s(MODEL, program_named("zeropp"), "bf16", logits.numel())
    row(rows, "loss forward", lambda: cross_entropy(logits, targets), loss_f)
    loss = cross_entropy(logits, targets)
    row(rows, "loss backward", lambda: torch.autograd.grad(loss, logits, retain_graph=True), loss_b)
    flat = torch.randn(2**14 if SMALL else 2**27, device=DEVICE)
    short = torch.empty_like(flat, dtype=BF16)
    row(rows, "cast fp32 to bf16", lambda: short.copy_(flat), stream_s(MODEL, 6 * flat.numel()))
    row(rows, "add bf16 to fp32", lambda: flat.add_(short), stream_s(MODEL, 10 * flat.numel()))
    row(rows, "zeros fp32", lambda: flat.zero_(), stream_s(MODEL, 4 * flat.numel()))
    parameter = torch.nn.Parameter(flat)
    parameter.grad = torch.randn_like(flat)
    optimizer = build_optimizer([parameter], OptimizerConfig(kind="adamw"))
    row(
        rows,
        "AdamW fused",
        optimizer.step,
        stream_s(MODEL, 28 * flat.numel()),
        parameters=flat.numel(),
    )
    row(
        rows,
        "norm of gradients",
        lambda: torch.linalg.vector_norm(parameter.grad),
        stream_s(MODEL, 4 * flat.numel()),
    )
    results.put("elementwise", rows)


def blocks() -> None:
    rows: list = []
    program = program_named("zeropp")
    cases = [
        ("gpt_6_2b", 4, True),
        ("gpt_6_2b", 1, True),
        ("gpt_14_6b", 2, False),
        ("llama_8b", 1, True),
        ("gpt_28_3b", 1, False),
    ]
    cases = [("gpt_tiny", 1, True), ("llama_tiny", 1, False)] if SMALL else cases
    for name, size, compiles in cases:
        shape = shape_of(name)
        for compiled in (False, True) if compiles else (False,):
            key = {"model": name, "microbatch": size, "compiled": compiled}
            try:
                rows.append(_block(shape, size, compiled, program) | key)
            except Exception as error:
                rows.append(key | {"failed": f"{type(error).__name__}: {str(error)[:300]}"})
            results.put("blocks", rows)


def _block(shape, size, compiled, program) -> dict:
    block = build_piece(shape, 1, 0, DEVICE).to(BF16)
    store = WeightGradStore()
    defer_weight_grads([block], store)
    for parameter in block.parameters():
        parameter.grad_dtype = None
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    if compiled:
        block.compile()
    x = random(size, shape.seq, shape.hidden, grad=True)
    g = torch.randn_like(x)
    events = {}
    host = {"F": [], "I": [], "W": [], "B": []}

    def marked(kind, run):
        start = time.perf_counter()
        if ON:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        value = run()
        if ON:
            end.record()
            events.setdefault(kind, []).append((begin, end))
        host[kind].append(time.perf_counter() - start)
        return value

    def backward(out):
        with backward_of_chunk():
            out.backward(g)

    rounds = 3 if SMALL else 14
    for number in range(rounds):
        if number == 2:  # compiled, and kernels loaded
            sync()
            events.clear()
            for values in host.values():
                values.clear()
        x.grad = None
        out = marked("F", lambda: block(x))
        store.begin(number)
        marked("I", lambda: backward(out))
        store.end()
        marked("W", lambda: store.run(number))
        out = block(x)
        x.grad = None
        marked("B", lambda: backward(out))
    sync()
    median = lambda values: sorted(values)[len(values) // 2]  # noqa: E731
    found = {kind: median(v) for kind, v in host.items()}
    result = {"host_s": found}
    if ON:
        result["device_s"] = {
            k: median([b.elapsed_time(e) / 1e3 for b, e in pairs]) for k, pairs in events.items()
        }
    program = program_as_run("zeropp", compiled=compiled, rotates=shape.family == "llama")
    work = Work(
        shape=shape,
        device=MODEL,
        program=program,
        precision="bf16",
        recompute="none",
        microbatch=size,
        tp=1,
        sequence_parallel=False,
        accumulated=6.0,
    )
    priced = piece_times(work, 0.0, 0.0, 0.0).block
    result["model_s"] = {
        "F": priced.forward,
        "I": priced.backward_input,
        "W": priced.backward_weight,
    }
    return result


def main() -> None:
    results.put("device", torch.cuda.get_device_name() if ON else "cpu")
    results.put("preset", vars(MODEL) if hasattr(MODEL, "__dict__") else str(MODEL))
    with gpu_alone("prices"), Watch() as watch:
        for part in (right, ceilings, blocks, products, attention, elementwise):
            if part.__name__ not in os.environ.get("PARTS", part.__name__).split():
                continue
            with results.part(part.__name__):
                part()
            if ON:
                torch.cuda.empty_cache()
        results.put("clocks", watch.summary())
    log("prices done")


main()
sys.stdout.flush()
os._exit(0)
