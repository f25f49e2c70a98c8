#!/usr/bin/env python3
"""A load of requests for any server with OpenAI's interface: python3 tests/bench/serve_load.py URL [--rate 4] [--svg FILE]

    python3 tests/bench/serve_load.py http://127.0.0.1:8080 --requests 200 --rate 2 4 8 16
    python3 tests/bench/serve_load.py http://127.0.0.1:8080 --concurrency 1 4 16 64
    python3 tests/bench/serve_load.py http://127.0.0.1:8080 --workload offline

--rate: requests arrive as a Poisson process, so many a second on average. --concurrency: so many are always being
served. Several values make a sweep. Lengths have the shape of a chat trace (ShareGPT, as `compare` of stage 8 draws
them); --workload offline is the published one of nano-vllm and Mini-SGLang: 256 requests, prompts and replies uniform
in 100 to 1,024 tokens, all at once.

For each value: tokens a second, time to the first token and between tokens (P50 and P99). A table, and with --svg a drawing.
Prompts are texts of about so many tokens (--words-per-token), or with --token-prompts lists of exactly so many tokens; replies
are exactly as long as they are drawn, if the server knows "ignore_eos". Standard library only.
"""

import argparse
import concurrent.futures
import http.client
import json
import math
import pathlib
import queue
import random
import sys
import threading
import time
import urllib.parse

MEAN_PROMPT = 161.31  # ShareGPT: Kwon et al., SOSP 2023, figure 11
MEAN_REPLY = 337.99
OFFLINE_REQUESTS = 256
OFFLINE_LENGTHS = (100, 1024)
WORDS = ("the old king went into the wood and there he met a wolf who said to him that his daughter was in the castle "
         "of the witch by the sea").split()


def percentile(values, share):
    """The smallest value that at least this share of them do not exceed; nan if there are none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else math.nan


def draw_length(generator, mean, max_length):
    """Log-normal, with a spread of 1."""
    return max(1, min(int(mean * math.exp(generator.gauss(0, 1) - 0.5)), max_length))


def draw_lengths(workload, count, max_length, seed):
    """(prompt tokens, reply tokens) of each request."""
    generator = random.Random(seed)
    if workload == "offline":
        return [(generator.randint(*OFFLINE_LENGTHS), generator.randint(*OFFLINE_LENGTHS)) for _ in range(count)]
    lengths = []
    for _ in range(count):
        prompt = draw_length(generator, MEAN_PROMPT, max_length // 2)
        lengths.append((prompt, draw_length(generator, MEAN_REPLY, max_length - prompt)))
    return lengths


def poisson_times(count, rate, seed):
    generator = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += generator.expovariate(rate)
    return times


class Client:
    """Sends requests to one server and notes when their tokens come."""

    def __init__(self, url, key, model, token_prompts, words_per_token, temperature):
        parts = urllib.parse.urlsplit(url if "://" in url else "http://" + url)
        self.secure = parts.scheme == "https"
        self.address = parts.netloc
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": "Bearer " + key} if key else {})
        self.token_prompts = token_prompts
        self.words_per_token = words_per_token
        self.temperature = temperature
        self.model = model or self.first_model()

    def connect(self):
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.address, timeout=3600)

    def first_model(self):
        connection = self.connect()
        connection.request("GET", self.path + "/v1/models", headers=self.headers)
        reply = connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            sys.exit(f"error: /v1/models answers {reply.status}: {text[:200].decode(errors='replace')}")
        return json.loads(text)["data"][0]["id"]

    def prompt(self, number, num_tokens):
        generator = random.Random(number)
        if self.token_prompts:
            return [generator.randrange(10, 1000) for _ in range(num_tokens)]
        return " ".join(generator.choice(WORDS) for _ in range(max(1, round(num_tokens * self.words_per_token))))

    def request(self, number, prompt_tokens, reply_tokens):
        """{"error"} or {"first", "between", "tokens", "prompt_tokens", "end"}, in seconds."""
        body = {"model": self.model, "prompt": self.prompt(number, prompt_tokens), "max_tokens": reply_tokens,
                "temperature": self.temperature, "seed": number, "stream": True, "ignore_eos": True,
                "stream_options": {"include_usage": True}}
        begin = time.perf_counter()
        times, usage = [], {}
        try:
            connection = self.connect()
            connection.request("POST", self.path + "/v1/completions", json.dumps(body), self.headers)
            reply = connection.getresponse()
            if reply.status != 200:
                return {"error": f"{reply.status}: {reply.read()[:200].decode(errors='replace')}"}
            for line in reply:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return {"error": str(event["error"])}
                    usage = event.get("usage") or usage
                    if any(choice.get("text") for choice in event.get("choices", ())):
                        times.append(time.perf_counter())
            connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            return {"error": repr(error)}
        end = time.perf_counter()
        return {"first": (times[0] if times else end) - begin, "end": end, "begin": begin,
                "between": [later - earlier for earlier, later in zip(times, times[1:])],
                "tokens": usage.get("completion_tokens", len(times)),
                "prompt_tokens": usage.get("prompt_tokens", prompt_tokens)}


def run_at_times(client, lengths, times):
    """Each request at its time, whatever became of those before."""
    results = queue.Queue()
    begin = time.perf_counter()
    threads = []
    for number, ((prompt, reply), at) in enumerate(zip(lengths, times)):
        time.sleep(max(0.0, begin + at - time.perf_counter()))
        thread = threading.Thread(target=lambda n=number, p=prompt, r=reply: results.put(client.request(n, p, r)))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return list(results.queue), time.perf_counter() - begin


def run_concurrently(client, lengths, concurrency):
    """So many at a time: the next one begins when one has ended."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        numbered = [(number, *pair) for number, pair in enumerate(lengths)]
        results = list(pool.map(lambda task: client.request(*task), numbered))
    return results, time.perf_counter() - begin


def summarise(name, results, seconds):
    served = [result for result in results if "error" not in result]
    first = [result["first"] for result in served]
    between = [gap for result in served for gap in result["between"]]
    tokens = sum(result["tokens"] for result in served)
    return {"load": name, "served": len(served), "failed": len(results) - len(served), "seconds": seconds,
            "tokens": tokens, "prompt_tokens": sum(result["prompt_tokens"] for result in served),
            "tokens_per_second": tokens / seconds, "first_p50": percentile(first, 0.5), "first_p99": percentile(first, 0.99),
            "between_p50": percentile(between, 0.5), "between_p99": percentile(between, 0.99)}


def table(rows):
    head = ["load", "served", "failed", "seconds", "tokens", "tokens/s", "TTFT P50, ms", "P99", "TBT P50, ms", "P99"]
    lines = [head] + [[row["load"], str(row["served"]), str(row["failed"]), f"{row['seconds']:.1f}", f"{row['tokens']:,}",
                       f"{row['tokens_per_second']:.1f}"] +
                      [f"{1e3 * row[key]:.1f}" for key in ("first_p50", "first_p99", "between_p50", "between_p99")]
                      for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    text.insert(1, "| " + " | ".join("-" * (width - 1) + ":" for width in widths) + " |")
    return "\n".join(text)


def drawing(rows, title):
    """Three small bar charts beside each other, as SVG."""
    charts = [("tokens a second", [("", "tokens_per_second", 1.0)]),
              ("to the first token, ms", [("P50", "first_p50", 1e3), ("P99", "first_p99", 1e3)]),
              ("between tokens, ms", [("P50", "between_p50", 1e3), ("P99", "between_p99", 1e3)])]
    height = 60 + 22 * sum(len(bars) for _, bars in charts) * len(rows) + 40 * len(charts)
    text = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" role="img" font-family="sans-serif" font-size="13">',
            f"<title>{title}</title>",
            "<style>text{fill:#222}.bar{fill:#4a90d9}.p99{fill:#d98a4a}@media (prefers-color-scheme:dark){text{fill:#ddd}}</style>",
            f'<text x="10" y="24" font-size="16">{title}</text>']
    y = 50
    for name, bars in charts:
        text.append(f'<text x="10" y="{y}" font-weight="bold">{name}</text>')
        y += 8
        values = [row[key] * scale for row in rows for _, key, scale in bars]
        largest = max([value for value in values if not math.isnan(value)] or [1.0]) or 1.0
        for row in rows:
            for label, key, scale in bars:
                value = row[key] * scale
                width = 0 if math.isnan(value) else 400 * value / largest
                text.append(f'<text x="150" y="{y + 15}" text-anchor="end">{row["load"]} {label}</text>'
                            f'<rect class="{"p99" if label == "P99" else "bar"}" x="160" y="{y + 3}" width="{width:.1f}" height="15"/>'
                            f'<text x="{166 + width:.1f}" y="{y + 15}">{value:.1f}</text>')
                y += 22
        y += 32
    return "\n".join([*text, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=100, help="for each value of the sweep")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, nargs="+", help="requests a second")
    load.add_argument("--concurrency", type=int, nargs="+", help="requests at a time")
    parser.add_argument("--workload", choices=("chat", "offline"), default="chat")
    parser.add_argument("--max-length", type=int, default=1000, help="of a chat: prompt and reply of the longest, in tokens")
    parser.add_argument("--token-prompts", action="store_true", help="send lists of tokens")
    parser.add_argument("--words-per-token", type=float, default=0.6)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--model", help="its name (default: the first of /v1/models)")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="write the results to this file")
    parser.add_argument("--svg", type=pathlib.Path, help="draw them into this file")
    arguments = parser.parse_args()
    if arguments.workload == "offline":
        arguments.requests = OFFLINE_REQUESTS
    if arguments.requests < 1 or min([1, *(arguments.rate or ()), *(arguments.concurrency or ())]) <= 0:
        parser.error("rates, numbers of requests and concurrency are above 0")
    client = Client(arguments.url, arguments.api_key, arguments.model, arguments.token_prompts, arguments.words_per_token,
                    arguments.temperature)
    lengths = draw_lengths(arguments.workload, arguments.requests, arguments.max_length, arguments.seed)
    rows, errors = [], set()

    def add(name, run):
        results, seconds = run
        errors.update(result["error"] for result in results if "error" in result)
        rows.append(summarise(name, results, seconds))
        print(f"{name}: {rows[-1]['tokens_per_second']:.1f} tokens/s", file=sys.stderr)

    for rate in arguments.rate or ():
        add(f"{rate:g}/s", run_at_times(client, lengths, poisson_times(len(lengths), rate, arguments.seed + 1)))
    for concurrency in arguments.concurrency or ():
        add(f"{concurrency} at once", run_concurrently(client, lengths, concurrency))
    if not rows:
        add("all at once", run_at_times(client, lengths, [0.0] * len(lengths)))
    print(table(rows))
    for error in sorted(errors)[:5]:
        print("failed:", error)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if arguments.svg:
        arguments.svg.write_text(drawing(rows, f"{client.model}: {arguments.workload}, {len(lengths)} requests"), encoding="utf-8")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
