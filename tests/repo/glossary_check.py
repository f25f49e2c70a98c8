#!/usr/bin/env python3
"""Checks that the code names of GLOSSARY.md's third column stand in the sources: python3 tests/repo/glossary_check.py"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SOURCES = (".h", ".cpp", ".cu", ".cuh")


def code_names(text):
    """Yields (line number, name) for each name in backticks in the third cell of a table's row."""
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 5:
            for name in re.findall(r"`([^`]+)`", cells[2]):
                yield number, name


def source_words():
    words = set()
    for folder in (ROOT / "common", *ROOT.glob("stage[1-8]_*")):
        for path in folder.rglob("*"):
            if path.suffix in SOURCES:
                words.update(re.findall(r"\w+", re.sub(r"//.*", "", path.read_text(encoding="utf-8"))))
    return words


def main():
    names = list(code_names((ROOT / "GLOSSARY.md").read_text(encoding="utf-8")))
    if len(names) < 30:
        sys.exit(f"GLOSSARY.md: only {len(names)} names found in its tables")
    words = source_words()
    missing = [(number, name) for number, name in names if name not in words]
    for number, name in missing:
        print(f"GLOSSARY.md:{number}: `{name}` stands in no source file of common/ or of a stage")
    print(f"checked {len(names)} names of GLOSSARY.md")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
