#!/usr/bin/env python3
"""llama.cpp's speed on the same file: python3 tests/bench/llama_cpp_speed.py MODEL.gguf [--threads 2] [--stage 1]

Needs the Python packages llama-cpp-python and gguf. Runs llama.cpp and `build/stageN bench` in turn, three times each: a
prompt (512 tokens), some tokens after it (64), the fastest of four runs. With quantised weights, llama.cpp rounds
activations to 8 bits and this program does not. --float32 compares on equal terms: it turns the model into an F32 file in a
temporary folder. --plain keeps llama.cpp from rearranging weights for AMX, which crashes on some virtual machines.
"""

import argparse
import ctypes
import pathlib
import subprocess
import sys
import tempfile
import time

import llama_cpp

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

from float32_gguf import write_float32

RUNS = 4
ROUNDS = 3


@llama_cpp.llama_log_callback
def ignore_log(level, text, user_data):
    pass


class LlamaCpp:
    def __init__(self, path, threads, plain):
        model_parameters = llama_cpp.llama_model_default_params()
        model_parameters.use_extra_bufts = not plain
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_parameters)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = 1024, 512, 512
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)

    def append(self, tokens):
        array = (llama_cpp.llama_token * len(tokens))(*tokens)  # the batch only points to it
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama.cpp cannot decode")

    def measure(self, num_prompt_tokens, num_new_tokens):
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        prompt = [(7919 * i + 13) % vocab_size for i in range(num_prompt_tokens)]
        prefill = decode = float("inf")
        for _ in range(RUNS):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
            start = time.perf_counter()
            self.append(prompt)
            prefilled = time.perf_counter()
            for i in range(num_new_tokens):
                self.append([(31 * i + 5) % vocab_size])
            prefill = min(prefill, prefilled - start)
            decode = min(decode, time.perf_counter() - prefilled)
        print(f"llama.cpp: prefill {num_prompt_tokens / prefill:.1f} tokens/s, "
              f"decode {num_new_tokens / decode:.1f} tokens/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stage", type=int, default=4, help="from 4 on, heads share keys and values as llama.cpp's do")
    parser.add_argument("--float32", action="store_true", help="turn the weights into float32 first")
    parser.add_argument("--plain", action="store_true", help="llama.cpp keeps weights as the file has them")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: %(default)s")
    options = parser.parse_args()
    llama_cpp.llama_log_set(ignore_log, ctypes.c_void_p(0))
    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if options.float32:
            path = str(pathlib.Path(folder) / "float32.gguf")
            write_float32(options.model, path)
        peer = LlamaCpp(path, options.threads, options.plain)
        for _ in range(ROUNDS):  # in turn, because the speed of a machine drifts
            peer.measure(options.prompt_tokens, options.new_tokens)
            bench = subprocess.run([str(ROOT / f"build/stage{options.stage}"), "bench", "--model", path, "--threads",
                                    str(options.threads), "--prompt-tokens", str(options.prompt_tokens),
                                    "--new-tokens", str(options.new_tokens)], capture_output=True, text=True, check=True).stdout
            rows = [line.split("|")[1:3] for line in bench.splitlines() if "tokens/s" in line]
            print(f"stage{options.stage}:    " + ", ".join(f"{name.split()[0]} {value.strip()}" for name, value in rows))


if __name__ == "__main__":
    main()
