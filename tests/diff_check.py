#!/usr/bin/env python3
"""Checks that neighbouring stages differ by one idea and by nothing else.

    python3 tests/diff_check.py             check, and print how many lines each file changes
    python3 tests/diff_check.py --update    write down the present differences as the intended ones

Three rules, for every pair of neighbours stageN_*, stageM_* that is there:

Budget    A diff is read by people, so it is bounded: at most 150 changed lines in files that both stages have, and at
          most 300 lines in a file that is new. A line that is replaced counts once: a hunk counts as the larger of the
          lines it removes and the lines it adds. README.md and CMakeLists.txt do not count.
Manifest  tests/stage_diffs.json names the files that differ and by how many lines. A fix that is made in one stage and
          not carried forward to the later ones changes such a number, and turns red here. No file ever disappears.
Hygiene   The name of a stage stands in its sources only in lines that begin with "namespace stage", which the diff
          command of the READMEs hides; no stage includes another one's files, and common/ includes none.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MANIFEST = pathlib.Path("tests/stage_diffs.json")
MAX_CHANGED_LINES = 150
MAX_LINES_OF_NEW_FILE = 300
NOT_COUNTED = ("README.md", "CMakeLists.txt")

STAGE_FOLDER = re.compile(r"^stage(\d+)_[a-z0-9_]+$")
STAGE_NAME = re.compile(r"stage[_-]?\d+", re.IGNORECASE)
NAMESPACE_LINE = re.compile(r"^namespace stage")
HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


class DiffError(Exception):
    """git could not compare two files."""


def find_stages(root):
    """The stages' folder names, in order of their numbers."""
    folders = [folder.name for folder in root.iterdir()
               if STAGE_FOLDER.match(folder.name) and (folder / "CMakeLists.txt").exists()]
    return sorted(folders, key=lambda name: int(STAGE_FOLDER.match(name).group(1)))


def list_files(folder):
    """Paths relative to the folder. Hidden files and what editors and Python leave behind are none of the stage's."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path.as_posix() for path in paths
            if not any(part.startswith(".") or part == "__pycache__" for part in path.parts)
            and not path.name.endswith(("~", ".orig", ".rej"))]


def changed_lines(before, after):
    """How many lines a reader of the diff has to read, a replaced line counted once."""
    command = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "--no-textconv", "--diff-algorithm=myers",
               "--inter-hunk-context=0", "-U0", "-I^namespace stage", "--", str(before), str(after)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if result.returncode not in (0, 1):
        raise DiffError(result.stderr.decode("utf-8", errors="replace").strip())
    total = 0
    for line in result.stdout.decode("utf-8", errors="replace").split("\n"):
        hunk = HUNK.match(line)
        if hunk:
            total += max(int(count) if count is not None else 1 for count in hunk.groups())
    return total


def differences(before, after):
    """{file: changed lines} of the files both folders have and that differ, and {file: lines} of the new ones."""
    files_before, files_after = set(list_files(before)), set(list_files(after))
    changed, new = {}, {}
    for name in sorted(files_after):
        if name in NOT_COUNTED:
            continue
        if name in files_before:
            count = changed_lines(before / name, after / name)
            if count > 0:
                changed[name] = count
        else:
            new[name] = len((after / name).read_text(encoding="utf-8").splitlines())
    return changed, new


def check_budget(changed, new):
    failures = []
    total = sum(changed.values())
    if total > MAX_CHANGED_LINES:
        failures.append(f"{total} lines change in files that both stages have, at most {MAX_CHANGED_LINES} may")
    for name, count in new.items():
        if count > MAX_LINES_OF_NEW_FILE:
            failures.append(f"the new {name} has {count} lines, at most {MAX_LINES_OF_NEW_FILE} may be new in one file")
    return failures


def check_manifest(entry, changed, new):
    """The manifest's entry for a pair: {"changed": {file: changed lines}, "new": [file, ...]}."""
    failures = []
    expected = entry.get("changed", {})
    for name in sorted(set(expected) | set(changed)):
        if name not in expected:
            failures.append(f"{name} differs in {changed[name]} lines; it has to be the same in both stages")
        elif name not in changed:
            failures.append(f"{name} is listed as different, and is the same in both stages")
        elif expected[name] != changed[name]:
            failures.append(f"{name} differs in {changed[name]} lines, intended are {expected[name]}: "
                            "was a change carried forward to all later stages?")
    for name in sorted(set(entry.get("new", [])) ^ set(new)):
        failures.append(f"{name} is new and is not listed" if name in new else f"{name} is listed as new and is not")
    return failures


def check_pair(root, before, after, entry):
    """Returns the table's rows (before, after, file, changed lines) and the failures."""
    changed, new = differences(root / before, root / after)
    gone = sorted(set(list_files(root / before)) - set(list_files(root / after)))
    failures = [f"{name} is gone; files of a stage stay" for name in gone]
    failures += check_budget(changed, new) + check_manifest(entry, changed, new)
    rows = [(name, str(count)) for name, count in changed.items()]
    rows += [(name, f"new, {count} of {MAX_LINES_OF_NEW_FILE}") for name, count in new.items()]
    rows.append(("total", f"{sum(changed.values())} of {MAX_CHANGED_LINES}"))
    return rows, [f"{before} -> {after}: {failure}" for failure in failures]


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
        if name == "README.md":
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
        changed, new = differences(root / before, root / after)
        manifest[pair_name(before, after)] = {"changed": changed, "new": sorted(new)}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


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
            log(f"  {name:<24} {count:>12}")
    failures += [f"{MANIFEST}: there are no such neighbours: {pair}" for pair in manifest]
    for stage in stages:
        failures += check_stage_hygiene(root, stage)
    failures += check_common_hygiene(root)
    return failures


def main():
    parser = argparse.ArgumentParser(description="Checks that neighbouring stages differ by one idea.")
    parser.add_argument("--update", action="store_true", help=f"write the present differences to {MANIFEST}")
    arguments = parser.parse_args()
    if arguments.update:
        write_manifest(ROOT)
    failures = check(ROOT)
    for failure in failures:
        print(f"error: {failure}")
    print(f"checked {len(find_stages(ROOT))} stages, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
