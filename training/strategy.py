"""Which parallel strategy runs, read from the prepared model: a configuration can ask for what does not happen."""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from accelerate import Accelerator


def report(accelerator: Accelerator, model: torch.nn.Module) -> str:
    """The strategy of a model from `accelerator.prepare`, in one line; a second one if another was configured."""
    running = found(accelerator, model)
    line = "strategy: " + (" and ".join(running) or "one process")
    if accelerator.num_processes > 1 and not running:
        line = f"warning: {accelerator.num_processes} processes share nothing: each trains a model of its own"
    missing = [name for name in configured(accelerator) if not any(part.startswith(name) for part in running)]
    if missing:
        reason = "; accelerate shards on accelerators only" if accelerator.device.type == "cpu" else ""
        line += f"\nwarning: the configuration asks for {' and '.join(missing)}, which does not run{reason}"
    return line


def found(accelerator: Accelerator, model: torch.nn.Module) -> list[str]:
    """What the modules and parameters of `model` show, outermost first; empty for a plain model."""
    kinds = [f"{type(module).__module__}.{type(module).__name__}" for module in model.modules()]
    if any(kind.startswith("deepspeed.") for kind in kinds):
        return [f"DeepSpeed ZeRO-{model.zero_optimization_stage()}, {accelerator.num_processes} processes"]
    if any(kind.endswith(".DistributedDataParallel") for kind in kinds):
        return [f"DDP, {accelerator.num_processes} processes, {dist.get_backend()}"]
    if any(kind.endswith(".FullyShardedDataParallel") for kind in kinds):
        return [f"FSDP1, {accelerator.num_processes} processes"]
    is_fsdp = any(kind.rpartition(".")[2].startswith("FSDP") for kind in kinds)
    sharded = dict(_sharded(model, is_fsdp))
    return [f"{name}{size}{' processes' if name.startswith('FSDP') else ''}" for name, size in sharded.items()]


def _sharded(model: torch.nn.Module, is_fsdp: bool) -> Iterator[tuple[str, int]]:
    """(strategy, ranks) of every dimension of a mesh over which some parameter is split."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        for dimension, placement in enumerate(parameter.placements if mesh is not None else ()):
            name = (mesh.mesh_dim_names or [""] * mesh.ndim)[dimension]
            if placement.is_replicate() or mesh.size(dimension) == 1:
                continue
            yield ("tensor parallel " if name == "tp" or not is_fsdp else "FSDP2, "), mesh.size(dimension)


def configured(accelerator: Accelerator) -> list[str]:
    """What `accelerate launch` or the script asked for, as the strategies are called here."""
    asked = []
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        asked.append("DeepSpeed")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        asked.append(f"FSDP{os.environ.get('FSDP_VERSION', '1')}")
    parallelism = accelerator.parallelism_config
    if parallelism is not None and parallelism.tp_size > 1:
        asked.append(f"tensor parallel {parallelism.tp_size}")
    return asked
