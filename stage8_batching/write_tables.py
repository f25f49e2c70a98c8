#!/usr/bin/env python3
"""Writes what the stage's `bench --ladder` has measured into the ladder's files and the stage's README.

    write_tables.py ladder.txt          reads the output that was saved there, or standard input

Each ladder/step<n>_*.cu has a line `// measured: ...`, and README.md a table between `<!-- ladder:begin -->` and
`<!-- ladder:end -->`. Both name the GPU and the commit; a "+" behind it means that the working tree differs from it.
"""

import argparse
import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
BEGIN, END = "<!-- ladder:begin -->", "<!-- ladder:end -->"
# The cells a file's own line names: one sequence, many, and a batch without a common length.
CELLS = ("1x8192", "32x8192", "32xragged")
MACHINE = re.compile(r"^(?P<gpu>.+), driver \S+, CUDA \S+, read ceiling [\d,]+ GB/s$")


class InputError(Exception):
    """What the caller can put right: one line for stderr."""


def split_row(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_tables(text):
    """The Markdown tables of a text: for each a list of rows, a row being {header: cell}."""
    tables, header = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = split_row(line)
            tables.append([])
        elif not re.fullmatch(r"[|:\- ]+", line):
            cells = split_row(line)
            if len(cells) != len(header):
                raise InputError(f"a row has {len(cells)} cells, its header {len(header)}: {line}")
            tables[-1].append(dict(zip(header, cells)))
    return tables


def read_machine(text):
    """The first line that describes a machine, as a match with the group gpu."""
    for line in text.splitlines():
        if match := MACHINE.match(line.strip()):
            return match
    raise InputError("no line names the machine: is this the output of `bench --ladder`?")


def commit_of(folder):
    """The commit the working tree stands on, with a "+" if it differs from it."""
    def git(*arguments):
        return subprocess.run(("git", "-C", str(folder), *arguments), capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "--short", "HEAD").strip() + ("+" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(f"git cannot name the commit of {folder}: {error}") from error


def measured_line(row, machine, commit):
    times = []
    for cell in CELLS:
        if cell not in row:
            raise InputError(f"the ladder's table has no column {cell}: was it measured with --cell?")
        times.append(f"{cell} {row[cell].replace(' (', ' us (')}")
    return f"// measured: {', '.join(times)} on {machine['gpu']} at {commit}"


def write_step(folder, row, line):
    """Replaces the `// measured:` line of the step's file; the row's name begins with the step's number."""
    number = row["step"].split()[0]
    files = sorted((folder / "ladder").glob(f"step{number}_*.cu"))
    if len(files) != 1:
        raise InputError(f"{len(files)} files are called ladder/step{number}_*.cu, not one")
    text = files[0].read_text(encoding="utf-8")
    new, count = re.subn(r"^// measured:.*$", lambda _: line, text, flags=re.MULTILINE)
    if count != 1:
        raise InputError(f"{files[0].name} has {count} lines that begin with `// measured:`, not one")
    return files[0], new


def write_readme(path, table, machine, commit):
    """The README with the table, lines as they were printed, between the markers."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InputError(f"{path.name} has no place for the table: {BEGIN} and, after it, {END}, once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return path, f"{before}{BEGIN}\n{machine[0]}; commit {commit}:\n\n{table}\n{END}{after}"


def write_all(text, folder, commit):
    """Fills everything in; writes nothing at all if anything is missing. Returns the paths."""
    machine = read_machine(text)
    tables = [table for table in read_tables(text) if table and "step" in table[0]]
    if len(tables) != 1:
        raise InputError(f"{len(tables)} tables have a column `step`, not one")
    files = []
    for row in tables[0]:
        if row["step"][0].isdigit():
            files.append(write_step(folder, row, measured_line(row, machine, commit)))
    if not files:
        raise InputError("the ladder's table has no steps")
    lines = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    files.append(write_readme(folder / "README.md", lines, machine, commit))
    for path, new in files:
        path.write_text(new, encoding="utf-8")
    return [path for path, _ in files]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="-", help="the output of `bench --ladder` (default: stdin)")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="the stage's folder (default: this one)")
    parser.add_argument("--commit", help="what was measured, if it is not what lies in the folder")
    options = parser.parse_args(arguments)
    try:
        text = sys.stdin.read() if options.file == "-" else pathlib.Path(options.file).read_text(encoding="utf-8")
        for path in write_all(text, options.folder, options.commit or commit_of(options.folder)):
            print(path)
    except (InputError, OSError) as error:
        print(f"write_tables.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
