#!/usr/bin/env python3
"""What a stage changes, in reading order, with the lesson's notes.

  python3 tests/stage_diff.py 3 4              stage 4's lesson as a diff
                                               against stage 3
  python3 tests/stage_diff.py 3 4 attention    of the files with this name
                                               alone; a folder will do: kernels/
  python3 tests/stage_diff.py 3 4 --all        with what the lesson does not
                                               walk through: demo/, serve/,
                                               production/
  python3 tests/stage_diff.py 6 8              batching as the next step after
                                               the prefix cache, without a GPU
  python3 tests/stage_diff.py ladder 2 3       step 3 of the ladder of kernels
                                               as a diff against step 2
  python3 tests/stage_diff.py ladder prompt 1 2    of the prompts' ladder
  python3 tests/stage_diff.py 3 4 --html FILE  the same as one page, side by
                                               side
  python3 tests/stage_diff.py 3 4 --size       how large it is, as git counts it
  python3 tests/stage_diff.py --check [3 4]    whether every note belongs to a
                                               hunk, and which hunks have none:
                                               of all neighbours, or of these

The notes are paragraphs of the part "The diff" of the later stage's lesson, or
of a section of this name in another part: of its README.md, then of the pages
beside it to which README.md links, in that order. A comment, invisible in the
rendered page, says what the paragraphs after it explain, up to the next such
comment or the next heading:

    <!-- hunk: attention.cpp -->           the whole file
    <!-- hunk: attention.cpp rescale -->   its changes that contain `rescale`
    <!-- hunk end -->                      what follows explains no hunk

Comments that follow each other share the paragraphs after them, which are
printed once: at the first of these comments whose file is shown. The text is
looked for in lines that were added or removed, best as a whole word; if it
stands in none of them, in the lines around and in the name of the function. A
comment that matches nothing is an error. The files named first by such comments
are shown first.

The notes on a step of the ladder are such paragraphs outside of "The diff",
after comments that name its file:

    <!-- hunk: ladder/step3_online_softmax.cu largest -->

The comment at the head of the file is its first note. That of the step before
is no part of the diff, nor are lines that are only indented otherwise. A header
of the folder that the step is the first to include is shown before it.

The lesson is a stage's root, kernels/ and ladder/. README.md, CMakeLists.txt
and pictures are no part of the diff, nor are lines that begin with "namespace
stage". A file that is gone is named in a line.
"""

import argparse
import base64
import dataclasses
import difflib
import functools
import html
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap

from repo import diff_check

try:
    import markup
except ImportError:
    markup = None  # what is printed needs none of it

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The order in which files are read, unless notes give another. A folder stands for everything in it.
READING_ORDER = [
    "kv_cache_manager.h", "kv_cache_manager.cpp", "block_copy.h", "kv_cache.h", "kv_cache.cpp", "attention.h",
    "attention.cpp", "batch.h", "batch.cpp", "engine_options.h", "runner.h", "cpu_runner.h", "cpu_runner.cpp",
    "gpu_runner.h", "make_runner.h", "make_runner.cpp", "engine.h", "engine.cpp", "decoding.h", "decoding.cpp",
    "prefix_cache.h", "prefix_cache.cpp", "scheduler.h", "scheduler.cpp", "step.h", "step.cpp", "step_reporter.h", "step_reporter.cpp",
    "main.cpp", "kernels/page_layout.h", "kernels/kernels.h", "kernels/", "ladder/", "demo/",
    "demo/pictures.h", "demo/pictures.cpp", "serve/", "production/",
]
NAMESPACE_LINE = re.compile(r"^namespace stage")
INSTALL = ("needs markdown-it-py and pygments: sudo apt-get install python3-markdown-it python3-pygments, or "
           "python3 -m pip install markdown-it-py pygments")
HUNK_HEADER = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@ ?(.*)$")
MARKER = re.compile(r"^\s*<!--\s*hunk(?::\s*(?P<file>\S+)(?:\s+(?P<text>.*?))?|\s+end)\s*-->\s*$")
ALMOST_MARKER = re.compile(r"^\s*<!--\s*hunks?\b")
LADDER = "ladder/"
LADDER_STEP = re.compile(r"(step|prompt)(\d+)_\w+\.cu")


class DiffError(Exception):
    """The tools or the notes are wrong. The message is one line."""


class UsageError(DiffError):
    """The command line is wrong."""


# ---------------------------------------------------------------------------------------------------------------------
# The diff


@dataclasses.dataclass
class Line:
    kind: str  # "+", "-" or " "
    text: str
    old: int = 0  # line numbers; 0: not in that stage
    new: int = 0
    coloured: list = dataclasses.field(default=None, compare=False, repr=False)  # as markup.colour_lines() has it

    def html(self, marked=()):
        return markup.code_html(self.coloured or [("", self.text)], marked)


@dataclasses.dataclass
class Piece:
    """The unit that a note stands before: changes without an unchanged line between them, and the lines after."""
    lines: list
    notes: list = dataclasses.field(default_factory=list)

    def changed(self):
        return [line.text for line in self.lines if line.kind != " "]


@dataclasses.dataclass
class Hunk:
    heading: str  # the function, as git finds it
    lines: list
    raw: list = dataclasses.field(default_factory=list)  # git's lines, including namespace lines beside a change
    pieces: list = dataclasses.field(default_factory=list)
    has_note: bool = False

    def first_line(self):
        return next((line.new or line.old for line in self.lines if line.kind != " "), 0)


@dataclasses.dataclass
class File:
    name: str
    kind: str  # "changed", "new" or "gone"
    hunks: list
    notes: list = dataclasses.field(default_factory=list)  # on the file as a whole
    paths: tuple = (None, None)  # of the earlier and the later one

    def count(self, kind):
        return sum(line.kind == kind for hunk in self.hunks for line in hunk.raw)

    def size(self):
        if self.kind == "changed":
            return f"+{self.count('+')} -{self.count('-')}"
        count = self.count("+") or self.count("-")
        return f"{self.kind}, {count} {'line' if count == 1 else 'lines'}"

    def is_core(self):
        return "/" not in self.name

    def is_lesson(self):
        return diff_check.is_lesson(self.name)


def is_shown(name):
    return not name.endswith((".md", ".svg", ".png")) and pathlib.PurePosixPath(name).name != "CMakeLists.txt"


def git_diff(before, after, *options):
    """git's own comparison of two files, without unchanged lines. These change what git counts, and the manifest of
    tests/repo is counted without them."""
    command = [diff_check.git_program(), "diff", "--no-index", "--no-color", "--no-ext-diff", "--no-textconv", "-U0", "-I^namespace stage",
               *options, "--", str(before), str(after)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if result.returncode not in (0, 1):
        raise DiffError("git diff failed: " + result.stderr.decode("utf-8", errors="replace").strip())
    return result.stdout.decode("utf-8", errors="replace")


def parse_runs(text):
    """The runs of changes in one file's diff, without an unchanged line inside. A changed line that opens the stage's
    namespace becomes an unchanged one."""
    runs, old, new = [], 0, 0
    for line in text.split("\n"):
        header = HUNK_HEADER.match(line)
        if header:
            # If one side has no lines, git names the line before.
            old = int(header.group(1)) + (header.group(2) == "0")
            new = int(header.group(3)) + (header.group(4) == "0")
            runs.append((Hunk("" if NAMESPACE_LINE.match(header.group(5)) else header.group(5), []), old, new))
        elif runs and line[:1] in ("+", "-"):
            kind, content = line[0], line[1:]
            runs[-1][0].raw.append(Line(kind, content, old if kind == "-" else 0, new if kind == "+" else 0))
            if not NAMESPACE_LINE.match(content):
                runs[-1][0].lines.append(runs[-1][0].raw[-1])
            elif kind == "+":
                runs[-1][0].lines.append(Line(" ", content, old - 1, new))
            old += kind == "-"
            new += kind == "+"
    return [run for run in runs if any(line.kind != " " for line in run[0].lines)]


def join_runs(runs, text, context=3):
    """The changes with the unchanged lines around them; changes that are close together become one hunk. `text`: the
    lines of the later file."""
    hunks, end, closed = [], 1, True  # `end`: the first line that is not shown yet
    for index, (run, old, new) in enumerate(runs):
        if closed:
            hunks.append(Hunk(run.heading, []))
            end = max(end, new - context)
        hunks[-1].lines += [Line(" ", text[number - 1], old - (new - number), number) for number in range(end, new)]
        hunks[-1].lines += run.lines
        hunks[-1].raw += run.raw
        old, new = (at + sum(line.kind == kind for line in run.raw) for at, kind in ((old, "-"), (new, "+")))
        following = runs[index + 1][2] if index + 1 < len(runs) else None
        closed = following is None or following - new > 2 * context
        end = min(new + context, len(text) + 1) if closed else new
        hunks[-1].lines += [Line(" ", text[number - 1], old + number - new, number) for number in range(new, end)]
    return hunks


def whole_file(path, kind):
    lines = path.read_text(encoding="utf-8").splitlines()
    lines = [Line(kind, text, number if kind == "-" else 0, number if kind == "+" else 0)
             for number, text in enumerate(lines, start=1)]
    return Hunk("", lines, lines)


def cut_into_pieces(hunk):
    """A piece begins where changes begin, and inside an addition with each paragraph; an empty line at the beginning of
    the addition belongs to the paragraph after it."""
    starts = {0}
    for index in range(1, len(hunk.lines)):
        before, line = hunk.lines[index - 1], hunk.lines[index]
        if line.kind != " " and before.kind == " ":
            starts.add(index)
        elif line.kind == "+" and before.kind == "+" and not before.text.strip() and re.match(r"\s*[^\s}]", line.text):
            if any(line.kind != " " and line.text.strip() for line in hunk.lines[max(starts):index]):
                starts.add(index)
    # The unchanged lines at the top belong to the first piece's surroundings: a note stands before them.
    first = next(index for index, line in enumerate(hunk.lines) if line.kind != " ")
    starts = sorted(starts - {first} | {0}) + [len(hunk.lines)]
    return [Piece(hunk.lines[begin:end]) for begin, end in zip(starts, starts[1:])]


def order_key(name, first=()):
    if name in first:
        return (0, first.index(name), name)
    if name in READING_ORDER:
        return (1, READING_ORDER.index(name), name)
    for index, entry in enumerate(READING_ORDER):
        if entry.endswith("/") and name.startswith(entry):
            return (1, index, name)
    # A file that the list lacks comes before the demonstrations if it is at the top, otherwise after everything.
    return (1, READING_ORDER.index("main.cpp") - 0.5 if "/" not in name else len(READING_ORDER), name)


def compare(before, after):
    """The files that differ between two folders, in the usual order."""
    old = set(filter(is_shown, diff_check.list_files(before)))
    new = set(filter(is_shown, diff_check.list_files(after)))
    files = []
    for name in sorted(old | new, key=order_key):
        if name not in old:
            files.append(File(name, "new", [whole_file(after / name, "+")]))
        elif name not in new:
            files.append(File(name, "gone", [whole_file(before / name, "-")]))
        elif (before / name).read_bytes() != (after / name).read_bytes():
            hunks = join_runs(parse_runs(git_diff(before / name, after / name)),
                              (after / name).read_text(encoding="utf-8").splitlines())
            if hunks:
                files.append(File(name, "changed", hunks))
    for file in files:
        file.paths = (before / file.name, after / file.name)
    return cut(files)


def head_length(lines):
    """Of the comment at the head of a file."""
    return next((index for index, line in enumerate(lines) if not line.startswith("//")), len(lines))


def compare_steps(folder, before, after):
    """A step of the ladder and an earlier one, without the comments at their heads and without what is only indented
    otherwise; first, the headers of the ladder that the later one includes and the earlier one does not."""
    texts = [(folder / name).read_text(encoding="utf-8").splitlines() for name in (before, after)]
    included = [dict.fromkeys(re.findall(r'^#include "([^"/]+)"', "\n".join(lines), re.MULTILINE)) for lines in texts]
    files = [File(LADDER + name, "new", [whole_file(folder / LADDER / name, "+")], paths=(None, folder / LADDER / name))
             for name in included[1] if name not in included[0]]
    heads = [head_length(lines) for lines in texts]
    bodies = [lines[head:] for lines, head in zip(texts, heads)]
    with tempfile.TemporaryDirectory() as temporary:
        paths = [pathlib.Path(temporary, name) for name in ("before.cu", "after.cu")]
        for path, lines in zip(paths, bodies):
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        hunks = join_runs(parse_runs(git_diff(*paths, "--ignore-all-space", "--histogram")), bodies[1])
    for line in {id(line): line for hunk in hunks for line in hunk.lines}.values():
        line.old += heads[0] if line.old else 0
        line.new += heads[1] if line.new else 0
    return cut([*files, File(after, "changed", hunks, paths=(folder / before, folder / after))])


def all_new(folder):
    """The files of a folder that is compared with nothing."""
    names = sorted(filter(is_shown, diff_check.list_files(folder)), key=order_key)
    return cut([File(name, "new", [whole_file(folder / name, "+")], paths=(None, folder / name)) for name in names])


def cut(files):
    for hunk in (hunk for file in files for hunk in file.hunks):
        hunk.pieces = cut_into_pieces(hunk) if hunk.lines else []
    return files


# ---------------------------------------------------------------------------------------------------------------------
# The notes


@dataclasses.dataclass
class Note:
    markers: list  # (line number, file, text)
    text: str
    where: str = "README.md"  # the page
    # Files and pieces, in the order of the markers.
    places: list = dataclasses.field(default_factory=list, compare=False, repr=False)


def diff_lines(readme):
    """[(number, line)] of the part called "The diff", and of a section of that name in another part; code blocks may hold
    lines like headings."""
    found, level, fenced = [], 0, False  # level: of the heading that we are below, 0 outside
    for number, line in enumerate(readme.split("\n"), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        heading = None if fenced else re.match(r"^(#{1,3})\s+(?:\d+\.\s+)?(The diff\b)?", line, re.IGNORECASE)
        if heading and (not level or len(heading.group(1)) <= level):
            if level:
                found.append((number, line))  # ends a note
            level = len(heading.group(1)) if heading.group(2) and heading.group(1) != "#" else 0
        elif level:
            found.append((number, line))
    return found


def other_lines(readme):
    """[(number, line)] of all other parts."""
    numbers = {number for number, _ in diff_lines(readme)}
    return [(number, line) for number, line in enumerate(readme.split("\n"), start=1) if number not in numbers]


def read_notes(readme, where="README.md", of_steps=False):
    """of_steps: on steps of the ladder."""
    notes, current, fenced = [], None, False
    for number, line in other_lines(readme) if of_steps else diff_lines(readme):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        marker = None if fenced else MARKER.match(line)
        if of_steps and not fenced and ALMOST_MARKER.match(line) and LADDER not in line:
            current = None
        elif marker and marker.group("file"):
            if current is None or current.text.strip():
                current = Note([], "", where)
                notes.append(current)
            current.markers.append((number, marker.group("file"), (marker.group("text") or "").strip("`")))
        elif marker or (not fenced and line.startswith("#")):
            current = None
        elif not fenced and ALMOST_MARKER.match(line):
            raise DiffError(f"{where}:{number}: expected '<!-- hunk: FILE -->', '<!-- hunk: FILE TEXT -->' or "
                            "'<!-- hunk end -->'")
        elif current is not None:
            current.text += line + "\n"
    for note in notes:
        note.text = re.sub(r"<!-- figures:.*?-->", "", note.text, flags=re.DOTALL).strip()
        if not note.text:
            raise DiffError(f"{where}:{note.markers[0][0]}: no paragraph follows this hunk comment")
    return notes


def matching_pieces(file, text):
    """[(hunk, piece)], the best first: where `rescale` begins a function or a type, then where it is a whole word. It
    counts as a part of a word (rescaled) only if it is a whole word nowhere."""
    pairs = [(hunk, piece) for hunk in file.hunks for piece in hunk.pieces]
    whole = re.compile(r"(?<!\w)" * text[:1].isalnum() + re.escape(text) + r"(?!\w)" * text[-1:].isalnum())
    opens = re.compile(r"^(?:(?:struct|class|enum class)\s+|[^\s#/][^=;]*[\s*&:])" + re.escape(text) + r"(?!\w)(?!.*;\s*$)")

    def distance(pair):
        lines = pair[1].changed()
        return 0 if any(map(opens.search, lines)) else 2 if all(
            line.startswith("#include") for line in lines if whole.search(line)) else 1

    for is_in in (whole.search, lambda line: text in line):
        if found := [(hunk, piece) for hunk, piece in pairs if any(map(is_in, piece.changed()))]:
            return sorted(found, key=distance)
    return [(hunk, hunk.pieces[0]) for hunk in file.hunks
            if text in hunk.heading or any(text in line.text for line in hunk.lines)]


def attach(files, notes):
    """Gives each note to the pieces it explains, and puts the files into the notes' order. Returns (files, errors)."""
    errors, order = [], []
    by_name = {file.name: file for file in files}
    for note in notes:
        for number, name, text in note.markers:
            file = by_name.get(name)
            if file is None:
                errors.append(f"{note.where}:{number}: {name} does not differ between the two stages")
                continue
            if name not in order:
                order.append(name)
            found = matching_pieces(file, text) if text else [(hunk, None) for hunk in file.hunks]
            if not found:
                errors.append(f"{note.where}:{number}: no hunk of {name} contains '{text}'")
            for hunk, _ in found:
                hunk.has_note = True
            place = found[0][1] if text and found else file if not text else None
            if place is not None and not any(note is other for other in place.notes):
                place.notes.append(note)
                note.places.append(place)
    return sorted(files, key=lambda file: order_key(file.name, order)), errors


@dataclasses.dataclass
class Pair:
    before: str
    after: str
    title: str
    files: list
    errors: list
    num_notes: int
    are_apart: bool = False  # not neighbours
    left_out: str = ""  # what is not shown although it belongs to the lesson, and why
    ladder: str = ""  # the stage whose ladder's steps these are

    def core_hunks(self):
        """[(file, hunk)]: those that a note is missed on."""
        return [(file, hunk) for file in self.files for hunk in file.hunks
                if self.ladder or file.is_core() and file.name != "main.cpp"]

    def size(self):
        files = [file for file in self.files if file.is_lesson()]
        kinds = {kind: [file for file in files if file.kind == kind] for kind in ("changed", "new", "gone")}
        added, removed = (sum(file.count(kind) for file in files) for kind in "+-")
        parts = [f"{len(kinds['changed'])} {'file' if len(kinds['changed']) == 1 else 'files'} changed"]
        parts += [f"{len(kinds[kind])} {kind}" for kind in ("new", "gone") if kinds[kind]]
        return f"{', '.join(parts)}: +{added:,} -{removed:,} lines"

    def select(self, names, with_all):
        """Keeps only the files that were asked for: by name, or else the lesson's."""
        if names:
            found = [file for file in self.files if any(is_named(file.name, name) for name in names)]
            for name in names:
                if not any(is_named(file.name, name) for file in found):
                    raise DiffError(f"no file '{name}' differs between {self.before} and {self.after}")
            self.files = found
        elif not with_all:
            self.files = [file for file in self.files if file.is_lesson()]
            if self.are_apart and not self.ladder and any(map(is_for_gpu, self.files)):
                self.files = [file for file in self.files if not is_for_gpu(file)]
                self.left_out = "What only a GPU needs is left out: gpu_runner.h, kernels/. With --all it is shown."


def is_named(file, name):
    """`scheduler` names scheduler.h and scheduler.cpp; `kernels/` names every file in it."""
    path = pathlib.PurePosixPath(file)
    return name in (file, path.name, path.stem) or (name.endswith("/") and file.startswith(name))


def drop_older_notes(file, notes):
    """Leaves a file's pieces the notes of this lesson alone, if it has any on the file. What an older lesson says of the
    whole file stays, unless this one does too."""
    pieces = [piece for hunk in file.hunks for piece in hunk.pieces]
    if any(note in notes for place in [file, *pieces] for note in place.notes):
        for piece in pieces:
            piece.notes = [note for note in piece.notes if note in notes]
    if any(note in notes for note in file.notes):
        file.notes = [note for note in file.notes if note in notes]


def lesson_pages(folder):
    """README.md and the pages beside it to which it links, in the order of the links."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    names = dict.fromkeys(["README.md", *re.findall(r"\]\(([\w.-]+\.md)(?:#[^)]*)?\)", text)])
    return [folder / name for name in names if (folder / name).exists()]


def is_for_gpu(file):
    return file.name == "gpu_runner.h" or file.name.startswith(("kernels/", "ladder/"))


def read_pair(root, before, after):
    """Between neighbours, every note has to find its hunk. For stages further apart, the notes come from the lessons of
    all stages after the first, and only those count whose lines are still there: the last lesson's that has any."""
    files = compare(root / before, root / after)
    stages = diff_check.find_stages(root)
    lessons = stages[stages.index(before) + 1:stages.index(after) + 1]
    title, errors, num_notes = after, [], 0
    for lesson in lessons:
        pages = [(f"{lesson}/{path.name}", path.read_text(encoding="utf-8")) for path in lesson_pages(root / lesson)]
        heading = re.search(r"^# (.+)$", pages[0][1], re.MULTILINE) if pages else None
        title = heading.group(1) if heading else lesson
        try:
            notes = [note for where, text in pages for note in read_notes(text, where)]
        except DiffError as error:
            errors.append(str(error))
            notes = []
        files, more = attach(files, notes)
        errors += more if len(lessons) == 1 else []
        num_notes += len(notes)
        for file in files:
            drop_older_notes(file, notes)
    return Pair(before, after, title, files, errors, num_notes, len(lessons) > 1)


def ladder_folder(root):
    """The stage that has the ladder, or None."""
    return next((root / stage for stage in diff_check.find_stages(root) if (root / stage / LADDER).is_dir()), None)


def ladder_steps(folder, kind):
    """{number: file}; kind: "step" or "prompt"."""
    found = {path.name: LADDER_STEP.fullmatch(path.name) for path in (folder / LADDER).glob(kind + "*.cu")}
    return {int(match.group(2)): LADDER + name for name, match in sorted(found.items()) if match}


def ladder_neighbours(root):
    """[(kind, number, number)]"""
    folder = ladder_folder(root)
    steps = [(kind, sorted(ladder_steps(folder, kind))) for kind in ("step", "prompt")] if folder else []
    return [(kind, *pair) for kind, numbers in steps for pair in zip(numbers, numbers[1:])]


def ladder_notes(folder):
    return [note for path in lesson_pages(folder)
            for note in read_notes(path.read_text(encoding="utf-8"), f"{folder.name}/{path.name}", of_steps=True)]


def head_note(file, where):
    """The comment at the head of a step's file: its reasons and figures."""
    lines = file.paths[1].read_text(encoding="utf-8").splitlines()
    lines = [line[3:] for line in lines[:head_length(lines)]]
    text = "\n".join(lines) + "\n"
    text = re.sub(r"(?m)((?:^    .*\n)+)", lambda drawing: f"```\n{textwrap.dedent(drawing.group(1))}```\n", text)
    return Note([], text.strip(), where, [file])


def read_steps(root, kind, before, after):
    """Between neighbours, every note on the later step's files has to find its hunk."""
    folder = ladder_folder(root)
    steps = ladder_steps(folder, kind)
    files = compare_steps(folder, steps[before], steps[after])
    names = [file.name for file in files]
    notes, errors = [], []
    try:
        notes = [dataclasses.replace(note, markers=own) for note in ladder_notes(folder)
                 if (own := [marker for marker in note.markers if marker[1] in names])]
    except DiffError as error:
        errors.append(str(error))
    _, more = attach(files, notes)  # which would put the files into the notes' order
    are_apart = sorted(steps).index(after) - sorted(steps).index(before) > 1
    files[-1].notes.insert(0, head_note(files[-1], f"{folder.name}/README.md"))
    title = ("The prompts' ladder" if kind == "prompt" else "The ladder") + f", step {after}"
    return Pair(*(pathlib.PurePath(steps[number]).name for number in (before, after)), title, files,
                errors + ([] if are_apart else more), len(notes), are_apart, ladder=folder.name)


def stray_ladder_notes(root):
    """Errors: notes on files that no step's diff shows."""
    shown = {file.name for pair in ladder_neighbours(root) for file in read_steps(root, *pair).files}
    return [f"{note.where}:{number}: {name} is no step of the ladder after another"
            for note in (ladder_notes(ladder_folder(root)) if shown else []) for number, name, _ in note.markers if name not in shown]


# ---------------------------------------------------------------------------------------------------------------------
# On a terminal


class NotesToShow:
    """Each note is shown once: at the first of its markers whose file is among these."""

    def __init__(self, files):
        places = [place for file in files for place in [file, *(piece for hunk in file.hunks for piece in hunk.pieces)]]
        self.homes = {}  # the list of notes at a place, by the note that is shown there
        for note in (note for place in places for note in place.notes):
            self.homes[id(note)] = next(home.notes for home in note.places
                                        if any(home is place for place in places) and
                                        any(note is other for other in home.notes))

    def __call__(self, notes):
        return [note for note in notes if self.homes[id(note)] is notes]


class Paint:
    CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}

    def __init__(self, on):
        self.on = on

    def __call__(self, text, *styles):
        if not self.on or not text:
            return text
        return "".join(f"\x1b[{self.CODES[style]}m" for style in styles) + text + "\x1b[0m"


def table_cells(line):
    cells = re.sub(r"(`[^`]*`)", lambda m: m.group(1).replace("|", "\x01"), line.strip().strip("|"))
    return [cell.strip().replace("\x01", "|").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", cells)]


def pad_table(rows):
    """Markdown's table with its columns in line."""
    cells = [table_cells(row) for row in rows]
    widths = [max((len(row[column]) for row in cells[:1] + cells[2:] if column < len(row)), default=0)
              for column in range(len(cells[0]))]
    for index, row in enumerate(cells):
        padded = []
        for cell, width, rule in zip(row, widths, cells[1]):
            padded.append("-" * max(width, 1) if index == 1 else cell.rjust(width) if rule.endswith(":") else cell.ljust(width))
        yield "  ".join(padded).rstrip()


def note_lines(note, width, paint):
    """The note, wrapped; code blocks and tables stay as they are."""
    bar = paint("│", "yellow") + " "
    result, paragraph, table, fenced = [], [], [], False

    def flush():
        if paragraph:
            joined = " ".join(line.strip() for line in paragraph)
            joined = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", joined)
            indent = re.match(r"(?:[-*]|\d+\.)\s+", joined)
            for line in textwrap.wrap(joined, width - 2, subsequent_indent=" " * (indent.end() if indent else 0),
                                      break_long_words=False, break_on_hyphens=False):
                if paint.on:
                    line = re.sub(r"\*\*(.+?)\*\*", lambda m: paint(m.group(1), "bold"), line)
                    line = re.sub(r"`([^`]+)`", lambda m: paint(m.group(1), "cyan"), line)
                result.append(bar + line)
            paragraph.clear()
        if len(table) > 1:
            result.extend(bar + row for row in pad_table(table))
        table.clear()

    for line in note.text.split("\n"):
        if line.lstrip().startswith("```"):
            flush()
            fenced = not fenced
        elif fenced:
            result.append(bar + "    " + paint(line, "cyan"))
        elif line.lstrip().startswith("|"):
            if not table:
                flush()
            table.append(line)
        elif re.match(r"\s*<!--.*-->\s*$", line):
            continue
        elif not line.strip():
            flush()
            result.append(bar.rstrip())
        else:
            if re.match(r"\s*(?:[-*]|\d+\.)\s", line):
                flush()
            paragraph.append(line)
    flush()
    return result


def print_pair(pair, paint, width):
    text_width = min(width, 100)
    yield paint(pair.title, "bold")
    yield f"{pair.before} -> {pair.after}: {pair.size()}"
    yield ""
    if pair.left_out:
        yield pair.left_out
        yield ""
    column = max((len(file.name) for file in pair.files), default=0)
    for file in pair.files:
        num_notes = len({id(note) for note in file.notes} |
                        {id(note) for hunk in file.hunks for piece in hunk.pieces for note in piece.notes})
        remark = f"   {num_notes} {'note' if num_notes == 1 else 'notes'}" if num_notes else ""
        yield f"  {file.name:<{column}}  {file.size():>15}{remark}"
    if not pair.num_notes:
        yield ""
        yield paint("  The lesson has no notes on these changes yet.", "dim")
    notes = NotesToShow(pair.files)
    for file in pair.files:
        yield ""
        yield paint("═" * text_width, "blue")
        yield paint(file.name, "bold") + paint(f"   {file.size()}", "dim")
        for note in notes(file.notes):
            yield from note_lines(note, text_width, paint)
        if file.kind == "gone":
            for piece in (piece for hunk in file.hunks for piece in hunk.pieces):
                for note in notes(piece.notes):
                    yield from note_lines(note, text_width, paint)
            continue
        for hunk in file.hunks:
            yield ""
            if file.kind == "changed":
                yield paint(f"── line {hunk.first_line()}" + (f", in {hunk.heading.strip()}" if hunk.heading else ""), "blue")
            for piece in hunk.pieces:
                for index, note in enumerate(notes(piece.notes)):
                    if index or piece is not hunk.pieces[0]:
                        yield ""
                    yield from note_lines(note, text_width, paint)
                for line in piece.lines:
                    style = {"+": ["green"], "-": ["red"]}.get(line.kind, [])
                    yield paint((line.kind + line.text).rstrip(), *style)
    for error in pair.errors:
        yield ""
        yield paint(f"error: {error}", "red")


# ---------------------------------------------------------------------------------------------------------------------
# As a page


WORDS = re.compile(r"\w+|\s+|.")


def colour(file):
    """Gives the lines their colours: those that they have in the whole file, for a comment may begin above a hunk."""
    old, new = ([] if kind == file.kind else markup.colour_lines(path.read_text(encoding="utf-8"), file.name)
                for kind, path in zip(("new", "gone"), file.paths))
    for line in (line for hunk in file.hunks for line in hunk.lines):
        line.coloured = old[line.old - 1] if line.kind == "-" else new[line.new - 1]


@functools.lru_cache(maxsize=None)
def similarity(old, new):
    if not old.strip() or not new.strip():
        return 0.0
    matcher = difflib.SequenceMatcher(None, WORDS.findall(old), WORDS.findall(new), autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() > 0.5 else 0.0


def changed_parts(old, new):
    """Ranges of both lines that the other one does not have."""
    old_words, new_words = WORDS.findall(old), WORDS.findall(new)
    parts = ([], [])
    matcher = difflib.SequenceMatcher(None, old_words, new_words, autojunk=False)
    for tag, *ranges in matcher.get_opcodes():
        if tag != "equal":
            for side, words in enumerate((old_words, new_words)):
                begin, end = ranges[2 * side], ranges[2 * side + 1]
                offset = len("".join(words[:begin]))
                if end > begin:
                    parts[side].append((offset, offset + len("".join(words[begin:end]))))
    return parts


def align(old, new):
    """Removed and added lines side by side: pairs of those that resemble each other, in order, with None for a gap."""
    if len(old) * len(new) > 20000:
        return [(line, None) for line in old] + [(None, line) for line in new]
    best = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i in range(len(old) - 1, -1, -1):
        for j in range(len(new) - 1, -1, -1):
            alike = similarity(old[i].text, new[j].text)
            best[i][j] = max(best[i + 1][j], best[i][j + 1], best[i + 1][j + 1] + alike if alike > 0.5 else 0.0)
    rows, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        alike = similarity(old[i].text, new[j].text)
        if alike > 0.5 and best[i][j] == best[i + 1][j + 1] + alike:
            rows.append((old[i], new[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            rows.append((old[i], None))
            i += 1
        else:
            rows.append((None, new[j]))
            j += 1
    rows += [(line, None) for line in old[i:]] + [(None, line) for line in new[j:]]
    # A gap on the left beside a gap on the right says nothing: put both lines into one row.
    filled = []
    for row in rows:
        if filled and row[0] is None and filled[-1][1] is None and filled[-1][0] is not None:
            index = len(filled)
            while index > 0 and filled[index - 1][1] is None and filled[index - 1][0] is not None:
                index -= 1
            filled[index] = (filled[index][0], row[1])
        else:
            filled.append(row)
    return filled


def side_by_side(lines):
    rows, index = [], 0
    while index < len(lines):
        if lines[index].kind == " ":
            rows.append((lines[index], lines[index]))
            index += 1
            continue
        end = index
        while end < len(lines) and lines[end].kind != " ":
            end += 1
        run = lines[index:end]
        rows += align([line for line in run if line.kind == "-"], [line for line in run if line.kind == "+"])
        index = end
    return rows


def marks_of(rows):
    """{id of a line: its changed parts}, for pairs that are alike."""
    marks = {}
    for old, new in rows:
        if old is not None and new is not None and old is not new and similarity(old.text, new.text) > 0.5:
            marks[id(old)], marks[id(new)] = changed_parts(old.text, new.text)
    return marks


def line_class(line):
    return {"+": "add", "-": "del", " ": "same"}[line.kind]


# The lengths of lines, in characters, for which a box of code side by side needs a window of its own width
# (window_for); in a narrower window it is shown as one column. Each length has a rule in the page's style sheet.
LINE_LENGTHS = range(60, 131, 10)
NUM_FIRST = 5  # places that a reader is sent to first


def window_for(length):
    return round(2 * (7.13 * length + 68) + 50)  # two columns of 0.74rem, their numbers and padding; margins


def line_length(lines):
    longest = max((len(line.text.expandtabs(2)) for line in lines), default=0)
    return next((length for length in LINE_LENGTHS if longest <= length), LINE_LENGTHS[-1])


def piece_html(piece, kind):
    if kind != "changed":
        code = "".join(f'<span class="line {line_class(line)}"><b>{line.new or line.old}</b>{line.html() or " "}</span>'
                       for line in piece.lines)
        return f'<div class="scroll"><pre class="whole">{code}</pre></div>'
    rows = side_by_side(piece.lines)
    marks = marks_of(rows)

    def half(line, number):
        if line is None:
            return '<td class="none"></td><td class="none"></td>'
        style = line_class(line)
        return f'<td class="n {style}">{number}</td><td class="{style}">{line.html(marks.get(id(line), ()))}</td>'

    table = "".join(f"<tr>{half(old, old.old if old else 0)}{half(new, new.new if new else 0)}</tr>" for old, new in rows)
    stacked = "".join(f'<span class="line {line_class(line)}"><b>{line.kind}</b>{line.html(marks.get(id(line), ()))}'
                      "</span>" for line in piece.lines)
    return (f'<div class="l{line_length(piece.lines)}"><div class="scroll sides"><table class="sides"><colgroup><col class="n">'
            f'<col><col class="n"><col></colgroup>{table}</table></div>'
            f'<div class="scroll stacked"><pre class="whole">{stacked}</pre></div></div>')


def first_places(files, notes):
    """[(file, hunk, note)], in reading order: where the lesson has most to say, but not of what it leaves out. All of them if
    they are few. `notes`: which of a place's notes are shown there."""
    noted = [(file, hunk, note) for file in files if file.kind != "gone"
             for hunk, place in [(None, file), *((hunk, piece) for hunk in file.hunks for piece in hunk.pieces)]
             for note in notes(place.notes) if "no part of the lesson" not in first_sentence(note)]
    longest = sorted(noted, key=lambda place: len(place[2].text), reverse=True)[:NUM_FIRST]
    return [place for place in noted if any(place is other for other in longest)]


def first_sentence(note):
    """Of the first paragraph, up to a list, a table or code."""
    lines = itertools.takewhile(lambda line: line.strip() and not re.match(r"\s*(```|\||[-*]\s)", line), note.text.split("\n"))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(" ".join(lines).split()))
    return re.sub(r":$", ".", (re.match(r".*?[^.]\.(?:\*\*)?(?=\s|$)", text) or re.match(r".*", text)).group(0))


def first_html(places):
    """Links to the places, each with the first sentence of its note."""
    items = []
    for number, (file, hunk, note) in enumerate(places, start=1):
        where = html.escape(file.name) + (f", <code>{html.escape(hunk.heading.strip())}</code>" if hunk and hunk.heading else "")
        sentence = markup.Markdown().render_inline(first_sentence(note))
        items.append(f'<li><a href="#first-{number}">{where}</a>: {sentence}</li>')
    return f'<section class="first"><h2>Read these first</h2><ol>{"".join(items)}</ol></section>' if items else ""


def file_html(file, markdown, notes, first):
    """first: [(file, hunk, note)]: what is open when the page is; all else is a click away."""
    def notes_html(some):
        for note in notes(some):
            number = next((index for index, place in enumerate(first, start=1) if place[2] is note), 0)
            anchor = f' id="first-{number}"' if number else ""
            yield f"<aside{anchor}>{markdown.render(note.text)}</aside>"

    is_first = any(place[0] is file for place in first)
    parts = [*notes_html(file.notes)]
    for hunk in file.hunks:
        # Pieces without a note between them are one box.
        boxes = []
        for piece in hunk.pieces:
            if boxes and not piece.notes:
                boxes[-1].lines = boxes[-1].lines + piece.lines
            else:
                boxes.append(Piece(piece.lines, piece.notes))
        inside = []
        for box in boxes:
            inside += notes_html(box.notes)
            inside.append(f'<div class="box">{piece_html(box, file.kind)}</div>')
        if file.kind == "changed":
            heading = f"line {hunk.first_line()}" + (f", in <code>{html.escape(hunk.heading)}</code>" if hunk.heading else "")
            added, removed = (sum(line.kind == kind for line in hunk.lines) for kind in "+-")
            is_open = " open" if hunk.has_note or not first else ""
            parts.append(f'<details class="hunk"{is_open}><summary class="where">{heading} <span>+{added} -{removed}</span>'
                         f'</summary>{"".join(inside)}</details>')
        else:
            parts += inside
    return (f'<details id="{html.escape(file.name)}"{" open" if is_first else ""}><summary><h2>{html.escape(file.name)}</h2>'
            f"<span>{html.escape(file.size())}</span></summary>{''.join(parts)}</details>")


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #fff; --text: #1d2127; --soft: #5c6570; --line: #d9dee4; --box: #f7f8fa; --add: #e3f6e8;
  --del: #fdeaea; --mark-add: #a6e3b5; --mark-del: #f6bcbc; --note: #fff7df; --note-line: #d8a400; --link: #0b57b7; --none: #eef0f3;
  --comment: #5d6b5d; --string: #8a3b00; --word: #7a1fa2;
  --type: #0b5f73; --function: #1d4fa0; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #15181c; --text: #dfe4ea; --soft: #98a2ae; --line: #333a43; --box: #1b1f25;
  --add: #14301e; --del: #3a1a1d; --mark-add: #22693a; --mark-del: #7d2f35; --note: #2b2615; --note-line: #c79a16; --link: #7db4ff;
  --none: #191c21; --comment: #93a893; --string: #e6a877; --word: #d3a0ee;
  --type: #7fcbdd; --function: #9dc1ff; }} }}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; }}
body {{ margin: 0 auto; max-width: 2000px; padding: 1.5rem; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }}
h1 {{ margin: 0; font-size: 1.6rem; line-height: 1.25; }}
a {{ color: var(--link); }}
code, pre, table.sides {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
code {{ font-size: .9em; background: color-mix(in srgb, var(--soft) 14%, transparent); border-radius: 3px; padding: .05em .25em; }}
.lead {{ color: var(--soft); margin: .3rem 0 1rem; }}
nav {{ columns: 22rem; column-gap: 2rem; margin-bottom: 1.5rem; font-size: .9rem; }}
nav a {{ display: flex; justify-content: space-between; gap: 1rem; break-inside: avoid; text-decoration: none; padding: .1rem 0; }}
nav a:hover {{ text-decoration: underline; }}
nav span {{ color: var(--soft); white-space: nowrap; }}
details {{ border-top: 1px solid var(--line); padding: .2rem 0 .6rem; }}
summary {{ cursor: pointer; position: sticky; top: 0; z-index: 1; background: var(--page); padding: .5rem 0; }}
summary h2 {{ display: inline; font: 600 1.05rem ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
summary span {{ color: var(--soft); font-size: .9rem; margin-left: .8rem; white-space: nowrap; }}
aside {{ background: var(--note); border-left: 4px solid var(--note-line); border-radius: 0 6px 6px 0; padding: .15rem 1rem;
  margin: .8rem 0 .5rem; width: fit-content; max-width: min(100%, 78rem); scroll-margin-top: 3.5rem; }}
aside p, aside ul, aside ol {{ margin: .6rem 0; max-width: 52rem; }}
aside pre {{ margin: 0; width: max-content; min-width: 100%; }}
aside pre code {{ background: none; padding: 0; }}
aside .scroll {{ margin: .6rem 0; }}
aside pre {{ font-size: .82rem; background: var(--page); border: 1px solid var(--line); border-radius: 5px; padding: .6rem .8rem; }}
aside img {{ max-width: 100%; height: auto; background: #fff; border-radius: 5px; }}
.first ol {{ margin: .3rem 0 1.2rem; max-width: 60rem; }}
.first h2 {{ font-size: 1.05rem; margin: 0; }}
details.hunk {{ border-top: 0; padding: 0; }}
summary.where {{ position: static; color: var(--soft); font-size: .85rem; margin: .6rem 0 .3rem; padding: 0; }}
.box {{ border: 1px solid var(--line); border-radius: 6px; background: var(--box); overflow: hidden; margin-bottom: .5rem; }}
.scroll {{ overflow-x: auto; max-width: 100%; }}
table.sides {{ width: 100%; min-width: max-content; border-collapse: collapse; font-size: .74rem; line-height: 1.5; }}
table.sides col {{ width: calc(50% - 3.2rem); }}
table.sides col.n {{ width: 3.2rem; }}
table.sides td {{ vertical-align: top; white-space: pre; padding: 0 .5rem; tab-size: 2; }}
table.sides td.n {{ text-align: right; color: var(--soft); user-select: none; padding: 0 .5rem 0 0; }}
table.sides td:nth-child(3) {{ border-left: 1px solid var(--line); }}
pre.whole {{ margin: 0; width: max-content; min-width: 100%; font-size: .76rem; line-height: 1.5; }}
pre.whole .line {{ display: block; padding-right: 1rem; }}
pre.whole b {{ display: inline-block; width: 3.2rem; padding-right: .7rem; text-align: right; font-weight: 400; color: var(--soft);
  user-select: none; }}
.stacked {{ display: none; }}
.stacked pre.whole b {{ width: 1.4rem; padding-right: .4rem; }}
.add {{ background: var(--add); }} .del {{ background: var(--del); }} .none {{ background: var(--none); }}
mark {{ color: inherit; border-radius: 2px; }}
.add mark {{ background: var(--mark-add); }} .del mark {{ background: var(--mark-del); }}
i {{ font-style: normal; }} i.c {{ color: var(--comment); }} i.s, i.m {{ color: var(--string); }}
i.w, i.d {{ color: var(--word); }} i.t {{ color: var(--type); }} i.f {{ color: var(--function); }}
aside table {{ border-collapse: collapse; font-size: .9rem; }}
aside th, aside td {{ border: 1px solid var(--line); padding: .2rem .6rem; text-align: left; }}
{widths}
@media (max-width: 900px) {{
  body {{ padding: .9rem; }}
  nav {{ columns: auto; }}
  aside {{ padding: .1rem .8rem; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="lead">{before} → {after}: {size}. In reading order; left as it was, right as it is; what is
closed opens with a click.{no_notes}</p>
{first}
<nav>{contents}</nav>
{files}
</body>
</html>
"""


def page(pair, root, html_file):
    if markup is None:
        raise DiffError(f"--html {INSTALL}")
    folder = root / (pair.ladder or pair.after)

    def is_elsewhere(target):
        return re.match(r"[a-z]+:", target) or target.startswith("#")

    def link(target):
        return target if is_elsewhere(target) else \
            pathlib.Path(os.path.relpath(folder / target, html_file.resolve().parent)).as_posix()

    def picture(target, alt):
        path = folder / target
        if is_elsewhere(target) or path.suffix != ".svg" or not path.is_file():
            return f"<em>{html.escape(alt)}</em>"
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'

    contents = "".join(f'<a href="#{html.escape(file.name)}">{html.escape(file.name)}<span>{file.size()}</span></a>'
                       for file in pair.files)
    for file in pair.files:
        colour(file)
    markdown = markup.Markdown(link, picture)
    notes = NotesToShow(pair.files)
    first = first_places(pair.files, notes)
    widths = "\n".join(f"@media (max-width: {window_for(length)}px) {{ .l{length} > .sides {{ display: none; }} "
                       f".l{length} > .stacked {{ display: block; }} }}" for length in LINE_LENGTHS)
    return PAGE.format(title=html.escape(pair.title), before=pair.before, after=pair.after, size=pair.size(),
                       no_notes=(" " + pair.left_out if pair.left_out else "")
                       + ("" if pair.num_notes else " The lesson has no notes on these changes yet."),
                       contents=contents, first=first_html(first), widths=widths,
                       files="\n".join(file_html(file, markdown, notes, first) for file in pair.files))


# ---------------------------------------------------------------------------------------------------------------------
# The program


def find_steps(root, words):
    """(kind, number, number) and the words after them; words: those after `ladder`."""
    kind, words = ("prompt", words[1:]) if words[:1] == ["prompt"] else ("step", words)
    folder = ladder_folder(root)
    if folder is None:
        raise DiffError("no stage has a ladder")
    numbers = sorted(ladder_steps(folder, kind))
    if len(words) < 2:
        raise UsageError("two steps are compared: python3 tests/stage_diff.py ladder 2 3")
    for word in words[:2]:
        if not word.isdigit() or int(word) not in numbers:
            raise UsageError(f"there is no step '{word}'; the steps are {', '.join(map(str, numbers))}")
    before, after = map(int, words[:2])
    if before >= after:
        raise UsageError("the earlier step comes first")
    return (kind, before, after), words[2:]


def find_pair(root, numbers):
    """The two folders."""
    stages = {int(diff_check.STAGE_FOLDER.match(name).group(1)): name for name in diff_check.find_stages(root)}
    if len(numbers) != 2:
        raise UsageError("two stages are compared: python3 tests/stage_diff.py 3 4")
    chosen = []
    for word in numbers:
        number = re.fullmatch(r"(?:stage)?(\d+)(?:_\w+)?/?", word)
        if not number or int(number.group(1)) not in stages:
            raise UsageError(f"there is no stage '{word}'; the stages are {', '.join(map(str, sorted(stages)))}")
        chosen.append(int(number.group(1)))
    if chosen[0] >= chosen[1]:
        raise UsageError(f"the earlier stage comes first: python3 tests/stage_diff.py {min(chosen)} {max(chosen)}"
                         if chosen[0] != chosen[1] else "a stage does not differ from itself")
    return stages[chosen[0]], stages[chosen[1]]


def read_any(root, words):
    """The pair that a command names, and the words after it."""
    if words[:1] == ["ladder"]:
        steps, rest = find_steps(root, words[1:])
        return read_steps(root, *steps), rest
    return read_pair(root, *find_pair(root, words[:2])), words[2:]


def all_neighbours(root):
    names = diff_check.find_stages(root)
    yield from (read_pair(root, before, after) for before, after in zip(names, names[1:]))
    yield from (read_steps(root, *steps) for steps in ladder_neighbours(root))


def check(pairs, log=print):
    """Returns the errors. A hunk without a note is only reported."""
    errors = []
    for pair in pairs:
        errors += pair.errors
        core = pair.core_hunks()
        without = [(file, hunk) for file, hunk in core if not hunk.has_note]
        log(f"{pair.before} -> {pair.after}: {pair.num_notes} notes; {len(core) - len(without)} of {len(core)} core hunks have one")
        if pair.num_notes:
            for file, hunk in without:
                where = file.kind if file.kind != "changed" else f"line {hunk.first_line()}"
                log(f"  no note: {file.name}, {where}" + (f", in {hunk.heading.strip()}" if hunk.heading else ""))
        for error in pair.errors:
            log(f"  error: {error}")
    return errors


def show(lines, to_pager):
    pager = os.environ.get("PAGER") or shutil.which("less")
    if not to_pager or not pager:
        for line in lines:
            print(line)
        return
    environment = dict(os.environ)
    environment.setdefault("LESS", "FRX")
    process = subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, env=environment)
    try:
        for line in lines:
            process.stdin.write((line + "\n").encode("utf-8"))
        process.stdin.close()
    except BrokenPipeError:
        pass
    process.wait()


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (--help says more)")


def main(arguments=None, root=ROOT):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    usage="stage_diff.py [ladder [prompt]] EARLIER LATER [FILE ...]\n"
                          "                     [--all] [--html FILE | --size] [--color WHEN],\n"
                          "                     or stage_diff.py --check")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="two stages' numbers, the earlier one first, or `ladder`"
                        " and two steps'; after them, names of files or folders: these alone")
    parser.add_argument("--all", action="store_true", help="show what the lesson does not walk through as well")
    parser.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write a page instead of printing")
    parser.add_argument("--size", action="store_true", help="print how large the difference is")
    parser.add_argument("--check", action="store_true", help="check the notes, of all neighbours unless two are named")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colours (default: auto)")
    try:
        options = parser.parse_args(arguments)
        if options.check:
            pairs = [read_any(root, options.stages)[0]] if options.stages else list(all_neighbours(root))
            errors = check(pairs)
            if not options.stages:
                stray = stray_ladder_notes(root)
                print(*(f"error: {error}\n" for error in stray), sep="", end="")
                errors += stray
            print(f"checked the notes on {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'}, {len(errors)} errors")
            return 1 if errors else 0
        pair, names = read_any(root, options.stages)
        pair.select(names, options.all)
        if options.size:
            print(pair.size())
            return 0
        if options.html:
            text = page(pair, root, options.html)
            try:
                options.html.write_text(text, encoding="utf-8")
            except OSError as error:
                raise DiffError(f"can't write {options.html}: {error.strerror}") from error
            print(f"wrote {options.html}")
        else:
            terminal = sys.stdout.isatty()
            colour = options.color == "always" or (options.color == "auto" and terminal and "NO_COLOR" not in os.environ)
            show(print_pair(pair, Paint(colour), shutil.get_terminal_size().columns), terminal)
        for error in pair.errors:
            print(f"error: {error}", file=sys.stderr)
        return 1 if pair.errors else 0
    except (DiffError, diff_check.DiffError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
