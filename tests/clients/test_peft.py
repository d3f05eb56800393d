"""peft: adapters of every kind that a state can have, through training, merging, files and generation."""

import pytest
import torch
from helpers import EXACT, assert_same_bits, random_ids
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from reference import assert_close

from hf_linattn import LinAttnForCausalLM, generation

IDS = random_ids(2, 7)
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
GREEDY = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def lora(make):
    """A float64 model under LoRA on all linear projections, with B away from its start at zero."""

    def build(model=None, **options):
        model = make(conv_kernel_size=3).double() if model is None else model
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **options))
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
        return tuned

    return build


def loss_of(model, ids=IDS, mask=PADDED):
    return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def trained(model) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_every_adapter_is_trained(lora):
    model = lora().train()
    loss_of(model).backward()
    adapters = trained(model)
    # q, k, v, o, gate, up and down of two layers, A and B each
    assert len(adapters) == 2 * 7 * 2
    assert all("lora_" in name and parameter.grad.abs().max() > 0 for name, parameter in adapters.items())
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name not in adapters)


def test_merged_equals_unmerged(lora, make, monkeypatch):
    def slow(message):
        raise AssertionError(message)

    monkeypatch.setattr(generation.logger, "warning_once", slow)  # an adapter does not cost the loop of flat cost
    model = lora().eval()
    inputs = {"input_ids": IDS, "attention_mask": PADDED}
    logits, said = model(**inputs).logits, model.generate(**inputs, **GREEDY)
    assert (logits - make(conv_kernel_size=3).double()(**inputs).logits).abs().max() > 0.1, "the adapter does nothing"
    uncached = model(input_ids=said.sequences, attention_mask=torch.nn.functional.pad(PADDED, (0, 5), value=1)).logits
    assert_close(torch.stack(said.logits, 1), uncached[:, 6:-1], EXACT)
    merged = model.merge_and_unload()
    assert isinstance(merged, LinAttnForCausalLM)
    assert_close(merged(**inputs).logits[PADDED.bool()], logits[PADDED.bool()], EXACT)
    again = merged.generate(**inputs, **GREEDY)
    assert torch.equal(again.sequences, said.sequences)
    assert_close(torch.stack(again.logits), torch.stack(said.logits), EXACT)


def test_saved_and_loaded(lora, make, tmp_path):
    model = lora(modules_to_save=["lm_head"]).eval()
    with torch.no_grad():
        trained(model)["base_model.model.lm_head.modules_to_save.default.weight"].add_(0.5)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make(conv_kernel_size=3).double(), tmp_path)
    assert_same_bits([loaded(input_ids=IDS).logits], [model(input_ids=IDS).logits])
    with loaded.disable_adapter():
        assert_same_bits([loaded(input_ids=IDS).logits], [make(conv_kernel_size=3).double()(IDS).logits])


@pytest.mark.parametrize("part", ["feature_map", "k_conv"])
def test_learned_parts_beside_adapters(lora, make, part, tmp_path):
    """A feature map or a convolution has parameters of its own, which no linear projection's adapter reaches."""
    options = {"conv_kernel_size": 3, "feature_map": "hedgehog"}
    base = make(**options).double()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    expected = base(IDS).logits
    model = lora(base, modules_to_save=[part])
    model.eval()
    own = {name: parameter for name, parameter in trained(model).items() if part in name}
    assert own
    optimizer = torch.optim.SGD(own.values(), lr=0.5)
    start = loss_of(model)
    start.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in own.values())
    optimizer.step()
    assert loss_of(model) < start
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make(**options).double(), tmp_path)
    said, again = (x.generate(input_ids=IDS, attention_mask=PADDED, **GREEDY) for x in (model, loaded))
    assert_same_bits(again.logits, said.logits)
    with model.disable_adapter():
        assert_same_bits([model(input_ids=IDS).logits], [expected])
    merged = model.merge_and_unload()
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert sum(part in name for name in changed) == len(own), "the part is the model's own again"
    again = merged.generate(input_ids=IDS, attention_mask=PADDED, **GREEDY)
    assert_close(torch.stack(again.logits), torch.stack(said.logits), EXACT)


@pytest.fixture
def prompted(make):
    """A float64 model behind three soft tokens, and the logits of its greedy answer when nothing is cached."""
    model = get_peft_model(make().double(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with torch.no_grad():
        model.prompt_encoder["default"].embedding.weight.normal_(generator=torch.Generator().manual_seed(2))
    return model.eval()


def test_prompt_tuning_trains_the_prompt_alone(prompted):
    adapters = trained(prompted)
    assert list(adapters) == ["prompt_encoder.default.embedding.weight"]
    optimizer, losses = torch.optim.Adam(adapters.values(), lr=0.1), []
    for _ in range(5):
        losses.append(loss_of(prompted))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.05
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("mask", [PADDED, torch.ones_like(PADDED)], ids=["padded", "whole"])
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_generating_after_a_soft_prompt(prompted, mask):
    """The prompt is read once, before the first token, and positions count on from it."""
    said = prompted.generate(input_ids=IDS, attention_mask=mask, **GREEDY)
    model = prompted.get_base_model()
    for row, real in enumerate(mask.bool()):
        tokens = said.sequences[row : row + 1, real.nonzero()[0, 0] :]
        embeds = torch.cat([prompted.get_prompt(1).to(torch.float64), model.get_input_embeddings()(tokens)], 1)
        logits = model(inputs_embeds=embeds, use_cache=False).logits[0, -6:-1]
        assert_close(torch.stack([step[row] for step in said.logits]), logits, EXACT)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
@pytest.mark.parametrize("call", ["forward", "generate"])
def test_prefix_tuning_is_refused(make, call):
    model = get_peft_model(make(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="so that prefix tuning has no keys to stand before") as caught:
        getattr(model, call)(input_ids=IDS, attention_mask=PADDED)
    assert "\n" not in str(caught.value)
