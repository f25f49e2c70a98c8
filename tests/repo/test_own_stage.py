#!/usr/bin/env python3
"""Tests that a reader can write the next stage: -DSTAGE3_DIR=FOLDER builds that folder in place of the original, which
may be missing, and stage 3's tests judge it. A copy of stage 2 with another namespace, where every reader starts, is
red; the answer is green.

    python3 tests/repo/test_own_stage.py build/common/libcommon.a build/tests/libtest_support.a \\
        [-DNAME=VALUE | -GGENERATOR]...

The two libraries are those of a build with the same compiler; the other arguments are cmake's.
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
LIBRARIES = []
CMAKE_ARGUMENTS = []

# No optimisation: compiling takes most of this test's time. Two processors at most: other tests may run as well.
FAST_BUILD = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0", "-DCOURSE_CUDA=OFF"]
JOBS = str(min(2, os.cpu_count() or 1))

# Files of tests/support/ whose objects the ready library has; paths.cpp knows where the sources are.
READY_SUPPORT = ["catch_main.cpp", "compare.cpp", "golden.cpp", "reference_attention.cpp"]

# In place of common/CMakeLists.txt: common/ does not depend on the stage, so it is not compiled again.
READY_COMMON = """add_library(common STATIC IMPORTED GLOBAL)
set_target_properties(common PROPERTIES IMPORTED_LOCATION "{libraries[0]}")
target_include_directories(common INTERFACE ${{PROJECT_SOURCE_DIR}})
add_library(ready_test_support STATIC IMPORTED GLOBAL)
set_target_properties(ready_test_support PROPERTIES IMPORTED_LOCATION "{libraries[1]}")
# After it, as a static library has to be; the two use each other.
target_link_libraries(ready_test_support INTERFACE common Catch2::Catch2)
target_link_libraries(common INTERFACE ready_test_support Eigen3::Eigen CLI11::CLI11 nlohmann_json::nlohmann_json
                      course_libedit course_utf8proc course_xxhash Threads::Threads)
"""


def first_step(folder, number, copy):
    """The command of README.md that starts the next stage as a copy of one."""
    return (f"cp -r {folder} {copy} && sed -i 's/^namespace stage{number}/namespace stage{number + 1}/; "
            f"s/^namespace stage = stage{number}/namespace stage = stage{number + 1}/' {copy}/*.h {copy}/*.cpp {copy}/demo/*")


def run(*command, folder=ROOT):
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500,
                            check=False, encoding="utf-8", errors="replace")
    return result.returncode, result.stdout


def link_all(source, copy, but):
    copy.mkdir()
    for path in source.iterdir():
        if path.name not in but:
            (copy / path.name).symlink_to(path)


class OwnStage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="own_stage_"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        # The repository, but with one stage only; what no stage changes comes from the build that is there.
        cls.course = cls.folder / "course"
        cls.course.mkdir()
        for name in ("CMakeLists.txt", "CMakePresets.json", "stage3_online_softmax"):
            (cls.course / name).symlink_to(ROOT / name)
        link_all(ROOT / "common", cls.course / "common", but=["CMakeLists.txt"])
        (cls.course / "common" / "CMakeLists.txt").write_text(READY_COMMON.format(libraries=LIBRARIES))
        link_all(ROOT / "tests", cls.course / "tests", but=["support"])
        link_all(ROOT / "tests" / "support", cls.course / "tests" / "support", but=READY_SUPPORT)
        for name in READY_SUPPORT:
            (cls.course / "tests" / "support" / name).write_text("")
        cls.build = cls.course / "build"  # one for all tests: another STAGE3_DIR has to rebuild what depends on it

    def succeed(self, *command):
        status, output = run(*command)
        self.assertEqual(status, 0, f"{command}\n{output[-8000:]}")
        return output

    def configure(self, stage):
        return run("cmake", "-S", str(self.course), "-B", str(self.build), *FAST_BUILD, *CMAKE_ARGUMENTS,
                   f"-DSTAGE3_DIR={stage}")

    def build_targets(self, *targets):
        return ["cmake", "--build", str(self.build), "--parallel", JOBS, "--target", *targets]

    def run_tests(self, *arguments, preset="stage3"):
        return run("ctest", "--preset", preset, *arguments, folder=self.course)

    # The three steps of a reader, in one test: each step continues the build of the step before.
    def test_a_copy_of_the_stage_before_is_red_and_the_answer_green_until_it_has_a_fault(self):
        # A copy of the stage before.
        stage = self.folder / "unfinished"
        self.succeed("bash", "-c", first_step("stage2_blocks", 2, stage))
        status, output = self.configure(stage)
        self.assertEqual(status, 0, output)
        self.assertIn(f"Stage 3 is built from {stage}", output)
        # It is a whole program, under its new name …
        self.succeed(*self.build_targets("stage3"))
        self.assertIn("stage3", self.succeed(str(self.build / "stage3"), "--help"))
        # … and lacks what stage 3 is about.
        status, output = run(*self.build_targets("online_softmax_stage3"))
        self.assertNotEqual(status, 0)
        self.assertIn("OnlineSoftmax", output)  # compilers word the error differently
        # ctest says so too: what could not be built has not passed.
        status, output = self.run_tests("-R", "online_softmax_stage3")
        self.assertNotEqual(status, 0, output)

        # The answer, where the original is missing.
        (self.course / "stage3_online_softmax").unlink()
        stage = self.folder / "finished"
        shutil.copytree(ROOT / "stage3_online_softmax", stage)
        status, output = self.configure(stage)
        self.assertEqual(status, 0, output)
        self.assertIn(f"Stage 3 is built from {stage}", output)
        status, output = self.run_tests("--show-only=json-v1")
        names = {test["name"] for test in json.loads(output)["tests"]}
        self.assertLessEqual({"contract_stage3", "same_text_stage3", "cli_stage3"}, names)
        self.succeed(*self.build_targets("contract_stage3"))
        status, output = self.run_tests("-R", "contract_stage3")
        self.assertEqual(status, 0, output[-8000:])

        # What the preset builds is all of the stage's programs and nothing else.
        if (self.build / "build.ninja").exists():
            rules = (self.build / "build.ninja").read_text(encoding="utf-8")
            built = re.search(r"^build tests/tests_stage3: phony (.*)", rules, re.MULTILINE).group(1).split()
            self.assertEqual({pathlib.Path(name).name for name in built}, names - {"cli_stage3"} | {"stage3"})

        # The answer with a fault.
        source = stage / "attention.cpp"
        right = source.read_text(encoding="utf-8")
        # What came before a larger score keeps its weight.
        wrong = re.sub(r"const float rescale = std::exp\(.*?\);", "const float rescale = 1.0F;", right)
        self.assertNotEqual(wrong, right)
        source.write_text(wrong, encoding="utf-8")
        self.succeed(*self.build_targets("contract_stage3"))
        status, output = self.run_tests("-R", "contract_stage3")
        self.assertNotEqual(status, 0)
        self.assertIn("lengths on and around the block boundaries", output)

        # A stage that is not there.
        status, output = self.run_tests(preset="stage4")
        self.assertNotEqual(status, 0)
        self.assertIn("No tests were found", output)

    def test_a_folder_without_a_program_is_refused(self):
        empty = self.folder / "empty"
        empty.mkdir()
        status, output = self.configure(empty)
        self.assertNotEqual(status, 0)
        self.assertIn("there is no main.cpp", " ".join(output.split()))


class Readme(unittest.TestCase):
    def test_it_gives_the_command_tested_here(self):
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        self.assertIn(f"$ {first_step('stage2_blocks', 2, 'my_stage3')}\n", text)
        self.assertIn("-DSTAGE3_DIR=my_stage3 && cmake --build --preset stage3 -- -k 0; ctest --preset stage3\n", text)


if __name__ == "__main__":
    CMAKE_ARGUMENTS = [argument for argument in sys.argv[1:] if argument.startswith(("-D", "-G"))]
    LIBRARIES = [argument for argument in sys.argv[1:] if argument.endswith((".a", ".lib"))]
    if len(LIBRARIES) != 2:
        sys.exit(__doc__)
    arguments = [argument for argument in sys.argv if argument not in CMAKE_ARGUMENTS + LIBRARIES]
    LIBRARIES = [os.path.abspath(library) for library in LIBRARIES]
    unittest.main(argv=arguments)
