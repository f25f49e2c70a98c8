#!/usr/bin/env python3
"""Plants the classic bugs, one after another, and demands that a test turns red for each.

    python3 tests/sabotage.py                        all of them
    python3 tests/sabotage.py missing_rescale ...    only these patches of tests/sabotage/, with the tests' output
    python3 tests/sabotage.py --stages 0 3 6         only bugs in common/ and in these stages
    python3 tests/sabotage.py --gpu                  the bugs in kernels on a GPU; those that need one are left out otherwise

A patch begins with three lines that say what it is about:

    # stage: stage3_online_softmax
    # test: test_stage3 "weights 1 and 3, computed by hand, in two blocks"
    # bug: what came before is not scaled down when a larger score turns up

The test is a program of the build, alone or with one of its test cases. It has to pass without the patch, and to fail
or never to end with it. A fourth line names the test of a kernel's bug where there is no GPU, if the kernel runs on the executor:

    # executor: executor_paged_attention_stage7 "Paged attention: weights 1 and 3, computed by hand"

Everything happens in a copy of the sources with a build of its own (--scratch, by default build/sabotage), which
is kept: the next run compiles only what has changed. Only the programs that the patches name are built. Bugs in different
stages are planted side by side, because no stage sees another one's sources. Those in common/paged/ take turns with stage
7's, whose programs test it; on a GPU stage 8's see it too, so there each is planted alone.
"""

import argparse
import concurrent.futures
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
PAGED, TESTED_BY = "common/paged", "stage7_cuda_kernel"
SKIPPED = 77  # the exit status of a test program that could not try everything
HEADER = re.compile(r"^# (stage|test|executor|bug): (.+)$")


class SabotageError(Exception):
    """The patch or the build is wrong, so that the test proves nothing."""


class NeverEnds(SabotageError):
    """A test was stopped because it took too long: wrong without a bug, and found with one."""


@dataclasses.dataclass
class Patch:
    name: str
    path: pathlib.Path
    stage: str
    program: str
    case: str  # empty: the whole program
    bug: str
    on_executor: tuple[str, str] | None = None  # program and case where there is no GPU

    def tested_stage(self):
        """Of two bugs in one, only one is planted at a time."""
        return TESTED_BY if self.stage == PAGED else self.stage

    def stands_alone(self):
        """Whether the test may see other stages than its own. Then no other bug may be planted beside this one."""
        return not self.program.endswith("_" + self.tested_stage().partition("_")[0]) or \
            self.stage == PAGED and self.needs_gpu()

    def stage_number(self):
        """Of the stage that is changed, or whose programs test it: "3"; "0" for common/."""
        match = re.match(r"stage(\d+)_", self.tested_stage())
        return match.group(1) if match else "0"

    def needs_gpu(self):
        return self.program.startswith("gpu_")

    def without_gpu(self):
        """The same bug, for the executor to find, if it runs this kernel."""
        if self.on_executor is None:
            return self
        return dataclasses.replace(self, program=self.on_executor[0], case=self.on_executor[1])

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

    def program_and_case(field):
        words = shlex.split(fields[field])
        if len(words) > 2:
            raise SabotageError(f"{path.name}: '# {field}:' is a program and at most one quoted test case")
        return words[0], words[1] if len(words) == 2 else ""

    return Patch(path.stem, path, fields["stage"], *program_and_case("test"), fields["bug"],
                 program_and_case("executor") if "executor" in fields else None)


def run(command, folder, timeout=None):
    """Returns the exit status and what was printed. The status is None if it did not end."""
    # The copy may lie inside the repository. If git took it for a part of that, it would skip the patch.
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
    """The repository's files; in an unpacked archive, all files that git would not ignore."""
    if shutil.which("git") and (root / ".git").exists():
        status, output = run(["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others",
                              "--exclude-standard"], root)
        if status != 0:
            raise SabotageError("listing the sources failed:\n" + output)
        names = set(output.split("\0")) - {""}
    else:
        names = set()
        for folder, subfolders, files in os.walk(root):
            at_top = pathlib.Path(folder) == root
            subfolders[:] = [name for name in subfolders if name not in (".git", "__pycache__", ".cache") and
                             not (at_top and (name.startswith("build") or name == "models"))]
            names |= {(pathlib.Path(folder) / name).relative_to(root).as_posix() for name in files if name != ".git"}
    return sorted(name for name in names if (root / name).is_file())


def apply_patch(path, folder):
    if shutil.which("git"):
        command = ["git", "apply", "--whitespace=nowarn", str(path)]
    elif shutil.which("patch"):
        command = ["patch", "--strip=1", "--force", "--fuzz=0", "--no-backup-if-mismatch", f"--input={path}"]
    else:
        raise SabotageError("planting a bug needs git or patch, and neither is installed")
    run_checked(command, folder, f"applying {path.stem}")


def copy_sources(root, folder):
    """Makes the folder hold exactly the repository's sources, beside build/. Files that are right already keep their time."""
    names = set(list_sources(root))
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != "build" and name.as_posix() not in names:
            path.unlink()
    for name in sorted(names):
        source, copy = root / name, folder / name
        if copy.exists() and copy.read_bytes() == source.read_bytes():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)


def patched_files(patch):
    """The files that a patch changes. All have to lie in its stage."""
    names = re.findall(r"^\+\+\+ b/(\S+)", patch.path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if not names:
        raise SabotageError(f"{patch.name}: the patch changes nothing")
    outside = [name for name in names if not name.startswith(patch.stage + "/")]
    if outside:
        raise SabotageError(f"{patch.name}: {outside[0]} does not belong to {patch.stage}")
    return names


class Workshop:
    """A copy of the sources, and its build where a checkout has it: a compiler cache takes what both compile alike."""

    def __init__(self, root, scratch, jobs, gpu=False):
        self.sources = scratch
        self.build_folder = scratch / "build"
        self.jobs = jobs
        self.gpu = gpu
        self.sources.mkdir(parents=True, exist_ok=True)
        copy_sources(root, self.sources)

    def configure(self):
        # Little optimisation, so that the tests can run soon. The libraries' own checks are on.
        cuda = ["-DCOURSE_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90a"] if self.gpu else ["-DCOURSE_CUDA=OFF"]
        run_checked(["cmake", "-S", str(self.sources), "-B", str(self.build_folder), "-G", "Ninja",
                     "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -D_GLIBCXX_ASSERTIONS",
                     "-DCOURSE_WERROR=OFF", *cuda],
                    self.sources, "configuring")

    def build(self, programs):
        """Goes on after an error: if one stage's bug does not compile, the others are tried all the same."""
        run_checked(["cmake", "--build", str(self.build_folder), "--parallel", str(self.jobs), "--target", *programs,
                     "--", "-k", "0"], self.sources, "building " + " ".join(programs))

    def run_test(self, patch):
        """Whether the test passes, and what it printed."""
        command = [str(self.build_folder / "tests" / patch.program)]
        if patch.case:
            command.append(re.sub(r"([\\,\[\]~\"*])", r"\\\1", patch.case))
        status, output = run(command, self.sources, TEST_TIMEOUT_SECONDS)
        if status is None:
            raise NeverEnds(f"{patch.test()} did not end in {TEST_TIMEOUT_SECONDS} seconds")
        if "No test cases matched" in output or "No tests ran" in output:
            raise SabotageError(f"{patch.test()} does not exist")
        if status == SKIPPED:
            raise SabotageError(f"{patch.test()} was skipped")
        return status == 0, output

    def plant(self, patch):
        """Returns the files' original contents, for remove()."""
        originals = {name: (self.sources / name).read_bytes() for name in patched_files(patch)}
        apply_patch(patch.path, self.sources)
        return originals

    def remove(self, originals):
        for name, text in originals.items():
            (self.sources / name).write_bytes(text)


def rounds(patches):
    """Lists of patches that can be planted together, at most one for each stage."""
    by_stage = {}
    # Patches of one file follow each other, so that it is not also compiled without a bug in between.
    for patch in sorted(patches, key=lambda patch: (patch.stage, patched_files(patch), patch.program)):
        by_stage.setdefault(patch.tested_stage(), []).append(patch)
    alone = [[patch] for patch in patches if patch.stands_alone()]
    queues = [[patch for patch in queue if not patch.stands_alone()] for queue in by_stage.values()]
    together = [[queue[index] for queue in queues if index < len(queue)]
                for index in range(max(map(len, queues), default=0))]
    return together + alone


def tail(output):
    return "\n".join(output.rstrip().split("\n")[-30:])


def problem_without_bug(patch, workshop):
    """Why the patch or its test can prove nothing, or an empty string."""
    try:
        patched_files(patch)
        passed, output = workshop.run_test(patch)
    except SabotageError as error:
        return str(error)
    return "" if passed else "the test fails without the bug:\n" + tail(output)


def problem_with_bug(patch, workshop, show):
    """Why the planted bug was not found, or an empty string."""
    try:
        passed, output = workshop.run_test(patch)
    except NeverEnds as error:
        passed, output = False, str(error)
    except SabotageError as error:
        return str(error)
    if passed:
        return f"STAYS GREEN although {patch.bug}"
    show(tail(output))
    return ""


def try_round(patches, workshop, problems, show):
    """Plants the bugs, runs their tests and takes the bugs out again."""
    planted = {}

    def attempt(function, patch):
        try:
            return function(patch)
        except SabotageError as error:
            problems[patch.name] = str(error)

    try:
        for patch in patches:
            planted.update(attempt(workshop.plant, patch) or {})
        patches = [patch for patch in patches if not problems[patch.name]]
        try:
            workshop.build(sorted({patch.program for patch in patches}))
        except SabotageError:
            for patch in patches:  # find the bug that does not compile
                attempt(lambda patch: workshop.build([patch.program]), patch)
        for patch in patches:
            problems[patch.name] = problems[patch.name] or problem_with_bug(patch, workshop, show)
    finally:
        workshop.remove(planted)


def check(patches, workshop, log=print, show=lambda output: None):
    """Returns the number of bugs that no test found or that could not be tried."""
    workshop.build(sorted({patch.program for patch in patches}))
    with concurrent.futures.ThreadPoolExecutor(workshop.jobs) as pool:
        problems = dict(zip([patch.name for patch in patches],
                            pool.map(lambda patch: problem_without_bug(patch, workshop), patches)))

    def report(patch):
        log(f"{patch.name:<28} {patch.stage:<24} {patch.test()}")
        if problems[patch.name]:
            log(f"  error: {problems[patch.name]}")

    log(f"{'bug':<28} {'stage':<24} test that has to turn red")
    for patch in patches:
        if problems[patch.name]:
            report(patch)
    for together in rounds([patch for patch in patches if not problems[patch.name]]):
        try_round(together, workshop, problems, show)
        for patch in together:
            report(patch)
    return sum(1 for problem in problems.values() if problem)


def main():
    parser = argparse.ArgumentParser(description="Plants classic bugs and demands that a test turns red for each.")
    parser.add_argument("patches", nargs="*", help="names of patches in tests/sabotage (default: all)")
    parser.add_argument("--stages", nargs="+", metavar="N", help="only bugs in these stages; 0 is common/")
    parser.add_argument("--scratch", type=pathlib.Path, default=ROOT / "build" / "sabotage",
                        help="folder for the copy and its build (default: build/sabotage)")
    parser.add_argument("--gpu", action="store_true", help="the bugs in kernels alone, on a Hopper GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    arguments = parser.parse_args()
    start = time.monotonic()
    paths = sorted((ROOT / PATCHES).glob("*.patch"))
    if arguments.patches:
        unknown = set(arguments.patches) - {path.stem for path in paths}
        if unknown:
            parser.error(f"there is no {PATCHES}/{sorted(unknown)[0]}.patch")
        paths = [path for path in paths if path.stem in arguments.patches]
    try:
        patches = [read_patch(path) for path in paths]
        if not arguments.gpu:
            patches = [patch.without_gpu() for patch in patches]
        if arguments.stages:
            patches = [patch for patch in patches if patch.stage_number() in arguments.stages]
        left_out = [patch for patch in patches if patch.needs_gpu() != arguments.gpu]
        patches = [patch for patch in patches if patch.needs_gpu() == arguments.gpu]
        if left_out and not arguments.gpu:
            print(f"left out: {len(left_out)} bugs in kernels (--gpu tries those)")
        if not patches:
            raise SabotageError(f"there is no patch in {PATCHES} to try")
        workshop = Workshop(ROOT, arguments.scratch.resolve(), arguments.jobs, arguments.gpu)
        workshop.configure()
        failures = check(patches, workshop, show=print if arguments.patches else lambda output: None)
    except SabotageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"checked {len(patches)} planted bugs in {time.monotonic() - start:.0f} s, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
