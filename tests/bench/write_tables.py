#!/usr/bin/env python3
"""Writes what the stage's `bench` has measured into the stage's README and the ladder's files.

    write_tables.py measured.txt        reads the output that was saved there, or standard input

From `bench --ladder`: the table between `<!-- ladder:begin -->` and `<!-- ladder:end -->` in README.md, and the line
`// measured: ...` of each ladder/step<n>_*.cu. From `bench --kernels decode` (or all): the cells that have peers, both
head shapes side by side, between `<!-- decode:begin -->` and `<!-- decode:end -->`. All name the GPU and the commit; a
"+" behind it means that the working tree differs from it.
"""

import argparse
import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "stage7_cuda_kernel"
# The cells a file's own line names: one sequence, many, and a batch without a common length.
CELLS = ("1x8192", "32x8192", "32xragged")
# The columns that the tables are known by.
LADDER, DECODE = "step", "best paged peer"
# What `bench` calls the shapes that stand side by side, and what the README calls them.
SHAPES = {"32/8 x 128": "32/8 heads", "32/32 x 128": "32/32 heads"}
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
    raise InputError("no line names the machine: is this the output of `bench --ladder` or `bench --kernels`?")


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


def find_table(text, column):
    """The rows of the only table with such a column; none if there is no such table."""
    tables = [table for table in read_tables(text) if table and column in table[0]]
    if len(tables) > 1:
        raise InputError(f"{len(tables)} tables have a column `{column}`, not one")
    return tables[0] if tables else []


def lines_of(rows, text):
    """The rows as they were printed, with their header."""
    header = list(rows[0])
    printed = [line for line in text.splitlines() if line.startswith("|")]
    begin = next(i for i, line in enumerate(printed) if split_row(line) == header)
    return printed[begin:begin + 2 + len(rows)]


def decode_lines(rows):
    """The cells that have peers, a line each: time, share of the ceiling and best peer, for one shape and the other."""
    shapes = {shape: {row["cell"]: row for row in rows if row["heads"] == shape and row[DECODE] != "-"}
              for shape in SHAPES}
    first, second = (list(of_shape) for of_shape in shapes.values())
    if not first or first != second:
        names = " and ".join(", ".join(cells) or "none" for cells in (first, second))
        raise InputError(f"the two shapes' cells are {names}: they should be the same ones")
    head = "".join(f" {name}, us | of the ceiling | best peer |" for name in SHAPES.values())
    lines = ["| batch x context |" + head, "| --- |" + " ---: |" * 3 * len(SHAPES)]
    for cell in first:
        batch, context = cell.split("x")
        context = "250 … 32,765" if context == "ragged" else f"{int(context):,}"
        line = f"| {batch} x {context} |"
        for of_shape in shapes.values():
            row = of_shape[cell]
            line += f" {row['us']} | {row['ceiling']} | {row[DECODE].split()[0]} |"
        lines.append(line)
    return lines


def write_readme(text, place, lines, machine, commit):
    """The README's text with the table, between the markers of this place."""
    begin, end = f"<!-- {place}:begin -->", f"<!-- {place}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise InputError(f"README.md has no place for the table: {begin} and, after it, {end}, once each")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    table = "\n".join(lines)
    return f"{before}{begin}\n{machine[0]}; commit {commit}:\n\n{table}\n{end}{after}"


def write_all(text, folder, commit):
    """Fills everything in; writes nothing at all if anything is missing. Returns the paths."""
    machine = read_machine(text)
    ladder, decode = find_table(text, LADDER), find_table(text, DECODE)
    if not ladder and not decode:
        raise InputError(f"no table has a column `{LADDER}` or `{DECODE}`")
    readme = folder / "README.md"
    new_readme = readme.read_text(encoding="utf-8")
    files = []
    if ladder:
        steps = [row for row in ladder if row["step"][0].isdigit()]
        if not steps:
            raise InputError("the ladder's table has no steps")
        files = [write_step(folder, row, measured_line(row, machine, commit)) for row in steps]
        new_readme = write_readme(new_readme, "ladder", lines_of(ladder, text), machine, commit)
    if decode:
        new_readme = write_readme(new_readme, "decode", decode_lines(decode), machine, commit)
    files.append((readme, new_readme))
    for path, new in files:
        path.write_text(new, encoding="utf-8")
    return [path for path, _ in files]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="-", help="the output of `bench` (default: stdin)")
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
