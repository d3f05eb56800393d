"""TRL: packed, padding-free and padded batches train as their documents one by one would; preferences are learned."""

import math

import pytest
import torch
from datasets import Dataset
from helpers import random_ids, tokenizer_of
from reference import assert_close
from torch.nn import functional
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning"),
]
LENGTHS = (3, 5, 7, 4, 6, 2)
DOCUMENTS = [random_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }} {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}-{% endgeneration %}{% else %}{{ message.content }}-{% endif %}{% endfor %}"
)
FLOAT32 = 1e-6  # TRL takes the softmax in float32


@pytest.fixture
def options(tmp_path):
    """One step of plain gradient descent with a step size of 1, which leaves the gradient in the parameters."""
    return {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "learning_rate": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 6,
        "max_length": 12,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }


def tokenizer():
    made = tokenizer_of(eos_token="-")
    made.chat_template = TEMPLATE
    return made


def step(model, rows, options):
    """Loss and gradients of one training step."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer = SFTTrainer(
        model, SFTConfig(**options), train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    trainer.train()
    gradients = [old - new.detach() for old, new in zip(before, model.parameters())]
    return trainer.state.log_history[0]["loss"], gradients


def alone(model, documents, counts=None):
    """The same of documents run one by one, where `counts` says of which tokens the loss is."""
    total, number = 0.0, 0
    for document, counted in zip(documents, counts or [[1] * len(document) for document in documents]):
        ids = torch.tensor([document])
        labels = ids[0].masked_fill(torch.tensor(counted) == 0, -100)[1:]
        total = total + functional.cross_entropy(model(ids, use_cache=False).logits[0, :-1], labels, reduction="sum")
        number += (labels != -100).sum().item()
    (total / number).backward()
    return (total / number).item(), [parameter.grad for parameter in model.parameters()]


def compare(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-3)  # as it is logged
    assert_close(actual[1], expected[1], FLOAT32)


@pytest.mark.parametrize(
    "how",
    [{}, {"packing": True, "packing_strategy": "bfd"}, {"padding_free": True, "max_length": None}],
    ids=["padded", "packed", "padding-free"],
)
def test_documents_do_not_see_each_other(make, how, options):
    rows = [{"input_ids": document} for document in DOCUMENTS]
    compare(
        step(make(conv_kernel_size=3).double(), rows, options | how),
        alone(make(conv_kernel_size=3).double(), DOCUMENTS),
    )


def test_wrapped_packing_is_one_stream(make, options):
    """It cuts the stream of all documents into blocks and tells the model nothing of them, by design."""
    rows = [{"input_ids": document} for document in DOCUMENTS]
    how = {"packing": True, "packing_strategy": "wrapped", "shuffle_dataset": False}
    stream = sum(DOCUMENTS, [])
    blocks = [stream[start : start + 12] for start in range(0, len(stream), 12)]
    compare(step(make().double(), rows, options | how), alone(make().double(), blocks))


TURNS = [("abc", "def gh"), ("z", "yx"), ("hello", "to you too")]


def test_completions_only(make, options):
    rows = [{"prompt": prompt, "completion": completion + "-"} for prompt, completion in TURNS]
    encode = tokenizer().encode
    documents = [encode(row["prompt"] + row["completion"]) for row in rows]
    counts = [[0] * len(row["prompt"]) + [1] * len(row["completion"]) for row in rows]
    compare(step(make().double(), rows, options | {"max_length": None}), alone(make().double(), documents, counts))


@pytest.mark.parametrize("packing", [False, True])
def test_assistants_only(make, options, packing):
    texts, counts, rows = [], [], []
    for prompt, completion in TURNS:
        messages = [("user", prompt), ("assistant", completion), ("user", "and"), ("assistant", completion[::-1])]
        rows.append({"messages": [{"role": role, "content": content} for role, content in messages]})
        texts.append("".join(f"{role[0]} {content}-" for role, content in messages))
        counts.append(sum(([0, 0] + [int(role == "assistant")] * (len(content) + 1) for role, content in messages), []))
    how = {"assistant_only_loss": True, "max_length": 64, "packing": packing}
    documents = [tokenizer().encode(text) for text in texts]
    compare(step(make().double(), rows, options | how), alone(make().double(), documents, counts))


PAIRS = [("abc ", "def-", "zz top-"), ("h", "ello you-", "o-"), ("what is ", "that-", "this then-")]


def log_probability(model, prompt, completion):
    ids = torch.tensor([tokenizer().encode(prompt + completion)])
    scores = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :].sum()


@pytest.mark.parametrize("precompute", [False, True])
def test_preferences(make, options, precompute):
    """Padded batches of pairs of different lengths give the loss of the definition, before and after training."""
    keys = ("prompt", "chosen", "rejected")
    rows = [dict(zip(keys, pair)) for pair in PAIRS]
    options |= {"max_steps": 4, "learning_rate": 0.02, "max_length": 32, "beta": 0.5}
    model, start = make(conv_kernel_size=3).double(), make(conv_kernel_size=3).double()
    trainer = DPOTrainer(
        model,
        ref_model=make(conv_kernel_size=3).double(),
        args=DPOConfig(**options, precompute_ref_log_probs=precompute),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-3)  # the model is its own reference
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["attention_mask"] == 0).any()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.eval(), batch).item()
        margins = []
        for prompt, chosen, rejected in PAIRS:
            gain = [log_probability(model, prompt, x) - log_probability(start, prompt, x) for x in (chosen, rejected)]
            margins.append(0.5 * (gain[0] - gain[1]))
    # a margin is a sum of some ten float32 log-probabilities of up to ten or so, each right to 6e-8 of that
    assert loss == pytest.approx(-functional.logsigmoid(torch.stack(margins)).mean().item(), abs=6e-6)
