"""Tests of the site: what its converter makes of the lessons' Markdown, and of all pages their links, sizes, headings and colours."""

import html.parser
import os
import pathlib
import re
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "site"))

import build_site
import stage_diff
from support import needs
from support.temporary_tree import TemporaryTree, output_of

MAX_PAGE = 500_000  # bytes
# Colours of site.css: what stands on what.
BACKGROUNDS = ("page", "panel", "raised", "note", "good", "accent-soft")
CODE = ("text", "comment", "string", "number", "word", "type", "function", "directive")
PAIRS = [*((name, back) for name in ("text", "link") for back in BACKGROUNDS),
         *(("soft", back) for back in ("page", "panel", "raised", "add", "del", "accent-soft", "good")),
         *((name, back) for name in CODE for back in ("page", "panel", "add", "del", "mark-add", "mark-del")),
         ("on-accent", "accent"), ("accent", "page")]
README = """# The course

Two words: a *block* table is one, `block table` is code, and a [block table](#the-course) a link. A block
table again.

[Stage 1](stage1_first/README.md), [Stage 2](stage2_second/README.md#2-the-diff), [code](stage2_second/table.h)

## More

![Two
rows](stage2_second/rows.svg)

Again block tables, and a table of weights.

<!-- figures: nothing -->
    indented

<!-- widget: pool -->

1. one

```console
$ ls a \\
    b
...
a
$ pwd
```

<details><summary>Answer</summary>

**Yes.**

</details>
"""
LESSON = """# Stage 2: sums

> **Before you start** read stage 1.

## 1. First lines

> **Milestone 1: rows** (5 minutes). Write `rows`.
>
> `python3 tests/exercise.py 2 --test 1`
>
> `python3 tests/exercise.py 2 --test 2` is for later.

## 2. The diff

An introduction.

<!-- hunk: engine.cpp second -->
**The second** function gives `2 < 3`.

<!-- hunk: table.h -->
A table is *new*.

<!-- hunk end -->
Not a note.

## 3. By hand
"""
GLOSSARY = """# Glossary

| term | meaning | in the code | in vLLM | in the paper |
| --- | --- | --- | --- | --- |
| block table (1) | the blocks of a *sequence* | `x` | – | – |
| logical, physical block (1) | the n-th of a text; where it lies | `x` | – | – |
| weight (1) | what softmax makes of a score | `x` | – | – |
"""
ENGINE = """#include "engine.h"

int first() {{ return 1; }}

// One,
// two,
// three,
// four,
// five,
// six,
// seven.
int second() {{ return {number}; }}
"""
PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" width="72" height="41" viewBox="0 0 72 41">
<style>
.ink{fill:#1f2328}
@media (prefers-color-scheme:dark){
.ink{fill:#f0f6fc}
}
</style>
</svg>
"""


class Reader(html.parser.HTMLParser):
    """What is wrong with a page's form, and what it names."""
    VOID = {"meta", "link", "img", "input", "br", "col", "circle", "path", "wbr"}

    def __init__(self, text):
        super().__init__()
        self.open, self.problems, self.ids, self.links, self.sources, self.headings = [], [], [], [], [], []
        self.feed(text)
        self.problems += [f"<{tag}> is not closed" for tag in self.open]
        self.problems += [f"the id {name} stands there twice" for name in set(self.ids) if self.ids.count(name) > 1]

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a":
            self.links.append(values.get("href"))
        if tag in ("script", "img") and "src" in values:
            self.sources.append(values["src"])
        if tag == "script" and "src" in values and "defer" not in values:
            self.problems.append(f"{values['src']} holds up the first paint")
        if tag == "link":
            self.sources.append(values["href"])
        if tag == "img" and not values.get("alt", "").strip():
            self.problems.append(f"the picture {values.get('src')} has no text")
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")


def check_page(site, path, readers):
    """What is wrong with a page of a site."""
    page = readers[path]
    problems = list(page.problems)
    if page.headings.count(1) != 1:
        problems.append(f"{page.headings.count(1)} headings of the first order")
    problems += [f"a heading of order {after} follows one of order {before}"
                 for before, after in zip(page.headings, page.headings[1:]) if after > before + 1]
    for source in page.sources:
        if source.startswith("data:"):
            continue
        if ":" in source or not (path.parent / source).resolve().is_file():
            problems.append(f"there is no {source}")
    for link in page.links:
        if not link:
            problems.append("a link leads nowhere")
        elif not re.match(r"https?:", link):
            name, _, fragment = link.partition("#")
            target = pathlib.Path(os.path.normpath(path.parent / name)) if name else path
            if target not in readers:
                problems.append(f"nothing is at {link}")
            elif fragment and fragment not in readers[target].ids:
                problems.append(f"there is no #{fragment} in {target.relative_to(site)}")
    if path.stat().st_size > MAX_PAGE:
        problems.append(f"{path.stat().st_size} bytes")
    return [f"{path.relative_to(site)}: {problem}" for problem in problems]


def luminance(color):
    red, green, blue = (int(color[at:at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    """As WCAG 2 counts it, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


class Folder(TemporaryTree):
    def setUp(self):
        super().setUp()
        self.root, self.out = self.root / "course", self.root / "site"
        for number, stage in ((1, "stage1_first"), (2, "stage2_second")):
            self.write(f"{stage}/CMakeLists.txt", f"add_stage({stage})\n")
            self.write(f"{stage}/README.md", f"# Stage {number}: first\n\nA block table.\n")
            self.write(f"{stage}/engine.cpp", ENGINE.format(number=number))
        self.write("README.md", README)
        self.write("GLOSSARY.md", GLOSSARY)
        self.write("stage2_second/README.md", LESSON)
        self.write("stage2_second/table.h", "int size();\n\n// Rows.\nint rows();\n")
        self.write("stage2_second/rows.svg", PICTURE)

    def run_main(self):
        return output_of(build_site.main, [str(self.out)], self.root)

    def page(self, name):
        status, _, error = self.run_main()
        self.assertEqual((status, error), (0, ""))
        return (self.out / name).read_text(encoding="utf-8")


class WithoutPackages(Folder):
    def test_it_says_what_to_install(self):
        with mock.patch("build_site.markup", None):
            status, _, error = self.run_main()
        self.assertEqual((status, error.count("\n")), (1, 1))
        self.assertIn("error: the site needs markdown-it-py and pygments: sudo apt-get install", error)


@needs.git
@needs.page_packages
class Converter(Folder):
    def test_commands_have_buttons_and_what_they_print_has_none(self):
        text = self.page("index.html")
        self.assertIn('<div class="command"><code>ls a \\\n    b</code><button type="button" class="copy"', text)
        self.assertIn('<pre class="out"><span class="gap">…</span>\na</pre>', text)
        self.assertIn('<div class="command"><code>pwd</code><button', text)

    def test_comments_are_gone_and_indented_code_is_code(self):
        text = self.page("index.html")
        self.assertNotIn("figures", text)
        self.assertIn('<div class="scroll listing"><pre class="code"><code><span>indented</span></code></pre></div>', text)

    def test_an_answer_is_folded(self):
        self.assertIn("<details><summary>Answer</summary>\n<p><strong>Yes.</strong></p>\n</details>", self.page("index.html"))

    def test_terms_are_explained_once_in_a_section_and_in_prose_alone(self):
        text = self.page("index.html")
        found = re.findall(r'<a class="term" href="([^"]*)" data-term="([^"]*)">([^<]*)</a>', text)
        self.assertEqual(found, [("glossary.html#term-block-table", "block table", "block\ntable"),
                                 ("glossary.html#term-block-table", "block table", "block tables")])
        self.assertIn('<tr>\n<td id="term-block-table">block table (1)</td>', self.page("glossary.html"))
        terms = (self.out / "assets/glossary.js").read_text(encoding="utf-8")
        self.assertIn('"block table":[1,"the blocks of a sequence"]', terms)
        self.assertIn('"physical block":[1,"where it lies"]', terms)

    def test_everyday_words_are_terms_in_their_own_stage_alone(self):
        terms = build_site.glossary.read("| group (4) | heads | x | y | z |\n| slot (1) | room | x | y | z |\n")
        for stage, expected in ((0, ["slots"]), (1, ["slots"]), (4, ["group", "slots"]), (5, ["slots"])):
            parts = build_site.glossary.Finder(terms, stage).find("A group of slots")
            self.assertEqual([part for part, term in parts if term], expected, stage)

    def test_a_picture_is_there_for_both_colours(self):
        text = self.page("index.html")
        self.assertIn('<img class="on-light" src="stage2_second/rows.svg" alt="Two rows" width="72" height="41"', text)
        self.assertIn('<img class="on-dark" src="stage2_second/rows.dark.svg" alt="Two rows"', text)
        light, dark = ((self.out / "stage2_second" / name).read_text(encoding="utf-8") for name in ("rows.svg", "rows.dark.svg"))
        self.assertNotIn("@media", light + dark)
        self.assertNotIn("f0f6fc", light)
        self.assertIn(".ink{fill:#f0f6fc}", dark)

    def test_milestones_and_prefaces(self):
        text = self.page("stage2_second/index.html")
        self.assertIn('<blockquote class="preface">', text)
        self.assertIn('<blockquote class="milestone">', text)
        self.assertRegex(text, r'<span class="do"><code>python3 tests/exercise.py 2 <span class="n">--test</span> 1</code><button[^>]*>Copy</button></span></p>')
        self.assertNotIn("<code>rows</code><button", text)
        self.assertRegex(text, r'--test</span> 2</code> is for later')  # no button in a sentence

    def test_hunks_stand_beside_their_paragraphs(self):
        text = self.page("stage2_second/index.html")
        says, asides = re.findall(r'<div class="say note">(.*?)</div>\n<aside', text, re.DOTALL), re.findall(r"<aside.*?</aside>", text, re.DOTALL)
        self.assertEqual(len(says), 2)
        self.assertEqual(len(asides), 2)
        self.assertIn("<strong>The second</strong>", says[0])
        self.assertIn('<span class="name">engine.cpp</span>', asides[0])
        self.assertRegex(asides[0], r'<span class="del" data-n="-12">.*<mark><i class="m">1</i></mark>')
        self.assertRegex(asides[0], r'<span class="add" data-n="\+12">.*<mark><i class="m">2</i></mark>')
        self.assertIn('href="../code/stage2_second/engine.cpp.html#L9"', asides[0])
        self.assertIn("new, 4 lines", asides[1])
        walk = text[text.index('<div class="walk"'):text.rindex("3. By hand")]
        self.assertIn("An introduction.", walk)
        self.assertIn('<div class="say"><p>Not a note.</p>', walk)
        self.assertNotIn("<aside", text[text.index("Not a note"):])

    def test_another_part_may_have_hunks_beside_a_section(self):
        self.write("stage2_second/README.md", LESSON.replace("<!-- hunk: table.h -->\nA table is *new*.\n", "") +
                   "\n## Second part\n\nIts idea.\n\n### The diff\n\n<!-- hunk: table.h -->\nA table.\n\n### Results\n\nAs said.\n")
        first, second = self.page("stage2_second/index.html").split('<h2 id="second-part">')
        self.assertEqual(len(re.findall('<aside class="hunks" aria-label="Code: engine.cpp">', first)), 1)
        before, walk = second.split('<h3 id="the-diff">')
        self.assertNotIn('class="walk"', before)
        walk, after = walk.split('<h3 id="results">')
        self.assertIn('<aside class="hunks" aria-label="Code: table.h">', walk)
        self.assertEqual(walk.count("<div"), walk.count("</div>"))
        self.assertIn("<p>As said.</p>", after)

    def test_the_first_stage_has_its_code_beside_it(self):
        self.write("stage1_first/README.md", "# Stage 1: first\n\n## 2. The code\n\n<!-- hunk: engine.cpp second -->\nOf **two**.\n")
        text = self.page("stage1_first/index.html")
        self.assertIn('<aside class="hunks" aria-label="Code: engine.cpp">', text)
        self.assertRegex(text, r'data-n="12">.*second')
        self.write("stage1_first/README.md", "# Stage 1: first\n\n## 2. The code\n\n<!-- hunk: engine.cpp third -->\nOf **two**.\n")
        self.assertIn("no hunk of engine.cpp contains 'third'", self.run_main()[2])
        self.write("stage1_first/README.md", "# Stage 1: first\n")
        self.write("stage2_second/README.md", LESSON.replace("hunk: table.h", "hunk: stable.h"))
        status, _, error = self.run_main()
        self.assertEqual(status, 1)
        self.assertIn("stable.h does not differ between the two stages", error)

    def test_a_function_added_after_another_is_not_called_by_its_name(self):
        self.write("stage2_second/engine.cpp", ENGINE.format(number=1) + "\nint third() { return 3; }\n")
        self.write("stage2_second/README.md", LESSON.replace("engine.cpp second", "engine.cpp third"))
        self.assertNotIn('<code class="where">', self.page("stage2_second/index.html"))

    def test_a_hunk_is_named_by_what_it_is_in_or_begins(self):
        ends = "\n".join(f"// {number}" for number in range(3))
        code = "int third(int x) {{\n  return x;\n}}\n" + ends + "\n\nint fourth(int x) {{\n  return x + {number};\n}}\n"
        self.write("stage1_first/engine.cpp", ENGINE.format(number=1) + code.format(number=1))
        self.write("stage2_second/engine.cpp", ENGINE.format(number=2) + code.format(number=2) + "\nint fifth(int x) {\n  return 5;\n}\n")
        self.write("stage2_second/README.md", LESSON.replace("<!-- hunk: table.h -->", "<!-- hunk: engine.cpp return x + 2 -->").replace(
            "<!-- hunk end -->", "<!-- hunk: engine.cpp fifth -->\nFive.\n\n<!-- hunk end -->"))
        names = re.findall(r'<span class="name">engine.cpp</span> <code class="where">([^<]*)', self.page("stage2_second/index.html"))
        self.assertEqual(names[-2:], ["fourth", "fifth"])

    def test_a_demonstration_is_named_and_not_shown(self):
        self.write("stage2_second/demo/show.cpp", "void show() {}\n")
        self.write("stage2_second/README.md", LESSON.replace("<!-- hunk: table.h -->", "<!-- hunk: table.h -->\n<!-- hunk: demo/show.cpp -->"))
        asides = re.findall(r"<aside.*?</aside>", self.page("stage2_second/index.html"), re.DOTALL)
        self.assertIn('Not shown: <a href="../code/stage2_second/demo/show.cpp.html"><span class="name">demo/show.cpp</span></a>', asides[1])
        self.assertIn("table.h", asides[1])
        self.assertNotIn("show()", asides[1])

    def test_hunks_of_a_note_that_meet_are_one(self):
        self.write("stage2_second/table.h", "int first_row();\n\nint second_row();\n\nint third_row();\n")
        self.write("stage2_second/README.md", LESSON.replace("<!-- hunk: table.h -->", "<!-- hunk: table.h third_row -->\n<!-- hunk: table.h second_row -->"))
        asides = re.findall(r"<aside.*?</aside>", self.page("stage2_second/index.html"), re.DOTALL)
        self.assertEqual(asides[1].count("<details"), 1)
        self.assertRegex(asides[1], r"(?s)second_row.*third_row")

    def test_a_long_line_says_how_far_it_is_indented(self):
        self.write("stage2_second/table.h", "struct Table {\n  int a_name_that_is_long_enough_for_a_line_of_its_own;\n  int x;\n};\n")
        text = self.page("stage2_second/index.html")
        self.assertRegex(text, r'<span class="ctx" data-n="2" style="--in:2">  <i class="t">int </i>a_name')
        self.assertRegex(text, r'<span class="ctx" data-n="3">  <i')

    def test_what_has_no_space_may_be_broken_behind_brackets_dots_and_scopes(self):
        def breakable(text):
            markup = build_site.markup
            return markup.breakable(markup.code_html(markup.colour_lines(text, "x.cpp")[0]), text)
        self.assertEqual(re.sub("<i [^>]*>|</i>", "", breakable("  owner.table.push_back(free_blocks.back(), a->b, 1.5F, std::min(1));")),
                         "  owner.<wbr>table.<wbr>push_back(<wbr>free_blocks.<wbr>back(), a-&gt;<wbr>b, 1.5F, std::<wbr>min(<wbr>1));")
        self.assertNotIn("<wbr>", breakable("owner.table(a)"))

    def test_a_long_hunk_is_cut(self):
        self.write("stage2_second/table.h", "".join(f"int row{number}();\n" for number in range(100)))
        text = self.page("stage2_second/index.html")
        self.assertIn('<a class="more" href="diff-1-2.html#file-table.h">44 more lines</a>', text)
        self.assertNotIn("row99", text)
        self.assertIn("row99", self.page("stage2_second/diff-1-2.html"))

    def test_the_whole_diff(self):
        self.write("stage2_second/main.cpp", "int main() {}\n")
        text = self.page("stage2_second/diff-1-2.html")
        self.assertIn('<div class="remark" id="first-1"><p><strong>The second</strong>', text)
        self.assertIn('<details class="of-file" id="file-table.h" open>', text)
        self.assertIn('<details class="of-file" id="file-main.cpp">', text)  # the lesson says nothing of it

    def test_the_whole_diff_says_what_to_read_first(self):
        text = self.page("stage2_second/diff-1-2.html")
        first = re.search(r'<section class="first"><h2>Read these first</h2><ol>(.*?)</ol>', text).group(1)
        links = re.findall(r'<a href="(#first-\d)">', first)
        self.assertEqual(links[0], "#first-1")
        self.assertRegex(first, r'engine.cpp</a>: <strong>The second</strong>')
        for number in range(1, len(links) + 1):
            self.assertEqual(text.count(f'<div class="remark" id="first-{number}">'), 1)
        self.write("stage2_second/README.md", LESSON.replace("**The second** ", "**The second** is no part of the lesson. It "))
        self.assertNotIn("The second", re.search(r"Read these first.*?</section>", self.page("stage2_second/diff-1-2.html")).group(0))

    def test_a_link_inside_the_lesson_leads_there_from_the_whole_diff(self):
        self.write("stage2_second/README.md", LESSON.replace("A table is *new*.", "A [table](#1-first-lines) of [rows](table.h)."))
        text = self.page("stage2_second/diff-1-2.html")
        self.assertIn('A <a href="index.html#1-first-lines">table</a> of <a href="../code/stage2_second/table.h.html">rows</a>.', text)

    def test_a_step_of_the_ladder_has_a_page_to_which_its_command_leads(self):
        self.write("stage2_second/README.md", LESSON + "\n[The ladder](LADDER.md)\n")
        self.write("stage2_second/LADDER.md", "# The ladder\n\n## Steps\n\n<!-- hunk: ladder/step2_b.cu two -->\nTwo, not [one](ladder/step1_a.cu).\n\n"
                   "<!-- hunk end -->\nSee `python3 tests/stage_diff.py ladder 1 2`.\n")
        self.write("stage2_second/ladder/step1_a.cu", "// The head.\nint one = 1;\n")
        self.write("stage2_second/ladder/step2_b.cu", "// The next head.\nint two = 2;\n")
        self.assertRegex(self.page("stage2_second/ladder.html"), r'<a href="ladder-1-2.html"><code>.*?</code></a>')
        text = self.page("stage2_second/ladder-1-2.html")
        self.assertIn("<p>The next head.</p>", text)
        self.assertIn('Two, not <a href="../code/stage2_second/ladder/step1_a.cu.html">one</a>.', text)
        self.assertRegex(text, r'<span class="del" data-n="-2">')
        self.write("stage2_second/ladder/step2_b.cu", "int three = 3;\n")
        self.assertIn("no hunk of ladder/step2_b.cu contains 'two'", self.run_main()[2])

    def test_widgets_if_there_are_any(self):
        self.assertNotIn("widget", self.page("index.html"))
        (self.out / "widgets").mkdir()
        (self.out / "widgets/widgets.js").write_text("// one\n", encoding="utf-8")
        text = self.page("index.html")
        self.assertIn('<div class="widget" data-widget="pool"></div>', text)
        self.assertIn('<script defer src="widgets/widgets.js"></script>', text)
        self.assertTrue((self.out / "widgets/widgets.js").is_file())
        self.assertNotIn("widget", (self.out / "stage2_second/index.html").read_text(encoding="utf-8"))

    def test_a_dead_link_is_an_error(self):
        for wrong in ("[x](nowhere.cpp)", "![x](nowhere.svg)"):
            self.write("stage1_first/README.md", f"# Stage 1: first\n\n{wrong}\n")
            status, _, error = self.run_main()
            self.assertEqual(status, 1)
            self.assertRegex(error, r"error: stage1_first/README.md: .*nowhere")

    def test_a_page_that_is_no_longer_made_is_removed_and_nothing_else(self):
        self.page("index.html")
        (self.out / "mine.txt").write_text("mine", encoding="utf-8")
        (self.root / "stage2_second/table.h").unlink()
        self.write("stage2_second/README.md", "# Stage 2: sums\n\n## 2. The diff\n")
        self.write("README.md", README.replace("[code](stage2_second/table.h)", ""))
        self.assertTrue((self.out / "code/stage2_second/table.h.html").exists())
        self.page("index.html")
        self.assertFalse((self.out / "code/stage2_second/table.h.html").exists())
        self.assertTrue((self.out / "mine.txt").exists())

    def test_the_search_knows_every_section(self):
        self.page("index.html")
        index = (self.out / "assets/search.js").read_text(encoding="utf-8")
        self.assertIn('["stage2_second/index.html","2-the-diff","2. The diff"', index)
        self.assertIn("The second function gives 2 < 3.", index)

    def test_what_is_wrong_with_a_page_is_found(self):
        self.page("index.html")
        path = self.out / "index.html"
        for wrong, said in (("<h1>x</h1>", "2 headings"), ("<h4>x</h4>", "order 4 follows"), ("<b>", "closes nothing"),
                            ('<a href="nowhere.html">x</a>', "nothing is at"), ('<a href="#nowhere">x</a>', "there is no #nowhere"),
                            ('<img src="nowhere.png" alt="x">', "there is no nowhere.png"), ('<img src="x" alt="">', "has no text"),
                            ('<i id="main"></i>', "stands there twice"), ('<script src="https://x/y.js"></script>', "there is no https")):
            readers = {page: Reader(page.read_text(encoding="utf-8")) for page in self.out.rglob("*.html")}
            self.assertEqual(check_page(self.out, path, readers), [])
            readers[path] = Reader(path.read_text(encoding="utf-8").replace("</article>", wrong + "</article>"))
            self.assertIn(said, " ".join(check_page(self.out, path, readers)), wrong)


class Colours(unittest.TestCase):
    def test_every_text_has_contrast_enough(self):
        self.assertAlmostEqual(contrast("#ffffff", "#000000"), 21)
        style = (build_site.THEME / "site.css").read_text(encoding="utf-8")
        for name, pattern in (("light", r":root \{(.*?)\n\}"), ("dark", r":root\[data-theme=dark\] \{(.*?)\n\}")):
            colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", re.search(pattern, style, re.DOTALL).group(1)))
            pale = [f"{text} on {back}: {contrast(colors[text], colors[back]):.2f}" for text, back in PAIRS
                    if contrast(colors[text], colors[back]) < 4.5]
            self.assertEqual(pale, [], name)


@needs.git
@needs.page_packages
class Repository(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.out = pathlib.Path(folder.name)
        cls.site = build_site.Site(build_site.ROOT, cls.out)
        cls.site.make()
        cls.readers = {page: Reader(page.read_text(encoding="utf-8")) for page in cls.out.rglob("*.html")}

    def test_all_pages_are_whole(self):
        self.assertEqual(self.site.errors, [])
        self.assertGreater(len(self.readers), 100)
        problems = [problem for path in sorted(self.readers) for problem in check_page(self.out, path, self.readers)]
        self.assertEqual(problems, [])

    def test_every_note_has_its_hunks_beside_it(self):
        num_notes = 0
        for page in self.site.pages:
            for start in [start for _, _, start in self.site.diffs_of(page.stage)] or [0] if page.stage else ():
                _, lines = self.site.notes_of(page, (build_site.ROOT / page.source).read_text(encoding="utf-8"), start)
                notes = {id(note) for note in lines.values()}
                if not notes:
                    continue
                text = (self.out / self.site.lesson_target(page, start)).read_text(encoding="utf-8")
                asides = re.findall(r"<aside class=\"hunks\".*?</aside>", text, re.DOTALL)
                self.assertEqual(len(asides), len(notes), (page.source, start))
                self.assertTrue(all('<details class="hunk"' in aside or 'Not shown: <a href="' in aside for aside in asides), (page.source, start))
                num_notes += len(notes)
        self.assertGreater(num_notes, 100)

    def test_a_lesson_can_be_compared_with_another_stage(self):
        first, other = (self.out / "stage8_batching" / name for name in ("index.html", "index-from-6.html"))
        for page, link in ((first, other), (other, first)):
            self.assertRegex(page.read_text(encoding="utf-8"), rf'\(instead: against <a href="{link.name}#[\w-]+">stage \d</a>\)')
        # Stage 6 has no runner: what stage 7 has put into it is new there.
        self.assertRegex(other.read_text(encoding="utf-8"),
                             r'<span class="name">runner\.h</span>(?: <code class="where">\w+</code>)? <span class="size">new, ')
        self.assertFalse(any(entry[0].endswith("-from-6.html") for entry in self.site.index))
        # A comparison with stage 6 goes on from page to page.
        self.assertIn('href="part2-from-6.html"', re.search(r"<article>.*</article>", other.read_text(encoding="utf-8"), re.DOTALL).group())
        for path in (self.out / "stage8_batching").glob("diff-6-8*.html"):
            text = path.read_text(encoding="utf-8")
            remarks = re.findall(r'<div class="remark">.*?</div>', text, re.DOTALL)
            links = [link for remark in remarks for link in re.findall(r'href="([^"#]*)', remark)]
            self.assertFalse([link for link in links if link in ("index.html", "part2.html")], path.name)
        self.assertIn("index-from-6.html#", (self.out / "stage8_batching/diff-6-8.html").read_text(encoding="utf-8"))

    def test_nothing_comes_from_elsewhere(self):
        for path in self.out.rglob("*"):
            if path.suffix in (".css", ".js") and path.name != "search.js":
                self.assertNotRegex(path.read_text(encoding="utf-8"), r"@import|url\(|https?://|\bfetch\(", path.name)

    def test_every_page_of_a_lesson_is_there(self):
        for path in [*build_site.ROOT.glob("*.md"), *build_site.ROOT.glob("stage[1-8]_*/**/*.md")]:
            self.assertIn(path.relative_to(build_site.ROOT).as_posix(), self.site.by_source)


if __name__ == "__main__":
    os.chdir(pathlib.Path(__file__).parent.parent)
    unittest.main()
