"""The cost model against what real models keep, hold and multiply; its crossovers against a search by brute force."""

import pytest
import torch
from helpers import CONFIGS, HYBRID, SIZES, make_config, make_llama, make_model, random_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hf_linattn import LinAttnConfig, LinAttnForCausalLM, LinearAttentionCache
from hf_linattn.benchmark.compare import cache_nbytes
from hf_linattn.benchmark.plan import CROSSOVERS, FARTHEST, first_win, plan
from hf_linattn.benchmark.record import read_json
from hf_linattn.benchmark.text import operations_text
from hf_linattn.cli import main
from hf_linattn.ops import blocks, linear_attention, sliding_linear_attention

SMALL = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
RELATIVES = {
    "llama": {},
    "mistral": {"sliding_window": 7, "num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"head_dim": 6, "num_key_value_heads": 1},
    "smollm3": {"num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1},
    "gemma2": {"head_dim": 6, "sliding_window": 9, "num_key_value_heads": 1},  # every other layer slides
    "gpt2": {"n_inner": 40},  # no Linear modules, positions from a table
}


def relative(model_type: str):
    config = AutoConfig.for_model(model_type, **SMALL, num_hidden_layers=3, **RELATIVES[model_type])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def side(config, name, contexts=(9,), batch_size=1, **options):
    result = plan(config, contexts, batch_size, **options)
    return [row[name] for row in result["rows"]], result


def parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_cache_is_what_a_linear_model_keeps(name, dtype):
    model = make_model(name).to(dtype)
    for batch, context in ((1, 2), (3, 40)):
        cache = LinearAttentionCache(model.config)
        model(random_ids(batch, context), cache=cache)
        (row,), _ = side(model.config, "linear", [context], batch, dtype=str(dtype).removeprefix("torch."))
        assert row["cache_bytes"] == cache.nbytes


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", RELATIVES)
def test_cache_is_what_a_softmax_model_keeps(model_type, dtype):
    """Windows are passed: of a longer context only the keys inside are kept."""
    model = relative(model_type).to(dtype)
    for batch, context in ((1, 2), (3, 20)):
        cache = model(random_ids(batch, context), use_cache=True).cache
        # a sliding layer shows as views what is left of all it got
        kept = sum(x.numel() * x.itemsize for layer in cache.layers for x in (layer.keys, layer.values))
        (row,), _ = side(model.config, "softmax", [context], batch, dtype=str(dtype).removeprefix("torch."))
        assert row["cache_bytes"] == kept


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_a_linear_model_and_of_its_twin(name):
    config = make_config(name)
    _, result = side(config, "linear")
    full = make_config(name, layer_types=["full_attention"] * config.num_hidden_layers, sliding_window=None)
    assert result["given"] == "linear"
    assert result["parameters"] == {
        "linear": parameters(make_model(name)),
        "softmax": parameters(LinAttnForCausalLM(full)),
    }


@pytest.mark.parametrize("feature_map", ["elu1", "hedgehog", "t2r", "taylor2", "rebased", "favor", "cosformer"])
@pytest.mark.parametrize("model_type", RELATIVES)
def test_parameters_of_a_softmax_model_and_of_its_twin(model_type, feature_map):
    model = relative(model_type)
    _, result = side(model.config, "softmax", feature_map=feature_map)
    assert result["given"] == "softmax"
    assert result["parameters"]["softmax"] == parameters(model)
    added = result["parameters"]["linear"] - parameters(model)
    if model_type in ("llama", "qwen2", "qwen3"):  # those of which this package has the very twin
        shapes = {name: getattr(model.config, name) for name in ("num_key_value_heads", "num_hidden_layers")}
        head_dim = getattr(model.config, "head_dim", None)
        options = {
            "feature_map": feature_map,
            "head_dim": head_dim,
            "tie_word_embeddings": model.config.tie_word_embeddings,
        }
        kinds = {
            "llama": {},
            "qwen2": {"attention_bias": True, "attention_out_bias": False},
            "qwen3": {"qk_norm": True},
        }
        twin = LinAttnForCausalLM(LinAttnConfig.from_preset("seed", **SMALL | shapes | options | kinds[model_type]))
        assert result["parameters"]["linear"] == parameters(twin)
    else:
        assert (added > 0) == (feature_map in ("hedgehog", "t2r", "rebased"))


def test_the_twin_keeps_what_the_built_twin_keeps():
    """A Llama's linear twin and a linear model's Llama, both built and run."""
    shapes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    llama, linear = make_llama(**shapes), make_model("linear", **shapes)
    ids = random_ids(3, 30)
    with torch.no_grad():
        keys, state = (cache_nbytes(model(ids, use_cache=True).cache) for model in (llama, linear))
    for config in (llama.config, linear.config):
        row = plan(config, [30], 3)["rows"][0]
        assert (row["linear"]["cache_bytes"], row["softmax"]["cache_bytes"]) == (state, keys)


def test_weights_that_a_step_moves():
    """All that is held but the embeddings, of which a row a token, and the cache; one key and value written."""
    for tied in (False, True):
        llama = make_llama(tie_word_embeddings=tied)
        (row,), _ = side(llama.config, "softmax", [50], 3)
        table = 0 if tied else llama.get_input_embeddings().weight.nbytes
        weights = 4 * parameters(llama) - table + 3 * 4 * SIZES["hidden_size"]
        keys = row["cache_bytes"]
        assert row["decode_bytes"] == weights + keys + keys // 50
    linear = make_model("hedgehog_query")
    (row,), _ = side(linear.config, "linear", [50], 3)
    table = linear.get_input_embeddings().weight.nbytes
    assert row["decode_bytes"] == 4 * parameters(linear) - table + 3 * 4 * SIZES["hidden_size"] + 2 * row["cache_bytes"]


# What FlopCounterMode counts, and the one product that it leaves out since it is written in place. Its own class
# follows modules, and stops at those whose backward runs inside a backward, as that of a learnable map does.
FORMULAS = flop_registry | {torch.ops.aten.baddbmm_: flop_registry[torch.ops.aten.baddbmm]}


class Products(TorchDispatchMode):
    """Counts the operations of products, but for the angles of rotations, which the plan leaves out."""

    def __init__(self, model):
        super().__init__()
        self.total, self.in_rotation = 0, False
        rotations = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
        self.hooks = [module.register_forward_pre_hook(self.begin) for module in rotations]
        self.hooks += [module.register_forward_hook(self.end) for module in rotations]

    def begin(self, *_):
        self.in_rotation = True

    def end(self, *_):
        self.in_rotation = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if (formula := FORMULAS.get(function.overloadpacket)) and not self.in_rotation:
            self.total += formula(*args, out_val=out)
        return out


def counted(model, run) -> int:
    with Products(model) as products:
        run()
    for hook in products.hooks:
        hook.remove()
    return products.total


def probe(model, length) -> int:
    """The chunk form maps one key of zeros per layer and call, to learn F, where the layer has not mapped before."""
    flops = 0
    for layer in model.model.layers:
        feature_map = getattr(layer.self_attn, "feature_map", torch.nn.Identity())
        for name, weight in feature_map.named_parameters():
            flops += 2 * weight.numel() if name in ("k_weight", "weight") else 0
        for weight in feature_map.buffers() if length > 32 else ():  # one matrix for all heads
            flops += 2 * weight.numel() * model.config.num_key_value_heads
    return flops


def full_layers(config) -> int:
    types = config.layer_types if isinstance(config, LinAttnConfig) else ["full_attention"] * config.num_hidden_layers
    return types.count("full_attention")


def hidden_pairs(config, batch, length) -> int:
    """B Hq D pairs of a query and a later key: eager attention multiplies them, the plan's kernel does not."""
    return full_layers(config) * batch * config.num_attention_heads * config.head_dim * length * (length - 1) // 2


LENGTHS = (2, 64, 100, 200)  # below, at, and past a chunk of 64


@torch.no_grad()
@pytest.mark.parametrize("name", [*CONFIGS, "llama"])
def test_prefill_operations_are_those_of_a_real_forward(name):
    """To the operation, but for the hidden half of softmax and the probe of a learnable map."""
    model = make_llama("eager") if name == "llama" else make_model(name, attn_implementation="eager")
    given = "softmax" if name == "llama" else "linear"
    for length in LENGTHS:
        (row,), _ = side(model.config, given, [length], 3)
        real = counted(model, lambda: model(random_ids(3, length), logits_to_keep=1))  # noqa: B023
        extra = 4 * hidden_pairs(model.config, 3, length) + (probe(model, length) if given == "linear" else 0)
        assert real == row["prefill_flops"] + extra


@torch.no_grad()
@pytest.mark.parametrize("name", [*CONFIGS, "llama"])
def test_decode_operations_are_those_of_a_real_step(name):
    """To the operation, but for the update of mu and nu, which torch does not count since it is no matmul."""
    model = make_llama("eager") if name == "llama" else make_model(name, attn_implementation="eager")
    config = model.config
    for batch, context in ((1, 1), (3, 70)):
        cache = model(random_ids(batch, context), use_cache=True).cache
        given = "softmax" if name == "llama" else "linear"
        (row,), _ = side(config, given, [context], batch)
        real = counted(model, lambda: model(random_ids(batch, 1), cache=cache, use_cache=True))  # noqa: B023
        update = 0  # which a sliding layer too makes
        if given == "linear":
            layers = config.num_hidden_layers - full_layers(config)
            update = 2 * layers * batch * config.num_key_value_heads * config.feature_dim * (config.head_dim + 1)
        assert real == row["decode_flops"] - update


@pytest.mark.parametrize("name", [*CONFIGS, "llama"])
def test_training_operations_are_those_of_a_real_step(name):
    """To the operation; eager softmax multiplies the hidden half, but does not compute q k^T again.

    Up to 32 tokens the layer maps by itself, with the graph of autograd: the products of taylor2 are not run there.
    """
    model = make_llama("eager") if name == "llama" else make_model(name, attn_implementation="eager")
    config, given = model.config, "softmax" if name == "llama" else "linear"
    for length in LENGTHS[1:]:
        ids = random_ids(3, length)
        (row,), _ = side(config, given, [length], 3)
        real = counted(model, lambda: model(ids, labels=ids, use_cache=False).loss.backward())  # noqa: B023
        hidden = hidden_pairs(config, 3, length)
        visible = full_layers(config) * 3 * config.num_attention_heads * config.head_dim * length * (length + 1) // 2
        extra = 12 * hidden - 2 * visible + (probe(model, length) if given == "linear" else 0)
        assert real == row["training_flops"] + extra


def peak_bytes(run) -> int:
    """The most bytes that `run` holds at once beyond what was held before, by the allocator's own account."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = run()
    del kept
    held = peak = 0
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("feature_map, heads", [("elu1", (4, 4)), ("elu1", (4, 2)), ("relu", (8, 1))])
def test_peak_of_the_attention_function(feature_map, heads):
    """What was planned, and at most one temporary of the features of a block."""
    batch, length, dim = 2, 3000, 32
    config = LinAttnConfig.from_preset(
        "seed", **SMALL | {"num_attention_heads": heads[0]}, num_key_value_heads=heads[1], head_dim=dim,
        num_hidden_layers=1, feature_map=feature_map,
    )  # fmt: skip
    (row,), _ = side(config, "linear", [length], batch)

    def run():
        q, k, v = (torch.randn(batch, length, h, dim, requires_grad=True) for h in (heads[0], heads[1], heads[1]))
        out, _ = linear_attention(q, k, v, feature_map=feature_map, backend="torch")
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    blocks._kept.__dict__.clear()  # buffers that an earlier call left behind would not be counted
    block = blocks.cut(length, batch * heads[0], dim * dim, None, torch.device("cpu"))[0]
    features = 4 * block.chunks * block.size * batch * heads[0] * dim
    assert 0 <= peak_bytes(run) - row["attention_bytes"] <= features


def test_peak_of_the_attention_function_with_a_window():
    """At least what was planned, and no more than a fifth beyond it: nothing quadratic is held."""
    batch, length, dim = 2, 6000, 32
    shapes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": dim}
    config = make_config("sliding", sliding_window=64, **shapes)
    (row,), _ = side(config, "linear", [length], batch)

    def run():
        q, k, v = (torch.randn(batch, length, h, dim, requires_grad=True) for h in (4, 2, 2))
        out, _ = sliding_linear_attention(q, k, v, feature_map="elu1", window=64)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    blocks._kept.__dict__.clear()
    assert row["attention_bytes"] <= peak_bytes(run) <= 1.2 * row["attention_bytes"]


@pytest.mark.parametrize(
    "config",
    [
        make_config("linear", num_attention_heads=1, head_dim=64),
        make_config("conv"),
        make_config("gqa"),
        make_config("hybrid"),
        make_config("sliding", sliding_window=70),
        make_config("hedgehog_query"),
        make_config("taylor2", head_dim=8),
        relative("llama").config,
        relative("gemma2").config,
    ],
    ids=["wide", "conv", "gqa", "hybrid", "sliding", "hedgehog", "taylor2", "llama", "gemma2"],
)
def test_crossovers_are_those_of_a_search(config):
    end = 1500
    result = plan(config, range(1, end), 2)
    for cost in CROSSOVERS:
        linear, softmax = ([row[name][cost] for row in result["rows"]] for name in ("linear", "softmax"))
        expected = max((row["context"] for row, a, b in zip(result["rows"], linear, softmax) if a >= b), default=0) + 1
        found = result["crossovers"][cost]
        assert found == expected if expected < end else found is None or found >= end, cost


def test_crossover_in_the_middle_of_a_chunk_that_is_lost_again():
    """Between chunks a win can be lost once more: the crossover is after the last loss."""
    loses = {0, 1, 2, 3, 4, 7}
    assert first_win(lambda n: n in loses, lambda n: 0.5) == 8


def test_a_window_may_never_be_beaten():
    config = AutoConfig.for_model("mistral", **SMALL, num_key_value_heads=2, num_hidden_layers=1, sliding_window=3)
    crossovers = plan(config)["crossovers"]
    assert crossovers["cache_bytes"] is None
    assert plan(config, feature_map="taylor2")["crossovers"] == dict.fromkeys(CROSSOVERS)
    assert FARTHEST > 10**9


# the command


@pytest.fixture
def folder(tmp_path):
    make_config("hybrid").save_pretrained(tmp_path / "hybrid")
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "llama")
    for name, model_type in (
        ("bert", "bert"),
        ("vit", "vit"),
        ("t5", "t5"),
        ("mamba", "mamba"),
        ("mixtral", "mixtral"),
    ):
        AutoConfig.for_model(model_type).save_pretrained(tmp_path / name)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", ["hybrid", "llama", "llama/config.json"])
def test_command_prints_what_it_writes(folder, name, capsys):
    out = folder / "plan.json"
    main(
        [
            "plan",
            str(folder / name),
            "--context",
            "100",
            "2000",
            "--batch",
            "3",
            "--dtype",
            "bfloat16",
            "--json",
            str(out),
        ]
    )
    shown = capsys.readouterr().out
    result = read_json(out)
    config = AutoConfig.from_pretrained(folder / name)
    assert result == plan(config, [100, 2000], 3, "bfloat16", device=result["device"])
    for start in result["crossovers"].values():
        assert f"from {start:,} tokens on" in shown
    assert shown.count("| 2,000 |") == shown.count("| 100 |") == 6
    for count in result["parameters"].values():
        assert f"{count:,} parameters" in shown


def test_operations_are_shown_in_their_unit():
    shown = {999: "999", 999.6: "1 k", 12_345: "12.3 k", 543_500_000: "544 M", 1.8e12: "1.8 T", 1.2345e18: "1,234 P"}
    assert [operations_text(count) for count in shown] == list(shown.values())


def test_layers_of_a_hybrid_are_counted_by_type():
    config = make_config("linear", **HYBRID)
    assert plan(config)["layers"] == {"linear": {"linear": 2, "full attention": 1}, "softmax": {"full attention": 3}}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nothing/here/at/all"], "there is no such folder or config.json"),
        (["{}/nothing"], "there is no such folder or config.json"),
        (["{}/empty"], "no config that transformers can read"),
        (["{}/broken.json"], "no config that transformers can read"),
        (["{}/vit"], "model_type='vit' is no decoder"),
        (["{}/bert"], "model_type='bert' keeps no cache of keys and values"),
        (["{}/t5"], "model_type='t5' has an encoder and a decoder"),
        (["{}/mamba"], "model_type='mamba' has experts or convolutions"),
        (["{}/mixtral"], "model_type='mixtral' has experts or convolutions"),
        (["{}/llama", "--context", "10", "0"], "context=0 must be at least 1"),
        (["{}/llama", "--batch", "-1"], "batch_size=-1 must be at least 1"),
        (["{}/llama", "--dtype", "int8"], "dtype='int8' is unknown; choose one of ['float32',"),
        (["{}/llama", "--feature_map", "elu2"], "feature_map='elu2' is unknown; choose one of ['cosformer',"),
        (["{}/llama", "--feature_map", "identity"], "feature_map='identity' is signed"),
        (["{}/hybrid", "--feature_map", "relu"], "feature_map='relu' is for softmax models; this one has 'elu1'"),
    ],
)
def test_bad_input_is_one_line(folder, arguments, words):
    with pytest.raises(SystemExit) as error:
        main(["plan", *(argument.format(folder) for argument in arguments)])
    assert words in str(error.value.code)  # a text for a code: printed, and exit code 1
    assert "\n" not in error.value.code
