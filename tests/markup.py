"""Markdown as HTML, and code in colour: for the pages of stage_diff.py --html and for the site.

    Markdown(link, picture).render(text)        what the lessons' Markdown is as HTML
    colour_lines(text, "attention.cpp")         the file's lines, each as [(class, text), ...]
    code_html(line)                             one of them as HTML

Needs markdown-it-py and pygments. A program that imports it says what to install: INSTALL in stage_diff.py.
"""

import functools
import html
import pathlib
import re

import markdown_it
import pygments.lexers
import pygments.token
import pygments.util

COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)

# ---------------------------------------------------------------------------------------------------------------------
# Code

LEXERS = {".h": "cpp", ".cpp": "cpp", ".cu": "cuda", ".cuh": "cuda", ".md": "text", ".patch": "diff"}
# The first that a token's type is in names its colour: comments, strings, numbers, keywords, types, functions, directives.
CLASSES = [(pygments.token.Comment.Preproc, "d"), (pygments.token.Comment.PreprocFile, "s"), (pygments.token.Comment, "c"),
           (pygments.token.String, "s"), (pygments.token.Number, "m"), (pygments.token.Keyword.Type, "t"),
           (pygments.token.Keyword, "w"), (pygments.token.Name.Builtin, "w"), (pygments.token.Name.Class, "t"), (pygments.token.Name.Function, "f"),
           (pygments.token.Name.Decorator, "d"), (pygments.token.Name.Tag, "w"), (pygments.token.Operator.Word, "w"),
           (pygments.token.Generic.Inserted, "s"), (pygments.token.Generic.Deleted, "d")]
TYPE_NAME = re.compile(r"[A-Z]\w*[a-z]\w*$")


def lexer_for(name):
    options = {"stripnl": False, "ensurenl": False}
    try:
        alias = LEXERS.get(pathlib.PurePosixPath(name).suffix)
        if alias:
            return pygments.lexers.get_lexer_by_name(alias, **options)
        return pygments.lexers.get_lexer_for_filename(name, **options)
    except pygments.util.ClassNotFound:
        return pygments.lexers.get_lexer_by_name("text", **options)


@functools.lru_cache(maxsize=None)
def class_of(kind):
    return next((letter for parent, letter in CLASSES if kind in parent), "")


def colour_lines(text, name):
    """The lines of a file, each as [(class, text), ...]. Neighbours of the same class are one."""
    lines = [[]]
    for kind, value in lexer_for(name).get_tokens(text):
        letter = class_of(kind) or ("t" if kind in pygments.token.Name and TYPE_NAME.match(value) else "")
        for index, part in enumerate(value.split("\n")):
            if index:
                lines.append([])
            if not part:
                continue
            # White space has no colour, so it joins what is before it.
            if lines[-1] and (lines[-1][-1][0] == letter or not part.strip()):
                lines[-1][-1] = (lines[-1][-1][0], lines[-1][-1][1] + part)
            else:
                lines[-1].append((letter, part))
    return lines


def code_html(line, marked=()):
    """line: [(class, text), ...]. `marked`: (begin, end) ranges of its characters, as what changed in it."""
    result, position = [], 0
    for letter, text in line:
        cuts = {0, len(text)}
        for begin, end in marked:
            cuts |= {at - position for at in (begin, end) if 0 < at - position < len(text)}
        cuts = sorted(cuts)
        for begin, end in zip(cuts, cuts[1:]):
            part = html.escape(text[begin:end], quote=False)
            if letter and part.strip():
                part = f'<i class="{letter}">{part}</i>'
            inside = any(first <= position + begin and position + end <= last for first, last in marked)
            result.append(f"<mark>{part}</mark>" if inside else part)
        position += len(text)
    return "".join(result)


def colour_block(text, language):
    """The lines of a fenced block of a lesson."""
    name = {"cpp": "x.cpp", "cuda": "x.cu"}.get(language, "x." + language if language else "x.txt")
    return colour_lines(text.rstrip("\n"), name)


def block_html(text, language):
    return "\n".join(map(code_html, colour_block(text, language)))


MAX_WHOLE = 36  # characters of a line that has room everywhere


UNBROKEN = re.compile(r"\S{22}")
PLACES = re.compile(r"(\(|::|-&gt;|(?<=[\w\])])\.)(?=[A-Za-z_]|<i )")


def breakable(code, text):
    """A line of code as HTML that may be broken inside of what has no space: behind a bracket, a dot or a scope. text: the line."""
    return PLACES.sub(r"\1<wbr>", code) if UNBROKEN.search(text) else code


def indent_style(text):
    """For a line that may be broken: how far it is indented, as an attribute (see pre.code in site.css)."""
    columns = len(text) - len(text.lstrip(" "))
    return f' style="--in:{columns}"' if columns and len(text) > MAX_WHOLE else ""


# ---------------------------------------------------------------------------------------------------------------------
# Markdown


class Markdown:
    """link(target) is the address that a link gets, picture(target, alt) the HTML of a picture. Comments are left out. A
    subclass may add rules to `rules`: {type of a token: function(tokens, index, options, env)}."""

    def __init__(self, link=lambda target: target, picture=lambda target, alt: html.escape(alt)):
        self.link, self.picture = link, picture
        self.parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
        self.rules = self.parser.renderer.rules
        self.rules.update(fence=self.fence, code_block=self.fence, image=self.image, link_open=self.link_open, html_block=self.raw,
                          html_inline=self.raw, table_open=self.table_open, table_close=self.table_close)

    def render_tokens(self, tokens):
        return self.parser.renderer.render(tokens, self.parser.options, {})

    def render(self, text):
        return self.render_tokens(self.parser.parse(text)).strip()

    def render_inline(self, text):
        return self.parser.renderer.render(self.parser.parseInline(text), self.parser.options, {})

    @staticmethod
    def fence(tokens, index, *_):
        token = tokens[index]
        return f'<div class="scroll"><pre><code>{block_html(token.content, token.info.strip())}</code></pre></div>\n'

    def image(self, tokens, index, *_):
        return self.picture(tokens[index].attrs["src"], plain_text(tokens[index].children))

    def link_open(self, tokens, index, *_):
        return f'<a href="{html.escape(self.link(tokens[index].attrs["href"]))}">'

    @staticmethod
    def raw(tokens, index, *_):
        return COMMENT.sub("", tokens[index].content)

    @staticmethod
    def table_open(*_):
        return '<div class="scroll"><table>\n'

    @staticmethod
    def table_close(*_):
        return "</table></div>\n"


def plain_text(tokens):
    """What inline tokens say, without their marks."""
    return "".join(plain_text(token.children) if token.type == "image" else
                   " " if token.type in ("softbreak", "hardbreak") else
                   "" if token.type == "html_inline" else token.content for token in tokens or [])
