#!/usr/bin/env python3
"""Plants the classic bugs, one after the other, and demands that a test turns red for each.

    python3 tests/sabotage.py                        all of them
    python3 tests/sabotage.py missing_rescale ...    only these patches of tests/sabotage/
    python3 tests/sabotage.py --gpu                  those of the kernels, which need a GPU and are else left out

A patch begins with three lines that say what it is about:

    # stage: stage3_online_softmax
    # test: test_stage3 "weights 1 and 3, computed by hand, in two blocks"
    # bug: what came before is not scaled down when a larger score turns up

The test is a program of the build, and a test case of it or nothing more. It has to pass as things are and to fail with
the patch applied. Everything happens in a copy of the sources with a build of its own (--scratch, by default
build/sabotage), which is kept: the next run compiles only what has changed.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATCHES = pathlib.Path("tests/sabotage")
TEST_TIMEOUT_SECONDS = 120
SKIPPED = 77  # the exit status of a test program that could not try everything
HEADER = re.compile(r"^# (stage|test|bug): (.+)$")


class SabotageError(Exception):
    """The patch or the build is wrong, so that nothing can be said about the test."""


@dataclasses.dataclass
class Patch:
    name: str
    path: pathlib.Path
    stage: str
    program: str
    case: str  # empty: the whole program
    bug: str

    def needs_gpu(self):
        return self.program.startswith("gpu_")

    def test(self):
        return f'{self.program} "{self.case}"' if self.case else self.program


def read_patch(path):
    fields = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        match = HEADER.match(line)
        if not match:
            break
        fields[match.group(1)] = match.group(2).strip()
    missing = [field for field in ("stage", "test", "bug") if field not in fields]
    if missing:
        raise SabotageError(f"{path.name}: the first lines lack '# {missing[0]}: ...'")
    words = shlex.split(fields["test"])
    if len(words) > 2:
        raise SabotageError(f"{path.name}: '# test:' is a program and at most one quoted test case")
    return Patch(path.stem, path, fields["stage"], words[0], words[1] if len(words) == 2 else "", fields["bug"])


def run(command, folder, timeout=None):
    """Returns the exit status and what was printed. The status is None if it did not end."""
    # The copy may lie inside the repository: git must not take it for a part of it, or it would skip the patch.
    environment = dict(os.environ, GIT_CEILING_DIRECTORIES=str(folder.parent), NO_COLOR="1")
    environment.pop("GIT_DIR", None)
    try:
        result = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    return result.returncode, result.stdout.decode("utf-8", errors="replace")


def run_checked(command, folder, what):
    status, output = run(command, folder)
    if status != 0:
        raise SabotageError(f"{what} failed:\n" + "\n".join(output.split("\n")[-30:]))


def list_sources(root):
    output = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others",
                             "--exclude-standard"], cwd=root, stdout=subprocess.PIPE, check=True).stdout
    names = sorted(set(output.decode("utf-8").split("\0")) - {""})
    return [name for name in names if (root / name).is_file()]


def copy_sources(root, folder):
    """Makes the folder hold the repository's sources and nothing else. Files that are right already keep their time."""
    names = set(list_sources(root))
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in names:
            path.unlink()
    for name in sorted(names):
        source, copy = root / name, folder / name
        if copy.exists() and copy.read_bytes() == source.read_bytes():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)


def patched_files(patch):
    """The files a patch changes: all have to lie in its stage."""
    names = re.findall(r"^\+\+\+ b/(\S+)", patch.path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if not names:
        raise SabotageError(f"{patch.name}: the patch changes nothing")
    outside = [name for name in names if not name.startswith(patch.stage + "/")]
    if outside:
        raise SabotageError(f"{patch.name}: {outside[0]} does not belong to {patch.stage}")
    return names


class Workshop:
    """A copy of the sources and its build."""

    def __init__(self, root, scratch, jobs, gpu=False):
        self.sources = scratch / "sources"
        self.build_folder = scratch / "build"
        self.jobs = jobs
        self.gpu = gpu
        self.sources.mkdir(parents=True, exist_ok=True)
        copy_sources(root, self.sources)

    def configure(self):
        # Little optimisation: what counts is how soon the tests can run. Checks of the libraries are on.
        cuda = ["-DCOURSE_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90a"] if self.gpu else ["-DCOURSE_CUDA=OFF"]
        run_checked(["cmake", "-S", str(self.sources), "-B", str(self.build_folder), "-G", "Ninja",
                     "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCOURSE_WERROR=OFF", *cuda],
                    self.sources, "configuring")

    def build(self, programs):
        run_checked(["cmake", "--build", str(self.build_folder), "--parallel", str(self.jobs), "--target", *programs],
                    self.sources, "building " + " ".join(programs))

    def run_test(self, patch):
        """Whether the test passes, and what it printed."""
        command = [str(self.build_folder / "tests" / patch.program)]
        if patch.case:
            command.append(re.sub(r"([\\,\[\]~\"*])", r"\\\1", patch.case))
        status, output = run(command, self.sources, TEST_TIMEOUT_SECONDS)
        if status is None:
            raise SabotageError(f"{patch.test()} did not end in {TEST_TIMEOUT_SECONDS} seconds")
        if "No test cases matched" in output or "No tests ran" in output:
            raise SabotageError(f"{patch.test()} does not exist")
        if status == SKIPPED:
            raise SabotageError(f"{patch.test()} was skipped")
        return status == 0, output

    def turns_red(self, patch):
        """Whether the test fails once the bug is there. The bug is taken out again."""
        originals = {name: (self.sources / name).read_bytes() for name in patched_files(patch)}
        try:
            run_checked(["git", "apply", "--whitespace=nowarn", str(patch.path)], self.sources,
                        f"applying {patch.name}")
            self.build([patch.program])
            passed, _ = self.run_test(patch)
            return not passed
        finally:
            for name, text in originals.items():
                (self.sources / name).write_bytes(text)


def problem_without_bug(patch, workshop):
    """Why the patch's test can prove nothing, or an empty string."""
    try:
        passed, output = workshop.run_test(patch)
    except SabotageError as error:
        return str(error)
    return "" if passed else "the test fails without the bug:\n" + "\n".join(output.split("\n")[-30:])


def problem_with_bug(patch, workshop):
    try:
        return "" if workshop.turns_red(patch) else f"STAYS GREEN although {patch.bug}"
    except SabotageError as error:
        return str(error)


def check(patches, workshop, log=print):
    """Returns the number of bugs that no test found, or that could not be tried."""
    programs = sorted({patch.program for patch in patches})
    workshop.build(programs)
    # All of these before the first bug is planted: programs are rebuilt only when it is their turn.
    problems = {patch.name: problem_without_bug(patch, workshop) for patch in patches}
    log(f"{'bug':<28} {'stage':<24} test that has to turn red")
    for patch in patches:
        problems[patch.name] = problems[patch.name] or problem_with_bug(patch, workshop)
        log(f"{patch.name:<28} {patch.stage:<24} {patch.test()}")
        if problems[patch.name]:
            log(f"  error: {problems[patch.name]}")
    # The programs are left without any bug, for whoever runs one of them by hand.
    workshop.build(programs)
    return sum(1 for problem in problems.values() if problem)


def main():
    parser = argparse.ArgumentParser(description="Plants classic bugs and demands that a test turns red for each.")
    parser.add_argument("patches", nargs="*", help="names of patches in tests/sabotage (default: all)")
    parser.add_argument("--scratch", type=pathlib.Path, default=ROOT / "build" / "sabotage",
                        help="folder for the copy and its build (default: build/sabotage)")
    parser.add_argument("--gpu", action="store_true", help="the bugs in kernels instead, on a Hopper GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    arguments = parser.parse_args()
    start = time.monotonic()
    paths = sorted((ROOT / PATCHES).glob("*.patch"))
    if arguments.patches:
        unknown = set(arguments.patches) - {path.stem for path in paths}
        if unknown:
            print(f"error: there is no {PATCHES}/{sorted(unknown)[0]}.patch", file=sys.stderr)
            return 1
        paths = [path for path in paths if path.stem in arguments.patches]
    try:
        patches = sorted((read_patch(path) for path in paths), key=lambda patch: (patch.stage, patch.program))
        left_out = [patch for patch in patches if patch.needs_gpu() != arguments.gpu]
        patches = [patch for patch in patches if patch.needs_gpu() == arguments.gpu]
        if left_out and not arguments.gpu:
            print(f"left out: {len(left_out)} bugs in kernels (--gpu tries those)")
        if not patches:
            raise SabotageError(f"there is no patch in {PATCHES} to try")
        workshop = Workshop(ROOT, arguments.scratch.resolve(), arguments.jobs, arguments.gpu)
        workshop.configure()
        failures = check(patches, workshop)
    except SabotageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"checked {len(patches)} planted bugs in {time.monotonic() - start:.0f} s, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
