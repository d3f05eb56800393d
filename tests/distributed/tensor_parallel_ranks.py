"""Run by test_tensor_parallel.py on every rank."""

import torch
import torch.distributed as dist
from helpers import make_llama, make_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_linattn
from hf_linattn import LinAttnForCausalLM, LinearAttentionCache

from .ranks import join, leave, whole
from .tensor_parallel_cases import CASES, IDS, measure, model_of


def message(call, *arguments, **options) -> str:
    try:
        call(*arguments, **options)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


rank, ranks, folder = join()
mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
results = {"in memory": {}, "loaded": {}, "messages": {}}

for case in CASES:
    results["in memory"][case] = measure(hf_linattn.parallelize(model_of(case), mesh))

# a checkpoint, read by parts and written whole
for case in ("favor", "all"):
    model = AutoModelForCausalLM.from_pretrained(folder / case, distributed_config=DistributedConfig(tp_size=ranks))
    results["loaded"][case] = measure(model)
model.save_pretrained(folder / "again")

# a checkpoint without the parameters of the map and the convolution: they start as in one process
model = LinAttnForCausalLM.from_pretrained(
    folder / "all",
    feature_map="hedgehog",
    conv_kernel_size=3,
    ignore_mismatched_sizes=True,
    distributed_config=DistributedConfig(tp_size=ranks),
)
attention = model.model.layers[0].self_attn
results["started"] = [whole(p) for part in (attention.feature_map, attention.q_conv) for p in part.parameters()]
results["parts"] = [part.weight.to_local().shape for part in (attention.q_proj, attention.k_conv, attention.o_proj)]

# what is refused
three = make_model("linear", num_attention_heads=3, head_dim=4)
results["messages"]["three heads"] = message(hf_linattn.parallelize, three, mesh)
results["messages"]["a llama"] = message(hf_linattn.parallelize, make_llama(), mesh)
grid = torch.distributed.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
results["messages"]["two dimensions"] = message(hf_linattn.parallelize, model_of("conv"), grid)
if rank == 0:
    three.save_pretrained(folder / "three")
dist.barrier()
results["messages"]["three heads, loaded"] = message(
    AutoModelForCausalLM.from_pretrained, folder / "three", distributed_config=DistributedConfig(tp_size=ranks)
)
cache = LinearAttentionCache(model.config)
with torch.no_grad():
    model(IDS, cache=cache)
results["messages"]["save"] = message(cache.save, folder / f"state{rank}")
results["messages"]["save, with its model"] = message(cache.save, folder / f"state{rank}", model)
results["messages"]["load"] = message(LinearAttentionCache.load, folder / "state", model)
leave(results)
