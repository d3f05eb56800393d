"""The codes that are compared, each as it is commonly called; what they cannot do here they say in one line.

Every side is a causal function of q, k, v with the feature map elu(x) + 1 (softmax attention aside). What a code
wants that is not measured (a layout of memory) is done before; what its users have to do at every call is measured.

B batch, T length, H heads, D head dim, N chunks, C tokens of a chunk, F features (here D), E value dim (here D).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu, pad, scaled_dot_product_attention

from ..ops import backends, linear_attention
from .tables import NOT_CHOSEN

FEATURE_MAP = "elu1"
BUCKET = 64  # tokens; no slower than 128 here, and faster up to some thousand tokens


class Side(NamedTuple):
    """One code: `run(q, k, v)` -> out, all [B, T, H, D], or [B, H, T, D] if `heads_first`."""

    label: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    heads_first: bool = False
    is_linear: bool = True


def package(backend: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """This package's function with a backend of its own name."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, feature_map=FEATURE_MAP, backend=backend)[0]

    return run


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def bucketed(q: Tensor, k: Tensor, v: Tensor, chunk: int = BUCKET) -> Tensor:
    """Linear attention in chunks as plain PyTorch, with whole tensors and autograd: [B, H, T, D] -> [B, H, T, E]."""
    length = q.shape[2]
    phi_q, phi_k = elu(q) + 1, elu(k) + 1
    missing = -length % chunk
    phi_q, phi_k, v = (pad(x, (0, 0, 0, missing)).unflatten(2, (-1, chunk)) for x in (phi_q, phi_k, v))
    mu = torch.einsum("bhncf,bhnce->bhnfe", phi_k, v).cumsum(2)
    nu = phi_k.sum(3).cumsum(2)
    mu, nu = pad(mu[:, :, :-1], (0, 0, 0, 0, 1, 0)), pad(nu[:, :, :-1], (0, 0, 1, 0))  # the sums before each chunk
    weights = torch.einsum("bhncf,bhnmf->bhncm", phi_q, phi_k).tril()
    out = torch.einsum("bhncm,bhnme->bhnce", weights, v) + torch.einsum("bhncf,bhnfe->bhnce", phi_q, mu)
    total = weights.sum(-1) + torch.einsum("bhncf,bhnf->bhnc", phi_q, nu)
    return out.flatten(2, 3)[:, :, :length] / total.flatten(2, 3)[:, :, :length, None]


def flash_linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernels of the package fla, which take features: the map comes first, by torch."""
    from fla.ops.linear_attn import chunk_linear_attn

    # releases of 2024 and early 2025 take heads before time unless they are told
    options = {"head_first": False} if "head_first" in _parameters(chunk_linear_attn) else {}
    return chunk_linear_attn(elu(q) + 1, elu(k) + 1, v, scale=1.0, normalize=True, **options)[0]


SIDES = {
    "triton": Side("linear, Triton kernels", package("triton")),
    "native": Side("linear, C kernels", package("native")),
    "torch": Side("linear, PyTorch", package("torch")),
    "bucketed": Side("linear, buckets in plain PyTorch", bucketed, heads_first=True),
    "fla": Side("flash-linear-attention", flash_linear_attention),
    "softmax": Side("softmax (SDPA)", softmax, heads_first=True, is_linear=False),
}


def why_not(side: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a side cannot run here, in one line, or `None` if it can."""
    if side in ("triton", "native"):
        x = torch.empty(1, 2, 1, head_dim, device=device, dtype=dtype)
        return backends.kernels(side).unsupported(x, x, x, feature_map=FEATURE_MAP)
    return _why_not_fla(device) if side == "fla" else None


def _why_not_fla(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError as error:
        return f"cannot be imported: {' '.join(str(error).split())}"
    if not {"scale", "normalize"} <= set(_parameters(chunk_linear_attn)):
        return "its chunk_linear_attn does not take scale and normalize"
    return None


def _parameters(function: Callable) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def sides_here(
    device: torch.device, dtype: torch.dtype, head_dim: int, chosen: Sequence[str] | None = None
) -> tuple[dict[str, Side], dict[str, str]]:
    """The sides that run here, of those `chosen`, this package's best first; and for the labels of the others, why they
    do not."""
    reasons = {name: why_not(name, device, dtype, head_dim) for name in SIDES}
    for name in SIDES.keys() - set(chosen or SIDES):
        reasons[name] = reasons[name] or NOT_CHOSEN
    here = {name: SIDES[name] for name, reason in reasons.items() if reason is None}
    return here, {SIDES[name].label: reason for name, reason in reasons.items() if reason is not None}


def attention_call(run: Callable, tensors: Sequence[Tensor], name: str) -> Callable[[], Any]:
    """One pass of a side over (q, k, v, gradient of out), to be called any number of times.

    `name`: "forward", without gradients; "forward+backward", with those of q, k and v; "backward", after a forward
    that is done once, here.
    """
    *inputs, grad = tensors
    if name == "forward":
        return torch.no_grad()(lambda: run(*inputs))
    inputs = [x.detach().requires_grad_() for x in inputs]
    if name == "forward+backward":
        return lambda: torch.autograd.grad(run(*inputs), inputs, grad)
    out = run(*inputs)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
