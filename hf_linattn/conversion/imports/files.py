"""State dicts from files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


def read_tensors(source: Mapping[str, Tensor] | str | os.PathLike) -> dict[str, Tensor]:
    """Tensors by name: of a mapping as they are; of a .safetensors or torch file; of a folder with safetensors in it.

    A torch file may hold them under `model_state_dict`. No code in it is run.
    """
    if isinstance(source, Mapping):
        found = dict(source)
    else:
        path = Path(source)
        if path.is_dir():
            index = path / INDEX
            names = {"model.safetensors"}
            if index.is_file():
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return {key: value for name in sorted(names) for key, value in read_tensors(path / name).items()}
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file of weights")
        is_safe = path.suffix == ".safetensors"
        found = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    found = found.get("model_state_dict", found)
    strange = [name for name, value in found.items() if not isinstance(value, Tensor)]
    if strange:
        raise ValueError(f"{strange[0]!r} is no tensor: give a state dict, or a file of one")
    return found
