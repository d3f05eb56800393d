"""transformers' Trainer: what it trains, evaluates and predicts is what the model alone gives."""

import pytest
import torch
from helpers import EXACT, assert_same_bits, random_ids
from reference import assert_close
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from hf_linattn import LinAttnForCausalLM, LinAttnForSequenceClassification, LinAttnForTokenClassification

LENGTHS = (3, 7, 5, 9, 4, 6, 8, 2, 9, 5, 3, 6)
CLASSES = 3
HEADS = {
    "causal": LinAttnForCausalLM,
    "sequence": LinAttnForSequenceClassification,
    "tokens": LinAttnForTokenClassification,
}


def rows_of(head):
    """Texts of different lengths, with what the head is to say of them."""
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = random_ids(1, length, seed=number)[0]
        labels = {"causal": ids.clone(), "sequence": ids.sum() % CLASSES, "tokens": ids % CLASSES}[head]
        if head != "sequence":
            labels[: 1 + number % 3] = -100  # the first too, which padding on its left would be asked to predict
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def collate(side="right"):
    """Batches padded on one side, with a token like any other under the mask."""

    def pad(values, fill):
        longest = max(len(value) for value in values)
        widths = [(longest - len(x), 0) if side == "left" else (0, longest - len(x)) for x in values]
        return torch.stack([functional.pad(x, width, value=fill) for x, width in zip(values, widths)])

    def batch_of(rows):
        ids, labels = ([row[key] for row in rows] for key in ("input_ids", "labels"))
        return {
            "input_ids": pad(ids, 7),
            "attention_mask": pad([torch.ones_like(row) for row in ids], 0),
            "labels": torch.stack(labels) if labels[0].dim() == 0 else pad(labels, -100),
        }

    return batch_of


@pytest.fixture
def trainer_of(make, tmp_path):
    """A Trainer of a float64 model with one of the heads, which does its batches in order."""

    def build(head="causal", side="right", cls=Trainer, dropout=0.0, **options):
        model = make(cls=HEADS[head], num_labels=CLASSES, classifier_dropout=dropout).double()
        options = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": len(LENGTHS),
            "max_steps": 3,
            "learning_rate": 1e-2,
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
        } | options
        rows = rows_of(head)
        return cls(
            model,
            TrainingArguments(**options),
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=collate(side),
        )

    return build


def parameters(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def alone(model, head):
    """The logits of each row by itself, and the mean loss over all labels that count."""
    logits, targets = [], []
    for row in rows_of(head):
        out = model(row["input_ids"].unsqueeze(0)).logits[0].detach()
        label = row["labels"]
        logits.append(out)
        targets.append((out[:-1], label[1:]) if head == "causal" else (out.view(-1, CLASSES), label.view(-1)))
    scores, labels = (torch.cat(parts) for parts in zip(*targets))
    return logits, functional.cross_entropy(scores.float(), labels).item()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("head", HEADS)
def test_train_evaluate_predict(trainer_of, head, side):
    trainer = trainer_of(head, side, max_steps=6)
    before = alone(trainer.model.eval(), head)[1]
    trainer.train()
    logits, expected = alone(trainer.model.eval(), head)
    assert expected < before - 0.05, "nothing was learned"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    predicted = torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions)
    if head != "sequence":
        predicted = predicted[collate(side)(rows_of(head))["attention_mask"].bool()]
    assert_close(predicted.flatten(), torch.cat(logits).flatten(), EXACT)


@pytest.mark.parametrize("head", HEADS)
def test_label_smoothing(trainer_of, head):
    trainer = trainer_of(head, label_smoothing_factor=0.2)
    loss = trainer.compute_loss(trainer.model, collate()(rows_of(head)))
    costs = []
    for row, logits in zip(rows_of(head), alone(trainer.model, head)[0]):
        labels, scores = row["labels"].view(-1), logits.view(-1, logits.shape[-1])
        labels, scores = (labels[1:], scores[:-1]) if head == "causal" else (labels, scores)
        surprise, labels = -scores.log_softmax(-1)[labels != -100], labels[labels != -100]
        costs.append(0.8 * surprise.gather(-1, labels.unsqueeze(-1)).squeeze(-1) + 0.2 * surprise.mean(-1))
    assert loss.item() == pytest.approx(torch.cat(costs).mean().item(), rel=1e-6)


class OutOfMemoryOnce(Trainer):
    failed = False

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        if not self.failed and self.state.global_step == 0:
            self.failed = True
            raise torch.OutOfMemoryError("CUDA out of memory.")  # with the gradients of the step in place
        return loss


def test_a_batch_that_does_not_fit(trainer_of):
    """The run starts anew with smaller batches, as if they had been asked for."""
    trainer = trainer_of(cls=OutOfMemoryOnce, auto_find_batch_size=True)
    trainer.train()
    assert trainer.failed
    assert trainer._train_batch_size == 3
    expected = trainer_of(per_device_train_batch_size=3)
    expected.train()
    assert losses(trainer) == losses(expected)
    assert_same_bits(parameters(trainer), parameters(expected))


@pytest.mark.parametrize("head", HEADS)
def test_a_resumed_run_is_the_run(trainer_of, head, tmp_path):
    options = {"max_steps": 6, "optim": "adamw_torch", "lr_scheduler_type": "linear", "dropout": 0.2}
    options |= {"train_sampling_strategy": "random", "save_strategy": "steps", "save_steps": 4, "data_seed": 3}
    whole = trainer_of(head, **options)
    whole.train()
    resumed = trainer_of(head, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert len(losses(whole)) == 6
    assert losses(resumed) == losses(whole)
    assert_same_bits(parameters(resumed), parameters(whole))


@pytest.mark.parametrize("head", HEADS)
def test_accumulated_gradients_are_those_of_one_batch(trainer_of, head):
    """Small batches with different numbers of labels: each counts by its labels, not by one mean a batch."""
    small = trainer_of(head, per_device_train_batch_size=2, gradient_accumulation_steps=6, max_steps=1)
    large = trainer_of(head, per_device_train_batch_size=12, max_steps=1)
    for trainer in (small, large):
        trainer.train()
    assert losses(small) == pytest.approx(losses(large), rel=1e-6)
    assert_close(parameters(small), parameters(large), EXACT)


@pytest.mark.parametrize("head", HEADS)
def test_checkpointed_activations(trainer_of, head):
    plain, checkpointed = trainer_of(head), trainer_of(head, activation_checkpointing=True)
    calls = []
    checkpointed.model.model.layers[0].self_attn.register_forward_hook(lambda *args: calls.append(1))
    for trainer in (plain, checkpointed):
        trainer.train()
    assert len(calls) == 2 * 3, "the layer was not computed again for the backward"
    assert_close(parameters(checkpointed), parameters(plain), EXACT)


class Padded(Trainer):
    """Notes the loss of every batch beside that of its rows one by one, and how much of it is padding."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        mask = inputs["attention_mask"].bool()
        self.padding = getattr(self, "padding", 0) + (~mask).sum().item()
        loss = super().compute_loss(model, dict(inputs), *args, **kwargs)
        total, count = 0.0, 0
        for ids, labels, real in zip(inputs["input_ids"], inputs["labels"], mask):
            scores = model(ids[real].unsqueeze(0)).logits[0, :-1].float()
            total += functional.cross_entropy(scores, labels[real][1:], reduction="sum").item()
            count += (labels[real][1:] != -100).sum().item()
        assert loss.item() == pytest.approx(total / count, rel=1e-6)
        return loss


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_of_like_lengths(trainer_of, side):
    paddings = {}
    for strategy in ("group_by_length", "sequential"):
        options = {"per_device_train_batch_size": 2, "max_steps": 12, "train_sampling_strategy": strategy}
        trainer = trainer_of(side=side, cls=Padded, **options)
        trainer.train_dataset = rows_of("causal") * 2
        trainer.train()
        paddings[strategy] = trainer.padding
    assert 0 < paddings["group_by_length"] < paddings["sequential"]
