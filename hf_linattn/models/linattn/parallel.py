"""Tensor parallelism: each rank computes some of the heads, and holds their weights and their part of the state.

The plan of the config shards projections, convolutions and feature maps by head. What it cannot say is done to each
attention module here: counting only the heads of this rank, reading sharded parameters as plain tensors, and summing
the gradients of norms that all heads share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.distributed import DistributedConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from ...layers import LinearAttention, ShortConvolution
from .configuration_linattn import LinAttnConfig

HEADS_FIRST = "heads_first"


class HeadsFirstParallel(TensorParallelLayer):
    """Shards every parameter of a module over its first dimension: heads of a feature map, channels of a convolution.

    The attention module reads them as plain tensors (`shard_attention`), so calls need nothing.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        whole = module._parameters[param]
        part = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(part, requires_grad=whole.requires_grad)

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        return module


ALL_PARALLEL_STYLES.register(HEADS_FIRST, HeadsFirstParallel())


def parallelize(model: PreTrainedModel, mesh: Any) -> PreTrainedModel:
    """Shard a model that is in memory over the ranks of `mesh`, in place, by the tensor parallel plan of its config.

    For a checkpoint, `from_pretrained(path, distributed_config=DistributedConfig(tp_size=N))` does the same and reads
    only the part of each rank.

    Args:
        model: with the same weights on every rank; any model of this package.
        mesh: a `DeviceMesh` of one dimension, whose size divides the key heads.

    Returns:
        `model`. Each rank gives the logits of the whole model and keeps mu, nu of Hk / N heads; `save_pretrained`,
        called on every rank, writes the whole checkpoint once.

    Raises:
        ValueError: a model of another kind, a mesh of more dimensions, or a size that does not divide the key heads.

    Example:

        >>> mesh = torch.distributed.init_device_mesh("cuda", (8,))
        >>> model = hf_linattn.parallelize(LinAttnForCausalLM(config), mesh)
    """
    from torch.distributed.tensor.parallel import parallelize_module

    if not isinstance(model.config, LinAttnConfig):
        raise ValueError(f"parallelize shards models of model_type 'linattn', not {model.config.model_type!r}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions; pass the one of tensor parallelism, as mesh['tp']")
    check_tensor_parallel(model, mesh.size())
    parallelize_module(model, mesh, torch_plan(model))
    shard_attentions(model, mesh)
    model.tie_weights()
    # what generate() and save_pretrained() read
    model._tp_size, model._device_mesh = mesh.size(), mesh
    model.config.distributed_config = DistributedConfig(tp_size=mesh.size())
    return model


def torch_plan(model: PreTrainedModel) -> dict[str, Any]:
    """The model's plan as torch's `parallelize_module` takes it, one style for each module that it shards."""
    from torch.distributed.tensor.parallel.style import ParallelStyle

    class Style(ParallelStyle):
        def __init__(self, style: TensorParallelLayer):
            self.style = style

        def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
            for name, _ in list(module.named_parameters(recurse=False)):
                self.style.shard_param(module, name, mesh)
            return self.style.install_forward(module, mesh)

    rules = {name: model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name, _ in model.named_modules()}
    return {name: Style(ALL_PARALLEL_STYLES[rule]) for name, rule in rules.items() if rule is not None}


def check_tensor_parallel(model: PreTrainedModel, ranks: int) -> None:
    """Raise where `ranks` ranks cannot share the heads of `model`."""
    heads, key_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    if key_heads % ranks:
        choices = [size for size in range(1, key_heads + 1) if key_heads % size == 0]
        raise ValueError(
            f"tensor parallel size {ranks} does not divide num_key_value_heads={key_heads}; choose one of {choices}"
        )
    for attention in _attentions(model, LinearAttention):
        for name, parameter in attention.feature_map.named_parameters():
            if "." in name or parameter.dim() == 0 or parameter.shape[0] not in (heads, key_heads):
                raise ValueError(
                    f"feature_map={model.config.feature_map!r} cannot be sharded by head: its parameter {name!r} has "
                    f"shape {list(parameter.shape)}; the first dimension must be the heads, {heads} or {key_heads}"
                )


def shard_attentions(model: PreTrainedModel, mesh: Any) -> None:
    """Make every attention module of `model`, whose parameters are sharded over `mesh`, run on this rank's heads."""
    for attention in _attentions(model, nn.Module):
        shard_attention(attention, mesh)


def shard_attention(attention: nn.Module, mesh: Any) -> None:
    """The same for one module."""
    if isinstance(attention, LinearAttention):
        attention.num_heads //= mesh.size()
        attention.num_key_value_heads //= mesh.size()
    parts = [part for part in attention.modules() if part._parameters and not isinstance(part, nn.Linear)]
    for part in parts:
        if isinstance(part, ShortConvolution):
            part.channels //= mesh.size()
    if not parts:
        return
    forward, group = attention.forward, mesh.get_group()

    def local_forward(*args: Any, **kwargs: Any):
        with _local_parameters(parts, group):
            return forward(*args, **kwargs)

    attention.forward = local_forward


def fill(parameter: Tensor, value: Tensor) -> None:
    """Initialise `parameter`, or the part of it that this rank holds, with `value`, unless it was loaded."""
    if hasattr(parameter, "placements") and not hasattr(value, "placements"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    init.copy_(parameter, value)


def _attentions(model: PreTrainedModel, kind: type[nn.Module]) -> Iterator[nn.Module]:
    for name, module in model.named_modules():
        if name.endswith("self_attn") and isinstance(module, kind):
            yield module


@contextmanager
def _local_parameters(parts: list[nn.Module], group: Any) -> Iterator[None]:
    """Sharded parameters as this rank's part; the others, which serve the heads of all ranks, with summed gradients."""
    whole = [(part, name, p) for part in parts for name, p in part._parameters.items() if isinstance(p, nn.Parameter)]
    for part, name, parameter in whole:
        is_sharded = hasattr(parameter, "to_local")
        part._parameters[name] = parameter.to_local() if is_sharded else _SumGradient.apply(parameter, group)
    try:
        yield
    finally:
        for part, name, parameter in whole:
            part._parameters[name] = parameter


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is the sum over the ranks of `group`.

    A hook on the accumulated gradient would sum what earlier micro-batches left in it once more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
