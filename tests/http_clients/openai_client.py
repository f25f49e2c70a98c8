#!/usr/bin/env python3
"""Real clients of `serve --http`: python3 tests/http_clients/openai_client.py build/stage8 [--clients 256]

Needs the package `openai` from PyPI, in an environment outside of the repository, and `curl`. Starts the server on a
free port and compares what clients get, at once and streamed, with the texts that `generate` prints for the same prompts and
seeds: one after another, and 256 streams at the same time.
"""

import argparse
import asyncio
import json
import subprocess
import sys

import http_program
import openai

PROMPTS = ["Once upon a time", "The king had a garden", "A wolf", "The old woman opened the door and"]


# As `generate` draws: what is not given is as the model recommends it.
UNCUT = {"top_p": 1, "extra_body": {"top_k": 0}}


def counts(usage):
    """Without what the prefix cache had, which a second request finds."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def generated(program, max_tokens, temperature, seed):
    """The texts of `generate`. Prompt i is sampled with seed + i."""
    command = [program, "generate", "--device", "cpu", "--max-new-tokens", str(max_tokens), "--temperature",
               str(temperature), "--seed", str(seed), "--json", "-"]
    for prompt in PROMPTS:
        command += ["--prompt", prompt]
    return [entry["text"] for entry in json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["requests"]]


def check(name, actual, expected):
    if actual != expected:
        sys.exit(f"{name}: {actual!r}, expected {expected!r}")
    print(f"{name}: as expected")


def check_one_by_one(client, program):
    model = client.models.list().data[0].id
    for temperature in (0, 0.8):
        expected = generated(program, 40, temperature, 7)
        for i, prompt in enumerate(PROMPTS):
            options = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": temperature, "seed": 7 + i,
                       **UNCUT}
            whole = client.completions.create(**options)
            check(f"completion, temperature {temperature}", whole.choices[0].text, expected[i])
            pieces = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
            chunks = list(pieces)
            check("streamed", "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), expected[i])
            check("usage", counts(chunks[-1].usage), counts(whole.usage))
    messages = [{"role": "user", "content": PROMPTS[0]}]
    options = {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0}
    chat = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    check("chat", chat.choices[0].message.content, generated(program, 40, 0, 0)[0])
    check("log-probabilities", len(chat.choices[0].logprobs.content), 40)
    pieces = client.chat.completions.create(**options, stream=True)
    check("streamed chat", "".join(piece.choices[0].delta.content or "" for piece in pieces),
          chat.choices[0].message.content)
    texts = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=12, temperature=1, seed=3, n=4,
                                      **UNCUT)
    check("several texts", len({choice.text for choice in texts.choices}), 4)
    stop = chat.choices[0].message.content[10:14]
    stopped = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=40, temperature=0, stop=[stop])
    check("stop string", stopped.choices[0].text, chat.choices[0].message.content.split(stop)[0])
    check_errors(client, model)
    check_fields(client, model)


def check_errors(client, model):
    for wrong, param in (({"max_tokens": 0}, "max_tokens"), ({"presence_penalty": 3}, "presence_penalty"),
                         ({"logit_bias": {"-1": 5}}, "logit_bias"), ({"extra_body": {"min_tokens": -1}}, "min_tokens"),
                         ({"extra_body": {"tools": [{"type": "function"}]}}, "tools")):
        try:
            client.completions.create(**({"model": model, "prompt": "x"} | wrong))
            sys.exit(f"{wrong}: taken")
        except openai.BadRequestError as error:
            check("a wrong field", (error.param, error.body["message"] != ""), (param, True))
    for call in (lambda: client.completions.create(model="gpt-4", prompt="x"), lambda: client.models.retrieve("gpt/4"),
                 lambda: client.embeddings.create(model=model, input="x")):
        try:
            call()
            sys.exit("taken, although it is not here")
        except openai.NotFoundError as error:
            check("not here", error.body["message"] != "", True)


def check_fields(client, model):
    check("one model", client.models.retrieve(model), client.models.list().data[0])
    plain = {"model": model, "prompt": PROMPTS[1] + " with many trees, and under the trees there was a well, and", "max_tokens": 30,
             "temperature": 0}
    text = client.completions.create(**plain)
    again = client.completions.create(**plain)
    check("cached tokens", (again.usage.prompt_tokens_details.cached_tokens > 0, again.choices[0].text),
          (True, text.choices[0].text))
    penalised = client.completions.create(**plain, presence_penalty=2, frequency_penalty=2)
    check("penalties", penalised.choices[0].text != text.choices[0].text, True)
    forced = client.completions.create(**plain | {"max_tokens": 3}, logit_bias={"5": 100})
    check("logit_bias", len(set(forced.choices[0].text)), 1)
    echoed = client.completions.create(**plain | {"max_tokens": 5}, echo=True, logprobs=1, n=2)
    check("echo", [(plain["prompt"] + text.choices[0].text).startswith(choice.text) for choice in echoed.choices],
          [True, True])
    logprobs = echoed.choices[0].logprobs
    check("offsets", [echoed.choices[0].text[begin:].startswith(token) for token, begin in
                      zip(logprobs.tokens[1:], logprobs.text_offset[1:])], [True] * (len(logprobs.tokens) - 1))
    check("no probability for the first token", logprobs.token_logprobs[0], None)
    scored = client.completions.create(**plain, extra_body={"prompt_logprobs": 2, "min_tokens": 30})
    check("prompt_logprobs", len(scored.choices[0].prompt_logprobs), scored.usage.prompt_tokens)
    messages = [{"role": "user", "content": PROMPTS[0]}]
    chats = client.chat.completions.create(model=model, messages=messages, max_tokens=8, n=3, temperature=1, seed=1,
                                           frequency_penalty=0.5, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    check("three replies of a chat", len(chats.choices), 3)
    streamed = {}
    for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=8, n=3, temperature=1, seed=1,
                                                frequency_penalty=0.5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    check("streamed", streamed, {choice.index: choice.message.content for choice in chats.choices})


async def check_at_once(url, program, num_clients):
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=600)
    model = (await client.models.list()).data[0].id
    expected = {}
    for seed in range(8):
        expected[seed] = generated(program, 64, 0.8, seed)

    async def one(number):
        i, seed = number % len(PROMPTS), number // len(PROMPTS) % 8
        stream = await client.completions.create(model=model, prompt=PROMPTS[i], max_tokens=64, temperature=0.8,
                                                 seed=seed + i, stream=True, **UNCUT)
        text = ""
        async for piece in stream:
            text += piece.choices[0].text
        return text == expected[seed][i]

    right = sum(await asyncio.gather(*(one(number) for number in range(num_clients))))
    check(f"{num_clients} streams at the same time", right, num_clients)


def check_curl(url, program):
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0})
    command = ["curl", "--silent", "--fail", url + "/v1/completions", "--header", "Content-Type: application/json"]
    reply = json.loads(subprocess.run([*command, "--data", body], capture_output=True, check=True).stdout)
    check("curl", reply["choices"][0]["text"], generated(program, 12, 0, 0)[0])
    streamed = subprocess.run([*command, "--no-buffer", "--data", body[:-1] + ', "stream": true}'], capture_output=True,
                              check=True).stdout.decode()
    check("curl, streamed", streamed.endswith("data: [DONE]\n\n"), True)
    health = subprocess.run(["curl", "--silent", "--fail", url + "/health"], check=False)
    check("curl, health", health.returncode, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--clients", type=int, default=256)
    arguments = parser.parse_args()
    with http_program.HttpProgram(arguments.program, "--device", "cpu") as server:
        if not server.url:
            sys.exit(server.process.communicate()[1])
        check_one_by_one(openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0), arguments.program)
        check_curl(server.url, arguments.program)
        asyncio.run(check_at_once(server.url, arguments.program, arguments.clients))
        code, _, errors = server.end()
        check("exit code", code, 0)


if __name__ == "__main__":
    main()
