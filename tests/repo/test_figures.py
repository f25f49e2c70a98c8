"""Tests of figures.py: above all, that a figure which is not the data's turns red."""

import json
import pathlib
import subprocess
import tempfile
import unittest

import figures
from support import needs

DATA = {
    "machine": "one GPU",
    "figures": {
        "read_ceiling": {"date": "2026-11-22", "commit": "abc", "command": "bench", "value": 4577, "unit": "GB/s"},
        "decode": {
            "date": "2026-11-22", "commit": "abc", "command": "serve",
            "columns": {"rate": "tokens/s", "share": "%"},
            "rows": {"1": [1269, 66], "32": [30849, 57.0]},
        },
        "load": {"source": "a data sheet", "value": 600, "unit": "ns"},
    },
}
TEMPLATES = """<!-- table: rates -->

| texts | tokens/s | of the limit | ms a step |
| ---: | ---: | ---: | ---: |
| 1 | {gpu.decode.1.*} | {1e3 / gpu.decode.1.rate ; .2f} |
| 32 | {gpu.decode.32.*} | {32e3 / gpu.decode.32.rate ; .2f} |

<!-- table: wrong -->
{gpu.decode.64.rate}
"""
TABLE = """<!-- figures: table rates -->
| texts | tokens/s | of the limit | ms a step |
| ---: | ---: | ---: | ---: |
| 1 | 1,269 | 66 % | 0.79 |
| 32 | 30,849 | 57.0 % | 1.04 |
<!-- figures: end -->
"""


class Folder(unittest.TestCase):
    """A repository with some data; pages are written into it and checked there."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.put("tests/bench/measured/gpu.json", json.dumps(DATA))
        self.put("tests/bench/measured/tables.md", TEMPLATES)
        self.put("tests/bench/measured/sources.json", "{}")
        self.log = []

    def put(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def check(self, *texts):
        """Checks pages with these texts; returns the number of problems."""
        pages = [f"page{number}.md" for number in range(len(texts))]
        for page, text in zip(pages, texts):
            self.put(page, text)
        self.log = []
        return figures.check(self.root, pages, self.log.append)

    def red(self, problem, *texts):
        self.assertGreater(self.check(*texts), 0, texts)
        self.assertIn(problem, "\n".join(self.log))

    def green(self, *texts):
        self.assertEqual(self.check(*texts), 0, "\n".join(self.log))


class Prose(Folder):
    def test_figure_of_the_data_passes(self):
        self.green("It writes 1,269 tokens a second.\n<!-- figures: gpu.decode.1.rate -->\n")

    def test_changed_figure(self):
        self.red("1,272 tokens a second stands by hand", "1,271 words, 1,272 tokens a second\nor 1,269.\n"
                 "<!-- figures: gpu.decode.1.rate -->\n")
        self.red("gpu.decode.1.rate is 1,269 tokens/s, which the text does not say",
                 "It writes 1,296 tokens a second.\n<!-- figures: gpu.decode.1.rate -->\n")

    def test_changed_data(self):
        text = "It writes 1,269 tokens a second.\n<!-- figures: gpu.decode.1.rate -->\n"
        self.green(text)
        self.put("tests/bench/measured/gpu.json", json.dumps(DATA).replace("1269", "1281"))
        self.red("page0.md:1", text)

    def test_unbound_figure(self):
        for text in ("It takes 0.54 ms.", "It takes 12 us of 3.", "A load takes 600 ns.", "20 tokens/s", "20 tokens per second",
                     "It reads 4.6 TB a\nsecond.", "4,800 GB/s", "341 Tflop/s", "90.5 % of the ceiling", "An H200 has 151 GB.",
                     "- first\n- It takes 2 ms.", "> It takes 2 ms.", "| a | b |\n| --- | --- |\n| 1 | 2 ms |"):
            self.red("stands by hand", text + "\n")

    def test_what_is_no_measurement_needs_no_key(self):
        self.green("16 tokens of 4 KB, 2.47 GB of weights, 60 % of the slots, step 7 of 8, 3 million.\n\n"
                   "`--wait 5 ms` and [here](page.md#in-5 ms)\n\n```console\n$ sleep\n5 ms\n```\n\n"
                   "<!-- measured: begin (one machine) -->\nIt takes 5 ms.\n<!-- measured: end -->\n")

    def test_key_that_does_not_exist(self):
        self.red("there is no figure gpu.decode.64.rate", "It is 1,269.\n<!-- figures: gpu.decode.64.rate -->\n")

    def test_pages_that_differ(self):
        mark = "\n<!-- figures: gpu.decode.32.rate -->\n"
        self.green("30,849 tokens/s" + mark, "At 32, 30,849 tokens/s" + mark)
        self.red("page1.md:1", "30,849 tokens/s" + mark, "At 32, 30,343 tokens/s" + mark)

    def test_entry_counts_for_its_own_paragraph(self):
        self.red("page0.md:1: 4,577 GB/s stands by hand",
                 "It reads 4,577 GB/s.\n\nThat is, 4,577 GB/s.\n<!-- figures: gpu.read_ceiling -->\n")
        self.red("right below", "It reads.\n\n<!-- figures: gpu.read_ceiling -->\n")

    def test_rounding(self):
        for number in ("4,577 GB/s", "4,580 GB/s", "4,600 GB/s", "4.6 TB/s", "4.58 TB/s", "4.577 TB a second"):
            self.green(f"{number}\n<!-- figures: gpu.read_ceiling -->\n")
        for number in ("4,576 GB/s", "4,570 GB/s", "4,500 GB/s", "5,000 GB/s", "4.5 TB/s", "4.57 TB/s", "4,577 MB", "4,577 ms",
                       "4,577 %", "14,577", "4.577 GB/s"):
            self.red("does not say", f"{number}\n<!-- figures: gpu.read_ceiling -->\n")

    def test_numbers_that_share_a_unit(self):
        mark = "\n<!-- figures: gpu.decode.1.rate, gpu.decode.32.rate, gpu.decode.1.share, gpu.decode.32.share -->\n"
        for between in (" to ", " and ", " or\n"):
            self.green(f"1,269{between}30,849 tokens/s, 66{between}57 %" + mark)
            self.red("1,265 tokens/s stands by hand", f"1,269, 1,265{between}30,849 tokens/s, 66{between}57 %" + mark)

    def test_digit_without_a_unit_is_no_rounding(self):
        self.red("is 6.6, which the text does not say", "7 heads and 6.5\n<!-- figures: gpu.decode.1.share / 10 -->\n")
        self.green("6.6 heads\n<!-- figures: gpu.decode.1.share / 10 -->\n")

    def test_expressions(self):
        self.green("A step takes 32 / 30,849 = 1.04 ms,\n24.3 times, and 57 %.\n<!-- figures: gpu.decode.32.rate,\n"
                   "    32 / gpu.decode.32.rate s, gpu.decode.32.rate / gpu.decode.1.rate, gpu.decode.32.share -->\n")
        self.green("It is 38 % slower.\n<!-- figures: 1 - (gpu.decode.1.rate - 483) / gpu.decode.1.rate % -->\n")
        for entry in ("32 / gpu.decode.32.rate ms", "31 / gpu.decode.32.rate s", "1.04 ms", "gpu.decode.32.rate +", "max(gpu.load)",
                      "gpu.decode.32.rate s"):
            self.red("page0.md:1", f"A step takes 1.04 ms.\n<!-- figures: {entry} -->\n")


    def test_two_chips_are_not_compared(self):
        other = json.loads(json.dumps(DATA))
        for machine, is_compared in (("NVIDIA H100 80GB HBM3, driver 1", False), ("two NVIDIA H200s, driver 1", True),
                                     ("NVIDIA H100, as its data sheet has it", True)):
            self.put("tests/bench/measured/gpu.json", json.dumps(DATA | {"machine": "NVIDIA H200, driver 1"}))
            self.put("tests/bench/measured/other.json", json.dumps(other | {"machine": machine}))
            page = "It is 24.3 times as fast.\n<!-- figures: other.decode.32.rate / gpu.decode.1.rate -->\n"
            if is_compared:
                self.green(page)
            else:
                self.red("compares H100 with H200", page)


class Shown(Folder):
    OUTPUT = ("<!-- measured: begin (one machine) -->\n```console\n$ bench 7.5\n| 1,024 | 1385.0 | 88.2 % |\n```\n"
              "<!-- measured: end -->\n\n")

    def test_prose_that_quotes_the_page_s_output(self):
        prose = "It takes 1.35 us (1,385 / 1,024), and 88 % of it copying.\n"
        mark = "<!-- figures: shown 1385.0 / 1024 us, shown 1385.0, shown 88.2 % -->\n"
        self.green(self.OUTPUT + prose + mark)
        self.red("which the text does not say", self.OUTPUT + prose.replace("1.35", "1.36") + mark)
        self.red("no measured output of this page has 1385.0", self.OUTPUT.replace("1385.0", "1401.2") + prose + mark)
        self.red("no measured output of this page has 1385.0", prose + mark)

    def test_only_output_counts(self):
        self.red("has 7.5", self.OUTPUT + "7.5\n<!-- figures: shown 7.5 -->\n")
        self.red("has 6.5", self.OUTPUT + "6.5\n<!-- figures: shown 6.5 -->\n")
        self.red("is no expression", self.OUTPUT + "88.2\n<!-- figures: shown 88.2 + -->\n")


class Suggestions(Folder):
    def test_keys_with_a_figure_s_value(self):
        self.put("page.md", "It reads 4.6 TB/s and takes\n3 us.\n")
        figures.suggest("page.md", self.root, self.log.append)
        self.assertEqual([line.partition(": ")[0] for line in self.log],
                         ["page.md:1", "    gpu.read_ceiling is 4,577 GB/s", "page.md:2"])


class Tables(Folder):
    def test_generated_table_passes(self):
        self.green(TABLE)

    def test_changed_cell(self):
        self.red("page0.md:4: the table rates differs from the data, which have: | 1 | 1,269 |", TABLE.replace("1,269", "1,265"))

    def test_missing_and_added_rows(self):
        self.red("| 32 | 30,849", TABLE.replace("| 32 | 30,849 | 57.0 % | 1.04 |\n", ""))
        self.red("nothing more", TABLE.replace("<!-- figures: end", "| 64 | 1 | 1 | 1 |\n<!-- figures: end"))

    def test_table_by_hand(self):
        self.red("page0.md:1: a table of figures stands by hand",
                 "text:\n| step | us |\n| --- | ---: |\n| 1 | 168 |\n")
        self.red("stands by hand", "| texts | 1 | 32 |\n| --- | ---: | ---: |\n| tokens a second | 1,269 | 30,849 |\n")

    def test_template_that_does_not_exist_or_names_no_figure(self):
        self.red("no template other", "<!-- figures: table other -->\n<!-- figures: end -->\n")
        self.red("no figure gpu.decode.64.rate", "<!-- figures: table wrong -->\n<!-- figures: end -->\n")
        self.red("without an end", "<!-- figures: table rates -->\n")

    def test_write_renews_tables_and_nothing_else(self):
        text = "It writes 5 tokens/s.\n\n" + TABLE + "\nend\n"
        self.put("page.md", text.replace("1,269", "1").replace("| 32 | 30,849 | 57.0 % | 1.04 |\n", ""))
        figures.write(self.root, ["page.md"], self.log.append)
        self.assertEqual((self.root / "page.md").read_text(encoding="utf-8"), text)


class Data(Folder):
    def test_figure_without_an_origin(self):
        for field in ("date", "commit", "command"):
            data = json.loads(json.dumps(DATA))
            del data["figures"]["decode"][field]
            self.put("tests/bench/measured/gpu.json", json.dumps(data))
            self.red("a date, a commit and a command, or a source", "text\n")

    @needs.git
    def test_commit_that_the_history_does_not_have(self):
        subprocess.run(["git", "init", "--quiet", str(self.root)], check=True)
        self.assertEqual(figures.unknown_commits(self.root, self.log.append), 1)
        self.assertIn("there is no commit abc", self.log[-1])
        self.assertEqual(figures.check(self.root, [], self.log.append), 0)

    def test_row_with_too_few_values_and_unknown_unit(self):
        for text, problem in ((json.dumps(DATA).replace("[1269, 66]", "[1269]"), "1 values in 2 columns"),
                              (json.dumps(DATA).replace('"ns"', '"days"'), "days is no unit"),
                              (json.dumps(DATA).replace("600", '"600"'), "is no number"), ("{", "gpu.json")):
            self.put("tests/bench/measured/gpu.json", text)
            self.red(problem, "text\n")

    def test_key_that_is_there_twice(self):
        data = json.loads(json.dumps(DATA))
        data["figures"]["decode.1.rate"] = DATA["figures"]["load"]
        self.put("tests/bench/measured/gpu.json", json.dumps(data))
        self.red("gpu.decode.1.rate is there twice", "text\n")

    def test_ladder_is_read_where_it_is(self):
        self.put(figures.LADDER.as_posix(), json.dumps({
            "machine": "one GPU", "date": "2026-11-22", "commit": "abc", "command": "bench", "read_ceiling_gigabytes_per_second": 4568,
            "cells": ["1x1024", "32x8192, MHA"],
            "steps": [{"step": "1 naive", "microseconds": [168, 2690], "percent": [1, 35]}, {"step": "2 coalesced"},
                      {"step": "reading alone", "microseconds": [2.72, 938], "percent": [34, 100]}]}))
        self.green("168 us, 2,690 us (35 %), 2.72 us\n"
                   "<!-- figures: h200.ladder.step1.1x1024, h200.ladder.step1.mha, h200.ladder.step1.mha_share,\n"
                   "    h200.ladder.reading.1x1024 -->\n")
        self.red("there is no figure h200.ladder.step2.1x1024", "168 us\n<!-- figures: h200.ladder.step2.1x1024 -->\n")


class Pages(Folder):
    def test_every_page_of_a_stage_is_checked(self):
        for page in ("README.md", "stage2_blocks/README.md", "stage2_blocks/MORE.md", "stage2_blocks/production/NOTES.md"):
            self.put(page, "Kernels are fast.\n")
        self.assertEqual(figures.check(self.root, log=self.log.append), 0)
        self.assertIn("checked the figures of 4 pages", self.log[-1])
        self.put("stage2_blocks/MORE.md", "It reads 4,577 GB/s.\n")
        self.assertEqual(figures.check(self.root, log=self.log.append), 1)
        self.assertIn("stage2_blocks/MORE.md:1: 4,577 GB/s stands by hand", self.log[-2])


class Sources(Folder):
    FILE = "common/cuda/kernel.cuh"

    def test_bound_figure_passes(self):
        self.put(self.FILE, "// It reads at\n// 4,577 GB/s.\n")
        self.put("tests/bench/measured/sources.json", json.dumps({self.FILE: ["gpu.read_ceiling"]}))
        self.green("text\n")

    def test_unbound_and_changed_figures(self):
        self.put(self.FILE, "//\n// It takes 600\n// ns.\n")
        self.red("kernel.cuh:2: 600 ns stands by hand", "text\n")
        self.put("tests/bench/measured/sources.json", json.dumps({self.FILE: ["gpu.load"]}))
        self.green("text\n")
        self.put(self.FILE, "// It takes 700 ns.\n")
        self.red("gpu.load is 600 ns", "text\n")

    def test_file_that_does_not_exist(self):
        self.put("tests/bench/measured/sources.json", json.dumps({self.FILE: ["gpu.load"]}))
        self.red("there is no common/cuda/kernel.cuh", "text\n")


class Repository(unittest.TestCase):
    def test_every_template_can_be_generated(self):
        data = figures.Figures(figures.ROOT)
        for name, template in figures.read_templates(figures.ROOT).items():
            self.assertTrue(figures.render(template, data), name)


if __name__ == "__main__":
    unittest.main()
