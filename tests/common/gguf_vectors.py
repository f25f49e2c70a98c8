#!/usr/bin/env python3
"""What the Python package gguf makes of blocks of every type, for test_quantised.cpp: python3 tests/common/gguf_vectors.py

The blocks are those of pseudo_random_blocks() in that file. Prints a line for each type: its name, the first weights, and
the 64-bit FNV-1a hash of all weights' bytes. Needs the packages gguf and numpy.
"""

import gguf
import numpy

NUM_BLOCKS = 50
# Where the float16 scales of a block are.
SCALES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0]}


def blocks(num_blocks, block_bytes, scales):
    state = 12345
    data = bytearray()
    for _ in range(num_blocks * block_bytes):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        data.append(state >> 24)
    for block in range(num_blocks):
        for scale in scales:
            data[block * block_bytes + scale + 1] &= 0xBB  # clears a bit of the exponent
    return numpy.frombuffer(bytes(data), dtype=numpy.uint8)


def fnv1a(data):
    result = 0xCBF29CE484222325
    for byte in data:
        result = ((result ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return result


for name, scales in SCALES.items():
    kind = gguf.GGMLQuantizationType[name]
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    weights = gguf.dequantize(blocks(NUM_BLOCKS, num_bytes, scales), kind).astype(numpy.float32)
    first = ", ".join(f"{value!r}F" for value in weights[:3].tolist())
    print(f"{{TensorType::{name}, {{{first}}}, 0x{fnv1a(weights.tobytes()):016x}U}},")
