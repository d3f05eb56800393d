"""Converting a folder holds one copy of the weights at most: measured in a process of its own, on 200 MB of shards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 2**20
SHARD = 32 * MIB
# Anonymous memory is what is copied; pages of a file that is mapped are dropped when memory is short.
MEASURE = """
import json, sys, threading, time
import hf_linattn

def anonymous():
    with open("/proc/self/status") as status:
        return 1024 * sum(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

# what the first model of a process loads stays loaded
hf_linattn.linearize(sys.argv[1])
dtype = sys.argv[3] if len(sys.argv) > 3 else None
peak, done = [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.0005)
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
model = hf_linattn.linearize(sys.argv[2], dtype=dtype)
after = anonymous()
done.set()
watcher.join()
size = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"size": size, "peak": max(peak[0], after) - before, "after": after - before}))
"""


def save(folder: Path, layers: int) -> int:
    """A random Llama in bfloat16, cut into shards; bytes of its weights."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # storage of zeros would take no memory
    model.save_pretrained(folder, max_shard_size=SHARD)
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    save(folder / "small", 1)
    return folder / "small", folder / "large", save(folder / "large", 8)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("dtype, copies", [(None, 0), ("float32", 2)])
def test_no_second_copy_of_the_weights_is_held(dtype, copies, folders):
    """In their own dtype the weights stay in the mapped files; in another, the result is all there is."""
    small, large, size = folders
    assert size > 200 * MIB
    assert len(list(large.glob("*.safetensors"))) > 5
    arguments = [str(small), str(large), *([dtype] if dtype else [])]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert found["size"] > size * (copies or 1)
    assert copies * size <= found["peak"] < copies * size + SHARD, found
