"""What the kernel tests compare: out, final state and every gradient, against the float64 oracle."""

from dataclasses import replace

import torch
from reference import Problem, assert_close, gradients, random_problem

from hf_linattn.ops.triton import triton_linear_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def to_device(problem: Problem) -> Problem:
    move = lambda x: x and tuple(s.to(DEVICE) for s in x) if isinstance(x, tuple) else x  # noqa: E731
    tensors = {name: getattr(problem, name) for name in ("q", "k", "v", "key_mask", "cu_seqlens")}
    moved = {name: x if x is None else x.to(DEVICE) for name, x in tensors.items()}
    return replace(problem, **moved, initial_state=move(problem.initial_state))


def run(problem, name="elu1", chunk_size=16, form=triton_linear_attention):
    """([out, mu, nu], gradients of q, k, v and the initial state), back on the CPU."""
    leaves = to_device(problem).leaves()
    outputs = leaves.run(form, name, chunk_size=chunk_size)
    inputs = leaves.tensors()
    g = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o) for o in outputs]
    grads = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    assert [grad.dtype for grad in grads if grad is not None] == [x.dtype for x in inputs]
    return [o.detach().cpu() for o in outputs], [None if g is None else g.cpu() for g in grads]


def check(problem, name="elu1", chunk_size=16, tolerance=1e-5):
    """Gradients are differences of terms of size v / denominator: that is what their rounding is relative to."""
    outputs, grads = run(problem, name, chunk_size)
    oracle = problem.leaves()
    expected = oracle.solve(name)
    assert_close(outputs, expected, tolerance, "out, mu, nu")
    assert_close(grads, gradients(expected, oracle.tensors()), 2 * tolerance, "gradients of q, k, v, mu, nu")


def problem(B=2, T=35, Hq=2, Hk=1, D=8, E=8, **options):
    return random_problem(B, T, Hq, Hk, D, E, **{"dtype": torch.float32, **options})
