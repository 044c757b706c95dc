"""Configurations of other programs: what is understood, what is named, what is refused."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import CHECKOUT
from benchmarks.explain import answer as answers
from benchmarks.explain import megatron, torchtitan
from benchmarks.explain.__main__ import main
from benchmarks.explain.answer import answer, best_plans, changes_of
from benchmarks.explain.arguments import arguments_of, arguments_of_log, arguments_of_script
from benchmarks.explain.question import Question, ask
from benchmarks.explain.screen import written_as
from benchmarks.report.network import network_words
from benchmarks.specification import SpecError, reading
from benchmarks.specification import progress as bars
from benchmarks.specification.contenders import ATLAS
from tests.unit.explained_files import DEEPSPEED, LLAMA, SHAPE_8B, TOML, sizes
from zeropp.choose.task import Candidate
from zeropp.price.cluster import Cluster

LAYERS_PER_STAGE = "[parallelism]\npipeline_parallel_layers_per_stage = "
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


def test_torchtitan_as_it_was_before_its_section_of_degrees() -> None:
    """Degrees stood in two other sections until February 2025."""
    new, names = torchtitan.read(TOML, 16), ("tensor_parallel_degree", "pipeline_parallel_degree")
    lines = [line for line in TOML.splitlines() if not line.startswith(names)]
    moved = [line for line in TOML.splitlines() if line.startswith(names)]
    assert len(moved) == 2
    text = "\n".join(lines).replace("[training]", f"[training]\n{moved[0]}")
    text += f"\n[experimental]\n{moved[1]}\n[float8]\nenable_float8_linear = true\n"
    old = torchtitan.read(text, 16)
    assert (old.knobs, old.settings) == (new.knobs, new.settings | {"precision": "fp8"})
    assert old.named == new.named


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
    assert torchtitan.read(TOML.replace("Inter", "inter"), None).knobs == reading.knobs
    kernel = torchtitan.read(TOML.replace('"8B"', '"8B_flex_flash"'), None)
    assert kernel.model == reading.model
    assert kernel.named == ["model.flavor=8B_flex_flash: simulated with flash attention"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"llama3"', '"deepseek_v3"', "model.name='deepseek_v3'"),
        ("seq_len = 4096", "seq_len = 'x'", "training.seq_len='x': must be a whole number"),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 3", "give a multiple of 6"),
        ("Interleaved1F1B", "MyOwn", "pipeline_parallel_schedule='MyOwn'"),
        ("[parallelism]", f"{LAYERS_PER_STAGE}7", "become 5 stages, which torchtitan refuses"),
        ("preset for 16 H100", "preset", "give num_gpus=N"),
        ("[model]", "model]", "not a TOML file"),
        ("[parallelism]", "[parallelism]\ncontext_parallel_degree = 3", "give a multiple of 12"),
    ],
)
def test_torchtitan_is_refused_in_one_line(old: str, new: str, said: str) -> None:
    assert old in TOML
    with pytest.raises(SpecError) as refused:
        torchtitan.read(TOML.replace(old, new), None)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_has_no_price_is_named() -> None:
    changed = TOML.replace('"8B"', '"8B"\nconverters = ["nvfp4"]\nnew_key = 1')
    named = " ".join(torchtitan.read(changed, None).named)
    assert "model.converters=nvfp4: simulated in bf16" in named
    assert "model.new_key=1: not known here" in named
    text = TOML.replace('"8B"', '"8B"\nconverters = "float8, nvfp4"')  # as until the middle of 2025
    assert torchtitan.read(text, None).settings["precision"] == "fp8"
    assert [n for n in torchtitan.read(text, None).named if "conv" in n] == [
        "model.converters=nvfp4: simulated in bf16"
    ]


def test_megatron_script() -> None:
    reading = megatron.read(SCRIPT, None)
    assert sizes(reading.model) == SHAPE_8B
    assert reading.model["vocab"] == 128257  # one more token
    assert reading.model["dropout"] == 0
    assert reading.settings["num_gpus"] == 16
    wanted = {"tp": 2, "pp": 2, "replicate": 4, "chunks": 2, "replicate_zero": 1}
    assert {key: reading.knobs[key] for key in wanted} == wanted
    assert reading.traits["overlap_reduction"]
    assert not reading.traits["overlap_updated"]
    assert reading.named == ["--made-up-flag=3: not known here, left out"]
    assert "--log-interval=1" in reading.harmless


@pytest.mark.parametrize(
    ("modules", "recompute"), [("", "none"), ("core_attn", "none"), ("core_attn mlp", "selective")]
)
def test_modules_that_megatron_recomputes(modules: str, recompute: str) -> None:
    flags = "--recompute-granularity selective" + f" --recompute-modules {modules}" * bool(modules)
    reading = megatron.read(SCRIPT.replace("--hidden-size", f"{flags} --hidden-size"), None)
    assert reading.knobs["recompute"] == recompute


def test_the_same_configuration_in_every_dialect() -> None:
    """Script, command line, log and the YAML of a test say the same."""
    values, _, _ = arguments_of_script(SCRIPT, Path())
    log = "------------------------ arguments ------------------------\n" + "\n".join(
        f"  {flag[2:].replace('-', '_')} {'.' * 30} {value}" for flag, value in values.items()
    )
    assert arguments_of_log(log) == values
    told = megatron.read(
        f"{log}\n  made_up ..... 1", 16
    )  # a log has every key, so they are counted
    assert told.named == ["2 keys are not known here, left out (-v lists them)"]
    said = f"using world size: 8, data-parallel size: 4\n{log}\n  world_size ..... 8"
    assert megatron.read(said, None).settings["num_gpus"] == 8
    assert megatron.read(said, 16).settings == told.settings
    off = f"{log}\n  gradient_accumulation_fusion ..... False\n  add_bias_linear ..... True"
    assert arguments_of_log(off) == values | {"--no-gradient-accumulation-fusion": True}
    words = [word for flag, v in values.items() for word in ([flag] if v is True else [flag, v])]
    assert arguments_of(words) == values
    lines = "\n".join(f"  {flag}: {str(v).lower()}" for flag, v in values.items() if v is not None)
    tested = megatron.read(
        f"MODEL_ARGS:\n{lines}".replace("rmsnorm", "RMSNorm").replace("null", "Null"), 16
    )
    script = megatron.read(SCRIPT, 16)
    assert sizes(tested.model) == sizes(script.model)
    assert tested.knobs == script.knobs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SCRIPT.replace('SIZE=${1:-"8"}', "SIZE=4"), "--num-experts=8: mixtures of experts cannot"),
        (SCRIPT.replace("NUM_NODES=2", "NUM_NODES=1").replace("-size 2 ", "-size 16 "), "num_gpus"),
        ("echo hello", "no line runs a training of Megatron-LM"),
        ("torchrun --nnodes 2 a.py model.num_layers=40", "NeMo's words, such as"),
        ("python b.py --in x\nsrun train.py --hidden_width=8192", "; train.py has no --num-layers"),
        (
            "torchrun main_training.py --sharding_strategy=hsdp",
            "of another FSDP with contender=fsdp",
        ),
        ("case $X in\na) ;;\nesac", "no line runs a training of Megatron-LM"),
        ("if true; then\n", "bash: line 2: syntax error: unexpected end of file"),
        (SCRIPT.replace("--hidden-size 4096", ""), "--hidden-size: missing"),
        (SCRIPT.replace("-layers 32", "-layers=$(jq .layers sizes.json)"), "layers: has no value"),
        (f"{SCRIPT.rstrip()} --rollout-batch-size 8", "=8: slime's own steps"),
    ],
)
def test_megatron_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        megatron.read(text, None)
    assert "\n" not in str(refused.value)


def as_toml(words: str) -> str:
    """torchtitan's words on a command line, as its TOML says the same."""
    *flags, policy = words.split(" --")
    last, _, policy = policy.partition(" activation-checkpoint:")
    lines = [f"activation_checkpoint.mode = '{policy}'"]
    for flag in [*flags, last]:
        key, _, value = flag.removeprefix("--").partition(" ")
        value = value if value.isdigit() else f"'{value}'" if value else "true"
        lines.append(f"{key} = {value}")
    return "\n".join(lines)


SLICED_SCRIPT = SCRIPT.replace("--bf16", "--bf16 --context-parallel-size 2")


@pytest.mark.parametrize(
    ("dialect", "name", "text"),
    [("torchtitan", "a.toml", TOML), ("megatron", "a.sh", SCRIPT)],
)
def test_an_answer_is_written_back_as_the_same_plan(
    dialect: str, name: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = answer(ask([str(path)], ["cluster=h100"], []), search_s=0.5)
    assert found.fits
    assert found.asked.plan.layout.tp == found.asked.plan.layout.pp == 2
    faster = changes_of(found, search_s=0.5).values()
    assert all(change.step_s < found.asked.step_s for change in faster)
    assert [one.name for one in best_plans(found.question, search_s=0.5)] == [*ATLAS]
    again = asked_again(dialect, written_as(dialect, found.asked.plan, found.asked.candidate), path)
    second = again.contender.simulated(again.task, found.asked.candidate)
    assert second.step_s == pytest.approx(found.asked.step_s, rel=1e-9)
    assert again.knobs == found.asked.candidate.knobs
    assert not any("bias" in line for line in again.reading.named)


def test_best_plans_of_the_documented_file_take_few_simulations() -> None:
    """Which is most of its time. A search to 1 % takes almost 600."""
    file = str(CHECKOUT / "docs/examples/llama3_8b.toml")
    best = best_plans(ask([file], ["num_gpus=16", "cluster=h100"], []), search_s=1e4)
    assert all(row.is_complete and row.winner for row in best)
    assert sum(outcome.simulated for row in best for outcome in row.searched) < 60
    assert "degrees do not multiply to the GPUs" not in [  # which no search tries
        kind for row in best for outcome in row.searched for kind in outcome.rejected
    ]


def asked_again(dialect: str, words: str, path: Path) -> Question:
    """The question that an answer asks where it is given as a configuration."""
    given = ["cluster=h100", "num_gpus=16"]
    if dialect == "megatron":
        return ask([], given, shlex.split(words))
    path.write_text('model.name = "llama3"\nmodel.flavor = "8B"\n' + as_toml(words))
    return ask([str(path)], given, [])


def test_the_command_answers_on_one_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ["num_gpus=8", "cluster=h100", "global_batch=32", "model.seq=4096", "contender.tp=2"]
    words += ["contender.pp=1", "contender.recompute=none"]
    monkeypatch.setattr(answers, "SEARCH_S", 0.5)
    monkeypatch.setattr(bars, "_FIRST_LINE_S", 0.0)
    monkeypatch.setattr(bars, "_LOG_EVERY_S", 0.01)
    monkeypatch.setattr(sys, "argv", ["explain", str(path), *words])
    assert main() in (0, 1), capsys.readouterr().err
    told, shown = capsys.readouterr()
    assert " of 9, searching best plans" in shown
    assert "searched, since nothing says it: replicate=4, " in told
    parts = ["Plan as understood", "GiB of each pipeline rank", "Time: the model's kernels"]
    parts += ["Changes of one knob", "Best plans on the same GPUs", "Do you need tensor"]
    parts += ["In plans: degrees"]
    places = [told.index(said) for said in parts]
    assert places == sorted(places)
    for name in ("changes_of", "best_plans"):  # --as searches nothing better
        monkeypatch.setattr(answers, name, None)
    monkeypatch.setattr(sys, "argv", ["explain", str(path), *words, "--as", "overrides"])
    assert main() in (0, 1), capsys.readouterr().err
    assert "contender=megatron_core" in capsys.readouterr().out.splitlines()[-1]


def test_an_unmeasured_network_is_a_range_and_is_asked_for_where_it_decides() -> None:
    config = CHECKOUT / "docs/examples/configurations/llama_config.json"
    words = [
        "num_gpus=16",
        "cluster=h100",
        "model.seq=4096",
        "global_batch=16",
        "microbatch_size=1",
    ]
    words += ["contender=fsdp", "contender.shard=16", "contender.recompute=none"]
    slow, fast = answer(ask([str(config)], words, [])).network_s or (0.0, 0.0)
    assert slow > 1.5 * fast
    assert "cluster.busbw_gb_s=N" in network_words((slow, fast))
    assert "decides little" in network_words((1.01 * fast, fast))
    measured = answer(ask([str(config)], [*words, "cluster.busbw_gb_s=40"], []))
    assert measured.network_s is None
    assert measured.asked.step_s == pytest.approx(slow)  # a tenth of 8 x 50 GB/s
    one_node = [word.replace("=16", "=8") for word in words]
    assert answer(ask([str(config)], one_node, [])).network_s is None


def test_a_file_that_says_all_is_priced_though_it_does_not_fit() -> None:
    place = CHECKOUT / "docs/examples/configurations"
    files = [str(place / name) for name in ("deepspeed_zero2.json", "llama_config.json")]
    asked = ask(files, ["num_gpus=16", "cluster=h100", "model.seq=4096", "model.layers=48"], [])
    found = answer(asked, 0.05)
    assert not found.fits
    assert found.asked.plan.layout.replicate == 16
    assert asked.task.shape.name == "llama_4096_48_layers"


def test_a_degree_that_does_not_divide_the_model_is_said_beside_open_knobs() -> None:
    file = str(CHECKOUT / "docs/examples/configurations/llama_config.json")
    words = ["num_gpus=32", "cluster=h100", "model.seq=4096", "global_batch=64", "model.kv_heads=2"]
    with pytest.raises(SpecError, match=r"contender\.tp=4: must divide model.kv_heads=2"):
        answer(ask([file], [*words, "contender.tp=4"], []))


HOSTILE = """
echo gone > {place}/kept
echo new >> {place}/made
: > {place}/kept
rm {place}/kept
/bin/rm {place}/kept
command -p rm {place}/kept
exec 3<>{place}/kept
trap - DEBUG
shopt -u extdebug
echo new > {place}/made
cat {place}/kept > {place}/made
seq 3 | cat - >> {place}/kept
PATH=/bin:/usr/bin
rm {place}/kept
/bin/touch {place}/made
kill -9 $PPID
python pretrain_gpt.py --num-layers 2
"""


def test_a_script_can_change_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("before", encoding="utf-8")
    arguments, _, _ = arguments_of_script(HOSTILE.format(place=tmp_path), tmp_path)
    assert arguments == {"--num-layers": "2"}
    assert kept.read_text(encoding="utf-8") == "before"
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ('V="--num-layers 2"\nV+=" --bf16"\npython a.py $V', {"--num-layers": "2", "--bf16": True}),
        ('o=" \\\n --num-layers 2"\nsrun -c 8 sh -c "cd x && python a.py ${o}"', {}),
        ("bcprun -p 8 -c 'python a.py \\\n --num-layers 2\n'", {}),
        ("set -e\nmkdir x\ncase ${1:-a} in a) N=2;; esac\ntorchrun a.py --num-layers $N > log", {}),
        ("[ -f nothing ] || exit 1\nexec /opt/bin/python a.py --num-layers $((1 + 1)) 2>&1", {}),
        ('N="x/y --num-layers 2"\nCUDA=1 "$HOME/bin/torchrun" a.py ${N#* }', {}),
        ("ENV=$1\nif [ x$ENV = x ]; then N=2; fi\npython a.py --num-layers $N", {}),
        ("N=2\nD=/x/ENV/y.ENV\nif [ $D = /x/ENV/y.ENV ]; then python a.py --num-layers $N; fi", {}),
        ("source ./sizes.sh\nf() { python a.py \"$@\" | tee log; }\nf --num-layers $SIZE", {}),
        ('HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n'
         '[ -f "$HERE/sizes.sh" ] && source "$HERE/sizes.sh"\npython a.py --num-layers $SIZE', {}),
        ('ROOT="$(cd -- "$(dirname -- "$(realpath "$0")")/../of" &>/dev/null && pwd)"\n'
         '. "$ROOT/../of/next.sh"\npython a.py --num-layers $SIZE', {}),
        ('cd "${BASH_SOURCE%/*}/.."\nsource of/next.sh\npython a.py --num-layers $SIZE', {}),
        ('for f in "$(dirname "$0")"/s*.sh; do . $f; done\npython a.py --num-layers $SIZE', {}),
        ("python a.py --num-layers $(cat ./size.txt 2>/dev/null)", {}),
        ("{ N=2; date; } 2>&1 >> of.log\n(cd x\n python a.py --num-layers $N\n ) > b 2> c &", {}),
        ('{ N=2; } > "$D/$(date +%F) a.txt"\npython a.py --num-layers $N', {}),
        ("while :; do sleep 9; done > of.log 2>&1 &\npython a.py --num-layers 2", {}),
        ("N=`cat here/size.txt - | tr 3 2`\npython a.py --num-layers $N", {}),
        ('if [ "$(basename "$0" .sh)" = script ]; then N=2; fi\npython a.py --num-layers $N', {}),
    ],
)  # fmt: skip
def test_bash_expands_what_a_run_would_get(
    script: str, wanted: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "sizes.sh").write_text("SIZE=2", encoding="utf-8")
    (tmp_path / "size.txt").write_text("2", encoding="utf-8")
    (tmp_path.parent / "of").mkdir(exist_ok=True)
    beside = 'HERE=$(dirname "${BASH_SOURCE[0]}")\n[ -f "$HERE/next.sh" ] && '
    beside += f'. "$HERE/../{tmp_path.name}/sizes.sh"'
    (tmp_path.parent / "of/next.sh").write_text(beside, encoding="utf-8")
    assert arguments_of_script(script, tmp_path)[0] == (wanted or {"--num-layers": "2"})


def test_flags_that_no_training_gets_are_refused() -> None:
    script = 'o="--hidden-size 64 \\ \n --num-layers 2"\nsrun sh -c "python a.py ${o}"'
    with pytest.raises(SpecError, match="--num-layers: begins a command of its own"):
        arguments_of_script(script, Path())


def test_what_bash_could_not_follow_is_named(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("--bf16", encoding="utf-8")
    script = "cat of.log\nsource gone.sh\nif true; then exit 1; fi\n"
    script += "A=$(cat gone.txt)\nB=$(head -1 more.txt)\nC=$(hosts | tail -1)\n"
    named = " ".join(arguments_of_script(script + SCRIPT, tmp_path)[2])
    assert ("cat gone.txt: not found" in named, "of.log" in named) == (True, False)
    assert ("head: not run here" in named, "tail" in named) == (True, False)
    assert "source gone.sh: not found" in named
    assert "exit 1: a check" in named


CHANGED = "model: {num_layers: 2}\ntrain: {}"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("d.json", DEEPSPEED, "give its config.json, too"),
        (
            "x.yaml",
            "variables: {}\nmodel: {name: mpt_causal_lm}",
            "not a YAML file of Megatron-Bridge",
        ),
        ("x.yaml", "recipe: m", "not a YAML file of Megatron-Bridge"),
        ("x.yaml", "model: 1\ntrainer: {}", "not a YAML file of Megatron-Bridge"),
        ("x.yaml", "model: 1\ntrain: {steps: 9}", "not a YAML file of Megatron-Bridge"),
        ("x.json", '{"model": "a/b", "model_type": "llama"}', "swift or Primus names its model"),
        (
            "x.yaml",
            "model: {seq_length: 8192}\ntrainer: {}",
            "such as NeMo, GPT-NeoX or OLMo, give",
        ),
        ("x.yaml", "pipe-parallel-size: 4", "such as NeMo, GPT-NeoX or OLMo, give"),
        ("x.yaml", "parallelism: {}\ntokens: {}", "such as NeMo, GPT-NeoX or OLMo, give"),
        ("x.yaml", "modules: {pre_trainer: {framework: megatron}}", "or Primus names its model"),
        ("x.yaml", f"{CHANGED}\npeft: {{dim: 16}}", "--peft=True: adapters cannot be simulated"),
        ("x.yaml", f"{CHANGED}\noptimizer: a\ndataset: c4", "num_gpus: these"),
        ("x.yaml", "model: {seq_length: 512}\ntrain: {train_iters: 9}", "that cfg.to_yaml writes"),
        (
            "x.yaml",
            CHANGED.replace("2}", "2, tensor_model_parallel_size: [1, 2]}"),
            "'1 2': must be",
        ),
        ("x.yaml", "- 1", "must hold keys with values"),
        ("x.json", '{"dim": 4096, "n_layers": 32}', "model_type: missing, .* Meta's params.json"),
        ("x.json", '{"model_type": ["llama"]}', r"model_type=.*llama.*: cannot be simulated"),
        (
            "a.toml",
            "[model]\nname = 8\n[training]\nsteps = 1",
            "model.name='8', .*: cannot be simulated",
        ),
        ("a.toml", "# nothing\n", "a TOML without .model. and .training."),
        ("a.toml", "[project]\nname = 1", "so it is not torchtitan's"),
        ("a.sh", "python run_text_generation_server.py --num-layers 4", "no training of a decoder"),
        ("a.log", " iteration 2/ 9 | elapsed time per iteration (ms): 9.4 |", "--measured .*a.log"),
        ("a.sh", "torchrun pretrain_somevideo.py --num-layers 4", "no training of a decoder"),
        ("a.sh", "echo trained >&2", "of Megatron-LM; give"),
    ],
)
def test_other_files_are_refused_by_name(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=said) as refused:
        ask([str(path)], ["cluster=h100"], [])
    assert "\n" not in str(refused.value)


def test_a_cluster_of_ones_own_that_is_no_preset_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CONF", tmp_path)
    (tmp_path / "cluster").mkdir()
    mine = tmp_path / "cluster" / "mine.yaml"
    mine.write_text("name: mine\n\tdevice: 3\n", encoding="utf-8")
    for name, said in (("mine", "mine: not a YAML file: .* line 2"), (str(mine), "known: mine")):
        with pytest.raises(SpecError, match=said) as refused:
            reading.preset("cluster", name, Cluster)
        assert "\n" not in str(refused.value)


BRIDGE = """
_target_: megatron.bridge.training.config.ConfigContainer
model: {_target_: megatron.bridge.models.llama.Llama3ModelProvider8B, num_layers: 32,
  hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8,
  kv_channels: 128, gated_linear_unit: true, normalization: RMSNorm, vocab_size: 128256,
  position_embedding_type: rope, share_embeddings_and_output_weights: false, seq_length: 8192,
  hidden_dropout: 0.0, attention_dropout: 0.0, tensor_model_parallel_size: 2, made_up: 3,
  add_bias_linear: false,
  pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 4,
  context_parallel_size: 2, sequence_parallel: true, recompute_granularity: null,
  cross_entropy_loss_fusion: true, cross_entropy_fusion_impl: te, fp8: null,
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}}
train: {global_batch_size: 512, micro_batch_size: 1, train_iters: 10}
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true, grad_reduce_in_fp32: true,
  bucket_size: 200000000}
comm_overlap: {tp_comm_overlap: true}
mixed_precision: bf16_mixed
"""


def test_megatron_bridge(tmp_path: Path) -> None:
    """What ``cfg.to_yaml`` writes of a recipe."""
    path = tmp_path / "run_config.yaml"
    path.write_text(BRIDGE, encoding="utf-8")
    asked = ask([str(path)], ["cluster=h100", "num_gpus=64"], [])
    assert sizes(asked.reading.model) == SHAPE_8B
    assert asked.reading.model["dropout"] == 0
    wanted = {"tp": 2, "pp": 2, "context": 2, "replicate": 8, "chunks": 4, "replicate_zero": 1}
    wanted |= {"bucket_size": 200_000_000}
    assert {key: getattr(asked.knobs, key) for key in wanted} == wanted
    assert asked.task.precision == "bf16"
    assert asked.reading.traits["fused_loss"]
    assert asked.reading.traits["overlap_tensor"]
    assert asked.reading.named == ["1 keys are not known here, left out (-v lists them)"]
    assert "--made-up=3" in asked.reading.harmless
    path.write_text(BRIDGE.replace("bf16_mixed", "bf16_with_fp8_subchannel_scaling_mixed"))
    assert (
        ask([str(path)], ["cluster=h100", "num_gpus=64"], []).reading.settings["precision"] == "fp8"
    )
    mixed = "{bf16: true, fp8: hybrid, fp8_param_gather: true, grad_reduce_in_fp32: false}"
    path.write_text(BRIDGE.replace("bf16_mixed", mixed) + "optimizer: {optimizer: muon}\n")
    reading = ask([str(path)], ["cluster=h100", "num_gpus=64"], []).reading
    assert {"gathers_casts": True, "bf16.reduced": 2}.items() <= reading.traits.items()
    assert "--optimizer=muon: simulated with Adam's states" in reading.named
    for key in ("sequence_length", "seq_length"):  # of rows that are shorter than the model allows
        path.write_text(f"{BRIDGE}dataset: {{{key}: 2048}}\n")
        assert ask([str(path)], ["cluster=h100", "num_gpus=64"], []).task.shape.seq == 2048


def test_slices_of_a_sequence_are_priced(tmp_path: Path) -> None:
    """With context parallelism a rank holds half the activations, and waits for keys and values."""
    path = tmp_path / "a.sh"
    memory, lost = [], []
    for text in (SCRIPT, SLICED_SCRIPT):
        path.write_text(text, encoding="utf-8")
        asked = ask([str(path)], ["cluster=h100", "contender.recompute=none"], [])
        assert (asked.task.shape.seq, asked.task.global_batch) == (4096, 64)
        result = asked.contender.simulated(asked.task, Candidate(asked.knobs, 1))
        memory.append(result.memory[0].activations)
        lost.append(result.breakdown.by_kind()["tensor"] / result.step_s)
    assert memory[1] == pytest.approx(memory[0] / 2, rel=0.05)
    assert lost[1] > lost[0]
    again = asked_again(
        "megatron", written_as("megatron", result.plan, Candidate(asked.knobs, 1)), path
    )
    assert (again.task.shape.seq, again.knobs) == (asked.task.shape.seq, asked.knobs)


def test_words_adjust_what_depends_on_them(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(TOML, encoding="utf-8-sig")  # with a byte order mark
    asked = ask([str(path)], ["cluster=h100", "contender.tp=4", "model.layers=16"], [])
    assert (asked.knobs.tp, asked.knobs.shard) == (4, 2)  # type: ignore[attr-defined]
    assert asked.task.global_batch == 8 * 2
    assert asked.knobs.recompute_blocks == "auto"  # type: ignore[attr-defined]
    path = tmp_path / "a.sh"
    full = "--recompute-granularity full --recompute-method uniform --bf16"
    path.write_text(SCRIPT.replace("--bf16", full), encoding="utf-8")
    asked = ask([str(path)], ["cluster=h100", "model.layers=16"], [])
    assert asked.knobs.recompute_blocks == 16  # type: ignore[attr-defined]


def test_layers_per_stage_as_torchtitan_counts_them() -> None:
    text = TOML.replace("[parallelism]", f"{LAYERS_PER_STAGE}6")
    assert torchtitan.read(text, None).knobs["chunks"] == 3


def test_flags_without_a_price_are_named() -> None:
    for flag in ("--cross-entropy-loss-fusion", "--reset-attention-mask"):
        flags = f"--bf16 {flag} --reset-position-ids"
        script = megatron.read(SCRIPT.replace("--bf16", flags), None)
        assert any(line.startswith(flag) for line in script.named)
        assert "--reset-position-ids" in script.harmless
    grows = SCRIPT.replace("--bf16", "--bf16 --step-batch-size-schedule '0:384 2B:1152'")
    script = megatron.read(grows.replace("--global-batch-size", "--made-up"), None)
    assert script.settings["global_batch"] == 1152
    assert any("=0:384 2B:1152: simulated with the last" in line for line in script.named)
    for flag, size in (("--main-grads-dtype bf16", 2), ("--main-grads-dtype fp32", None)):
        script = megatron.read(SCRIPT.replace("--bf16", f"--bf16 {flag}"), None)
        assert script.traits.get("bf16.gradients") == size
    gpt = SCRIPT.replace("rope", "learned_absolute").replace("RMSNorm", "LayerNorm")
    named = [line for line in megatron.read(gpt, None).named if "made-up" not in line]
    assert named == ["--disable-bias-linear: GPT's layers are simulated with biases"]
    assert len(megatron.read(gpt.replace("--disable-bias-linear", ""), None).named) == 1


def test_a_function_of_torchtitans_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the attributes of torchtitan 0.3's configuration, whose classes have slots
    (tests/suite/test_torchtitan.py has the real one)."""

    class FullAC:
        class Config:
            """The policy, whose class alone says its kind."""

    def section(**values: Any) -> Any:
        return make_dataclass("Section", values, slots=True)(**values)

    config = SimpleNamespace(
        model_spec=SimpleNamespace(name="llama3", flavor="8B", model="Float8Linear.Config"),
        training=section(local_batch_size=1, seq_len=8192),
        parallelism=section(tensor_parallel_degree=2, made_up=1),
        compile=section(enable=True, enable_async_tensor_parallel=True),
        debug=section(),
        activation_checkpoint=FullAC.Config(),
    )
    given: list[str] = []

    def parse_args(words: list[str]) -> SimpleNamespace:
        given.extend(words)
        return config

    manager = SimpleNamespace(parse_args=parse_args)
    stand_in = SimpleNamespace(ConfigManager=lambda: manager)
    monkeypatch.setitem(sys.modules, "torchtitan.config", stand_in)
    words = ["--training.seq_len", "8192"]
    reading = ask(["llama3:llama3_8b"], ["cluster=h100", "num_gpus=8"], words).reading
    assert given == ["--module", "llama3", "--config", "llama3_8b", *words]
    assert sizes(reading.model) == SHAPE_8B
    degrees = [reading.knobs[name] for name in ("tp", "shard", "recompute")]
    assert degrees == [2, 4, "full"]
    assert reading.traits["overlap_tensor"]
    assert reading.settings["precision"] == "fp8"
    assert any("made_up=1" in line for line in reading.named)
