#!/usr/bin/env python3
"""Tests common/app/course.py on programs that print what a stage would: python3 tests/repo/test_course.py"""

import copy
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

    def stage(self, name, tokens=(1, 2, 3, 4), text="one", prompts=("a", "b"), exit_code=0, small_cache_text=None):
        requests = [{"prompt": prompt, "tokens": list(tokens), "text": text} for prompt in prompts]
        result = {"stage": name, "requests": requests, "timing": {"milliseconds_per_token": 1.234},
                  "counters": {"slots_reserved": 40, "slots_used": 30, "kv_bytes_per_token": 12288,
                               "kv_bytes_read": 1031405568, "forward_passes": 800, "max_requests_at_once": 12}}
        small_result = copy.deepcopy(result)
        small_result["counters"]["max_requests_at_once"] = 6
        if small_cache_text is not None:
            small_result["requests"][0]["text"] = small_cache_text
        program = self.folder / name
        program.write_text(f"#!{sys.executable}\nimport sys\n"
                           f"if sys.argv[1:] == ['generate', '--json', '-']:\n"
                           f"    print({json.dumps(result)!r})\n"
                           f"elif sys.argv[1:] == ['generate', '--slots', '800', '--json', '-']:\n"
                           f"    print({json.dumps(small_result)!r})\n"
                           f"else:\n    sys.exit(4)\n"
                           f"sys.exit({exit_code})\n", encoding="utf-8")
        program.chmod(0o755)
        return str(program)

    def run_course(self, *programs):
        return subprocess.run([sys.executable, str(ROOT / "common/app/course.py"), str(self.folder / "golden.json"),
                               *programs], capture_output=True, check=False, encoding="utf-8")

    def test_equal_stages(self):
        result = self.run_course(self.stage("stage1"), self.stage("stage2"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.splitlines()[:4], [
            "| stage  | same text | slots reserved | slots used | KV a token |  KV read | KV copied | passes | at once | ms a token |",
            "| ------ | --------- | -------------: | ---------: | ---------: | -------: | --------: | -----: | ------: | ---------: |",
            "| stage1 | yes       |           40.0 |       30.0 |   12,288 B | 1,031 MB |      0 MB |    800 |       6 |       1.23 |",
            "| stage2 | yes       |           40.0 |       30.0 |   12,288 B | 1,031 MB |      0 MB |    800 |       6 |       1.23 |"])
        self.assertIn("with 800 slots", result.stdout)
        self.assertEqual(result.stderr, "running stage1 ...\nrunning stage1 --slots 800 ...\n"
                                        "running stage2 ...\nrunning stage2 --slots 800 ...\n")

    def test_what_differs_is_named_and_fails(self):
        for difference, message in (({"tokens": (1, 2, 4)}, "other tokens than the golden file for 'a'"),
                                    ({"tokens": ()}, "other tokens than the golden file for 'a'"),
                                    ({"text": "two"}, "other text than stage1 for 'a'"),
                                    ({"small_cache_text": "two"}, "other text than stage1 for 'a'"),
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
