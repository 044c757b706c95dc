"""Configurations of other programs: what is understood, what is named, what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.explain import answer as answers
from benchmarks.explain import huggingface, megatron, torchtitan
from benchmarks.explain.__main__ import main
from benchmarks.explain.answer import answer
from benchmarks.explain.arguments import arguments_of, arguments_of_log, arguments_of_script
from benchmarks.explain.question import ask
from benchmarks.explain.screen import written_as
from benchmarks.specification import SpecError

TOML = """
# a preset for 16 H100 GPUs
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
SCRIPT = """#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=2   # nodes
SIZE=${1:-"8"}
MODEL_ARGS=(
    --num-layers 32          # blocks
    --hidden-size 4096 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --ffn-hidden-size 14336 --swiglu --normalization RMSNorm
    --position-embedding-type rope --seq-length 4096 --disable-bias-linear
    --untie-embeddings-and-output-weights
)
if [[ "$SIZE" == "8" ]]; then
    MODEL_ARGS+=("--attention-dropout 0" "--hidden-dropout 0")
else
    MODEL_ARGS+=(--num-experts 8)
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NUM_NODES} \\
    pretrain_gpt.py ${MODEL_ARGS[@]} --tensor-model-parallel-size 2 \\
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 8 \\
    --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 128256 \\
    --tokenizer-type NullTokenizer --use-distributed-optimizer --sequence-parallel \\
    --overlap-grad-reduce --made-up-flag 3 --log-interval 1
"""
NEMO = """
trainer: {num_nodes: 2, devices: 8, precision: bf16}
model:
  {micro_batch_size: 1, global_batch_size: 64, tensor_model_parallel_size: 2,
   pipeline_model_parallel_size: 2, encoder_seq_length: 4096, num_layers: 32, hidden_size: 4096,
   ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8, activation: fast-swiglu,
   normalization: rmsnorm, position_embedding_type: rope, sequence_parallel: true,
   share_embeddings_and_output_weights: false, optim: {name: distributed_fused_adam}}
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
SHAPE_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}


def sizes(model: dict[str, object]) -> dict[str, object]:
    """The sizes of ``SHAPE_8B`` in a reading's model."""
    return {key: model[key] for key in SHAPE_8B}


def test_torchtitan() -> None:
    reading = torchtitan.read(TOML, None)
    assert sizes(reading.model) == SHAPE_8B
    assert reading.settings["num_gpus"] == 16  # from the comment, which is said
    assert "preset for 16" in reading.derived[0]
    assert reading.settings["global_batch"] == 8 * 4  # per data-parallel rank
    assert reading.settings["microbatch_size"] == 1
    wanted = {"tp": 2, "pp": 2, "shard": 4, "chunks": 2, "schedule": "interleaved_1f1b"}
    assert {key: reading.knobs[key] for key in wanted} == wanted
    assert reading.named == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"8B"', '"17B"', "model.flavor='17B': no price"),
        ('"llama3"', '"deepseek_v3"', "model.name='deepseek_v3'"),
        ("seq_len = 4096", "seq_len = 'x'", "training.seq_len='x': must be a whole number"),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 3", "give a multiple of 6"),
        ("Interleaved1F1B", "MyOwn", "pipeline_parallel_schedule='MyOwn'"),
        ("preset for 16 H100", "preset", "give num_gpus=N"),
        ("[model]", "model]", "not a TOML file"),
        (
            "[parallelism]",
            "[parallelism]\ncontext_parallel_degree = 2",
            "context_parallel_degree=2",
        ),
    ],
)
def test_torchtitan_is_refused_in_one_line(old: str, new: str, said: str) -> None:
    assert old in TOML
    with pytest.raises(SpecError) as refused:
        torchtitan.read(TOML.replace(old, new), None)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_has_no_price_is_named() -> None:
    changed = TOML.replace('"8B"', '"8B"\nconverters = ["float8"]\nnew_key = 1')
    named = " ".join(torchtitan.read(changed, None).named)
    assert "no price for 8-bit products" in named
    assert "model.new_key=1: not known here" in named


def test_megatron_script() -> None:
    reading = megatron.read(SCRIPT, None)
    assert sizes(reading.model) == SHAPE_8B
    assert reading.model["vocab"] == 128512  # one more token, then a multiple of 128 x 2
    assert reading.model["dropout"] == 0
    assert reading.settings["num_gpus"] == 16
    wanted = {"tp": 2, "pp": 2, "replicate": 4, "chunks": 2, "replicate_zero": 1}
    assert {key: reading.knobs[key] for key in wanted} == wanted
    assert reading.traits["overlap_reduction"]
    assert not reading.traits["overlap_updated"]
    assert reading.named == ["--made-up-flag=3: not known here, left out of the price"]
    assert "--log-interval=1" in reading.harmless


def test_the_same_configuration_in_every_dialect() -> None:
    """Script, command line, log, YAML of a test and NeMo's YAML say the same."""
    values, _, _ = arguments_of_script(SCRIPT, Path())
    log = "------------------------ arguments ------------------------\n" + "\n".join(
        f"  {flag[2:].replace('-', '_')} {'.' * 30} {value}" for flag, value in values.items()
    )
    assert arguments_of_log(log) == values
    words = [word for flag, v in values.items() for word in ([flag] if v is True else [flag, v])]
    assert arguments_of(words) == values
    lines = "\n".join(f"  {flag}: {str(v).lower()}" for flag, v in values.items() if v is not None)
    tested = megatron.read(
        f"MODEL_ARGS:\n{lines}".replace("rmsnorm", "RMSNorm").replace("null", "Null"), 16
    )
    script, nemo = megatron.read(SCRIPT, 16), megatron.read_nemo(NEMO, None)
    assert sizes(tested.model) == sizes(script.model) == sizes(nemo.model)
    degrees = ("tp", "pp", "replicate", "replicate_zero", "sequence_parallel")
    core = megatron.read_nemo(
        NEMO.replace("distributed_fused_adam", "mcore_distributed_optim"), None
    )
    for name in degrees:
        assert tested.knobs[name] == script.knobs[name] == nemo.knobs[name], name
        assert core.knobs[name] == nemo.knobs[name], name
    assert nemo.settings["num_gpus"] == 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SCRIPT.replace('SIZE=${1:-"8"}', "SIZE=4"), "--num-experts=8: no price for mixtures"),
        (SCRIPT.replace("NUM_NODES=2", "NUM_NODES=1").replace("-size 2 ", "-size 16 "), "num_gpus"),
        ("echo hello", "no line runs a Python file"),
        ("case $X in\na) ;;\nesac", "no line runs a Python file"),
        ("if true; then\n", "bash: line 2: syntax error: unexpected end of file"),
        (SCRIPT.replace("--hidden-size 4096", ""), "--hidden-size: missing"),
    ],
)
def test_megatron_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        megatron.read(text, None)
    assert "\n" not in str(refused.value)


def test_huggingface() -> None:
    reading = huggingface.read(json.dumps(LLAMA), 8)
    assert sizes(reading.model) == SHAPE_8B
    assert "give model.seq" in reading.derived[0]
    for change, said in (
        ({"num_local_experts": 8}, "mixtures of experts"),
        ({"head_dim": 256}, "head_dim=256"),
        ({"model_type": "falcon"}, "model_type='falcon'"),
    ):
        with pytest.raises(SpecError, match=said):
            huggingface.read(json.dumps(LLAMA | change), 8)
    window = huggingface.read(json.dumps(LLAMA | {"sliding_window": 4096}), 8)
    assert window.named == ["sliding_window=4096: attention is priced over the whole sequence"]


@pytest.mark.parametrize(
    ("dialect", "name", "text"), [("torchtitan", "a.toml", TOML), ("megatron", "a.sh", SCRIPT)]
)
def test_an_answer_is_written_back_as_the_same_plan(
    dialect: str, name: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = answer(ask([str(path)], ["cluster=h100"], []), search_s=0.5)
    assert found.fits
    assert found.asked.plan.layout.tp == found.asked.plan.layout.pp == 2
    assert all(change.step_s < found.asked.step_s for change in found.changes.values())
    assert [one.contender.name for one in found.best][-1] == "zeropp"
    words = written_as(dialect, found.asked.plan, found.asked.candidate)
    if dialect == "megatron":
        again = ask([], ["cluster=h100", "num_gpus=16", "model.vocab=128512"], words.split())
    else:
        path.write_text('[model]\nname = "llama3"\nflavor = "8B"\n' + words)
        again = ask([str(path)], ["cluster=h100", "num_gpus=16"], [])
    second = again.contender.simulated(again.task, found.asked.candidate)
    assert second.step_s == pytest.approx(found.asked.step_s, rel=1e-9)
    assert again.knobs == found.asked.candidate.knobs


def test_the_command_answers_on_one_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ["num_gpus=8", "cluster=h100", "global_batch=32", "model.seq=4096", "contender.tp=2"]
    words += ["contender.pp=1", "contender.recompute=none"]
    monkeypatch.setattr(answers, "SEARCH_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["explain", str(path), *words, "--as", "overrides"])
    assert main() in (0, 1), capsys.readouterr().err
    told = capsys.readouterr().out
    for said in ("Plan as understood", "GiB of each pipeline rank", "Time: the model's kernels"):
        assert said in told
    assert "contender=megatron_core" in told.splitlines()[-1]
    monkeypatch.setattr(sys, "argv", ["explain", str(path), "clutser=h100"])
    assert main() == 2
    assert capsys.readouterr().err.count("\n") == 1
