"""Models of Hugging Face and the files of their trainers: what is understood, named and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.explain import huggingface, torchtitan
from benchmarks.explain.answer import settled
from benchmarks.explain.question import Question, ask
from benchmarks.specification import SpecError
from tests.unit.explained_files import DEEPSPEED, LLAMA, SHAPE_8B, TOML, sizes

ACCELERATE = """
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_version: 2, made_up: 1}
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
DEGREES = """parallelism_config: {parallelism_config_dp_replicate_size: 4,
  parallelism_config_dp_shard_size: 2, parallelism_config_cp_size: 2, made_up: null}
"""
INLINE = """distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, made_up: 1}
num_processes: 16
num_machines: 2
dynamo_backend: INDUCTOR
mixed_precision: bf16
downcast_bf16: 'yes'
parallelism_config: {parallelism_config_sp_size: 4, parallelism_config_tp_size: 1}
"""


def test_huggingface() -> None:
    reading = huggingface.read(LLAMA, 8)
    assert sizes(reading.model) == SHAPE_8B
    assert "give model.seq" in reading.derived[0]
    for change, said in (
        ({"model_type": "x", "layer_types": ["attention"], "mamba_n_heads": 8}, "are a Llama's"),
        ({"num_local_experts": 8}, "mixtures of experts"),
        ({"model_type": "falcon"}, "model_type='falcon'"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"linear_conv_kernel_dim": 4}, "state-space and linear-attention"),
    ):
        with pytest.raises(SpecError, match=said):
            huggingface.read(LLAMA | change, 8)
    apertus = huggingface.read(LLAMA | {"model_type": "apertus", "hidden_dropout": 0.0}, 8)
    assert (apertus.model["gated_mlp"], len(apertus.named)) == (False, 1)  # norms of queries, keys
    window = huggingface.read(LLAMA | {"sliding_window": 4096}, 8)
    assert window.named == ["sliding_window=4096: attention is simulated over the whole sequence"]
    seen = {"model_type": "gemma3", "text_config": LLAMA | {"model_type": "gemma3_text"}}
    text = huggingface.read(seen, 8)
    assert (text.model["head_width"], text.model["tied_embeddings"]) == (256, False)
    assert "model_type=gemma3: its text alone is simulated" in text.named
    seen = {"model_type": "qwen3_vl", "text_config": LLAMA | {"model_type": "qwen3_vl_text"}}
    assert sizes(huggingface.read(seen, 8).model) == sizes(huggingface.read(LLAMA, 8).model)


def beside_llama(place: Path, name: str, text: str, *words: str) -> Question:
    """The question of a trainer's file beside a model of Hugging Face, on H100 GPUs."""
    (place / name).write_text(text, encoding="utf-8")
    has_mark = name.endswith(".json")  # a byte-order mark, as some editors write it
    (place / "config.json").write_text(json.dumps(LLAMA), "utf-8-sig" if has_mark else "utf-8")
    files = [str(place / "config.json"), str(place / name)]
    return ask(files, ["cluster=h100", "model.seq=4096", *words], [])


@pytest.mark.parametrize(
    ("name", "text", "contender", "degrees", "batch"),
    [
        ("d.json", DEEPSPEED, "deepspeed", {"replicate": 16, "replicate_zero": 2}, 64),
        ("d.json", DEEPSPEED.replace(': 2}', ': 3, "stage3_prefetch_bucket_size": 15e6}'),
         "deepspeed_zero3", {"shard": 16, "prefetch_bucket_size": 15_000_000}, 64),
        ("d.json", DEEPSPEED.replace(': 2}', ': 3}'), "deepspeed_zero3", {"compile": False}, 64),
        ("d.json", DEEPSPEED.replace(': 2}', ': 3}, "compile": {"deepcompile": true}'),
         "deepspeed_zero3", {"compile": True}, 64),
        ("d.json", DEEPSPEED.replace("  ", "\t"), "deepspeed", {"replicate_zero": 2}, 64),
        ("a.yaml", ACCELERATE, "fsdp", {"shard": 8, "replicate": 2}, 128),
        ("a.yaml", ACCELERATE.replace("HYBRID", "FULL"), "fsdp", {"shard": 16}, 128),
        ("a.yaml", ACCELERATE, "fsdp", {"reduce_every": "step", "reduce_dtype": "bf16"}, 128),
        ("a.yaml", ACCELERATE, "fsdp", {"reshard_after_forward": True}, 128),
        ("a.yaml", ACCELERATE.replace("made_up", "fsdp_reshard_after_forward: false, made_up"),
         "fsdp", {"reshard_after_forward": False, "reshard_after_backward": True}, 128),
        ("a.yaml", ACCELERATE.replace("made_up", "fsdp_activation_checkpointing: 'false', made_up"),
         "fsdp", {"recompute": "none"}, 128),
        ("a.yaml", ACCELERATE.replace("made_up", "fsdp_reshard_after_forward: 'no', made_up"),
         "fsdp", {"reshard_after_forward": False}, 128),
        ("d.json", DEEPSPEED.replace(': 2}', ': 2, "reduce_bucket_size": "4e8"}'), "deepspeed",
         {"reduce_bucket_size": 400_000_000}, 64),
        ("a.yaml", INLINE, "deepspeed_zero3", {"shard": 4, "context": 4, "compile": True}, 128),
        ("a.yaml", ACCELERATE.replace("HYBRID_SHARD", "2"), "fsdp",
         {"reshard_after_forward": False, "shard": 16}, 128),
        ("a.yaml", ACCELERATE.replace("HYBRID", "FULL") + DEGREES, "fsdp", {"context": 2}, 128),
    ],
)  # fmt: skip
def test_trainers_around_a_model_of_hugging_face(
    name: str, text: str, contender: str, degrees: dict[str, int], batch: int, tmp_path: Path
) -> None:
    words = ["num_gpus=16", *["global_batch=128"] * (name == "a.yaml")]
    asked = beside_llama(tmp_path, name, text, *words)
    assert asked.contender.name == contender
    assert asked.reading.traits["eager"] == "llama"  # the model's own code
    assert {key: getattr(asked.knobs, key) for key in degrees} == degrees
    assert asked.task.global_batch == batch
    assert sizes(asked.reading.model) == SHAPE_8B
    assert any("made_up=1: not known here" in line for line in asked.reading.named)
    assert not any("made_up=None" in line for line in asked.reading.named)  # null: not set


def test_what_does_not_fit_says_that_offloading_was_left_out(tmp_path: Path) -> None:
    sent = DEEPSPEED.replace("2}", '3, "offload_optimizer": {"device": "cpu"}}')
    sent = "{" + sent[sent.index('"bf16"') :]  # it leaves the microbatch open
    one = beside_llama(tmp_path, "d.json", sent, "num_gpus=1", "global_batch=4")
    with pytest.raises(SpecError, match=r"fits .*offload_optimizer.* without offloading"):
        settled(one)


def test_sizes_that_deepspeeds_file_leaves_open_are_its_defaults_or_the_trainers(
    tmp_path: Path,
) -> None:
    """They were searched, and the best of them called the file's own plan."""
    stage_3 = DEEPSPEED.replace("2}", "3}")
    sizes = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")
    for text, expected in (
        (stage_3, (500_000_000, 50_000_000, 100_000)),
        (stage_3.replace("3}", '3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": '
                         '"auto", "stage3_param_persistence_threshold": "auto"}'),
         (4096**2, int(0.9 * 4096**2), 40960)),
    ):  # fmt: skip
        knobs = beside_llama(tmp_path, "d.json", text, "num_gpus=16").knobs
        assert tuple(getattr(knobs, size) for size in sizes) == expected
        assert {knob for knob, value in vars(knobs).items() if value == "auto"} == {
            "recompute_blocks"
        }
    knobs = beside_llama(tmp_path, "d.json", DEEPSPEED, "num_gpus=16").knobs
    assert vars(knobs)["reduce_bucket_size"] == 500_000_000
    assert vars(knobs)["use_multi_rank_bucket_allreduce"] is True


def test_an_optimizer_that_is_not_adam_is_named(tmp_path: Path) -> None:
    for kind, named in (("AdamW", False), ("Muon", True)):
        text = DEEPSPEED.replace('"made_up"', f'"optimizer": {{"type": "{kind}"}}, "made_up"')
        asked = beside_llama(tmp_path, "d.json", text, "num_gpus=16")
        assert any("simulated with Adam" in line for line in asked.reading.named) == named
        reading = torchtitan.read(f'{TOML}\n[optimizer]\nname = "{kind}"', 64)
        assert any("simulated with Adam" in line for line in reading.named) == named


@pytest.mark.parametrize(("ranks", "read"), [(8, 8), (16, 1), (32, 1), (0, 1)])
def test_a_second_copy_of_zero_plus_plus_is_one_over_fewer_ranks(
    ranks: int, read: int, tmp_path: Path
) -> None:
    key = f', "zero_hpz_partition_size": {ranks}}}'
    for stage, expected in ((3, read), (2, None)):
        text = DEEPSPEED.replace(": 2}", f": {stage}{key}")
        asked = beside_llama(tmp_path, "d.json", text, "num_gpus=16")
        assert getattr(asked.knobs, "zero_hpz_partition_size", None) == expected
        assert not any("hpz" in line for line in asked.reading.named)


@pytest.mark.parametrize(
    ("text", "precision", "derived"),
    [
        (DEEPSPEED, "bf16", ""),
        (DEEPSPEED.replace("true", '"auto"'), "bf16", "bf16.enabled=auto: simulated in bf16"),
        (DEEPSPEED.replace("true", "false"), "fp32", ""),
        (DEEPSPEED.replace("bf16", "torch_autocast"), "bf16", ""),
        (DEEPSPEED.replace("bf16", "fp16"), "bf16", "fp16.enabled: simulated as bf16"),
        (ACCELERATE.replace("bf16", "fp16"), "bf16", "mixed_precision=fp16: simulated as bf16"),
        (ACCELERATE.replace("bf16", "'no'"), "fp32", "mixed_precision=no: simulated in fp32"),
    ],
)
def test_precision_that_the_file_leaves_to_the_script(
    text: str, precision: str, derived: str, tmp_path: Path
) -> None:
    name = "d.json" if text[0] == "{" else "a.yaml"
    asked = beside_llama(tmp_path, name, text, "num_gpus=16", "global_batch=128")
    assert asked.task.precision == precision
    assert any(derived in line for line in asked.reading.derived)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('gpu": 1', 'gpu": 0', "train_micro_batch_size_per_gpu=0: must be at least 1"),
        ('gpu": 1', 'gpu": -2', "train_micro_batch_size_per_gpu=-2: must be at least 1"),
        ('gpu": 1', 'gpu": "${MBS}"', "gpu='.{MBS}': must be a whole number"),
        ('gpu": 1', 'gpu": 1.5', "train_micro_batch_size_per_gpu=1.5: must be a whole number"),
        ('gpu": 1', 'gpu": null', "global_batch: the file does not say it, or says auto .give"),
        ('steps": 4', 'steps": "auto"', "global_batch: the file does not say it, or says auto"),
        ('steps": 4', 'steps": 0', "gradient_accumulation_steps=0: must be"),
        ('steps": 4', 'steps": 4, "train_batch_size": 128', "train_batch_size=128: is not .*=1 x "
         "gradient_accumulation_steps=4 x 16 data-parallel ranks, so"),
        ('gpu": 1, "gradient_accumulation_steps": 4', 'gpu": 3, "train_batch_size": 64',
         "train_batch_size=64: is not train_micro_.*=3 x 16 data-parallel ranks x N, so"),
        ('"stage": 2', '"stage": 4', "zero_optimization.stage=4: must be 0, 1, 2 or 3"),
        ('"stage": 2', '"stage": -1', "zero_optimization.stage=-1: must be"),
    ],
)  # fmt: skip
def test_numbers_that_deepspeed_cannot_have_are_refused(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    assert old in DEEPSPEED
    with pytest.raises(SpecError, match=said) as refused:
        beside_llama(tmp_path, "d.json", DEEPSPEED.replace(old, new), "num_gpus=16")
    assert "\n" not in str(refused.value)


def test_what_stands_beside_accelerates_section_of_deepspeed_is_named(tmp_path: Path) -> None:
    reading = beside_llama(tmp_path, "a.yaml", INLINE, "global_batch=128").reading
    assert [line.split(":")[0] for line in reading.named] == ["made_up=1", "downcast_bf16"]
    accumulates = INLINE.replace("made_up", "gradient_accumulation_steps: 4, made_up")
    assert beside_llama(tmp_path, "a.yaml", accumulates, "global_batch=32").microbatch_size == 2
    with pytest.raises(SpecError, match="=4 x 4 data-parallel ranks x N"):
        beside_llama(tmp_path, "a.yaml", accumulates, "global_batch=24")
    with pytest.raises(
        SpecError, match="mixed_precision=fp8: cannot be simulated beside DeepSpeed"
    ):
        beside_llama(tmp_path, "a.yaml", INLINE.replace("bf16\n", "fp8\n"), "global_batch=128")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            (DEGREES, DEGREES.replace("dp_shard", "tp")),
            "tp_size=2: cannot be simulated .* contender.tp=2",
        ),
        (("num_processes: 16", ""), "the file does not say it .give num_gpus=N"),
        (
            ("HYBRID_SHARD", "NO_SHARD"),
            "=NO_SHARD: cannot be simulated .use FULL_SHARD, HYBRID_SHARD or",
        ),
    ],
)
def test_what_accelerate_leaves_open_is_refused(
    changed: tuple[str, str], said: str, tmp_path: Path
) -> None:
    text = (ACCELERATE + DEGREES).replace(*changed)
    with pytest.raises(SpecError, match=said):
        beside_llama(tmp_path, "a.yaml", text, "global_batch=64")
