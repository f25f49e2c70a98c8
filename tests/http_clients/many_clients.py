#!/usr/bin/env python3
"""Many streaming clients at once: python3 tests/http_clients/many_clients.py build/stage8 [--clients 256] [--device gpu]

Starts `serve --http` on a free port. Each client has a prompt of its own and reads its text as it is streamed; the text
must be that which `generate` writes on the same device, greedy and sampled. Then once more, while every fourth client hangs
up in the middle of its text. Whatever happened, no request is left and no block has an owner at the end, says /metrics.
Standard library only.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request

import http_program

BEGINNINGS = ("Once upon a time", "The king had a garden", "A wolf", "The old woman opened the door and", "In the forest",
              "The youngest daughter", "A poor man", "At night")
ENDINGS = ("", " and", " who", " which", ", but", " that", " when", " because")
FILLERS = ("", " there", " it was so", " far away")
ZERO = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "course:requests_failed_total")
METRICS = (*ZERO, "vllm:generation_tokens_total", "vllm:request_success_total")


def prompts_of(count):
    prompts = [begin + end + fill for begin in BEGINNINGS for end in ENDINGS for fill in FILLERS]
    return [prompts[i % len(prompts)] + " now" * (i // len(prompts)) for i in range(count)]


def generated(arguments, prompts, temperature):
    """Prompt i is sampled with seed + i."""
    command = [arguments.program, "generate", "--device", arguments.device, "--max-new-tokens", str(arguments.max_tokens),
               "--temperature", str(temperature), "--seed", "7", "--json", "-"]
    for prompt in prompts:
        command += ["--prompt", prompt]
    output = subprocess.run(command, capture_output=True, check=True, timeout=600).stdout
    return [entry["text"] for entry in json.loads(output)["requests"]]


def metrics_of(server):
    """{name: value}; request_success_total with its reason."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    values = {}
    for line in lines:
        if found := re.fullmatch(r'([a-z_:]+)\{model_name="[^"]*"(?:,finished_reason="(\w+)")?\} (\S+)', line):
            values[found[1] + (f"{{{found[2]}}}" if found[2] else "")] = float(found[3])
    return values


def metrics_when_idle(server):
    """The metrics once nothing runs; the last ones after ten seconds."""
    for _ in range(100):
        values = metrics_of(server)
        if values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0:
            break
        time.sleep(0.1)
    return values


class Clients:
    """All of them at once, each a thread with a connection."""

    def __init__(self, server, prompts, max_tokens, temperature, leaves):
        self.server, self.prompts, self.max_tokens, self.temperature, self.leaves = \
            server, prompts, max_tokens, temperature, leaves
        self.texts = [None] * len(prompts)
        self.seconds = [0.0] * len(prompts)
        self.barrier = threading.Barrier(len(prompts))
        threads = [threading.Thread(target=self.read, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def read(self, index):
        body = {"prompt": self.prompts[index], "max_tokens": self.max_tokens, "temperature": self.temperature,
                "seed": 7 + index, "stream": True, "top_k": 0, "top_p": 1}  # as `generate` draws
        connection = self.server.connect()
        connection.connect()
        self.barrier.wait()
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text, ended = "", False
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                text += event["choices"][0]["text"] if "choices" in event else f"<{event}>"
            ended = ended or line.startswith(b"data: [DONE]")
            if text and self.leaves(index):
                break
        self.seconds[index] = time.perf_counter() - begin
        self.texts[index] = text if ended or self.leaves(index) else f"<broken off after {text!r}>"
        if self.leaves(index):
            reply.close()
        connection.close()


def check(name, clients, expected, stays=lambda index: True):
    """Whether the texts are as expected."""
    staying = [index for index in range(len(expected)) if stays(index)]
    wrong = [index for index in staying if clients.texts[index] != expected[index]]
    print(f"{name}: {len(staying) - len(wrong)} of {len(staying)} texts as generate writes them, the last after "
          f"{max(clients.seconds):.2f} s")
    for index in wrong[:1]:
        print(f"{name}, client {index}: {clients.texts[index]!r}, expected {expected[index]!r}")
    return not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    arguments = parser.parse_args()
    count = arguments.clients
    prompts = prompts_of(count)

    with http_program.HttpProgram(arguments.program, "--device", arguments.device, "--max-sequences", str(count),
                                  "--max-queue", str(2 * count), "--slots", str(256 * count),
                                  gpu=arguments.device == "gpu") as server:
        if not server.url:
            sys.exit(f"the server does not start: {server.first_line}{server.process.communicate(timeout=60)[1]}")
        scraped, as_expected = [("before", metrics_of(server))], True
        for name, temperature in (("greedy", 0), ("sampled", 0.8)):
            expected = generated(arguments, prompts, temperature)
            for rest, gone in (("", lambda index: False), (", every fourth hangs up", lambda index: index % 4 == 1)):
                clients = Clients(server, prompts, arguments.max_tokens, temperature, gone)
                as_expected &= check(name + rest, clients, expected, lambda index, gone=gone: not gone(index))
                scraped.append((name + rest, metrics_when_idle(server)))
        code, _, errors = server.end()
    for name in scraped[-1][1]:
        if name.split("{")[0] in METRICS:
            print(f"{name}: " + ", ".join(f"{values.get(name, 0):g}" for _, values in scraped))
    errors = [f"the server ended with {code}: {errors}"] if code != 0 else []
    errors += [f"{name}: {metric} is {values[metric]:g}" for name, values in scraped for metric in ZERO if values[metric] != 0]
    if scraped[-1][1]["vllm:request_success_total{abort}"] == 0:
        errors.append("no request was cancelled: the texts are too short for this test")
    if not as_expected:
        errors.append("texts differ")
    sys.exit("\n".join(errors) or print("no request is left, and no block has an owner"))


if __name__ == "__main__":
    main()
