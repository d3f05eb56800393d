"""`hf-linattn benchmark`: every level from the command line, on the CPU; what a GPU adds, with stand-ins."""

import json

import pytest
import torch

from hf_linattn import cli
from hf_linattn.benchmark import attention, kernels, models, suite
from hf_linattn.benchmark.climb import Settings
from hf_linattn.benchmark.record import read_json
from hf_linattn.benchmark.sides import sides_here
from hf_linattn.benchmark.tables import render
from hf_linattn.ops import LinearAttentionState, chunk_linear_attention, recurrent_linear_attention

CPU = torch.device("cpu")
PASSES = {
    "op": ["forward", "forward+backward"],
    "decode": ["decode"],
    "model": ["prefill", "decode", "train step"],
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folder of one quick run of everything."""
    folder = tmp_path_factory.mktemp("benchmark")
    cli.main(["benchmark", "--quick", "--device", "cpu", "--seed", "7", "--out", str(folder)])
    return folder


def test_every_level_is_measured(quick):
    result = read_json(quick / "benchmark.json")
    assert result["complete"]
    assert result["skipped"] == {}
    assert result["record"]["seed"] == 7
    for level, passes in PASSES.items():
        assert result[level]["kind"] == f"benchmark {level}"
        assert (result[level]["device"], result[level]["dtype"]) == ("cpu", "float32")
        assert list(result[level]["passes"]) == passes
        for measured in result[level]["passes"].values():
            assert measured["dropped"] == {}
            assert [row["length"] for row in measured["rows"]] == list(suite.QUICK_LENGTHS)
            for row in measured["rows"]:
                assert list(row["sides"]) == list(result[level]["sides"])
                for side in row["sides"].values():
                    assert len(side["samples_ms"]) == 2
                    assert min(side["samples_ms"]) > 0


def test_memory_and_rates_are_what_they_say(quick):
    result = read_json(quick / "benchmark.json")
    row = result["op"]["passes"]["forward"]["rows"][0]
    product = row["ceilings"]["matmul float32"]
    rates = [2 * 64**3 / ms for ms in product["samples_ms"]]
    work = 32 * 2 * (4 * 128 * 16 + 4 * 16 * 16)
    fractions = [work / ms / rate for ms, rate in zip(row["sides"]["torch"]["samples_ms"], rates)]
    assert row["sides"]["torch"]["of_matmul"] == pytest.approx(sum(fractions) / 2)  # the median of two
    assert "of_matmul" not in row["sides"]["softmax"]
    held = [row["sides"] for row in result["decode"]["passes"]["decode"]["rows"]]
    assert [sides["softmax"]["held_bytes"] for sides in held] == [2 * 2 * n * 16 * 4 for n in (32, 64)]
    assert [sides["torch"]["held_bytes"] for sides in held] == [4 * 2 * 16 * 17] * 2
    caches = [row["sides"] for row in result["model"]["passes"]["decode"]["rows"]]
    assert caches[0]["model"]["held_bytes"] == caches[1]["model"]["held_bytes"]
    assert [sides["llama"]["held_bytes"] for sides in caches] == [2 * 32 * 4 * n for n in (32, 64)]
    sizes = {side["parameters"] for side in result["model"]["sides"].values()}
    assert len(sizes) == 1


def test_the_command_prints_tables_and_says_where_files_are(tmp_path, capsys):
    cli.main(["benchmark", "--quick", "--levels", "decode", "--device", "cpu", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    result = read_json(tmp_path / "benchmark.json")
    assert set(suite.LEVELS) & set(result) == {"decode"}
    assert render(result["decode"]) in shown
    assert f"JSON: {tmp_path / 'benchmark.json'}" in shown
    assert "its figures say nothing about speed" in shown
    figure = tmp_path / "figures" / "benchmark_decode.png"
    assert f"figure: {figure}" in shown
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_sides_can_be_chosen(tmp_path):
    options = ["--quick", "--levels", "op", "decode", "--sides", "softmax", "torch", "--device", "cpu"]
    cli.main(["benchmark", *options, "--out", str(tmp_path)])
    result = read_json(tmp_path / "benchmark.json")
    for level in ("op", "decode"):
        assert list(result[level]["sides"]) == ["torch", "softmax"]
        for measured in result[level]["passes"].values():
            assert all(list(row["sides"]) == ["torch", "softmax"] for row in measured["rows"])
    assert result["op"]["absent"]["linear, buckets in plain PyTorch"] == "not chosen"


def test_without_matplotlib_there_are_tables_still(quick, monkeypatch, capsys):
    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    suite.report(read_json(quick / "benchmark.json"), quick / "benchmark.json")
    shown = capsys.readouterr().out
    assert "pip install 'hf-linattn[plot]'" in shown
    assert "figure:" not in shown


@pytest.mark.parametrize(
    "options, words",
    [
        (["--device", "cuda"], "device='cuda': torch finds no such device here; choose 'cpu'"),
        (["--device", "abacus"], "device='abacus' is unknown; choose 'cpu' or 'cuda'"),
        (["--dtype", "int8"], "dtype='int8' is unknown; choose one of ['float32', 'bfloat16', 'float16']"),
        (["--levels", "op", "galaxy"], "levels='galaxy' is unknown; choose among ['op', 'decode', 'model']"),
        (["--sides", "torch", "magic"], "sides='magic' is unknown; choose among ['triton', 'native',"),
        (["--sides", "fla"], "sides='fla' cannot run here: "),
        (["--lengths", "128", "0"], "lengths=0 is not a number of tokens; choose 1 or more"),
        (["--lengths", "many"], "invalid int value: 'many'"),
        (["--rounds", "0"], "rounds=0 is not positive"),
        (["--budget_s", "-1"], "budget_s=-1.0 is not positive"),
        (["--minutes", "nan"], "minutes=nan is not positive"),
    ],
)
def test_bad_input_is_one_line(options, words, tmp_path):
    if options == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        cli.main(["benchmark", *options, "--out", str(tmp_path / "out")])
    assert words in ended.value.code  # text: printed, with exit code 1
    assert "\n" not in ended.value.code
    assert not (tmp_path / "out").exists()


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    real, calls = attention.climb_pass, []

    def interrupted(measured, name, *arguments, **sizes):
        calls.append(name)
        if name != "forward":
            raise KeyboardInterrupt
        real(measured, name, *arguments, **sizes)

    monkeypatch.setattr(attention, "climb_pass", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["benchmark", "--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert ended.value.code == 130
    assert calls == ["forward", "forward+backward"]
    result = read_json(tmp_path / "benchmark.json")
    assert [len(measured["rows"]) for measured in result["op"]["passes"].values()] == [2, 0]
    assert not result["complete"]
    assert result["skipped"] == {"the rest": "interrupted"}
    assert "Attention function, forward (" in capsys.readouterr().out
    assert (tmp_path / "figures" / "benchmark_op.png").exists()


def test_the_file_is_whole_after_every_length(tmp_path, monkeypatch):
    """A process that is killed leaves the lengths that it finished."""
    seen = []
    real = suite.write_json

    def watched(path, result):
        real(path, result)
        seen.append(
            len(json.loads(path.read_text()).get("decode", {}).get("passes", {}).get("decode", {"rows": ()})["rows"])
        )

    monkeypatch.setattr(suite, "write_json", watched)
    cli.main(["benchmark", "--quick", "--levels", "decode", "--device", "cpu", "--out", str(tmp_path)])
    assert seen[:3] == [0, 1, 2]


def test_a_part_that_fails_leaves_the_others(tmp_path, monkeypatch):
    def broken(level, settings):
        raise RuntimeError("no\nluck")

    monkeypatch.setitem(suite.LEVELS, "op", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(["benchmark", "--quick", "--levels", "op", "decode", "--device", "cpu", "--out", str(tmp_path)])
    assert "op failed: RuntimeError: no luck" in ended.value.code
    assert len(read_json(tmp_path / "benchmark.json")["decode"]["passes"]["decode"]["rows"]) == 2


def test_parts_that_time_does_not_reach_say_so(tmp_path):
    cli.main(["benchmark", "--quick", "--minutes", "1e-9", "--device", "cpu", "--out", str(tmp_path)])
    result = read_json(tmp_path / "benchmark.json")
    assert result["skipped"] == dict.fromkeys(suite.LEVELS, "the 1e-09 minutes of the run were over")


def test_a_gpu_has_more_parts_and_they_come_first():
    cuda = torch.device("cuda")
    assert list(suite.parts_of(["op", "decode", "model"], cuda)) == ["kernels", "shapes", "op", "decode", "model"]
    assert list(suite.parts_of(["model"], cuda)) == ["model"]
    assert list(suite.parts_of(["model", "op"], CPU)) == ["op", "model"]


def small_settings():
    return Settings(CPU, torch.float32, [16], rounds=2, small=True, say=lambda _: None)


def test_shapes_measure_three_passes():
    level: dict = {}
    attention.shapes_level(level, small_settings())
    assert [shape["sizes"]["length"] for shape in level["shapes"]] == [160]
    for name, measured in level["shapes"][0]["passes"].items():
        (row,) = measured["rows"]
        expected = {"torch", "softmax"} if name == "decode" else sides_here(CPU, torch.float32, 16)[0]
        assert set(row["sides"]) == set(expected)
    assert list(level["shapes"][0]["passes"]) == ["forward", "backward", "decode"]
    assert [line.split("|")[1].strip() for line in render(level).splitlines()[2:]] == [
        "B2 T160 H2 D16, forward", "B2 T160 H2 D16, backward", "B2 T160 H2 D16, decode",
    ]  # fmt: skip


def step(q, k, v, mu, nu, **options):
    """The decoding step by the recurrent form, in place as the kernel has it."""
    state = LinearAttentionState(mu, nu)
    out, state = recurrent_linear_attention(q, k, v, initial_state=state, output_final_state=True, **options)
    mu.copy_(state.mu)
    nu.copy_(state.nu)
    return out


def test_kernels_are_held_to_the_definition(monkeypatch):
    monkeypatch.setattr(kernels, "LENGTH", 80)
    level: dict = {}
    kernels.kernels_level(level, small_settings(), chunk_linear_attention, step)
    assert [row["case"] for row in level["rows"]] == list(kernels.CASES)
    assert all(row["within"] for row in level["rows"])
    assert all(len(row["errors"]) == len(row["bounds"]) == 7 for row in level["rows"])
    assert render(level).count("| yes |") == len(kernels.CASES)


@pytest.mark.parametrize("part", ["out", "mu", "nu", "dq", "dk", "dv", "decode"])
def test_a_wrong_kernel_is_seen(part, monkeypatch):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.001

    def form(q, k, v, **options):
        q, k, v = (Scaled.apply(x) if part == f"d{name}" else x for name, x in (("q", q), ("k", k), ("v", v)))
        out, state = chunk_linear_attention(q, k, v, **options)
        scale = {name: 1.001 if part == name else 1 for name in ("out", "mu", "nu")}
        return out * scale["out"], LinearAttentionState(state.mu * scale["mu"], state.nu * scale["nu"])

    wrong_step = (lambda *given, **options: step(*given, **options) * 1.001) if part == "decode" else step
    monkeypatch.setattr(kernels, "LENGTH", 80)
    row = kernels.check(form, wrong_step, CPU, seed=0)
    wrong = {name for name, error in row["errors"].items() if error > row["bounds"][name]}
    assert wrong == ({"out", "dq", "dk", "dv"} if part == "out" else {part})
    assert not row["within"]


def test_a_kernel_that_does_not_compile_is_a_result():
    def form(q, k, v, **options):
        raise RuntimeError("out of registers")

    level: dict = {}
    kernels.kernels_level(level, small_settings(), form, step)
    assert {row["failed"] for row in level["rows"]} == {"RuntimeError: out of registers"}
    assert render(level).count("RuntimeError: out of registers") == len(kernels.CASES)


def test_a_context_that_is_too_slow_to_read_is_not_decoded_from(monkeypatch):
    real = models.climb
    monkeypatch.setattr(models, "climb", lambda *a, title, **k: real(*a, title=title, **k) or (
        a[0]["dropped"].update(llama={"length": 32, "reason": "slow"}) if "prefill" in title else None))  # fmt: skip
    level: dict = {}
    settings = small_settings()
    settings.lengths = [16, 32]
    models.model_level(level, settings)
    decode = level["passes"]["decode"]
    assert [list(row["sides"]) for row in decode["rows"]] == [["model", "llama"], ["model"]]
    assert decode["dropped"] == {"llama": {"length": 32, "reason": "prefill: slow"}}
