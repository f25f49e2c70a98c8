#!/usr/bin/env python3
"""The bundled model with a window: python3 tests/http_clients/windowed_model.py OUT.gguf [--window 24]

Each of its layers then sees the last tokens only. It was not trained so, and writes worse; but its file is small, and so is
its window. Standard library only.
"""

import argparse
import pathlib
import struct

TALES = pathlib.Path(__file__).resolve().parent.parent.parent / "common/model/tales/tales-5m-q8_0.gguf"
KEY = b"llama.attention.sliding_window"
STRING, ARRAY, UINT32 = 8, 9, 4
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of the other types, in bytes


class Reader:
    """Goes through a file's bytes, whose numbers are little-endian."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self, kind):
        value, = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def text(self):
        length = self.number("Q")
        self.at += length
        return self.data[self.at - length:self.at]

    def skip_value(self, kind):
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            of, count = self.number("I"), self.number("Q")
            for _ in range(count):
                self.skip_value(of)
        else:
            self.at += SIZES[kind]


def write(path, window):
    data = TALES.read_bytes()
    reader = Reader(data)
    reader.at = 8  # behind the magic and the version
    num_tensors, num_values = reader.number("Q"), reader.number("Q")
    begin, alignment = reader.at, 32
    for _ in range(num_values):
        name, kind = reader.text(), reader.number("I")
        if name == b"general.alignment":
            alignment, = struct.unpack_from("<I", data, reader.at)
        reader.skip_value(kind)
    values_end = reader.at
    for _ in range(num_tensors):
        reader.text()
        num_dims = reader.number("I")
        reader.at += 8 * num_dims + 4 + 8  # its shape, type and place
    added = struct.pack("<Q", len(KEY)) + KEY + struct.pack("<II", UINT32, window)
    head = (data[:8] + struct.pack("<QQ", num_tensors, num_values + 1) + data[begin:values_end] + added +
            data[values_end:reader.at])
    # The tensors' places are counted from here.
    path.write_bytes(head + bytes(-len(head) % alignment) + data[reader.at + -reader.at % alignment:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=pathlib.Path, metavar="OUT.gguf")
    parser.add_argument("--window", type=int, default=24)
    arguments = parser.parse_args()
    write(arguments.path, arguments.window)


if __name__ == "__main__":
    main()
