#!/usr/bin/env python3
"""Checks what a machine can check of the lessons' prose: python3 tests/repo/prose_check.py

The code names in GLOSSARY.md's third column occur in the sources, no term of its first column is explained twice, and the
words that a reader searches for are among them. No line outside tables and code is longer than 120
characters. The version is the same in CMakeLists.txt, CITATION.cff and at the top of CHANGELOG.md.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SOURCES = (".h", ".cpp", ".cu", ".cuh")
MAX_LENGTH = 120
SEARCHED = ("memory-bound", "compute-bound", "roofline", "arithmetic intensity", "occupancy", "bank conflict", "divergence",
            "in flight", "time to first token", "coalesced", "sector")


def code_names(text):
    """Yields (line number, name) for each name in backticks in the third cell of a table's row."""
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 5:
            for name in re.findall(r"`([^`]+)`", cells[2]):
                yield number, name


def terms(text):
    """Yields (line number, term) for each term of a table's first cell, which may have several, with one stage behind them."""
    for number, line in enumerate(text.splitlines(), start=1):
        cell = line.strip("|").split("|")[0].strip()
        if line.startswith("| ") and re.search(r" \([1-8]\)$", cell):
            for term in cell[:-len(" (1)")].split(", "):
                yield number, term


def source_words():
    words = set()
    for folder in (ROOT / "common", *ROOT.glob("stage[1-8]_*")):
        for path in folder.rglob("*"):
            if path.suffix in SOURCES:
                words.update(re.findall(r"\w+", re.sub(r"//.*", "", path.read_text(encoding="utf-8"))))
    return words


def long_lines(text):
    """Yields (line number, length) of each line of prose that is too long."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and len(line) > MAX_LENGTH and not line.startswith("|"):
            yield number, len(line)


def versions():
    for name, pattern in (("CMakeLists.txt", r"^project\(.* VERSION (\S+)"), ("CITATION.cff", r'^version: "(.*)"'),
                          ("CHANGELOG.md", r"^## (\S+)")):
        yield re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE).group(1)


def main():
    problems = []
    if len(set(versions())) > 1:
        problems.append(f"CMakeLists.txt, CITATION.cff and CHANGELOG.md have the versions {', '.join(versions())}")
    glossary = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
    names = list(code_names(glossary))
    if len(names) < 30:
        sys.exit(f"GLOSSARY.md: only {len(names)} names found in its tables")
    words = source_words()
    problems += [f"GLOSSARY.md:{number}: `{name}` stands in no source file of common/ or of a stage"
                 for number, name in names if name not in words]
    places = {}
    for number, term in terms(glossary):
        if term in places:
            problems.append(f"GLOSSARY.md:{number}: {term} stands in line {places[term]} already")
        places.setdefault(term, number)
    problems += [f"GLOSSARY.md: {term} is missing" for term in SEARCHED if term not in places]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("common/**/*.md"), *ROOT.glob("stage[1-8]_*/*.md")]
    for page in sorted(pages):
        problems += [f"{page.relative_to(ROOT)}:{number}: {length} characters in a line of prose, {MAX_LENGTH} at most"
                     for number, length in long_lines(page.read_text(encoding="utf-8"))]
    for problem in problems:
        print(problem)
    print(f"checked {len(names)} names and {len(pages)} pages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
