#!/usr/bin/env python3
"""Real clients of `serve --http`: python3 tests/http_clients/openai_client.py build/stage8 [--clients 256] [--chat-model FILE]

Needs the package `openai` from PyPI, in an environment outside of the repository, and `curl`. Starts the server on a
free port and compares what clients get, at once and streamed, with the texts that `generate` prints for the same prompts and
seeds: one after another, and 256 streams at the same time. Then every path, field and header of stage8_batching/API.md;
with --chat-model, a GGUF file with a chat template, a conversation too.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time

import http_program
import openai

PROMPTS = ["Once upon a time", "The king had a garden", "A wolf", "The old woman opened the door and"]


# As `generate` draws: a value that is not given is the model's recommendation.
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
    for part in (check_errors, check_fields, check_replies, check_sampling, check_chats):
        part(client, model)


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


def refused(kind, call, param=None, code=None):
    """Whether a call is refused with an error of this kind, in one line that names the field."""
    try:
        call()
    except kind as error:
        body = error.body or {}
        is_clear = "\n" not in body.get("message", "\n") and body["message"] != ""
        check(f"refused: {body.get('message')}", (is_clear, body.get("param"), code and body.get("code")), (True, param, code))
    else:
        sys.exit(f"taken, although {param or kind.__name__} was expected")


def check_paths(client, url, model):
    """What is not below /v1, and what is not there at all."""
    root = client.with_options(base_url=url)
    check("health", root.get("/health", cast_to=object), {"status": "ready"})
    check("version", bool(re.fullmatch(r"\d+\.\d+.*", root.get("/version", cast_to=object)["version"])), True)
    tokens = root.post("/tokenize", body={"model": model, "prompt": PROMPTS[0]}, cast_to=object)["tokens"]
    bare = root.post("/tokenize", body={"prompt": PROMPTS[0], "add_special_tokens": False}, cast_to=object)["tokens"]
    check("tokenize", (tokens[-len(bare):], len(tokens) - len(bare)), (bare, 1))
    check("detokenize", root.post("/detokenize", body={"model": model, "tokens": bare}, cast_to=object)["prompt"], PROMPTS[0])
    chat = root.post("/tokenize", body={"messages": [{"role": "user", "content": PROMPTS[0]}]}, cast_to=object)
    check("a chat's tokens", chat["count"] == len(chat["tokens"]) > 0, True)
    text = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=8, temperature=0).choices[0].text
    check("tokens as a prompt", client.completions.create(model=model, prompt=tokens, max_tokens=8, temperature=0).choices[0].text, text)
    several = client.completions.create(model=model, prompt=[tokens, tokens], max_tokens=8, temperature=0)
    check("several of them", [(choice.index, choice.text) for choice in several.choices], [(0, text), (1, text)])
    metrics = subprocess.run(["curl", "--silent", "--fail", url + "/metrics"], capture_output=True, check=True).stdout.decode()
    check("metrics", all(f"\nvllm:{name}{{" in metrics for name in
                         ("prefix_cache_hits_total", "prefix_cache_queries_total", "prompt_tokens_total", "generation_tokens_total")), True)
    check("the page", subprocess.run(["curl", "--silent", "--fail", "--output", "/dev/null", url + "/"], check=False).returncode, 0)
    served = client.models.list().data[0]
    check("the longest context", served.model_extra["max_model_len"] > 0, True)
    for call in (lambda: client.responses.create(model=model, input="x"), lambda: client.moderations.create(input="x")):
        refused(openai.NotFoundError, call)
    try:
        client.post("/models", body={}, cast_to=object)
    except openai.APIStatusError as error:
        check("another method", (error.status_code, "GET" in error.response.headers["allow"]), (405, True))


def check_replies(client, model):
    """Ids, headers, usage and ends."""
    options = {"model": model, "prompt": PROMPTS[2], "max_tokens": 6, "temperature": 0}
    raw = client.completions.with_raw_response.create(**options, extra_headers={"X-Request-Id": "mine-1.a"})
    check("the client's id", raw.headers["x-request-id"], "mine-1.a")
    first, second = (client.completions.with_raw_response.create(**options) for _ in range(2))
    bodies = [reply.parse() for reply in (first, second)]
    check("the server's id", [reply.headers["x-request-id"] for reply in (first, second)], [body.id for body in bodies])
    check("each has its own", bodies[0].id != bodies[1].id and bodies[0]._request_id == bodies[0].id, True)  # noqa: SLF001
    check("created now", abs(bodies[0].created - time.time()) < 30, True)
    check("usage", bodies[0].usage.total_tokens, bodies[0].usage.prompt_tokens + bodies[0].usage.completion_tokens)
    choice = bodies[0].choices[0]
    check("an end by length", (choice.finish_reason, choice.model_extra["stop_reason"]), ("length", None))
    token = client.completions.create(**options | {"max_tokens": 1}, extra_body={"prompt_logprobs": 0}).choices[0]
    check("prompt_logprobs of none but the prompt's own", [len(entry) for entry in token.model_extra["prompt_logprobs"][1:]],
          [1] * (len(token.model_extra["prompt_logprobs"]) - 1))
    words = choice.text.split()
    stopped = client.completions.create(**options, stop=["\u2603", words[1]]).choices[0]
    check("stop_reason, a text", (stopped.finish_reason, stopped.model_extra["stop_reason"]), ("stop", words[1]))
    root = client.with_options(base_url=str(client.base_url).rsplit("/v1", 1)[0])
    ids = root.post("/tokenize", body={"prompt": PROMPTS[2] + choice.text}, cast_to=object)["tokens"]
    stopped = client.completions.create(**options, extra_body={"stop_token_ids": [ids[-2]]}).choices[0]
    check("stop_reason, a token", (stopped.finish_reason, stopped.model_extra["stop_reason"]), ("stop", ids[-2]))
    kept = client.completions.create(**options, extra_body={"stop_token_ids": [ids[-2]], "min_tokens": 6})
    check("min_tokens before a stop token", kept.usage.completion_tokens, 6)
    kept = client.completions.create(**options, stop=words[1], extra_body={"min_tokens": 6})
    check("min_tokens before a stop text", kept.choices[0].text, choice.text)
    long = client.completions.create(**options | {"max_tokens": 300}, extra_body={"ignore_eos": True})
    check("ignore_eos", (long.usage.completion_tokens, long.choices[0].finish_reason), (300, "length"))
    nothing = client.completions.create(**options | {"max_tokens": 0}, echo=True, logprobs=0)
    check("the prompt alone", (nothing.choices[0].text, nothing.usage.completion_tokens), (PROMPTS[2], 0))
    ignored = client.completions.create(**options, user="me", extra_body={"metadata": {}, "store": False, "priority": 0})
    check("fields that change no text", ignored.choices[0].text, choice.text)
    chunks = list(client.completions.create(**options, n=2, stream=True, stream_options={"include_usage": True}))
    check("one id for all chunks", len({chunk.id for chunk in chunks}), 1)
    check("usage in the last alone", [chunk.usage is not None for chunk in chunks], [False] * (len(chunks) - 1) + [True])
    check("each text ends once", sorted(choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason), [0, 1])


def check_sampling(client, model):
    """How a token is drawn."""
    def text(**options):
        extra = {name: options.pop(name) for name in list(options) if name in
                 ("top_k", "min_p", "repetition_penalty", "num_speculative_tokens", "cache_salt")}
        return client.completions.create(**({"model": model, "prompt": PROMPTS[3], "max_tokens": 24} | options), extra_body=extra)

    likeliest = text(temperature=0).choices[0].text
    for name, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1)):
        check(f"{name} of {value} is the likeliest token", text(temperature=1, seed=4, **{name: value}).choices[0].text, likeliest)
    check("the defaults of chat", text(seed=5).choices[0].text, text(seed=5, temperature=0.7, top_k=40, top_p=0.95).choices[0].text)
    check("a seed", text(seed=6).choices[0].text, text(seed=6).choices[0].text)
    check("another one", text(seed=6).choices[0].text != text(seed=7).choices[0].text, True)
    check("none: the server's next", len({text(temperature=1.5).choices[0].text for _ in range(3)}), 3)
    check("repetition_penalty", text(temperature=0, repetition_penalty=1.5).choices[0].text != likeliest, True)
    for drafts in (0, 8):
        check(f"{drafts} drafts change no text", text(temperature=0.8, seed=8, num_speculative_tokens=drafts).choices[0].text,
              text(temperature=0.8, seed=8).choices[0].text)
    salted = [text(temperature=0, cache_salt=salt, prompt=PROMPTS[3] + " looked at the forest for a long time, and then she said")
              for salt in ("mine", "mine", "yours")]
    check("cache_salt", [reply.usage.prompt_tokens_details.cached_tokens > 0 for reply in salted], [False, True, False])
    beams = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=8, n=3, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    check("a beam search", len({choice.text for choice in beams.choices}), 3)
    refused(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="x", top_p=0.5, extra_body={"use_beam_search": True}), "top_p")


def check_chats(client, model):
    user = {"role": "user", "content": PROMPTS[0]}
    options = {"model": model, "max_completion_tokens": 5, "temperature": 0}
    chat = client.chat.completions.create(**options, messages=[user])
    check("max_completion_tokens", (chat.usage.completion_tokens, chat.choices[0].finish_reason), (5, "length"))
    parts = [{"type": "text", "text": PROMPTS[0][:6]}, {"type": "text", "text": PROMPTS[0][6:]}]
    check("content in parts", client.chat.completions.create(**options, messages=[user | {"content": parts}]).choices[0].message.content,
          chat.choices[0].message.content)
    roles = [{"role": "system", "content": "You tell tales."}, user, {"role": "assistant", "content": " there was"}, {"role": "user", "content": " a"}]
    check("roles", client.chat.completions.create(**options, messages=roles).usage.prompt_tokens > chat.usage.prompt_tokens, True)
    developer = [{"role": "developer", "content": "You tell tales."}, *roles[1:]]
    check("developer", client.chat.completions.create(**options, messages=developer).choices[0].message.content,
          client.chat.completions.create(**options, messages=roles).choices[0].message.content)
    logged = client.chat.completions.create(**options, messages=[user], logprobs=True, top_logprobs=3).choices[0].logprobs.content
    check("chat logprobs", [(len(token.top_logprobs), bytes(token.bytes).decode()) for token in logged], [(3, token.token) for token in logged])
    stop = chat.choices[0].message.content.split()[2]  # the package's reader raises for an end by length
    with client.chat.completions.stream(**options, messages=[user], stop=stop) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    check("the package's own reader of streams", ("".join(deltas), final.choices[0].message.content), (chat.choices[0].message.content.split(stop)[0],) * 2)
    scored = client.chat.completions.create(**options, messages=[user], extra_body={"prompt_logprobs": 1})
    check("prompt_logprobs of a chat", len(scored.model_extra["prompt_logprobs"]), scored.usage.prompt_tokens)
    for wrong, param in (({"role": "tool", "content": "x"}, "messages[0].role"), ({"role": "user", "content": None}, "messages[0].content"),
                         ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content")):
        refused(openai.BadRequestError, lambda wrong=wrong: client.chat.completions.create(**options, messages=[wrong]), param)
    for extra, param in (({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
                         ({"response_format": {"type": "json_object"}}, "response_format"), ({"top_logprobs": 2}, "top_logprobs"),
                         ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, "chat_template_kwargs"),
                         ({"extra_body": {"temprature": 1}}, "temprature"), ({"stream_options": {"include_usage": True}}, "stream_options")):
        refused(openai.BadRequestError, lambda extra=extra: client.chat.completions.create(**options, messages=[user], **extra), param)
    plain = client.chat.completions.create(**options, messages=[user], response_format={"type": "text"}, tools=[])
    check("what asks for nothing is taken", plain.choices[0].message.content, chat.choices[0].message.content)
    refused(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="word " * 5000), "prompt", "context_length_exceeded")
    refused(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="x", max_tokens=100000), "max_tokens", "context_length_exceeded")
    refused(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="x", n=100000), "n")
    try:
        client.completions.create(model=model, prompt="x" * 2_000_000)
        sys.exit("2 MB: taken")
    except openai.APIStatusError as error:
        check("a body that is too large", error.status_code, 413)


def check_left_early(client, url, model):
    """A client that stops reading has its blocks freed."""
    stream = client.completions.create(model=model, prompt=PROMPTS[1], max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 10
    while "vllm:num_requests_running{" not in (metrics := subprocess.run(["curl", "--silent", url + "/metrics"], capture_output=True, check=True).stdout.decode()) \
            or not re.search(r"^vllm:num_requests_running\{.*\} 0$", metrics, re.MULTILINE):
        if time.monotonic() > end:
            sys.exit("a stream that was closed is still computed")
    check("a stream that is closed ends its request", True, True)


def check_key(program):
    with http_program.HttpProgram(program, "--device", "cpu", "--api-key", "secret", "--served-model-name", "tales") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
        check("a key, and a name", client.models.list().data[0].id, "tales")
        lower = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0, default_headers={"Authorization": "bearer secret"})
        check("in lower case", lower.models.retrieve("tales").id, "tales")
        wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="other", max_retries=0)
        refused(openai.AuthenticationError, wrong.models.list)
        for path in ("/health", "/metrics", "/version", "/", "/favicon.ico"):
            status = subprocess.run(["curl", "--silent", "--fail", "--output", "/dev/null", server.url + path], check=False).returncode
            check(f"{path} needs none", status, 0)


def check_full(program):
    options = ["--device", "cpu", "--max-queue", "1", "--pool-controls", "--paused"]
    with http_program.HttpProgram(program, *options) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        waiting = client.completions.create(model="tales-5m", prompt="A", max_tokens=4, stream=True)
        try:
            client.completions.create(model="tales-5m", prompt="B", max_tokens=4)
            sys.exit("a full queue takes more")
        except openai.RateLimitError as error:
            check("a full queue", (error.code, "retry-after" in error.response.headers), ("queue_full", True))
        server.post("/pool/run", {})
        check("the first one is served", len([chunk for chunk in waiting if chunk.choices]) > 0, True)


def check_conversation(program, path):
    """A model with a chat template."""
    with http_program.HttpProgram(program, "--device", "cpu", "--model", path) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=600)
        model, messages, found = client.models.list().data[0].id, [{"role": "system", "content": "You answer in one sentence."}], []
        for question in ("What is the capital of France?", "And of Italy?", "Which of the two is further south?"):
            messages.append({"role": "user", "content": question})
            stream = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0, stream=True,
                                                    stream_options={"include_usage": True})
            chunks = list(stream)
            reply = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            print(f"  {question} {reply}")
            messages.append({"role": "assistant", "content": reply})
            found.append(chunks[-1].usage.prompt_tokens_details.cached_tokens)
        check("each turn finds the ones before it", found[0] < found[1] < found[2], True)


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
    parser.add_argument("--chat-model", metavar="FILE")
    arguments = parser.parse_args()
    with http_program.HttpProgram(arguments.program, "--device", "cpu") as server:
        if not server.url:
            sys.exit(server.process.communicate()[1])
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        check_one_by_one(client, arguments.program)
        model = client.models.list().data[0].id
        check_paths(client, server.url, model)
        check_left_early(client, server.url, model)
        check_curl(server.url, arguments.program)
        asyncio.run(check_at_once(server.url, arguments.program, arguments.clients))
        code, _, errors = server.end()
        check("exit code", code, 0)
    check_key(arguments.program)
    check_full(arguments.program)
    if arguments.chat_model:
        check_conversation(arguments.program, arguments.chat_model)


if __name__ == "__main__":
    main()
