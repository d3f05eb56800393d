"""Launched by test_fsdp_pretrain.py: pretrain.py under FSDP2 on CPUs, twice, the second time from a checkpoint.

accelerate keeps FSDP2 to accelerators; told here that this is one, its own code shards, checkpoints and merges on gloo.
"""

import shutil
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

import pretrain

initialize = AcceleratorState.__init__


def initialize_for_fsdp(self, *args, fsdp_plugin=None, **options) -> None:
    initialize(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = initialize_for_fsdp
Accelerator.end_training = lambda self: None  # keeps the process group for the second run
arguments = sys.argv[1:]
folder = Path(arguments[arguments.index("--output_dir") + 1])
pretrain.main(arguments)
if dist.get_rank() == 0:
    shutil.copytree(folder, folder.with_name("whole"))
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
dist.barrier()
AcceleratorState._reset_state(reset_partial_state=True)
GradientState._reset_state()
pretrain.main(arguments)
dist.destroy_process_group()
