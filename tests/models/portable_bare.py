"""What a user without the package does with portable checkpoints; test_portable_bare.py reads the results.

    python -S -I portable_bare.py JSON

JSON: `packages` (a folder that stands for site-packages), `folders` and `repos` by name, `ids`, `work` (to write into).
"""

import importlib.util
import json
import os
import sys
import warnings

task = json.loads(sys.argv[1])
sys.path.append(task["packages"])
assert importlib.util.find_spec("hf_linattn") is None, "the package is installed here"

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)
from transformers.utils import logging  # noqa: E402

torch.set_num_threads(1)
logging.set_verbosity_error()
ids, tiny, work = torch.tensor(task["ids"]), task["folders"]["tiny"], task["work"]
trust = {"trust_remote_code": True}
results = {}

try:
    AutoModelForCausalLM.from_pretrained(tiny)
except ValueError as error:
    results["without trust"] = str(error)

# Copies of the code side by side: each model is used after all were loaded.
models = {
    name: AutoModelForCausalLM.from_pretrained(path, **trust)
    for name, path in (task["folders"] | task["repos"]).items()
}
for name, model in models.items():
    results[f"module of {name}"] = type(model).__module__
    results[f"logits of {name}"] = model(ids).logits.detach()
    greedy = {"max_new_tokens": 8, "do_sample": False}
    results[f"text of {name}"] = model.generate(ids, **greedy)
    results[f"static text of {name}"] = model.generate(ids, cache_implementation="static", **greedy)
    results[f"beams of {name}"] = model.generate(ids, num_beams=2, **greedy)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    os.environ["HF_LINATTN_BACKEND"] = "auto"
    models["tiny"](ids)
    os.environ["HF_LINATTN_BACKEND"] = "torch"
results["warnings"] = [str(warning.message) for warning in caught]

generate = pipeline("text-generation", model=tiny, **trust)
results["pipeline"] = generate("abc", max_new_tokens=4, do_sample=False)[0]["generated_text"]

results["config"] = type(AutoConfig.from_pretrained(tiny, **trust)).__name__
for auto in (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
):
    head, info = auto.from_pretrained(tiny, output_loading_info=True, **trust)
    results[auto.__name__] = type(head).__name__
    results[f"{auto.__name__} lacks"] = sorted(info["missing_keys"])
classifier = AutoModelForSequenceClassification.from_pretrained(task["classifier"], **trust)
results["classes"] = classifier(ids).logits.detach()

model = models["cube"].train()
loss = model(ids, labels=ids).loss
loss.backward()
results["without gradient"] = [name for name, parameter in model.named_parameters() if parameter.grad is None]
torch.optim.SGD(model.parameters(), lr=0.1).step()
results["trained"] = {name: parameter.detach() for name, parameter in model.named_parameters()}

model.eval()
for name, options in {"plain": {}, "portable": {"portable": True}}.items():
    model.save_pretrained(f"{work}/{name}", **options)
    again = AutoModelForCausalLM.from_pretrained(f"{work}/{name}", **trust)
    assert type(again) is not type(model)
    results[f"{name} again"] = torch.equal(again(ids).logits, model(ids).logits)
classifier.save_pretrained(f"{work}/classifier")
again = AutoModelForSequenceClassification.from_pretrained(f"{work}/classifier", **trust)
results["classifier again"] = torch.equal(again(ids).logits, results["classes"])

torch.save(results, f"{work}/results.pt")
