"""The terms of GLOSSARY.md, and where a page speaks of them."""

import dataclasses
import re

# Words that also mean something else. These are found on the pages of the stage that introduces the term alone ...
EVERYDAY = {"group", "round", "branch", "split", "merge", "step", "vector", "tile", "panel", "ring", "scale", "stream", "graph",
            "launch", "thread", "lane", "grid", "request", "sequence", "draft", "sink", "kernel", "greedy", "decode", "query",
            "commit", "publish", "reserve"}
# ... and these nowhere: a weight is mostly the model's, a page mostly the page that is being read.
NEVER = {"weight", "value", "key", "length", "score", "page", "plan", "share"}
ROW = re.compile(r"^\|\s*(?P<terms>[^|]+?) \((?P<stage>[1-8])\)\s*\|\s*(?P<meaning>[^|]*?)\s*\|")


@dataclasses.dataclass(frozen=True)
class Term:
    name: str
    stage: int
    meaning: str  # Markdown
    anchor: str


def slug(name):
    return "term-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def names_of(cell):
    """`logical, physical block` is a logical block and a physical block."""
    names = cell.split(", ")
    if " " in names[-1] and all(" " not in name for name in names[:-1]):
        names = [f"{name} {names[-1].split(' ')[-1]}" for name in names[:-1]] + names[-1:]
    return names


def row_terms(line):
    """The terms of a row of the table."""
    row = ROW.match(line)
    if not row:
        return []
    names = names_of(row["terms"])
    meanings = row["meaning"].split("; ")
    if len(meanings) != len(names):
        meanings = [row["meaning"]] * len(names)
    return [Term(name, int(row["stage"]), meaning, slug(names[0])) for name, meaning in zip(names, meanings)]


def read(text):
    return [term for line in text.splitlines() for term in row_terms(line)]


class Finder:
    """Finds the terms in the prose of a page, each once in a section. stage: the page's, or 0 for one that is of none."""

    def __init__(self, terms, stage):
        self.terms = {term.name.lower(): term for term in terms if term.name not in NEVER and
                      (stage == 0 and term.name not in EVERYDAY or term.stage == stage or
                       term.stage < stage and term.name not in EVERYDAY)}
        names = sorted(self.terms, key=len, reverse=True)
        self.pattern = re.compile(r"(?<![\w-])(?P<name>" + "|".join(re.escape(name).replace(r"\ ", r"\s+") for name in names) +
                                  r")(?P<ending>s|es)?(?![\w-])", re.IGNORECASE) if names else None
        self.seen = set()

    def new_section(self):
        self.seen = set()

    def find(self, text):
        """Yields (text, term or None), which together are the text."""
        position = 0
        for match in self.pattern.finditer(text) if self.pattern else ():
            term = self.terms[" ".join(match["name"].lower().split())]
            if term.anchor + term.name in self.seen:
                continue
            self.seen.add(term.anchor + term.name)
            yield text[position:match.start()], None
            yield match.group(0), term
            position = match.end()
        yield text[position:], None
