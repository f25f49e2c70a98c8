#!/usr/bin/env python3
"""What stage 8 gains by sharing a model out among several GPUs: the same commands with 1 and with N of them, in turn.

    python3 tests/bench/tensor_parallel.py build-cuda/stage8 [--gpus 2] [--model llama-3-8b] [--large llama-3-70b]

Random weights in bfloat16. Prints a table. --large names a model that may not fit on one GPU; it is tried all the same.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile


class Failed(Exception):
    """A command has failed: its last line."""


def output_of(stage8, command, model, setting):
    """What the command prints, including its notes."""
    try:
        done = subprocess.run([stage8, *command, "--synthetic", model, "--precision", "bf16", "--device", "gpu", *setting],
                              capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired as error:
        raise Failed("not done after a minute") from error
    if done.returncode != 0:
        raise Failed((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout + done.stderr


def number(text, pattern):
    found = re.search(pattern, text)
    if not found:
        raise Failed(f"nothing like {pattern!r} was printed")
    return float(found.group(1).replace(",", ""))


def measure(stage8, model, setting, arrivals, long_prompt):
    """The figures of one setting, by name."""
    figures = {}
    few = output_of(stage8, ["bench", "--prompt-tokens", "128", "--new-tokens", "128"], model, setting)
    figures["one sequence, tokens a second"] = number(few, r"decode of 128 tokens after it\s*\|\s*([\d.,]+)")
    if long_prompt:
        many = output_of(stage8, ["bench", "--prompt-tokens", "8128", "--new-tokens", "16", "--chunk", "8128"], model,
                         setting)
        figures["a prompt of 8,128 tokens, tokens a second"] = number(many,
                                                                      r"prefill of 8128 tokens\s*\|\s*([\d.,]+)")
    served = output_of(stage8, ["serve", "--budget", "8192", "--max-sequences", "256", "--view", "quiet", "--arrivals",
                                str(arrivals)], model, setting)
    figures["128 sequences, tokens a second"] = number(served, r"in steps that only decode\s*\|\s*([\d.,]+)")
    figures["the cache, slots"] = number(served, r"a cache of ([\d,]+) slots")
    return figures


def print_table(model, columns):
    names = list(columns)
    print(f"\n| {model} | " + " | ".join(names) + " | best ratio |")
    print("| --- |" + " ---: |" * (len(names) + 1))
    for figure in columns[names[-1]]:
        values = [columns[name].get(figure) for name in names]
        ratio = f"{max(filter(None, values[1:])) / values[0]:.2f}" if values[0] else "–"
        print(f"| {figure} | " + " | ".join(f"{v:,.0f}" if v else "–" for v in values) + f" | {ratio} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage8")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--large", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arrivals = pathlib.Path(folder) / "arrivals"
        arrivals.write_text("0 128 128\n" * 128)
        for model in filter(None, [options.model, options.large]):
            settings = {"1 GPU": [], f"{options.gpus}, NCCL": ["--tensor-parallel", str(options.gpus)]}
            settings[f"{options.gpus}, peer"] = settings[f"{options.gpus}, NCCL"] + ["--all-reduce", "peer"]
            columns = {}
            for name, setting in settings.items():
                try:
                    columns[name] = measure(options.stage8, model, setting, arrivals, model == options.model)
                except Failed as error:
                    columns[name] = {}
                    print(f"{model} on {name}: {error}", file=sys.stderr, flush=True)
            if list(columns.values())[-1]:
                print_table(model, columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
