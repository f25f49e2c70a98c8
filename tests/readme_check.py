#!/usr/bin/env python3
"""Runs the commands of the READMEs and compares what they print with what the READMEs say; then asks figures.py whether what
they say of measurements is what was measured.

    python3 tests/readme_check.py                 README.md, RESULTS.md and the pages of all stages
    python3 tests/readme_check.py --update        rewrite the expected output in place
    python3 tests/readme_check.py stage1_contiguous/README.md

A fenced block that opens with ```console holds commands, each on a line that starts with "$ " (a trailing backslash
continues it), and below each the lines that it prints, stdout and stderr together. bash runs the commands in the root of
the repository, with NO_COLOR=1 and COLUMNS=120; all have to succeed. If no lines are expected below a command, its output
does not matter. An expected line that is exactly "..." stands for any number of lines.

HTML comments, outside the fence, change what a block has to do:

    <!-- command: NAME -->        right before the fence: a command that installs or builds; .ci/run runs it
    <!-- not run -->              right before the fence: slow, or not possible on every machine
    <!-- exit status: N -->       right before the fence: its commands end with N instead of 0
    <!-- measured: begin ... -->  until <!-- measured: end -->: times of one machine; run, not compared,
                                  renewed by --update; runs once for all pages that are checked together, so that
                                  they show the same times
"""

import argparse
import dataclasses
import difflib
import os
import pathlib
import re
import subprocess
import sys
import time

import figures

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 900

FENCE_OPEN = re.compile(r"^```console\s*$")
ANY_FENCE = re.compile(r"^(```|~~~)")
MARKER = re.compile(r"^<!--\s*(.*?)\s*-->\s*$")
EXIT_STATUS = re.compile(r"^exit status:\s*(\d+)$")


class ReadmeError(Exception):
    """The README itself is malformed: an open fence or an unmatched marker."""


@dataclasses.dataclass
class Command:
    line: int  # from 1, of the "$ " line
    text: str
    output_begin: int  # lines[output_begin:output_end] is the expected output
    output_end: int
    measured: bool
    exit_status: int


def parse(lines):
    """Returns the commands to run, in order, and the number of command lines in blocks that are skipped."""
    commands, skipped = [], 0
    measured = False
    marker = ""  # the comment right above the current line
    index = 0
    while index < len(lines):
        line = lines[index]
        if FENCE_OPEN.match(line):
            end = find_fence_end(lines, index)
            block = parse_block(lines, index + 1, end, measured, marker)
            if marker == "not run" or marker.startswith("command:"):
                skipped += len(block)
            else:
                commands += block
            marker = ""
            index = end + 1
            continue
        if ANY_FENCE.match(line):
            index = find_fence_end(lines, index) + 1
            marker = ""
            continue
        match = MARKER.match(line)
        if match:
            marker = match.group(1)
            if marker.startswith("measured: begin"):
                if measured:
                    raise ReadmeError(f"line {index + 1}: 'measured' begins again before it ended")
                measured = True
            elif marker == "measured: end":
                if not measured:
                    raise ReadmeError(f"line {index + 1}: 'measured' ends without having begun")
                measured = False
        elif line.strip():
            marker = ""
        index += 1
    if measured:
        raise ReadmeError("'measured: begin' without an end")
    return commands, skipped


def find_fence_end(lines, begin):
    fence = ANY_FENCE.match(lines[begin]).group(1)
    for index in range(begin + 1, len(lines)):
        if lines[index].rstrip() == fence:
            return index
    raise ReadmeError(f"line {begin + 1}: the block is never closed")


def parse_block(lines, begin, end, measured, marker):
    status = EXIT_STATUS.match(marker)
    exit_status = int(status.group(1)) if status else 0
    commands = []
    index = begin
    while index < end:
        if not lines[index].startswith("$ "):
            raise ReadmeError(f"line {index + 1}: output before any command")
        first = index
        text = lines[index][2:]
        while text.endswith("\\") and index + 1 < end:
            index += 1
            text += "\n" + lines[index]
        output_begin = index + 1
        index = output_begin
        while index < end and not lines[index].startswith("$ "):
            index += 1
        commands.append(Command(first + 1, text, output_begin, index, measured, exit_status))
    return commands


def normalise(lines):
    """Without trailing spaces, and without empty lines at the end."""
    lines = [line.rstrip() for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def matches(expected, actual):
    """Whether the lines are equal. An expected "..." stands for any number of lines, including none."""
    # reachable[j]: the expected lines so far can stand for the first j actual ones.
    reachable = [True] + [False] * len(actual)
    for line in expected:
        if line == "...":
            first = reachable.index(True) if True in reachable else len(reachable)
            reachable = [j >= first for j in range(len(reachable))]
        else:
            reachable = [False] + [reachable[j] and actual[j] == line for j in range(len(actual))]
    return reachable[-1]


def renewed(expected, actual):
    """What --update writes. A single "..." is kept, with as many lines before and after it as it had."""
    if expected.count("...") == 1:
        head = expected.index("...")
        tail = len(expected) - head - 1
        if head + tail <= len(actual):
            return actual[:head] + ["..."] + actual[len(actual) - tail:]
    return actual


# A program that can use a GPU says on stderr, in one line, whether it does.
WHERE = re.compile(r"^note: computing on ")
# A program that takes long says from time to time how far it is.
PROGRESS = re.compile(r"^[^|]+: [\d,]+ of [\d,]+ \([\d.]+ %\)(, \d+ s left)?$")


def run(text, root):
    environment = dict(os.environ, NO_COLOR="1", COLUMNS="120", LC_ALL="C.UTF-8")
    try:
        result = subprocess.run(["bash", "-c", text], cwd=root, env=environment, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None, [f"no end after {TIMEOUT_SECONDS} seconds"]
    lines = result.stdout.decode("utf-8", errors="replace").split("\n")
    return result.returncode, normalise([line for line in lines if not WHERE.match(line) and not PROGRESS.match(line)])


def check_command(command, expected, status, actual):
    """Returns the failure as text, or an empty string."""
    if status != command.exit_status:
        shown = "\n".join(actual[-20:])
        return f"exit status {status}, expected {command.exit_status}. It printed:\n{shown}"
    if command.measured or not expected or matches(expected, actual):
        return ""
    return "\n".join(difflib.unified_diff(expected, actual, "in the README", "printed now", lineterm=""))


def check_readme(path, root=ROOT, update=False, log=print, runs=None):
    """Returns the number of failures in one README. With update, rewrites it first where the output differs.

    runs: what measured commands printed on other pages, {command: (exit status, lines)}; what they print here is added.
    """
    runs = {} if runs is None else runs
    name = path.relative_to(root)
    lines = path.read_text(encoding="utf-8").split("\n")
    failures = compared = only_run = 0
    start = time.monotonic()
    try:
        commands, skipped = parse(lines)
    except ReadmeError as error:
        log(f"{name}: {error}")
        return 1
    replacements = []
    for command in commands:
        expected = normalise(lines[command.output_begin:command.output_end])
        if not command.measured:
            status, actual = run(command.text, root)
        else:
            if command.text not in runs:
                runs[command.text] = run(command.text, root)
            status, actual = runs[command.text]
        failure = check_command(command, expected, status, actual)
        if update and status == command.exit_status and expected and (failure or command.measured):
            replacements.append((command, renewed(expected, actual)))
            failure = ""
        if failure:
            failures += 1
            log(f"{name}:{command.line}: $ {command.text}\n{failure}")
        if expected and not command.measured:
            compared += 1
        else:
            only_run += 1
    # From the bottom up, so that the line numbers above stay right.
    for command, output in reversed(replacements):
        lines[command.output_begin:command.output_end] = output
    if replacements:
        path.write_text("\n".join(lines), encoding="utf-8")
    log(f"{name}: {compared} outputs compared, {only_run} commands only run, {skipped} not run, "
        f"{len(replacements)} rewritten, {failures} failures, {time.monotonic() - start:.0f} s")
    return failures


def find_readmes(root):
    pages = [root / "README.md", root / "RESULTS.md", *sorted(root.glob("common/**/*.md")),
             *sorted(root.glob("stage*/*.md"))]
    return [path for path in pages if path.exists()]


def main():
    parser = argparse.ArgumentParser(description="Runs the READMEs' commands and compares their output.")
    parser.add_argument("readmes", nargs="*", type=pathlib.Path, help="pages (default: all)")
    parser.add_argument("--update", action="store_true", help="rewrite expected outputs, measured ones too")
    arguments = parser.parse_args()
    if not (ROOT / "build" / "stage1").exists():
        print("error: build/stage1 is not there; build first: cmake --workflow --preset test", file=sys.stderr)
        return 1
    readmes = [path.resolve() for path in arguments.readmes] or find_readmes(ROOT)
    if not readmes:
        print("error: there is no README.md to check", file=sys.stderr)
        return 1
    runs = {}
    failures = sum(check_readme(path, update=arguments.update, runs=runs) for path in readmes)
    if arguments.update:
        figures.write()
    failures += figures.check()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
