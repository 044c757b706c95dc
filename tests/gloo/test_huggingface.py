"""Models of Hugging Face by a call: as in one process, also where ranks divide sequences, from and
into their folders, and with adapters of peft."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import product
from pathlib import Path
from subprocess import run
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import logging

import zeropp
from tests.gloo.models import apart, error_of, ranks_of, topology
from tests.gloo.world import World, on_ranks
from zeropp import huggingface
from zeropp.huggingface import model_layers
from zeropp.train.parallel_model import ParallelModel

ROWS, MICROBATCH, LENGTH, VOCABULARY, STEPS, RATE = 8, 2, 10, 60, 2, 1.0
# How far gradients may be from one process's, in fp64. Gemma's norms add up the gradients of their
# weights in fp32, so that it matters where a batch is cut: after ten steps of a plain loop, too. So
# do Cohere's.
BOUNDS = {"cohere": 5e-6, "gemma": 5e-6, "gemma2": 5e-6, "gemma3_text": 5e-6}
_SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 4}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 4}
_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Torch has no grouped products in fp64.
_EXPERTS = {**_LLAMA, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_GPT2 = {"n_embd": 16, "n_head": 4, "n_layer": 4, "n_positions": 16,
         "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip
# Each family in the setting that differs most from the others: ties, windows, projections, scales,
# experts, slopes in the place of positions. The first six are trained.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "max_position_embeddings": LENGTH - 2,
              "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "gemma3_text": {**_LLAMA, "query_pre_attn_scalar": 4, **_WINDOW},
    "gpt2": _GPT2,
    "opt": {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 12, "dropout": 0.0,
            "max_position_embeddings": 16},
    "mixtral": {**_EXPERTS, "num_local_experts": 4, "sliding_window": 4},
    "bloom": {"hidden_size": 16, "n_head": 4, "n_layer": 4, "hidden_dropout": 0.0,
              "attention_dropout": 0.0, "attn_implementation": "eager"},
    "granite": {**_LLAMA, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
                "residual_multiplier": 0.5, "attention_multiplier": 0.4},
    "qwen2": {**_LLAMA, "use_sliding_window": True, **_WINDOW, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "tie_word_embeddings": True},
    "mistral": {**_LLAMA, "sliding_window": 4},
    "gemma": _LLAMA,
    "gemma2": {**_LLAMA, "query_pre_attn_scalar": 4, **_WINDOW, "attn_implementation": "eager"},
    "gpt_neox": {**_SIZES, "intermediate_size": 24, "attn_implementation": "eager"},
    "phi": {**_SIZES, "intermediate_size": 24, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "phi3": {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 24, "resid_pdrop": 0.0},
    "olmo2": _LLAMA,
    "stablelm": {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 24},
    "falcon": {**_SIZES, "alibi": True, "attn_implementation": "eager"},
    "gptj": {**_GPT2, "rotary_dim": 4},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 8},
    "olmoe": {**_EXPERTS, "num_experts": 4},
    "gpt_bigcode": _GPT2,
    "starcoder2": {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 24,
                   "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "cohere": {**_LLAMA, "logit_scale": 0.5},
}  # fmt: skip
STANDING = list(FAMILIES)[:6]


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def config_of(family: str, tied: bool | None = None, **more: Any) -> Any:
    """A tiny model's configuration; by default it ties what the family's setting here does."""
    more |= {} if tied is None else {"tie_word_embeddings": tied}
    return AutoConfig.for_model(
        family, vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **FAMILIES[family] | more,
    )  # fmt: skip


def made(family: str, tied: bool | None = None, **more: Any) -> PreTrainedModel:
    """A tiny model in fp64, the same at every call, with weights that are not small."""
    torch.manual_seed(1)
    make: Any = AutoModelForCausalLM
    model: PreTrainedModel = make.from_config(config_of(family, tied, **more), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.train()
    return model


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets, and the mask of their padding, which is on the right and short: in fp64
    transformers gives NaN for a place that sees no token in its window."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    lengths = torch.randint(LENGTH - 2, LENGTH + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    targets = tokens[:, 1:].masked_fill(mask == 0, -100)
    return tokens[:, :-1].masked_fill(mask == 0, 0), targets, mask


def keywords_of(kind: str, step: int) -> dict[str, Tensor]:
    """What tells documents or padding of a batch apart."""
    lengths = torch.randint(1, LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(4))
    places = torch.arange(LENGTH).expand(ROWS, -1)
    packed = torch.where(places < lengths, places, places - lengths)
    every = {"packed": {"position_ids": packed}, "padded": {"attention_mask": batch(step)[2]}}
    return every.get(kind, {})


@cache
def alone(
    family: str, tied: bool | None, steps: int, kind: str = "padded"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and the last gradients after some steps of plain SGD in one process, through the
    model's own forward."""
    model: Any = made(family, tied)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE / steps)
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets, _ = batch(step)
        logits = model(tokens, use_cache=False, **keywords_of(kind, step)).logits
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        whole = targets.numel()
        # Scaled as in the engine, because parts of these models are in fp32, which rounds by scale.
        (total / whole).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(whole / int((targets != -100).sum()))
        optimizer.step()
    after = {name: one.detach() for name, one in model.named_parameters()}
    assert sum(float((after[n] - before[n]).abs().max()) > 1e-4 for n in after) > len(after) * 0.8
    return after, {name: torch.zeros_like(one) if one.grad is None else one.grad
                   for name, one in model.named_parameters()}  # fmt: skip


Expected = dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]


def parallel(layers: Any, **more: Any) -> ParallelModel:
    """A model of tokens on this rank."""
    given: dict[str, Any] = {"sample": batch(0)[0], "microbatch_size": MICROBATCH, **more}
    loss_fn = given.pop("loss_fn", huggingface.token_loss)
    return zeropp.parallelize(layers, loss_fn, global_batch=ROWS, **given)


def train(
    drawn: dict[str, Any], expected: Expected, steps: int, kind: str = "padded"
) -> dict[str, tuple[float, float]]:
    """How far parameters and gradients of each family are from those of one process."""
    errors = {}
    degrees = {name: value for name, value in drawn.items() if name != "tied"}
    for family, (parameters, gradients) in expected.items():
        layers = huggingface.layers(made(family, drawn["tied"]))
        with parallel(
            layers,
            sample_keywords=keywords_of(kind, 0),
            optimizer=lambda groups: torch.optim.SGD(groups["all"], lr=RATE / steps),
            **degrees,
        ) as model:
            for step in range(steps):
                tokens, targets, _ = (one[model.rows] for one in batch(step))
                named = {name: one[model.rows] for name, one in keywords_of(kind, step).items()}
                model.train_step(tokens, targets, **named)
            own = layers.own_name
            errors[family] = (
                apart({own(n): one for n, one in model.full_parameters()}, parameters),
                apart({own(n): one for n, one in model.gradients()}, gradients),
            )
    return errors


@pytest.mark.parametrize("seed", range(len(STANDING) // 2))
def test_random_topologies_are_one_process(world: World, seed: int) -> None:
    """Parameters are given in fp32, gradients in fp64."""
    drawn = topology(seed)
    families = STANDING[seed :: len(STANDING) // 2]
    expected = {family: alone(family, drawn["tied"], STEPS) for family in families}
    for errors in world.run(train, drawn, expected, STEPS, size=ranks_of(drawn)):
        assert set(errors) == set(expected)
        for family, (parameters, gradients) in errors.items():
            bound = BOUNDS.get(family, 1e-9)
            assert parameters < bound + 1e-6, (family, parameters, drawn)
            assert gradients < bound, (family, gradients, drawn)


BACKWARD = torch.autograd.backward


def in_a_thread(*given: Any) -> None:
    """A backward as autograd runs it on a GPU."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(BACKWARD, *given).result()


def train_in_a_thread(*given: Any) -> dict[str, tuple[float, float]]:
    """As ``train``, on what is not the thread of the forward."""
    with mock.patch.object(torch.autograd, "backward", in_a_thread):
        return train(*given)


KINDS = [*product(["granite", "qwen3", "mistral"], ["plain", "packed", "padded"])]


@pytest.mark.parametrize(("family", "kind"), [*KINDS, ("opt", "packed")])
def test_rows_of_every_kind_are_divided(world: World, family: str, kind: str) -> None:
    """Of a family that ties its weights, of one with windows, and of one whose attention does not
    tell documents apart."""
    degrees: dict[str, Any] = {"pp": 2, "context": 2, "recompute": "full", "tied": None}
    expected = {family: alone(family, None, 1, kind)}
    for errors in world.run(train_in_a_thread, degrees, expected, 1, kind, size=4):
        assert errors[family][0] < 1e-6, errors
        assert errors[family][1] < 1e-9, errors


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "factor": 2.0,
        "original_max_position_embeddings": LENGTH // 2,
    },
    "yarn": {"factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
@on_ranks(2)
def test_frequencies_that_come_of_the_last_position_are_refused(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    layers = huggingface.layers(made("llama", rope_parameters=rope))
    said = error_of(lambda: parallel(layers, context=2).close())
    words = f"context=2: rope_type='{kind}' takes its frequencies"
    assert said == "" if kind == "yarn" else words in said


def through_layers(model: Any, tokens: Tensor, **keywords: Tensor) -> Tensor:
    """What all layers of a model give in this process."""
    hidden: Any = tokens
    layers: Any = huggingface.layers(model)
    for layer in layers:
        hidden = layer(hidden, **keywords)
    return torch.as_tensor(hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_give_the_logits_of_the_model(family: str) -> None:
    model: Any = made(family)
    tokens, _, mask = batch(0)
    places = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand_as(tokens).clone()
    places[1::2] = torch.arange(LENGTH)  # rows of a single document, the others are packed
    given: list[dict[str, Tensor]] = [{}, {"attention_mask": mask}]
    if family not in ("bloom",):
        given.append({"position_ids": places})
    with torch.no_grad():
        for keywords in given:
            expected = model(input_ids=tokens, use_cache=False, **keywords).logits
            found = through_layers(model, tokens, **keywords)
            assert float((found - expected).abs().max()) < 1e-9, [*keywords]


def test_a_layer_looks_at_no_values() -> None:
    model: Any = made("qwen2")
    tokens, _, mask = batch(0)
    looks: list[str] = []

    class Looks(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if "local_scalar" in str(function):
                looks.append(str(function))
            return function(*args, **(kwargs or {}))

    places = torch.arange(LENGTH).expand_as(tokens)
    for keywords in ({}, {"attention_mask": mask}, {"position_ids": places}):
        with Looks():  # type: ignore[no-untyped-call]
            through_layers(model, tokens, **keywords)
    assert looks == []
    with Looks():  # type: ignore[no-untyped-call]
        model(input_ids=tokens, attention_mask=mask)
    assert looks


def classifier() -> Any:
    """A tiny model that puts rows into classes."""
    torch.manual_seed(1)
    make: Any = AutoModelForSequenceClassification
    config = config_of("qwen2", False)
    config.num_labels = 3
    return make.from_config(config, dtype=torch.float64)


@on_ranks(2)
def test_a_classifier_is_trained_and_saved(tmp_path: Path) -> None:
    (tokens, _, mask), labels = batch(0), torch.arange(ROWS) % 3
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    F.cross_entropy(model(tokens, attention_mask=mask).logits, labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    expected = model.eval()(tokens, attention_mask=mask).logits.detach()
    layers = huggingface.layers(classifier())
    with parallel(
        layers, loss_fn=F.cross_entropy, sample_keywords={"attention_mask": mask}, pp=2,
        optimizer=lambda groups: torch.optim.SGD(groups["all"], lr=RATE),
    ) as trained:  # fmt: skip
        trained.train_step(tokens, labels, attention_mask=mask)
        given = torch.as_tensor(trained.forward_only(tokens, attention_mask=mask))
        layers.save_pretrained(trained, tmp_path)
    assert float((given - expected).abs().max()) < 1e-9
    make: Any = AutoModelForSequenceClassification
    again = make.from_pretrained(tmp_path).eval()(tokens, attention_mask=mask).logits
    assert float((again - expected.float()).abs().max()) < 1e-4
    assert huggingface.layers(tmp_path).tied is None
    with pytest.raises(zeropp.InfeasibleError, match="attention_mask: must be among the keyword"):
        through_layers(model, tokens)


@on_ranks(1)
def test_a_folder_has_the_old_model_or_the_new_one(tmp_path: Path) -> None:
    make: Any = AutoModelForCausalLM
    whole: Any = made("qwen3").float()
    whole.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    tokens, layers = prompt(), huggingface.layers(whole)

    def logits() -> Tensor:
        """Of whatever model is there."""
        given: Tensor = make.from_pretrained(tmp_path)(tokens).logits.detach()
        return given

    with parallel(layers) as model:
        seen = [logits()]
        for number in range(3):
            model.train_step(*batch(number)[:2])
            for end, place, last in (
                (2, model_layers, "save_file"),
                (0, json, "dumps"),
            ):
                calls, real = iter(range(9)), getattr(place, last)

                def ending(*given: Any, **more: Any) -> Any:
                    if next(calls) == end:  # noqa: B023
                        raise KeyboardInterrupt
                    return real(*given, **more)  # noqa: B023

                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(place, last, ending)
                    with pytest.raises(KeyboardInterrupt):
                        layers.save_pretrained(model, tmp_path)
                assert torch.equal(logits(), seen[-1])
            layers.save_pretrained(model, tmp_path)
            seen.append(logits())
            assert not torch.equal(seen[-1], seen[-2])
    assert (tmp_path / "tokenizer.json").exists()


SAVED = ("qwen3", "gpt2", "mixtral")
GENERATED = 4  # tokens


def prompt() -> Tensor:
    """Tokens without padding, from which all goes on."""
    return batch(0)[0].clamp_min(3)


def generated(model: ParallelModel, tokens: Tensor, count: int) -> Tensor:
    """Tokens with the most probable ones behind them."""
    for _ in range(count):
        following = model.forward_only(tokens, outputs=lambda logits: logits[:, -1].argmax(-1))
        assert isinstance(following, Tensor)
        tokens = torch.cat([tokens, following[:, None]], 1)
    return tokens


def from_folder(
    family: str, folder: Path, other: Path
) -> tuple[int, dict[str, Tensor], slice, Tensor]:
    """The most parameters that this rank had of one model, what a step has made of all, this rank's
    rows, and what comes behind their tokens."""
    logging.disable_progress_bar()
    layers = huggingface.layers(folder / family)
    sgd = zeropp.OptimizerConfig("sgd", lr=0.01)
    with parallel(layers, sample=batch(0)[0][:1], optimizer=sgd, pp=2, shard=2) as model:
        tokens, targets, _ = (one[model.rows] for one in batch(0))
        model.train_step(tokens, targets)
        layers.save_pretrained(model, other / family)
        found = {layers.own_name(n): one for n, one in model.full_parameters()}
        behind = generated(model, prompt()[model.rows], GENERATED)
    return sum(one.numel() for one in found.values()), found, model.rows, behind


@pytest.mark.parametrize("family", SAVED)
def test_from_a_folder_into_another(world: World, family: str, tmp_path: Path) -> None:
    """A model that is read from a folder, trained and written is one for ``transformers``."""
    whole: Any = made(family)
    whole.float()
    whole.save_pretrained(tmp_path / "first" / family)
    whole.save_pretrained(tmp_path / "second" / family)  # an earlier model, which is replaced
    ranks = world.run(from_folder, family, tmp_path / "first", tmp_path / "second", size=4)
    make: Any = AutoModelForCausalLM
    again = make.from_pretrained(tmp_path / "second" / family)
    values = dict(again.named_parameters())
    seen = set()
    again.generation_config.eos_token_id = None
    length = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED}
    # Without a cache, which dynamic rotary embeddings do not keep right.
    behind = again.generate(prompt(), do_sample=False, use_cache=False, **length)
    for size, found, rows, tokens in ranks:
        assert torch.equal(tokens, behind[rows])
        assert size < sum(one.numel() for one in values.values())
        for name, one in found.items():
            seen.add(name)
            assert torch.equal(one, values[name]), name
    assert seen == set(values)
    start = dict(whole.named_parameters())
    assert sum(not torch.equal(start[name], one) for name, one in values.items()) > len(seen) / 2


def drawn() -> dict[str, float]:
    """Sums of the parameters of a model that no process has whole."""
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(config_of("gemma3_text"), dtype=torch.float32)
    layers = huggingface.layers(model, seed=3)
    with parallel(layers, sample=batch(0)[0][:MICROBATCH], pp=2) as model:
        return {n: float(one.double().square().sum()) for n, one in model.full_parameters()}


def test_a_model_is_drawn_layer_by_layer(world: World) -> None:
    first, second = world.run(drawn, size=2)
    assert not set(first) & set(second)
    assert any(size > 0 for size in {**first, **second}.values())


def test_a_head_with_a_weight_of_its_own_is_not_tied() -> None:
    model: Any = made("qwen3")
    tied = huggingface.layers(model).tied
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert (tied is None, huggingface.layers(model).tied) == (False, None)


def test_a_folder_with_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    model: Any = made("qwen3")
    model.save_pretrained(tmp_path)
    assert huggingface.layers(tmp_path).tied is not None
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    layers: Any = huggingface.layers(tmp_path)
    assert layers.tied is None
    head = dict(layers[-1]().named_parameters())["whole.lm_head.weight"]
    assert torch.equal(head.double(), model.lm_head.weight.float().double())


@on_ranks(1)
def test_a_folder_in_16_bits_comes_back_as_it_was(tmp_path: Path) -> None:
    came: Any = made("qwen3").bfloat16()
    came.generation_config.max_new_tokens = 7
    came.save_pretrained(tmp_path / "in")
    layers = huggingface.layers(tmp_path / "in")
    with parallel(layers, sample=batch(0)[0][:MICROBATCH]) as model:
        layers.save_pretrained(model, tmp_path / "out")
    back: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.generation_config.max_new_tokens == 7
    assert back.dtype == torch.bfloat16
    for name, one in came.named_parameters():
        assert torch.equal(one, back.get_parameter(name)), name


def test_the_extra_is_named_where_it_is_missing() -> None:
    code = "import sys; sys.modules['safetensors'] = None; import zeropp.huggingface"
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("needs safetensors (pip install 'zeropp[huggingface]')"), last


def test_modes_of_a_model_are_kept_unless_all_of_it_is_evaluated() -> None:
    model: Any = made("llama").eval()
    layers: Any = huggingface.layers(model)
    assert all(part.training for layer in layers for part in layer.modules())
    model.train().model.layers[1].mlp.eval()
    layers = huggingface.layers(model)
    modes = [{part.training for part in layer.modules()} for layer in layers]
    assert modes == [{True}, {True}, {True, False}, {True}, {True}, {True}]


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_was_moved_to_meta_is_tied_as_its_config_says(tied: bool) -> None:
    moved: Any = made("qwen3", tied)
    assert (huggingface.layers(moved.to("meta")).tied is not None) == tied


class Strange(torch.nn.Module):
    """Blocks of a model that does with them what ``forward`` says."""


def strange(change: Callable[[Any, Tensor], Tensor]) -> Any:
    """A Llama whose norm behind the blocks is something else."""
    model: Any = made("llama")
    norm = Strange()
    norm.forward = partial(change, model)
    norm.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    model.model.norm = norm
    return model


def test_what_cannot_be_cut_is_refused_with_the_missing_part() -> None:
    model: Any = made("llama")
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(zeropp.InfeasibleError, match="it calls 'extra' 0 times before and behind"):
        huggingface.layers(model)
    again = strange(lambda model, x: x + model.model.embed_tokens.weight[0])
    with pytest.raises(zeropp.InfeasibleError, match="it uses its embedding again behind its bl"):
        huggingface.layers(again)
    twice: Any = made("llama")
    twice.model.layers = torch.nn.ModuleList([*twice.model.layers, torch.nn.Identity()])
    twice.config.num_hidden_layers = 4
    with pytest.raises(zeropp.InfeasibleError, match="it calls 4 of its 5 blocks"):
        huggingface.layers(twice)
    with pytest.raises(zeropp.InfeasibleError, match="it gives no logits: take the class"):
        huggingface.layers(made("llama").model)
    fails = strange(lambda model, x: model.no_such_name)
    with pytest.raises(zeropp.InfeasibleError, match="blocks: it raises AttributeError: 'Llama"):
        huggingface.layers(fails)
    with pytest.raises(zeropp.InfeasibleError, match="model='meta-llama/Llama': no such folder"):
        huggingface.layers("meta-llama/Llama")


def test_a_routers_loss_is_refused() -> None:
    config = config_of("mixtral")
    config.output_router_logits = True
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(config)
    with pytest.raises(zeropp.InfeasibleError, match="model: output_router_logits=True is not"):
        huggingface.layers(model)


ADAPTER = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def adapted(how: str) -> Any:
    """A model with an adapter: peft's own, with a head that is trained, or of transformers."""
    model: Any = made("llama", False)
    torch.manual_seed(2)
    if how == "peft":
        saved = {"modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
        return peft.get_peft_model(model, peft.LoraConfig(**ADAPTER, **saved)).double()
    model.add_adapter(peft.LoraConfig(**ADAPTER))
    return model.double()


def trained(how: str, folder: Path) -> None:
    """Train one step, and write the adapter."""
    layers = huggingface.layers(adapted(how))
    tokens, targets, mask = batch(0)
    sgd = lambda groups: torch.optim.SGD(groups["all"], lr=RATE)  # noqa: E731
    keywords = {"attention_mask": mask}
    with parallel(layers, sample_keywords=keywords, pp=2, shard=2, optimizer=sgd) as model:
        given = (one[model.rows] for one in (tokens, targets))
        model.train_step(*given, attention_mask=mask[model.rows])
        layers.save_pretrained(model, folder)


def logits_after_a_step(model: Any) -> Tensor:
    """What one process gets."""
    tokens, targets, mask = batch(0)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=RATE)
    logits = model(tokens, attention_mask=mask).logits
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return logits_of(model)


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """What a model gives for a batch."""
    tokens, _, mask = batch(0)
    logits: Tensor = model.eval()(tokens, attention_mask=mask).logits
    return logits


# A release of transformers refuses a peft that is older than the one that it was made with, which
# can be one that is not yet published; an environment then has the newest of both, and cannot.
too_old = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"transformers {transformers.__version__} needs peft {MIN_PEFT_VERSION}",
)


@pytest.mark.parametrize("how", ["peft", pytest.param("transformers", marks=too_old)])
def test_an_adapter_is_trained_and_written_as_peft_does(
    world: World, how: str, tmp_path: Path
) -> None:
    world.run(trained, how, tmp_path, size=4)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors.index.json" not in files
    again = peft.PeftModel.from_pretrained(made("llama", False), tmp_path).double()
    begin, expected = logits_of(adapted(how)), logits_after_a_step(adapted(how))
    assert float((expected - begin).abs().max()) > 1e-3
    assert float((logits_of(again) - expected).abs().max()) < 1e-5  # written in fp32


def test_adapters_that_could_not_be_written_are_refused() -> None:
    two = adapted("peft")
    two.add_adapter("other", peft.LoraConfig(**ADAPTER))
    with pytest.raises(zeropp.InfeasibleError, match="has the adapters \\['default', 'other'\\]"):
        huggingface.layers(two)
    prompt = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(zeropp.InfeasibleError, match="is outside of the model, where no layer"):
        huggingface.layers(peft.get_peft_model(made("llama", False), prompt))
