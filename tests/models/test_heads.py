"""The five classes: outputs, losses, gradients, and indifference to padding."""

import pytest
import torch
from helpers import EXACT, FEW, VOCAB, assert_same_bits, make_config, make_model, pull_back, random_ids, states
from reference import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto import modeling_auto

from hf_linattn import (
    LinAttnConfig,
    LinAttnForCausalLM,
    LinAttnForQuestionAnswering,
    LinAttnForSequenceClassification,
    LinAttnForTokenClassification,
    LinAttnModel,
    register,
)

BATCH, LENGTH, LABELS = 2, 8, 3
HEADS = {
    LinAttnModel: ({}, {"last_hidden_state": (BATCH, LENGTH, 16)}),
    LinAttnForCausalLM: (
        {"labels": random_ids(BATCH, LENGTH)},
        {"logits": (BATCH, LENGTH, VOCAB)},
    ),
    LinAttnForSequenceClassification: (
        {"labels": torch.tensor([2, 0])},
        {"logits": (BATCH, LABELS)},
    ),
    LinAttnForTokenClassification: (
        {"labels": random_ids(BATCH, LENGTH) % LABELS},
        {"logits": (BATCH, LENGTH, LABELS)},
    ),
    LinAttnForQuestionAnswering: (
        {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 2])},
        {"start_logits": (BATCH, LENGTH), "end_logits": (BATCH, LENGTH)},
    ),
}
each_head = pytest.mark.parametrize("cls", HEADS)
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]])


def head(cls, name="linear", **changes):
    return make_model(name, cls, num_labels=LABELS, classifier_dropout=0.0, **changes).double()


def results(cls, out):
    return [out[key] for key in HEADS[cls][1]]


@each_head
@pytest.mark.parametrize("name", FEW)
def test_forward_loss_and_backward(cls, name):
    targets, shapes = HEADS[cls]
    model, ids = head(cls, name), random_ids(BATCH, LENGTH)
    out = model(ids, attention_mask=PADDED, **targets)
    for key, shape in shapes.items():
        assert out[key].shape == shape
        assert out[key].isfinite().all()
    loss = out.loss if targets else out.last_hidden_state.square().sum()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


@each_head
@pytest.mark.parametrize("name", ["linear", "conv", "hybrid"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(cls, name, side):
    """Per real token, or per row, as in a batch of one without padding; gradients too."""
    model, ids = head(cls, name), random_ids(BATCH, LENGTH)
    lengths = torch.tensor([5, 8])
    mask = torch.arange(LENGTH) < lengths.unsqueeze(1)
    mask = mask.flip(1) if side == "left" else mask
    batch = results(cls, model(ids, attention_mask=mask.long()))
    alone = [results(cls, model(ids[row : row + 1, mask[row]])) for row in range(BATCH)]
    per_token = batch[0].shape[1] == LENGTH
    padded = [x[mask] if per_token else x for x in batch]
    expected = [torch.cat([x[0] if per_token else x for x in parts]) for parts in zip(*alone, strict=True)]
    assert_close(padded, expected, EXACT)
    parameters = list(model.parameters())
    assert_close(pull_back(padded, parameters), pull_back(expected, parameters), EXACT, "gradient")


@each_head
@pytest.mark.parametrize("poison", [1e4, float("nan")])
def test_what_stands_under_the_mask_changes_nothing(cls, poison):
    model, ids = head(cls), random_ids(BATCH, LENGTH)
    real = PADDED.bool()
    outcomes = []
    embeds = model.get_input_embeddings()(ids).detach()
    poisoned = embeds.masked_fill(~real.unsqueeze(-1), poison)
    other_ids = ids.where(real, random_ids(BATCH, LENGTH, seed=5, low=0))
    for inputs in (
        {"input_ids": ids},
        {"input_ids": other_ids},
        {"inputs_embeds": embeds},
        {"inputs_embeds": poisoned},
    ):
        outputs = results(cls, model(**inputs, attention_mask=PADDED))
        outputs = [x[real] if x.shape[:2] == (BATCH, LENGTH) else x for x in outputs]
        outcomes.append([*outputs, *pull_back(outputs, model.parameters())])
    assert_same_bits(outcomes[1], outcomes[0])
    assert_same_bits(outcomes[3], outcomes[2])
    assert all(tensor.isfinite().all() for tensor in outcomes[3])


# ---- sequence classification: which token speaks for the row


def last_token_logits(model, ids, places):
    hidden = model.model(ids, use_cache=False).last_hidden_state
    return model.score(hidden[torch.arange(len(ids)), places])


def test_the_last_real_token_classifies_a_row():
    model, ids = head(LinAttnForSequenceClassification), random_ids(3, LENGTH)
    holes = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0]])
    compact = [ids[row, holes[row].bool()] for row in range(3)]
    expected = torch.cat([last_token_logits(model, x.unsqueeze(0), torch.tensor([-1])) for x in compact])
    assert_close(model(ids, attention_mask=holes).logits, expected, EXACT)


def test_pad_tokens_that_the_mask_calls_real_are_real():
    """The mask decides, not the id: a text may hold the padding id."""
    model, ids = head(LinAttnForSequenceClassification), random_ids(2, LENGTH)
    ids[:, -2:] = model.config.pad_token_id
    expected = last_token_logits(model, ids, torch.tensor([-1, -1]))
    assert_close(model(ids, attention_mask=torch.ones(2, LENGTH)).logits, expected, EXACT)


def test_without_a_mask_padding_ids_mark_the_end():
    model, ids = head(LinAttnForSequenceClassification), random_ids(2, LENGTH)
    ids[0, -2:] = model.config.pad_token_id
    expected = last_token_logits(model, ids, torch.tensor([LENGTH - 3, LENGTH - 1]))
    assert_close(model(ids).logits, expected, EXACT)


def test_classifying_on_from_a_cache():
    model, ids = head(LinAttnForSequenceClassification), random_ids(2, LENGTH)
    first = model(ids[:, :5], attention_mask=torch.ones(2, 5), use_cache=True)
    second = model(ids[:, 5:], attention_mask=torch.ones(2, LENGTH), cache=first.cache)
    assert_close(second.logits, model(ids, attention_mask=torch.ones(2, LENGTH)).logits, EXACT)


@pytest.mark.parametrize(
    "labels, changes",
    [
        (torch.tensor([2, 0]), {}),
        (torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), {}),
        (torch.tensor([0.3, -0.2]), {"num_labels": 1}),
    ],
    ids=["one of", "several of", "regression"],
)
def test_kinds_of_classification_loss(labels, changes):
    model = make_model("linear", LinAttnForSequenceClassification, **{"num_labels": LABELS, **changes})
    out = model(random_ids(2, LENGTH), attention_mask=PADDED, labels=labels)
    if labels.dim() == 2:
        expected = torch.nn.functional.binary_cross_entropy_with_logits(out.logits, labels)
    elif labels.is_floating_point():
        expected = torch.nn.functional.mse_loss(out.logits.squeeze(), labels)
    else:
        expected = torch.nn.functional.cross_entropy(out.logits, labels)
    assert_close(out.loss, expected, 1e-6)


@each_head
def test_tuples_and_hidden_states(cls):
    targets, shapes = HEADS[cls]
    model, ids = head(cls), random_ids(BATCH, LENGTH)
    out = model(ids, attention_mask=PADDED, output_hidden_states=True, output_attentions=True, **targets)
    assert len(out.hidden_states) == 3
    assert len(out.attentions) == 2
    parts = model(ids, attention_mask=PADDED, return_dict=False, **targets)
    expected = [*([out.loss] if targets else []), *results(cls, out)]
    assert_same_bits(parts[: len(expected)], expected)


@pytest.mark.parametrize("cls", [cls for cls in HEADS if cls is not LinAttnForQuestionAnswering])
def test_only_models_with_a_next_token_return_caches(cls):
    model, ids = head(cls), random_ids(BATCH, LENGTH)
    out = model(ids, attention_mask=PADDED, use_cache=True)
    if cls is LinAttnForTokenClassification:  # transformers' generic head drops it
        assert "cache" not in out
    else:
        assert len(states(out.cache)) == 4


# ---- Auto classes

AUTO = {
    AutoModel: LinAttnModel,
    AutoModelForCausalLM: LinAttnForCausalLM,
    AutoModelForSequenceClassification: LinAttnForSequenceClassification,
    AutoModelForTokenClassification: LinAttnForTokenClassification,
    AutoModelForQuestionAnswering: LinAttnForQuestionAnswering,
}


@pytest.mark.parametrize("auto, cls", AUTO.items())
def test_auto_classes(auto, cls, tmp_path):
    config = make_config("linear")
    assert type(auto.from_config(config)) is cls
    model = make_model("linear", cls)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is LinAttnConfig
    again = auto.from_pretrained(tmp_path)
    assert type(again) is cls
    assert_same_bits(list(again.state_dict().values()), list(model.state_dict().values()))


def test_registration_can_be_repeated_and_is_seen_by_trainer_and_pipelines():
    register()
    assert type(AutoConfig.for_model("linattn")) is LinAttnConfig
    tables = {
        "MODEL_MAPPING_NAMES": LinAttnModel,
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": LinAttnForCausalLM,
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": LinAttnForSequenceClassification,
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": LinAttnForTokenClassification,
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": LinAttnForQuestionAnswering,
    }
    for table, cls in tables.items():
        assert getattr(modeling_auto, table)["linattn"] == cls.__name__
