"""Tests of stage_diff.py: what is shown, in which order, and that a note without a hunk turns red."""

import contextlib
import html.parser
import io
import os
import pathlib
import re
import unittest
from unittest import mock

import stage_diff
from support import needs
from support.temporary_tree import TemporaryTree, output_of

README = """# Stage 2: sums

## 4. Invariants

<!-- hunk: nothing.cpp -->
Not in the part that counts.

## 5. The diff

An introduction.

<!-- hunk: engine.cpp second -->
**The second** function gives `2 < 3`. See [the paper](https://example.org/paper).

| a | b |
|---|--:|
| x | 10 |

<!-- hunk: table.h -->
<!-- hunk: table.cpp -->
A table is *new*.

```cpp
// ## no heading
int size();
```

<!-- hunk end -->
Not a note.

## 6. By hand
"""
ENGINE = """#include "engine.h"

namespace stage{number} {{

int first() {{ return 1; }}

// One,
// two,
// three,
// four,
// five,
// six,
// seven.
int second() {{ return {number}; }}

}}  // namespace
"""


@needs.git
class Stages(TemporaryTree):
    def setUp(self):
        super().setUp()
        for number, stage in ((1, "stage1_first"), (2, "stage2_second")):
            self.write(f"{stage}/CMakeLists.txt", f"add_stage({stage})\n")
            self.write(f"{stage}/README.md", "# Stage 1\n")
            self.write(f"{stage}/engine.h", f"namespace stage{number} {{\nint second();\n}}\n")
            self.write(f"{stage}/engine.cpp", ENGINE.format(number=number))
        self.write("stage2_second/README.md", README)
        self.write("stage2_second/table.h", "int size();\n\n// Rows.\nint rows();\n")
        self.write("stage2_second/table.cpp", "int size() { return 0; }\n")
        self.write("stage2_second/demo/show.cpp", "void show() {}\n")
        self.write("stage2_second/kv_cache.h", "struct KvCache {};\n")
        self.write("stage2_second/picture.svg", "<svg/>\n")
        self.write("stage1_first/old.h", "int old();\n")

    def edit(self, name, before, after):
        text = (self.root / name).read_text(encoding="utf-8")
        self.assertIn(before, text)
        self.write(name, text.replace(before, after))

    def run_main(self, *arguments):
        return output_of(stage_diff.main, list(arguments), self.root)

    def show(self, *arguments):
        status, out, error = self.run_main("1", "2", *arguments)
        self.assertEqual((status, error), (0, ""))
        return out

    def assert_one_error(self, text, *arguments, expected=1):
        status, _, error = self.run_main(*arguments)
        self.assertEqual(status, expected)
        self.assertEqual(error.count("\n"), 1, error)
        self.assertIn(text, error)


class Diff(Stages):
    def test_size(self):
        # engine.cpp +1 -1; table.h 4, table.cpp 1 and kv_cache.h 1 new; old.h gone.
        self.assertEqual(self.show("--size"), "1 file changed, 3 new, 1 gone: +7 -2 lines\n")

    def test_lines_of_the_namespace_are_no_difference(self):
        out = self.show()
        self.assertNotIn("engine.h ", out)
        self.assertNotRegex(out, r"(?m)^[+-]namespace")
        self.assertRegex(out, r"(?m)^-int second\(\) { return 1; }$")
        self.assertRegex(out, r"(?m)^\+int second\(\) { return 2; }$")

    def test_namespace_line_beside_a_change_is_shown_unchanged(self):
        self.edit("stage2_second/engine.cpp", "int first()", "long first()")
        out = self.show()
        self.assertRegex(out, r"(?m)^ namespace stage2 {$")
        self.assertNotIn("namespace stage1", out)
        self.assertRegex(out, r"engine.cpp +\+2 -2")

    def test_order_of_the_notes_then_the_usual_one(self):
        names = re.findall(r"(?m)^  (\S+) +(?:\+|new|gone)", self.show())
        self.assertEqual(names, ["engine.cpp", "table.h", "table.cpp", "kv_cache.h", "old.h"])
        names = re.findall(r"(?m)^  (\S+) +(?:\+|new|gone)", self.show("--all"))
        self.assertEqual(names, ["engine.cpp", "table.h", "table.cpp", "kv_cache.h", "old.h", "demo/show.cpp"])

    def test_the_lesson_alone_unless_all_is_asked_for(self):
        self.write("stage2_second/production/fast.cpp", "void go() {}\n")
        self.write("stage2_second/kernels/plain.cu", "void plain() {}\n")
        out = self.show()
        self.assertIn("+void plain() {}", out)
        self.assertNotIn("void go", out)
        self.assertNotIn("void show", out)
        self.assertIn("1 file changed, 4 new, 1 gone: +8 -2 lines", out)
        out = self.show("--all")
        self.assertIn("+void go() {}", out)
        self.assertIn("+void show() {}", out)

    def test_files_by_name(self):
        out = self.show("table")
        self.assertIn("+int rows();", out)
        self.assertIn("+int size() { return 0; }", out)
        self.assertNotIn("engine.cpp", out)
        self.assertIn("+void show() {}", self.show("demo/"))
        self.assertNotIn("int size() { return 0; }", self.show("table.h"))
        self.assert_one_error("no file 'tables' differs between stage1_first and stage2_second", "1", "2", "tables")

    def test_a_file_that_is_gone_is_a_line(self):
        out = self.show()
        self.assertIn("old.h   gone, 1 line", out)
        self.assertNotIn("int old", out)

    def test_stages_further_apart_have_the_notes_of_all_between(self):
        self.write("stage3_third/CMakeLists.txt", "add_stage(stage3_third)\n")
        self.write("stage3_third/engine.cpp", ENGINE.format(number=3))
        self.write("stage3_third/queue.h", "int queue();\n")
        self.write("stage3_third/README.md", "# Stage 3: queues\n\n## 5. The diff\n\n<!-- hunk: queue.h -->\nA queue.\n\n"
                   "<!-- hunk: table.h -->\nThe tables go.\n")
        status, out, error = self.run_main("1", "3")
        self.assertEqual((status, error), (0, ""))
        self.assertIn("Stage 3: queues", out)
        for text in ("A queue.", "**The second** function"):
            self.assertIn(text, out)
        self.assertNotIn("A table is", out)  # what it explains has gone again

    def test_stages_further_apart_without_a_gpu_and_with_the_last_lesson_s_word(self):
        self.write("stage3_third/CMakeLists.txt", "add_stage(stage3_third)\n")
        self.write("stage3_third/engine.cpp", ENGINE.format(number=3))
        self.write("stage3_third/kernels/plain.cu", "void plain() {}\n")
        self.write("stage3_third/gpu_runner.h", "class GpuRunner;\n")
        self.write("stage3_third/README.md", "# Stage 3: queues\n\n## 5. The diff\n\n<!-- hunk: engine.cpp second -->\n"
                   "What is said last.\n")
        status, out, error = self.run_main("1", "3")
        self.assertEqual((status, error), (0, ""))
        self.assertIn("What only a GPU needs is left out", out)
        self.assertNotIn("void plain", out)
        self.assertNotIn("class GpuRunner", out)
        self.assertIn("What is said last.", out)
        self.assertNotIn("**The second** function", out)
        self.assertIn("+void plain() {}", self.run_main("1", "3", "--all")[1])
        self.assertIn("+void plain() {}", self.run_main("2", "3")[1])

    def test_what_is_no_code_is_left_out(self):
        out = self.show()
        for name in ("README.md", "CMakeLists.txt", "picture.svg"):
            self.assertNotIn(name, out)

    def test_order_of_folders_and_of_files_that_are_not_listed(self):
        names = ["ladder/a.h", "kernels/a.h", "kernels/kernels.h", "demo/pictures.cpp", "demo/x.cpp", "main.cpp", "new.h",
                 "engine.cpp", "kv_cache_manager.h", "other/x.h"]
        self.assertEqual(sorted(names, key=stage_diff.order_key),
                         ["kv_cache_manager.h", "engine.cpp", "new.h", "main.cpp", "kernels/kernels.h", "kernels/a.h",
                          "ladder/a.h", "demo/x.cpp", "demo/pictures.cpp", "other/x.h"])


class Notes(Stages):
    def test_a_note_stands_before_its_hunk(self):
        out = self.show("--color", "never")
        note = out.index("│ **The second** function gives `2 < 3`. See the paper.")
        self.assertLess(out.index("\nengine.cpp "), note)
        self.assertLess(note, out.index("\n-int second"))
        self.assertIn("│ x  10\n", out)
        self.assertNotIn("Not in the part", out)
        self.assertNotIn("Not a note", out)
        self.assertNotIn("introduction", out)

    def test_markers_in_a_row_share_a_note_that_is_printed_once(self):
        out = self.show()
        self.assertEqual(out.count("A table is *new*."), 1)
        self.assertEqual(out.count("// ## no heading"), 1)
        self.assertLess(out.index("\ntable.h "), out.index("A table is *new*."))
        self.assertIn("A table is *new*.", self.show("table.cpp"))  # its first hunk that is shown

    def test_a_note_stands_at_the_function_that_it_is_about(self):
        self.write("stage2_second/table.h", '#include "rows.h"\n\nint first();  // before rows\n\n// All of them.\nint rows() {\n')
        self.edit("stage2_second/README.md", "hunk: table.h", "hunk: table.h rows")
        out = self.show()
        self.assertLess(out.index("+int first()"), out.index("│ A table"))
        self.assertLess(out.index("│ A table"), out.index("+// All of them."))

    def test_a_note_stands_at_the_first_of_its_markers(self):
        self.edit("stage2_second/README.md", "<!-- hunk: table.cpp -->\n", "<!-- hunk: engine.cpp second -->\n")
        out = self.show()
        self.assertLess(out.index("\nengine.cpp "), out.index("\ntable.h "))
        self.assertLess(out.index("\ntable.h "), out.index("│ A table is *new*."))
        self.assertEqual(out.count("A table is *new*."), 1)
        out = self.show("engine.cpp")  # the first marker's file is not shown
        self.assertLess(out.index("│ A table is *new*."), out.index("-int second"))

    def test_an_empty_line_before_an_addition_is_not_cut_off_by_the_note(self):
        self.write("stage2_second/table.h", "\n// All of them.\nint rows();\n\n// One.\nint row();\n")
        self.edit("stage2_second/README.md", "hunk: table.h", "hunk: table.h rows")
        self.assertIn("+\n+// All of them.", self.show())

    def test_check_passes_and_names_hunks_without_a_note(self):
        status, out, error = self.run_main("--check")
        self.assertEqual((status, error), (0, ""))
        self.assertIn("2 notes; 3 of 5 core hunks have one", out)
        self.assertIn("no note: kv_cache.h, new", out)
        self.assertIn("no note: old.h, gone", out)

    def test_a_note_on_a_file_that_is_the_same_fails(self):
        self.edit("stage2_second/README.md", "hunk: table.h", "hunk: engine.h")
        status, out, _ = self.run_main("--check")
        self.assertEqual(status, 1)
        self.assertIn("stage2_second/README.md:19: engine.h does not differ", out)
        self.assert_one_error("engine.h does not differ", "1", "2")

    def test_a_note_whose_text_is_nowhere_fails(self):
        self.edit("stage2_second/README.md", "engine.cpp second", "engine.cpp third")
        status, out, _ = self.run_main("--check", "1", "2")
        self.assertEqual(status, 1)
        self.assertIn("README.md:12: no hunk of engine.cpp contains 'third'", out)

    def test_a_whole_word_counts_more_than_a_part_of_one(self):
        self.write("stage2_second/table.h", "int rows_before();\n\n// All.\nint rows();\n")
        self.edit("stage2_second/README.md", "hunk: table.h", "hunk: table.h rows")
        out = self.show()
        self.assertLess(out.index("+int rows_before();"), out.index("│ A table"))
        self.assertLess(out.index("│ A table"), out.index("+// All."))
        self.edit("stage2_second/README.md", "hunk: table.h rows", "hunk: table.h ows_bef")
        self.assertEqual(self.run_main("--check")[0], 0)

    def test_text_of_the_lines_around_will_do(self):
        self.edit("stage2_second/README.md", "engine.cpp second", "engine.cpp `// seven.`")
        self.assertEqual(self.run_main("--check")[0], 0)

    def test_a_marker_that_is_misspelt_fails(self):
        for wrong in ("<!-- hunks: engine.cpp second -->", "<!-- hunk engine.cpp -->", "<!-- hunk: -->"):
            self.write("stage2_second/README.md", README.replace("<!-- hunk: engine.cpp second -->", wrong))
            status, out, _ = self.run_main("--check")
            self.assertEqual(status, 1, wrong)
            self.assertIn("README.md:12: expected", out)

    def test_a_marker_without_a_paragraph_fails(self):
        self.edit("stage2_second/README.md", "<!-- hunk end -->", "<!-- hunk: kv_cache.h -->\n\n<!-- hunk end -->")
        self.assertIn("no paragraph follows", self.run_main("--check")[1])

    def test_a_lesson_may_have_several_pages(self):
        self.edit("stage2_second/README.md", "An introduction.", "An introduction, and [more](MORE.md#the-diff).")
        self.write("stage2_second/MORE.md", "# More\n\n## The diff\n\n<!-- hunk: kv_cache.h -->\nFrom the other page.\n")
        self.write("stage2_second/OTHER.md", "# Not a page\n\n## The diff\n\n<!-- hunk: nothing.cpp -->\nNo link leads here.\n")
        out = self.show()
        self.assertIn("Stage 2: sums", out)
        self.assertLess(out.index("A table is"), out.index("From the other page."))
        self.assertLess(out.index("From the other page."), out.index("+struct KvCache"))
        self.edit("stage2_second/MORE.md", "kv_cache.h", "engine.h")
        self.assertIn("error: stage2_second/MORE.md:5: engine.h does not differ", self.run_main("--check")[1])

    def test_another_part_may_have_a_section_with_notes(self):
        self.edit("stage2_second/README.md", "## 6. By hand\n", "## 6. By hand\n\n## Second part\n\nIts idea.\n\n### The diff\n\n"
                  "<!-- hunk: kv_cache.h -->\nFrom the second part.\n\n### Results\n\nNo note.\n")
        out = self.show()
        self.assertLess(out.index("From the second part."), out.index("+struct KvCache"))
        self.assertNotIn("No note.", out)

    def test_a_lesson_without_notes_is_just_the_diff(self):
        self.write("stage2_second/README.md", "# Stage 2\n\n## 5. The diff\n\nNothing.\n")
        self.assertIn("no notes on these changes yet", self.show())
        self.assertEqual(self.run_main("--check")[0], 0)

    def test_a_new_file_is_cut_at_its_paragraphs(self):
        self.edit("stage2_second/README.md", "hunk: table.h", "hunk: table.h rows")
        out = self.show()
        self.assertLess(out.index("+int size();"), out.index("│ A table"))
        self.assertLess(out.index("│ A table"), out.index("+// Rows."))

    def test_colours_are_asked_for(self):
        self.assertNotIn("\x1b", self.show())
        out = self.show("--color", "always")
        self.assertIn("\x1b[32m+int second() { return 2; }\x1b[0m", out)
        self.assertIn("\x1b[1mThe second\x1b[0m", out)


class Ladder(Stages):
    """Steps of a ladder as diffs."""

    FIRST = """// Step 1: one by one.
// Its head.
#include "call.h"

int sum(int n) {
  int sum = 0;
  for (int i = 0; i < n; ++i) {
    sum += i;
  }
  return sum;
}
"""
    SECOND = """// Step 2: by a formula,
// if n is not negative.
//
//     n (n - 1) / 2
//
// measured: 1 us
#include "call.h"
#include "formula.h"

int sum(int n) {
  int sum = 0;
  if (n > 0) {
    for (int i = 0; i < n; ++i) {
      sum += i;
    }
    sum = formula(n);
  }
  return sum;
}
"""
    NOTES = "# The ladder\n\n### Step 2\n\n<!-- hunk: ladder/step2_formula.cu formula -->\nThe **formula**.\n\n<!-- hunk end -->\nNo note.\n"

    def setUp(self):
        super().setUp()
        self.edit("stage2_second/README.md", "An introduction.", "See [the ladder](LADDER.md).")
        self.write("stage2_second/LADDER.md", self.NOTES)
        self.write("stage2_second/ladder/call.h", "struct Call {};\n")
        self.write("stage2_second/ladder/formula.h", "int formula(int n);\n")
        self.write("stage2_second/ladder/step1_loop.cu", self.FIRST)
        self.write("stage2_second/ladder/step2_formula.cu", self.SECOND)
        self.write("stage2_second/ladder/step3_copy.cu", self.SECOND.replace("sum = formula(n);", "sum = 7;"))
        self.write("stage2_second/ladder/prompt1_x.cu", "int x = 1;\n")
        self.write("stage2_second/ladder/prompt2_y.cu", "int x = 2;\n")

    def ladder(self, *arguments):
        status, out, error = self.run_main("ladder", *arguments)
        self.assertEqual((status, error), (0, ""))
        return out

    def test_a_step_is_the_diff_to_the_step_before(self):
        out = self.ladder("1", "2")
        self.assertIn("step1_loop.cu -> step2_formula.cu: 1 file changed, 1 new: +5 -0 lines", out)
        self.assertEqual(re.findall(r"(?m)^[+-].*$", out), ["+int formula(int n);", '+#include "formula.h"', "+  if (n > 0) {",
                                                            "+    sum = formula(n);", "+  }"])
        self.assertIn("── line 8\n", out)  # counted with the head
        self.assertEqual(self.ladder("1", "2", "--size"), "1 file changed, 1 new: +5 -0 lines\n")

    def test_a_new_header_stands_before_the_step(self):
        out = self.ladder("1", "2")
        self.assertLess(out.index("+int formula(int n);"), out.index("+  if (n > 0)"))
        self.assertNotIn("struct Call", out)
        self.assertNotIn("+int formula(int n);", self.ladder("2", "3"))
        self.assertNotIn("+int formula(int n);", self.ladder("1", "2", "step2_formula"))

    def test_the_head_is_the_first_note(self):
        out = self.ladder("1", "2")
        self.assertIn("│ Step 2: by a formula, if n is not negative.\n", out)
        self.assertIn("│     n (n - 1) / 2\n", out)
        self.assertNotIn("one by one", out)

    def test_a_note_stands_in_the_section_of_its_step(self):
        out = self.ladder("1", "2")
        self.assertLess(out.index("│ The **formula**."), out.index("+    sum = formula(n);"))
        self.assertNotIn("No note", out)
        self.assertNotIn("The **formula**", self.ladder("2", "3"))
        self.assertNotIn("The **formula**", self.show())

    def test_steps_further_apart(self):
        out = self.ladder("1", "3")
        self.assertIn("+    sum = 7;", out)

    def test_prompts(self):
        out = self.ladder("prompt", "1", "2")
        self.assertIn("The prompts' ladder, step 2", out)
        self.assertIn("-int x = 1;\n+int x = 2;\n", out)

    def test_check_counts_the_steps_and_finds_a_note_without_a_hunk(self):
        status, out, _ = self.run_main("--check")
        self.assertEqual(status, 0)
        self.assertIn("step1_loop.cu -> step2_formula.cu: 1 notes; 1 of 2 core hunks have one", out)
        self.assertIn("checked the notes on 4 pairs, 0 errors", out)
        self.edit("stage2_second/LADDER.md", "cu formula", "cu integral")
        self.assertEqual(self.run_main("--check", "ladder", "2", "3")[0], 0)
        for arguments in ((), ("ladder", "1", "2")):
            status, out, _ = self.run_main("--check", *arguments)
            self.assertEqual(status, 1)
            self.assertIn("stage2_second/LADDER.md:5: no hunk of ladder/step2_formula.cu contains 'integral'", out)
        self.assert_one_error("contains 'integral'", "ladder", "1", "2")

    def test_a_note_on_a_file_that_no_step_shows_fails(self):
        for name in ("step1_loop.cu", "step9_gone.cu", "call.h"):
            self.write("stage2_second/LADDER.md", self.NOTES.replace("step2_formula.cu formula", name))
            status, out, _ = self.run_main("--check")
            self.assertEqual(status, 1, name)
            self.assertIn(f"stage2_second/LADDER.md:5: ladder/{name} is no step of the ladder after another", out)

    def test_a_marker_that_is_misspelt_fails(self):
        self.edit("stage2_second/LADDER.md", "hunk: ladder", "hunk ladder")
        self.assertIn("LADDER.md:5: expected", self.run_main("--check", "ladder", "1", "2")[1])

    def test_mistakes(self):
        for text, arguments in (("two steps are compared", ()), ("two steps are compared", ("prompt", "1")),
                                ("there is no step '4'; the steps are 1, 2, 3", ("1", "4")),
                                ("there is no step '3'; the steps are 1, 2", ("prompt", "1", "3")),
                                ("the earlier step comes first", ("2", "2"))):
            self.assert_one_error(text, "ladder", *arguments, expected=2)
        self.assert_one_error("no file 'call' differs between step1_loop.cu and step2_formula.cu", "ladder", "1", "2", "call")

    @needs.page_packages
    def test_a_page(self):
        self.ladder("1", "2", "--html", str(self.root / "page.html"))
        self.assertIn("The <strong>formula</strong>.", (self.root / "page.html").read_text(encoding="utf-8"))


@needs.page_packages
class Page(Stages):
    class Balanced(html.parser.HTMLParser):
        VOID = {"meta", "col", "img"}

        def __init__(self):
            super().__init__()
            self.open, self.problems = [], []

        def handle_starttag(self, tag, attributes):
            if tag not in self.VOID:
                self.open.append(tag)

        def handle_endtag(self, tag):
            if not self.open or self.open.pop() != tag:
                self.problems.append(tag)

    def page(self):
        self.assertIn("wrote", self.show("--html", str(self.root / "page.html")))
        return (self.root / "page.html").read_text(encoding="utf-8")

    def test_it_is_well_formed_and_needs_nothing_else(self):
        text = self.page()
        parser = self.Balanced()
        parser.feed(text)
        self.assertEqual((parser.open, parser.problems), ([], []))
        self.assertNotRegex(text, r"<(script|link)\b|@import|url\(")

    def test_notes_are_rendered(self):
        text = self.page()
        self.assertIn('<p><strong>The second</strong> function gives <code>2 &lt; 3</code>. See '
                      '<a href="https://example.org/paper">the paper</a>.</p>', text)
        self.assertRegex(text, r'<td>x</td>\s*<td style="text-align:right">10</td>')
        self.assertIn("A table is <em>new</em>.", text)
        self.assertIn('<pre><code><i class="c">// ## no heading</i>', text)

    def test_a_reader_is_sent_to_the_longest_notes_first_and_what_has_none_is_closed(self):
        text = self.page()
        section = text[text.index('<section class="first">'):text.index("</section>")]
        targets = re.findall(r'<a href="#(first-\d)">', section)
        self.assertEqual(targets, re.findall(r'<aside id="(first-\d)">', text))
        self.assertGreater(len(targets), 1)
        self.assertIn(": <strong>The second</strong> function gives <code>2 &lt; 3</code>.</li>", section)
        with mock.patch("stage_diff.NUM_FIRST", 1):
            text = self.page()
        self.assertEqual(len(re.findall(r'<aside id="first-', text)), 1)
        files = re.findall(r'<details id="([^"]+)"( open)?>', text)
        self.assertEqual(sum(bool(is_open) for _, is_open in files), 1, files)
        self.assertGreater(len(files), 1)

    def test_a_first_sentence_ends_before_a_list_and_with_a_full_stop(self):
        for text, sentence in (("One. Two.", "One."), ("The parts:\n- a\n- b", "The parts."), ("See [x](y.h)\nfor `a - b`. More.",
                               "See x for `a - b`."), ("It is 0.5 of it... and more. Then.", "It is 0.5 of it... and more."),
                               ("Code:\n```cpp\nx. y\n```", "Code."), ("**Lead.** Rest.", "**Lead.**")):
            self.assertEqual(stage_diff.first_sentence(stage_diff.Note([], text)), sentence)

    def test_no_line_of_code_is_wrapped(self):
        text = self.page()
        self.assertNotIn("pre-wrap", text)
        long = stage_diff.Piece([stage_diff.Line("-", "x" * 118), stage_diff.Line("+", "y" * 97)])
        self.assertTrue(stage_diff.piece_html(long, "changed").startswith('<div class="l120">'))
        self.assertTrue(stage_diff.piece_html(stage_diff.Piece([stage_diff.Line("-", "x")]), "changed").startswith('<div class="l60">'))
        # Two halves of 120 columns fit into a window of 1920 pixels, and are stacked in one of 1400.
        self.assertLess(stage_diff.window_for(120), 1905)
        self.assertGreater(stage_diff.window_for(90), 1400)
        self.assertIn(f"@media (max-width: {stage_diff.window_for(120)}px) {{ .l120 > .sides {{ display: none; }}", text)

    def test_what_changed_inside_a_line_is_marked(self):
        self.assertIn('<mark><i class="m">2</i></mark>; }', self.page())

    def test_links_and_pictures_of_the_lesson(self):
        self.edit("stage2_second/README.md", "A table is", "![rows](picture.svg) [code](table.h) A table is")
        text = self.page()
        self.assertIn('<a href="stage2_second/table.h">code</a>', text)
        self.assertIn('<img alt="rows" src="data:image/svg+xml;base64,', text)

    def test_code_has_the_colours_of_its_whole_file(self):
        self.write("stage2_second/table.h", "/* Rows,\nint of_a_comment;\n*/\nint rows() { return 1; }\n")
        self.assertIn('<i class="c">int of_a_comment;</i>', self.page())

    def test_alignment_keeps_every_line_once(self):
        old = [stage_diff.Line("-", text) for text in ("int a = 1;", "int gone;", "return a + b;")]
        new = [stage_diff.Line("+", text) for text in ("int a = 2;", "return a + b + c;", "more();")]
        rows = stage_diff.align(old, new)
        self.assertEqual([row[0] for row in rows if row[0]], old)
        self.assertEqual([row[1] for row in rows if row[1]], new)
        self.assertIn((old[0], new[0]), rows)
        self.assertIn((old[2], new[1]), rows)


class Mistakes(Stages):
    def test_without_the_packages_everything_but_a_page_works(self):
        with mock.patch("stage_diff.markup", None):
            self.assert_one_error("--html needs markdown-it-py and pygments: sudo apt-get install", "1", "2", "--html", "x.html")
            self.assertIn("+int size();", self.show())
            self.assertEqual(self.run_main("--check")[0], 0)

    def test_arguments(self):
        for text, arguments in (("two stages are compared", ()), ("two stages are compared", ("2",)),
                                ("there is no stage '9'; the stages are 1, 2", ("1", "9")),
                                ("there is no stage 'x'", ("1", "x")), ("the earlier stage comes first", ("2", "1")),
                                ("does not differ from itself", ("2", "2")), ("--nonsense", ("1", "2", "--nonsense"))):
            self.assert_one_error(text, *arguments, expected=2)

    def test_help_fits_a_terminal(self):
        out = io.StringIO()
        with mock.patch.dict("os.environ", COLUMNS="80"), contextlib.redirect_stdout(out), self.assertRaises(SystemExit):
            stage_diff.main(["--help"], self.root)
        self.assertEqual([line for line in out.getvalue().splitlines() if len(line) > 80], [])

    @needs.page_packages
    def test_a_page_that_can_t_be_written(self):
        self.assert_one_error("can't write", "1", "2", "--html", str(self.root / "no" / "page.html"))

    def test_without_a_ladder(self):
        self.assert_one_error("no stage has a ladder", "ladder", "1", "2")

    def test_without_git(self):
        with mock.patch("stage_diff.shutil.which", lambda name: None):
            self.assert_one_error("needs git", "1", "2")

    def test_names_of_folders_will_do(self):
        self.assertEqual(self.run_main("stage1_first/", "stage2", "--size")[0], 0)


@needs.git
class Repository(unittest.TestCase):
    def test_every_pair_can_be_shown(self):
        names = stage_diff.diff_check.find_stages(stage_diff.ROOT)
        self.assertEqual(len(names), 8)
        for before, after in zip(names, names[1:]):
            pair = stage_diff.read_pair(stage_diff.ROOT, before, after)
            self.assertEqual(pair.errors, [])
            pair.select([], with_all=False)
            lines = list(stage_diff.print_pair(pair, stage_diff.Paint(False), 100))
            found = stage_diff.diff_check.differences(stage_diff.ROOT / before, stage_diff.ROOT / after)
            added, _ = stage_diff.diff_check.lesson_size(stage_diff.ROOT / before, found)
            self.assertIn(f"+{added:,} -", pair.size())
            # All lines are there, except namespace lines that git counts beside a change.
            shown = sum(line.startswith("+") for line in lines)
            hidden = sum(bool(stage_diff.NAMESPACE_LINE.match(line.text)) and line.kind == "+"
                         for file in pair.files if file.kind == "changed" for hunk in file.hunks for line in hunk.raw)
            self.assertEqual(shown + hidden, added)
            for file in pair.files:
                after_lines = (stage_diff.ROOT / after / file.name).read_text(encoding="utf-8").splitlines() \
                    if file.kind != "gone" else []
                before_lines = (stage_diff.ROOT / before / file.name).read_text(encoding="utf-8").splitlines() \
                    if file.kind != "new" else []
                for line in [line for hunk in file.hunks for line in hunk.lines]:
                    self.assertTrue(line.new == 0 or after_lines[line.new - 1] == line.text, (file.name, line))
                    self.assertTrue(line.old == 0 or before_lines[line.old - 1] == line.text or
                                    line.text.startswith("namespace stage"), (file.name, line))

    def test_every_step_of_the_ladder_can_be_shown(self):
        neighbours = stage_diff.ladder_neighbours(stage_diff.ROOT)
        self.assertEqual(len(neighbours), 8)
        for steps in neighbours:
            pair = stage_diff.read_steps(stage_diff.ROOT, *steps)
            self.assertEqual(pair.errors, [])
            self.assertGreater(pair.num_notes, 0)
            self.assertLess(len(pair.files[-1].hunks), 12)
            list(stage_diff.print_pair(pair, stage_diff.Paint(False), 100))
            before, after = ((stage_diff.ROOT / pair.ladder / "ladder" / name).read_text(encoding="utf-8").splitlines()
                             for name in (pair.before, pair.after))
            for line in [line for hunk in pair.files[-1].hunks for line in hunk.lines]:
                self.assertTrue(line.new == 0 or after[line.new - 1] == line.text, line)
                self.assertTrue(line.old == 0 or before[line.old - 1].split() == line.text.split(), line)
        self.assertEqual(stage_diff.stray_ladder_notes(stage_diff.ROOT), [])


if __name__ == "__main__":
    os.chdir(pathlib.Path(__file__).parent.parent)
    unittest.main()
