"""`hf-linattn transformers serve` and `chat`: what a client of the OpenAI API gets is what `generate()` returns."""

import copy
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
from helpers import fill, make_model
from transformers import AutoTokenizer

import hf_linattn
from data import byte_tokenizer
from hf_linattn import LinAttnForCausalLM

COMMAND = [sys.executable, "-m", "hf_linattn.cli", "transformers"]
START_SECONDS = 180  # two busy cores import torch and transformers slowly
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
END = 257
WRITTEN = {*range(ord("a"), ord("z") + 1), ord(" "), END}
HELLO = [{"role": "user", "content": "hello"}]
OTHER = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is there, and why?"}]


def environment(**changes) -> dict[str, str]:
    """This package on the path, and no way out of this machine."""
    package = str(Path(hf_linattn.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": package, "NO_PROXY": "*", "no_proxy": "*", **changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with every kind of cache layer; it writes only letters, which no stream or terminal changes."""
    folder = tmp_path_factory.mktemp("serve") / "model"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "eos_token_id": END, "pad_token_id": 258}
    model = fill(make_model("hybrid", conv_kernel_size=4, **sizes), seed=2)  # of the first few, the least monotonous
    model.generation_config.suppress_tokens = sorted({*range(len(tokenizer))} - WRITTEN)
    model.generation_config.do_sample = True  # as chat models ship; without it the server ignores a temperature
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def started(folder, *options):
    """The command as a user starts it, on a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder.parent / f"server{port}.log"
    command = [*COMMAND, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment(HF_HUB_OFFLINE="1")
        )
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}/health", log)
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}/v1", log=log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def connected(url):
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60, http_client=http) as client:
        yield client


@pytest.fixture(scope="module")
def server(folder):
    with started(folder) as server:
        yield server


def wait_until_healthy(process, url: str, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with opener.open(url, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    state = "did not answer" if process.poll() is None else f"ended with {process.returncode}"
    pytest.fail(f"the server {state}:\n{log.read_text()[-6000:]}")


@pytest.fixture(scope="module")
def client(server):
    with connected(server.url) as client:
        yield client


class Reference:
    """What the server must say, computed here by `generate()` from the same checkpoint."""

    def __init__(self, folder: Path):
        self.name = str(folder)
        self.model = LinAttnForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(self, prompt: str | list[dict], max_tokens: int, **options) -> SimpleNamespace:
        if isinstance(prompt, str):
            inputs = self.tokenizer(prompt, return_tensors="pt")
        else:
            inputs = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        options = {"do_sample": False, **options}
        read = inputs["input_ids"].shape[1]
        model = copy.deepcopy(self.model)  # what a request might leave in a model must not be here as well
        new = model.generate(**inputs, max_new_tokens=max_tokens, tokenizer=self.tokenizer, **options)[0, read:]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        reason = "length" if len(new) == max_tokens else "stop"
        return SimpleNamespace(text=text, reason=reason, read=read, written=len(new))


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


def ask(client, reference, prompt: str | list[dict], max_tokens: int, stream: bool = False, **options):
    """One request, greedy unless said otherwise, as what `Reference.answer` returns."""
    options = {"model": reference.name, "max_tokens": max_tokens, "temperature": 0, "stream": stream, **options}
    if isinstance(prompt, str):
        reply = client.completions.create(prompt=prompt, **options)
    else:
        reply = client.chat.completions.create(messages=prompt, **options)
    parts = list(reply) if stream else [reply]
    choices = [part.choices[0] for part in parts]
    if isinstance(prompt, str):
        texts = [choice.text for choice in choices]
    else:
        texts = [(choice.delta if stream else choice.message).content for choice in choices]
    usage = parts[-1].usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert all(choice.finish_reason is None for choice in choices[:-1])
    return SimpleNamespace(
        text="".join(text or "" for text in texts),
        reason=choices[-1].finish_reason,
        read=usage.prompt_tokens,
        written=usage.completion_tokens,
    )


def long_answer(reference, max_tokens: int = 24) -> list[dict]:
    """A chat whose answer does not end before `max_tokens`."""
    chats = ([{"role": "user", "content": f"Tell me {count} things."}] for count in range(100))
    return next(chat for chat in chats if reference.answer(chat, max_tokens).reason == "length")


def test_the_model_is_listed(client, reference):
    assert [model.id for model in client.models.list()] == [reference.name]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [HELLO, OTHER, "once upon a time"], ids=["chat", "system", "text"])
def test_answers_are_those_of_generate(client, reference, prompt, stream):
    for max_tokens in (1, 20):
        expected = reference.answer(prompt, max_tokens)
        assert ask(client, reference, prompt, max_tokens, stream) == expected
        assert expected.text


def test_prompts_matter(reference):
    """Or the other tests would compare constants."""
    answers = [reference.answer(prompt, 20).text for prompt in (HELLO, OTHER, "once upon a time")]
    assert len(set(answers)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_why_it_stops(client, reference, stream):
    chat = long_answer(reference)
    whole = ask(client, reference, chat, 24, stream)
    assert (whole.reason, whole.written) == ("length", 24)
    word = whole.text[10:12]
    cut = ask(client, reference, chat, 24, stream, stop=[word])
    assert cut == reference.answer(chat, 24, stop_strings=[word])
    assert cut.reason == "stop"
    assert whole.text.startswith(cut.text)
    assert cut.text.endswith(word)

    chats = ([{"role": "user", "content": f"End after {count}."}] for count in range(200))
    chat, expected = next(
        (chat, answer)
        for chat in chats
        if (answer := reference.answer(chat, 24)).reason == "stop" and answer.written > 1
    )
    ended = ask(client, reference, chat, 24, stream)
    assert ended == expected
    assert len(ended.text) == ended.written - 1  # the end token is counted and not shown


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation(client, reference, stream):
    """Each turn sends all before it; another conversation in between leaves nothing behind."""
    chat = list(HELLO)
    for turn in ("and then?", "why?", "what else?"):
        reply = ask(client, reference, chat, 16, stream)
        assert reply == reference.answer(chat, 16)
        assert ask(client, reference, OTHER, 16) == reference.answer(OTHER, 16)
        chat += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": turn}]
    assert ask(client, reference, HELLO, 16, stream) == reference.answer(HELLO, 16)


def test_requests_at_once(client, reference):
    prompts = [f"{'so ' * count}it goes" for count in range(5)]
    prompts += [[{"role": "user", "content": prompt}] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        futures = [
            threads.submit(ask, client, reference, prompt, 16, index % 2 == 1) for index, prompt in enumerate(prompts)
        ]
        found = [future.result(timeout=60) for future in futures]
    assert found == [reference.answer(prompt, 16) for prompt in prompts]


def test_a_seed_decides_what_is_sampled(client, reference):
    replies = [ask(client, reference, HELLO, 20, temperature=0.9, seed=seed) for seed in (3, 4, 3)]
    assert replies[0] == replies[2] != replies[1]
    torch.manual_seed(3)
    assert replies[0] == reference.answer(HELLO, 20, do_sample=True, temperature=0.9)


def test_a_client_that_hangs_up(client, reference):
    """The server stops writing for it, and the next one gets its own answer."""
    options = {"model": reference.name, "temperature": 0, "max_tokens": 100_000, "logit_bias": {str(END): -1000.0}}
    stream = client.chat.completions.create(messages=OTHER, stream=True, **options)
    pieces = [chunk.choices[0].delta.content for chunk, _ in zip(stream, range(4), strict=False)]
    assert "".join(piece or "" for piece in pieces)
    stream.close()
    assert ask(client, reference, HELLO, 16) == reference.answer(HELLO, 16)


def test_the_responses_api(client, reference):
    expected = reference.answer(HELLO, 20)
    options = {"model": reference.name, "input": "hello", "temperature": 0, "max_output_tokens": 20}
    reply = client.responses.create(stream=False, **options)
    assert reply.output_text == expected.text
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (expected.read, expected.written)
    events = list(client.responses.create(stream=True, **options))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text


def test_bad_requests_are_refused(client, reference):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="no/such-model", messages=HELLO)
    assert "no/such-model" in error.value.response.json()["detail"]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=reference.name, prompt=["two", "prompts"])
    with pytest.raises(openai.UnprocessableEntityError):
        client.completions.create(model=reference.name, prompt="x", extra_body={"no_such_field": 1})
    assert ask(client, reference, HELLO, 8) == reference.answer(HELLO, 8)


def test_chat_in_a_terminal(server, reference):
    """Its input stays open, so that it is `!exit` that ends it."""
    chat = long_answer(reference)
    options = ["chat", reference.name, server.url, "max_new_tokens=24", "do_sample=False"]
    env = environment(COLUMNS="200")
    env.pop("HF_HUB_OFFLINE", None)  # it forbids this client every request, also to this machine
    pipe = subprocess.PIPE
    with subprocess.Popen(
        COMMAND + options, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        try:
            process.stdin.write(f"{chat[0]['content']}\nn\n!exit\n")  # n: do not go on after the limit of tokens
            process.stdin.flush()
            code = process.wait(timeout=120)
        finally:
            process.kill()
        shown = process.stdout.read()
    assert code == 0, shown
    assert reference.answer(chat, 24).text in shown
    assert "24 tokens in" in shown


def test_continuous_batching(folder, reference):
    """Requests of many clients decode together, streamed or not, and each gets its own answer."""
    prompts = [f"{'so ' * count}it goes" for count in range(5)]
    prompts += [[{"role": "user", "content": prompt}] for prompt in prompts]
    with started(folder, "--continuous-batching") as server, connected(server.url) as client:
        first = ask(client, reference, HELLO, 20)
        with ThreadPoolExecutor(len(prompts)) as threads:
            futures = [
                threads.submit(ask, client, reference, prompt, 16 + index, index % 2 == 1)
                for index, prompt in enumerate(prompts)
            ]
            found = [future.result(timeout=60) for future in futures]
        log = server.log.read_text()
    assert first == reference.answer(HELLO, 20)
    assert found == [reference.answer(prompt, 16 + index) for index, prompt in enumerate(prompts)]
    assert "Falling back" not in log, log
