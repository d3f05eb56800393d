"""Which code runs a call: PyTorch everywhere, C kernels on a CPU, Triton kernels on a GPU.

    torch     any device, dtype, map and form; what the others are compared with
    native    the causal form on a CPU, float32 and bfloat16; compiled by the machine's own C compiler (native/)
    triton    both forms on a GPU (triton/)

`backend="auto"` takes the native kernels where they can run a call on a CPU, and PyTorch otherwise: on a GPU too, until
the Triton kernels, proven in Triton's interpreter, have run on one. The environment variable `HF_LINATTN_BACKEND` names
another first choice for `"auto"`. A first choice that cannot run here is said once, in a warning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .feature_maps import FeatureMap, make_feature_map
from .state import LinearAttentionState

BACKENDS = ("auto", "torch", "native", "triton")
VARIABLE = "HF_LINATTN_BACKEND"


class Choice(NamedTuple):
    """A backend, and in one line why it is the one."""

    backend: str
    reason: str


@functools.cache
def absent(backend: str) -> str | None:
    """Why a backend other than `"torch"` has no package here, in one line, or `None`: checkpoints carry no kernels."""
    if importlib.util.find_spec(f"{__package__}.{backend}") is None:
        return "this code was read from a checkpoint, which carries none; with hf_linattn installed they serve"
    return None


def kernels(backend: str) -> ModuleType:
    """The package of a backend other than `"torch"`, imported on first use."""
    if absent(backend) is not None:
        raise RuntimeError(f"backend={backend!r} cannot run this call, for it has no kernels: {absent(backend)}")
    return importlib.import_module(f".{backend}", __package__)


def form(backend: str) -> Callable[..., tuple[Tensor, LinearAttentionState | None]]:
    """The function of a backend other than `"torch"`, with the signature of the torch forms."""
    return getattr(kernels(backend), f"{backend}_linear_attention")


def choose(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: FeatureMap | str | None = None, causal: bool = True
) -> Choice:
    """What `backend="auto"` takes for this call.

    Raises:
        ValueError: `HF_LINATTN_BACKEND` names no backend.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in BACKENDS:
        raise ValueError(f"{VARIABLE}={wanted!r} is unknown; choose one of {list(BACKENDS)}")
    if wanted == "torch":
        return Choice("torch", f"{VARIABLE} names it")
    if wanted == "auto" and q.device.type != "cpu":
        return Choice("torch", "the Triton kernels run by name only, until they have run on a GPU")
    if torch.compiler.is_compiling():
        return Choice("torch", "torch.compile fuses the PyTorch form itself")
    if torch._C._len_torch_dispatch_stack():
        return Choice("torch", "a dispatch mode is on (fake tensors, a count of operations), which sees only PyTorch")
    name = "native" if wanted == "auto" else wanted
    if name == "native" and causal and q.shape[1] == 1:
        return Choice("torch", "one token is a recurrence, a handful of calls in PyTorch")
    is_absent = absent(name) is not None
    reason = absent(name) or kernels(name).unsupported(q, k, v, feature_map=feature_map, causal=causal)
    if reason is None:
        return Choice(name, f"{VARIABLE} names it" if wanted == name else "the fastest here")
    # what no CPU kernel is made for is not worth a word; a kernel that was asked for, or that this machine lacks, is
    if wanted == name or is_absent or reason == kernels("native").missing():
        _say_once(f"linear attention runs in PyTorch, without {name} kernels: {reason}")
    return Choice("torch", f"{name}: {reason}")


def survey(device: torch.device | str) -> dict[str, Choice]:
    """What `backend="auto"` takes on `device`, case by case."""
    cases: dict[str, dict[str, Any]] = {
        f"causal, {str(dtype).removeprefix('torch.')}": {"dtype": dtype}
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    }
    cases["causal, learned feature map"] = {"feature_map": make_feature_map("hedgehog", 64)}
    cases["not causal"] = {"causal": False}
    cases["one token (decoding)"] = {"length": 1}
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case, options in cases.items():
            options = {"dtype": torch.float32, "length": 2, "feature_map": "elu1", **options}
            x = torch.empty(1, options.pop("length"), 1, 64, dtype=options.pop("dtype"), device=device)
            found[case] = choose(x, x, x, **options)
    return found


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
