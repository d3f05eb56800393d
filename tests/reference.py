"""Linear attention as its definition reads, in float64: an oracle that shares no code with the package.

    weight_ij = phi(q_i) . phi(k_j)
    out_i     = (phi(q_i) mu_0 + sum_j weight_ij v_j) / (phi(q_i) . nu_0 + sum_j weight_ij)

where j runs over the keys that query i may see: real ones, of its own document, and up to i when causal. Every sum is
written out, one query row at a time; no running state, no matrix identity. Autograd works through it.

B batch, T queries, S keys, Hq query heads, Hk key heads, D head dim, F feature dim, E value dim, N documents.
"""

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# Feature maps: phi(x, weight, bias) for x [..., H, D], weight [H, D, F0], bias [H, F0]


def _project(x, weight):
    """Row h of x times matrix h, one head after another."""
    return torch.stack([x[..., h, :] @ weight[h] for h in range(x.shape[-2])], dim=-2)


def _softmax(x):
    e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return e / e.sum(dim=-1, keepdim=True)


def elu1(x, weight=None, bias=None):
    return torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, torch.zeros_like(x), x)))


def relu(x, weight=None, bias=None):
    return torch.where(x > 0, x, torch.zeros_like(x))


def squared_relu(x, weight=None, bias=None):
    return relu(x) * relu(x)


def exp(x, weight=None, bias=None):
    return torch.exp(x)


def softmax(x, weight=None, bias=None):
    return _softmax(x)


def taylor2(x, weight=None, bias=None):
    d = x.shape[-1]
    pairs = [x[..., i] * x[..., j] / math.sqrt(2 * d) for i in range(d) for j in range(d)]
    return torch.cat([torch.ones_like(x[..., :1]), x / d**0.25, torch.stack(pairs, dim=-1)], dim=-1)


def identity(x, weight=None, bias=None):
    return x


def dpfp(x, weight=None, bias=None, nu=1):
    d = x.shape[-1]
    r = [relu(x[..., i]) for i in range(d)] + [relu(-x[..., i]) for i in range(d)]
    products = [r[i] * r[(i + j) % (2 * d)] for j in range(1, nu + 1) for i in range(2 * d)]
    return torch.stack(products, dim=-1)


def hedgehog(x, weight=None, bias=None):
    y = x if weight is None else _project(x, weight)
    return torch.cat([_softmax(y), _softmax(-y)], dim=-1)


def hedgehog_joint(x, weight=None, bias=None):
    y = x if weight is None else _project(x, weight)
    return _softmax(torch.cat([2 * y, -2 * y], dim=-1))


def t2r(x, weight, bias):
    return relu(_project(x, weight) + bias)


def rebased(x, weight=None, bias=None):
    d = x.shape[-1]
    centred = x - x.mean(dim=-1, keepdim=True)
    x = centred / torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + 1e-5)
    x = x if weight is None else x * weight + bias
    squares = [x[..., i] ** 2 / math.sqrt(d) for i in range(d)]
    mixed = [math.sqrt(2 / d) * x[..., i] * x[..., j] for i in range(d) for j in range(i + 1, d)]
    return torch.stack(squares + mixed, dim=-1)


def favor(x, weight=None, bias=None, *, matrix):
    """matrix [D, m]; exponents end at -32 and 32."""
    (d, m), rows = matrix.shape, x.square().sum(dim=-1) / (2 * math.sqrt(x.shape[-1]))
    exponents = [(x * matrix[:, j]).sum(dim=-1) / d**0.25 - rows for j in range(m)]
    return torch.stack([torch.exp(e.minimum(0 * e + 32).maximum(0 * e - 32)) / math.sqrt(m) for e in exponents], dim=-1)


def cosformer(x, positions, horizon):
    """x [B, T, H, D], positions [B, T]; the only map that needs them, and so not one of PHI."""
    turn = positions.double()[:, :, None, None] / horizon * math.pi / 2
    return torch.cat([relu(x) * torch.cos(turn), relu(x) * torch.sin(turn)], dim=-1)


PHI = {
    f.__name__: f
    for f in (
        elu1, relu, squared_relu, exp, softmax, taylor2, identity, dpfp, hedgehog, hedgehog_joint, t2r, rebased,
        favor,
    )
}  # fmt: skip
LEARNABLE = ("hedgehog", "hedgehog_joint", "t2r", "rebased")
PARAMETER_FREE = tuple(name for name in PHI if name not in (*LEARNABLE, "favor"))  # favor has a drawn matrix
NONNEGATIVE = tuple(name for name in PHI if name != "identity")


def features(name, q, k, feature_map=None, positions=None):
    """phi(q), phi(k) in float64; the weights of a learnable map are read from the parameters of `feature_map`.

    A parameter with fewer heads than x serves groups: head h uses row h // (heads of x / rows).
    """
    if name is None:
        return q.double(), k.double()
    if name == "cosformer":
        return tuple(cosformer(x.double(), positions, feature_map.horizon) for x in (q, k))
    weights = dict(feature_map.named_parameters()) if feature_map is not None else {}

    def phi(x, side):
        for_head = {}
        for what in ("weight", "bias"):
            w = weights.get(f"{side}_{what}", weights.get(what))
            if w is not None:
                per_row = x.shape[-2] // w.shape[0]
                w = torch.stack([w[h // per_row] for h in range(x.shape[-2])]).double()
            for_head[what] = w
        return PHI[name](x.double(), **for_head, **options)

    options = {}
    if feature_map is not None and name == "dpfp":
        options = {"nu": feature_map.nu}
    if name == "favor":
        options = {"matrix": feature_map.projection.double()}
    return phi(q, "q"), phi(k, "k")


# ---------------------------------------------------------------------------------------------------------------------
# Attention over features


def linear_attention(
    q, k, v, *, causal=True, key_mask=None, initial_state=None, cu_seqlens=None, normalize=True
) -> tuple[Tensor, Tensor, Tensor]:
    """Features q [B,T,Hq,F], k [B,S,Hk,F] and values v [B,S,Hk,E] -> out [B,T,Hq,E], mu [N,Hk,F,E], nu [N,Hk,F].

    N is the number of documents: B without `cu_seqlens`. `initial_state` is a pair (mu [N,Hk,F,E], nu [N,Hk,F]).
    """
    q, k, v = q.double(), k.double(), v.double()
    (B, T, Hq, F), (S, Hk, E) = q.shape, v.shape[1:]
    # documents: (batch row, first query, end of queries, first key, end of keys)
    if cu_seqlens is None:
        documents = [(b, 0, T, 0, S) for b in range(B)]
    else:
        bounds = [int(c) for c in cu_seqlens]
        documents = [(0, start, end, start, end) for start, end in itertools.pairwise(bounds)]

    out = [[[None] * Hq for _ in range(T)] for _ in range(B)]
    mu, nu = [], []
    for n, (b, q_start, q_end, k_start, k_end) in enumerate(documents):
        real = [j for j in range(k_start, k_end) if key_mask is None or bool(key_mask[b, j])]
        mu_0 = q.new_zeros(Hk, F, E) if initial_state is None else initial_state[0][n].double()
        nu_0 = q.new_zeros(Hk, F) if initial_state is None else initial_state[1][n].double()
        mu.append([])
        nu.append([])
        for h in range(Hk):
            phi_k, values = k[b, real, h], v[b, real, h]
            mu[-1].append(mu_0[h] + (phi_k[:, :, None] * values[:, None, :]).sum(0))
            nu[-1].append(nu_0[h] + phi_k.sum(0))
            for head in range(h * Hq // Hk, (h + 1) * Hq // Hk):
                for i in range(q_start, q_end):
                    seen = sum(j <= i for j in real) if causal else len(real)
                    weight = (phi_k[:seen] * q[b, i, head]).sum(-1)
                    numerator = (q[b, i, head, :, None] * mu_0[h]).sum(0) + (weight[:, None] * values[:seen]).sum(0)
                    denominator = (q[b, i, head] * nu_0[h]).sum() + weight.sum()
                    if not normalize:
                        row = numerator
                    elif denominator == 0:
                        row = 0 * numerator  # zeros that autograd still knows
                    else:
                        row = numerator / denominator
                    out[b][i][head] = row
    pile = lambda rows: torch.stack([torch.stack(r) for r in rows])  # noqa: E731
    return torch.stack([pile(rows) for rows in out]), pile(mu), pile(nu)


# ---------------------------------------------------------------------------------------------------------------------
# What tests compare: random problems, golden cases, distances


@dataclass(frozen=True)
class Problem:
    """One call: its tensors, and the keywords that go with them."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    initial_state: tuple[Tensor, Tensor] | None = None
    cu_seqlens: Tensor | None = None
    causal: bool = True
    normalize: bool = True

    def keywords(self) -> dict:
        names = ("key_mask", "initial_state", "cu_seqlens", "causal", "normalize")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> list[Tensor]:
        """Everything a gradient can reach, q, k, v first."""
        return [self.q, self.k, self.v, *(self.initial_state or ())]

    def leaves(self) -> "Problem":
        """The same problem on fresh tensors that ask for gradients."""
        state = self.initial_state
        return replace(
            self,
            q=self.q.detach().clone().requires_grad_(),
            k=self.k.detach().clone().requires_grad_(),
            v=self.v.detach().clone().requires_grad_(),
            initial_state=state and tuple(s.detach().clone().requires_grad_() for s in state),
        )

    def run(self, form, feature_map=None, **options):
        """(out, mu, nu) of a form under test; out keeps the dtype of v."""
        from hf_linattn.ops import LinearAttentionState  # the container alone

        state = self.initial_state and LinearAttentionState(*self.initial_state)
        keywords = self.keywords() | {"initial_state": state, "feature_map": feature_map, "output_final_state": True}
        out, state = form(self.q, self.k, self.v, **keywords, **options)
        assert out.dtype == self.v.dtype
        return out, state.mu, state.nu

    def solve(self, name=None, feature_map=None):
        """The oracle's (out, mu, nu)."""
        phi_q, phi_k = features(name, self.q, self.k, feature_map)
        return linear_attention(phi_q, phi_k, self.v, **self.keywords())


def random_problem(
    B=2, T=7, Hq=2, Hk=1, D=3, E=4, *, S=None, mask=None, state=None, cu_seqlens=None, causal=True, normalize=True,
    dtype=torch.float64, seed=0,
) -> Problem:  # fmt: skip
    """Gaussian q, k, v, rounded to `dtype`, and what the call may add to them.

    mask: "left", "right", "holes", or "first" (holes, and nothing real in the first batch row).
    state: a map's name, to start from the sums that three keys leave under it (its weights, if any, the identity).
    """
    g = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    S = T if S is None else S
    q, k, v = randn(B, T, Hq, D), randn(B, S, Hk, D), randn(B, S, Hk, E)
    key_mask = None
    if mask is not None:
        cut = torch.randint(0, S + 1, (B, 1), generator=g)
        at = torch.arange(S)[None]
        key_mask = {
            "left": at >= cut,
            "right": at < cut,
            "holes": torch.rand(B, S, generator=g) > 0.4,
            "first": (torch.rand(B, S, generator=g) > 0.4) & (torch.arange(B)[:, None] > 0),
        }[mask]
    initial_state = None
    if state is not None:
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        before = PHI[{"t2r": "relu", "favor": "exp"}.get(state, state)](randn(N, 3, Hk, D))
        mu = (before[..., None] * randn(N, 3, Hk, 1, E)).sum(1)
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        initial_state = mu.to(accumulate), before.sum(1).to(accumulate)
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return Problem(q, k, v, key_mask, initial_state, bounds, causal, normalize)


def gradients(outputs, inputs, seed=0) -> list[Tensor | None]:
    """Gradients of sum(c * output) over the outputs, with c Gaussian, fixed by the seed; None where none flows."""
    g = torch.Generator().manual_seed(seed)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    cotangents = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype) for o in outputs]
    return list(torch.autograd.grad(outputs, list(inputs), cotangents, allow_unused=True))


def golden_cases() -> list[dict]:
    path = Path(__file__).parent / "data" / "linear_attention.json"
    return json.loads(path.read_text())["cases"]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry expected (or to 1 where that is smaller)."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    expected = expected.detach().double()
    gap = (actual.detach().double() - expected).abs().max() / expected.abs().max().clamp(min=1)
    return gap.item() if gap == gap else math.inf


def assert_close(actual, expected, tolerance, what=""):
    """Compare tensors, or tuples of them, entry by entry; None stands for a zero gradient."""
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), what
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, e, tolerance, f"{what}[{i}]")
        return
    if actual is None or expected is None:
        other = expected if actual is None else actual
        assert other is None or not other.any(), f"{what}: None against a nonzero tensor"
        return
    gap = distance(actual, expected)
    assert gap <= tolerance, f"{what} differs by {gap:.3g}, allowed {tolerance:.3g}"
