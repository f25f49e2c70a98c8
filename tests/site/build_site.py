#!/usr/bin/env python3
"""Makes the course's pages for a browser: python3 tests/site/build_site.py build/site

One page for each page of Markdown that a reader of the course is sent to; beside the paragraphs of a lesson's part "The diff"
stand the hunks that they speak of (see stage_diff.py). Stage 1, which is compared with nothing, has the same comments in its
part "The code". A comment <!-- widget: NAME --> becomes an empty <div> for a widget, if the folder has them: its widgets/
are made by common/cmake/site_widgets.cmake. For each pair of stages, and of steps of the ladder, a page with the whole diff,
and for each file of a stage, and each that a page links to, one with its code. The pages need no server and nothing from elsewhere.

It stands in tests/ because it compares stages, which nothing else may.
"""

import argparse
import dataclasses
import functools
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import stage_diff  # noqa: E402
from repo import diff_check  # noqa: E402

try:
    import glossary
    import lesson
    import markup
    import walk
except ImportError:
    markup = None

ROOT = stage_diff.ROOT
THEME = HERE / "theme"
MAX_PAGE = 440_000  # bytes of a page with a whole diff; a longer one is cut at its folders
MAX_CODE_LINES = 5000
IS_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")
TEXT_SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".py", ".json", ".md", ".txt", ".patch", ".toml", ".sh", ".cmake", ".js", ".css",
                 ".html", ".cfg", ".cff", "")
STAGE_COMMAND = re.compile(r"stage_diff\.py (\d) (\d)")
PICTURE_DARK = re.compile(r"@media \(prefers-color-scheme:dark\)\{\n(.*?)\n\}\n</style>", re.DOTALL)
SYMBOLS = {"theme": '<svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true"><circle cx="8" cy="8" r="6.2" fill="none" '
                    'stroke="currentColor" stroke-width="1.6"/><path d="M8 1.8a6.2 6.2 0 0 1 0 12.4z" fill="currentColor"/></svg>',
           "search": '<svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true"><circle cx="7" cy="7" r="4.6" fill="none" '
                     'stroke="currentColor" stroke-width="1.6"/><path d="M10.5 10.5L14.5 14.5" stroke="currentColor" '
                     'stroke-width="1.8" stroke-linecap="round"/></svg>'}


class SiteError(Exception):
    """The site can't be made. The message is one line."""


@dataclasses.dataclass
class Page:
    source: str  # path of the Markdown in the repository
    target: str  # path in the site
    title: str
    stage: int  # 0: of none
    start: int = 0  # the stage that its code is compared with, if that is not the one before

    def short(self):
        """Its name among the pages of its stage."""
        name = "Lesson" if self.target.endswith("/index.html") else re.sub(r"^Stage \d+(, \w+ page)?: ", "", self.title)
        return name[:1].upper() + name[1:]


def title_of(text):
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    return re.sub(r"[`*]", "", heading.group(1)) if heading else ""


def find_pages(root, stages):
    """The pages in the order in which they are read: the root's, each stage's with what its lesson links to beside it and in
    its folders, then what the course has in common."""
    sources = ["README.md"]
    for stage in stages:
        pages = [path.relative_to(root).as_posix() for path in stage_diff.lesson_pages(root / stage)]
        sources += pages + [path.relative_to(root).as_posix() for path in sorted((root / stage).rglob("*.md"))
                            if path.relative_to(root).as_posix() not in pages]
    sources += [name for name in ("RESULTS.md", "GLOSSARY.md", "CHANGELOG.md", "CONTRIBUTING.md", "common/paged/KERNELS.md",
                                 "common/paged/PRODUCTS.md", "common/paged/FLOAT8.md", "common/model/tales/MODEL.md")
                if (root / name).exists()]
    pages = []
    for source in sources:
        path = pathlib.PurePosixPath(source)
        name = "index" if path.name == "README.md" else path.stem.lower()
        number = diff_check.STAGE_FOLDER.match(path.parts[0])
        pages.append(Page(source, str(path.parent / f"{name}.html"), title_of((root / source).read_text(encoding="utf-8")),
                          int(number.group(1)) if number else 0))
    return pages


def relative(from_page, target):
    return os.path.relpath(target, os.path.dirname(from_page) or ".").replace(os.sep, "/")


@functools.lru_cache(maxsize=None)
def colour_file(text, suffix):
    return markup.colour_lines(text, "file" + suffix)


def first_html(places):
    """places: [(link, file, note)]"""
    items = "".join(f'<li><a href="{link}">{html.escape(file.name)}</a>: '
                    f"{markup.Markdown().render_inline(stage_diff.first_sentence(note))}</li>" for link, file, note in places)
    return f'<section class="first"><h2>Read these first</h2><ol>{items}</ol></section>\n' if items else ""


class Site:
    def __init__(self, root, out):
        self.root, self.out = root, out
        self.stages = diff_check.find_stages(root)
        self.pages = find_pages(root, self.stages)
        self.by_source = {page.source: page for page in self.pages}
        self.template = (THEME / "page.html").read_text(encoding="utf-8")
        self.errors, self.index = [], []  # dead links; what the search finds
        self.code = {}  # path of a file or folder in the repository: path of its page
        self.pictures = set()
        self.written = {}  # page: its bytes
        self.files = set()  # everything that is written
        text = (root / "GLOSSARY.md").read_text(encoding="utf-8") if "GLOSSARY.md" in self.by_source else ""
        self.terms = glossary.read(text)
        self.pairs = {}
        self.ladder = {}  # the command that prints a step of the ladder: its page
        self.diff_parts = {}  # (stage, stage, file): the page that shows what changes in it
        self.tracked = set(self.list_tracked())
        self.has_widgets = (out / "widgets/widgets.js").exists()

    def list_tracked(self):
        """What git knows; without git, what is there. Only such files are shown."""
        try:
            names = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"],
                                   cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout.decode()
            return [name for name in names.splitlines() if (self.root / name).is_file()]
        except (OSError, subprocess.CalledProcessError):
            return diff_check.list_files(self.root)

    def pair_of(self, before, after):
        key = (before, after)
        if key not in self.pairs:
            pair = stage_diff.read_pair(self.root, before, after)
            self.errors += pair.errors
            for file in pair.files:
                stage_diff_colour(file)
            self.pairs[key] = pair
        return self.pairs[key]

    def notes_of(self, page, text, start):
        """The pair that a lesson explains, from stage `start` on, and {number of a comment's line: the note that it belongs to}."""
        folder = self.stages[page.stage - 1]
        if page.stage > 1:
            pair = self.pair_of(self.stages[start - 1], folder)
            notes = stage_diff.read_notes(text, page.source)
        else:
            notes = stage_diff.read_notes(re.sub(r"(?m)^(##\s+(?:\d+\.\s+)?The )code$", r"\1diff", text), page.source)
            files = stage_diff.all_new(self.root / folder)
            files, errors = stage_diff.attach(files, notes)
            self.errors += errors
            pair = stage_diff.Pair("", folder, page.title, files, errors, len(notes))
            for file in files:
                stage_diff_colour(file)
        return pair, {number: note for note in notes for number, _, _ in note.markers}

    # Links.

    def code_page(self, path):
        """The page of a file or folder of the repository, which is written later; "" if it has none."""
        if path in self.code:
            return self.code[path]
        if path in self.tracked:
            if pathlib.PurePosixPath(path).suffix not in TEXT_SUFFIXES:
                return ""
            self.code[path] = f"code/{path}.html"
        else:
            inside = sorted(name for name in self.tracked if name.startswith(path + "/"))
            if not inside:
                return ""
            self.code[path] = f"code/{path}/index.html"
        return self.code[path]

    def resolve(self, page, target):
        """The address of a link in a page of Markdown."""
        if IS_ELSEWHERE.match(target) or target.startswith("#"):
            return target
        path, _, fragment = target.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(page.source), path)).replace(os.sep, "/")
        fragment = "#" + fragment if fragment else ""
        if path in self.by_source:
            other = self.by_source[path]
            if page.start and page.stage == other.stage:  # a comparison with that stage goes on
                other = self.compared(other, page.start)
            return relative(page.target, other.target) + fragment
        found = self.code_page(path)
        if not found:
            self.errors.append(f"{page.source}: nothing is at {target}")
            return target
        return relative(page.target, found) + fragment

    def picture(self, page, target, alt):
        """A picture in a light and a dark version: the switch decides which is shown."""
        path = os.path.normpath(os.path.join(os.path.dirname(page.source), target)).replace(os.sep, "/")
        if not (self.root / path).is_file():
            self.errors.append(f"{page.source}: there is no picture {target}")
            return html.escape(alt)
        self.pictures.add(path)
        alt = html.escape(" ".join(alt.split()))
        if not path.endswith(".svg"):
            return f'<img class="photo" src="{html.escape(relative(page.target, path))}" alt="{alt}" loading="lazy">'
        text = (self.root / path).read_text(encoding="utf-8")
        size = re.search(r'<svg[^>]* width="(\d+)" height="(\d+)"', text)
        # --wide: how wide its writing is meant to be seen; a narrow screen scrolls it (site.css).
        size = f' width="{size.group(1)}" height="{size.group(2)}" style="--wide:{size.group(1)}"' if size else ""
        source = html.escape(relative(page.target, path))
        if not PICTURE_DARK.search(text):
            return f'<img class="card" src="{source}" alt="{alt}"{size} loading="lazy">'
        return (f'<img class="on-light" src="{source}" alt="{alt}"{size} loading="lazy">'
                f'<img class="on-dark" src="{source[:-4]}.dark.svg" alt="{alt}"{size} loading="lazy">')

    # Pages.

    def write(self, target, text):
        path = self.out / target
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode("utf-8")
        path.write_bytes(data)
        self.files.add(target)
        if target.endswith(".html"):
            self.written[target] = len(data)

    def write_page(self, target, title, body, stage=0, contents="", siblings="", around="", kind="lesson", description=""):
        numbers = []
        for name in self.stages:
            number = int(diff_check.STAGE_FOLDER.match(name).group(1))
            page = self.by_source.get(f"{name}/README.md")
            if page:
                current = ' aria-current="true"' if number == stage else ""
                numbers.append(f'<a href="{relative(target, page.target)}" title="{html.escape(page.title)}"{current}>'
                               f'<span class="hidden">Stage </span>{number}</a>')
        extra = [f'<a href="{relative(target, self.by_source[name].target)}">{label}</a>'
                 for name, label in (("RESULTS.md", "Results"), ("GLOSSARY.md", "Glossary")) if name in self.by_source]
        base = relative(target, "index.html")[:-len("index.html")]
        widgets = f'<script defer src="{base}widgets/widgets.js"></script>' if 'class="widget"' in body else ""
        values = {"title": html.escape(title), "site": html.escape(self.by_source["README.md"].title), "base": base,
                  "home": base + "index.html", "numbers": "".join(numbers), "extra": "".join(extra), "body": body,
                  "contents": contents, "siblings": siblings, "around": around, "kind": kind, "widgets": widgets,
                  "description": html.escape(description or title), "theme_symbol": SYMBOLS["theme"],
                  "search_symbol": SYMBOLS["search"]}
        self.write(target, re.sub(r"\{\{(\w+)\}\}", lambda found: values[found.group(1)], self.template))

    def contents_html(self, sections):
        """The table of contents: the parts, and the sections in each."""
        parts = []
        for section in sections:
            link = f'<a href="#{section.anchor}">{html.escape(section.title)}</a>'
            if section.level == 2:
                parts.append([link, []])
            elif section.level == 3 and parts:
                parts[-1][1].append(f"<li>{link}</li>")
        if not parts:
            return ""
        items = "".join(f"<li>{link}{'<ul>' + ''.join(inside) + '</ul>' if inside else ''}</li>" for link, inside in parts)
        return (f'<details class="contents" open><summary>On this page</summary><nav aria-label="On this page">'
                f"<ol>{items}</ol></nav></details>")

    def siblings_html(self, target, stage):
        """The pages of a stage."""
        own = [(page.short(), page.target) for page in self.pages if page.stage == stage]
        if not stage:
            return ""
        own += self.diff_pages(stage)
        own.append(("All files", self.code_page(self.stages[stage - 1])))
        links = "".join(f'<li><a href="{relative(target, address)}"{" aria-current=page" if address == target else ""}>'
                        f"{html.escape(name)}</a></li>" for name, address in own)
        return f'<nav class="siblings" aria-label="Stage {stage}"><p>Stage {stage}</p><ul>{links}</ul></nav>'

    def around_html(self, page):
        """The page before and the page after."""
        at = self.pages.index(page)
        parts = []
        for index, kind, label in ((at - 1, "prev", "Before"), (at + 1, "next", "Next")):
            if 0 <= index < len(self.pages):
                other = self.pages[index]
                parts.append(f'<a class="{kind}" rel="{kind}" href="{relative(page.target, other.target)}"><span>{label}</span> '
                             f"{html.escape(other.title)}</a>")
        return f'<nav class="around" aria-label="Before and after">{"".join(parts)}</nav>'

    def diffs_of(self, stage):
        """The pairs whose diff belongs to a stage: from the one before, and others that its lesson names."""
        folder = self.stages[stage - 1]
        starts = [stage - 1] if stage > 1 else []
        readme = (self.root / folder / "README.md").read_text(encoding="utf-8")
        for before, after in STAGE_COMMAND.findall(readme):
            if int(after) == stage and int(before) not in starts:
                starts.append(int(before))
        return [(self.stages[start - 1], folder, start) for start in starts]

    def diff_target(self, start, stage):
        return f"{self.stages[stage - 1]}/diff-{start}-{stage}.html"

    def diff_pages(self, stage):
        return [(f"The whole diff, {start} → {stage}", self.diff_target(start, stage)) for _, _, start in self.diffs_of(stage)]

    def make_lessons(self, page):
        """A page, and one more for each other stage that its code can be compared with."""
        self.make_lesson(page, page.stage - 1)
        for start in self.other_starts(page):
            self.make_lesson(page, start)

    def compared(self, page, start):
        """The page with its code beside that of stage `start`, if it is there."""
        if start not in self.other_starts(page):
            return page
        return dataclasses.replace(page, target=self.lesson_target(page, start), start=start)

    def other_starts(self, page):
        starts = [start for _, _, start in self.diffs_of(page.stage)][1:] if page.stage else []
        has_notes = starts and stage_diff.read_notes((self.root / page.source).read_text(encoding="utf-8"), page.source)
        return starts if has_notes else []

    def lesson_target(self, page, start):
        return page.target if start == page.stage - 1 else page.target.replace(".html", f"-from-{start}.html")

    def compared_html(self, page, start, text):
        """What stands above the first hunk: with which stage the code is compared, and where all changes are."""
        folder = "/".join(page.target.split("/")[:-1])
        others = [f'<a href="{relative(folder + "/x", self.lesson_target(page, other))}#{walk_anchor(text)}">'
                  f"stage {other}</a>" for _, _, other in self.diffs_of(page.stage) if other != start]
        instead = f" (instead: against {', '.join(others)})" if others else ""
        links = ", ".join(f'<a href="{relative(folder + "/x", target)}">{html.escape(name[0].lower() + name[1:])}</a>'
                          for name, target in self.diff_pages(page.stage))
        return (f'<p class="whole-diff">Beside a paragraph stands what it speaks of: changes against stage {start}{instead}. '
                f"All changes, with these notes: {links}.</p>\n") if links else ""

    def make_lesson(self, page, start):
        own, page = page, self.compared(page, start)
        text = (self.root / page.source).read_text(encoding="utf-8")
        body = lesson.Lesson(lambda target: self.resolve(page, target), lambda target, alt: self.picture(page, target, alt),
                             glossary.Finder(self.terms, page.stage),
                             lambda term: relative(page.target, self.by_source["GLOSSARY.md"].target) + "#" + term.anchor,
                             self.widget_names(text))
        body.is_glossary = page.source == "GLOSSARY.md"
        body.diff_pages = {command: relative(page.target, target) for command, target in self.ladder.items()}
        beside, intro = None, ""
        if page.stage:
            folder = self.stages[page.stage - 1]
            pair, notes = self.notes_of(page, text, start)
            seen = set()

            def box_html(box):
                file_link = self.code_link(page.target, folder, box.file)
                part = self.diff_parts.get((pair.before, pair.after, box.file.name))
                whole = f"{relative(page.target, part)}#{walk.anchor_of(box.file)}" if part else file_link
                return walk.box_html(box, file_link, whole)

            def beside(line):
                note = notes.get(line)
                if note is None or id(note) in seen:
                    return None
                seen.add(id(note))
                boxes = walk.boxes_beside(pair, note)
                shown = "".join(box_html(box) for box in boxes if not walk.is_demo(box.file))
                demo = {box.file.name: box.file for box in boxes if walk.is_demo(box.file)}.values()
                return shown + walk.not_shown_html([(file, self.code_link(page.target, folder, file)) for file in demo])

            intro = self.compared_html(own, start, text)
        rendered = body.body(text, beside, intro)
        if page.source == "README.md":
            rendered = self.with_start(rendered)
        if body.is_glossary:
            self.index += [[page.target, term.anchor, term.name, self.say(term.meaning)] for term in self.terms]
        for section in body.sections if not body.is_glossary and own == page else ():
            self.index.append([page.target, section.anchor, section.title, " ".join(" ".join(section.text).split())])
        first = next((" ".join(" ".join(section.text).split()) for section in body.sections if section.text), "")
        self.write_page(page.target, page.title, rendered, page.stage, self.contents_html(body.sections),
                        self.siblings_html(own.target, page.stage), self.around_html(own),
                        "home" if page.source == "README.md" else "lesson", first[:160])

    def with_start(self, rendered):
        """The first page with a way in, before its second part."""
        cards = []
        for name in self.stages:
            page = self.by_source[f"{name}/README.md"]
            number, _, title = page.title.partition(": ")
            cards.append(f'<li><a href="{page.target}"><span>{html.escape(number)}</span> {html.escape(title[:1].upper() + title[1:])}</a></li>')
        start = f'<nav class="start" aria-label="The stages"><ol>{"".join(cards)}</ol></nav>\n'
        at = rendered.find("<section")
        return rendered[:at] + start + rendered[at:]

    def widget_names(self, text):
        return set(re.findall(r"^\s*<!--\s*widget:\s*([\w-]+)\s*-->\s*$", text, re.MULTILINE)) if self.has_widgets else ()

    def code_link(self, target, folder, file):
        return relative(target, self.code_page(f"{folder}/{file.name}")) if file.kind != "gone" else ""

    def make_diff(self, before, after, start, stage):
        pair = self.pair_of(before, after)
        target = self.diff_target(start, stage)
        files = [file for file in pair.files if file.is_lesson()]
        if pair.are_apart:
            files = [file for file in files if not stage_diff.is_for_gpu(file)]
        gone = [file for file in files if file.kind == "gone"]
        files = [file for file in files if file.kind != "gone"]
        notes = stage_diff.NotesToShow(files)
        sources = {note.where: self.by_source[note.where] for file in files for place in
                   [file, *(piece for hunk in file.hunks for piece in hunk.pieces)] for note in place.notes}
        groups = {}
        sources = {where: self.compared(page, start) for where, page in sources.items()}
        renderers = {where: markup.Markdown(lambda link, page=page: self.resolve_from(page, link, target),
                                            lambda link, alt: f"<em>{html.escape(alt)}</em>") for where, page in sources.items()}
        first = stage_diff.first_places(files, notes)
        for file in files:
            text = walk.file_html(file, notes, lambda note: renderers[note.where].render(note.text),
                                  self.code_link(target, after, file), [note for _, _, note in first])
            groups.setdefault(file.name.partition("/")[0] + "/" if "/" in file.name else "", []).append((file, text))
        size = sum(len(text.encode()) for group in groups.values() for _, text in group)
        parts = {target: [item for group in groups.values() for item in group]}
        if size > MAX_PAGE:
            parts = {target if not name else target.replace(".html", f"-{name.strip('/')}.html"): group
                     for name, group in groups.items()}
        where = {file.name: part for part, group in parts.items() for file, _ in group}
        self.diff_parts.update({(before, after, name): part for name, part in where.items()})
        rows = "".join(f'<li><a href="{{}}#{walk.anchor_of(file)}">{html.escape(file.name)}</a> <span class="size">'
                       f"{html.escape(file.size())}</span></li>" for file in files)
        lead = (f"<h1>From stage {start} to stage {stage}: the whole diff</h1>\n<p>{html.escape(pair.before)} → "
                f"{html.escape(pair.after)}: {html.escape(pair.size())}. In reading order, with the lesson's notes; hunks of which it "
                "has nothing to say are closed, and open with a click.</p>\n")
        page = self.by_source.get(f"{after}/README.md")
        if page:
            readme = (self.root / page.source).read_text(encoding="utf-8")
            lead = lead.replace("with the lesson's notes", f'with <a href="{relative(target, self.lesson_target(page, start))}#{walk_anchor(readme)}">'
                                "the lesson</a>'s notes")
        if pair.are_apart:
            lead += "<p>What only a GPU needs is left out.</p>\n"
        if gone:
            lead += f'<p class="gone">Gone: {", ".join(f"<code>{html.escape(file.name)}</code>" for file in gone)}.</p>\n'
        for part, group in parts.items():
            links = iter([relative(part, where[file.name]) if where[file.name] != part else "" for file in files])
            listed = re.sub(r"\{\}", lambda _, links=links: next(links), rows)
            places = [(f'{relative(part, where[file.name]) if where[file.name] != part else ""}#first-{number}', file, note)
                      for number, (file, _, note) in enumerate(first, start=1)]
            body = lead + first_html(places) + f'<ul class="files">{listed}</ul>\n' + "\n".join(text for _, text in group)
            self.write_page(part, f"From stage {start} to stage {stage}", body, stage, "", self.siblings_html(target, stage),
                            "", "diff")

    def make_ladder(self):
        """A page for each step of the ladder: its diff to the step before."""
        for kind, before, after in stage_diff.ladder_neighbours(self.root):
            pair = stage_diff.read_steps(self.root, kind, before, after)
            self.errors += pair.errors
            words = f"{'prompt ' if kind == 'prompt' else ''}{before} {after}"
            target = f"{pair.ladder}/ladder-{words.replace(' ', '-')}.html"
            self.ladder[f"python3 tests/stage_diff.py ladder {words}"] = target

            def render(note, target=target):
                page = self.by_source[note.where]
                return markup.Markdown(lambda link: self.resolve_from(page, link, target),
                                       lambda link, alt: f"<em>{html.escape(alt)}</em>").render(note.text)

            notes = stage_diff.NotesToShow(pair.files)
            body = (f"<h1>{html.escape(pair.title)}</h1>\n<p>{html.escape(pair.before)} → {html.escape(pair.after)}: "
                    f"{html.escape(pair.size())}, without the comments at their heads and what is only indented otherwise.</p>\n")
            for file in pair.files:
                stage_diff_colour(file)
                body += walk.file_html(file, notes, render, self.code_link(target, pair.ladder, file), [])
            stage = self.stages.index(pair.ladder) + 1
            self.write_page(target, pair.title, body, stage, "", self.siblings_html(target, stage), "", "diff")

    def resolve_from(self, page, link, target):
        """A link of a page's note, seen from another page of the same folder."""
        found = self.resolve(page, link)
        if found.startswith("#"):
            return relative(target, page.target) + found
        return found

    def make_code(self, path, target):
        name = pathlib.PurePosixPath(path)
        number = diff_check.STAGE_FOLDER.match(name.parts[0])
        stage = int(number.group(1)) if number else 0
        crumbs = " / ".join(html.escape(part) for part in name.parts)
        if path not in self.tracked:
            names = sorted(other for other in self.tracked if other.startswith(path + "/"))
            items = []
            for other in names:
                page = self.by_source[other].target if other in self.by_source else self.code_page(other)
                inside = html.escape(other[len(path) + 1:])
                items.append(f'<li><a href="{relative(target, page)}">{inside}</a></li>' if page else f"<li>{inside}</li>")
            body = f'<h1 class="path">{crumbs}</h1>\n<ul class="files">{"".join(items)}</ul>'
        else:
            lines = colour_file((self.root / path).read_text(encoding="utf-8"), name.suffix)
            while lines and not lines[-1]:
                lines = lines[:-1]
            shown = lines[:MAX_CODE_LINES]
            texts = ["".join(part for _, part in line) for line in shown]
            rows = "".join(f'<span id="L{number}"{markup.indent_style(text)}>{markup.breakable(markup.code_html(line), text) or " "}</span>'
                           for number, (line, text) in enumerate(zip(shown, texts), start=1))
            rest = f"<p>The first {MAX_CODE_LINES:,} of {len(lines):,} lines.</p>" if len(shown) < len(lines) else ""
            body = f'<h1 class="path">{crumbs}</h1>\n{rest}<pre class="code file"><code>{rows}</code></pre>'
            self.index.append([target, "", path, ""])
        self.write_page(target, path, body, stage, "", self.siblings_html(target, stage) if stage else "", "", "source")

    def make_pictures(self):
        for path in self.pictures:
            (self.out / path).parent.mkdir(parents=True, exist_ok=True)
            if not path.endswith(".svg"):
                shutil.copyfile(self.root / path, self.out / path)
                continue
            text = (self.root / path).read_text(encoding="utf-8")
            dark = PICTURE_DARK.search(text)
            if dark:
                self.write(path[:-4] + ".dark.svg", PICTURE_DARK.sub(lambda found: found.group(1) + "\n</style>", text))
                text = PICTURE_DARK.sub("</style>", text)
            self.write(path, text)

    @staticmethod
    def say(text):
        """Markdown in a line, without its marks."""
        return markup.plain_text(markup.Markdown().parser.parseInline(text)[0].children)

    def make_assets(self):
        style = (THEME / "site.css").read_text(encoding="utf-8")
        # The dark colours stand in it once, for the switch; here they also hold until it is touched.
        dark = re.search(r":root\[data-theme=dark\] \{(.*?)\n\}", style, re.DOTALL).group(1)
        style += f"\n@media screen and (prefers-color-scheme: dark) {{\n:root:not([data-theme=light]) {{{dark}\n}}\n" \
                 ":root:not([data-theme=light]) .on-light { display: none; }\n:root:not([data-theme=light]) .on-dark { display: block; }\n}\n"
        self.write("assets/site.css", style)
        self.write("assets/site.js", (THEME / "site.js").read_text(encoding="utf-8"))
        meanings = {term.name: [term.stage, self.say(term.meaning)] for term in self.terms}
        self.write("assets/glossary.js", "window.siteTerms = " + to_json(meanings) + ";\n")
        pages = {page.target: page.title for page in self.pages}
        self.write("assets/search.js", "window.siteIndex = " + to_json({"pages": pages, "sections": self.index}) + ";\n")

    def forget_old(self):
        """Removes what an earlier run has made and this one has not."""
        listed = self.out / "assets/files.txt"
        old = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
        for name in set(old) - self.files:
            (self.out / name).unlink(missing_ok=True)
        listed.write_text("\n".join(sorted(self.files)) + "\n", encoding="utf-8")

    def make(self):
        for stage in range(1, len(self.stages) + 1):
            for before, after, start in self.diffs_of(stage):
                self.make_diff(before, after, start, stage)
        self.make_ladder()
        for page in self.pages:
            self.make_lessons(page)
        for stage in self.stages:
            self.code_page(stage)
            for name in sorted(self.tracked):
                if name.startswith(stage + "/") and name not in self.by_source:
                    self.code_page(name)
        done = set()
        while len(done) < len(self.code):  # a folder's page names files
            for path, target in list(self.code.items()):
                if path not in done:
                    done.add(path)
                    self.make_code(path, target)
        self.make_pictures()
        self.make_assets()


def walk_anchor(text):
    """Of the part of a lesson that has its code beside it."""
    heading = next((line.lstrip("# ") for line in text.splitlines() if line.startswith("## ") and
                    lesson.WALK_HEADING.match(line.lstrip("# "))), "")
    return lesson.anchor_of(heading, set()) if heading else "main"


def stage_diff_colour(file):
    """stage_diff.colour(), which stages further on ask for with the same files again."""
    sides = [[] if kind == file.kind else colour_file(path.read_text(encoding="utf-8"), path.suffix)
             for kind, path in zip(("new", "gone"), file.paths)]
    for line in (line for hunk in file.hunks for line in hunk.lines):
        line.coloured = sides[0][line.old - 1] if line.kind == "-" else sides[1][line.new - 1]


def to_json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def main(arguments=None, root=ROOT):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where the pages are written")
    options = parser.parse_args(arguments)
    try:
        if markup is None:
            raise SiteError(f"the site {stage_diff.INSTALL}")
        site = Site(root, options.folder.resolve())
        site.make()
        site.forget_old()
    except (SiteError, stage_diff.DiffError, diff_check.DiffError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for error in site.errors:
        print(f"error: {error}", file=sys.stderr)
    largest = max(site.written, key=site.written.get)
    print(f"wrote {len(site.written)} pages to {options.folder}; the largest is {largest}, {site.written[largest] / 1000:.0f} kB; "
          f"begin with {options.folder / 'index.html'}")
    return 1 if site.errors else 0


if __name__ == "__main__":
    sys.exit(main())
