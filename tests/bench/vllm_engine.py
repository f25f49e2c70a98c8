#!/usr/bin/env python3
"""Runs batches of requests in vLLM for compare_engines.py, in a process of its own: vllm_engine.py PLAN REPORT

PLAN is a JSON file: "model", the folder of a config.json; "vocab_size"; "options" of vllm.LLM; "repeats"; "batches",
each with "name", "prompts" and "outputs" (tokens of each request), and "sampling" (arguments of vllm.SamplingParams);
and "hits", null or {"prefix", "new", "count"}. What was measured is appended to REPORT at once, a line of JSON for each
batch: it stays, whatever happens to the next one.
"""

import json
import os
import pathlib
import random
import sys
import time


class VllmEngine:
    def __init__(self, plan, report):
        self.plan, self.report = plan, report
        self.random = random.Random(1)
        begin = time.perf_counter()
        import vllm  # noqa: PLC0415  (it takes its settings from the environment when it is imported)
        self.vllm = vllm
        self.llm = vllm.LLM(model=plan["model"], **plan["options"])
        self.write({"ready": time.perf_counter() - begin})

    def write(self, line):
        with open(self.report, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def tokens(self, count):
        """So many random ones: no two prompts begin alike, so that the prefix cache finds nothing."""
        return [self.random.randrange(5, self.plan["vocab_size"] - 5) for _ in range(count)]

    def seconds(self, prompts, outputs, sampling):
        """From the call to the last request's last token."""
        parameters = [self.vllm.SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **sampling)
                      for count in outputs]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        results = self.llm.generate(requests, parameters, use_tqdm=False)
        seconds = time.perf_counter() - begin
        written = [len(result.outputs[0].token_ids) for result in results]
        if written != list(outputs):
            raise ValueError(f"{sum(written)} tokens were written, not {sum(outputs)}")
        return seconds

    def run_batch(self, batch):
        return [self.seconds([self.tokens(count) for count in batch["prompts"]], batch["outputs"], batch["sampling"])
                for _ in range(self.plan["repeats"])]

    def run_hits(self, prefix, new, count):
        """Seconds to the first token: of a prompt that finds nothing, and of each that then shares its prefix."""
        shared = self.tokens(prefix)
        return [self.seconds([shared + self.tokens(new)], [1], {"temperature": 0.0}) for _ in range(count + 1)]

    def measure(self, name, run):
        try:
            self.write({"name": name, "seconds": run()})
        except Exception as error:  # one batch that fails must not take the others with it
            self.write({"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})

    def run(self):
        warm_up = {"prompts": [128] * 8, "outputs": [32] * 8, "sampling": {"temperature": 0.0}}
        self.measure("warm-up", lambda: self.run_batch(warm_up))
        for batch in self.plan["batches"]:
            self.measure(batch["name"], lambda batch=batch: self.run_batch(batch))
        if self.plan["hits"]:
            self.measure("hits", lambda: self.run_hits(**self.plan["hits"]))


def main():
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_DO_NOT_TRACK="1",
                      TOKENIZERS_PARALLELISM="false", VLLM_LOGGING_LEVEL="WARNING")
    plan = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    VllmEngine(plan, sys.argv[2]).run()


if __name__ == "__main__":  # vLLM starts its engine as another process, which imports this file
    main()
