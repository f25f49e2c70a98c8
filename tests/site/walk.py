"""The hunks beside a lesson's paragraphs, and the pages with a whole diff."""

import dataclasses
import html
import re

import markup
import stage_diff

MAX_LINES = 56  # of a hunk beside a paragraph; the rest is in the page of the whole diff
MAX_MARKED = 900  # removed times added lines of a run of changes: in a larger one, what changed inside a line is not looked for


@dataclasses.dataclass
class Box:
    """Lines that are shown together."""
    file: stage_diff.File
    heading: str
    lines: list

    def key(self):
        return self.file.name, self.lines[0].old, self.lines[0].new

    def where(self):
        """The function that the changes are in. git names the one before, if they begin with one of their own."""
        first = next((line.text for line in self.lines if line.kind != " " and line.text.strip()), "")
        if begins_something(first):
            return "" if len(self.lines) == sum(len(hunk.lines) for hunk in self.file.hunks) else self.what_begins()
        heading = self.heading.strip().rstrip("{").strip()
        called = re.match(r"[^(]*?([\w:~]+)\(", heading)
        return called.group(1) if called else heading

    def what_begins(self):
        """The first function or type that begins in the lines."""
        for line in self.lines:
            found = line.kind != "-" and (re.match(r"(?:class|struct|enum class) (\w+)", line.text) or
                                          FUNCTION.match(line.text) and re.match(r"[^(]*?([\w:~]+)\(", line.text))
            if found:
                return found.group(1)
        return ""

    def count(self, kind):
        return sum(line.kind == kind for line in self.lines)

    def size(self):
        """(in words, for the eye)"""
        if self.file.kind == "new":
            return f"new, {len(self.lines)} lines"
        return " ".join(f"{sign}{self.count(kind)}" for kind, sign in (("+", "+"), ("-", "−")) if self.count(kind))


FUNCTION = re.compile(r"[A-Za-z][^;=]*[\w:~]+\([^;]*$")  # the first line of a function's body


def begins_something(line):
    """Whether a line of code begins a function, a type or the comment above one."""
    return bool(re.match(r"[A-Za-z/]", line)) and not line.startswith("#")


def is_demo(file):
    """What only shows something, or serves it, is named beside a paragraph: hundreds of lines beside a sentence would hide the lesson's."""
    return file.name.startswith(("demo/", "serve/"))


def anchor_of(file):
    return "file-" + file.name.replace("/", "-")


def boxes_of(pieces):
    """Pieces without a note between them are one box: [(notes, lines)]."""
    boxes = []
    for piece in pieces:
        if boxes and not piece.notes:
            boxes[-1][1].extend(piece.lines)
        else:
            boxes.append((piece.notes, list(piece.lines)))
    return boxes


def first_text(piece):
    return next((line.text for line in piece.lines if line.text.strip()), "")


def boxes_beside(pair, note):
    """What a note speaks of, in the order of its markers. One that matches nothing has been reported when they were read."""
    by_name = {file.name: file for file in pair.files}
    result = {}
    for _, name, text in note.markers:
        file = by_name.get(name)
        places = stage_diff.matching_pieces(file, text) if file and text else []
        if file is None or text and not places:
            continue
        if text:
            hunk, piece = places[0]
            begin = next(index for index, other in enumerate(hunk.pieces) if other is piece)
            end = begin + 1
            while end < len(hunk.pieces) and not hunk.pieces[end].notes and not begins_something(first_text(hunk.pieces[end])):
                end += 1
            around = []
            for line in reversed([line for before in hunk.pieces[:begin] for line in before.lines][-3:]):
                if line.kind != " ":
                    break
                around.insert(0, line)
            # A piece further down may be in another function than git names above the hunk.
            before = [line.text for part in hunk.pieces[:begin] for line in part.lines if line.kind != "-" and FUNCTION.match(line.text)]
            found = [Box(file, before[-1] if before else hunk.heading, around + [line for part in hunk.pieces[begin:end] for line in part.lines])]
        else:
            found = [Box(file, hunk.heading, hunk.lines) for hunk in file.hunks]
        for box in found:
            result.setdefault(box.key(), box)
    # Of a file from above to below, whatever the order in which the note names its parts.
    files = list(dict.fromkeys(box.file.name for box in result.values()))
    ordered = sorted(result.values(), key=lambda box: (files.index(box.file.name), next((line.new for line in box.lines if line.new), box.lines[0].old)))
    return joined(ordered)


def joined(boxes):
    """Boxes that meet or overlap in a hunk are one, unless it would have to be cut."""
    result = []
    for box in boxes:
        places = {id(line): (number, index) for number, hunk in enumerate(box.file.hunks) for index, line in enumerate(hunk.lines)}
        before = result[-1] if result and result[-1].file is box.file else None
        if before and len(before.lines) + len(box.lines) <= MAX_LINES and places[id(before.lines[-1])] >= (places[id(box.lines[0])][0], places[id(box.lines[0])][1] - 1):
            known = {id(line) for line in before.lines}
            result[-1] = dataclasses.replace(before, lines=before.lines + [line for line in box.lines if id(line) not in known])
        else:
            result.append(box)
    return result


def marks_of(lines):
    """{id of a line: ranges of what changed in it}"""
    marks, run = {}, []
    for line in [*lines, stage_diff.Line(" ", "")]:
        if line.kind != " ":
            run.append(line)
            continue
        old, new = ([one for one in run if one.kind == kind] for kind in "-+")
        if old and new and len(old) * len(new) <= MAX_MARKED:
            marks.update(stage_diff.marks_of(stage_diff.side_by_side(run)))
        run = []
    return marks


def lines_html(file, lines):
    """The lines as code; what is new as a whole has no background of its own."""
    marks = marks_of(lines) if file.kind == "changed" else {}
    classes = {"+": "add", "-": "del", " ": "ctx"}
    rows = []
    for line in lines:
        kind = classes[line.kind] if file.kind == "changed" else "ctx"
        sign = line.kind if file.kind == "changed" else ""
        rows.append(f'<span class="{kind}" data-n="{sign}{line.new or line.old}"{markup.indent_style(line.text)}>'
                    f'{markup.breakable(line.html(marks.get(id(line), ())), line.text) or " "}</span>')
    kind = " whole" if file.kind != "changed" else ""
    return f'<pre class="code{kind}"><code>{"".join(rows)}</code></pre>'


def box_html(box, file_link, whole_link, is_open=False):
    """A hunk beside a paragraph."""
    lines, more = box.lines, ""
    if len(lines) > MAX_LINES + 8:
        more = f'<a class="more" href="{html.escape(whole_link)}">{len(lines) - MAX_LINES} more lines</a>'
        lines = lines[:MAX_LINES]
    where = f' <code class="where">{html.escape(box.where())}</code>' if box.where() else ""
    first = next((line.new for line in lines if line.new), 0)
    link = f'<a href="{html.escape(file_link)}{f"#L{first}" if first > 1 else ""}">whole file</a>' if file_link else ""
    return (f'<details class="hunk"{" open" if is_open else ""}><summary><span class="name">{html.escape(box.file.name)}</span>{where} '
            f'<span class="size">{box.size()}</span></summary><div class="box">{lines_html(box.file, lines)}{more}'
            f'<p class="from">{link}</p></div></details>')


def not_shown_html(files):
    """Names in place of hunks: [(file, link)]."""
    def name_html(file, link):
        name = f'<span class="name">{html.escape(file.name)}</span>'
        return (f'<a href="{html.escape(link)}">{name}</a>' if link else name) + f' <span class="size">{html.escape(file.size())}</span>'

    names = ", ".join(name_html(file, link) for file, link in files)
    return f'<p class="not-shown">Not shown: {names}</p>' if names else ""


def first_id(note, first):
    number = next((number for number, other in enumerate(first, start=1) if other is note), 0)
    return f' id="first-{number}"' if number else ""


def file_html(file, notes, render, file_link, first):
    """A file of the page of a whole diff. first: the notes that the page's list sends a reader to."""
    def notes_html(some):
        return "".join(f'<div class="remark"{first_id(note, first)}>{render(note)}</div>' for note in notes(some))

    head = (f'<h2><span class="name">{html.escape(file.name)}</span></h2> <span class="size">{html.escape(file.size())}</span>')
    has_note = bool(file.notes) or any(hunk.has_note for hunk in file.hunks)
    parts = [notes_html(file.notes)]
    for hunk in file.hunks:
        boxes = boxes_of(hunk.pieces)
        inside = "".join(notes_html(some) + f'<div class="box">{lines_html(file, lines)}</div>' for some, lines in boxes)
        if file.kind != "changed":
            parts.append(inside)
            continue
        box = Box(file, hunk.heading, hunk.lines)
        where = f', in <code class="where">{html.escape(box.where())}</code>' if box.where() else ""
        parts.append(f'<details class="hunk"{" open" if hunk.has_note or not has_note else ""}><summary>line {hunk.first_line()}{where} '
                     f'<span class="size">{box.size()}</span></summary>{inside}</details>')
    link = f'<p class="from"><a href="{html.escape(file_link)}">whole file</a></p>' if file_link else ""
    return (f'<details class="of-file" id="{anchor_of(file)}"{" open" if has_note else ""}><summary>{head}</summary>'
            f'{"".join(parts)}{link}</details>')
