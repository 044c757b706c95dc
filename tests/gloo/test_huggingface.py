"""Models of Hugging Face by a call: as in one process, and from and into their folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import zeropp
from tests.gloo.differences import largest
from tests.gloo.topologies import ROWS, topology
from tests.gloo.world import World
from zeropp import huggingface

MICROBATCH, LENGTH, VOCABULARY, STEPS, RATE = 2, 10, 60, 2, 0.5
TOPOLOGIES = 20
# How far gradients may be from one process's, in fp64. Gemma's norms add up the gradients of their
# weights in fp32, so that it matters where a batch is cut.
BOUNDS = {"gemma2": 5e-6, "gemma3_text": 5e-6}
_SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 4}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 4}
_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Each family in the setting that differs most from the others: ties, windows, projections, dropout.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "max_position_embeddings": LENGTH - 2,
              "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "qwen2": {**_LLAMA, "use_sliding_window": True, **_WINDOW, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "tie_word_embeddings": True},
    "mistral": {**_LLAMA, "sliding_window": 4},
    "gemma2": {**_LLAMA, "query_pre_attn_scalar": 4, **_WINDOW},
    "gemma3_text": {**_LLAMA, "query_pre_attn_scalar": 4, **_WINDOW},
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 4, "n_positions": 16,
             "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {**_SIZES, "intermediate_size": 24},
    "opt": {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 12, "dropout": 0.0,
            "max_position_embeddings": 16},
    "mixtral": {**_LLAMA, "num_local_experts": 4, "sliding_window": 4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    yield
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def config_of(family: str, tied: bool | None = None) -> Any:
    """A tiny model's configuration; by default it ties what the family's setting here does."""
    more: dict[str, Any] = {} if tied is None else {"tie_word_embeddings": tied}
    if family in ("gemma2", "gpt_neox"):
        more["attn_implementation"] = "eager"
    if family == "mixtral":  # torch has no grouped products in fp64
        more["experts_implementation"] = "eager"
    return AutoConfig.for_model(
        family, vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **FAMILIES[family] | more,
    )  # fmt: skip


def made(family: str, tied: bool | None = None) -> PreTrainedModel:
    """A tiny model in fp64, the same at every call, with weights that are not small."""
    torch.manual_seed(1)
    make: Any = AutoModelForCausalLM
    model: PreTrainedModel = make.from_config(config_of(family, tied), dtype=torch.float64)
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


@cache
def alone(family: str, tied: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and the last gradients after some steps of plain SGD in one process, through the
    model's own forward."""
    model: Any = made(family, tied)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets, mask = batch(step)
        logits = model(tokens, attention_mask=mask).logits
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


def train(drawn: dict[str, Any], expected: Expected) -> dict[str, tuple[float, float]]:
    """How far parameters and gradients of each family are from those of one process."""
    apart = {}
    degrees = {name: value for name, value in drawn.items() if name not in ("microbatch", "tied")}
    rows = drawn["microbatch"]
    for family, (parameters, gradients) in expected.items():
        layers = huggingface.layers(made(family, drawn["tied"]))
        with zeropp.parallelize(
            layers,
            huggingface.token_loss,
            sample=batch(0)[0][:rows],
            sample_keywords={"attention_mask": batch(0)[2][:rows]},
            global_batch=ROWS,
            loss_reduction="tokens",
            optimizer=lambda groups: torch.optim.SGD(groups["all"], lr=RATE),
            **degrees,
        ) as model:
            for step in range(STEPS):
                tokens, targets, mask = (one[model.rows] for one in batch(step))
                model.train_step(tokens, targets, attention_mask=mask)
            pairs = (model.full_parameters(), parameters), (model.gradients(), gradients)
            first, second = (
                largest([float((one - theirs[layers.own_name(n)]).abs().max()) for n, one in ours])
                for ours, theirs in pairs
            )
            apart[family] = first, second
    return apart


def check(world: World, seed: int, families: Iterable[str]) -> None:
    """Hold a random topology to one process. Parameters are given in fp32, gradients in fp64."""
    drawn = topology(seed)
    expected = {family: alone(family, drawn["tied"]) for family in families}
    size = drawn["pp"] * drawn["shard"] * drawn["replicate"]
    for apart in world.run(train, drawn, expected, size=size):
        assert set(apart) == set(expected)
        for family, (parameters, gradients) in apart.items():
            bound = BOUNDS.get(family, 1e-9)
            assert parameters < bound + 1e-6, (family, parameters, drawn)
            assert gradients < bound, (family, gradients, drawn)


@pytest.mark.parametrize("seed", range(len(FAMILIES) // 2))
def test_random_topologies_are_one_process(world: World, seed: int) -> None:
    check(world, seed, list(FAMILIES)[seed :: len(FAMILIES) // 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_see_what_they_see_in_transformers(family: str) -> None:
    model: Any = made(family)
    tokens = batch(0)[0]
    places = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand_as(tokens).clone()
    places[1::2] = torch.arange(LENGTH)  # rows of a single document
    with torch.no_grad():
        expected = model(input_ids=tokens, position_ids=places, use_cache=False).logits
        hidden: Any = tokens
        layers: Any = huggingface.layers(model)
        for layer in layers:
            hidden = layer(hidden, position_ids=places)
    assert float((hidden - expected).abs().max()) < 1e-9


SAVED = ("qwen3", "gpt2", "mixtral")


def from_folder(family: str, folder: Path, other: Path) -> tuple[int, dict[str, Tensor]]:
    """The most parameters that this rank had of one model, and what a step has made of all."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    layers = huggingface.layers(folder / family)
    with zeropp.parallelize(
        layers,
        huggingface.token_loss,
        loss_reduction="tokens",
        sample=batch(0)[0][:MICROBATCH],
        global_batch=ROWS,
        optimizer=zeropp.OptimizerConfig("sgd", lr=RATE),
        pp=2,
        shard=2,
    ) as model:
        tokens, targets, _ = (one[model.rows] for one in batch(0))
        model.train_step(tokens, targets)
        layers.save_pretrained(model, other / family)
        found = {layers.own_name(n): one for n, one in model.full_parameters()}
    return sum(one.numel() for one in found.values()), found


@pytest.mark.parametrize("family", SAVED)
def test_from_a_folder_into_another(world: World, family: str, tmp_path: Path) -> None:
    whole: Any = made(family)
    whole.float()
    whole.save_pretrained(tmp_path / "first" / family)
    ranks = world.run(from_folder, family, tmp_path / "first", tmp_path / "second", size=4)
    make: Any = AutoModelForCausalLM
    again = make.from_pretrained(tmp_path / "second" / family)
    values = dict(again.named_parameters())
    seen = set()
    for size, found in ranks:
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
    with zeropp.parallelize(
        layers, huggingface.token_loss, loss_reduction="tokens",
        sample=batch(0)[0][:MICROBATCH], global_batch=ROWS, pp=2,
    ) as model:  # fmt: skip
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


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_was_moved_to_meta_is_tied_as_its_config_says(tied: bool) -> None:
    moved: Any = made("qwen3", tied)
    assert (huggingface.layers(moved.to("meta")).tied is not None) == tied


def test_other_families_are_refused() -> None:
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        bloom = make.from_config(AutoConfig.for_model("bloom", n_layer=1, hidden_size=8, n_head=2))
    with pytest.raises(zeropp.InfeasibleError, match="its family 'bloom' is not known"):
        huggingface.layers(bloom)


class Adapted(torch.nn.Module):
    """A linear layer with a LoRA adapter, under the names that peft gives."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        down = torch.nn.Linear(layer.in_features, 2, bias=False)
        self.base_layer, self.lora_A = layer, torch.nn.ModuleDict({"default": down})


def test_adapters_are_refused_before_training() -> None:
    model: Any = made("llama")
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    words = "model.layers.1.self_attn.q_proj.base_layer.weight' belongs to an adapter of peft"
    with pytest.raises(zeropp.InfeasibleError, match=re.escape(words)):
        huggingface.layers(model)


def test_a_routers_loss_is_refused() -> None:
    config = config_of("mixtral")
    config.output_router_logits = True
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(config)
    with pytest.raises(zeropp.InfeasibleError, match="model: output_router_logits=True is not"):
        huggingface.layers(model)


def main() -> None:
    """All families in every topology, which takes some minutes:
    ``python -m tests.gloo.test_huggingface``."""
    torch.set_num_threads(1)  # as ranks do: softmax in fp32 rounds otherwise with more
    with World() as world:
        for seed in range(TOPOLOGIES):
            check(world, seed, FAMILIES)
            print(seed, topology(seed), flush=True)


if __name__ == "__main__":
    main()
