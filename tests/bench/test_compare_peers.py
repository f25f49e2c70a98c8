"""Tests of tests/bench/compare_peers.py: what needs neither PyTorch nor a GPU."""

import io
import pathlib
import re
import sys
import tempfile
import types
import unittest
from unittest import mock

from bench import compare_peers
from bench import peers
from bench.compare_peers import Cell, Shape  # noqa: E402

OUTPUT = """NVIDIA H200, driver 580.159.04, CUDA 13.0, read ceiling 4,560 GB/s

| heads                    | cell      |      MB |    us | ceiling |  goal | best paged peer |
| :----------------------- | --------: | ------: | ----: | ------: | ----: | --------------: |
| 32/8 x 128               |    1x1024 |     4.2 |  6.02 |  14.9 % |  6.30 |      7.70 cuDNN |
| 32/32 x 128              |  32x32768 | 17179.9 | 3,738 |  98.5 % | 3,830 | 3,837 FlashInfer |
| 32/8 x 128, blocks of 32 |    1x1024 |     4.2 |  6.00 |  14.9 % |     - |               - |
| 32/8 x 128               | 32xragged |   919.8 |     - |       - |   223 | 238 FlashAttention-3 |

| heads      | cell   | blocks in order | blocks shuffled | difference |
| ---------- | ------ | --------------: | --------------: | ---------: |
| 32/8 x 128 | 1x8192 |            12.0 |            12.1 |     +0.8 % |
"""


PROMPTS = """
| heads      | prompts   |    us | plan us | TFLOP/s |
| :--------- | :-------- | ----: | ------: | ------: |
| 32/8 x 128 | 1x8192    | 1,000 |     3.1 |     550 |
| 32/8 x 128 | 4096 … 64 |   340 |     3.1 |     520 |
"""
CHUNKS = """
| heads      | chunks            |    us | cold us |
| :--------- | :---------------- | ----: | ------: |
| 32/8 x 128 | 1x16 after 4000   |  13.6 |    15.5 |
| 32/8 x 128 | 32x100 after 8000 | 1,066 |     963 |
"""


class Parsing(unittest.TestCase):
    def test_cells(self):
        self.assertEqual(compare_peers.parse_cell("8x1024"), Cell(8, 1024))
        self.assertEqual(compare_peers.parse_cell("32xragged"), Cell(32, 0))
        self.assertEqual(str(Cell(32, 0)), "32xragged")
        for text in ("", "8", "8x", "x8", "8x0", "0x8", "8x-1", "8xsome", "8x1x1"):
            with self.assertRaises(compare_peers.InputError, msg=text):
                compare_peers.parse_cell(text)

    def test_shapes(self):
        self.assertEqual(compare_peers.parse_shape("32/8x128"), Shape(32, 8, 128))
        self.assertEqual(str(Shape(9, 3, 64)), "9/3x64")
        for text in ("", "32x128", "32/8", "32/0x128", "32/5x128", "32/8/2x128", "a/bxc"):
            with self.assertRaises(compare_peers.InputError, msg=text):
                compare_peers.parse_shape(text)

    def test_own_figures(self):
        own = compare_peers.read_own(OUTPUT)
        self.assertEqual(own, {("32/8x128", "1x1024"): 6.02, ("32/32x128", "32x32768"): 3738.0})

    def test_own_prompts(self):
        own = compare_peers.read_own_prompts(PROMPTS)
        self.assertEqual(own, {("32/8x128", "1x8192"): 1000.0, ("32/8x128", "4096 … 64"): 340.0})

    def test_other_output(self):
        for read in (compare_peers.read_own, compare_peers.read_own_prompts):
            with self.assertRaises(compare_peers.InputError):
                read("| heads | cell |\n| - | - |\n| 1 | 2 |\n")


class PromptTable(unittest.TestCase):
    def test_operations(self):
        shape = Shape(2, 1, 4)
        # 3 new tokens after 10: about 3 x 10 + 9 / 2 pairs; a pair takes 4 operations for each dimension and head
        self.assertAlmostEqual(compare_peers.Prompts("", (3,), 10).tera_operations(shape) * 1e12, 4 * 8 * 34.5)

    def test_row(self):
        prompts = compare_peers.Prompts("1x1000", (1000,))  # 4 * 32 * 100 * 500,000 operations: 6.4e9
        all_peers = [types.SimpleNamespace(name="a", paged=True), types.SimpleNamespace(name="b", paged=False)]
        row = compare_peers.prompt_row(Shape(32, 8, 100), prompts, 32.0, {"a": 64.0, "b": None}, all_peers)
        self.assertEqual(row, ["32/8x100", "1x1000", "200", "100", "-", "2.00"])
        row = compare_peers.prompt_row(Shape(32, 8, 100), prompts, None, {"a": None, "b": 16.0}, all_peers)
        self.assertEqual(row, ["32/8x100", "1x1000", "-", "-", "400", "-"])

    def test_rows_are_those_of_the_benchmark(self):
        source = (pathlib.Path(compare_peers.__file__).parent / "ragged_bench.cpp").read_text(encoding="utf-8")
        names = re.findall(r'{"([^"]*[0-9][^"]*)", ', source)
        self.assertEqual([prompts.name for _, prompts in compare_peers.PROMPT_ROWS], names)
        chunks = {tuple(map(int, row)) for row in re.findall(r"{(\d+), (\d+), (\d+)[,}]", source)}
        self.assertLessEqual({row for _, row in compare_peers.CHUNK_ROWS}, chunks)


class ColdBatches(unittest.TestCase):
    def test_ragged_lengths(self):
        lengths = peers.lengths_of(Cell(32, 0))
        self.assertEqual((len(lengths), min(lengths), max(lengths)), (32, 250, 32765))
        self.assertNotEqual(lengths, sorted(lengths))
        self.assertEqual(lengths, peers.lengths_of(Cell(32, 0)))
        self.assertEqual(peers.lengths_of(Cell(1, 0)), [250])

    def test_every_block_belongs_to_one_sequence(self):
        lengths = [1, 16, 17, 250]
        tables = peers.block_tables_of(lengths)
        self.assertEqual([len(table) for table in tables], [1, 1, 2, 16])
        self.assertEqual(sorted(sum(tables, [])), list(range(20)))
        self.assertNotEqual(sum(tables, []), list(range(20)))

    def test_sets_exceed_the_cache(self):
        shape = Shape(32, 8, 128)
        self.assertEqual(peers.kv_bytes_of(shape, Cell(1, 1024)), 4 << 20)
        for cell in (Cell(1, 1024), Cell(8, 8192), Cell(128, 8192), Cell(32, 0)):
            sets = peers.num_sets_of(shape, cell)
            self.assertGreaterEqual(sets, 2)
            self.assertGreaterEqual(sets * peers.kv_bytes_of(shape, cell), 600_000_000)


class Peers(unittest.TestCase):
    def test_what_is_missing_is_one_line(self):
        lines = []
        with mock.patch.dict(sys.modules, {"flashinfer": None, "flash_attn_interface": None, "vllm": None}):
            names = ["flashinfer", "fa3", "flashinfer-fa3", "vllm-fa3"]
            self.assertEqual(compare_peers.find_peers(names, lines.append), [])
        self.assertEqual(len(lines), 3)
        self.assertTrue(all(line.startswith("skipped: ") and "\n" not in line for line in lines), lines)

    def test_unknown_peer(self):
        with self.assertRaises(compare_peers.InputError):
            compare_peers.find_peers(["flashinfer", "missing"], [].append)

    def test_row(self):
        paged = types.SimpleNamespace(name="a", paged=True)
        other = types.SimpleNamespace(name="b", paged=True)
        contiguous = types.SimpleNamespace(name="c", paged=False)
        row = compare_peers.result_row(Shape(32, 8, 128), Cell(1, 1024), 5.0, {"a": 7.5, "b": 10.0, "c": 2.0},
                                       [paged, other, contiguous])
        self.assertEqual(row, ["32/8x128", "1x1024", "4.2", "5", "7.5", "10", "2", "1.50"])
        row = compare_peers.result_row(Shape(32, 8, 128), Cell(1, 1024), None, {"a": None}, [paged])
        self.assertEqual(row, ["32/8x128", "1x1024", "4.2", "-", "-", "-"])


class CommandLine(unittest.TestCase):
    def run_main(self, *arguments, torch=None):
        with mock.patch.dict(sys.modules, {"torch": torch}), mock.patch("sys.stdout", io.StringIO()) as out, \
                mock.patch("sys.stderr", io.StringIO()) as err:
            status = compare_peers.main(list(arguments))
        return status, out.getvalue(), err.getvalue()

    def fake_torch(self, has_gpu):
        return types.SimpleNamespace(
            __version__="0", cuda=types.SimpleNamespace(is_available=lambda: has_gpu, get_device_name=lambda: "GPU",
                                                        empty_cache=lambda: None))

    def test_clear_errors(self):
        gpu = self.fake_torch(True)
        for arguments, torch, message in (
                ([], None, "need PyTorch"), ([], self.fake_torch(False), "no GPU"),
                (["--cells", "8"], None, "a cell is"), (["--shapes", "8"], None, "a shape is"),
                (["--peers", "x"], gpu, "no peer 'x'"),
                (["--peers", "fa3", "--program", "/missing"], gpu, "--program")):
            with mock.patch.dict(sys.modules, {"flash_attn_interface": None}):
                status, _, err = self.run_main(*arguments, torch=torch)
            self.assertEqual(status, 1)
            self.assertTrue(err.splitlines()[-1].startswith("compare_peers.py: "), err)
            self.assertIn(message, err)

    def test_own_figures_without_any_peer(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(sys.modules, {"flash_attn_interface": None}):
            path = pathlib.Path(folder) / "own.txt"
            path.write_text(OUTPUT, encoding="utf-8")
            status, out, err = self.run_main("decode", "--peers", "fa3", "--own", str(path), "--cells", "1x1024", "--shapes",
                                             "32/8x128", torch=self.fake_torch(True))
        self.assertEqual(status, 0, err)
        self.assertIn("| 32/8x128 | 1x1024 | 4.2 | 6.02 | - |", out)
        self.assertIn("skipped: fa3", err)
        self.assertNotIn("prompts", out)

    def test_all_tables_from_one_file(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(sys.modules, {"flashinfer": None}):
            path = pathlib.Path(folder) / "own.txt"
            path.write_text(OUTPUT + PROMPTS + CHUNKS, encoding="utf-8")
            status, out, err = self.run_main("--peers", "flashinfer-fa3", "--own", str(path), "--cells", "1x1024",
                                             "--shapes", "32/8x128", torch=self.fake_torch(True))
        self.assertEqual(status, 0, err)
        self.assertIn("| 32/8x128 | 1x1024 | 4.2 | 6.02 | - |", out)
        self.assertIn("| 32/8x128 | 1x8192 | 550 | - |", out)
        self.assertIn("| 32/8x128 | 1x16 after 4000 | 13.6 | - |", out)
        self.assertIn("| 32/8x128 | 32x100 after 8000 | 1066 | - |", out)


if __name__ == "__main__":
    unittest.main()
