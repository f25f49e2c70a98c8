#!/usr/bin/env python3
"""What drafts looked up in the text ("ngram") gain in vLLM, on the prompts that `stage8 speculate` measures.

    build/stage8 speculate --model FILE.gguf --prompts stage8_batching/demo/speculation_prompts.txt --max-new-tokens 200 \\
        --tokens tokens.json
    python3 tests/bench/vllm_drafts.py tokens.json --model FOLDER

FOLDER: the same weights as vLLM loads them; transformers' from_pretrained(…, gguf_file=…) and save_pretrained() make it.
Each prompt is served alone, greedily, and ends where the model ends it, as in `stage8 speculate`; both get the same tokens,
so that no tokenizer is needed. The time is that of the whole reply less that of a reply of one token, each the fastest of
the rounds: the prompt's step counts in neither program. Prints the same table. An engine cannot be closed and opened again
in one process, so each has one of its own. Needs vLLM (v0.26 was measured) and a GPU.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

METHODS = ("ngram", "ngram_gpu")  # looked up by the CPU, or by the GPU
LONGEST_LOOKUP = 3
RESULT = "RESULT "
COUNTERS = {"drafts": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def counters_of(engine):
    """{name: value}; zeros where nothing is drafted."""
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return {name: int(found.get(key, 0)) for name, key in COUNTERS.items()}


def measure(requests, engine, rounds, sampling_params, clock=time.perf_counter):
    """[{kind, tokens, seconds, drafts, accepted}], one for each prompt. `requests`: what `speculate --tokens` writes; engine: a
    vLLM engine; sampling_params: vllm.SamplingParams."""

    def serve(tokens, count):
        options = sampling_params(temperature=0.0, max_tokens=count, stop_token_ids=requests["stop_tokens"], detokenize=False)
        begin = clock()
        output = engine.generate([{"prompt_token_ids": tokens}], options, use_tqdm=False)
        return clock() - begin, len(output[0].outputs[0].token_ids)

    rows = []
    for prompt in requests["prompts"]:
        serve(prompt["tokens"], requests["max_new_tokens"])  # whatever is compiled or recorded at first use
        first = min(serve(prompt["tokens"], 1)[0] for _ in range(rounds))
        best, row = None, {}
        for _ in range(rounds):
            before = counters_of(engine)
            seconds, count = serve(prompt["tokens"], requests["max_new_tokens"])
            after = counters_of(engine)
            if best is None or seconds < best:
                best = seconds
                row = {"kind": prompt["kind"], "tokens": count - 1, "seconds": max(seconds - first, 1e-9)}
                row |= {name: after[name] - before[name] for name in COUNTERS}
        rows.append(row)
    return rows


def table(plain, drafted):
    """Both results by kind, as `stage8 speculate` prints them."""
    lines = ["| texts | drafts | accepted | tokens a step | plain | with drafts | gain |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for kind in dict.fromkeys(row["kind"] for row in plain):
        without, having = ([row for row in rows if row["kind"] == kind] for rows in (plain, drafted))

        def total(rows, name):
            return sum(row[name] for row in rows)

        speeds = [total(rows, "tokens") / total(rows, "seconds") for rows in (without, having)]
        steps = max(total(having, "tokens") - total(having, "accepted"), 1)
        lines.append(f"| {kind} | {total(having, 'drafts')} | {total(having, 'accepted')} | {total(having, 'tokens') / steps:.2f} | "
                     f"{speeds[0]:.0f} tokens/s | {speeds[1]:.0f} tokens/s | {speeds[1] / speeds[0]:.2f} |")
    return "\n".join(lines)


def run_engine(options):
    """In a process of its own: prints what measure() returns, on a line that begins with RESULT (vLLM prints others)."""
    try:
        import vllm
    except ImportError:
        sys.exit("error: vLLM is not installed")
    requests = json.loads(options.requests.read_text(encoding="utf-8"))
    engine = vllm.LLM(model=options.model, skip_tokenizer_init=True, dtype=options.dtype, enable_prefix_caching=False,
                      max_model_len=options.max_model_len, gpu_memory_utilization=0.5, disable_log_stats=False,
                      **({"speculative_config": {"method": options.method, "num_speculative_tokens": options.drafts,
                                                 "prompt_lookup_max": LONGEST_LOOKUP}} if options.drafts else {}))
    print(RESULT + json.dumps(measure(requests, engine, options.rounds, vllm.SamplingParams)), flush=True)


def compare(path, model, drafts=4, rounds=3, dtype="bfloat16", max_model_len=2048, method=METHODS[0]):
    """The table for a file of requests, with one engine after the other."""
    results = []
    for count in (0, drafts):
        command = [sys.executable, __file__, path, "--model", model, "--drafts", count, "--rounds", rounds, "--dtype", dtype,
                   "--max-model-len", max_model_len, "--method", method, "--one-engine"]
        run = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode != 0:
            sys.exit(f"error: vLLM {'with' if count else 'without'} drafts has failed, see above")
        results += [json.loads(line.removeprefix(RESULT)) for line in run.stdout.splitlines() if line.startswith(RESULT)]
    return table(*results)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=pathlib.Path, help="what `stage8 speculate --tokens` has written")
    parser.add_argument("--model", required=True, help="what vLLM loads")
    parser.add_argument("--drafts", type=int, default=4, help="drafts a step")
    parser.add_argument("--method", choices=METHODS, default=METHODS[0], help="who looks them up: the CPU or the GPU")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured; the fastest counts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--one-engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_engine:
        run_engine(options)
    else:
        print(compare(options.requests, options.model, options.drafts, options.rounds, options.dtype, options.max_model_len,
                      options.method))


if __name__ == "__main__":
    main()
