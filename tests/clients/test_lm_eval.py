"""lm-evaluation-harness: tasks of a local file give what the logits give, whatever the batch size."""

import json
from functools import partialmethod

import lm_eval
import pytest
import torch
from helpers import make_model, tokenizer_of
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hf_linattn import cli

QUESTIONS = [
    {"question": "the sky is", "choices": ["blue", "made of cheese", "a"], "answer": 0},
    {"question": "a", "choices": ["b", "xyz"], "answer": 1},
    {"question": "one two three", "choices": ["four", "five six seven", "z"], "answer": 2},
    {"question": "to be or not to be", "choices": ["that is", "q", "no"], "answer": 0},
    {"question": "hi", "choices": ["you", "there"], "answer": 1},
]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["-"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder of two tasks over one local file."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, fields in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            "target_delimiter": " ",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(common | fields))  # JSON is YAML
    return folder


def tokenizer():
    return tokenizer_of(eos_token="-")


def answers(model, tasks, batch_size):
    """The replies to every request, by task, in the order of the questions."""
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=batch_size, device="cpu"),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = {name: sorted(found["samples"][name], key=lambda sample: sample["doc_id"]) for name in TASKS}
    return {name: [sample["resps"] for sample in samples[name]] for name in TASKS}


@torch.no_grad()
def log_likelihood(model, question, answer):
    ids = torch.tensor([tokenizer().encode(f"{question} {answer}")])
    scores = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[len(question) - 1 :].sum().item()


@torch.no_grad()
def written(model, question):
    """Up to six of the likeliest tokens, each found by reading everything anew."""
    ids = torch.tensor([tokenizer().encode(question)])
    for _ in range(6):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return tokenizer().decode(ids[0, -6:]).split("-")[0]


def test_any_batch_size_gives_what_the_logits_give(make, tasks):
    model = make(conv_kernel_size=3)
    for batch_size in (1, 2, 4):
        found = answers(model, tasks, batch_size)
        for row, choices in zip(QUESTIONS, found["choice"]):
            expected = [log_likelihood(model, row["question"], choice) for choice in row["choices"]]
            assert [reply[0][0] for reply in choices] == pytest.approx(expected, rel=1e-5), batch_size
        assert [reply[0][0] for reply in found["writing"]] == [written(model, row["question"]) for row in QUESTIONS]


def test_the_command_loads_a_checkpoint(tasks, tmp_path, capsys, monkeypatch):
    # looking through the thousands of tasks that come with the harness takes most of a minute
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    model = make_model("hybrid")
    for part in (model, tokenizer()):
        part.save_pretrained(tmp_path / "model")
    out = tmp_path / "results"
    options = {"model": "hf", "model_args": f"pretrained={tmp_path / 'model'}", "tasks": "choice", "device": "cpu"}
    options |= {"include_path": tasks, "batch_size": 2, "output_path": out}
    cli.main(["lm-eval", "run", *(str(part) for name, value in options.items() for part in (f"--{name}", value))])
    likeliest = [
        max(range(len(row["choices"])), key=lambda i: log_likelihood(model, row["question"], row["choices"][i]))
        for row in QUESTIONS
    ]
    right = sum(choice == row["answer"] for choice, row in zip(likeliest, QUESTIONS)) / len(QUESTIONS)
    (found,) = out.rglob("results_*.json")
    assert json.loads(found.read_text())["results"]["choice"]["acc,none"] == pytest.approx(right)
    assert "choice" in capsys.readouterr().out
