#!/usr/bin/env python3
"""Conversations that take turns, in a pool that holds a part of them: what a second tier of the cache gains, here and in vLLM.

    conversation_turns.py --json turns.json                    all four, 200 conversations: about 12 minutes on an H200
    conversation_turns.py --engines with,vllm_with --json turns.json
    conversation_turns.py --cpu --conversations 12 --tokens 200 --reply 4 --json turns.json        a dry run

| engine | |
| --- | --- |
| without | stage8 serve --slots, for --pool of all conversations |
| with | the same, and --host-cache with room for all of them |
| vllm | vllm serve --num-gpu-blocks-override, for as many tokens |
| vllm_with | the same, and --kv-offloading-size: blocks are copied to the host by its OffloadingConnector |

Each conversation begins with --tokens tokens, and has --message more in each turn: no two have a block in common, and a
turn's prompt is the one before and a message. In a turn, all conversations are served in their order, --clients at a time,
so that a conversation comes again when all others have been served. The engines run one after the other, each in a process
of its own; over HTTP, with prompts of tokens, random weights of the published shape in bfloat16, greedily, and with replies
of exactly --reply tokens. For each turn: the time to the first token, and tokens a second of replies and of prompts,
whether they were computed or found. In the first turn there is nothing to find: it shows what keeping the blocks costs.

The figures are written to --json in the form of tests/bench/measured/ after each engine; what other engines have left in the
file stays. The tier's memory is pinned: the host needs as much beside vLLM's own (with llama-3-8b, 200 conversations and
16-bit K and V: 160 GiB; with --kv-cache fp8 half of that). --cpu: the bundled model on a CPU, without vLLM.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.request

import compare_engines
import serve_load
from compare_engines import BLOCK_SIZE, MAX_HTTP_STEP_TOKENS, MAX_SEQUENCES, MODELS, ROOT, Failed, InputError, say

ENGINES = ("without", "with", "vllm", "vllm_with")
COLUMNS = {"first": "ms", "first_p99": "ms", "replies": "tokens/s", "prompts": "tokens/s"}
FIGURE = "conversation_turns"
CPU_KV_BYTES = 3072  # of a token, in the bundled model
SPARE = 1.05  # of the tier: a conversation's last block is not full


class Load:
    def __init__(self, options):
        self.options = options
        self.longest = options.tokens + (options.turns - 1) * options.message + options.reply
        blocks = -(-self.longest // BLOCK_SIZE)
        self.slots = max(int(options.pool * options.conversations * blocks), 2 * blocks) * BLOCK_SIZE
        kv_bytes = CPU_KV_BYTES if options.cpu else MODELS[options.model].kv_bytes()
        self.host_gib = options.host_gib or (SPARE * options.conversations * blocks * BLOCK_SIZE * kv_bytes /
                                             (2 if options.kv_cache == "fp8" else 1) / 2**30)

    def our_command(self, has_tier, port):
        options = self.options
        chosen = (["--device", "cpu"] if options.cpu else
                  ["--synthetic", options.model, "--precision", "bf16", "--device", "gpu",
                   "--kv-cache", options.kv_cache, "--budget", MAX_HTTP_STEP_TOKENS])
        return [options.program, "serve", "--http", f"127.0.0.1:{port}", *chosen, "--slots", self.slots,
                "--max-sequences", MAX_SEQUENCES, "--quiet",
                *(["--host-cache", f"{self.host_gib:.4f}GiB"] if has_tier else [])]

    def their_command(self, theirs, has_tier, port):
        kv_cache = ["--kv-cache-dtype", "fp8"] if self.options.kv_cache == "fp8" else []
        offloading = ["--kv-offloading-size", f"{self.host_gib:.4f}", "--kv-offloading-backend", "native",
                      "--disable-hybrid-kv-cache-manager"] if has_tier else []
        return [*theirs.server(MODELS[self.options.model], port), "--num-gpu-blocks-override", self.slots // BLOCK_SIZE,
                *kv_cache, *offloading]

    def tasks(self, turn):
        """A prompt's number says how it begins, whatever its length."""
        options = self.options
        return [(number, options.tokens + turn * options.message, options.reply, 0.0)
                for number in range(options.conversations)]

    def turns(self, url):
        """The summary of each turn. Failed if a request has failed."""
        client = serve_load.Client(url, argparse.Namespace(
            api_key="", token_prompts=True, words_per_token=1.0, seed=self.options.seed, shared_prefix=0, top_k=None,
            top_p=None, model=None))
        warm_up = [(self.options.conversations + number, 100, 8, 0.0) for number in range(8)]
        rows = []
        for tasks in (warm_up, *(self.tasks(turn) for turn in range(self.options.turns))):
            results, seconds, _ = serve_load.run(client, tasks, min(6, self.options.clients),
                                                 concurrency=self.options.clients)
            errors = [result["error"] for result in results if "error" in result]
            if errors:
                raise Failed(f"{len(errors)} of {len(tasks)} requests, the first: {errors[0]}")
            rows.append(serve_load.summarise("", results, seconds))
        return rows[1:]


def wait_until_pinned(url, limit):
    """Until the tier of this engine has all of its blocks: it serves before, with those that are there. Steps count them."""
    end = time.monotonic() + limit
    step = urllib.request.Request(f"{url}/v1/completions", json.dumps({"prompt": [1], "max_tokens": 1}).encode(),
                                  {"Content-Type": "application/json"})
    while time.monotonic() < end:
        urllib.request.urlopen(step, timeout=limit).read()
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=limit).read().decode()
        size, there = (float(re.search(rf"^course:host_cache_{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)[1])
                       for name in ("blocks", "blocks_allocated"))
        if there == size:
            return
        time.sleep(0.5)
    raise Failed(f"after {limit:g} s the tier has {there:g} of {size:g} blocks")


def serve(load, name, make_command, folder):
    """{row: figures} of one engine."""
    port, log = compare_engines.free_port(), folder / f"{name}.log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with compare_engines.process(make_command(port), log, environment) as running:
        compare_engines.wait_until_ready(port, running, log, load.options.limit)
        url = f"http://127.0.0.1:{port}"
        try:
            if name == "with":
                ready = time.monotonic()
                wait_until_pinned(url, load.options.limit)
                say(f"{name}: all of the tier was there {time.monotonic() - ready:.0f} s after the server was ready")
            turns = load.turns(url)
        except Failed as error:
            raise Failed(f"{error}{compare_engines.end_of(log)}") from error
    rows = {}
    for number, turn in enumerate(turns, 1):
        rows[f"{name}_{number}"] = [round(1e3 * turn["first_p50"], 2), round(1e3 * turn["first_p99"], 2),
                                    round(turn["tokens_per_second"], 1),
                                    round(turn["prompt_tokens"] / turn["seconds"])]
        say(f"{name}, turn {number}: " + ", ".join(
            f"{column} {value:,} {unit}" for (column, unit), value in zip(COLUMNS.items(), rows[f"{name}_{number}"])))
    return rows


def opened(path, machine, options):
    """What the file has, with the figure's command. InputError if this run's rows do not belong into it."""
    if not path.resolve().parent.is_dir():
        raise InputError(f"{path}: there is no such folder")
    content = {"machine": machine, "figures": {}}
    if path.exists():
        content = compare_engines.load_results(path)
        if content["machine"] != machine:
            raise InputError(f"{path} is of another machine ({content['machine']}): name another file")
    figure = content["figures"].setdefault(FIGURE, {"columns": COLUMNS, "rows": {}})
    command = ("python3 tests/bench/conversation_turns.py " + ("--cpu " if options.cpu else f"--model {options.model} ") +
               f"--kv-cache {options.kv_cache} --conversations {options.conversations} --tokens {options.tokens} "
               f"--turns {options.turns} --message {options.message} --reply {options.reply} "
               f"--clients {options.clients} --pool {options.pool:g} --seed {options.seed}" +
               (f" --host-gib {options.host_gib:g}" if options.host_gib else ""))
    if figure["rows"] and figure.get("command") != command:
        raise InputError(f"{path} is of another load ({figure.get('command')}): name another file")
    figure["command"] = command
    return content


def write(path, machine, commit, versions, rows, options):
    content = opened(path, machine, options)
    figure = content["figures"][FIGURE]
    figure |= {"date": datetime.date.today().isoformat(), "commit": commit}
    if versions:
        figure["versions"] = versions
    figure["rows"] |= rows
    partial = path.with_name(path.name + ".part")
    partial.write_text(compare_engines.results_text(content), encoding="utf-8")
    os.replace(partial, path)
    return figure


def measure(options):
    engines = compare_engines.chosen(options.engines, ENGINES, "engine")
    compare_engines.chosen(options.model, MODELS, "model")
    if not shutil.which(options.program):
        raise InputError(f"there is no program {options.program}: build it, or name it with --program")
    machine = "a CPU" if options.cpu else compare_engines.machine_text()
    commit = options.commit or compare_engines.commit_text()
    opened(options.json, machine, options)  # what is wrong with it is told before minutes are measured
    versions = {} if options.cpu else compare_engines.vllm_versions(options.python)
    load, figure, num_failed = Load(options), None, 0
    say(f"{machine}, commit {commit}: {options.conversations} conversations of up to {load.longest:,} tokens, a pool of "
        f"{load.slots:,} slots, a tier of {load.host_gib:.2f} GiB")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        theirs = compare_engines.Theirs(options.python, versions, folder, 1, options.limit)
        for engine in engines:
            has_tier, is_ours = engine.endswith("with"), not engine.startswith("vllm")
            if not is_ours and not versions:
                say(f"skipped: {engine}: " + ("on a CPU" if options.cpu else f"{options.python} has no vLLM"))
                continue

            def command(port, is_ours=is_ours, has_tier=has_tier):
                return (load.our_command(has_tier, port) if is_ours else load.their_command(theirs, has_tier, port))

            try:
                rows = serve(load, engine, command, folder)
            except Failed as error:
                say(f"failed: {engine}: {error}")
                num_failed += 1
                continue
            figure = write(options.json, machine, commit, versions, rows, options)
    if figure:
        say("\n" + compare_engines.table(FIGURE, figure))
    return 1 if num_failed else 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True, help="the file of the figures; may be there already")
    parser.add_argument("--engines", default=",".join(ENGINES), help="which, in order (default: %(default)s)")
    parser.add_argument("--model", default="llama-3-8b", help="default: %(default)s")
    parser.add_argument("--kv-cache", choices=("auto", "fp8"), default="auto", help="of both engines")
    for name, default, what in (("conversations", 200, ""), ("tokens", 6000, "of a conversation's first prompt"),
                                ("turns", 3, "of each conversation"), ("message", 100, "tokens that a turn adds"),
                                ("reply", 32, "tokens of a reply"), ("clients", 8, "requests at a time"),
                                ("seed", 1, "of the prompts")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)".strip())
    parser.add_argument("--pool", type=float, default=0.1, help="the part of all conversations for which the pool has room "
                        "(default: %(default)s)")
    parser.add_argument("--host-gib", type=float, help="the tier's size (default: room for all conversations)")
    parser.add_argument("--cpu", action="store_true", help="the bundled model on a CPU, without vLLM")
    parser.add_argument("--program", default=str(ROOT / "build" / "stage8"), help="this engine (default: %(default)s)")
    parser.add_argument("--python", default=sys.executable, help="a Python that has vLLM (default: this one)")
    parser.add_argument("--commit", help="what was built (default: what git says)")
    parser.add_argument("--limit", type=float, default=300, help="seconds until a server is ready (default: %(default)s)")
    options = parser.parse_args(arguments)
    if min(options.conversations, options.tokens, options.turns, options.message, options.reply, options.clients) < 1:
        parser.error("numbers are 1 or more")
    if options.cpu and options.kv_cache != "auto":
        parser.error("--kv-cache is for GPUs")
    if not 0 < options.pool <= 1 or (options.host_gib is not None and not 0 < options.host_gib < math.inf):
        parser.error("--pool is a part of 1, and --host-gib above 0")
    signal.signal(signal.SIGTERM, compare_engines.stop)
    try:
        return measure(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
