"""Tests of readme_check.py: above all, that a wrong expected line turns red."""

import pathlib
import tempfile
import unittest

import readme_check


class CheckedReadme(unittest.TestCase):
    """Writes a README into an empty folder and checks it there."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.log = []

    def check(self, text, name="README.md", update=False):
        self.path = self.root / name
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(text, encoding="utf-8")
        return readme_check.check_readme(self.path, self.root, update, self.log.append)

    def logged(self):
        return "\n".join(self.log)


class Comparing(CheckedReadme):
    def test_right_output_passes(self):
        self.assertEqual(self.check("```console\n$ printf 'a\\nb\\n'\na\nb\n```\n"), 0)
        self.assertIn("1 outputs compared", self.logged())

    def test_progress_is_no_output(self):
        self.assertEqual(self.check("```console\n$ echo 'blocks: 0 of 24 (0.0 %)' >&2; echo 'blocks: 1,000 of 2,400 (41.7 %), "
                                    "9 s left' >&2; echo a\na\n```\n"), 0)

    def test_wrong_line_fails_and_is_shown(self):
        self.assertEqual(self.check("```console\n$ printf 'a\\nb\\n'\na\nc\n```\n"), 1)
        self.assertIn("README.md:2", self.logged())
        self.assertIn("-c\n+b", self.logged())

    def test_missing_and_extra_lines_fail(self):
        self.assertEqual(self.check("```console\n$ printf 'a\\nb\\n'\na\n```\n"), 1)
        self.assertEqual(self.check("```console\n$ printf 'a\\n'\na\nb\n```\n"), 1)
        self.assertEqual(self.check("```console\n$ true\na\n```\n"), 1)

    def test_every_command_of_a_block_is_compared(self):
        self.assertEqual(self.check("```console\n$ echo a\na\n$ echo b\nwrong\n$ echo c\nwrong\n```\n"), 2)

    def test_second_block_is_compared(self):
        self.assertEqual(self.check("```console\n$ echo a\na\n```\ntext\n```console\n$ echo b\nwrong\n```\n"), 1)

    def test_standard_error_counts(self):
        self.assertEqual(self.check("```console\n$ echo oops >&2\noops\n```\n"), 0)

    def test_trailing_spaces_do_not_count_but_leading_ones_do(self):
        self.assertEqual(self.check("```console\n$ echo 'a  '\na\n```\n"), 0)
        self.assertEqual(self.check("```console\n$ echo ' a'\na\n```\n"), 1)

    def test_empty_lines_inside_count(self):
        self.assertEqual(self.check("```console\n$ printf 'a\\n\\nb\\n'\na\n\nb\n```\n"), 0)
        self.assertEqual(self.check("```console\n$ printf 'a\\nb\\n'\na\n\nb\n```\n"), 1)

    def test_continued_command(self):
        self.assertEqual(self.check("```console\n$ echo a \\\n  b\na b\n```\n"), 0)
        self.assertEqual(self.check("```console\n$ echo a \\\n  b\na c\n```\n"), 1)

    def test_environment_and_folder(self):
        self.assertEqual(self.check("```console\n$ echo $NO_COLOR $COLUMNS; ls\n1 120\nREADME.md\n```\n"), 0)

    def test_other_fences_are_not_commands(self):
        self.assertEqual(self.check("```cpp\n$ false\n```\n~~~\n```console\n$ false\n~~~\n"), 0)


class ExitStatus(CheckedReadme):
    def test_command_without_output_has_to_succeed(self):
        self.assertEqual(self.check("```console\n$ true\n```\n"), 0)
        self.assertEqual(self.check("```console\n$ false\n```\n"), 1)

    def test_right_output_does_not_excuse_a_failure(self):
        self.assertEqual(self.check("```console\n$ echo a; exit 3\na\n```\n"), 1)
        self.assertIn("exit status 3, expected 0", self.logged())

    def test_expected_failure(self):
        self.assertEqual(self.check("<!-- exit status: 3 -->\n```console\n$ exit 3\n```\n"), 0)
        self.assertEqual(self.check("<!-- exit status: 3 -->\n```console\n$ true\n```\n"), 1)


class Ellipsis(CheckedReadme):
    def test_stands_for_any_number_of_lines(self):
        for expected in ("...\n5", "1\n...", "1\n...\n5", "1\n2\n...\n3\n4\n5", "1\n...\n3\n...\n5", "..."):
            self.assertEqual(self.check(f"```console\n$ seq 5\n{expected}\n```\n"), 0, expected)

    def test_hides_nothing_else(self):
        for expected in ("...\n4", "2\n...", "1\n...\n6", "1\n...\n4\n...\n3\n...", "1\n...\n5\n5"):
            self.assertEqual(self.check(f"```console\n$ seq 5\n{expected}\n```\n"), 1, expected)


class Markers(CheckedReadme):
    def test_measured_output_is_not_compared(self):
        text = "<!-- measured: begin, one laptop -->\n```console\n$ echo 1\n2\n```\n<!-- measured: end -->\n"
        self.assertEqual(self.check(text), 0)
        self.assertIn("0 outputs compared, 1 commands only run", self.logged())

    def test_measured_command_has_to_succeed(self):
        self.assertEqual(
            self.check("<!-- measured: begin -->\n```console\n$ false\n2\n```\n<!-- measured: end -->\n"), 1)

    def test_measured_ends(self):
        text = "<!-- measured: begin -->\n<!-- measured: end -->\n```console\n$ echo 1\n2\n```\n"
        self.assertEqual(self.check(text), 1)

    def test_blocks_that_are_not_run(self):
        for marker in ("not run", "command: test"):
            self.assertEqual(self.check(f"<!-- {marker} -->\n```console\n$ touch ran; false\n```\n"), 0)
            self.assertFalse((self.root / "ran").exists())

    def test_marker_counts_for_the_next_block_only(self):
        self.assertEqual(self.check("<!-- not run -->\n```console\n$ false\n```\n```console\n$ false\n```\n"), 1)
        self.assertEqual(self.check("<!-- not run -->\nSome text.\n```console\n$ false\n```\n"), 1)

    def test_malformed_readmes_fail(self):
        for text in ("```console\n$ true\n", "<!-- measured: begin -->\n", "<!-- measured: end -->\n",
                     "```console\noutput\n$ true\n```\n"):
            self.assertEqual(self.check(text), 1, text)


class Update(CheckedReadme):
    def test_rewrites_what_differs_and_nothing_else(self):
        before = "x\n```console\n$ seq 3\nold\n$ echo b\nb\n$ echo c\nold\nold\n```\ny\n"
        after = "x\n```console\n$ seq 3\n1\n2\n3\n$ echo b\nb\n$ echo c\nc\n```\ny\n"
        self.assertEqual(self.check(before, update=True), 0)
        self.assertEqual(self.path.read_text(encoding="utf-8"), after)

    def test_rewrites_measured_output(self):
        text = "<!-- measured: begin -->\n```console\n$ echo {}\n{}\n```\n<!-- measured: end -->\n"
        self.assertEqual(self.check(text.format("new", "old"), update=True), 0)
        self.assertEqual(self.path.read_text(encoding="utf-8"), text.format("new", "new"))

    def test_pages_show_the_same_run_of_a_measured_command(self):
        text = "<!-- measured: begin -->\n```console\n$ echo again >> runs; wc -l < runs\nold\n```\n<!-- measured: end -->\n"
        runs = {}
        for name in ("README.md", "OTHER.md"):
            path = self.root / name
            path.write_text(text, encoding="utf-8")
            self.assertEqual(readme_check.check_readme(path, self.root, True, self.log.append, runs), 0)
            self.assertEqual(path.read_text(encoding="utf-8"), text.replace("old", "1"))

    def test_a_command_that_is_not_measured_runs_on_each_page(self):
        text = "```console\n$ echo again >> runs; wc -l < runs\n{}\n```\n"
        runs = {}
        for name, number in (("README.md", 1), ("OTHER.md", 2)):
            path = self.root / name
            path.write_text(text.format(number), encoding="utf-8")
            self.assertEqual(readme_check.check_readme(path, self.root, False, self.log.append, runs), 0)

    def test_keeps_an_ellipsis(self):
        self.assertEqual(self.check("```console\n$ seq 9\n1\n...\n8\n8\n```\n", update=True), 0)
        self.assertEqual(self.path.read_text(encoding="utf-8"), "```console\n$ seq 9\n1\n...\n8\n9\n```\n")

    def test_does_not_write_down_a_failure(self):
        text = "```console\n$ echo a; false\nb\n```\n"
        self.assertEqual(self.check(text, update=True), 1)
        self.assertEqual(self.path.read_text(encoding="utf-8"), text)


if __name__ == "__main__":
    unittest.main()
