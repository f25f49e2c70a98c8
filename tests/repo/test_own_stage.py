#!/usr/bin/env python3
"""Tests that a reader can write the next stage: -DSTAGE3_DIR=FOLDER builds that folder in place of the original, and
stage 3's tests judge it. A copy of stage 2 with another namespace, where everyone starts, is red; the answer is green.

    python3 tests/repo/test_own_stage.py [-DNAME=VALUE | -GGENERATOR]...      arguments for cmake
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CMAKE_ARGUMENTS = []
LABEL = "^stage3$"

# Little optimisation: compiling takes most of this test's time. Two processors at most: other tests may run as well.
FAST_BUILD = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCOURSE_NATIVE=OFF",
              "-DCOURSE_CUDA=OFF"]
JOBS = str(min(2, os.cpu_count() or 1))


def first_step(folder, number, copy):
    """The command that a stage's README gives its readers to start the next stage with."""
    return (f"cp -r {folder} {copy} && sed -i 's/^namespace stage{number}/namespace stage{number + 1}/; "
            f"s/^namespace stage = stage{number}/namespace stage = stage{number + 1}/' {copy}/*.h {copy}/*.cpp")


def run(*command):
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500,
                            check=False, encoding="utf-8", errors="replace")
    return result.returncode, result.stdout


class OwnStage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="own_stage_"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.build = cls.folder / "build"  # one for all tests: another STAGE3_DIR has to rebuild what depends on it

    def succeed(self, *command):
        status, output = run(*command)
        self.assertEqual(status, 0, f"{command}\n{output[-8000:]}")
        return output

    def configure(self, stage):
        output = self.succeed("cmake", "-S", str(ROOT), "-B", str(self.build), *FAST_BUILD, *CMAKE_ARGUMENTS,
                              f"-DSTAGE3_DIR={stage}")
        self.assertIn(f"Stage 3 is built from {stage}", output)

    def build_targets(self, *targets):
        return ["cmake", "--build", str(self.build), "--parallel", JOBS, "--target", *targets]

    def run_tests(self, *arguments):
        return run("ctest", "--test-dir", str(self.build), "-L", LABEL, "--output-on-failure", "--no-tests=error",
                   *arguments)

    def test_a_copy_of_the_stage_before_is_red(self):
        stage = self.folder / "unfinished"
        self.succeed("bash", "-c", first_step("stage2_blocks", 2, stage))
        self.configure(stage)
        # It is a whole program, under its new name …
        self.succeed(*self.build_targets("stage3"))
        self.assertIn("stage3", self.succeed(str(self.build / "stage3"), "--help"))
        # … and has nothing of what stage 3 is about.
        status, output = run(*self.build_targets("contract_stage3"))
        self.assertNotEqual(status, 0)
        self.assertIn("SoftmaxMode", output)  # the compiler's words for what is missing differ
        # ctest says so too: what could not be built has not passed.
        status, output = self.run_tests("-R", "contract_stage3")
        self.assertNotEqual(status, 0, output)

    def test_the_answer_is_green(self):
        stage = self.folder / "finished"
        shutil.copytree(ROOT / "stage3_online_softmax", stage)
        self.configure(stage)
        # A Catch2 program is called like its test; what is not a program of its own runs the stage's.
        listing = json.loads(self.succeed("ctest", "--test-dir", str(self.build), "-L", LABEL, "--show-only=json-v1"))
        names = {test["name"] for test in listing["tests"]}
        self.assertLessEqual({"contract_stage3", "same_text_stage3", "cli_stage3"}, names)
        self.succeed(*self.build_targets("stage3", *sorted(names - {"cli_stage3"})))
        status, output = self.run_tests()
        self.assertEqual(status, 0, output[-8000:])
        self.assertIn(f"100% tests passed, 0 tests failed out of {len(names)}", output)

    def test_an_answer_with_a_fault_is_red(self):
        stage = self.folder / "faulty"
        shutil.copytree(ROOT / "stage3_online_softmax", stage)
        source = stage / "attention.cpp"
        right = source.read_text(encoding="utf-8")
        # What came before a larger score keeps its weight.
        wrong = re.sub(r"const float rescale = std::exp\(.*?\);", "const float rescale = 1.0F;", right)
        self.assertNotEqual(wrong, right)
        source.write_text(wrong, encoding="utf-8")
        self.configure(stage)
        self.succeed(*self.build_targets("contract_stage3"))
        status, output = self.run_tests("-R", "contract_stage3")
        self.assertNotEqual(status, 0)
        self.assertIn("online softmax", output)

    def test_a_folder_without_a_program_is_refused(self):
        empty = self.folder / "empty"
        empty.mkdir()
        status, output = run("cmake", "-S", str(ROOT), "-B", str(self.folder / "refused"), *FAST_BUILD,
                             *CMAKE_ARGUMENTS, f"-DSTAGE3_DIR={empty}")
        self.assertNotEqual(status, 0)
        self.assertIn("there is no main.cpp", " ".join(output.split()))


class Readmes(unittest.TestCase):
    def test_they_give_the_command_tested_here(self):
        checked = 0
        for readme in sorted(ROOT.glob("stage[0-9]*_*/README.md")):
            text = readme.read_text(encoding="utf-8")
            if "cp -r " not in text:
                continue  # it refers to another stage's README
            folder = readme.parent.name
            number = int(re.match(r"stage(\d+)_", folder).group(1))
            with self.subTest(readme=str(readme.relative_to(ROOT))):
                self.assertIn(f"$ {first_step(folder, number, f'my_stage{number + 1}')}\n", text)
                self.assertIn(f"-DSTAGE{number + 1}_DIR=my_stage{number + 1} ", text)
                self.assertIn(f"ctest --preset stage{number + 1}\n", text)
            checked += 1
        self.assertGreater(checked, 0)


if __name__ == "__main__":
    CMAKE_ARGUMENTS = [argument for argument in sys.argv[1:] if argument.startswith(("-D", "-G"))]
    unittest.main(argv=[argument for argument in sys.argv if argument not in CMAKE_ARGUMENTS])
