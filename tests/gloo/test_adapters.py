"""Models with adapters of peft: trained as in one process, and written as peft does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.peft import MIN_PEFT_VERSION

import zeropp
from tests.gloo.test_huggingface import RATE, batch, made, parallel
from tests.gloo.world import World
from zeropp import huggingface

peft = pytest.importorskip("peft")
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
    trainable = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=RATE)
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
