"""picture_check.py sees every way in which a picture can be wrong."""

import json
import pathlib
import re
import tempfile
import unittest

import figures
from repo import picture_check

GOOD = ('<svg xmlns="http://www.w3.org/2000/svg"><title>t</title><desc>d</desc>'
        '<style>@media (prefers-color-scheme:dark){}</style><text font-size="16">word</text></svg>\n')


class PictureCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.stage = self.root / "stage9_test"
        self.stage.mkdir()
        self.picture = self.stage / "pool.svg"
        self.picture.write_text(GOOD, encoding="utf-8")
        self.readme = self.stage / "README.md"
        self.readme.write_text("![A pool](pool.svg)\n", encoding="utf-8")
        self.draws(GOOD)

    def draws(self, text):
        """A program with one picture."""
        self.program = self.root / "stage9"
        self.program.write_text(f"#!/bin/sh\nif [ $# = 1 ]; then echo 'pool  a pool'; else cat <<'END'\n{text}END\nfi\n",
                                encoding="utf-8")
        self.program.chmod(0o755)

    def failures(self, update=False):
        return picture_check.check_stage(str(self.program), self.stage, 9, update,
                                         picture_check.shown_pictures(self.root.resolve()))

    def test_equal_bytes_pass(self):
        self.assertEqual(self.failures(), [])

    def test_another_drawing_is_a_failure_and_update_writes_it(self):
        self.draws(GOOD.replace("word", "other"))
        self.assertIn("is not what the program draws", self.failures()[0])
        self.assertEqual(self.failures(update=True), [])
        self.assertIn("other", self.picture.read_text(encoding="utf-8"))

    def test_a_missing_and_a_superfluous_file(self):
        self.picture.rename(self.stage / "old.svg")
        found = self.failures()
        self.assertTrue(any("pool.svg is not there" in failure for failure in found), found)
        self.assertTrue(any("old.svg is drawn by no command" in failure for failure in found), found)

    def test_a_picture_that_no_readme_shows(self):
        self.readme.write_text("![](pool.svg) has no text for those who do not see it\n", encoding="utf-8")
        self.assertIn("shown by no README", self.failures()[0])

    def test_what_every_picture_needs(self):
        for part, problem in (("<title>t</title>", "<title>"), ("<desc>d</desc>", "<desc>"),
                              ("(prefers-color-scheme:dark)", "dark"), ("</svg>\n", "is no SVG")):
            self.assertIn(problem, picture_check.check_drawing(GOOD.replace(part, "").encode()), part)
        self.assertIn("smaller", picture_check.check_drawing(GOOD.replace('"16"', '"9"').encode()))
        self.assertEqual(picture_check.check_drawing(GOOD.encode()), "")


class Ladder(unittest.TestCase):
    def test_the_picture_and_the_table_have_the_same_figures(self):
        root = picture_check.ROOT
        ladder = json.loads((root / figures.LADDER).read_text(encoding="utf-8"))
        table = figures.render(figures.read_templates(root)["ladder"], figures.Figures(root))
        self.assertIn(f"{ladder['machine']}, read ceiling {ladder['read_ceiling_gigabytes_per_second']:,} GB/s; "
                      f"{ladder['date']}, at {ladder['commit']}, {ladder['form']}:", " ".join(table))
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line[:1] == "|"]
        self.assertEqual(rows[0][1:], ladder["cells"])
        for row, step in zip(rows[2:], ladder["steps"], strict=True):
            self.assertEqual(row[0], step["step"])
            if "microseconds" not in step:
                self.assertEqual(row[1:], ["–"] * len(ladder["cells"]))
                continue
            for cell, microseconds, percent in zip(row[1:], step["microseconds"], step["percent"], strict=True):
                time, share = re.fullmatch(r"([\d.,]+) \((\d+) %\)", cell).groups()
                self.assertEqual((float(time.replace(",", "")), int(share)), (microseconds, percent))


if __name__ == "__main__":
    unittest.main()
