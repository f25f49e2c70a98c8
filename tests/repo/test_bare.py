"""Tests of what a machine may lack: without it, tests and checks are skipped and name the package; none is red."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from support import needs, run_unittest

TESTS = pathlib.Path(__file__).resolve().parent.parent


class Lacking(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def assert_skipped(self, package, *command, **environment):
        result = subprocess.run([sys.executable, *command], cwd=TESTS, env=os.environ | environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        self.assertEqual(result.returncode, run_unittest.SKIPPED, result.stdout)
        self.assertRegex(result.stdout, rf"(?m)^skipped: .* \(apt-get install {package}\)$")

    def test_git(self):
        path = str(self.folder)  # without any program
        for file in ("diff_check", "stage_diff", "sabotage", "figures", "site"):
            self.assert_skipped("git", "support/run_unittest.py", f"repo/test_{file}.py", PATH=path)
        self.assert_skipped("git", "repo/diff_check.py", PATH=path)

    @needs.git  # else that is what their tests say
    def test_packages_for_pages(self):
        for name in ("markdown_it", "pygments"):
            (self.folder / f"{name}.py").write_text("raise ImportError\n", encoding="utf-8")
        for file in ("stage_diff", "site"):
            self.assert_skipped("python3-markdown-it python3-pygments", "support/run_unittest.py", f"repo/test_{file}.py",
                                PYTHONPATH=str(self.folder))


class Running(unittest.TestCase):
    def test_a_failure_counts_for_more_than_a_test_that_was_skipped(self):
        ends = {"pass": 0, "self.skipTest('no browser')": run_unittest.SKIPPED, "self.fail()": 1}
        for first, status in ends.items():
            for second, other in ends.items():
                with tempfile.TemporaryDirectory() as folder:
                    (pathlib.Path(folder) / "test_two.py").write_text(
                        "import unittest\nclass Two(unittest.TestCase):\n"
                        f"  def test_first(self): {first}\n  def test_second(self): {second}\n", encoding="utf-8")
                    result = subprocess.run([sys.executable, "support/run_unittest.py", "test_two.py"], cwd=TESTS, check=False,
                                            env=os.environ | {"PYTHONPATH": folder}, capture_output=True)
                self.assertEqual(result.returncode, 1 if 1 in (status, other) else max(status, other), result.stderr)


if __name__ == "__main__":
    unittest.main()
