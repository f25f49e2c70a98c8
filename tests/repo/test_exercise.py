"""Tests of exercise.py: what is blanked, that nothing of a reader's is lost, and that the exercises fit the stages.

That each milestone is red before its solution and green after takes a compiler: exercise.py --check proves it.
"""

import contextlib
import io
import pathlib
import re
import sys
import tempfile
import unittest
from unittest import mock

import exercise
from support.temporary_tree import TemporaryTree, output_of

EARLIER = """#include "sum.h"

namespace stage1 {

int sum(const std::vector<int>& values) { return 0; }

}  // namespace
"""
SUM = """#include "sum.h"

#include <string>

namespace stage2 {

// sum(x) { is not a definition, nor is "sum(x) {".
int total(int a) { return sum({a}) + helper::sum(a); }

int sum(const std::vector<int>& values) {
  int result = 0;
  for (const int value : values) {
    if (value == '{') {
      result += 1'000;  // }
    }
    result += value;
  }
  return result;
}

int sum(int a, int b) const noexcept { return a + b; }

struct Sum {
  void add(int value) {
    total += value;
  }
  int total = 0;
};

}  // namespace
"""
TOML = '''stage = "stage2_second"
about = "sums"
optional = "nothing."
run = "stage2 sum"
shows = ["sum 3"]

[[milestone]]
title = "Adding up"
minutes = 10
task = "Add all values."
tests = ["sum: *"]
idea = "Start with 0."
code = """
result = 0
for each: result += it"""
pitfall = "An empty list."

[[milestone.blank]]
file = "sum.cpp"
function = "sum(const std::vector<int>&"
todo = "add the values, and return \\"their\\" sum."

[[milestone]]
title = "Braces"
minutes = 5
task = "A brace counts 1,000."
tests = ["braces"]
idea = "Look."
code = "result += 1000"
pitfall = "None."

[[milestone.blank]]
file = "sum.cpp"
function = "sum(const std::vector<int>&"
inside = "if (value == '{') {"
todo = "a brace counts 1,000."
[[milestone.blank]]
file = "sum.cpp"
function = "add"
todo = "add the value."
'''


class Course(TemporaryTree):
    def setUp(self):
        super().setUp()
        for stage, text in (("stage1_first", EARLIER), ("stage2_second", SUM)):
            self.write(f"{stage}/CMakeLists.txt", f"add_stage({stage})\n")
            self.write(f"{stage}/README.md", "# A stage\n")
            self.write(f"{stage}/sum.cpp", text)
            self.write(f"{stage}/main.cpp", "int main() {}\n")
        self.write("stage2_second/demo/show.h", "void show();\n")
        self.write("stage2_second/picture.svg", "<svg/>\n")
        self.write("tests/exercises/stage2.toml", TOML)
        self.write("tests/exercises/todo.h", (exercise.ROOT / exercise.EXERCISES / "todo.h").read_text(encoding="utf-8"))

    def read(self, name):
        return (self.root / name).read_text(encoding="utf-8")

    def edit(self, before, after):
        self.assertIn(before, TOML)
        self.write("tests/exercises/stage2.toml", TOML.replace(before, after))

    def exercise(self):
        return exercise.read_exercises(self.root)["2"]

    def run_main(self, *arguments):
        return output_of(exercise.main, list(arguments), self.root)

    def succeed(self, *arguments):
        status, out, error = self.run_main(*arguments)
        self.assertEqual((status, error), (0, ""))
        return out

    def assert_error(self, text, *arguments, expected=1):
        status, _, error = self.run_main(*arguments)
        self.assertEqual(status, expected)
        self.assertEqual(error.count("\n"), 1, error)
        self.assertIn(text, error)


class Bodies(unittest.TestCase):
    def body(self, function, inside=""):
        begin, end = exercise.find_body(SUM, exercise.Blank("sum.cpp", function, inside, "x"))
        return SUM[begin:end]

    def test_a_definition_is_found_among_calls_comments_and_strings(self):
        self.assertEqual(self.body("total"), "{ return sum({a}) + helper::sum(a); }")
        self.assertEqual(self.body("sum(int a"), "{ return a + b; }")
        self.assertEqual(self.body("add"), "{\n    total += value;\n  }")
        self.assertTrue(self.body("sum(const std::vector<int>& values").endswith("  return result;\n}"))

    def test_a_block_inside_a_function(self):
        self.assertEqual(self.body("sum(const", "if (value == '{') {"), "{\n      result += 1'000;  // }\n    }")
        self.assertTrue(self.body("sum(const", "for (const int value : values)").startswith("{\n    if"))

    def test_what_is_not_there_or_not_alone_is_an_error(self):
        for function, inside in (("sum", ""), ("product", ""), ("helper::sum", ""), ("sum(const", "while"),
                                 ("sum(const", "result += "), ("sum(const", "return result;")):
            with self.subTest(function=function, inside=inside), self.assertRaises(exercise.ExerciseError):
                self.body(function, inside)


class Folder(Course):
    def test_bodies_become_todos_and_all_else_stays(self):
        text = exercise.folder_texts(self.root, self.exercise())["sum.cpp"]
        self.assertIn('#include "sum.h"\n#include "todo.h"\n', text)
        self.assertIn("""int sum(const std::vector<int>& values) {
  // Milestone 2 (braces) is a part of it: it may be left out until then.
  // What it was in the stage before: stage1_first/sum.cpp
  TODO(1, "sum: add the values, and return \\"their\\" sum.");
}

int sum(int a, int b) const noexcept { return a + b; }
""", text)
        self.assertIn('  void add(int value) {\n    TODO(2, "add: add the value.");\n  }\n', text)

    def test_solutions_can_be_switched_off_and_are_the_original(self):
        text = exercise.folder_texts(self.root, self.exercise(), switched=True)["sum.cpp"]
        self.assertEqual(text.count('exercise::is_blank("2", 1)'), 1)
        self.assertEqual(text.count('exercise::is_blank("2", 2)'), 2)
        text = re.sub(r' if \(exercise::is_blank\(.*?"\);', "", text).replace('\n#include "todo.h"', "", 1)
        self.assertEqual(text, SUM)

    def test_a_long_todo_is_cut_into_lines(self):
        self.edit("add the value.", "word " * 60)
        text = exercise.folder_texts(self.root, self.exercise())["sum.cpp"]
        self.assertLess(max(map(len, text.split("\n"))), 121)
        self.assertEqual(text.count("word "), 59)

    def test_a_todo_is_indented_as_its_function_whatever_its_signature(self):
        milestone = exercise.Milestone(1, "t", 1, "t", ["*"], {}, [exercise.Blank("sum.cpp", "sum", "", "add.")])
        text = exercise.blank_text('#include "sum.h"\n\nint sum(int a,\n        int b) {\n  return a + b;\n}\n', "sum.cpp",
                                   exercise.Exercise("2", 2, "stage2", "a", "nothing.", "run", ["shown"], [], [milestone]))
        self.assertIn('        int b) {\n  TODO(1, "sum: add.");\n}\n', text)

    def test_what_is_copied(self):
        self.assertEqual(sorted(exercise.folder_texts(self.root, self.exercise())),
                         ["demo/show.h", "main.cpp", "sum.cpp", "todo.h"])

    def test_blanks_that_overlap_the_wrong_way_are_an_error(self):
        self.edit('title = "Adding up"', 'title = "Later"')
        first, second = TOML.split("[[milestone]]")[1:]
        self.write("tests/exercises/stage2.toml", "[[milestone]]".join([TOML.split("[[milestone]]")[0], second, first]))
        self.assert_error("overlap", "2")

    def test_a_file_that_is_missing_is_an_error(self):
        self.edit('file = "sum.cpp"', 'file = "difference.cpp"')
        self.assert_error("there is no stage2_second/difference.cpp", "2")


class FilledIn(Course):
    """A body that stands in a second file too: blank in both, written in one, filled in in the other."""
    COPY = SUM.replace("result += value;", "result += 2 * value;")

    def setUp(self):
        super().setUp()
        self.write("stage2_second/twice.cpp", self.COPY)
        self.edit('todo = "add the values, and return \\"their\\" sum."', 'todo = "add."\nalso = ["twice.cpp"]')
        self.succeed("2")

    def fill_in(self):
        milestone = self.exercise().milestones[0]
        return exercise.fill_in(self.root, self.exercise(), milestone)

    def test_it_is_blank_and_not_the_readers_to_write(self):
        todo = 'TODO(1, "sum: nearly what you write in sum.cpp. It is filled in when milestone 1 is green.")'
        self.assertIn(todo, self.read("my_stage2/twice.cpp").replace('"\n          "', ""))
        self.assertNotIn("2 * value", self.read("my_stage2/twice.cpp"))
        self.assertNotIn("twice.cpp", self.succeed("2"))
        self.assertNotIn("twice.cpp", self.succeed("2", "--solution", "1"))

    def test_it_is_filled_in_once_and_nothing_else_changes(self):
        before = self.read("my_stage2/sum.cpp")
        self.assertEqual(self.fill_in(), ["twice.cpp"])
        self.assertEqual(self.read("my_stage2/twice.cpp"), self.COPY.replace('#include "sum.h"', '#include "sum.h"\n'
                                                                             '#include "todo.h"'))
        self.assertEqual(self.read("my_stage2/sum.cpp"), before)
        self.assertEqual(self.fill_in(), [])

    def test_what_the_reader_has_written_there_stays(self):
        for text in (self.COPY.replace("2 * value", "3 * value"), "// all mine\n"):
            self.write("my_stage2/twice.cpp", text)
            self.assertEqual(self.fill_in(), [])
            self.assertEqual(self.read("my_stage2/twice.cpp"), text)


class Description(Course):
    def test_mistakes_are_named(self):
        for before, after, message in (('about = "sums"\n', "", "'about' is missing"),
                                       ("minutes = 10", 'minutes = "10"', "'minutes' is missing or not a int"),
                                       ("idea =", "thought =", "milestone 1: 'idea' is missing"),
                                       ('tests = ["sum: *"]', "tests = []", "'tests' is missing"),
                                       ('todo = "add the value."', 'todo = "x"\nfunktion = "y"', "no 'funktion'"),
                                       ('title = "Braces"', 'title = "Braces"\nhint = "x"', "there is no 'hint'"),
                                       ("minutes = 10", "minutes = ", "stage2.toml: ")):
            with self.subTest(before):
                self.edit(before, after)
                self.assert_error(message)


class Commands(Course):
    def test_the_list_shows_what_is_done(self):
        out = self.succeed()
        self.assertIn("2  sums   15 min", out)
        self.assertIn("2.1  Adding up  10 min", out)
        self.assertNotIn("done", out)
        self.succeed("2")
        exercise.write_progress(self.root / "my_stage2", {"passed": [1], "hints": {}})
        out = self.succeed()
        self.assertIn("1 of 2 milestones done", out)
        self.assertRegex(out, r"done 2\.1")

    def test_a_folder_is_made_and_never_overwritten(self):
        out = self.succeed("2")
        self.assertIn("Made my_stage2/: sums, in 2 milestones, about 15 min.", out)
        self.assertIn("my_stage2/sum.cpp: sum\n", out)
        self.assertIn("python3 tests/exercise.py 2 --test", out)
        self.write("my_stage2/sum.cpp", "mine\n")
        out = self.succeed("2")
        self.assertIn("stays as it is", out)
        self.assertEqual(self.read("my_stage2/sum.cpp"), "mine\n")
        out = self.succeed("2", "--fresh")
        self.assertIn("kept in my_stage2.old1/", out)
        self.assertEqual(self.read("my_stage2.old1/sum.cpp"), "mine\n")
        self.assertIn("TODO(1, ", self.read("my_stage2/sum.cpp"))
        self.succeed("2", "--fresh")
        self.assertTrue((self.root / "my_stage2.old2").exists())

    def test_a_red_message_names_all_functions_that_are_missing(self):
        class Build:
            jobs = 1
            def select(self, *_): return [("program", "case")]
            def build(self, *_): return 0, ""
            def run_case(self, *_): return False, "a.cpp:3: FAILED:\n  TODO 2: add: add the value.\n\n"

        def message(text):
            self.write("my_stage2/sum.cpp", text)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exercise.test_milestone(self.root, self.exercise(), self.exercise().milestones[1], Build(), {"passed": [], "red": []})
            return output.getvalue()

        self.assertIn("Not written yet, 2 functions: sum, add\n", message('TODO(1, "x: y");TODO(2, "sum: z"); TODO(2, "add:"\n"x");'))
        self.assertNotIn("Not written yet", message('TODO(2, "add: add");'))

    def test_a_test_that_has_to_be_stopped_is_named_and_none_is_started_after_it(self):
        started = []

        class Build:
            jobs = 1
            def select(self, *_): return [("program", case) for case in ("fails", "loops", "later")]
            def build(self, *_): return 0, ""
            def run_case(self, _, case):
                started.append(case)
                return False, {"fails": "a.cpp:3: FAILED:\n  CHECK( a )\n\n", "loops": "did not end within 60 s"}[case]

        self.succeed("2")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exercise.test_milestone(self.root, self.exercise(), self.exercise().milestones[0], Build(), {"passed": [], "red": []})
        self.assertEqual(started, ["fails", "loops"])
        self.assertIn("  red  loops (did not end within 60 s)\n  not tried  later\n", output.getvalue())

    def test_the_task_is_shown_at_the_first_failure(self):
        class Build:
            jobs = 1
            def select(self, *_): return [("program", "case")]
            def build(self, *_): return 0, ""
            def run_case(self, *_): return False, "a.cpp:3: FAILED:\n  CHECK( a )\n\n"

        self.succeed("2")
        progress = {"passed": [], "red": []}
        shown = []
        for _ in range(2):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exercise.test_milestone(self.root, self.exercise(), self.exercise().milestones[0], Build(), progress)
            self.assertIn("What to write:", output.getvalue())
            self.assertIn("my_stage2/sum.cpp: sum\n", output.getvalue())
            shown.append("Add all values." in output.getvalue())
        self.assertEqual(shown, [True, False])

    def test_not_a_number_is_explained_unless_it_was_to_stay(self):
        class Build:
            jobs = 1
            def select(self, *_): return [("program", "case")]
            def build(self, *_): return 0, ""
            def run_case(self, *_): return False, f"a.cpp:3: FAILED:\n  {message}\n\n"

        self.succeed("2")
        for message, is_explained in (("3 of 4 differ: nan", True), ("the model computes NaN as logit 0", True),
                                      ("it must stay as it was; nan was\nwritten", False), ("the rest holds NaN", False)):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exercise.test_milestone(self.root, self.exercise(), self.exercise().milestones[0], Build(), {"passed": [], "red": []})
            self.assertEqual("before it was written" in output.getvalue(), is_explained)

    def test_a_milestone_that_was_red_is_not_introduced_as_if_it_were_new(self):
        red = set()  # the milestones whose test fails

        class FakeBuild(exercise.Build):
            def configure(self):
                pass

            def select(self, exercise_of_it, milestone):
                return [("sum_stage2", f"test {milestone.number}")]

            def build(self, targets, keep_going=False):
                return 0, ""

            def run_case(self, program, name, environment=None):
                return int(name.split()[1]) not in red, "sum.cpp:1: FAILED:\n"

        self.succeed("2")
        with mock.patch.object(exercise, "Build", FakeBuild):
            self.assertRegex(self.succeed("2", "--test", "2"), r"Milestone 2\.1: Adding up +about 10 min")  # it is new
            red.add(1)
            self.assertEqual(self.run_main("2", "--test", "1")[0], 1)
            out = self.succeed("2", "--test", "2")
            self.assertIn("Milestone 2.1: Adding up was last seen red: test it again, with --test 1.", out)
            self.assertNotIn("about 10 min", out)
            red.clear()
            self.assertNotIn("last seen red", self.succeed("2", "--test", "1"))
            self.assertNotIn("last seen red", self.succeed("2", "--test", "2"))

    def test_hints_come_one_by_one(self):
        self.succeed("2")
        self.assertNotIn("for each", self.succeed("2", "--hint", "1"))
        self.assertIn("  for each: result += it\n", self.succeed("2", "--hint", "1"))
        out = self.succeed("2", "--hint", "1")
        for text in ("Start with 0.", "for each", "An empty list.", "--solution 1"):
            self.assertIn(text, out)
        self.assertIn("Look.", self.succeed("2", "--hint", "2"))

    def test_the_solution_is_shown_against_what_is_there(self):
        self.succeed("2")
        out = self.succeed("2", "--solution", "1")
        self.assertIn("stage2_second/sum.cpp, line 10", out)
        self.assertIn('-  TODO(1, "sum: add', out)
        self.assertIn("+  return result;", out)
        self.write("my_stage2/sum.cpp", SUM)
        self.assertIn("is what you have", self.succeed("2", "--solution", "1"))
        self.write("my_stage2/sum.cpp", "")
        self.assertIn("   return result;", self.succeed("2", "--solution", "1"))

    def test_mistakes_are_one_line(self):
        self.assert_error("there is no exercise '4'; there are 2", "4", expected=2)
        self.assert_error("there is no exercise 'x'", "x", expected=2)
        self.assert_error("there is no my_stage2/ yet", "2", "--test")
        self.assert_error("there is no my_stage2/ yet", "2", "--hint", "1")
        self.assert_error("one stage at a time", "--test", expected=2)
        self.assert_error("--nonsense", "2", "--nonsense", expected=2)
        self.succeed("2")
        self.assert_error("has no milestone '7'; it has 1 to 2", "2", "--hint", "7", expected=2)
        self.assert_error("has no milestone '7'", "2", "--test", "7", expected=2)
        with mock.patch("exercise.shutil.which", lambda name: None):
            self.assert_error("building needs cmake", "2", "--test")

    def test_help_fits_a_terminal(self):
        out = io.StringIO()
        with mock.patch.dict("os.environ", COLUMNS="80"), contextlib.redirect_stdout(out), self.assertRaises(SystemExit):
            exercise.main(["--help"], self.root)
        self.assertEqual([line for line in out.getvalue().splitlines() if len(line) > 80], [])


class Limits(unittest.TestCase):
    """Of a test program: a learner's loop may have no end."""

    def run_python(self, text, seconds, gigabytes):
        return exercise.run_limited([sys.executable, "-c", text], seconds, gigabytes)

    def test_what_ends_is_as_it_was(self):
        self.assertEqual(self.run_python("print('x'); raise SystemExit(3)", 60, 2), (3, "x\n"))

    def test_what_does_not_end_is_stopped(self):
        self.assertEqual(self.run_python("while True: pass", 1, 2), (None, "did not end within 1 s"))

    @unittest.skipUnless(pathlib.Path("/proc/self/statm").exists(), "the system does not say what a process takes")
    def test_what_takes_ever_more_memory_is_stopped(self):
        loop = "import time\na = []\nwhile len(a) < 500:\n  a.append(b'x' * 2**20); time.sleep(0.01)"
        self.assertEqual(self.run_python(loop, 60, 0.1), (None, "took more than 0.1 GB"))

    def test_a_program_that_is_not_there_is_an_error(self):
        with self.assertRaisesRegex(exercise.ExerciseError, "nowhere can't be run"):
            exercise.run_limited(["/nowhere"], 1, 1)

    def test_the_message_says_which_limit(self):
        for limit in ("did not end within 60 s", "took more than 2 GB"):
            self.assertEqual(exercise.essence(limit), [f"The test {limit}, and was stopped: look for a loop that does not end."])


class Output(unittest.TestCase):
    def test_a_todo_is_the_essence(self):
        lines = exercise.essence("""-----
a test
-----
test.cpp:3: FAILED:
due to unexpected exception with message:
  TODO 2: gather: copy K and V of one head out of the blocks,
  in the order of the table.

=====
test cases: 1 | 1 failed
""")
        self.assertEqual(lines, ["TODO 2: gather: copy K and V of one head out of the blocks, in the order of the table."])

    def test_else_the_first_failure_is(self):
        lines = exercise.essence("""-----
test.cpp:3: FAILED:
  CHECK( a == b )
with expansion:
  1 == 2

test.cpp:4: FAILED:
  CHECK( c )
""")
        self.assertEqual(lines, ["  CHECK( a == b )", "with expansion:", "  1 == 2"])
        lines = exercise.essence("test.cpp:3: FAILED:\n  {Unknown expression after the reported line}\n"
                                 "due to unexpected exception with message:\n  no room\n\n")
        self.assertEqual(lines, ["due to unexpected exception with message:", "  no room"])

    def test_a_check_of_eigen_is_named(self):
        lines = exercise.essence("a: /usr/include/Dense:27: void f(): Assertion `rows() == other.rows()' failed.\n\n"
                                 "test.cpp:3: FAILED:\n  due to a fatal error condition:\n    SIGABRT\n")
        self.assertEqual(lines, ["A check of Eigen's failed, in an operation on matrices or vectors: "
                                 "rows() == other.rows()"])

        lines = exercise.essence("""a: /usr/Eigen/Core/Block.h:146: Eigen::Block<X>::Block(X&) [with X = Y]: Assertion `row >= 0' failed.
test.cpp:3: FAILED:
  {Unknown expression after the reported line}
due to a fatal error condition:
  num_queries := 5
  SIGABRT - Abort (abnormal termination) signal

=====
""")
        self.assertEqual(lines, ["A check of Eigen's failed, because a row, column, head, tail or block reaches beyond its "
                                 "matrix: row >= 0", "with messages:", "  num_queries := 5"])

    def test_a_check_of_the_standard_library_names_the_container(self):
        lines = exercise.essence("/usr/include/c++/12/bits/stl_vector.h:1123: std::vector<_Tp, _Alloc>::reference "
                                 "std::vector<_Tp, _Alloc>::operator[](size_type) [with _Tp = Eigen::Matrix<float>]: "
                                 "Assertion '__n < this->size()' failed.\n\ntest.cpp:3: FAILED:\n"
                                 "due to a fatal error condition:\n  length := 1\n  SIGABRT\n")
        self.assertEqual(lines, ["A check of the standard library's failed, because what is accessed is not in the "
                                 "std::vector: __n < this->size()", "with messages:", "  length := 1"])

    def test_a_failure_has_a_place_and_a_todo_has_none(self):
        self.assertEqual(exercise.failed_at("-----\n../tests/stages/t.cpp:12: FAILED:\n  CHECK( a == b )\n"),
                         "tests/stages/t.cpp:12")
        self.assertEqual(exercise.failed_at("/a/tests/t.cpp:7: FAILED:\ndue to unexpected exception:\n  TODO 2: f: …\n"), "")
        self.assertEqual(exercise.failed_at("did not end within 60 s"), "")

    def test_overwritten_memory_is_named(self):
        lines = exercise.essence("malloc(): invalid size (unsorted)\n-----\na test\n")
        self.assertEqual(lines, ["Memory has been overwritten: something wrote outside its array "
                                 "(malloc(): invalid size (unsorted))"])

    def test_compiler_errors_come_without_the_rest(self):
        lines = exercise.compile_errors(f"""[1/2] Building
FAILED: x.o
{exercise.ROOT}/my_stage2/a.cpp:3:5: error: 'x' was not declared
    3 |     x = 1;
      |     ^
[2/2] Linking
""")
        self.assertEqual(lines[0], "my_stage2/a.cpp:3:5: error: 'x' was not declared")
        self.assertNotIn("Linking", "".join(lines))

    def test_names_of_test_cases(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "test.cpp"
            path.write_text('TEST_CASE("one, \\"quoted\\"") {}\nTEST_CASE(\n    "two "\n    "parts", "[tag]") {}\n',
                            encoding="utf-8")
            self.assertEqual(exercise.test_cases(path), ['one, "quoted"', "two parts"])


class Reward(Course):
    """What the finished stage prints, and the stage before."""

    def setUp(self):
        super().setUp()
        for stage, total in ((1, 6), (2, 11)):
            self.write(f"build/stage{stage}", f"#!/bin/sh\necho '|  total |  {total} | '$1' | 3.5 ms |'\n")
            (self.root / f"build/stage{stage}").chmod(0o755)

    def problems(self, lines):
        self.edit('shows = ["sum 3"]\n', lines)
        return exercise.Checker(self.root, [self.exercise()], 1).check_shows()

    def test_lines_are_compared_with_what_both_stages_print(self):
        good = 'shows = ["| total | 11 | sum | …"]\nbefore = ["| total | 6 | sum | 3.5 ms |"]\n'
        self.assertEqual(self.problems(good), [])
        self.assertEqual(self.problems(good.replace("11", "6")),
                         ["2: build/stage2 sum does not print '| total | 6 | sum | …'"])
        self.assertEqual(self.problems(good.replace("6", "11")),
                         ["2: build/stage1 sum does not print '| total | 11 | sum | 3.5 ms |'"])
        self.assertEqual(len(self.problems(good.replace(" | …", ""))), 1)

    def test_both_are_said_when_all_is_done(self):
        self.edit('shows = ["sum 3"]\n', 'shows = ["sum 3"]\nbefore = ["sum 2"]\n')
        self.assertEqual(self.exercise().before, ["sum 2"])
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exercise.congratulate(self.exercise())
        self.assertIn("build-exercise --target stage2 && build-exercise/stage2 sum\nIt should print\n    sum 3\n"
                      "where stage 1 prints\n    sum 2\n", out.getvalue())


class OfOneStage(Course):
    """A second exercise of a stage, with a name of its own."""

    def setUp(self):
        super().setUp()
        self.write("stage2_second/extra/more.cpp", '#include "more.h"\n\nint twice(int a) { return 2 * a; }\n')
        self.write("tests/exercises/stage2_more.toml", """stage = "stage2_second"
about = "more"
optional = "nothing."
run = "stage2 sum"
shows = ["sum 3"]
[[milestone]]
title = "Twice"
minutes = 5
task = "Double it."
tests = ["twice"]
idea = "Two."
code = "2 * a"
pitfall = "None."
[[milestone.blank]]
file = "extra/more.cpp"
function = "twice"
todo = "double it."
""")
        self.exercises = exercise.read_exercises(self.root)

    def test_it_has_a_name_and_a_folder_of_its_own(self):
        self.assertEqual(list(self.exercises), ["2", "more"])
        self.assertIn("python3 tests/exercise.py more --test", self.succeed("more"))
        self.assertEqual((self.root / "my_stage2_more/sum.cpp").read_text(encoding="utf-8"), SUM)
        self.assertIn("TODO(1, ", (self.root / "my_stage2_more/extra/more.cpp").read_text(encoding="utf-8"))
        self.assertIn("more.1  Twice", self.succeed())
        self.assert_error("there is no exercise 'less'; there are 2, more", "less", expected=2)

    def test_the_check_takes_both_and_builds_the_stage_once(self):
        both = exercise.with_others(self.exercises, exercise.choose(self.exercises, ["stage2"]))
        self.assertEqual([found.name for found in both], ["2", "more"])
        checker = exercise.Checker(self.root, both, 1)
        self.assertEqual(list(checker.folders), [2])
        checker.write(switched=False)
        for name in ("sum.cpp", "extra/more.cpp"):
            self.assertIn("TODO(", (checker.folders[2] / name).read_text(encoding="utf-8"))
        checker.write(switched=True)
        self.assertIn('is_blank("more", 1)', (checker.folders[2] / "extra/more.cpp").read_text(encoding="utf-8"))
        alone = exercise.with_others(self.exercises, exercise.choose(self.exercises, ["more"]))
        self.assertEqual([found.name for found in alone], ["more"])

    def test_two_do_not_leave_gaps_in_one_file(self):
        self.write("tests/exercises/stage2_same.toml", TOML)
        exercises = exercise.read_exercises(self.root)
        with self.assertRaisesRegex(exercise.ExerciseError, "sum.cpp has gaps of another exercise"):
            exercise.stage_texts(self.root, list(exercises.values()))


class Selection(unittest.TestCase):
    def setUp(self):
        self.build = exercise.Build(pathlib.Path("nowhere"), {})
        self.build.programs = lambda number: {"paged_stage2": ["engine: a", "engine: b", "manager: a"],
                                              "prefix_stage2": ["engine: a"]}

    def select(self, *tests):
        milestone = exercise.Milestone(1, "t", 1, "t", list(tests), {}, [])
        return self.build.select(exercise.Exercise("2", 2, "stage2_x", "", "", "", [], [], [milestone]), milestone)

    def test_by_name_by_beginning_and_by_program(self):
        self.assertEqual(self.select("manager: a"), [("paged_stage2", "manager: a")])
        self.assertEqual(self.select("engine: *", "engine: b"),
                         [("paged_stage2", "engine: a"), ("paged_stage2", "engine: b"), ("prefix_stage2", "engine: a")])
        self.assertEqual(self.select("prefix:: engine: a"), [("prefix_stage2", "engine: a")])
        self.assertEqual(self.select("engine: *", "~engine: a"), [("paged_stage2", "engine: b")])

    def test_an_empty_selection_is_an_error(self):
        for tests in (["engine"], ["gather*"], ["other:: engine: a"], ["manager: a", "~manager: *"]):
            with self.assertRaises(exercise.ExerciseError):
                self.select(*tests)


class Repository(unittest.TestCase):
    """The real exercises."""

    def setUp(self):
        self.exercises = exercise.read_exercises(exercise.ROOT)

    def test_each_stage_has_one(self):
        stages = [found.stage for name, found in self.exercises.items() if name == str(found.number)]
        self.assertEqual(stages, exercise.diff_check.find_stages(exercise.ROOT))

    def test_each_fits_its_stage(self):
        for name, found in self.exercises.items():
            with self.subTest(name):
                self.assertEqual(exercise.check_texts(exercise.ROOT, found), [])
                self.assertGreaterEqual(len(found.milestones), 2)
                for switched in (False, True):
                    texts = exercise.folder_texts(exercise.ROOT, found, switched)
                    for milestone, blank in found.blanks():
                        self.assertIn("todo.h", texts[blank.file])
                texts = exercise.folder_texts(exercise.ROOT, found)
                for file in {blank.file for _, blank in found.blanks()}:
                    for line in texts[file].split("\n"):
                        self.assertLessEqual(len(line), 120, line)

    def test_each_test_is_written_somewhere(self):
        cases = [case for path in (exercise.ROOT / "tests").rglob("*.cpp") for case in exercise.test_cases(path)]
        for name, found in self.exercises.items():
            for milestone in found.milestones:
                for pattern in milestone.tests:
                    wanted = pattern.removeprefix("~").partition(":: ")[2] or pattern.removeprefix("~")
                    self.assertTrue(any(case == wanted or (wanted.endswith("*") and case.startswith(wanted[:-1]))
                                        for case in cases), f"{name}.{milestone.number}: {pattern}")

    def test_a_readers_folder_is_ignored_by_git(self):
        text = (exercise.ROOT / ".gitignore").read_text(encoding="utf-8").split("\n")
        self.assertIn("/my_stage*/", text)
        self.assertIn("/build*/", text)


if __name__ == "__main__":
    unittest.main()
