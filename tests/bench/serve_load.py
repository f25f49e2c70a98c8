#!/usr/bin/env python3
"""A load of requests for any server with OpenAI's interface: python3 tests/bench/serve_load.py URL [--rate 4] [--svg FILE]

    python3 tests/bench/serve_load.py http://127.0.0.1:8080 --requests 200 --rate 2 4 8 16
    python3 tests/bench/serve_load.py http://127.0.0.1:8080 --concurrency 1 4 16 64
    python3 tests/bench/serve_load.py http://127.0.0.1:8080 --workload offline

--rate: requests arrive as a Poisson process, with this many a second on average. --concurrency: this many requests are in
flight at all times. Several values make a sweep, and several values of --temperature a sweep within each. No two runs have
a prompt in common, or a prefix cache would answer, unless --shared-prefix says how much of it: with 8000, prompts of 8,100
tokens differ in their last 100, and the time to the first token is that of a hit. Lengths have the distribution of a chat trace (ShareGPT, as `compare` of
stage 8 draws them). --workload offline is the published one of nano-vllm and Mini-SGLang: 256 requests, prompts and replies
uniform in 100 to 1,024 tokens, all at once.

Measures, for each value, tokens a second, time to the first token and time between tokens (P50 and P99; a server that sends
several tokens at once has long times between them). Prints a table, and with --svg draws it. The clients are spread over
--processes; if one of these has no time to spare, a line on stderr says that the clients' speed was measured instead.
A prompt is a text of about the drawn number of tokens (--words-per-token), or with --token-prompts a list of exactly that
many tokens. A reply is exactly as long as drawn if the server knows "ignore_eos". Standard library only.
"""

import argparse
import concurrent.futures
import http.client
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import threading
import time
import urllib.parse

MEAN_PROMPT = 161.31  # ShareGPT: Kwon et al., SOSP 2023, figure 11
MEAN_REPLY = 337.99
BUSY = 0.8  # share of a client's time; above it, the client's speed is what is measured
OFFLINE_REQUESTS = 256
OFFLINE_LENGTHS = (100, 1024)
WORDS = ("the old king went into the wood and there he met a wolf who said to him that his daughter was in the castle "
         "of the witch by the sea").split()


def percentile(values, share):
    """The smallest value that at least this share of the values do not exceed; nan if there are no values."""
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


def pieces_of(arrived, data):
    """The JSON documents of server-sent events, each with the time at which its line was complete.

    arrived: (time, number of bytes received by then), ascending."""
    documents, begin, at = [], 0, 0
    while (end := data.find(b"\n", begin)) >= 0:
        while arrived[at][1] <= end:
            at += 1
        line = data[begin:end]
        if line.startswith(b"data:"):
            text = line[5:].strip()
            documents.append((arrived[at][0], None if text == b"[DONE]" else json.loads(text)))
        begin = end + 1
    return documents


class Client:
    """Sends requests to one server and notes when their tokens come."""

    def __init__(self, url, arguments):
        parts = urllib.parse.urlsplit(url if "://" in url else "http://" + url)
        self.secure = parts.scheme == "https"
        self.address = parts.netloc
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        key = arguments.api_key
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": "Bearer " + key} if key else {})
        self.token_prompts = arguments.token_prompts
        self.words_per_token = arguments.words_per_token
        self.seed = arguments.seed
        self.shared_prefix = arguments.shared_prefix
        self.fields = {name: getattr(arguments, name) for name in ("top_k", "top_p") if getattr(arguments, name) is not None}
        self.model = arguments.model or self.first_model()

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
        shared, own = random.Random(self.seed), random.Random(f"{self.seed} {number}")
        generators = itertools.chain(itertools.repeat(shared, self.shared_prefix), itertools.repeat(own))
        if self.token_prompts:
            return [generator.randrange(10, 1000) for generator in itertools.islice(generators, num_tokens)]
        num_words = max(1, round(num_tokens * self.words_per_token))
        return " ".join(generator.choice(WORDS) for generator in itertools.islice(generators, num_words))

    def request(self, number, prompt_tokens, reply_tokens, temperature):
        """{"error"} or {"first", "between", "tokens", "prompt_tokens"}, in seconds; "first" is None without a text."""
        body = json.dumps({"model": self.model, "prompt": self.prompt(number, prompt_tokens), "max_tokens": reply_tokens,
                           "temperature": temperature, "seed": number, "stream": True, "ignore_eos": True,
                           "stream_options": {"include_usage": True}, **self.fields})
        arrived, data = [], bytearray()
        connection = self.connect()
        begin = time.perf_counter()
        try:
            connection.request("POST", self.path + "/v1/completions", body, self.headers)
            reply = connection.getresponse()
            if reply.status != 200:
                return {"error": f"{reply.status}: {reply.read()[:200].decode(errors='replace')}"}
            while piece := reply.read1(1 << 16):
                data += piece
                arrived.append((time.perf_counter(), len(data)))
            documents = pieces_of(arrived, bytes(data))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return {"error": repr(error)}
        finally:
            connection.close()
        times, usage, ended = [], {}, False
        for at, event in documents:  # only now, so that parsing one reply does not delay the others
            if event is None:
                ended = True
            elif "error" in event:
                return {"error": str(event["error"])}
            else:
                usage = event.get("usage") or usage
                if any(choice.get("text") for choice in event.get("choices", ())):
                    times.append(at)
        if not ended:
            return {"error": "the reply broke off before [DONE]"}
        return {"first": times[0] - begin if times else None,
                "between": [later - earlier for earlier, later in zip(times, times[1:])],
                "tokens": usage.get("completion_tokens", len(times)),
                "prompt_tokens": usage.get("prompt_tokens", prompt_tokens)}


class Clients:
    """One of the processes that send requests. A request is (number, prompt tokens, reply tokens, temperature)."""

    def __init__(self, client, tasks, next_task, start, output):
        self.client, self.tasks, self.next_task, self.start, self.output = client, tasks, next_task, start, output

    def run(self, times, num_threads):
        """times: when each request is sent; None: each is sent when another has ended."""
        results, threads = [], []
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the handler that came with the fork
        self.start.wait()
        begin, used = time.perf_counter(), time.process_time()
        for number in range(num_threads) if times is None else ():
            threads.append(threading.Thread(target=self.take_turns, args=(results,)))
            threads[-1].start()
        for task, at in zip(self.tasks, times or ()):
            time.sleep(max(0.0, begin + at - time.perf_counter()))
            threads.append(threading.Thread(target=self.send, args=(task, results)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        end = time.perf_counter()
        self.output.put((results, begin, end, (time.process_time() - used) / (end - begin)))

    def send(self, task, results):
        results.append(self.client.request(*task))

    def take_turns(self, results):
        while True:
            with self.next_task.get_lock():
                index = self.next_task.value
                self.next_task.value += 1
            if index >= len(self.tasks):
                return
            self.send(self.tasks[index], results)


def run(client, tasks, num_processes, times=None, concurrency=None):
    """(results, seconds, the largest share of its time that a process was busy)"""
    num_processes = max(1, min(num_processes, len(tasks) if concurrency is None else concurrency))
    next_task, output = multiprocessing.Value("i", 0), multiprocessing.Queue()
    start = multiprocessing.Barrier(num_processes)
    processes = []
    for index in range(num_processes):
        every = slice(index, None, num_processes)
        part = Clients(client, tasks if times is None else tasks[every], next_task, start, output)
        num_threads = 0 if concurrency is None else len(range(concurrency)[every])
        processes.append(multiprocessing.Process(target=part.run, args=(times and times[every], num_threads), daemon=True))
        processes[-1].start()
    results, begins, ends, busy = zip(*[output.get() for _ in processes])
    for process in processes:
        process.join()
    return [result for part in results for result in part], max(ends) - min(begins), max(busy)


def processor_seconds(pid):
    """Processor time of all threads of a process on this machine since it began (Linux)."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summarise(name, results, seconds):
    served = [result for result in results if "error" not in result]
    first = [result["first"] for result in served if result["first"] is not None]
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
    if "processor_seconds" in rows[0]:
        lines[0].append("tokens/processor s")
        for line, row in zip(lines[1:], rows):
            line.append(f"{row['tokens'] / row['processor_seconds']:.4g}" if row["processor_seconds"] else "-")
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    text.insert(1, "| " + " | ".join("-" * (width - 1) + ":" for width in widths) + " |")
    return "\n".join(text)


def drawing(rows, title):
    """Three small bar charts, side by side, as SVG."""
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
    parser.add_argument("--requests", type=int, nargs="+", default=[100],
                        help="for each value of the sweep, or as many numbers as values")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, nargs="+", help="requests a second")
    load.add_argument("--concurrency", type=int, nargs="+", help="requests at a time")
    parser.add_argument("--workload", choices=("chat", "offline"), default="chat")
    parser.add_argument("--lengths", type=int, nargs=2, metavar=("PROMPT", "REPLY"), help="the same for all requests, in place of "
                        "a workload's")
    parser.add_argument("--max-length", type=int, default=1000, help="chat workload: the most tokens of prompt and reply together")
    parser.add_argument("--token-prompts", action="store_true", help="send lists of tokens")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens (without --token-prompts, words) with which all "
                        "prompts begin")
    parser.add_argument("--words-per-token", type=float, default=0.6)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="with several, each load is run with each")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 8), help="processes that share the clients")
    parser.add_argument("--pid", type=int, help="the server's process id: count its processor time too, which says more than the "
                        "clock on a machine that has other work")
    parser.add_argument("--model", help="its name (default: the first of /v1/models)")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="write the results to this file")
    parser.add_argument("--svg", type=pathlib.Path, help="draw the results into this file")
    arguments = parser.parse_args()
    loads = arguments.rate or arguments.concurrency or [0]
    if arguments.workload == "offline":
        arguments.requests = [OFFLINE_REQUESTS]
    if min([*arguments.requests, arguments.processes, *(arguments.rate or ()), *(arguments.concurrency or ()),
            *(arguments.lengths or ())]) <= 0:
        parser.error("rates, concurrency, lengths, and numbers of requests and processes are above 0")
    if len(arguments.requests) not in (1, len(loads)):
        parser.error("--requests takes one number, or one for each value of the sweep")
    client = Client(arguments.url, arguments)
    rows, errors, number = [], set(), 0
    for index, load in enumerate(loads):
        count = arguments.requests[index % len(arguments.requests)]
        lengths = [tuple(arguments.lengths)] * count if arguments.lengths else draw_lengths(
            arguments.workload, count, arguments.max_length, arguments.seed)
        for temperature in arguments.temperature:
            name = f"{load:g}/s" if arguments.rate else f"{load} at once" if arguments.concurrency else "all at once"
            if len(arguments.temperature) > 1:
                name += f", T {temperature:g}"
            tasks = [(number + i, *pair, temperature) for i, pair in enumerate(lengths)]
            number += len(tasks)
            times = poisson_times(len(tasks), load, arguments.seed + 1) if arguments.rate else [0.0] * len(tasks)
            used = processor_seconds(arguments.pid) if arguments.pid else 0.0
            results, seconds, busy = run(client, tasks, arguments.processes, None if arguments.concurrency else times,
                                         load if arguments.concurrency else None)
            errors.update(result["error"] for result in results if "error" in result)
            rows.append(summarise(name, results, seconds) | {"client_busy": busy})
            if arguments.pid:
                rows[-1]["processor_seconds"] = processor_seconds(arguments.pid) - used
            print(f"{name}: {rows[-1]['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
            if busy > BUSY:
                print(f"{name}: a process of clients was busy for {100 * busy:.0f} % of the time: the server may be faster; "
                      "try more --processes", file=sys.stderr)
    print(table(rows))
    for error in sorted(errors)[:5]:
        print("failed:", error)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if arguments.svg:
        arguments.svg.write_text(drawing(rows, f"{client.model}: {arguments.workload}"), encoding="utf-8")
    return 1 if errors else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exit ends the clients, a signal would not
    sys.exit(main())
