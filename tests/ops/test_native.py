"""The C kernels: out, final state and gradients against the float64 oracle under every option; and their building."""

import ctypes
import os
import subprocess
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Problem, assert_close, distance, golden_cases, gradients, random_problem
from torch.nn.functional import elu

from hf_linattn.ops import backends, chunk_linear_attention, linear_attention, native, parallel_linear_attention
from hf_linattn.ops.native import build, native_linear_attention

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
FUSED = ("elu1", "relu", "squared_relu", "exp", "softmax")
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(problem, name="elu1", form=native_linear_attention):
    """[out, mu, nu, the gradients of q, k, v and of the initial state]"""
    leaves = problem.leaves()
    outputs = leaves.run(form, name)
    return [*outputs, *gradients(outputs, leaves.tensors())]


def check(problem, name="elu1", tolerance=TOLERANCE, beside=None):
    """Gradients are differences of terms of size v / denominator: that is what their rounding is relative to. They may
    be wrong by as much as twice those of the form `beside`, where a problem is too hard for float32."""
    oracle = problem.leaves()
    expected = oracle.solve(name)
    expected = [*expected, *gradients(expected, oracle.tensors())]
    actual = run(problem, name)
    assert_close(actual[:3], expected[:3], tolerance, "out, mu, nu")
    others = actual if beside is None else run(problem, name, beside)
    for i, (grad, other, right) in enumerate(zip(actual[3:], others[3:], expected[3:], strict=True)):
        plain = 0.0 if beside is None or right is None else distance(other, right)
        assert_close(grad, right, 2 * max(tolerance, plain), f"gradients[{i}]")


def problem(B=2, T=35, Hq=2, Hk=1, D=8, E=8, **options):
    return random_problem(B, T, Hq, Hk, D, E, **{"dtype": torch.float32, **options})


@pytest.mark.parametrize("T", [1, 2, 5, 6, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 130, 200])
def test_lengths(T):
    check(problem(T=T, state="elu1"))


@pytest.mark.parametrize("name", FUSED)
def test_maps(name):
    check(problem(T=70, mask="holes", state=name), name)


def test_ready_features():
    made = problem(state="exp", mask="left")
    check(replace(made, q=made.q.exp(), k=made.k.exp()), None)


@pytest.mark.parametrize("name", ["identity", "elu1", None])
def test_without_denominator(name):
    check(problem(T=70, normalize=False, state="identity", mask="right"), name)


@pytest.mark.parametrize("mask", ["left", "right", "holes", "first"])
def test_masks(mask):
    check(problem(B=3, T=70, mask=mask, state="elu1" if mask != "first" else None))


@pytest.mark.parametrize("D, E", [(1, 1), (3, 5), (8, 20), (20, 64), (64, 80), (80, 256), (256, 8), (300, 33)])
def test_widths(D, E):
    check(problem(B=1, T=70, D=D, E=E, state="elu1"))


PACKED = [0, 3, 3, 70, 135, 135]


@pytest.mark.parametrize("mask, state", [(None, None), ("holes", "elu1")])
def test_packed_documents(mask, state):
    check(problem(B=1, T=135, mask=mask, state=state, cu_seqlens=PACKED))


@st.composite
def problems(draw):
    T, Hk, name = draw(st.integers(1, 150)), draw(st.integers(1, 3)), draw(st.sampled_from(FUSED))
    packed = draw(st.booleans())
    bounds = sorted([0, *draw(st.lists(st.integers(0, T), max_size=4)), T]) if packed else None
    made = problem(
        B=1 if packed else draw(st.integers(1, 3)), T=T, Hk=Hk, Hq=Hk * draw(st.integers(1, 3)),
        D=draw(st.integers(1, 40)), E=draw(st.integers(1, 40)), cu_seqlens=bounds,
        mask=draw(st.sampled_from([None, "left", "right", "holes", "first"])),
        state=name if draw(st.booleans()) else None, normalize=draw(st.booleans()), seed=draw(st.integers(0, 999)),
    )  # fmt: skip
    return made, name, draw(st.sampled_from([1, 2, 8]))


@settings(max_examples=60)
@given(problems())
def test_drawn_problems(drawn):
    made, name, count = drawn
    torch.set_num_threads(count)
    # squared_relu's derivative over its value is 2 / x: the gradients of small x lose digits in any form
    is_hard = name == "squared_relu"
    check(made, name, (1 + is_hard) * TOLERANCE, beside=parallel_linear_attention if is_hard else None)


# ---- threads


@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 5, 400, 2600]])
@pytest.mark.parametrize("count", [3, 8])
def test_few_heads_are_cut_into_segments(count, cu_seqlens, monkeypatch):
    monkeypatch.setattr(native, "TOKENS_A_THREAD", 64)
    torch.set_num_threads(count)
    made = problem(B=1, T=2600, Hq=1, D=8, mask="holes", state="elu1", cu_seqlens=cu_seqlens)
    documents = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    parts = native._segments(made.q, 1, made.cu_seqlens)
    assert (len(parts) > documents) == (count > documents)
    assert parts[:, 2].sum() == 2600
    torch.set_num_threads(1)
    expected = run(made)
    torch.set_num_threads(count)
    assert_close(run(made), expected, TOLERANCE)
    check(replace(made, key_mask=None))


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_heads_side_by_side(heads, monkeypatch):
    """Threads take several heads together, and the last take what is left."""
    torch.set_num_threads(1)
    made = problem(T=130, Hq=2 * heads, Hk=heads, mask="holes", state="elu1")
    expected = run(made)
    monkeypatch.setattr(native, "STATE_BYTES", 1)
    assert all(torch.equal(a, b) for a, b in zip(run(made), expected, strict=True))


# ---- what must not matter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["elu1", "softmax"])
def test_nothing_under_a_mask_matters(name, dtype):
    made = problem(T=70, mask="first", dtype=dtype)
    hidden = ~made.key_mask[:, :, None, None]
    nan = float("nan")
    poisoned = replace(made, k=made.k.masked_fill(hidden, nan), v=made.v.masked_fill(hidden, nan))
    outputs, others = run(made, name), run(poisoned, name)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(others, outputs, strict=True))
    assert not others[4].masked_select(hidden).any()
    assert not others[5].masked_select(hidden).any()
    assert not outputs[0][0].any()  # the first row has no real key


def test_nan_of_one_row_does_not_reach_another_through_a_buffer():
    torch.set_num_threads(1)
    made = problem(B=2, T=64, Hq=1, mask="holes")
    made.v[0] = float("nan")
    outputs = run(made)
    assert outputs[0][0].isnan().any()
    assert all(x[1].isfinite().all() for x in outputs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mask_of_ones_is_no_mask_to_the_bit(dtype):
    made = problem(T=70)
    masked = replace(made, key_mask=torch.ones(2, 70, dtype=dtype))
    assert all(torch.equal(a, b) for a, b in zip(run(masked), run(made), strict=True))


def test_a_mask_that_is_a_view():
    made = problem(T=70, mask="holes")
    wide = torch.zeros(70, 4, dtype=torch.bool)
    wide[:, ::2] = made.key_mask.T
    check(replace(made, key_mask=wide[:, ::2].T))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_in_a_real_row_stays(which, name):
    """A comparison that loses NaN would turn a broken model into a plausible one."""
    made = problem(B=1, T=70)
    x = getattr(made, which).clone()
    x[0, 3] = float("nan")
    out, mu, _ = replace(made, **{which: x}).run(native_linear_attention, name)
    assert out[0, 3].isnan().any()
    assert mu.isnan().any() == (which != "q")


def test_zero_denominator_gives_zero_and_no_gradient():
    made = problem(B=1, T=70)
    made = replace(made, q=-made.q.abs(), k=made.k.abs())
    out, _, _, *grads = run(made, "relu")
    assert not out.any()
    assert not grads[0].any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_no_epsilon_in_the_denominator(scale):
    made = problem(B=1, T=70)
    made = replace(made, q=made.q.exp() * scale, k=made.k.exp() * scale)
    assert_close(run(made, None)[0], made.solve(None)[0], TOLERANCE)


def test_exp_over_its_whole_range():
    """Subnormal results, overflow to infinity, and an error of about one unit in the last place in between."""
    x = torch.cat([torch.linspace(-104.5, 90, 400_001), torch.tensor([-1e30, 1e30, float("inf"), -float("inf")])])
    one = torch.ones(1, 1, 1, 1)
    rows = x.view(-1, 1, 1, 1)
    state = native_linear_attention(
        one.expand_as(rows), rows, one.expand_as(rows), feature_map="exp", output_final_state=True
    )[1]
    actual, expected = state.nu.flatten(), x.double().exp()
    normal = (expected >= torch.finfo(torch.float32).tiny) & (expected <= torch.finfo(torch.float32).max)
    error = (actual[normal].double() / expected[normal] - 1).abs().max()
    assert error <= 1.5 * torch.finfo(torch.float32).eps
    assert torch.equal(actual[~normal & (expected > 1)], torch.full_like(actual[~normal & (expected > 1)], torch.inf))
    below = ~normal & (expected < 1)
    assert (actual[below].double() - expected[below]).abs().max() <= 1.5e-45


def test_strides():
    made = problem(T=70, Hq=4, Hk=2, mask="holes", state="elu1")

    def transposed(x):  # [B, T, H, D] over memory laid out as [B, H, D, T]
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    def by_heads(x):  # [B, T, H, D] over memory laid out as [B, H, T, D]
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    state = tuple(s.transpose(1, -1).contiguous().transpose(1, -1) for s in made.initial_state)
    check(replace(made, q=transposed(made.q), k=by_heads(made.k), v=made.v[:, :1].expand_as(made.v),
                  initial_state=state))  # fmt: skip


def test_expanded_gradient():
    """The gradient of a sum is one number with strides of 0."""
    leaves, oracle = problem(T=70).leaves(), problem(T=70).leaves()
    leaves.run(native_linear_attention, "elu1")[0].sum().backward()
    oracle.solve("elu1")[0].sum().backward()
    assert_close([x.grad for x in leaves.tensors()], [x.grad for x in oracle.tensors()], 2 * TOLERANCE)


def test_offsets_beyond_two_to_the_31():
    """Rows 2^28 elements apart: only the pages that hold them are touched."""
    apart, made = 2**28, problem(B=1, T=18, Hq=1, dtype=torch.bfloat16)
    buffer = torch.empty(17 * apart + 64, dtype=torch.bfloat16)
    views = []
    for i, x in enumerate((made.q, made.k, made.v)):
        views.append(buffer[8 * i :].as_strided(x.shape, (0, apart, 8, 1)).copy_(x))
    out, _ = native_linear_attention(*views, feature_map="elu1")
    expected, _ = native_linear_attention(made.q, made.k, made.v, feature_map="elu1")
    assert torch.equal(out, expected)


# ---- numbers


def plain_attention(problem):
    """What one would write in PyTorch without further thought: products and sums in the input's dtype."""
    phi_q, phi_k = (torch.nn.functional.elu(x.to(torch.promote_types(x.dtype, torch.float32))) + 1
                    for x in (problem.q, problem.k))  # fmt: skip
    scores = torch.einsum("bihf,bjhf->bhij", phi_q.to(problem.q.dtype), phi_k.to(problem.k.dtype)).tril()
    return torch.einsum("bhij,bjhe->bihe", scores / scores.sum(-1, keepdim=True), problem.v)


def test_bfloat16_error_is_at_most_twice_the_plain_one():
    made = problem(B=1, T=300, D=16, E=16, dtype=torch.bfloat16)

    def results(leaves, attention):
        out = attention(leaves)
        return [out, *gradients(out, leaves.tensors())]

    double = replace(made, q=made.q.double(), k=made.k.double(), v=made.v.double()).leaves()
    exact, plain = results(double, plain_attention), results(made.leaves(), plain_attention)
    ours = results(made.leaves(), lambda leaves: leaves.run(native_linear_attention, "elu1")[0])
    for what, e, p, o in zip(("out", "dq", "dk", "dv"), exact, plain, ours, strict=True):
        for norm in (lambda x: x.pow(2).mean().sqrt(), lambda x: x.abs().max()):
            allowed, error = 2 * norm(p.double() - e), norm(o.double() - e)
            assert error <= allowed, f"{what}: error {error:.3g}, twice that of plain PyTorch is {allowed:.3g}"


def bucketed(q, k, v, size=64):
    """The classic form in plain PyTorch: chunks of `size`, a running sum of chunk states, everything float32."""
    phi_q, phi_k, v = (
        x[0].unflatten(0, (-1, size)).transpose(1, 2) for x in (*(elu(x.float()) + 1 for x in (q, k)), v.float())
    )  # [chunks, H, size, X]
    sums = (phi_k.transpose(-1, -2) @ v).cumsum(0), phi_k.sum(-2, keepdim=True).cumsum(0)
    mu, nu = (torch.cat([torch.zeros_like(x[:1]), x[:-1]]) for x in sums)
    weights = (phi_q @ phi_k.transpose(-1, -2)).tril()
    out = (weights @ v + phi_q @ mu) / (weights.sum(-1, keepdim=True) + (phi_q * nu).sum(-1, keepdim=True))
    return out.transpose(1, 2).flatten(0, 1).unsqueeze(0).to(q.dtype)


def test_after_131072_tokens_bfloat16_is_as_near_as_plain_pytorch_and_nu_has_not_drifted():
    T, chunks = 131_072, 131_072 // 64
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, 16, generator=g).bfloat16() for _ in range(3))
    double = [x.double() for x in (q, k, v)]
    exact, state = chunk_linear_attention(*double, feature_map="elu1", output_final_state=True)
    out, ours = native_linear_attention(q, k, v, feature_map="elu1", output_final_state=True)
    for part in (slice(None), slice(T - 1024, None)):
        errors = [(x[:, part].double() - exact[:, part]).pow(2).mean().sqrt() for x in (out, bucketed(q, k, v))]
        assert errors[0] <= 2 * errors[1]
    # one rounding a chunk, up as often as down
    assert (ours.nu / state.nu - 1).abs().max() <= chunks**0.5 * 2**-24
    assert (ours.mu - state.mu).abs().max() <= chunks**0.5 * 2**-24 * state.nu.max() * v.abs().max()


def test_bfloat16_is_rounded_to_the_nearest():
    """out of one token is v itself, and the product of two is often a tie; NaN and infinity pass."""
    v = torch.randn(1, 4096, 1, 16)
    v[0, 0, 0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    q, bounds = torch.zeros(1, 4096, 1, 8), torch.arange(4097)
    out, _ = native_linear_attention(q, q, v.bfloat16(), feature_map="elu1", cu_seqlens=bounds)
    assert torch.equal(out.isnan(), v.isnan())
    assert torch.equal(out.nan_to_num(), v.bfloat16().nan_to_num())
    weights = torch.rand(1, 4096, 1, 1)  # one feature: out = q k v / 1
    out, _ = native_linear_attention(
        weights.bfloat16(), torch.ones_like(weights).bfloat16(), v.bfloat16(), cu_seqlens=bounds, normalize=False
    )
    assert torch.equal(out.nan_to_num(), (weights.bfloat16().float() * v.bfloat16().float()).bfloat16().nan_to_num())


def test_sums_that_bfloat16_cannot_hold():
    """nu passes 256, where bf16 stops counting, and goes on for 100,000 tokens."""
    zero, one = torch.zeros(1, 100_000, 1, 4).bfloat16(), torch.ones(1, 100_000, 1, 4).bfloat16()
    out, mu, nu = Problem(zero, zero, one, None, None).run(native_linear_attention, "elu1")
    assert nu.unique().tolist() == mu.unique().tolist() == [100_000]
    assert (out - 1).abs().max() == 0
    assert (out.dtype, mu.dtype, nu.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_values_of_another_dtype():
    made = problem(T=70)
    made = replace(made, v=made.v.bfloat16())
    out, mu, nu, *grads = run(made)
    expected = made.solve("elu1")
    assert out.dtype == grads[2].dtype == torch.bfloat16
    assert_close(out, expected[0], 2**-8)
    assert_close((mu, nu), expected[1:], TOLERANCE)


STORED = [case for case in golden_cases() if case["causal"] and case["feature_map"] in FUSED]


@pytest.mark.parametrize("index", range(len(STORED)))
def test_stored_cases(index):
    """Values from explicit float64 loops over the definition."""
    case = STORED[index]
    tensor = lambda key: torch.tensor(case[key], dtype=torch.float32)[None]  # noqa: E731
    start = case.get("resumed_at", 0)
    q, k, v = (tensor(key)[:, start:].requires_grad_() for key in "qkv")
    state = (tensor("mu0"), tensor("nu0")) if "mu0" in case else None
    bounds = torch.tensor(case["cu_seqlens"]) if "cu_seqlens" in case else None
    mask = torch.tensor(case["mask"][start:], dtype=torch.bool)[None]
    out, mu, nu = Problem(q, k, v, mask, state, bounds).run(native_linear_attention, case["feature_map"])
    assert_close(out[0][mask[0]], torch.tensor(case["out"], dtype=torch.float64)[start:][mask[0]], TOLERANCE)
    for key, actual in (("mu", mu), ("nu", nu)):
        if key in case:
            assert_close(actual[0], torch.tensor(case[key], dtype=torch.float64), TOLERANCE)
    if "grad_out" in case:
        made = Problem(q, k, v, mask, state, bounds)
        ones = replace(made, v=torch.ones_like(v), initial_state=None, normalize=False)
        denominators = ones.solve(case["feature_map"])[0].detach()
        tolerance = TOLERANCE / min(1, denominators[denominators > 0].min().item())
        out.backward(tensor("grad_out"))
        for key, x in zip("qkv", (q, k, v)):
            assert_close(x.grad[0], torch.tensor(case["d" + key], dtype=torch.float64), tolerance)


# ---- autograd


def test_only_the_gradients_asked_for():
    made = problem(T=70, state="elu1")
    full = made.leaves()
    expected = torch.autograd.grad(full.run(native_linear_attention, "elu1")[0].sum(), full.tensors())
    for i in range(5):
        tensors = made.tensors()
        leaf = tensors[i] = tensors[i].clone().requires_grad_()
        one = Problem(*tensors[:3], None, tuple(tensors[3:]))
        (grad,) = torch.autograd.grad(one.run(native_linear_attention, "elu1")[0].sum(), [leaf])
        assert torch.equal(grad, expected[i])


def test_gradients_of_the_state_alone():
    made = problem(T=70, state="elu1")
    ours, oracle = made.leaves(), made.leaves()
    actual, expected = ours.run(native_linear_attention, "elu1")[1:], oracle.solve("elu1")[1:]
    assert_close(gradients(actual, ours.tensors()[1:]), gradients(expected, oracle.tensors()[1:]), 2 * TOLERANCE)


def test_second_derivatives_are_refused():
    leaves = problem().leaves()
    out = leaves.run(native_linear_attention, "elu1")[0]
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out.sum(), [leaves.q], create_graph=True)


def test_backward_twice_from_one_graph():
    leaves = problem(T=70, state="elu1").leaves()
    out = leaves.run(native_linear_attention, "elu1")[0]
    first = torch.autograd.grad(out.sum(), leaves.tensors(), retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves.tensors())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- who picks them


def small(dtype=torch.float32):
    made = problem(dtype=dtype)
    return made.q, made.k, made.v


@pytest.fixture
def called(monkeypatch):
    """The backends that ran, in order."""
    names = []

    def watch(name):
        module, form = backends.kernels(name), backends.form(name)
        monkeypatch.setattr(module, form.__name__, lambda *a, **k: names.append(name) or form(*a, **k))

    watch("native")
    watch("triton")
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_auto_takes_them_on_a_cpu(called, recwarn, dtype):
    linear_attention(*small(dtype), feature_map="elu1")
    assert called == ["native"]
    assert not recwarn


@pytest.mark.parametrize(
    "dtype, options",
    [(torch.float64, {}), (torch.float16, {}), (torch.float32, {"causal": False}),
     (torch.float32, {"feature_map": "taylor2"})],
)  # fmt: skip
def test_auto_runs_pytorch_without_a_word_where_no_kernel_is_made(called, recwarn, dtype, options):
    q, k, v = small(dtype)
    options = {"feature_map": "elu1", **options}
    assert backends.choose(q, k, v, **options).reason.startswith("native: ")
    out, _ = linear_attention(q, k, v, **options)
    assert_close(out, parallel_linear_attention(q, k, v, **options)[0], 1e-3 if dtype == torch.float16 else 1e-5)
    assert not called
    assert not recwarn
    with pytest.raises(RuntimeError, match="backend='native' cannot run this call: .*has no kernel") as caught:
        linear_attention(q, k, v, backend="native", **options)
    assert "\n" not in str(caught.value)


def test_a_dispatch_mode_sees_pytorch(called):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        linear_attention(*small(), feature_map="elu1")
    assert counter.get_total_flops() > 0
    assert not called


def test_the_environment_names_another_first_choice(called, monkeypatch):
    monkeypatch.setenv(backends.VARIABLE, "torch")
    linear_attention(*small(), feature_map="elu1")
    assert not called
    monkeypatch.setenv(backends.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="HF_LINATTN_BACKEND='cuda' is unknown; choose one of"):
        linear_attention(*small(), feature_map="elu1")


def test_a_first_choice_that_cannot_run_is_said_once(called, monkeypatch):
    monkeypatch.setenv(backends.VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backends._say_once.cache_clear()
    with pytest.warns(UserWarning, match="runs in PyTorch, without triton kernels: ") as caught:
        linear_attention(*small(), feature_map="elu1")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_attention(*small(), feature_map="elu1")
    assert not called


# ---- building


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has built nothing yet and warned of nothing, with a cache folder of its own."""
    cached = (build.library, build.missing, backends._say_once)
    for function in cached:
        function.cache_clear()
    monkeypatch.setenv("HF_LINATTN_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    for function in cached:
        function.cache_clear()


def test_built_once_in_the_cache_folder(fresh):
    check(problem())
    (built,) = fresh.iterdir()
    assert built.name.startswith("kernels-")
    assert fresh.stat().st_mode & 0o777 == 0o700
    stamp = built.stat().st_mtime_ns
    build.library.cache_clear()
    check(problem())
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [stamp]


def test_another_source_is_another_file(fresh, monkeypatch, tmp_path):
    other = tmp_path / "other.c"
    other.write_text(build.SOURCE.read_text() + "/* changed */\n")
    build.library()
    build.library.cache_clear()
    monkeypatch.setattr(build, "SOURCE", other)
    build.library()
    assert len(list(fresh.iterdir())) == 2


def test_a_folder_that_others_may_write_to_is_not_used(fresh):
    fresh.mkdir()
    fresh.chmod(0o777)
    check(problem())
    assert not list(fresh.iterdir())


def test_a_folder_that_cannot_be_made(fresh, monkeypatch):
    monkeypatch.setenv("HF_LINATTN_CACHE", "/dev/null/nowhere")
    check(problem())


@pytest.mark.parametrize("script, words", [
    (None, "no C compiler (a-missing-compiler is not on the path)"),
    ("echo oops: error: no such machine >&2; exit 1", "does not compile the kernels: oops: error: no such machine"),
    ('while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo junk > "$2"; fi; shift; done', "too short"),
])  # fmt: skip
def test_without_a_working_compiler(fresh, tmp_path, monkeypatch, called, script, words):
    """PyTorch answers, and one warning says why."""
    monkeypatch.setenv("CC", "a-missing-compiler")
    if script:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "cc").chmod(0o755)
        monkeypatch.setenv("CC", str(tmp_path / "cc"))
    q, k, v = small()
    with pytest.warns(UserWarning, match="^linear attention runs in PyTorch, without native kernels: ") as caught:
        out, _ = linear_attention(q, k, v, feature_map="elu1")
    assert words in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_attention(q, k, v, feature_map="elu1")
    assert not called
    assert_close(out, parallel_linear_attention(q, k, v, feature_map="elu1")[0], TOLERANCE)
    with pytest.raises(RuntimeError, match="backend='native' cannot run this call: ") as error:
        linear_attention(q, k, v, feature_map="elu1", backend="native")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_source_is_plain_c_without_warnings(tmp_path):
    command = [build.compiler(), *build.FLAGS, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(build.SOURCE)]
    for target in ([], ["-march=x86-64"], ["-march=x86-64-v4"]) if os.uname().machine == "x86_64" else ([],):
        result = subprocess.run([*command, *target, "-o", tmp_path / "k.so"], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_narrow_vectors_give_the_same(tmp_path, monkeypatch):
    """Four lanes a vector, as on a processor without AVX."""
    if os.uname().machine != "x86_64":
        pytest.skip("for x86")
    target = tmp_path / "narrow.so"
    command = [build.compiler(), *build.FLAGS, "-march=x86-64", "-shared", "-fPIC", str(build.SOURCE), "-o", target]
    subprocess.run([*command, "-lm"], check=True)
    monkeypatch.setattr(native, "library", lambda: ctypes.CDLL(str(target)))
    check(problem(T=130, Hq=4, Hk=2, D=20, E=12, mask="holes", state="elu1"))
    check(problem(T=70, dtype=torch.float32, D=33, E=7), "softmax")
