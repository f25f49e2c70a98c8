#!/usr/bin/env python3
"""This engine (build/stage8) and vLLM by turns on the same requests, on this machine: one table, one JSON file.

    compare_engines.py --json engines.json                     everything: about 15 minutes on an H200
    compare_engines.py --groups decode,sampling --models llama-3.2-1b --json engines.json
    compare_engines.py --show engines.json                     the tables of what has been measured

Needs a GPU, a build of stage 8, and for vLLM a Python (--python) that can import it; without one, that side's figures
are missing and a line says so. Every figure is written to --json as soon as it is there, in the form of
tests/bench/measured/, and what other groups and models have left in the file stays: a run can be cut into parts, or cut
short.

| group | requests, all at once | models |
| --- | --- | --- |
| decode | 1, 32, 128 of 128 prompt tokens: the reply's tokens 129 to 640, as the difference of 640 and 128 | 1b, 8b |
| sampling | 64 of 100 + 100 and of 512 + 512 tokens: greedy, temperature 0.8, with top-k 40 and top-p 0.95 | 1b |
| long | 64 of 2,000 + 256, sampled as above; of the 8b, 64 of 1,500 + 200, and decode's 128 | 1b, 8b |
| offline | 256, prompts and replies uniform in 100 to 1,024 tokens: greedy, temperature 0.6 | qwen |
| hits | one at a time: to the first token of 8,000 cached tokens and 100 new ones; the median of 20 | 1b, 8b |
| http | lengths of chats from 1, 16, 64, 256 clients (serve_load.py), also with vLLM's front end in Rust | 1b |

**By turns**: this engine, vLLM, this engine again, each in a process of its own, because both want the GPU's memory. A
turn is a warm-up and then each batch --repeats times, of which the fastest counts. This engine's figure is the mean of
its two turns, so that a drift of the machine cancels; both are in the file. A ratio above 1 says that this engine is
ahead.

**The same for both**: bfloat16, random weights of the published shapes, max 16,384 tokens a step (over HTTP 8,192) and
256 sequences, prefix cache on (the default of both) but no two prompts alike except in hits, times from the submission
of a batch to its last token, inside the engine's process except in http. vLLM gets 0.6 of the GPU's memory, this engine
1.15 times the slots that the largest batch needs. vLLM is otherwise as it comes: compiled, with CUDA graphs, and
scheduling asynchronously; set its environment variables as you like (VLLM_USE_FLASHINFER_SAMPLER=0 where FlashInfer is
missing).
"""

import argparse
import contextlib
import dataclasses
import datetime
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BLOCK_SIZE = 16
NUM_HITS = 20
HIT_PREFIX, HIT_NEW = 8000, 100
MAX_STEP_TOKENS, MAX_HTTP_STEP_TOKENS, MAX_SEQUENCES = 16384, 8192, 256
MAX_LENGTH = 8192  # of a prompt and its reply, for vLLM
VLLM_MEMORY = 0.6
FURTHER = 512  # decode: tokens 129 to 640
CLIENTS = {1: 6, 16: 48, 64: 256, 256: 768}  # at once: requests
GROUPS = ("decode", "sampling", "long", "offline", "hits", "http")
SAMPLING = {"greedy": {"temperature": 0.0}, "t08": {"temperature": 0.8},
            "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.95}, "t06": {"temperature": 0.6}}
RATE_COLUMNS = {"ours": "tokens/s", "theirs": "tokens/s", "ratio": "",
                "ours_first": "tokens/s", "ours_again": "tokens/s"}
COLUMNS = {group: RATE_COLUMNS for group in GROUPS} | {
    "hits": {"ours": "ms", "theirs": "ms", "ratio": "", "ours_first": "ms", "ours_again": "ms", "ours_cold": "ms",
             "theirs_cold": "ms"},
    "http": RATE_COLUMNS | {"ours_first_token": "ms", "theirs_first_token": "ms", "theirs_rust": "tokens/s",
                            "theirs_rust_first_token": "ms"}}
FRONT_ENDS = {"theirs": {}, "theirs_rust": {"VLLM_USE_RUST_FRONTEND": "1"}}  # of vLLM: settings in its environment


class InputError(Exception):
    """An error that the user can put right: one line for stderr."""


class Failed(Exception):
    """A run of one engine went wrong: why. The others go on."""


@dataclasses.dataclass(frozen=True)
class Model:
    name: str  # of `--synthetic`
    short: str
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feed_forward_size: int
    vocab_size: int
    tied: bool
    rope_theta: float

    def vllm_config(self):
        """What its config.json would say."""
        return {"architectures": [self.architecture],
                "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
                "hidden_size": self.hidden_size, "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim, "intermediate_size": self.feed_forward_size, "vocab_size": self.vocab_size,
                "tie_word_embeddings": self.tied, "rope_theta": self.rope_theta, "hidden_act": "silu",
                "max_position_embeddings": MAX_LENGTH, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
                "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2,
                "attention_bias": False, "mlp_bias": False}

    def num_weights(self):
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        layer = self.hidden_size * (heads * self.head_dim + 3 * self.feed_forward_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def kv_bytes(self):
        """Of a token, in bfloat16."""
        return 4 * self.num_layers * self.num_kv_heads * self.head_dim


MODELS = {model.name: model for model in (
    Model("llama-3.2-1b", "1b", "LlamaForCausalLM", 2048, 16, 32, 8, 64, 8192, 128256, True, 500000.0),
    Model("llama-3-8b", "8b", "LlamaForCausalLM", 4096, 32, 32, 8, 128, 14336, 128256, False, 500000.0),
    Model("qwen3-0.6b", "qwen", "Qwen3ForCausalLM", 1024, 28, 16, 8, 128, 3072, 151936, True, 1000000.0))}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that are submitted at the same time."""
    name: str
    prompts: tuple[int, ...]  # tokens of each
    outputs: tuple[int, ...]
    sampling: str

    def slots(self):
        lengths = [prompt + output for prompt, output in zip(self.prompts, self.outputs)]
        return sum(-(-length // BLOCK_SIZE) * BLOCK_SIZE for length in lengths)

    def patience(self, model, pace):
        """Seconds after which the next batch may come: more than it takes, if pace is large enough.

        At pace 1 of an engine that reads 2 TB/s, computes 250 TFLOP/s and has 0.2 ms of overhead in each step.
        """
        cached = sum(output * (prompt + output / 2) for prompt, output in zip(self.prompts, self.outputs))
        steps = max(self.outputs) * (2e-4 + 2 * model.num_weights() / 2e12)
        prompts = 2 * model.num_weights() * sum(self.prompts) / 2.5e14
        return 0.3 + pace * (steps + cached * model.kv_bytes() / 2e12 + prompts)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A row of the table: tokens a second of a batch, or of what the second has beyond the first."""
    group: str
    row: str
    batches: tuple[Batch, ...]

    def tokens(self):
        totals = [sum(batch.outputs) for batch in self.batches]
        return totals[-1] - (totals[0] if len(totals) > 1 else 0)

    def rate(self, seconds):
        """seconds: {name of a batch: those of its repeats}; None if one is missing."""
        if any(batch.name not in seconds for batch in self.batches):
            return None
        best = [min(seconds[batch.name]) for batch in self.batches]
        spent = best[-1] - (best[0] if len(best) > 1 else 0.0)
        return self.tokens() / spent if spent > 0 else None


def lockstep(count, prompt, output, sampling):
    return Batch(f"{count}x{prompt}_{output}_{sampling}", (prompt,) * count, (output,) * count, sampling)


def decode_cell(model, count):
    return Cell("decode", f"{model.short}_{count}",
                tuple(lockstep(count, 128, output, "greedy") for output in (128, 128 + FURTHER)))


def cells_of(model, groups):
    """Those that are a batch or two in the engine's process, in order, none twice."""
    cells = []
    if "decode" in groups and model.short in ("1b", "8b"):
        cells += [decode_cell(model, count) for count in (1, 32, 128)]
    if "long" in groups and model.short == "8b":
        cells += [Cell("long", "8b_64x1500_greedy", (lockstep(64, 1500, 200, "greedy"),)), decode_cell(model, 128)]
    for group, lengths in (("sampling", ((100, 100), (512, 512))), ("long", ((2000, 256),))):
        if group in groups and model.short == "1b":
            cells += [Cell(group, f"1b_64x{prompt}_{sampling}", (lockstep(64, prompt, output, sampling),))
                      for prompt, output in lengths for sampling in ("greedy", "t08", "filtered")]
    if "offline" in groups and model.short == "qwen":
        generator = random.Random(0)
        prompts, outputs = (tuple(generator.randint(100, 1024) for _ in range(256)) for _ in range(2))
        cells += [Cell("offline", f"qwen_{sampling}", (Batch(f"offline_{sampling}", prompts, outputs, sampling),))
                  for sampling in ("greedy", "t06")]
    return list(dict.fromkeys(cells))


def batches_of(cells):
    return list(dict.fromkeys(batch for cell in cells for batch in cell.batches))


def say(text):
    print(text, flush=True)


# --- the file ---

class Results:
    """The figures, kept in a file from the first one on."""

    def __init__(self, path, machine, commit):
        self.path = path
        self.content = {"machine": machine, "figures": {}}
        self.commit = commit
        if path.exists():
            self.content = load_results(path)
            if self.content["machine"] != machine:
                raise InputError(f"{path} is of another machine ({self.content['machine']}): name another file")

    def figure(self, group):
        return self.content["figures"].setdefault(group, {"columns": COLUMNS[group], "rows": {}})

    def put(self, group, row, values, versions):
        """values: {column: number or None}; those that are not named stay. Writes the file."""
        figure = self.figure(group)
        figure |= {"date": datetime.date.today().isoformat(), "commit": self.commit,
                   "command": f"python3 tests/bench/compare_engines.py --groups {group}"}
        if versions:
            figure["versions"] = versions
        columns = list(figure["columns"])
        old = figure["rows"].get(row, [None] * len(columns))
        merged = dict(zip(columns, old)) | values
        turns = [merged[name] for name in ("ours_first", "ours_again") if merged[name] is not None]
        merged["ours"] = tidy(statistics.mean(turns), figure["columns"]["ours"]) if turns else None
        merged["ratio"] = None
        if merged["ours"] and merged["theirs"]:
            ahead = merged["ours"] / merged["theirs"]
            merged["ratio"] = round(1 / ahead if figure["columns"]["ours"] == "ms" else ahead, 2)
        figure["rows"][row] = list(merged.values())
        partial = self.path.with_name(self.path.name + ".part")
        partial.write_text(results_text(self.content), encoding="utf-8")
        os.replace(partial, self.path)

    def forget(self, group, row, turns):
        """What the turns have measured before, so that a turn that fails does not leave an old figure."""
        columns, rows = list(self.figure(group)["columns"]), self.figure(group)["rows"]
        if row in rows:
            rows[row] = [None if name in turns else value for name, value in zip(columns, rows[row])]


def load_results(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["figures"], content["machine"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no file of this program: {error}") from error
    return content


def tidy(value, unit):
    return None if value is None else round(value, 2) if unit == "ms" else round(value)


def results_text(content):
    """JSON with a line for each row."""
    rows = re.compile(r'^(\s*"[\w.]+": )(\[[^\[\]]*\])', re.MULTILINE)

    def one_line(match):
        return match[1] + " ".join(match[2].split()).replace("[ ", "[").replace(" ]", "]")

    return rows.sub(one_line, json.dumps(content, indent=2)) + "\n"


def table(group, figure):
    names = [f"{name}, {unit}" if unit else name for name, unit in figure["columns"].items()]
    lines = [f"| {group} | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for row, values in figure["rows"].items():
        lines.append(f"| {row} | {' | '.join('-' if value is None else f'{value:,}' for value in values)} |")
    return "\n".join(lines)


# --- processes ---

@contextlib.contextmanager
def process(command, log, environment=None):
    """A program with a log, and an end for it and all that it has started."""
    with open(log, "w", encoding="utf-8") as file:
        try:
            running = subprocess.Popen([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT,
                                       start_new_session=True, env=environment)
        except OSError as error:
            raise Failed(f"cannot run {command[0]}: {error}") from error
        try:
            yield running
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(20)
            wait_for_group(running.pid)


def wait_for_group(group, limit=5.0):
    """Until none of its processes is left: another engine wants the GPU's memory."""
    begin = time.monotonic()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() - begin < limit:
            os.killpg(group, 0)
            time.sleep(0.02)


def end_of(log, count=12):
    """The log's last lines, below the message that they explain."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.rstrip()[:300] for line in text.splitlines() if line.strip()]
    return "\n    ".join(["", *lines[-count:]]) if lines else " it said nothing"


def run_to_end(command, log, limit, on_wait=lambda: None, environment=None):
    """Failed if it fails, or runs for more than limit seconds. on_wait is called again and again, and at the end."""
    begin = time.monotonic()
    with process(command, log, environment) as running:
        while running.poll() is None:
            on_wait()
            if time.monotonic() - begin > limit:
                raise Failed(f"{pathlib.Path(command[0]).name} ran for more than {limit:.0f} s")
            time.sleep(0.05)
    on_wait()
    if running.returncode:
        raise Failed(f"{pathlib.Path(command[0]).name} ended with {running.returncode}:{end_of(log)}")


# --- this engine ---

class Ours:
    def __init__(self, program, folder, repeats, limit):
        self.program, self.folder, self.repeats, self.limit = program, folder, repeats, limit

    def serve(self, model, options, report):
        report.unlink(missing_ok=True)
        command = [self.program, "serve", "--synthetic", model.name, "--precision", "bf16", "--device", "gpu",
                   "--budget", MAX_STEP_TOKENS, "--max-sequences", MAX_SEQUENCES, "--view", "quiet", "--json", report,
                   *options]
        run_to_end(command, self.folder / "ours.log", self.limit)
        return json.loads(report.read_text(encoding="utf-8"))

    def batches(self, model, batches):
        """{name: seconds of each repeat}: one run of the program for each way to sample."""
        seconds = {}
        for sampling in dict.fromkeys(batch.sampling for batch in batches):
            chosen = [batch for batch in batches if batch.sampling == sampling]
            try:
                seconds |= self.run_batches(model, chosen, sampling)
            except Failed as error:
                say(f"failed: this engine, {model.name}, {sampling}: {error}")
        return seconds

    def run_batches(self, model, batches, sampling):
        options = [part for name, value in SAMPLING[sampling].items()
                   for part in ("--" + name.replace("_", "-"), value)]
        slots = int(1.15 * max(batch.slots() for batch in batches)) // BLOCK_SIZE * BLOCK_SIZE + 64 * BLOCK_SIZE
        for pace in (1, 2, 4, 8):
            arrivals = schedule(model, batches, self.repeats, pace)
            path = self.folder / "arrivals"
            path.write_text("".join(f"{at:.3f} {prompt} {output}\n" for at, _, requests in arrivals
                                    for prompt, output in requests), encoding="utf-8")
            outputs = self.serve(model, ["--arrivals", path, "--slots", slots, *options],
                                 self.folder / "ours.json")["outputs"]
            seconds = read_batches(arrivals, outputs)
            if seconds is not None:
                return seconds
            say(f"{model.name}, {sampling}: a batch came before the one before had ended; once more, more slowly")
        raise Failed("the batches run into each other however late they come")

    def hits(self, model):
        """Seconds to the first token: of the first prompt, then of each that shares its prefix."""
        generator = random.Random(1)
        # The bundled model's tokenizer, which reads the prompts of random weights too, makes a token of each digit and
        # puts one in front.
        shared = "".join(generator.choices("0123456789", k=HIT_PREFIX - 1))
        options = []
        for number in range(NUM_HITS + 1):
            path = self.folder / f"prompt{number}"
            path.write_text(shared + "".join(generator.choices("0123456789", k=HIT_NEW)), encoding="utf-8")
            options += ["--prompt-file", path]
        report = self.serve(model, [*options, "--max-new-tokens", 1, "--arrivals", "poisson:4", "--slots",
                                    2 * (HIT_PREFIX + HIT_NEW * NUM_HITS)], self.folder / "ours.json")
        found = report["counters"]["prefix_tokens_saved"]
        if found != NUM_HITS * HIT_PREFIX:
            raise Failed(f"{found} tokens were found in the prefix cache, not {NUM_HITS * HIT_PREFIX}")
        return [request["first_token_seconds"] - request["arrival_seconds"] for request in report["outputs"]]

    def server(self, model, port):
        return [self.program, "serve", "--http", f"127.0.0.1:{port}", "--synthetic", model.name, "--precision", "bf16",
                "--device", "gpu", "--slots", 400000, "--budget", MAX_HTTP_STEP_TOKENS,
                "--max-sequences", MAX_SEQUENCES, "--max-queue", 2048, "--quiet"]


WARM_UP = Batch("warm-up", (128,) * 8, (32,) * 8, "greedy")


def schedule(model, batches, repeats, pace):
    """[(when, name, [(prompt, output)])]: the warm-up, then the batches, each so late that the one before has ended."""
    arrivals, at = [], 0.0
    for batch in [WARM_UP, *(batch for _ in range(repeats) for batch in batches)]:
        arrivals.append((round(at, 3), batch.name, list(zip(batch.prompts, batch.outputs))))
        at += (2.0 * pace if batch is WARM_UP else 0.0) + batch.patience(model, pace)
    return arrivals


def read_batches(arrivals, outputs):
    """{name: seconds of each repeat}, from each batch's arrival to its last token; None if batches overlap."""
    seconds, index, ended = {}, 0, 0.0
    for at, name, requests in arrivals:
        if at < ended:
            return None
        results = outputs[index:index + len(requests)]
        index += len(requests)
        written = [sum(len(text["tokens"]) for text in result.get("completions", ())) for result in results]
        if written != [output for _, output in requests]:
            raise Failed(f"{name}: {sum(written)} tokens were written, not {sum(output for _, output in requests)}: "
                         f"{next((result['error'] for result in results if 'error' in result), 'no reason given')}")
        ended = max(result["end_seconds"] for result in results)
        if name != WARM_UP.name:
            seconds.setdefault(name, []).append(ended - at)
    return seconds


# --- vLLM ---

class Theirs:
    def __init__(self, python, versions, folder, repeats, limit):
        self.python, self.versions, self.folder, self.repeats, self.limit = python, versions, folder, repeats, limit

    def model_folder(self, model):
        """With a tokenizer whose texts are the numbers of tokens, as this engine's are with random weights."""
        folder = self.folder / f"model-{model.name}"
        if not folder.exists():
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(model.vllm_config()), encoding="utf-8")
            words = {f"t{number}": number for number in range(model.vocab_size)}
            tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                         "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                         "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"}}
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
            (folder / "tokenizer_config.json").write_text(json.dumps(
                {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "model_max_length": MAX_LENGTH}),
                encoding="utf-8")
        return folder

    def run(self, model, batches, has_hits, on_result):
        """Starts vLLM once. on_result(name, seconds of each repeat) as they come."""
        plan, report = self.folder / "plan.json", self.folder / "theirs.jsonl"
        report.write_text("", encoding="utf-8")
        plan.write_text(json.dumps({
            "model": str(self.model_folder(model)), "vocab_size": model.vocab_size, "repeats": self.repeats,
            "options": {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
                        "max_model_len": MAX_LENGTH, "gpu_memory_utilization": VLLM_MEMORY,
                        "max_num_seqs": MAX_SEQUENCES, "max_num_batched_tokens": MAX_STEP_TOKENS,
                        "disable_log_stats": True},
            "batches": [dataclasses.asdict(batch) | {"sampling": SAMPLING[batch.sampling]} for batch in batches],
            "hits": {"prefix": HIT_PREFIX, "new": HIT_NEW, "count": NUM_HITS} if has_hits else None}), encoding="utf-8")
        position = 0

        def read_on():
            nonlocal position
            text = report.read_text(encoding="utf-8")
            end = text.rfind("\n") + 1
            for line in text[position:end].splitlines():
                result = json.loads(line)
                if "ready" in result:
                    say(f"{model.name}: vLLM {self.versions['vllm']} is ready after {result['ready']:.0f} s")
                elif "error" in result:
                    say(f"failed: vLLM, {model.name}, {result['name']}: {result['error']}")
                elif result["name"] != "warm-up":
                    on_result(result["name"], result["seconds"])
            position = max(position, end)

        run_to_end([self.python, HERE / "vllm_engine.py", plan, report], self.folder / "theirs.log", self.limit,
                   read_on)

    def server(self, model, port):
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port,
                "--model", self.model_folder(model), "--served-model-name", model.name, "--load-format", "dummy",
                "--dtype", "bfloat16", "--max-model-len", MAX_LENGTH, "--gpu-memory-utilization", VLLM_MEMORY,
                "--max-num-seqs", MAX_SEQUENCES, "--max-num-batched-tokens", MAX_HTTP_STEP_TOKENS,
                "--disable-log-stats", "--disable-uvicorn-access-log"]


# --- over HTTP ---

def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_until_ready(port, running, log, limit):
    begin = time.monotonic()
    while time.monotonic() - begin < limit:
        if running.poll() is not None:
            raise Failed(f"the server ended with {running.returncode}:{end_of(log)}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise Failed(f"the server was not ready after {limit:.0f} s")


def http_rates(make_command, settings, folder, name, limit):
    """{clients: a row of serve_load.py}"""
    port, log, report = free_port(), folder / f"{name}.log", folder / f"{name}-load.json"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | settings
    with process(make_command(port), log, environment) as running:
        wait_until_ready(port, running, log, limit)
        for warm in (True, False):
            load = [sys.executable, HERE / "serve_load.py", f"http://127.0.0.1:{port}", "--token-prompts",
                    "--processes", 6, "--seed", 2 if warm else 1, "--json", report,
                    "--concurrency", *([8] if warm else CLIENTS), "--requests", *([16] if warm else CLIENTS.values())]
            run_to_end(load, folder / f"{name}-load.log", limit)
    return dict(zip(CLIENTS, json.loads(report.read_text(encoding="utf-8"))))


# --- the comparison ---

class Comparison:
    def __init__(self, results, ours, theirs, groups, turns):
        self.results, self.ours, self.theirs, self.groups, self.turns = results, ours, theirs, groups, turns

    def put(self, group, row, **values):
        columns = COLUMNS[group]
        values = {name: tidy(value, columns[name]) for name, value in values.items()}
        self.results.put(group, row, values, self.theirs.versions if self.theirs else {})
        shown = ", ".join(f"{name} {'-' if value is None else format(value, ',')} {columns[name]}"
                          for name, value in values.items())
        say(f"{group} {row}: {shown}")

    def our_turn(self, model, cells, has_hits, column):
        seconds = self.ours.batches(model, batches_of(cells)) if cells else {}
        for cell in cells:
            self.put(cell.group, cell.row, **{column: cell.rate(seconds)})
        if has_hits:
            try:
                cold, *hits = self.ours.hits(model)
                self.put("hits", f"{model.short}_{HIT_NEW}",
                         **{column: 1e3 * statistics.median(hits), "ours_cold": 1e3 * cold})
            except Failed as error:
                say(f"failed: this engine, {model.name}, hits: {error}")

    def their_turn(self, model, cells, has_hits):
        seconds = {}

        def on_result(name, values):
            if name == "hits":
                self.put("hits", f"{model.short}_{HIT_NEW}", theirs=1e3 * statistics.median(values[1:]),
                         theirs_cold=1e3 * values[0])
                return
            seconds[name] = values
            for cell in cells:
                if name in (batch.name for batch in cell.batches) and cell.rate(seconds) is not None:
                    self.put(cell.group, cell.row, theirs=cell.rate(seconds))

        self.theirs.run(model, batches_of(cells), has_hits, on_result)

    def compare(self, model):
        cells, has_hits = cells_of(model, self.groups), "hits" in self.groups and model.short in ("1b", "8b")
        if not cells and not has_hits:
            return
        for cell in cells:
            self.results.forget(cell.group, cell.row, self.turns)
        if has_hits:
            self.results.forget("hits", f"{model.short}_{HIT_NEW}", self.turns)
        for turn in self.turns:
            begin = time.monotonic()
            try:
                if turn != "theirs":
                    self.our_turn(model, cells, has_hits, turn)
                elif self.theirs:
                    self.their_turn(model, cells, has_hits)
            except Failed as error:
                say(f"failed: {model.name}, {turn}: {error}")
            say(f"{model.name}, {turn}: {time.monotonic() - begin:.0f} s")

    def compare_http(self, model):
        for clients in CLIENTS:
            self.results.forget("http", f"{model.short}_{clients}",
                                [*self.turns, *(FRONT_ENDS if "theirs" in self.turns else ())])
        for turn in self.turns:
            engine = self.theirs if turn == "theirs" else self.ours
            for name, settings in (FRONT_ENDS.items() if turn == "theirs" else ((turn, {}),)):
                if engine:
                    self.serve(model, engine, name, settings)

    def serve(self, model, engine, name, settings):
        begin = time.monotonic()
        try:
            rows = http_rates(lambda port: engine.server(model, port), settings, engine.folder, f"http-{name}",
                              engine.limit)
        except Failed as error:
            say(f"failed: {model.name}, http, {name}: {error}")
            return
        first = f"{name}_first_token" if name in FRONT_ENDS else "ours_first_token"
        for clients, row in rows.items():
            self.put("http", f"{model.short}_{clients}",
                     **{name: row["tokens_per_second"], first: 1e3 * row["first_p50"]})
        say(f"{model.name}, http, {name}: {time.monotonic() - begin:.0f} s")


def machine_text():
    """NVIDIA H200, driver 580.159.04, CUDA 13.0"""
    try:
        query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                               capture_output=True, text=True, check=True).stdout.splitlines()[0]
        version = re.search(r"CUDA Version:\s*([\d.]+)", subprocess.run(["nvidia-smi"], capture_output=True, text=True,
                                                                         check=True).stdout)
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise InputError(f"nvidia-smi tells of no GPU here: {error}") from error
    name, driver = (part.strip() for part in query.split(","))
    return f"{name}, driver {driver}" + (f", CUDA {version[1]}" if version else "")


def commit_text():
    try:
        return subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError("this is no checkout with a history: name the commit with --commit") from error


def chosen(text, known, what):
    names = text.split(",")
    for name in names:
        if name not in known:
            raise InputError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return names


def vllm_versions(python):
    """{"vllm": …, "torch": …}, or {} if it is not there. Without importing it, which takes a while."""
    code = "import importlib.metadata as m, json; print(json.dumps({name: m.version(name) for name in ('vllm', 'torch')}))"
    try:
        found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"cannot run {python}: {error}") from error
    return json.loads(found.stdout) if found.returncode == 0 else {}


def compare(options):
    groups = chosen(options.groups, GROUPS, "group")
    models = [MODELS[name] for name in chosen(options.models, MODELS, "model")]
    if not options.json:
        raise InputError("name a file for the figures with --json")
    if not shutil.which(options.program):
        raise InputError(f"there is no program {options.program}: build it, or name it with --program")
    machine, commit = machine_text(), options.commit or commit_text()
    results = Results(options.json, machine, commit)
    versions = vllm_versions(options.python)
    say(f"{machine}, commit {commit}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        theirs = None
        if versions:
            theirs = Theirs(options.python, versions, folder, options.repeats, options.limit)
        else:
            say(f"skipped: {options.python} has no vLLM; this engine alone is measured")
        ours = Ours(options.program, folder, options.repeats, options.limit)
        comparison = Comparison(results, ours, theirs, groups, options.turns.split(","))
        for model in models:
            comparison.compare(model)
            if "http" in groups and model.short == "1b":
                comparison.compare_http(model)
    show(results.content)


def show(content):
    say("\n" + content["machine"])
    for group, figure in content["figures"].items():
        if figure["rows"]:
            versions = ", ".join(f"{name} {version}" for name, version in figure.get("versions", {}).items())
            say(f"\n{table(group, figure)}\n\n{figure['date']}, commit {figure['commit']}, {versions or 'no vLLM'}")


def stop(*_):
    raise SystemExit(143)  # so that what was started is ended too


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(GROUPS), help="default: %(default)s")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--json", type=pathlib.Path, help="the file of the figures; may be there already")
    parser.add_argument("--turns", default="ours_first,theirs,ours_again",
                        help="who runs, in order (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="of each batch in a turn; the fastest counts (default: "
                        "%(default)s)")
    parser.add_argument("--program", default=str(ROOT / "build" / "stage8"), help="this engine (default: %(default)s)")
    parser.add_argument("--python", default=sys.executable, help="a Python that has vLLM (default: this one)")
    parser.add_argument("--commit", help="what was built (default: what git says)")
    parser.add_argument("--limit", type=float, default=600,
                        help="seconds for a turn of one model (default: %(default)s)")
    parser.add_argument("--show", type=pathlib.Path, metavar="FILE", help="print a file's tables, and measure nothing")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or set(options.turns.split(",")) - {"ours_first", "theirs", "ours_again"}:
        parser.error("--repeats is 1 or more, and --turns names ours_first, theirs, ours_again")
    signal.signal(signal.SIGTERM, stop)
    try:
        if options.show:
            show(load_results(options.show))
        else:
            compare(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
