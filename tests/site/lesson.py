"""A page of Markdown as the body of a page of the site."""

import dataclasses
import html
import re

import glossary
import markup
import stage_diff

WIDGET = re.compile(r"^\s*<!--\s*widget:\s*([\w-]+)\s*-->\s*$")
# The part whose paragraphs have their code beside them. Stage 1 is compared with nothing: its code is new.
WALK_HEADING = re.compile(r"^(\d+\.\s+)?The (diff|code)\b", re.IGNORECASE)

MAX_UNBROKEN = 26  # characters of code in a line of text that stay together


@dataclasses.dataclass
class Section:
    level: int
    anchor: str
    title: str
    text: list  # what it says, for the search


def anchor_of(title, taken):
    """GitHub's names for headings, which the pages' links use."""
    base = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    anchor, number = base, 0
    while anchor in taken:
        number += 1
        anchor = f"{base}-{number}"
    taken.add(anchor)
    return anchor


def copy_button(what="command"):
    return f'<button type="button" class="copy" aria-label="Copy the {what}">Copy</button>'


def command_html(command):
    """A line may be broken between words, and not behind the hyphens of an option."""
    return re.sub(r"(?<!\S)-[\w-]+(?!\S)", lambda found: f'<span class="n">{found.group()}</span>', html.escape(command, quote=False))


def console_html(text):
    """A block of commands, each with its button, and what they print."""
    parts, output, command = [], [], None

    def flush():
        if output:
            lines = "\n".join('<span class="gap">…</span>' if line == "..." else html.escape(line, quote=False) for line in output)
            parts.append(f'<div class="scroll"><pre class="out">{lines}</pre></div>')
            output.clear()

    for line in text.rstrip("\n").split("\n"):
        if command is not None:
            command += "\n" + line
        elif line.startswith("$ "):
            flush()
            command = line[2:]
        else:
            output.append(line)
        if command is not None and not command.endswith("\\"):
            parts.append(f'<div class="command"><code>{command_html(command)}</code>{copy_button()}</div>')
            command = None
    flush()
    return f'<div class="console">{"".join(parts)}</div>\n'


def unbroken(text):
    """A number and its unit, and a difference as short as N - 1, stay in a line."""
    return re.sub(r"(?<=\b\w) ([-%]) (?=\d\b)", "\u00a0\\1\u00a0", re.sub(r"(?<=\d)[ \n](?=(?:%|us|ms|ns|B|KB|MB|GB|TB|GB/s)(?!\w))", "\u00a0", text))


class Lesson(markup.Markdown):
    """Renders one page. finder: of glossary.py; `term_link`: the address of a term's explanation."""

    def __init__(self, link, picture, finder, term_link, widgets=()):
        super().__init__(link, picture)
        self.finder, self.term_link, self.widgets = finder, term_link, widgets
        self.rules.update(blockquote_open=self.blockquote_open, blockquote_close=self.blockquote_close, code_inline=self.code_inline, text=self.text,
                          softbreak=lambda *_: "\n", heading_open=self.heading_open)
        self.in_link = 0
        self.rules.update(fence=self.fence, code_block=self.fence)
        self.rules.update(link_open=self.open_link, link_close=self.close_link)
        self.sections = []
        self.box = None  # the kind of the blockquote that is open
        self.is_glossary = False
        self.diff_pages = {}  # a command that prints a diff: the address of the page with it

    # Rules of the renderer.

    def fence(self, tokens, index, *_):
        token = tokens[index]
        if token.info.strip() == "console":
            return console_html(token.content)
        # A formula, which Markdown indents, may be broken at a line's end as code may.
        if token.info.strip() in ("cpp", "cuda") or token.type == "code_block":
            lines = [(line, "".join(text for _, text in line)) for line in markup.colour_block(token.content, token.info.strip())]
            rows = "".join(f'<span{markup.indent_style(text)}>{markup.breakable(markup.code_html(line), text) or " "}</span>'
                           for line, text in lines)
            return f'<div class="scroll listing"><pre class="code"><code>{rows}</code></pre></div>\n'
        code = markup.block_html(token.content, token.info.strip())
        return f'<div class="scroll listing"><pre><code>{code}</code></pre></div>\n'

    def open_link(self, tokens, index, *_):
        self.in_link += 1
        return self.link_open(tokens, index)

    def close_link(self, *_):
        self.in_link -= 1
        return "</a>"

    def text(self, tokens, index, *_):
        content = tokens[index].content
        if self.in_link or tokens[index].meta.get("no terms"):
            return unbroken(html.escape(content, quote=False))
        return "".join(self.term_html(part, term) if term else unbroken(html.escape(part, quote=False))
                       for part, term in self.finder.find(content))

    def term_html(self, text, term):
        return (f'<a class="term" href="{html.escape(self.term_link(term))}" data-term="{html.escape(term.name)}">'
                f"{html.escape(text, quote=False)}</a>")

    def code_inline(self, tokens, index, *_):
        content = tokens[index].content
        kind = ' class="n"' if len(content) <= MAX_UNBROKEN else ""
        code = f"<code{kind}>{html.escape(content, quote=False) if kind else command_html(content)}</code>"
        # The command of a milestone, which is a paragraph.
        if self.box == "milestone" and len(tokens) == 1 and content.startswith("python3 "):
            return f'<span class="do">{code}{copy_button()}</span>'
        return f'<a href="{self.diff_pages[content]}">{code}</a>' if content in self.diff_pages else code

    def blockquote_open(self, tokens, index, *_):
        first = next((token.content for token in tokens[index:] if token.type == "inline"), "")
        self.box = "milestone" if first.startswith("**Milestone") else "preface" if first.startswith("**Before") else "quote"
        return f'<blockquote class="{self.box}">\n'

    def blockquote_close(self, *_):
        self.box = None
        return "</blockquote>\n"

    def table_open(self, *_):
        return '<div class="scroll table"><table>\n'

    @staticmethod
    def heading_open(tokens, index, *_):
        token = tokens[index]
        return f'<{token.tag} id="{token.meta["anchor"]}">'

    # The page.

    def prepare(self, text):
        """The tokens of the page, its headings with their anchors; fills self.sections."""
        tokens = self.parser.parse(text)
        taken, in_table_head = set(), False
        self.sections = [Section(1, "", "", [])]
        for index, token in enumerate(tokens):
            in_table_head = token.type == "thead_open" or in_table_head and token.type != "thead_close"
            if token.type == "heading_open":
                title = markup.plain_text(tokens[index + 1].children)
                token.meta["anchor"] = anchor_of(title, taken)
                self.sections.append(Section(int(token.tag[1]), token.meta["anchor"], title, []))
                for child in tokens[index + 1].children:
                    child.meta["no terms"] = True
            elif token.type == "inline":
                join_text(token)
                if self.is_glossary and tokens[index - 2].type == "tr_open" and tokens[index - 1].type == "td_open":
                    for term in glossary.row_terms(f"| {token.content} | |")[:1]:
                        tokens[index - 1].attrSet("id", term.anchor)
                if self.is_glossary or in_table_head:
                    for child in token.children:
                        child.meta["no terms"] = True
                if tokens[index - 1].type != "heading_open":
                    self.sections[-1].text.append(markup.plain_text(token.children))
            elif token.type in ("fence", "code_block"):
                self.sections[-1].text.append(token.content)
        self.sections = [section for section in self.sections if section.title]
        return tokens

    def body(self, text, beside=None, diff_intro=""):
        """The HTML of the page. beside(line) is what stands beside the paragraphs after the comment in this line, or None;
        diff_intro stands below the heading of that part."""
        parts, walk, is_open = [], None, False
        walk_level = 0  # of the heading of the part or the section that is one
        fenced = [block for block in blocks(self.prepare(text))]
        for block in fenced:
            first = block[0]
            if first.type == "heading_open":
                title, level = markup.plain_text(block[1].children), int(first.tag[1])
                if walk and level <= walk_level:
                    parts.append(walk.close())
                    walk = None
                if level <= 2:
                    parts.append("</section>\n" if is_open else "")
                    is_open = level == 2
                    self.finder.new_section()
                    parts.append(f'<section aria-labelledby="{first.meta["anchor"]}">\n' if is_open else "")
                if walk:
                    walk.end_note()
                elif level <= 2 or level == 3 and WALK_HEADING.match(title):
                    parts.append(self.render_tokens(block))
                    if beside and level > 1 and WALK_HEADING.match(title):
                        parts.append(diff_intro if level == 2 else "")
                        walk, walk_level = Walk(), level
                    continue
            if first.type == "html_block":
                widget = WIDGET.match(first.content)
                if widget and widget.group(1) in self.widgets:
                    (walk.say if walk else parts.append)(f'<div class="widget" data-widget="{widget.group(1)}"></div>\n')
                if walk and stage_diff.MARKER.match(first.content):
                    note = beside(first.map[0] + 1)
                    if note is not None:
                        walk.begin_note(note)
                    elif re.search(r"hunk\s+end", first.content):
                        walk.end_note()
            rendered = self.render_tokens(block)
            if first.type == "html_block" and not rendered.strip():
                continue
            (walk.say if walk else parts.append)(rendered)
        parts.append(walk.close() if walk else "")
        parts.append("</section>\n" if is_open else "")
        return "".join(parts)


def join_text(inline):
    """Makes texts and the line breaks between them one token, in which a term may stand that is broken at a line's end."""
    joined = []
    for token in inline.children:
        if token.type == "softbreak":
            token.type, token.tag, token.content = "text", "", "\n"
        if token.type == "text" and joined and joined[-1].type == "text":
            joined[-1].content += token.content
        else:
            joined.append(token)
    inline.children = joined


def blocks(tokens):
    """The tokens of each block of the page; <details> and what is in it are one."""
    block, depth, inside = [], 0, 0
    for token in tokens:
        block.append(token)
        depth += token.nesting
        if token.type == "html_block":
            inside += token.content.count("<details") - token.content.count("</details")
        if depth == 0 and inside == 0:
            yield block
            block = []
    if block:
        yield block


class Walk:
    """The part "The diff" or "The code": paragraphs on the left, and what each speaks of on the right."""

    def __init__(self):
        self.rows = [["", None]]  # [what is said, what stands beside it]

    def say(self, text):
        self.rows[-1][0] += text

    def begin_note(self, beside):
        if self.rows[-1][0] or self.rows[-1][1] is not None:
            self.rows.append(["", None])
        self.rows[-1][1] = beside

    def end_note(self):
        if self.rows[-1][1] is not None:
            self.rows.append(["", None])

    def close(self):
        rows = [(said, beside) for said, beside in self.rows if said.strip()]
        parts = [f'<div class="walk" style="--rows:{max(len(rows), 1)}">\n']
        for said, beside in rows:
            kind = "say note" if beside else "say"
            parts.append(f'<div class="{kind}">{said}</div>\n')
            if beside:
                files = ", ".join(dict.fromkeys(re.findall(r'<span class="name">([^<]*)</span>', beside)))
                parts.append(f'<aside class="hunks" aria-label="Code: {files}">{beside}</aside>\n')
        return "".join(parts) + "</div>\n"
