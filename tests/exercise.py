#!/usr/bin/env python3
"""Write a stage yourself, a milestone at a time.

  python3 tests/exercise.py                  list the exercises, and how far you
                                             are
  python3 tests/exercise.py 4                make my_stage4/, which compiles but
                                             lacks the lesson
  python3 tests/exercise.py 4 --test         build it and run the milestones'
                                             tests, up to the first that fails
  python3 tests/exercise.py 4 --test 2       run the tests of milestone 2;
                                             --test all: every test of the stage
  python3 tests/exercise.py 4 --hint 2       show the next hint for milestone 2:
                                             the idea, then pseudo-code, then
                                             the pitfall
  python3 tests/exercise.py 4 --solution 2   show what milestone 2 looks like in
                                             the course
  python3 tests/exercise.py 4 --fresh        start over; what you have is kept
                                             under another name
  python3 tests/exercise.py --check [4 ...]  for the course: every milestone is
                                             red before its solution and green
                                             after

my_stage4/ is stage 4 with some bodies replaced by a TODO, which says what is
missing when it is called. The tests are built in build-exercise/, which takes a
minute or two the first time. Besides the stages' exercises there is one with a
word for a name, on a page beside a stage's lesson: all of the stage but that
page's code is there in its folder.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import difflib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

try:
    import tomllib
except ImportError:
    sys.exit("error: the exercises need Python 3.11 or later")

from repo import diff_check

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXERCISES = pathlib.Path("tests/exercises")
BUILD = "build-exercise"
PROGRESS = ".progress.json"
TEST_TIMEOUT_SECONDS = 60
CHECK_TIMEOUT_SECONDS = 120  # of --check, on a machine that may do other things too
MAX_TEST_GIGABYTES = 2
SKIPPED = 77  # the exit status of a test program that could not try everything
NOT_COPIED = ("README.md", "CMakeLists.txt")
HINTS = (("idea", "The idea"), ("code", "In pseudo-code"), ("pitfall", "The pitfall"))
SWITCH = "COURSE_EXERCISE_BLANK"  # "4:2": in the check's build, exercise 4 has its milestones from 2 on blank


class ExerciseError(Exception):
    """The tools or the exercise are wrong. The first line says how."""


class UsageError(ExerciseError):
    """The command line is wrong."""


# ---------------------------------------------------------------------------------------------------------------------
# What an exercise is: tests/exercises/stage<number>.toml, whose name is the number, or stage<number>_<name>.toml: another one
# of that stage, which leaves gaps in other files than the first.
#
#   stage, about, optional     the folder; what is written, in a few words; what may be left out ("nothing.")
#   run, shows                 a program of the build with its options, and lines that it prints once all is solved; a line
#                              may end in "…" where times follow
#   before                     optional: lines that the stage before prints instead
#   [[milestone]]              in the order in which they are written; numbered from 1
#     title, minutes, task     what to do, in the lesson's words
#     optional                 true: the milestone may be left out; said wherever it is named
#     tests                    test cases that are red without its solution, and green with it and all earlier ones
#     idea, code, pitfall      the three hints
#     [[milestone.blank]]      a body that is taken out:
#       file, function           a name, or a name with the beginning of its parameters
#       inside                   optional: only the block after this text
#       also                     optional: other files with nearly the same body. It is blank there too, so that it gives no
#                                answer away, and is filled in when the milestone is green
#       todo                     what it has to do, said when it is called


@dataclasses.dataclass
class Blank:
    """A body to be written: that of a function, or the block that follows a text inside it."""
    file: str
    function: str
    inside: str
    todo: str
    filled_in: bool = False  # not by the reader, but when the milestone is green


@dataclasses.dataclass
class Milestone:
    number: int
    title: str
    minutes: int
    task: str
    tests: list  # names of test cases: * at the end for anything, "program:: " in front, "~" to leave out
    hints: dict
    blanks: list
    optional: bool = False

    def remark(self):
        return ", optional" if self.optional else ""


@dataclasses.dataclass
class Exercise:
    name: str
    number: int  # of the stage
    stage: str
    about: str
    optional: str
    run: str
    shows: list
    before: list
    milestones: list

    def folder(self):
        return f"my_stage{self.number}" + ("" if self.name == str(self.number) else f"_{self.name}")

    def minutes(self):
        return sum(milestone.minutes for milestone in self.milestones)

    def blanks(self):
        return [(milestone, blank) for milestone in self.milestones for blank in milestone.blanks]

    def milestone(self, word):
        for milestone in self.milestones:
            if word == str(milestone.number):
                return milestone
        raise UsageError(f"exercise {self.name} has no milestone '{word}'; it has 1 to {len(self.milestones)}")


def take(table, name, kind, where, default=None):
    if name not in table and default is not None:
        return default
    value = table.pop(name, None)
    if not isinstance(value, kind) or value in ("", []):
        raise ExerciseError(f"{where}: '{name}' is missing or not a {kind.__name__}")
    return value.strip() if isinstance(value, str) else value


def read_exercise(path):
    where = path.name
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ExerciseError(f"{where}: {error}") from error
    match = re.fullmatch(r"stage(\d+)(?:_([a-z]+))?\.toml", where)
    if not match:
        raise ExerciseError(f"{where}: the name has to be stage<number>.toml or stage<number>_<name>.toml")
    number, name = match.groups()
    exercise = Exercise(name or number, int(number), take(table, "stage", str, where), take(table, "about", str, where),
                        take(table, "optional", str, where), take(table, "run", str, where),
                        take(table, "shows", list, where), take(table, "before", list, where, []), [])
    for index, entry in enumerate(take(table, "milestone", list, where), start=1):
        at = f"{where}, milestone {index}"
        milestone = Milestone(index, take(entry, "title", str, at), take(entry, "minutes", int, at),
                              " ".join(take(entry, "task", str, at).split()), take(entry, "tests", list, at),
                              {name: take(entry, name, str, at) for name, _ in HINTS}, [],
                              take(entry, "optional", bool, at, False))
        for blank in take(entry, "blank", list, at):
            milestone.blanks.append(Blank(take(blank, "file", str, at), take(blank, "function", str, at),
                                          take(blank, "inside", str, at, " ").strip(),
                                          " ".join(take(blank, "todo", str, at).split())))
            own = milestone.blanks[-1]
            for name in take(blank, "also", list, at, [""]):
                if name:
                    todo = f"nearly what you write in {own.file}. It is filled in when milestone {index} is green."
                    milestone.blanks.append(Blank(name, own.function, own.inside, todo, True))
            if blank:
                raise ExerciseError(f"{at}: a blank has no '{next(iter(blank))}'")
        if entry:
            raise ExerciseError(f"{at}: there is no '{next(iter(entry))}'")
        exercise.milestones.append(milestone)
    if table:
        raise ExerciseError(f"{where}: there is no '{next(iter(table))}'")
    return exercise


def read_exercises(root):
    paths = sorted((root / EXERCISES).glob("*.toml"), key=lambda path: (len(path.name), path.name))
    return {exercise.name: exercise for exercise in map(read_exercise, paths)}


# ---------------------------------------------------------------------------------------------------------------------
# Blanking


def code_only(text):
    """The text with comments, strings and characters overwritten by spaces: of the same length."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-zA-Z_])\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)


def closing(code, begin):
    """Where the bracket at `begin` is closed."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    stack = []
    for index in range(begin, len(code)):
        if code[index] in pairs:
            stack.append(pairs[code[index]])
        elif code[index] in pairs.values():
            if not stack or stack.pop() != code[index]:
                break
            if not stack:
                return index
    raise ExerciseError("brackets do not match")


def function_bodies(text, function):
    """(begin of the signature, begin of the body, end of the body) of each definition that starts with `function`: a name,
    or a name with the beginning of its parameters."""
    code = code_only(text)
    name, _, parameters = function.partition("(")
    pattern = re.compile(r"(?<![\w:.>~])" + r"\s*::\s*".join(map(re.escape, name.strip().split("::"))) + r"\s*\(")
    wanted = " ".join(parameters.split())
    for match in pattern.finditer(code):
        opening = match.end() - 1
        try:
            end = closing(code, opening)
        except ExerciseError:
            continue
        if not " ".join(text[opening + 1:end].split()).startswith(wanted):
            continue
        rest = re.compile(r"\s*(?:const|noexcept|override|final|\s)*").match(code, end + 1)
        if code[rest.end():rest.end() + 1] == "{":
            yield code.rfind("\n", 0, match.start()) + 1, rest.end(), closing(code, rest.end()) + 1


def find_body(text, blank):
    """(begin, end) of what is blanked: a block with its braces."""
    where = f"{blank.file}: {blank.function}"
    bodies = list(function_bodies(text, blank.function))
    if len(bodies) != 1:
        raise ExerciseError(f"{where} is defined {len(bodies)} times; expected once")
    _, begin, end = bodies[0]
    if not blank.inside:
        return begin, end
    count = text.count(blank.inside, begin, end)
    if count != 1:
        raise ExerciseError(f"{where} has '{blank.inside}' {count} times; expected once")
    at = text.index(blank.inside, begin, end) + len(blank.inside)
    opening = at - 1 if blank.inside.endswith("{") else code_only(text).find("{", at)
    if opening < 0 or opening >= end:
        raise ExerciseError(f"{where}: no block follows '{blank.inside}'")
    return opening, closing(code_only(text), opening) + 1


def indent_of(text, index):
    return re.match(r" *", text[text.rfind("\n", 0, index) + 1:]).group(0)


def literal(text, indent, width=118):
    """A string literal, in as many parts as the line width requires."""
    lines = textwrap.wrap(text, width - len(indent) - 4, break_long_words=False, break_on_hyphens=False)
    parts = [line + (" " if number < len(lines) else "") for number, line in enumerate(lines, start=1)]
    return f"\n{indent}".join('"' + part.replace("\\", "\\\\").replace('"', '\\"') + '"' for part in parts)


def todo_body(milestone, blank, indent, remarks):
    inner = indent + "  "
    head = f"{inner}TODO({milestone.number}, "
    text = f"{blank.function.partition('(')[0].split('::')[-1]}: {blank.todo}"
    comments = "".join(f"{inner}// {remark}\n" for remark in remarks)
    return "{\n" + comments + head + literal(text, " " * len(head)) + ");\n" + indent + "}"


def places(text, pairs, of):
    """[(begin, end, milestone, blank)] sorted by their beginning. A block inside another must belong to a later milestone."""
    result = []
    for milestone, blank in pairs:
        result.append((*find_body(text, blank), milestone, blank))
    result.sort(key=lambda place: (place[0], -place[1]))
    for index, (begin, end, milestone, blank) in enumerate(result):
        for other in result[:index]:
            if begin < other[1] and (end > other[1] or (begin, end) == other[:2] or other[2].number >= milestone.number):
                raise ExerciseError(f"{of}: the blanks of milestones {other[2].number} and {milestone.number} overlap")
    return result


def include_todo(text, name):
    up = "../" * (len(pathlib.PurePosixPath(name).parts) - 1)
    match = re.search(r'^#include [<"].*$', text, re.MULTILINE)
    if not match:
        raise ExerciseError(f"{name} includes nothing, so there is no place for todo.h")
    return f'{text[:match.end()]}\n#include "{up}todo.h"{text[match.end():]}'


def blank_text(text, name, exercise, previous=None):
    """The file as the reader gets it. `previous`: the same file of the stage before, if there is one."""
    pairs = [(milestone, blank) for milestone, blank in exercise.blanks() if blank.file == name]
    if not pairs:
        return text
    spots = places(text, pairs, f"{exercise.stage}/{name}")
    for index in range(len(spots) - 1, -1, -1):
        begin, end, milestone, blank = spots[index]
        if any(other[0] < begin < other[1] for other in spots[:index]):
            continue  # it is inside another blank
        remarks = [f"Milestone {inner.number} ({inner.title.lower()}) is a part of it: "
                   "it may be left out until then."
                   for inner_begin, _, inner, _ in spots[index + 1:] if inner_begin < end]
        if previous and not blank.inside:
            stage, before = previous
            if any(True for _ in function_bodies(before, blank.function)):
                remarks.append(f"What it was in the stage before: {stage}/{name}")
        text = text[:begin] + todo_body(milestone, blank, indent_of(text, end - 1), remarks) + text[end:]
    return include_todo(text, name)


def switched_text(text, name, exercise):
    """The file with all solutions in place, which an environment variable turns off again."""
    pairs = [(milestone, blank) for milestone, blank in exercise.blanks() if blank.file == name]
    if not pairs:
        return text
    for begin, _, milestone, blank in reversed(places(text, pairs, f"{exercise.stage}/{name}")):
        message = f"{blank.function.partition('(')[0].split('::')[-1]}: {blank.todo}".replace("\\", "\\\\").replace('"', '\\"')
        check = f'if (exercise::is_blank("{exercise.name}", {milestone.number})) TODO({milestone.number}, "{message}");'
        text = text[:begin + 1] + " " + check + text[begin + 1:]
    return include_todo(text, name)


SWITCHED_HEADER = """
#include <cstdlib>

namespace exercise {

inline bool is_blank(const std::string& name, int milestone) {
  const char* value = std::getenv("%s");
  const std::string text = value == nullptr ? "" : value;
  return text.compare(0, name.size() + 1, name + ":") == 0 && milestone >= std::atoi(text.c_str() + name.size() + 1);
}

}  // namespace exercise
""" % SWITCH


def stage_files(root, exercise):
    names = diff_check.list_files(root / exercise.stage)
    return [name for name in names if name not in NOT_COPIED and not name.endswith((".svg", ".md"))]


def previous_stage(root, exercise):
    names = diff_check.find_stages(root)
    if exercise.stage not in names:
        raise ExerciseError(f"there is no {exercise.stage}")
    index = names.index(exercise.stage)
    return names[index - 1] if index else None


def folder_texts(root, exercise, switched=False):
    """{name: text} of all files of the reader's folder, or of the check's."""
    previous = previous_stage(root, exercise)
    names = stage_files(root, exercise)
    for _, blank in exercise.blanks():
        if blank.file not in names:
            raise ExerciseError(f"there is no {exercise.stage}/{blank.file}")
    texts = {}
    for name in names:
        text = (root / exercise.stage / name).read_text(encoding="utf-8")
        before = root / previous / name if previous else None
        pair = (previous, before.read_text(encoding="utf-8")) if before and before.exists() else None
        texts[name] = switched_text(text, name, exercise) if switched else blank_text(text, name, exercise, pair)
    header = (root / EXERCISES / "todo.h").read_text(encoding="utf-8")
    texts["todo.h"] = header + SWITCHED_HEADER if switched else header
    return texts


def stage_texts(root, exercises, switched=False):
    """The same with the blanks of several exercises of one stage."""
    texts = folder_texts(root, exercises[0], switched)
    names = {blank.file for _, blank in exercises[0].blanks()}
    for exercise in exercises[1:]:
        own = {blank.file for _, blank in exercise.blanks()}
        if own & names:
            raise ExerciseError(f"{exercise.name}: {', '.join(sorted(own & names))} has gaps of another exercise, too")
        names |= own
        others = folder_texts(root, exercise, switched)
        texts.update({name: others[name] for name in own})
    return texts


def write_texts(folder, texts):
    """Files that are right already keep their time, so that they are not compiled again; other files are deleted."""
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in texts:
            path.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# Building and running tests


def run(command, timeout=None, environment=None, cwd=ROOT):
    """Returns the exit status, None if it did not end, and what was printed."""
    try:
        result = subprocess.run([str(word) for word in command], cwd=cwd, env=dict(os.environ, **(environment or {})),
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    except OSError as error:
        raise ExerciseError(f"{command[0]} can't be run: {error.strerror}") from error
    return result.returncode, result.stdout.decode("utf-8", errors="replace")


def resident_bytes(pid):
    """The memory that a process takes; 0 where the system does not say."""
    try:
        pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):  # not Linux, or it has just ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_limited(command, seconds, gigabytes, environment=None, cwd=ROOT):
    """As run(), but a program that takes too long, or too much memory, is killed: then there is no exit status, and the
    output is one line that says which. (A loop without an end would take all of the machine's memory before its time is
    up.)"""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen([str(word) for word in command], cwd=cwd, env=dict(os.environ, **(environment or {})),
                                       stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            raise ExerciseError(f"{command[0]} can't be run: {error.strerror}") from error
        limit = ""
        try:
            end = time.monotonic() + seconds
            while process.poll() is None and not limit:
                if time.monotonic() > end:
                    limit = f"did not end within {seconds} s"
                elif resident_bytes(process.pid) > gigabytes * 1e9:
                    limit = f"took more than {gigabytes} GB"
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.05)
        finally:
            process.kill()
            process.wait()
        if limit:
            return None, limit
        output.seek(0)
        return process.returncode, output.read().decode("utf-8", errors="replace")


def test_cases(path):
    """Names of the test cases that a source of tests/ defines."""
    text = path.read_text(encoding="utf-8")
    names = re.findall(r'\bTEST_CASE\(\s*((?:"(?:\\.|[^"\\])*"\s*)+)', text)
    return ["".join(re.findall(r'"((?:\\.|[^"\\])*)"', name)).replace('\\"', '"') for name in names]


class Build:
    """A build folder in which some stages are taken from other folders."""

    def __init__(self, folder, stages, jobs=None, timeout_seconds=TEST_TIMEOUT_SECONDS):
        self.folder = folder
        self.timeout_seconds = timeout_seconds
        self.stages = stages  # {number: folder}
        self.jobs = jobs or max(1, os.cpu_count() or 1)
        self.commands = []

    def configure(self):
        for tool in ("cmake", "ninja"):
            if not shutil.which(tool):
                raise ExerciseError(f"building needs {tool}, which is not installed")
        # The choices made for build/ apply here too.
        inherited = []
        cache = ROOT / "build" / "CMakeCache.txt"
        if cache.exists():
            for name in ("CMAKE_CXX_COMPILER", "COURSE_FETCH_DEPENDENCIES"):
                match = re.search(rf"^{name}:\w+=(.+)$", cache.read_text(encoding="utf-8"), re.MULTILINE)
                inherited += [f"-D{name}={match.group(1)}"] if match else []
        # Little optimisation, so that the tests can run soon. The libraries' own checks are on. And Catch2, where it is
        # compiled here, does not break numbers in two at the 80th column.
        command = ["cmake", "-S", ROOT, "-B", self.folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                   "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -D_GLIBCXX_ASSERTIONS -DCATCH_CONFIG_CONSOLE_WIDTH=160",
                   "-DCOURSE_CUDA=OFF", "-DCOURSE_WERROR=OFF", *inherited, "-USTAGE*_DIR"]
        command += [f"-DSTAGE{number}_DIR={folder}" for number, folder in self.stages.items()]
        status, output = run(command)
        if status != 0:
            raise ExerciseError("configuring failed:\n" + output[-4000:])
        self.commands = json.loads((self.folder / "compile_commands.json").read_text(encoding="utf-8"))

    def programs(self, number):
        """{program: names of its test cases}, of a stage."""
        found = {}
        for command in self.commands:
            program = re.search(r" -o tests/CMakeFiles/([^/]+)\.dir/", command["command"])
            if program and re.search(rf"_stage{number}$|^test_collapse_{number}_", program.group(1)):
                found.setdefault(program.group(1), []).extend(test_cases(pathlib.Path(command["file"])))
        if not found:
            raise ExerciseError(f"the build has no tests of stage {number}")
        return found

    def select(self, exercise, milestone):
        """[(program, test case)]"""
        programs = self.programs(exercise.number)
        result = []
        for pattern in milestone.tests:
            without = pattern.startswith("~")
            program, separator, rest = pattern.removeprefix("~").partition(":: ")
            name = rest if separator else program
            matched = [(candidate, case) for candidate, cases in programs.items() for case in cases
                       if (not separator or candidate.startswith(program + "_") or candidate == program) and
                       (case == name or (name.endswith("*") and case.startswith(name[:-1])))]
            if not matched and separator and program.startswith("executor_"):
                raise ExerciseError("kernels are tested with Boost.Context, which was not found\n"
                                    "Debian and Ubuntu: sudo apt-get install libboost-context-dev")
            if not matched:
                raise ExerciseError(f"exercise {exercise.name}, milestone {milestone.number}: no test case is called "
                                    f"'{pattern}'")
            if without:
                result = [pair for pair in result if pair not in matched]
            else:
                result += [pair for pair in matched if pair not in result]
        if not result:
            raise ExerciseError(f"exercise {exercise.name}, milestone {milestone.number}: no test is left")
        return result

    def build(self, targets, keep_going=False):
        command = ["cmake", "--build", self.folder, "--parallel", self.jobs, "--target", *targets]
        return run(command + (["--", "-k", "0"] if keep_going else []))

    def run_case(self, program, case, environment=None):
        """(passed, output); of a test that was killed, the output is the limit that it did not keep. Raises ExerciseError
        where there is no such test or it was skipped."""
        name = re.sub(r"([\\,\[\]~\"*])", r"\\\1", case)
        status, output = run_limited([self.folder / "tests" / program, name], self.timeout_seconds, MAX_TEST_GIGABYTES,
                                     {"CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", **(environment or {})},
                                     self.folder / "tests")
        if status is None:
            return False, output
        if "No test cases matched" in output or "No tests ran" in output:
            raise ExerciseError(f'{program} has no test case "{case}"')
        if status == SKIPPED:
            raise ExerciseError(f'{program} "{case}" was skipped')
        return status == 0, output


# What it means when a check in one of Eigen's headers fails.
NAN = ("nan: a slot or shared memory was read before it was written, or before its copy had ended (tests fill both with "
       "NaN), or it is -inf minus -inf (a piece without tokens), or a number overflowed.")
NO_EXPRESSION = "{Unknown expression after the reported line}"  # Catch2's, where a check did not get to its end
EIGEN_CHECKS = {
    "Block": "because a row, column, head, tail or block reaches beyond its matrix",
    "VectorBlock": "because a segment, head or tail reaches beyond its vector",
    "DenseCoeffsBase": "because an index is beyond its matrix or vector",
    "Product": "because two matrices of a product do not fit together",
    "CwiseBinaryOp": "because two matrices of different shapes are combined",
    "AssignEvaluator": "because a matrix is assigned to one of another shape",
    "DenseBase": "because a matrix is assigned to a part or a view of another shape",
    "PlainObjectBase": "because a matrix gets a negative number of rows or columns",
    "Redux": "because something without elements has no largest, smallest or sum",
}


LIMIT = re.compile(r"did not end within \d+ s|took more than \d+ GB")


def essence(output):
    """The part of a failed test's output to read first: the TODO that was called, or the first failure."""
    if LIMIT.fullmatch(output):
        return [f"The test {output}, and was stopped: look for a loop that does not end."]
    # A kernel's message begins with the thread that it comes from.
    todo = re.search(r"^\s*(?:block \(.*\), thread \d+: )?(TODO \d+: .*(?:\n(?!\s*$|=====|-----).*)*)", output, re.MULTILINE)
    if todo:
        return [" ".join(todo.group(1).split())]
    # Eigen's own checks are on, and end the program; so are the standard library's, which uses other quotes.
    assertion = re.search(r"^(.*)Assertion ([`'])(.*)' failed", output, re.MULTILINE)
    if assertion:
        where, quote, condition = assertion.groups()
        header = re.search(r"(\w+)\.h:\d+:", where)
        container = re.search(r"std::\w+", where)
        what = EIGEN_CHECKS.get(header.group(1) if header else "", "in an operation on matrices or vectors")
        line = f"A check of Eigen's failed, {what}: {condition}"
        if quote == "'" and container:
            what = f"because what is accessed is not in the {container.group(0)}"
            line = f"A check of the standard library's failed, {what}: {condition}"
        # Catch2 prints what the test captured before the signal's name.
        messages = re.search(r"^due to a fatal error condition:\n((?:  .*\n)*?)  SIG", output, re.MULTILINE)
        captured = messages.group(1).rstrip() if messages else ""
        return [line] + (["with messages:", *captured.split("\n")] if captured else [])
    # A check of the C library's, made when memory is allocated or freed, some time after it was overwritten.
    overwritten = re.search(r"^((?:malloc|free|realloc|munmap_chunk|malloc_consolidate)\(\): .*|corrupted .*|double free .*)$",
                            output, re.MULTILINE)
    if overwritten:
        return [f"Memory has been overwritten: something wrote outside its array ({overwritten.group(1)})"]
    failure = re.search(r"^.*FAILED:\s*\n((?:.*\n)*?)(?=\s*\n(?:\S|$)|====|----|\Z)", output, re.MULTILINE)
    lines = (failure.group(1) if failure else output[-1500:]).rstrip().split("\n")
    lines = [line.rstrip() for line in lines if line.strip() and not set(line.strip()) <= set("=.-~")
             and line.strip() != NO_EXPRESSION]
    return [line if len(line) <= 160 else line[:157] + "..." for line in lines[:12]]


def failed_at(output):
    """Where in the tests the first failure is, as file:line; empty if it is a TODO, or not known."""
    match = re.search(r"^(?:\S*/)?(tests/\S+?)[:(](\d+)\)?: FAILED:", output, re.MULTILINE)
    return f"{match.group(1)}:{match.group(2)}" if match and "TODO " not in output else ""


def compile_errors(output):
    lines = output.split("\n")
    errors = [index for index, line in enumerate(lines) if re.search(r"\b(?:fatal )?error: |undefined reference", line)]
    if not errors:
        return [line for line in lines if line.strip()][-12:]
    shown = []
    for index in errors[:4]:
        shown += [line.replace(str(ROOT) + os.sep, "") for line in lines[index:index + 3]]
    return shown


# ---------------------------------------------------------------------------------------------------------------------
# The reader's commands


class Paint:
    CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

    def __init__(self, on):
        self.on = on

    def __call__(self, text, style):
        return f"\x1b[{self.CODES[style]}m{text}\x1b[0m" if self.on and text else text


PAINT = Paint(sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def wrapped(text, indent="", width=100):
    return textwrap.fill(" ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent,
                         break_long_words=False, break_on_hyphens=False)


def read_progress(folder):
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        progress = {}
    return {"passed": list(progress.get("passed", [])), "hints": dict(progress.get("hints", {})),
            "red": list(progress.get("red", []))}  # each that has been red; not in passed, too: it was last seen red


def write_progress(folder, progress):
    (folder / PROGRESS).write_text(json.dumps(progress) + "\n", encoding="utf-8")


def duration(minutes):
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def list_exercises(root, exercises):
    print("A stage to write yourself: start with `python3 tests/exercise.py 2`, for example.\n")
    for exercise in exercises.values():
        folder = root / exercise.folder()
        progress = read_progress(folder) if folder.exists() else None
        state = "" if progress is None else f"{len(progress['passed'])} of {len(exercise.milestones)} milestones done"
        print(PAINT(f"{exercise.name}  {exercise.about}", "bold") + PAINT(f"   {duration(exercise.minutes())}", "dim") +
              (f"   {state}" if state else ""))
        for milestone in exercise.milestones:
            done = progress is not None and milestone.number in progress["passed"]
            mark = PAINT("done", "green") if done else "    "
            print(f"   {mark} {exercise.name}.{milestone.number}  {milestone.title}  "
                  + PAINT(f"{milestone.minutes} min{milestone.remark()}", "dim"))
        print()


def all_required(exercise, progress):
    return all(milestone.number in progress["passed"] for milestone in exercise.milestones if not milestone.optional)


def where_to_write(exercise, milestone):
    """file: function, function; file: function"""
    by_file = {}
    for blank in milestone.blanks:
        if blank.filled_in:
            continue
        name = blank.function.partition("(")[0].split("::")[-1]
        if name not in by_file.setdefault(blank.file, []):
            by_file[blank.file].append(name)
    return [f"{exercise.folder()}/{name}: {', '.join(functions)}" for name, functions in by_file.items()]


def still_blank(root, exercise, milestone):
    """The names of the milestone's functions whose bodies are still a TODO, in the order of its text."""
    names = []
    for file in dict.fromkeys(blank.file for blank in milestone.blanks):
        path = root / exercise.folder() / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        names += re.findall(rf'\bTODO\({milestone.number},\s*"([^":]+):', text)
    return list(dict.fromkeys(names))


def introduce(exercise, milestone):
    print(PAINT(f"Milestone {exercise.name}.{milestone.number}: {milestone.title}", "bold") +
          PAINT(f"   about {milestone.minutes} minutes{milestone.remark()}", "dim"))
    print(wrapped(milestone.task, "  "))
    for line in where_to_write(exercise, milestone):
        print(f"    {line}")


def make_folder(root, exercise, fresh):
    folder = root / exercise.folder()
    if folder.exists() and not fresh:
        print(f"{exercise.folder()}/ is there already, and stays as it is. To start over: python3 tests/exercise.py "
              f"{exercise.name} --fresh\n")
    else:
        texts = folder_texts(root, exercise)
        if folder.exists():
            number = 1
            while (kept := root / f"{exercise.folder()}.old{number}").exists():
                number += 1
            folder.rename(kept)
            print(f"What you had is kept in {kept.name}/.")
        folder.mkdir()
        write_texts(folder, texts)
        write_progress(folder, {"passed": [], "hints": {}})
        count = len(exercise.milestones)
        print(f"Made {exercise.folder()}/: {exercise.about}, in {count} milestones, about {duration(exercise.minutes())}.")
        optional = "" if exercise.optional.startswith("nothing") else f" Optional: {exercise.optional}"
        print(wrapped("It compiles as it is; what is missing throws a TODO when it is called. main.cpp and all that no "
                      f"milestone names are there already.{optional}") + "\n")
    progress = read_progress(folder)
    left = [milestone for milestone in exercise.milestones if milestone.number not in progress["passed"]]
    if left:
        introduce(exercise, left[0])
        print(f"\nThen: python3 tests/exercise.py {exercise.name} --test     "
              f"(stuck? --hint {left[0].number})")
    else:
        congratulate(exercise)


def is_printed(line, output):
    wanted = " ".join(line.split())
    printed = [" ".join(other.split()) for other in output.split("\n")]
    if wanted.endswith("…"):
        return any(other.startswith(wanted.removesuffix("…").rstrip()) for other in printed)
    return wanted in printed


def congratulate(exercise):
    print(PAINT("All milestones are done.", "green") + f" Your stage {exercise.number} runs the course's model:")
    program = exercise.run.split()[0]
    print(f"    cmake --build {BUILD} --target {program} && {BUILD}/" + exercise.run.replace("\\\n", ""))
    print("It should print")
    for line in exercise.shows:
        print(f"    {line}")
    if exercise.before:
        print(f"where stage {exercise.number - 1} prints")
        for line in exercise.before:
            print(f"    {line}")
    if "--virtual-clock" not in exercise.run:
        print("(and times several times as long as the lesson's: this build is made to compile fast and to check much)")
    print(f"All tests of the stage, some of which ask for more than the milestones: python3 tests/exercise.py "
          f"{exercise.name} --test all")


def require_folder(root, exercise):
    folder = root / exercise.folder()
    if not (folder / "main.cpp").exists():
        raise ExerciseError(f"there is no {exercise.folder()}/ yet: python3 tests/exercise.py {exercise.name} makes it")
    return folder


def test_all(exercise, build):
    print(f"building all tests of stage {exercise.number} ...", flush=True)
    built, output = build.build([f"tests_stage{exercise.number}"], keep_going=True)
    if built != 0:
        print(PAINT("It does not compile:", "red"))
        print("\n".join("  " + line for line in compile_errors(output)))
        return 1
    status = subprocess.run(["ctest", "--test-dir", str(build.folder), "-L", f"^stage{exercise.number}$",
                             "--output-on-failure", "--no-tests=error", "-j", str(build.jobs)], check=False).returncode
    return 1 if status else 0


def fill_in(root, exercise, milestone):
    """Puts the course's body in place of each TODO that the reader does not write. Returns the files."""
    changed = []
    for blank in milestone.blanks:
        path = root / exercise.folder() / blank.file
        if not blank.filled_in or not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        solution = (root / exercise.stage / blank.file).read_text(encoding="utf-8")
        try:
            begin, end = find_body(text, blank)
        except ExerciseError:  # the reader has changed it: it is theirs
            continue
        if f"TODO({milestone.number}, " in text[begin:end]:
            first, last = find_body(solution, blank)
            path.write_text(text[:begin] + solution[first:last] + text[end:], encoding="utf-8")
            if blank.file not in changed:
                changed.append(blank.file)
    return changed


def test_milestone(root, exercise, milestone, build, progress):
    """Whether it passes."""
    selected = build.select(exercise, milestone)
    print(PAINT(f"Milestone {exercise.name}.{milestone.number}: {milestone.title}", "bold")
          + (" (optional)" if milestone.optional else ""), flush=True)
    status, output = build.build(sorted({program for program, _ in selected}))
    if status != 0:
        print(PAINT("  It does not compile:", "red"))
        print("\n".join("    " + line for line in compile_errors(output)))
        return False
    first = None
    num_passed = 0
    stopped = threading.Event()  # a test had to be: others would probably not end either

    def attempt(pair):
        if stopped.is_set():
            return None
        passed, output = build.run_case(*pair)
        if LIMIT.fullmatch(output):
            stopped.set()
        return passed, output

    with concurrent.futures.ThreadPoolExecutor(build.jobs) as pool:
        for (program, case), result in zip(selected, pool.map(attempt, selected)):
            if result is None:
                print(f"  {PAINT('not tried', 'dim')}  {case}")
                continue
            passed, output = result
            num_passed += passed
            limit = f" ({output})" if LIMIT.fullmatch(output) else ""
            print(f"  {PAINT('ok ', 'green') if passed else PAINT('red', 'red')}  {case}{limit}", flush=True)
            if not passed and first is None:
                first = (program, case, output)
    if first is None:
        progress["passed"] = sorted({*progress["passed"], milestone.number})
        filled = fill_in(root, exercise, milestone)
        if filled:
            print(wrapped(f"Filled in where the same is needed again, as the course has it: {', '.join(filled)}", "  "))
        return True
    program, case, output = first
    progress["passed"] = [number for number in progress["passed"] if number != milestone.number]
    is_new = milestone.number not in progress["red"]
    progress["red"] = sorted({*progress["red"], milestone.number})
    print(f"\n  {num_passed} of {len(selected)} pass. The first that does not: {PAINT(case, 'bold')}")
    for line in essence(output):
        print(wrapped(line, "    ") if line.startswith(("TODO", "A check of Eigen's")) else "    " + line)
    missing = still_blank(root, exercise, milestone)
    if len(missing) > 1 and "TODO " in output:
        print(wrapped(f"Not written yet, {len(missing)} functions: {', '.join(missing)}", "  "))
    if re.search(r"\bnan\b(?! was written)|\bcomputes NaN\b", " ".join(" ".join(essence(output)).split())):
        print(wrapped(NAN, "  "))
    if failed_at(output):
        after = "After this line" if NO_EXPRESSION in output else "Line"
        print(f"  {after} of the test: {failed_at(output)}")
    if milestone.optional:
        print("\n  This milestone is optional" + (": your stage has all that the lesson asks for."
                                                if all_required(exercise, progress) else "."))
    print("\n  What to write:")
    if is_new:  # later the reader knows it, and it would push the message out of sight
        print(wrapped(milestone.task, "    "))
    for line in where_to_write(exercise, milestone):
        print(f"      {line}")
    if failed_at(output) and milestone.number > 1:
        print("  The fault may also lie in an earlier milestone's function that this test calls.")
    quoted = case.replace("[", "\\[").replace("]", "\\]").replace(",", "\\,")
    print(f"  This test alone: {BUILD}/tests/{program} \"{quoted}\"")
    print(f"  A hint: python3 tests/exercise.py {exercise.name} --hint {milestone.number}")
    return False


def run_tests(root, exercise, which):
    folder = require_folder(root, exercise)
    chosen = exercise.milestones if which in ("", "all") else [exercise.milestone(which)]
    build = Build(root / BUILD, {exercise.number: folder})
    if not (build.folder / "CMakeCache.txt").exists():
        print(f"The first build, in {BUILD}/, takes a minute or two, on one processor four.", flush=True)
    build.configure()
    if which == "all":
        return test_all(exercise, build)
    progress = read_progress(folder)
    passed = True
    for milestone in chosen:
        passed = test_milestone(root, exercise, milestone, build, progress)
        write_progress(folder, progress)
        if not passed:
            break
    if not passed:
        return 1
    left = [milestone for milestone in exercise.milestones if milestone.number not in progress["passed"]]
    print()
    if left:
        if left[0].optional and all_required(exercise, progress):
            print("Your stage has all that the lesson asks for. What is left is optional.\n")
        if left[0].number in progress["red"] and left[0].number < max(progress["passed"]):  # not new to the reader
            print(PAINT(f"Milestone {exercise.name}.{left[0].number}: {left[0].title}", "bold") +
                  f" was last seen red: test it again, with --test {left[0].number}.")
        else:
            introduce(exercise, left[0])
    else:
        congratulate(exercise)
    return 0


def give_hint(root, exercise, word):
    milestone = exercise.milestone(word)
    folder = require_folder(root, exercise)
    progress = read_progress(folder)
    shown = min(progress["hints"].get(str(milestone.number), 0) + 1, len(HINTS))
    progress["hints"][str(milestone.number)] = shown
    write_progress(folder, progress)
    print(PAINT(f"Milestone {exercise.name}.{milestone.number}: {milestone.title}", "bold"))
    for name, title in HINTS[:shown]:
        text = milestone.hints[name]
        print(f"\n{PAINT(title, 'cyan')}")
        print(textwrap.indent(text, "  ") if name == "code" else wrapped(text, "  "))
    print()
    if shown < len(HINTS):
        print(f"{len(HINTS) - shown} more: the same command again.")
    else:
        print(f"That was the last one. The answer: python3 tests/exercise.py {exercise.name} --solution {milestone.number}")


def show_solution(root, exercise, word):
    """What to change in the reader's functions to have the course's."""
    milestone = exercise.milestone(word)
    folder = root / exercise.folder()
    print(PAINT(f"Milestone {exercise.name}.{milestone.number}: {milestone.title}", "bold"))
    shown = set()
    for blank in milestone.blanks:
        if blank.filled_in or (blank.file, blank.function) in shown:
            continue
        shown.add((blank.file, blank.function))
        path = f"{exercise.stage}/{blank.file}"
        text = (root / path).read_text(encoding="utf-8")
        begin, _, end = next(function_bodies(text, blank.function))
        right = text[begin:end].split("\n")
        mine = folder / blank.file
        own = list(function_bodies(mine.read_text(encoding="utf-8"), blank.function)) if mine.exists() else []
        print(f"\n{PAINT(path, 'cyan')}, line {text.count(chr(10), 0, begin) + 1}")
        if len(own) == 1:
            own_text = mine.read_text(encoding="utf-8")
            before = own_text[own[0][0]:own[0][2]].split("\n")
            if before == right:
                print("  is what you have.")
            lines = list(difflib.unified_diff(before, right, lineterm="", n=100))[3:]
        else:
            lines = [" " + line for line in right]
        for line in lines:
            print(PAINT(line, {"+": "green", "-": "red"}[line[0]]) if line[:1] in ("+", "-") else line)


# ---------------------------------------------------------------------------------------------------------------------
# The check


def check_texts(root, exercise):
    """Problems that need no compiler."""
    problems = []
    previous_stage(root, exercise)
    texts = folder_texts(root, exercise)
    for milestone, blank in exercise.blanks():
        text = texts[blank.file]
        if f"TODO({milestone.number}, " not in text and not blank.inside:
            problems.append(f"{blank.file}: nothing is blank for milestone {milestone.number}")
    folder_texts(root, exercise, switched=True)
    return problems


class Checker:
    """All exercises in one build folder, each stage taken from a folder of its own. (So two exercises of one stage take no
    longer to compile than one.)"""

    def __init__(self, root, exercises, jobs, log=print):
        self.root = root
        self.exercises = exercises
        self.log = log
        scratch = root / "build" / "exercises"
        self.folders = {exercise.number: scratch / f"my_stage{exercise.number}" for exercise in exercises}
        self.build = Build(scratch / "build", self.folders, jobs, CHECK_TIMEOUT_SECONDS)
        self.selected = {}

    def write(self, switched):
        for number, folder in self.folders.items():
            of_stage = [exercise for exercise in self.exercises if exercise.number == number]
            write_texts(folder, stage_texts(self.root, of_stage, switched))

    def targets(self):
        return sorted({program for cases in self.selected.values() for program, _ in cases})

    def build_all(self, what):
        start = time.monotonic()
        status, output = self.build.build(self.targets(), keep_going=True)
        if status != 0:
            raise ExerciseError(f"{what} does not compile:\n" + "\n".join(compile_errors(output)))
        self.log(f"built {what} in {time.monotonic() - start:.0f} s")

    def run_all(self, jobs):
        """jobs: [(key, program, case, environment)]. Returns {key: (passed, output)}."""
        with concurrent.futures.ThreadPoolExecutor(self.build.jobs) as pool:
            results = pool.map(lambda job: self.build.run_case(*job[1:]), jobs)
            return {job[0]: result for job, result in zip(jobs, results)}

    def check(self):
        """Returns the problems, one line each."""
        self.write(switched=False)
        self.build.configure()
        for exercise in self.exercises:
            for milestone in exercise.milestones:
                self.selected[exercise.name, milestone.number] = self.build.select(exercise, milestone)
        self.build_all("the blank stages")
        problems = []
        # As the reader gets it, each milestone is red, because of what is blank and for no other reason.
        jobs = [((*key, program, case), program, case, {}) for key, cases in self.selected.items() for program, case in cases]
        for (name, milestone, _, case), (passed, output) in self.run_all(jobs).items():
            if passed:
                problems.append(f"{name}.{milestone}: green although all is blank: {case}")
            elif "TODO " not in output:
                problems.append(f"{name}.{milestone}: red, but not by a TODO: {case}")
        # With the solutions up to a milestone, its tests and all earlier ones are green. Without its own solution, its
        # tests are red, and name the TODO.
        self.write(switched=True)
        self.build_all("the solutions")
        jobs = []
        for (name, milestone), cases in self.selected.items():
            last = len(next(e for e in self.exercises if e.name == name).milestones)
            for program, case in cases:
                for first_blank in range(milestone, last + 2):
                    jobs.append(((name, milestone, program, case, first_blank), program, case,
                                 {SWITCH: f"{name}:{first_blank}"}))
        self.log(f"running {len(jobs)} tests with and without their solutions")
        for (name, milestone, _, case, first_blank), (passed, output) in self.run_all(jobs).items():
            if first_blank > milestone and not passed:
                problems.append(f"{name}.{milestone}: red although solved, with milestones from {first_blank} on blank: "
                                f"{case}\n    " + "\n    ".join(essence(output)))
            if first_blank == milestone and passed:
                problems.append(f"{name}.{milestone}: green without its solution: {case}")
            if first_blank == milestone and not passed and f"TODO {milestone}: " not in output:
                problems.append(f"{name}.{milestone}: red, but not by its TODO: {case}\n    " + "\n    ".join(essence(output)))
        for exercise in self.exercises:
            cases = sum(len(self.selected[exercise.name, milestone.number]) for milestone in exercise.milestones)
            wrong = sum(problem.startswith(f"{exercise.name}.") for problem in problems)
            self.log(f"exercise {exercise.name}: {len(exercise.milestones)} milestones, {cases} tests"
                     + (f", {wrong} FAILURES" if wrong else ": red while blank, green when solved"))
        return problems + self.check_shows()

    def check_shows(self):
        """What the finished stage prints, where the course's own programs are built."""
        problems = []
        for exercise in self.exercises:
            now = exercise.run.replace("\\\n", " ")
            before = now.replace(f"stage{exercise.number}", f"stage{exercise.number - 1}", 1)
            for command, lines in ((now, exercise.shows), (before, exercise.before)):
                program, *options = shlex.split(command)
                if not lines or not (self.root / "build" / program).exists():
                    continue
                _, output = run([self.root / "build" / program, *options], CHECK_TIMEOUT_SECONDS,
                                {"CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"})
                problems += [f"{exercise.name}: build/{command} does not print '{line}'" for line in lines
                             if not is_printed(line, output)]
        return problems

    def levels(self):
        """Helps to choose tests: prints, for each test of a stage, the milestone from whose solution on it passes."""
        self.write(switched=True)
        self.build.configure()
        for exercise in self.exercises:
            programs = {program: cases for program, cases in self.build.programs(exercise.number).items()
                        if not re.match(r"same_text|allocation_failure|\w+_fuzz", program)}
            status, output = self.build.build(sorted(programs), keep_going=True)
            if status != 0:
                raise ExerciseError("the solutions do not compile:\n" + "\n".join(compile_errors(output)))

            def level(job, exercise=exercise):
                start, last = time.monotonic(), 0
                try:
                    for first_blank in range(len(exercise.milestones) + 1, 0, -1):
                        if not self.build.run_case(*job, {SWITCH: f"{exercise.name}:{first_blank}"})[0]:
                            break
                        last = first_blank
                except ExerciseError as error:
                    return f"{exercise.name} -  {job[0]:<24} {error}"
                needs = "-" if last <= 1 else last - 1
                return f"{exercise.name} {needs}  {job[0]:<24} {time.monotonic() - start:5.1f} s  {job[1]}"

            jobs = [(program, case) for program, cases in sorted(programs.items()) for case in cases]
            with concurrent.futures.ThreadPoolExecutor(self.build.jobs) as pool:
                for line in pool.map(level, jobs):
                    self.log(line)


def choose(exercises, words):
    chosen = []
    for word in words:
        name = re.sub(r"^stage(?=\d+$)", "", word)
        if name not in exercises:
            there = ", ".join(exercises) or "none"
            raise UsageError(f"there is no exercise '{word}'; there are {there}")
        chosen.append(exercises[name])
    return chosen


def with_others(exercises, chosen):
    """The chosen exercises and, behind a stage's own, the others of that stage."""
    names = {exercise.name for exercise in chosen}
    return [exercise for exercise in exercises.values() if exercise.name in names or str(exercise.number) in names]


def run_check(root, exercises, jobs, levels):
    start = time.monotonic()
    problems = [f"{exercise.name}: {problem}" for exercise in exercises for problem in check_texts(root, exercise)]
    if not problems:
        checker = Checker(root, exercises, jobs)
        if levels:
            checker.levels()
            return 0
        problems = checker.check()
    for problem in problems:
        print(f"error: {problem}")
    print(f"checked {len(exercises)} exercises in {time.monotonic() - start:.0f} s, {len(problems)} failures")
    return 1 if problems else 0


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (--help says more)")


def main(arguments=None, root=ROOT):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    usage="exercise.py [STAGE [--test [M] | --hint M | --solution M | --fresh]],\n"
                          "                   or exercise.py --check")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="the stage to write")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--test", nargs="?", const="", metavar="M", help="run the tests, of one milestone or of all")
    group.add_argument("--hint", metavar="M", help="the next hint for a milestone")
    group.add_argument("--solution", metavar="M", help="the course's code for a milestone")
    group.add_argument("--fresh", action="store_true", help="start over")
    group.add_argument("--check", action="store_true", help="prove that every milestone is red before and green after")
    group.add_argument("--levels", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    try:
        options = parser.parse_args(arguments)
        exercises = read_exercises(root)
        chosen = choose(exercises, options.stages)
        if options.check or options.levels:
            return run_check(root, with_others(exercises, chosen) or list(exercises.values()), options.jobs, options.levels)
        asks = options.test is not None or options.hint or options.solution or options.fresh
        if len(chosen) > 1 or (asks and not chosen):
            raise UsageError("one stage at a time: python3 tests/exercise.py 4 --test")
        if not chosen:
            list_exercises(root, exercises)
            return 0
        exercise = chosen[0]
        if options.test is not None:
            return run_tests(root, exercise, options.test)
        if options.hint:
            give_hint(root, exercise, options.hint)
        elif options.solution:
            show_solution(root, exercise, options.solution)
        else:
            make_folder(root, exercise, options.fresh)
        return 0
    except (ExerciseError, diff_check.DiffError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as after "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
