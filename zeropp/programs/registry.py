"""The registry of programs by name. Plans, validation, tuner, verdict and contenders read it."""

from __future__ import annotations

from zeropp.programs import fully_sharded, megatron, ours
from zeropp.programs.entry import Entry
from zeropp.programs.traits import Program

ENTRIES: dict[str, Entry] = {
    entry.program.name: entry
    for entry in (
        ours.ZEROPP,
        ours.FSDP,
        ours.TORCH_PP,
        ours.DEEPSPEED_3D,
        ours.BEST_PUBLIC_3D,
        megatron.MEGATRON_LM_2021,
        megatron.MEGATRON_LM_2022,
        megatron.MEGATRON_LM_V100,
        megatron.MEGATRON_DEEPSPEED_2022,
        megatron.VTRAIN_PREDICTOR,
        megatron.MEGATRON_DEEPSPEED,
        megatron.MEGATRON_CORE_R08,
        megatron.MEGATRON_CORE,
        megatron.MEGATRON_CORE_R06,
        megatron.FLAGSCALE,
        megatron.NEMO_H100,
        megatron.ZERO_BUBBLE,
        megatron.CONTROLLABLE_MEMORY,
        megatron.LIBAI,
        megatron.INTERNEVO,
        megatron.NANOTRON,
        megatron.ALEPH_ALPHA_SCALING,
        fully_sharded.LLM_FOUNDRY,
        fully_sharded.FMS_FSDP,
        fully_sharded.FMS_FSDP_EAGER,
        fully_sharded.TORCHTITAN,
        fully_sharded.TORCHTITAN_COMPILED,
        fully_sharded.TORCHTITAN_3D,
        fully_sharded.FLASH_ATTENTION_GPT,
    )
}


def entry_named(name: str) -> Entry:
    """The entry of a registered program; raises ValueError with the names that there are."""
    if name not in ENTRIES:
        raise ValueError(f"program={name!r}: not registered (known: {', '.join(sorted(ENTRIES))})")
    return ENTRIES[name]


def program_named(name: str) -> Program:
    """A registered program; raises ValueError with the names that there are."""
    return entry_named(name).program
