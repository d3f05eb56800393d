"""Run by test_fsdp.py on every rank."""

import torch.distributed.checkpoint as dcp
from helpers import random_ids
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from .fsdp_cases import CASES, CHECKPOINTED, SPLIT, STEPS, model_of, optimizer_of, train
from .ranks import join, leave


def sharded(case: str):
    """The model of a case, sharded module by module as its class says, and its optimizer."""
    model = model_of(case)
    if case in CHECKPOINTED:
        model.activation_checkpointing_enable()
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module)
    fully_shard(model)
    return model, optimizer_of(model)


rank, ranks, folder = join()
results = {}
for case in CASES:
    model, optimizer = sharded(case)
    here = results[case] = {
        "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "local": sum(parameter.to_local().numel() for parameter in model.parameters()),
        "losses": train(model, optimizer, range(SPLIT)),
    }
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / case / "sharded")
    here["losses"] += train(model, optimizer, range(SPLIT, STEPS))

    # the same from the checkpoint
    model, optimizer = sharded(case)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder / case / "sharded")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    here["resumed"] = train(model, optimizer, range(SPLIT, STEPS))

    # merged
    merged = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    here["merged"] = dict(merged)  # saving empties what it is given
    model.save_pretrained(folder / case / "merged", state_dict=merged, is_main_process=rank == 0)

model = AutoModelForCausalLM.from_pretrained(folder / "whole", distributed_config=DistributedConfig(fsdp_size=ranks))
results["loaded"] = model(random_ids(2, 40), use_cache=False).logits.detach()
leave(results)
