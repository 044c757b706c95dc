"""What people bring, by kind: scripts, files and words that were once read wrong, each in its
smallest form."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.explain import arguments
from benchmarks.explain.answer import Answer, answer, changes_of, settled
from benchmarks.explain.question import Question, ask
from benchmarks.explain.screen import (
    lost,
    memory_text,
    seconds_by_kind,
    show,
    written_as,
)
from benchmarks.report.ratio_errors import memory_room
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import PRICED
from tests.unit.simulated_task import task
from zeropp.choose.contender import describe

MODEL = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16"
FLAGS = f"{MODEL} --micro-batch-size 1 --global-batch-size 128 --vocab-size 50257"
SLURM = f"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=4   # of one kind
srun torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_PER_NODE pretrain_gpt.py \\
    {FLAGS} \\
    --tensor-model-parallel-size $SLURM_GPUS_PER_NODE --pipeline-model-parallel-size 2
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
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
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
        ("torchrun --nproc-per-node 8 $(cat <<EOF\n{}\nEOF\n)", 8),
        ('docker run --gpus 8 torch bash -c "torchrun --nnodes 3 --nproc-per-node 8 {}"', 24),
        ('docker run --gpus all torch:25 bash -c "torchrun --nproc-per-node 8 {}"', 8),
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
        ("--num-layers 32", "--num-layers=$LAYERS", "--num-layers: has no value"),
        ("-size $SLURM_GPUS_PER_NODE", "-size $TP", "parallel-size: has no value .* TP=4 zeropp"),
        ("--bf16", "--bf16 --normalization $NORM --swiglu", "--normalization: has no value"),
        ("--bf16", "--bf16 --hidden-dropout=$P", "--hidden-dropout: has no value"),
        ("--bf16", "--bf16 --hidden-dropout --swiglu", "--hidden-dropout: has no value"),
    ],
)
def test_a_flag_without_its_value_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    """A number was read as True, which is 1: a model of one layer, or TP 1."""
    assert old in SLURM
    with pytest.raises(SpecError, match=said):
        asked(tmp_path, {"job.sh": SLURM.replace(old, new)})


@pytest.mark.parametrize(
    ("before", "words", "said"),
    [
        ("", "--nnodes $NODES", r"--nnodes: \$NODES is not set .*NODES=2 zeropp"),
        ("N=${WORLD_SIZE}", '--nnodes="$N"', r"--nnodes: \$WORLD_SIZE is not set"),
        ("", '--nnodes "$NODES" --node-rank 0', r"--nnodes: \$NODES is not set"),
        ("N=$(cat hosts | wc -l)", "--nnodes $N", r"--nnodes: \$N is not set .give num_gpus=N"),
        (
            "G=$(python3 -c x)\nif false; then G=$K; fi",
            "--nproc-per-node $G",
            r"\$G is not set \(give num_gpus=N\)$",
        ),
        ("", "--num_processes $((8 * NODES))", r"--num_processes: \$NODES is not set"),
        ("A='--nproc-per-node $GPUS'", "$A --nnodes 2", r"--nproc-per-node: \$GPUS is not set"),
        ("N=${NODES:-2}", "--nnodes $N", None),
        ("", "--nnodes 1:2", None),
    ],
)
def test_a_launcher_s_variable_that_nobody_sets_is_refused(
    tmp_path: Path, before: str, words: str, said: str | None
) -> None:
    """``--nnodes $NODES`` was read as one node. Who gives the GPUs needs no variable."""
    per_node = "" if "per" in before + words else "--nproc-per-node 8"
    text = f"{before}\ntorchrun {per_node} {words} pretrain_gpt.py {FLAGS}\n"
    if said is None:
        assert asked(tmp_path, {"run.sh": text}).task.num_gpus == 16
        return
    with pytest.raises(SpecError, match=said):
        asked(tmp_path, {"run.sh": text})
    assert asked(tmp_path, {"run.sh": text}, "num_gpus=32").task.num_gpus == 32


FORMS = f"""#!/bin/bash
TP=$1
DATA="<PATH TO THE FIRST gpt2 DATASET>"
JSON=$PWD/ds_config.json
cat <<EOT > $JSON
{{
  "bf16": {{"enabled": true}}
}}
EOT
options="--data-path $DATA {FLAGS} --num-key-value-heads 8 --checkpoint-activations \\
    --tensor-model-parallel-size $TP --deepspeed --zero-stage=1 --load <PATH TO gpt2.json>"
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py $options
"""


def test_scripts_with_arguments_documents_and_placeholders(tmp_path: Path) -> None:
    """A script of Megatron-DeepSpeed in public form: it writes a file from a here-document, has
    places to fill in, and takes its degree as its first argument."""
    (tmp_path / "run.sh").write_text(FORMS)
    question = ask([str(tmp_path / "run.sh")], ["cluster=a100"], ["4"])
    knobs, shape = vars(question.knobs), question.task.shape
    assert (question.task.num_gpus, knobs["tp"], knobs["replicate"]) == (16, 4, 4)
    assert (knobs["recompute"], knobs["replicate_zero"], shape.kv_heads) == ("full", 1, 8)
    assert question.reading.named == [
        "--deepspeed: simulated with Megatron-Core's engine and layers, not DeepSpeed's"
    ]
    with pytest.raises(SpecError, match=r"parallel-size: has no value .* own arguments behind --"):
        ask([str(tmp_path / "run.sh")], ["cluster=a100"], [])
    (tmp_path / "run.sh").write_text(FORMS.replace("stage=1", "stage=3"))
    with pytest.raises(SpecError, match="--zero-stage=3: cannot be simulated"):
        ask([str(tmp_path / "run.sh")], ["cluster=a100"], ["4"])


PAIRS = f"""for WORD in "$@"; do
    KEY=$(echo $WORD | cut -d= -f1)
    export "$KEY"="${{WORD#*=}}"
done
KIND=$(tr A-Z a-z <<< "${{KIND:-NONE}}")
[ $KIND = deep ] && LAYERS=64
torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS.replace("layers 32", "layers ${LAYERS:-32}")} \\
    --tensor-model-parallel-size ${{TP:-8}} &
tail -f $LOG
"""


def test_pairs_that_a_script_cuts_with_commands_are_its_arguments(tmp_path: Path) -> None:
    """As scripts for AMD's GPUs take them; without ``cut`` every pair was lost without a word."""
    (tmp_path / "run.sh").write_text(PAIRS)
    given = [str(tmp_path / "run.sh")], ["cluster=mi300x"]
    for own, expected in (([], (8, 32)), (["TP=2", "KIND=Deep"], (2, 64))):
        question = ask(*given, own)
        assert (vars(question.knobs)["tp"], question.task.shape.layers) == expected
    (tmp_path / "run.sh").rename(tmp_path / "job.sbatch")
    other = ask([str(tmp_path / "job.sbatch")], ["cluster=mi300x"], ["TP=2", "KIND=Deep"])
    assert other.task.shape.layers == 64
    (tmp_path / "run.sh").write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS}")
    with pytest.raises(SpecError, match="TP=2: the script takes no arguments of its own"):
        ask(*given, ["TP=2"])


def test_what_a_script_leaves_running_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell was stopped at its limit, and its children were not."""
    monkeypatch.setattr(arguments, "_LIMIT_S", 0.5)
    monkeypatch.setenv("PLACE", str(tmp_path))
    with pytest.raises(SpecError, match="bash has not ended after"):
        asked(tmp_path, {"run.sh": f"(while :; do :; done) &\nX=$(wait)\n{SLURM}"})
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            assert f"PLACE={tmp_path}".encode() not in (process / "environ").read_bytes()


def test_a_folder_beside_the_script_has_what_it_sources(tmp_path: Path) -> None:
    (tmp_path / "params").mkdir()
    (tmp_path / "params/7b.sh").write_text(f"ARGS=({FLAGS})\n")
    text = "source /group/job/params/$1.sh\nmpirun -np 16 python pretrain_gpt.py ${ARGS[@]}\n"
    (tmp_path / "run.sh").write_text(text)
    assert ask([str(tmp_path / "run.sh")], ["cluster=h100"], ["7b"]).task.num_gpus == 16


ZERO = "{}={}: must be at least 1"


@pytest.mark.parametrize("degree", ["tensor_parallel", "context_parallel", "pipeline_parallel"])
@pytest.mark.parametrize("value", [0, -1])
def test_no_degree_is_below_1(tmp_path: Path, degree: str, value: int) -> None:
    """0 was read as 1, and every program refuses it."""
    flag = f"--{degree.replace('_', '-model-' if 'context' not in degree else '-')}-size"
    run = f"torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS} {flag} {value}"
    with pytest.raises(SpecError, match=ZERO.format(flag, value)):
        asked(tmp_path, {"run.sh": run})
    text = TITAN.replace("tensor_parallel_degree = 2", f"{degree}_degree = {value}")
    with pytest.raises(SpecError, match=ZERO.format(f"parallelism.{degree}_degree", value)):
        asked(tmp_path, {"a.toml": text}, "num_gpus=8")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("local_batch_size = 2", "local_batch_size = 0", ZERO.format("local_batch_size", 0)),
        ("tensor_parallel_degree = 2", "data_parallel_shard_degree = 0", "=0: 8 GPUs .*use -1"),
        ("tensor_parallel_degree = 2", "data_parallel_shard_degree = 2", "=2: .*num_gpus to 2"),
        ("tensor_parallel_degree = 2", "data_parallel_shard_degree = -1", None),
    ],
)
def test_only_torchtitans_shards_may_be_the_rest(
    tmp_path: Path, old: str, new: str, said: str | None
) -> None:
    files = {"a.toml": TITAN.replace("13B_company", "8B").replace(old, new)}
    if said is None:
        assert vars(asked(tmp_path, files, "num_gpus=8").knobs)["shard"] == 8
        return
    with pytest.raises(SpecError, match=said):
        asked(tmp_path, files, "num_gpus=8")


def test_torchtitans_degrees_give_the_number_of_gpus_unless_one_is_the_rest(tmp_path: Path) -> None:
    """It was asked for, as if no file said it."""
    text = TITAN.replace("13B_company", "8B")
    question = asked(tmp_path, {"a.toml": f"{text}data_parallel_shard_degree = 4"})
    assert (question.task.num_gpus, question.task.global_batch) == (8, 8)
    assert "num_gpus=8, the product of the file's degrees" in question.reading.derived
    with pytest.raises(SpecError, match=r"the ranks that are left \(give num_gpus=N\)"):
        asked(tmp_path, {"a.toml": text})


def test_deepspeeds_ranks_of_a_sequence_are_read(tmp_path: Path) -> None:
    """They were named as an unknown key, and there were as many more replicas."""
    run = f"torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS} --ds-sequence-parallel-size 4"
    knobs = vars(asked(tmp_path, {"run.sh": run}).knobs)
    assert (knobs["context"], knobs["cp_comm_type"], knobs["replicate"]) == (4, "a2a", 2)
    trainer = {"sequence_parallel_size": 4, "train_micro_batch_size_per_gpu": 2}
    for stage, refused in (
        (3, ""),
        (1, "sequence_parallel_size=4: simulated with ZeRO-3 alone"),
    ):
        trees = trainer | {"zero_optimization": {"stage": stage}}, LLAMA_13B
        names = ("ds.json", "config.json")
        files = {name: json.dumps(tree) for name, tree in zip(names, trees, strict=True)}
        if refused:
            with pytest.raises(SpecError, match=refused):
                asked(tmp_path, files, "num_gpus=32", "model.seq=4096")
            continue
        question = asked(tmp_path, files, "num_gpus=32", "model.seq=4096")
        knobs = vars(question.knobs)
        assert (knobs["context"], knobs["shard"], question.task.global_batch) == (4, 8, 16)


def test_a_command_kept_in_a_variable_and_placeholders_in_words(tmp_path: Path) -> None:
    """As Megatron-DeepSpeed's scripts end; ``<Specify path>`` is Megatron-LM's placeholder."""
    text = "DATA=<Specify path and file prefix>_text\n"
    flags = f"{FLAGS} --num-experts 1 --moe-min-capacity 4"  # a dense model
    text += f'run="deepspeed --num_gpus 8 a/pretrain_gpt.py {flags} &> ${{OUT}}/log/a.log"\n'
    text += "echo ${run}\neval ${run}\n"
    question = asked(tmp_path, {"run.sh": text})
    assert (question.task.num_gpus, question.reading.named) == (8, [])


def test_deepspeeds_pipeline_section(tmp_path: Path) -> None:
    files = {"ds.json": json.dumps(PIPELINE), "config.json": json.dumps(LLAMA_13B)}
    question = asked(tmp_path, files, "num_gpus=64", "model.seq=4096")
    knobs = vars(question.knobs)
    assert (knobs["pp"], knobs["replicate"], knobs["recompute"]) == (4, 16, "full")
    named = ["pipeline.partition=uniform: simulated with stages of equal cost"]
    assert question.reading.named == named
    zero3 = files | {"ds.json": json.dumps(PIPELINE | {"zero_optimization": {"stage": 3}})}
    with pytest.raises(SpecError, match=r"pipeline.stages=4: cannot be simulated with ZeRO-3"):
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
    with pytest.raises(
        SpecError, match=r"13B_company': cannot be simulated .*\(give model.ffn=N model.vocab"
    ):
        asked(tmp_path, {"a.toml": TITAN}, "num_gpus=64", *words[:-2])


def test_words_give_what_a_script_leaves_open(tmp_path: Path) -> None:
    sizes = FLAGS.replace("--seq-length 4096", "").replace("--micro-batch-size 1", "")
    files = {"a.sh": f"torchrun --nproc-per-node 8 pretrain_gpt.py {sizes} --geglu"}
    with pytest.raises(SpecError, match=r"model\.seq: the file does not say it \(give"):
        asked(tmp_path, files)
    question = asked(tmp_path, files, "model.seq=2048")
    assert (question.task.shape.seq, question.microbatch_size) == (2048, "auto")
    shape = question.task.shape  # MindSpeed-LLM's flag leaves Megatron's size
    assert (shape.gated_mlp, shape.ffn) == (True, 4 * shape.hidden)
    assert asked(tmp_path, files, "model.seq=2048", "microbatch_size=2").microbatch_size == 2


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
    assert any(line.startswith("--fp16: simulated as bf16") for line in derived)


CONFIG = {"config.json": json.dumps(LLAMA_13B | {"vocab_size": 32000})}
EAGER = ["num_gpus=64", "model.seq=4096", "global_batch=512", "microbatch_size=2"]
EAGER += ["contender=fsdp", "contender.compile=false", "contender.shard=64"]


def priced(place: Path, files: dict[str, str], *words: str) -> Answer:
    """The answer to the question of files."""
    return answer(asked(place, files, *words), 0.2)


def test_compile_stands_in_every_plan_and_is_tried_as_a_change(tmp_path: Path) -> None:
    """ "No change of a single knob is faster" was false: the best plan had the same letters."""
    found = priced(tmp_path, CONFIG, *EAGER)
    changes = changes_of(found, 0.2)
    assert "compiled" not in describe(found.asked.plan)
    assert "compiled" in describe(changes["compile"].plan)
    assert changes["compile"].step_s < found.asked.step_s


def test_a_host_that_limits_a_step_is_priced_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small microbatches of DTensor in eager mode were priced 3.5 to 4 times too fast."""
    text = TITAN.replace("13B_company", "8B").replace("_size = 2", "_size = 1\nseq_len = 512")
    text = text.replace("degree = 2", "degree = 8")
    found = {}
    for enable in ("true", "false"):
        files = {"a.toml": f"{text}[compile]\nenable = {enable}\n"}
        found[enable] = priced(tmp_path, files, "num_gpus=8")
        show(found[enable], Console(), verbose=False)
    said = capsys.readouterr().out.replace("\n", " ").split("The host is a limit: ")[1:]
    shorter = [int(re.findall(r"(\d+) % shorter", words)[0]) for words in said]
    assert [share > 80 for share in shorter] == [False, True]
    assert ["torch.compile" in words[:200] for words in said] == [False, True]
    compiled, eager = found["true"].asked, found["false"].asked
    assert 4 < eager.step_s / compiled.step_s < 8
    assert "compiled" not in describe(eager.plan)
    changed = changes_of(found["false"], 0.2)["compile"]
    assert describe(changed.plan) == describe(compiled.plan)
    assert changed.step_s == pytest.approx(compiled.step_s, rel=0.05)  # which slices its loss


STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": "10000"}
MINE: dict[str, object] = {"train_batch_size": "128", "zero_optimization": STAGE_3}
OWN = {
    "distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": False,
    "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4, "zero3_init_flag": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "said", "expected"),
    [
        (MINE, {"bf16": {"enabled": "True"}},
         {"precision": "bf16", "param_persistence_threshold": 10_000}),
        (MINE, {"fp16": {"enabled": "off"}}, {"precision": "fp32", "batch": 128}),
        (MINE, {"bfloat16": {"enabled": True}}, {"precision": "bf16", "reduce_dtype": "bf16"}),
        (MINE, {"bf16": None, "zero_optimization": STAGE_3 | {"stage3_prefetch_bucket_size": 0}},
         {"precision": "fp32", "prefetch_bucket_size": 1, "live_parameters": 1}),
        (MINE, {"data_types": {"grad_accum_dtype": "torch.float32"}, "bf16": {"enabled": True}},
         {"grad_accum_dtype": "fp32", "reduce_dtype": "bf16"}),
        (MINE, {"communication_data_type": "FP16"}, {"reduce_dtype": "bf16"}),
        (MINE, {"communication_data_type": "int8"}, "communication_data_type=int8: must be among"),
        (MINE, {"bf16": {"enabled": "perhaps"}}, "bf16.enabled='perhaps': must be true or false"),
        (MINE, {"bf16": "true"}, 'bf16=true: must be an object, as in {"enabled": ...}'),
        (MINE, {"zero_optimization": 2}, 'zero_optimization=2: must be an object, as in {"stage"'),
        (MINE, {"zero_optimization": {"stage": 2, "offload_param": "cpu"}},
         'zero_optimization.offload_param=cpu: must be an object, as in {"device"'),
        (OWN, {}, {"precision": "fp32", "batch": 64, "prefetch_bucket_size": 50_000_000}),
        (OWN, {"mixed_precision": "bf16"}, {"precision": "bf16"}),
        (OWN, {"deepspeed_config": {"deepspeed_config_file": "z.json"}},
         "deepspeed_config: give z.json in place of this file"),
    ],
)  # fmt: skip
def test_deepspeeds_values_are_read_as_it_reads_them_or_refused_by_key(
    tmp_path: Path, own: dict[str, object], said: dict[str, object], expected: Any
) -> None:
    """``"false"`` was read as true, and a plain value in the place of an object was left out."""
    files = CONFIG | {"z.yaml" if own.keys() >= OWN.keys() else "z.json": json.dumps(own | said)}
    words = ["model.seq=2048", *(["num_gpus=8"] if "z.json" in files else ["global_batch=64"])]
    if isinstance(expected, str):
        with pytest.raises(SpecError, match=re.escape(expected)):
            asked(tmp_path, files, *words)
        return
    question = asked(tmp_path, files, *words)
    task = question.task
    seen = {"precision": task.precision, "batch": task.global_batch, **vars(question.knobs)}
    assert seen | expected | {"shard": 8} == seen
    assert not question.reading.named


def test_what_changes_memory_or_the_number_of_gpus_unseen_is_named(tmp_path: Path) -> None:
    """States of the optimizer in 16 bits were silently priced in 32, and a branch of the script
    that counts GPUs was silently the one of a machine without any."""
    half = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
    files = CONFIG | {"z.json": json.dumps(MINE | half)}
    named = asked(tmp_path, files, "model.seq=2048", "num_gpus=8").reading.named
    assert [line.partition(":")[0] for line in named] == ["bf16.bf16_optimizer_states"]
    script = "if (($(rocm-smi -i | wc -l) == 8)); then G=8; else G=4; fi\ntorchrun"
    script += f" --nproc-per-node $G pretrain_gpt.py {FLAGS}"
    assert asked(tmp_path, {"run.sh": script}).reading.named[0].startswith("rocm-smi: not run here")


@pytest.mark.parametrize(
    ("converter", "recipe", "gain"),
    [
        ("float8", "tensorwise", 1.25),
        ("float8", "rowwise", 1.05),
        ("float8", "rowwise_with_gw_hp", 1.05),
    ],
)
def test_torchtitans_8_bit_products_have_their_price(
    tmp_path: Path, converter: str, recipe: str, gain: float
) -> None:
    text = TITAN.replace("13B_company", "8B").replace("degree = 2", "degree = 1")
    text += "[compile]\nenable = true\n"
    plain = priced(tmp_path, {"a.toml": text}, "num_gpus=8").asked.step_s
    text = text.replace('8B"', f'8B"\nconverters = ["{converter}"]')
    text += f'[quantize.linear.float8]\nrecipe_name = "{recipe}"\n'
    answered = priced(tmp_path, {"a.toml": text}, "num_gpus=8")
    assert plain / answered.asked.step_s == pytest.approx(gain, rel=0.05)
    assert not answered.question.reading.named
    with pytest.raises(SpecError, match="cluster=a100: device a100 has no eight_bit_gain"):
        asked(tmp_path, {"a.toml": text}, "num_gpus=8", "cluster=a100")


def test_megatrons_flags_of_8_bits_and_of_offload_are_read_or_named(tmp_path: Path) -> None:
    run = f"torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {FLAGS}"
    run += " --use-distributed-optimizer --fp8-format hybrid --fp8-recipe mxfp8"
    plain, gathers = (
        asked(tmp_path, {"run.sh": run + more}) for more in ("", " --fp8-param-gather")
    )
    assert any("--fp8-recipe=mxfp8" in line for line in plain.reading.derived)
    plans = [q.contender.simulated(q.task, settled(q)) for q in (plain, gathers)]
    updated = [result.price.stages[0].gather_updated for result in plans]
    assert updated[1] < 0.8 * updated[0]
    some = run + " --fine-grained-activation-offloading --offload-modules core_attn"
    named = asked(tmp_path, {"run.sh": some}).reading.named
    assert named == ["--offload-modules=core_attn: simulated with all of qkv_linear, core_attn, "
                     "attn_proj offloaded"]  # fmt: skip
    assert not asked(tmp_path, {"run.sh": some + " qkv_linear attn_proj"}).reading.named


@pytest.mark.parametrize("name", PRICED)
def test_two_plans_have_two_texts(name: str) -> None:
    """Within one contender, types of gradients and compilers included."""
    contender = PRICED[name]
    seen: dict[str, object] = {}
    types = dict.fromkeys(contender.gradient_types, "auto")
    open_knobs = replace(contender.knobs(), **types)
    found = islice(contender.candidates(task(16, 32), open_knobs), 3000)
    for number, (_, plan) in enumerate(found):
        plan = replace(plan, memory=())
        assert seen.setdefault(describe(plan), plan) == plan, (number, describe(plan))
    assert len(seen) > 50


def test_a_change_is_named_by_the_knob_that_changes(tmp_path: Path) -> None:
    """More stages per rank at the same pp were called a change of pp."""
    found = priced(tmp_path, {"job.sh": SLURM}, "num_gpus=16")
    for knob, changed in changes_of(found, 0.2).items():
        old, new = found.asked.candidate, changed.candidate
        assert knob == "microbatch_size" or getattr(old.knobs, knob) != getattr(new.knobs, knob)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("tp=2", "tensor parallelism"),
        ("context=2", "context parallelism"),
        ("tp=2 contender.context=2", "tensor and context parallelism"),
        ("tp=1", None),
    ],
)
def test_losses_are_named_after_degrees_above_1(
    tmp_path: Path, words: str, named: str | None
) -> None:
    files = {"config.json": json.dumps(LLAMA_13B)}
    given = ["num_gpus=16", "global_batch=32", "model.seq=4096", "contender=megatron_core"]
    given += ["microbatch_size=1", "contender.recompute=none", f"contender.{words.split()[0]}"]
    said = lost(answer(asked(tmp_path, files, *given, *words.split()[1:])).asked.result, 0.0005)
    parallel = [part for part in said.split(", ") if "parallelism" in part]
    assert [part.rpartition(" ")[0].rpartition(" ")[0] for part in parallel] == [named] * bool(
        named
    )


def test_what_is_lost_adds_up_and_8_bits_have_a_limit_of_their_own(tmp_path: Path) -> None:
    """With the limit of 16 bits the kernels alone took 117 % of a step."""
    results = {}
    for name, converters in (("eight", ["float8"]), ("half", [])):
        text = f"{TITAN}[compile]\nenable = true\n"
        text = text.replace('flavor = "13B_company"', f'flavor = "70B"\nconverters = {converters}')
        question = asked(tmp_path, {f"{name}.toml": text}, "num_gpus=64", "model.seq=8192")
        results[name] = answer(question).asked.result
        seconds = seconds_by_kind(results[name])
        assert sum(seconds.values()) == pytest.approx(results[name].step_s)
        assert min(seconds.values()) > -1e-9 * results[name].step_s
    assert results["eight"].price.limit_s < 0.8 * results["half"].price.limit_s
    assert results["eight"].limit_share < 1


def test_memory_is_said_in_gib_with_its_error_and_the_kind_that_decides(tmp_path: Path) -> None:
    files = {"config.json": json.dumps(LLAMA_13B)}
    words = ["model.seq=4096", "num_gpus=8", "global_batch=64", "contender=fsdp"]
    words += ["contender.shard=8", "contender.replicate=1", "contender.context=1"]
    words += ["contender.recompute=none"]
    for size, verdict, kind in ((1, "It fits", "activations"), (4, "Too much", "activations")):
        found = answer(asked(tmp_path, files, *words, f"microbatch_size={size}"))
        said, peak = memory_text(found.asked, found.question.task), found.asked.peak_bytes / 2**30
        assert said.startswith(f"{verdict}: every rank allocates {peak:.1f} of 76.0 GiB, ")
        most = max(vars(found.asked.result.memory[0]).values()) / 2**30
        assert f" GiB, {most:.1f} of them {kind}." in said
        assert f"here {1.19 * peak:.1f} GiB; torch reserves about {peak / 0.85:.1f} GiB" in said
        assert "num_alloc_retries" not in said
    gib = f"cluster.device.memory_gib={4 + 1.1 * peak:.0f}"  # of 4 the context has
    near = answer(asked(tmp_path, files, *words, "microbatch_size=4", gib))
    said = memory_text(near.asked, near.question.task)
    assert said.startswith("It may fit")
    assert "num_alloc_retries" in said
    room = memory_room(PRICED["fsdp"].published_as).share
    assert said.endswith(f"Best plans below leave {room:.0%} of their simulated memory.")


def test_flags_are_megatrons_alone_and_quoted_for_the_shell(tmp_path: Path) -> None:
    files = {"ds.json": json.dumps(PIPELINE), **CONFIG}
    found = priced(tmp_path, files, "num_gpus=64", "model.seq=4096")
    with pytest.raises(SpecError, match="--as megatron: deepspeed's plans are not megatron's"):
        written_as("megatron", found.asked.plan, found.asked.candidate)
    uneven = SLURM.replace("--num-layers 32", f"--num-layers 30 {VIRTUAL} 4")
    found = priced(tmp_path, {"job.sh": uneven}, "num_gpus=16")
    written = written_as("megatron", found.asked.plan, found.asked.candidate)
    stages = re.findall("--pipeline-model-parallel-layout '(E[t|]+L)'", written)[0]
    assert (stages.count("t"), stages.count("|")) == (30, 7)
    assert VIRTUAL not in written
    assert "--disable-bias-linear" not in written  # GPT's layers have biases
    assert "--vocab-size 50687 --tokenizer-type NullTokenizer" in written
    (tmp_path / "again.sh").write_text(f"torchrun --nproc-per-node 16 pretrain_gpt.py {written}")
    again = ask([str(tmp_path / "again.sh")], ["cluster=h100"], [])
    assert (again.task, again.knobs) == (found.question.task, found.asked.candidate.knobs)
