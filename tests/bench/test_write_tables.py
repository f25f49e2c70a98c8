"""Tests of tests/bench/write_tables.py: measured figures land in the right file, or nothing is written."""

import io
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from bench import write_tables

OUTPUT = """NVIDIA H200, driver 580.159.04, CUDA 13.0, read ceiling 4,560 GB/s

| step          |     1x8192 |     32x8192 |   32xragged |
| :------------ | ---------: | ----------: | ----------: |
| 1 naive       |   137 (1%) | 9,120 (12%) | 16,020 (1%) |
| 2 coalesced   | 67.3 (20%) | 1,120 (21%) |  4,188 (5%) |
| reading alone |       2.80 |         238 |         203 |

Microseconds for sequences x tokens.
"""
DECODE = """NVIDIA H200, driver 580.159.04, CUDA 13.0, read ceiling 4,666 GB/s

Decode attention, bfloat16, random blocks.
| heads                   |      cell |    us | ceiling | goal |       best paged peer |
| ----------------------- | --------: | ----: | ------: | ---: | --------------------: |
| 32/8 x 128              |    1x1024 |  6.07 |  14.8 % | 6.30 |            7.70 cuDNN |
| 32/8 x 128              | 32xragged |   219 |  89.5 % |  223 |  238 FlashAttention-3 |
| 32/32 x 128             |    1x1024 |  8.83 |  40.7 % | 9.10 |       9.30 FlashInfer |
| 32/32 x 128             | 32xragged |   831 |  94.5 % |  850 |  854 FlashAttention-3 |
| 9/3 x 64                |    1x1024 |  6.77 |  19.9 % |    - |                     - |
| 32/8 x 128, blocks of 8 |    1x1024 |  6.70 |  13.0 % |    - |                     - |

| heads      |   cell | blocks in order |
| ---------- | -----: | --------------: |
| 32/8 x 128 | 1x1024 |            6.05 |
"""
LADDER_PLACE = "<!-- ladder:begin -->\nold\n<!-- ladder:end -->\n"
DECODE_PLACE = "<!-- decode:begin -->\nold\n<!-- decode:end -->\n"
README = f"# Stage 7\n\n{LADDER_PLACE}between\n{DECODE_PLACE}after\n"


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "ladder").mkdir()
        self.put("ladder/step1_naive.cu", "// Step 1\n// measured: not yet\n//\ncode\n")
        self.put("ladder/step2_coalesced.cu", "// Step 2\n// measured: 1 us\ncode\n")
        self.put("README.md", README)

    def put(self, name, text):
        (self.folder / name).write_text(text, encoding="utf-8")

    def get(self, name):
        return (self.folder / name).read_text(encoding="utf-8")

    def contents(self):
        return {path: path.read_text(encoding="utf-8") for path in self.folder.rglob("*") if path.is_file()}


class Filling(Folder):
    def test_each_file_gets_its_own_row(self):
        write_tables.write_all(OUTPUT, self.folder, "abc1234+")
        self.assertEqual(
            self.get("ladder/step1_naive.cu"),
            "// Step 1\n// measured: 1x8192 137 us (1%), 32x8192 9,120 us (12%), 32xragged 16,020 us (1%) "
            "on NVIDIA H200 at abc1234+\n//\ncode\n")
        self.assertIn("1x8192 67.3 us (20%), 32x8192 1,120 us (21%)", self.get("ladder/step2_coalesced.cu"))
        for line in self.get("ladder/step1_naive.cu").splitlines():
            self.assertLessEqual(len(line), 120)

    def test_readme_gets_machine_commit_and_table(self):
        write_tables.write_all(OUTPUT, self.folder, "abc1234")
        table = "".join(line for line in OUTPUT.splitlines(True) if line.startswith("|"))
        self.assertEqual(
            self.get("README.md"), "# Stage 7\n\n<!-- ladder:begin -->\nNVIDIA H200, driver 580.159.04, CUDA 13.0, "
            f"read ceiling 4,560 GB/s; commit abc1234:\n\n{table}<!-- ladder:end -->\nbetween\n{DECODE_PLACE}after\n")

    def test_decode_puts_both_shapes_in_a_row(self):
        written = write_tables.write_all(DECODE, self.folder, "abc1234")
        self.assertEqual(written, [self.folder / "README.md"])
        self.assertEqual(
            self.get("README.md"), f"# Stage 7\n\n{LADDER_PLACE}between\n<!-- decode:begin -->\n"
            "NVIDIA H200, driver 580.159.04, CUDA 13.0, read ceiling 4,666 GB/s; commit abc1234:\n\n"
            "| batch x context | 32/8 heads, us | of the ceiling | best peer |"
            " 32/32 heads, us | of the ceiling | best peer |\n"
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
            "| 1 x 1,024 | 6.07 | 14.8 % | 7.70 | 8.83 | 40.7 % | 9.30 |\n"
            "| 32 x 250 … 32,765 | 219 | 89.5 % | 238 | 831 | 94.5 % | 854 |\n<!-- decode:end -->\nafter\n")

    def test_one_text_with_both(self):
        write_tables.write_all(OUTPUT, self.folder, "abc1234")
        ladder = self.get("README.md").split("between")[0]
        self.put("README.md", README)
        write_tables.write_all(OUTPUT + "\n" + DECODE.split("\n", 1)[1], self.folder, "abc1234")
        self.assertEqual(self.get("README.md").split("between")[0], ladder)
        self.assertIn("| 1 x 1,024 | 6.07 |", self.get("README.md"))

    def test_twice_is_once(self):
        write_tables.write_all(OUTPUT, self.folder, "abc1234")
        once = self.contents()
        write_tables.write_all(OUTPUT, self.folder, "abc1234")
        self.assertEqual(self.contents(), once)


class Refusing(Folder):
    def refuse(self, text, message):
        before = self.contents()
        with self.assertRaises(write_tables.InputError) as caught:
            write_tables.write_all(text, self.folder, "abc1234")
        self.assertIn(message, str(caught.exception))
        self.assertEqual(self.contents(), before)

    def test_other_texts(self):
        self.refuse("", "names the machine")
        self.refuse(OUTPUT.splitlines()[0], "no table has a column `step` or `best paged peer`")
        self.refuse(OUTPUT + "\n" + OUTPUT, "2 tables")
        self.refuse(OUTPUT.replace("32xragged", "8x100"), "no column 32xragged")
        self.refuse(OUTPUT.replace("| 16,020 (1%) |", "|"), "has 3 cells, its header 4")

    def test_missing_file(self):
        self.refuse(OUTPUT.replace("2 coalesced", "3 coalesced"), "0 files are called ladder/step3_*.cu")
        self.put("ladder/step2_other.cu", "// measured: x\n")
        self.refuse(OUTPUT, "2 files are called ladder/step2_*.cu")

    def test_missing_line(self):
        self.put("ladder/step2_coalesced.cu", "// Step 2\n")
        self.refuse(OUTPUT, "step2_coalesced.cu has 0 lines")

    def test_missing_markers(self):
        for measured, place in ((OUTPUT, LADDER_PLACE), (DECODE, DECODE_PLACE)):
            begin, _, end, _ = place.split("\n")
            for text in ("nothing", begin, end + begin, README + README, README.replace(place, "")):
                self.put("README.md", text)
                self.refuse(measured, "README.md has no place")

    def test_shapes_with_unequal_cells(self):
        lines = DECODE.splitlines()
        self.refuse("\n".join(lines[:5] + lines[6:]), "the two shapes' cells are 32xragged and 1x1024, 32xragged")
        self.refuse("\n".join(lines[:7]), "the two shapes' cells are 1x1024, 32xragged and none")


class Commit(Folder):
    def git(self, *arguments):
        subprocess.run(("git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments), cwd=self.folder, check=True,
                       capture_output=True)

    def test_plus_says_that_files_differ(self):
        self.git("init")
        self.git("add", ".")
        self.git("commit", "-m", "x")
        clean = write_tables.commit_of(self.folder)
        self.assertRegex(clean, r"^[0-9a-f]{7,}$")
        self.put("README.md", "changed")
        self.assertEqual(write_tables.commit_of(self.folder), clean + "+")

    def test_no_repository(self):
        with self.assertRaises(write_tables.InputError):
            write_tables.commit_of(self.folder)


class CommandLine(Folder):
    def run_main(self, *arguments, stdin=""):
        with mock.patch("sys.stdin", io.StringIO(stdin)), mock.patch("sys.stdout", io.StringIO()) as out, \
                mock.patch("sys.stderr", io.StringIO()) as err:
            status = write_tables.main(["--folder", str(self.folder), "--commit", "abc", *arguments])
        return status, out.getvalue(), err.getvalue()

    def test_file_and_standard_input(self):
        self.put("ladder.txt", OUTPUT)
        status, out, _ = self.run_main(str(self.folder / "ladder.txt"))
        self.assertEqual(status, 0)
        self.assertIn("step2_coalesced.cu", out)
        self.assertEqual(self.run_main(stdin=OUTPUT)[0], 0)

    def test_errors_are_one_line(self):
        for arguments in (["missing.txt"], []):
            status, out, err = self.run_main(*arguments)
            self.assertEqual((status, out, err.count("\n")), (1, "", 1))
            self.assertTrue(err.startswith("write_tables.py: "))


class Tables(unittest.TestCase):
    def test_reads_every_table(self):
        text = "x\n| a | b |\n| - | -: |\n| 1 | 2 |\n\n| c |\n| - |\n| 3 |\n| 4 |\nend"
        self.assertEqual(write_tables.read_tables(text), [[{"a": "1", "b": "2"}], [{"c": "3"}, {"c": "4"}]])


if __name__ == "__main__":
    unittest.main()
