#!/usr/bin/env python3
"""Tests common/app/course.py on programs that print what a stage would: python3 tests/repo/test_course.py"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Course(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        cases = [{"prompt": "a", "generated_ids": [1, 2, 3]}, {"prompt": "unused", "generated_ids": [9]}]
        (self.folder / "golden.json").write_text(json.dumps({"cases": cases}), encoding="utf-8")

    def stage(self, name, tokens=(1, 2, 3, 4), text="one", prompts=("a", "b"), exit_code=0):
        requests = [{"prompt": prompt, "tokens": list(tokens), "text": text} for prompt in prompts]
        result = {"stage": name, "requests": requests, "counters": {"slots_reserved": 40, "slots_used": 30},
                  "timing": {"milliseconds_per_token": 1.234}}
        program = self.folder / name
        program.write_text(f"#!{sys.executable}\nimport sys\nassert sys.argv[1:] == ['generate', '--json', '-']\n"
                           f"print({json.dumps(result)!r})\nsys.exit({exit_code})\n", encoding="utf-8")
        program.chmod(0o755)
        return str(program)

    def run_course(self, *programs):
        return subprocess.run([sys.executable, str(ROOT / "common/app/course.py"), str(self.folder / "golden.json"),
                               *programs], capture_output=True, check=False, encoding="utf-8")

    def test_equal_stages(self):
        result = self.run_course(self.stage("stage1"), self.stage("stage2"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.splitlines(), [
            "| stage  | text identical | slots reserved | slots used | utilisation | ms per token |",
            "| ------ | -------------- | -------------: | ---------: | ----------: | -----------: |",
            "| stage1 | yes            |           40.0 |       30.0 |      75.0 % |         1.23 |",
            "| stage2 | yes            |           40.0 |       30.0 |      75.0 % |         1.23 |"])
        self.assertEqual(result.stderr, "running stage1 ...\nrunning stage2 ...\n")

    def test_what_differs_is_named_and_fails(self):
        for difference, message in (({"tokens": (1, 2, 4)}, "other tokens than the golden file for 'a'"),
                                    ({"tokens": ()}, "other tokens than the golden file for 'a'"),
                                    ({"text": "two"}, "other text than stage1 for 'a'"),
                                    ({"prompts": ("b", "c")}, "none of its prompts is in the golden file"),
                                    ({"prompts": ("a",)}, "1 requests, stage1 has 2")):
            with self.subTest(difference=difference):
                result = self.run_course(self.stage("stage1"), self.stage("stage2", **difference))
                self.assertEqual(result.returncode, 1)
                self.assertIn(f"stage2: {message}\n", result.stderr)
                self.assertRegex(result.stdout, r"\| stage2 \| no ")

    def test_a_stage_that_fails(self):
        result = self.run_course(self.stage("stage1"), self.stage("stage2", exit_code=3))
        self.assertEqual(result.returncode, 1)
        self.assertIn("stage2 ended with exit code 3", result.stderr)


if __name__ == "__main__":
    unittest.main()
