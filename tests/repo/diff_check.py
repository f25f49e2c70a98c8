#!/usr/bin/env python3
"""Checks that neighbouring stages differ by one idea and by nothing else.

    python3 tests/repo/diff_check.py             check, and print how many lines each file changes
    python3 tests/repo/diff_check.py --update    make the present differences the intended ones

Two rules, for every pair of neighbours stageN_*, stageM_* that is there:

Manifest  tests/repo/stage_diffs.json names the files that differ, with the lines that git counts as added and removed,
          the files that are new, with their lines, and those that are gone. A fix that is made in one stage and not
          carried forward to the later ones changes one of these numbers, and turns red here. The manifest is a
          ratchet and not a limit: --update writes the present numbers, on purpose and with a reason in the commit's
          message. README.md, its pictures and CMakeLists.txt do not count. The last row of a pair is the lesson's
          size: the stage's root, kernels/ and ladder/.
Hygiene   The name of a stage stands in its sources only in lines that begin with "namespace stage", which the diff
          command of the READMEs hides; no stage includes another one's files, and common/ includes none.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MANIFEST = pathlib.Path("tests/repo/stage_diffs.json")
SKIPPED = 77  # the SKIP_RETURN_CODE in tests/CMakeLists.txt
NOT_COUNTED = ("CMakeLists.txt", "demo/pictures.h", "demo/pictures.cpp")

STAGE_FOLDER = re.compile(r"^stage(\d+)_[a-z0-9_]+$")
STAGE_NAME = re.compile(r"stage[_-]?\d+", re.IGNORECASE)
NAMESPACE_LINE = re.compile(r"^namespace stage")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


class DiffError(Exception):
    """git could not compare two files."""


class NoGit(DiffError):
    """It is not installed."""


def git_program():
    git = shutil.which("git")
    if not git:
        raise NoGit("comparing two stages needs git, which is not installed (apt-get install git)")
    return git


def find_stages(root):
    """The stages' folder names, in order of their numbers."""
    folders = [folder.name for folder in root.iterdir()
               if STAGE_FOLDER.match(folder.name) and (folder / "CMakeLists.txt").exists()]
    return sorted(folders, key=lambda name: int(STAGE_FOLDER.match(name).group(1)))


def list_files(folder):
    """Paths relative to the folder. Hidden files and what editors and Python leave behind do not count."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path.as_posix() for path in paths
            if not any(part.startswith(".") or part == "__pycache__" for part in path.parts)
            and not path.name.endswith(("~", ".orig", ".rej"))]


def is_counted(name):
    return name not in NOT_COUNTED and not name.endswith((".md", ".svg"))


def is_lesson(name):
    """What the README walks through: a stage's root, kernels/ and ladder/. demo/ only shows something, serve/ makes the
    engine a server's, and production/ has pages of its own."""
    return is_counted(name) and not name.startswith(("demo/", "serve/", "production/"))


def changed_lines(before, after):
    """[added, removed] lines, counted as by the READMEs' diff command."""
    command = [git_program(), "diff", "--no-index", "--no-color", "--no-ext-diff", "--no-textconv", "--numstat", "-U0",
               "-I^namespace stage", "--", str(before), str(after)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if result.returncode not in (0, 1):
        raise DiffError(result.stderr.decode("utf-8", errors="replace").strip())
    words = result.stdout.decode("utf-8", errors="replace").split()
    return [int(words[0]), int(words[1])] if words else [0, 0]


def differences(before, after):
    """{"changed": {file: [added, removed]}, "new": {file: lines}, "gone": [file, ...]}."""
    files_before, files_after = (set(filter(is_counted, list_files(folder))) for folder in (before, after))
    changed, new = {}, {}
    for name in sorted(files_after):
        if name in files_before:
            counts = changed_lines(before / name, after / name)
            if counts != [0, 0]:
                changed[name] = counts
        else:
            new[name] = len((after / name).read_text(encoding="utf-8").splitlines())
    return {"changed": changed, "new": new, "gone": sorted(files_before - files_after)}


def lesson_size(before, found):
    """(added, removed) lines of the lesson, including new and deleted files. `found`: what differences() returns."""
    changed = [count for name, count in found["changed"].items() if is_lesson(name)]
    added = sum(lines for name, lines in found["new"].items() if is_lesson(name))
    removed = sum(len((before / name).read_text(encoding="utf-8").splitlines())
                  for name in found["gone"] if is_lesson(name))
    return added + sum(count[0] for count in changed), removed + sum(count[1] for count in changed)


def check_manifest(expected, found):
    """Returns the failures. Both arguments: what differences() returns."""
    failures = []
    before, after = expected.get("changed", {}), found["changed"]
    for name in sorted(set(before) | set(after)):
        if name not in before:
            failures.append(f"{name} differs (+{after[name][0]} -{after[name][1]}); it has to be the same in both stages")
        elif name not in after:
            failures.append(f"{name} is listed as different, and is the same in both stages")
        elif before[name] != after[name]:
            failures.append(f"{name} differs by +{after[name][0]} -{after[name][1]}, intended are +{before[name][0]} "
                            f"-{before[name][1]}: was a change carried forward to all later stages?")
    before, after = expected.get("new", {}), found["new"]
    for name in sorted(set(before) | set(after)):
        if name not in before:
            failures.append(f"{name} is new and is not listed")
        elif name not in after:
            failures.append(f"{name} is listed as new and is not")
        elif before[name] != after[name]:
            failures.append(f"the new {name} has {after[name]} lines, intended are {before[name]}")
    for name in sorted(set(expected.get("gone", [])) ^ set(found["gone"])):
        failures.append(f"{name} is gone and is not listed" if name in found["gone"]
                        else f"{name} is listed as gone and is not")
    return failures


def check_pair(root, before, after, expected):
    """Returns the table's rows (file, lines) and the failures."""
    found = differences(root / before, root / after)
    rows = [(name, f"+{added} -{removed}") for name, (added, removed) in found["changed"].items()]
    rows.append(("in both stages", "+{} -{}".format(*(sum(count[i] for count in found["changed"].values())
                                                      for i in (0, 1)))))
    rows += [(name, f"new, {lines}") for name, lines in found["new"].items()]
    rows += [(name, "gone") for name in found["gone"]]
    rows.append(("the lesson, new files included", "+{} -{}".format(*lesson_size(root / before, found))))
    return rows, [f"{before} -> {after}: {failure}" for failure in check_manifest(expected, found)]


def is_own_include(file, line):
    """False for an include of (another) stage. A file in a subfolder may go up as far as the topmost folder."""
    include = INCLUDE.match(line)
    if not include:
        return True
    path = include.group(1)
    num_up = len(re.match(r"(?:\.\./)*", path).group(0)) // 3
    return "stage" not in path and num_up <= len(file.parts) - 2


def check_stage_hygiene(root, stage):
    failures = []
    for name in list_files(root / stage):
        if STAGE_NAME.search(name):
            failures.append(f"{stage}/{name}: a file's name says nothing of its stage")
        if name.endswith(".md"):
            continue
        for number, line in enumerate((root / stage / name).read_text(encoding="utf-8").split("\n"), start=1):
            where = f"{stage}/{name}:{number}"
            if name == "CMakeLists.txt":
                if number == 1 and line != f"add_stage({stage})":
                    failures.append(f"{where}: expected add_stage({stage})")
            elif not is_own_include(pathlib.PurePosixPath(stage, name), line):
                failures.append(f"{where}: a stage includes its own files and common/, by name and nothing else")
            elif STAGE_NAME.search(line) and not NAMESPACE_LINE.match(line):
                failures.append(f"{where}: names a stage outside a line that begins with 'namespace stage'")
            own = f"stage{STAGE_FOLDER.match(stage).group(1)}"
            if NAMESPACE_LINE.match(line) and not re.fullmatch(rf"namespace (stage = )?{own}( \{{|;)", line):
                failures.append(f"{where}: expected 'namespace {own} {{' on a line of its own")
    return failures


def check_common_hygiene(root):
    failures = []
    for pattern in ("*.h", "*.cpp", "*.cu", "*.cuh"):
        for path in sorted((root / "common").rglob(pattern)):
            for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
                if not is_own_include(path.relative_to(root), line):
                    failures.append(f"{path.relative_to(root)}:{number}: common/ depends on no stage")
    return failures


def read_manifest(root):
    path = root / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def pair_name(before, after):
    return f"{before} -> {after}"


def write_manifest(root):
    stages = find_stages(root)
    manifest = {}
    for before, after in zip(stages, stages[1:]):
        manifest[pair_name(before, after)] = differences(root / before, root / after)
    text = json.dumps(manifest, indent=2)
    text = re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", text)  # both numbers on the file's line
    (root / MANIFEST).write_text(text + "\n", encoding="utf-8")


def check(root, log=print):
    """Returns all failures, one line each. The table goes to log."""
    stages = find_stages(root)
    manifest = read_manifest(root)
    failures = []
    for before, after in zip(stages, stages[1:]):
        rows, pair_failures = check_pair(root, before, after, manifest.pop(pair_name(before, after), {}))
        failures += pair_failures
        log(pair_name(before, after))
        for name, count in rows:
            log(f"  {name:<32} {count:>12}")
    failures += [f"{MANIFEST}: there are no such neighbours: {pair}" for pair in manifest]
    for stage in stages:
        failures += check_stage_hygiene(root, stage)
    failures += check_common_hygiene(root)
    return failures


def main():
    parser = argparse.ArgumentParser(description="Checks that neighbouring stages differ by one idea.")
    parser.add_argument("--update", action="store_true", help=f"write the present differences to {MANIFEST}")
    arguments = parser.parse_args()
    try:
        if arguments.update:
            write_manifest(ROOT)
        failures = check(ROOT)
    except NoGit as error:
        print(f"skipped: {error}")
        return SKIPPED
    for failure in failures:
        print(f"error: {failure}")
    print(f"checked {len(find_stages(ROOT))} stages, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
