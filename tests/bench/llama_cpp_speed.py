#!/usr/bin/env python3
"""llama.cpp's speed on the same float32 weights: python3 tests/bench/llama_cpp_speed.py MODEL.gguf [--threads 2]

Needs the Python packages llama-cpp-python and gguf. Turns the model into an F32 file in a temporary folder, because
llama.cpp rounds activations to 8 bits when weights are quantised, and runs it in turn with `build/stage1 bench` on that
same file: a prompt of 512 tokens, 64 tokens after it, the fastest of four runs each.
"""

import argparse
import pathlib
import subprocess
import tempfile
import time

import gguf
import llama_cpp
import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROMPT_TOKENS = 512
NEW_TOKENS = 64
RUNS = 4


def write_float32(source, target):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = 0 if key == "general.file_type" else field.contents()
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, value, field.types[0], sub_type=field.types[1])
        else:
            writer.add_key_value(key, value, field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure_llama_cpp(path, threads):
    model = llama_cpp.Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, n_batch=512, n_ubatch=512,
                            verbose=False)
    prompt = [(7919 * i + 13) % model.n_vocab() for i in range(PROMPT_TOKENS)]
    prefill = decode = float("inf")
    for _ in range(RUNS):
        model.reset()
        start = time.perf_counter()
        model.eval(prompt)
        prefilled = time.perf_counter()
        for i in range(NEW_TOKENS):
            model.eval([(31 * i + 5) % model.n_vocab()])
        prefill = min(prefill, prefilled - start)
        decode = min(decode, time.perf_counter() - prefilled)
    print(f"llama.cpp: prefill {PROMPT_TOKENS / prefill:.1f} tokens/s, decode {NEW_TOKENS / decode:.1f} tokens/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "float32.gguf")
        write_float32(options.model, path)
        for _ in range(2):  # in turn, because the speed of a machine drifts
            measure_llama_cpp(path, options.threads)
            bench = subprocess.run([str(ROOT / "build/stage1"), "bench", "--model", path, "--threads",
                                    str(options.threads)], capture_output=True, text=True, check=True).stdout
            rows = [line.split("|")[1:3] for line in bench.splitlines() if "tokens/s" in line]
            print("stage1:    " + ", ".join(f"{name.split()[0]} {value.strip()}" for name, value in rows))


if __name__ == "__main__":
    main()
