"""What people bring, by kind: scripts, files and words that were once read wrong, each in its
smallest form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.explain.question import Question, ask
from benchmarks.specification import SpecError

MODEL = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16"
FLAGS = f"{MODEL} --micro-batch-size 1 --global-batch-size 128 --vocab-size 50257"
SLURM = f"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=4   # of one kind
srun torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_PER_NODE pretrain_gpt.py \\
    {FLAGS} \\
    --tensor-model-parallel-size $SLURM_GPUS_PER_NODE --pipeline-model-parallel-size 2
"""
NEMO = """torchrun --nproc_per_node=8 megatron_llama_pretraining.py trainer.precision=bf16 \\
    trainer.devices=8 trainer.num_nodes=2 model.num_layers=40 model.hidden_size=5120 \\
    model.ffn_hidden_size=13824 model.num_attention_heads=40 ++model.micro_batch_size=1 \\
    model.global_batch_size=32 model.tensor_model_parallel_size=4 model.sequence_parallel=True \\
    model.optim.name=distributed_fused_adam model.encoder_seq_length=4096 model.data.data_prefix=
"""
LLAMA_13B = {
    "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
    "vocab_size": 32001, "max_position_embeddings": 4096,
}  # fmt: skip
PIPELINE = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 1,
    "pipeline": {"stages": 4, "partition": "uniform", "activation_checkpoint_interval": 1},
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
}
TITAN = """[model]
name = "llama3"
flavor = "13B_company"
[training]
local_batch_size = 2
[parallelism]
tensor_parallel_degree = 2
"""
SIZES = "layers=40 hidden=5120 heads=40 kv_heads=40 ffn=13824 vocab=32000"


def asked(place: Path, files: dict[str, str], *words: str) -> Question:
    """The question of files with these texts, on H100 GPUs."""
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    given = [f"cluster={word}" for word in ("h100",) if not any("cluster=" in w for w in words)]
    return ask([str(place / name) for name in files], [*given, *words], [])


@pytest.mark.parametrize(
    ("directives", "words", "num_gpus"),
    [
        ("", (), 16),
        ("", ("num_gpus=32",), 32),  # nodes follow from what is given
        ("#SBATCH -N 2\n#SBATCH --gres=gpu:a100:4", (), 8),
        ("#SBATCH -N2 --gres=gpu:4", (), 8),
    ],
)
def test_slurms_lines_give_nodes_and_gpus(
    tmp_path: Path, directives: str, words: tuple[str, ...], num_gpus: int
) -> None:
    text = SLURM
    if directives:
        text = f"#!/bin/bash\n{directives}\n" + SLURM.partition("# of one kind\n")[2]
    question = asked(tmp_path, {"job.sh": text}, *words)
    knobs = vars(question.knobs)
    assert (question.task.num_gpus, knobs["tp"], knobs["pp"]) == (num_gpus, 4, 2)
    assert knobs["replicate"] == num_gpus // 8


@pytest.mark.parametrize(
    ("launch", "num_gpus"),
    [
        ('srun -l --nodes=2 --ntasks-per-node=8 sh -c "cd x; module load y; {}"', 16),
        ("srun -n 24 {}", 24),
        ("mpirun -np 8 {}", 8),
        ("deepspeed --num_nodes 2 --num_gpus 4 {}", 8),
        ("accelerate launch --num_processes 32 --num_machines 4 {}", 32),
    ],
)
def test_launchers_give_the_number_of_gpus(tmp_path: Path, launch: str, num_gpus: int) -> None:
    command = launch.format(f"python -u pretrain_gpt.py {FLAGS}")
    assert asked(tmp_path, {"run.sh": command}).task.num_gpus == num_gpus


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("--num-layers 32", "--num-layers", "--num-layers: has no value"),
        ("--num-layers 32", "--num-layers=$LAYERS", "--num-layers='': must be a whole number"),
        ("-size $SLURM_GPUS_PER_NODE", "-size $TP", "parallel-size: has no value .* TP=4 zeropp"),
        ("--bf16", "--bf16 --normalization $NORM --swiglu", "--normalization: has no value"),
        ("--bf16", "--bf16 --hidden-dropout --swiglu", "--hidden-dropout: has no value"),
    ],
)
def test_a_flag_without_its_value_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    """A number was read as True, which is 1: a model of one layer, or TP 1."""
    assert old in SLURM
    with pytest.raises(SpecError, match=said):
        asked(tmp_path, {"job.sh": SLURM.replace(old, new)})


def test_words_of_nemo_in_a_script(tmp_path: Path) -> None:
    question = asked(tmp_path, {"nemo.sh": NEMO}, "model.vocab=32000")
    knobs, shape = vars(question.knobs), question.task.shape
    assert (question.task.num_gpus, knobs["tp"], knobs["replicate"]) == (16, 4, 4)
    assert (shape.family, shape.layers, shape.gates, shape.tied_embeddings) == (
        "llama", 40, 2, False,
    )  # fmt: skip
    assert (shape.vocab, shape.dropout, question.microbatch_size) == (32256, 0, 1)
    gpt = NEMO.replace("megatron_llama", "megatron_gpt")
    shape = asked(tmp_path, {"nemo.sh": gpt}, "model.vocab=32000").task.shape
    assert (shape.family, shape.gates, shape.dropout) == ("gpt", 1, 0.1)


def test_deepspeeds_pipeline_section(tmp_path: Path) -> None:
    files = {"ds.json": json.dumps(PIPELINE), "config.json": json.dumps(LLAMA_13B)}
    question = asked(tmp_path, files, "num_gpus=64", "model.seq=4096")
    knobs = vars(question.knobs)
    assert (knobs["pp"], knobs["replicate"], knobs["recompute"]) == (4, 16, "full")
    named = ["pipeline.partition=uniform: priced with stages of equal cost"]
    assert question.reading.named == named
    zero3 = files | {"ds.json": json.dumps(PIPELINE | {"zero_optimization": {"stage": 3}})}
    with pytest.raises(SpecError, match=r"pipeline.stages=4: no price with ZeRO-3"):
        asked(tmp_path, zero3, "num_gpus=64", "model.seq=4096")


@pytest.mark.parametrize(
    ("words", "vocab"),
    [
        ("contender=megatron_core contender.tp=8", 32768),
        ("contender=megatron_core", 32128),
        ("contender=fsdp", 32001),
        ("contender=megatron_core contender.tp=8 model.vocab=50257", 51200),
    ],
)
def test_a_vocabulary_is_padded_as_the_program_pads_it(
    tmp_path: Path, words: str, vocab: int
) -> None:
    given = [*words.split(), "num_gpus=64", "model.seq=4096", "global_batch=64"]
    question = asked(tmp_path, {"config.json": json.dumps(LLAMA_13B)}, *given)
    assert question.task.shape.vocab == vocab
    assert not any("give model.seq" in line for line in question.reading.derived)  # it is given


def test_a_companys_own_flavor_of_torchtitan(tmp_path: Path) -> None:
    words = [f"model.{word}" for word in SIZES.split()]
    question = asked(tmp_path, {"a.toml": TITAN}, "num_gpus=64", *words)
    shape = question.task.shape
    assert (shape.name, shape.layers, shape.vocab) == ("llama3_13b_company", 40, 32000)
    assert vars(question.knobs)["shard"] == 32
    with pytest.raises(SpecError, match=r"13B_company': no price .*\(give model.ffn=N model.vocab"):
        asked(tmp_path, {"a.toml": TITAN}, "num_gpus=64", *words[:-2])


def test_words_change_a_key_of_the_cluster(tmp_path: Path) -> None:
    files, given = {"job.sh": SLURM}, "cluster.device.memory_gib=96"
    cluster = asked(tmp_path, files, given, "cluster=h100").task.cluster
    assert (cluster.device.memory_gib, cluster.name) == (96, "h100 with device.memory_gib=96")
    for word, said in (
        ("cluster.device.memory=96", "cluster.device.memory=96: unknown key"),
        ("cluster.device.memory_gib=x", "cluster.device.memory_gib='x'"),
    ):
        with pytest.raises(SpecError, match=said):
            asked(tmp_path, files, word, "cluster=h100")


def test_half_precision_is_said(tmp_path: Path) -> None:
    derived = asked(tmp_path, {"job.sh": SLURM.replace("--bf16", "--fp16")}).reading.derived
    assert any(line.startswith("--fp16: priced as bf16") for line in derived)
