"""What a user does with portable checkpoints who has the package, but does not import it.

    python -S -I portable_unimported.py JSON

JSON: `packages` (folders that stand for site-packages), `cube`, `newer` and `plain` (folders), `ids`, `work` (to write
into).
"""

import json
import sys

task = json.loads(sys.argv[1])
sys.path += task["packages"]

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

torch.set_num_threads(1)
logging.set_verbosity_error()
ids = torch.tensor(task["ids"])
results = {"imported": "hf_linattn" in sys.modules}

# a checkpoint of a version later than the installed one: its own code
newer = AutoModelForCausalLM.from_pretrained(task["newer"], trust_remote_code=True)
results["module of newer"] = type(newer).__module__
results["imported for newer"] = "hf_linattn" in sys.modules
# any other: the installed classes, which it imports, and the map that it carries
cube = AutoModelForCausalLM.from_pretrained(task["cube"], trust_remote_code=True)
plain = AutoModelForCausalLM.from_pretrained(task["plain"])
models = {"newer": newer, "cube": cube, "plain": plain}
for _ in range(2):  # copies of the code side by side
    for name, model in models.items():
        results[f"module of {name}"] = type(model).__module__
        results[f"logits of {name}"] = model(ids).logits.detach()
        for implementation in ("dynamic", "static"):
            results[f"{implementation} text of {name}"] = model.generate(
                ids, max_new_tokens=8, do_sample=False, cache_implementation=implementation
            )
cube.save_pretrained(f"{task['work']}/cube")
newer.save_pretrained(f"{task['work']}/newer")
torch.save(results, f"{task['work']}/results.pt")
