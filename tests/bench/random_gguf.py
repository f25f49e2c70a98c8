#!/usr/bin/env python3
"""A file to measure servers with: python3 tests/bench/random_gguf.py OUT.gguf [--type Q4_K]

91 million random weights in 8 layers, with the bundled model's tokenizer and a context of 4,096 tokens: large enough that
arithmetic takes most of the time, not the front end. Needs the Python packages gguf and numpy.
"""

import argparse
import pathlib

import gguf
import numpy

TALES = pathlib.Path(__file__).resolve().parent.parent.parent / "common/model/tales/tales-5m-q8_0.gguf"
LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 8, 1024, 2816, 16, 4, 64, 4096
# Where a block's scale and minimum are, and the minimum that centres its values.
TYPES = {"Q8_0": (0, None, 0), "Q4_0": (0, None, 0), "Q4_K": (0, 2, 7.5), "Q5_K": (0, 2, 15.5), "Q6_K": (208, None, 0)}


def random_blocks(generator, name, rows, cols):
    """Random bytes, with scales that keep the size of activations."""
    kind = gguf.GGMLQuantizationType[name]
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = generator.integers(0, 256, (rows * cols // size, num_bytes), dtype=numpy.uint8)
    scale, minimum, centre = TYPES[name]

    def put(value):
        data[:, scale:scale + 2] = numpy.frombuffer(numpy.float16(value).tobytes(), numpy.uint8)
        if minimum is not None:
            data[:, minimum:minimum + 2] = numpy.frombuffer(numpy.float16(value * centre).tobytes(), numpy.uint8)

    put(1.0)
    put(1.5 / cols**0.5 / gguf.dequantize(data[:1000], kind).std())
    return data.reshape(rows, -1), kind


def write(path, name):
    generator = numpy.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": LAYERS, "context_length": CONTEXT, "embedding_length": HIDDEN,
                       "feed_forward_length": FEED_FORWARD, "attention.head_count": HEADS,
                       "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_DIM}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    fields = gguf.GGUFReader(TALES).fields
    for key in ("model", "pre"):
        writer.add_string(f"tokenizer.ggml.{key}", fields[f"tokenizer.ggml.{key}"].contents())
    tokens = fields["tokenizer.ggml.tokens"].contents()
    writer.add_array("tokenizer.ggml.tokens", tokens)
    for key in ("token_type", "merges"):
        writer.add_array(f"tokenizer.ggml.{key}", fields[f"tokenizer.ggml.{key}"].contents())
    for key in ("bos_token_id", "eos_token_id"):
        writer.add_uint32(f"tokenizer.ggml.{key}", 0)

    def add(tensor, rows, cols=None):
        if cols is None:
            writer.add_tensor(tensor, numpy.ones(rows, numpy.float32))
        else:
            blocks, kind = random_blocks(generator, name, rows, cols)
            writer.add_tensor(tensor, blocks, raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    add("output.weight", len(tokens), HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        add(prefix + "attn_norm.weight", HIDDEN)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            add(f"{prefix}attn_{part}.weight", heads * HEAD_DIM, HIDDEN)
        add(prefix + "attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        add(prefix + "ffn_norm.weight", HIDDEN)
        add(prefix + "ffn_gate.weight", FEED_FORWARD, HIDDEN)
        add(prefix + "ffn_up.weight", FEED_FORWARD, HIDDEN)
        add(prefix + "ffn_down.weight", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--type", choices=TYPES, default="Q4_K")
    arguments = parser.parse_args()
    write(arguments.path, arguments.type)


if __name__ == "__main__":
    main()
