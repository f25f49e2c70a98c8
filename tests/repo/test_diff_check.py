"""Tests of diff_check.py: above all, that a planted difference turns red."""

import json
import unittest

from repo import diff_check
from support import needs
from support.temporary_tree import TemporaryTree

FIRST = "stage1_first"
SECOND = "stage2_second"


@needs.git
class Stages(TemporaryTree):
    """Two stages that differ in one line of engine.cpp, as their manifest says."""

    def setUp(self):
        super().setUp()
        for number, stage in ((1, FIRST), (2, SECOND)):
            self.write(f"{stage}/CMakeLists.txt", f"add_stage({stage})\n")
            self.write(f"{stage}/README.md", f"# stage{number}, told at length\n" * number)
            self.write(f"{stage}/engine.h", f"namespace stage{number} {{\n\nint run();\n\n}}  // namespace\n")
            self.write(f"{stage}/engine.cpp",
                       f'#include "engine.h"\n\nnamespace stage{number} {{\n\nint run() {{ return {number}; }}\n\n}}\n')
        self.write("common/base/tensor.h", '#include <vector>\n#include "common/base/check.h"\n')
        self.write("tests/repo/stage_diffs.json", "{}")
        diff_check.write_manifest(self.root)

    def path(self, name):
        return self.root / name

    def append(self, name, text):
        self.write(name, self.path(name).read_text(encoding="utf-8") + text)

    def check(self):
        self.log = []
        return diff_check.check(self.root, self.log.append)

    def assert_failure(self, *parts):
        """Exactly one failure, which says all of this."""
        failures = self.check()
        self.assertEqual(len(failures), 1, failures)
        for part in parts:
            self.assertIn(part, failures[0])


class Counting(Stages):
    def count(self, before, after):
        self.write("before", before)
        self.write("after", after)
        return diff_check.changed_lines(self.path("before"), self.path("after"))

    def test_added_and_removed_lines(self):
        self.assertEqual(self.count("a\nb\nc\n", "a\nx\nc\n"), [1, 1])
        self.assertEqual(self.count("a\nb\nc\n", "a\nx\ny\nz\nc\n"), [3, 1])
        self.assertEqual(self.count("a\nb\nc\nd\n", "x\nb\nc\ny\nz\n"), [3, 2])
        self.assertEqual(self.count("a\n", "a\nb\nc\n"), [2, 0])
        self.assertEqual(self.count("a\n", "a\n"), [0, 0])

    def test_namespace_lines_do_not_count(self):
        self.assertEqual(self.count("a\nnamespace stage1 {\nb\n", "a\nnamespace stage2 {\nb\n"), [0, 0])
        self.assertEqual(self.count("a\nnamespace other {\nb\n", "a\nnamespace another {\nb\n"), [1, 1])

    def test_white_space_counts(self):
        self.assertEqual(self.count("a\nb\n", "a\n  b\n"), [1, 1])


class Manifest(Stages):
    def test_stages_as_listed_pass(self):
        self.assertEqual(self.check(), [])
        self.assertIn(f"{FIRST} -> {SECOND}", self.log)
        self.assertEqual([line.split() for line in self.log[1:]], [["engine.cpp", "+1", "-1"], ["in", "both", "stages", "+1", "-1"],
                                                                   "the lesson, new files included +1 -1".split()])

    def test_the_lessons_size_leaves_out_what_it_does_not_walk_through(self):
        for name in ("demo/show.cpp", "production/fast.cpp", "kernels/plain.cu"):
            self.write(f"{SECOND}/{name}", "a\nb\n")
        found = diff_check.differences(self.path(FIRST), self.path(SECOND))
        self.assertEqual(diff_check.lesson_size(self.path(FIRST), found), (3, 1))

    def test_planted_extra_difference_fails(self):
        self.append(f"{SECOND}/engine.h", "// A better remark.\n")
        self.assert_failure("engine.h differs (+1 -0)", "has to be the same")

    def test_fix_that_is_not_carried_forward_fails_even_in_a_listed_file(self):
        self.append(f"{FIRST}/engine.cpp", "// A fix.\n")
        self.assert_failure("engine.cpp differs by +1 -2, intended are +1 -1", "carried forward")

    def test_fix_that_is_carried_forward_passes(self):
        for stage in (FIRST, SECOND):
            self.append(f"{stage}/engine.cpp", "// A fix.\n")
            self.append(f"{stage}/engine.h", "// A fix.\n")
        self.assertEqual(self.check(), [])

    def test_listed_file_that_no_longer_differs_fails(self):
        self.write(f"{SECOND}/engine.cpp",
                   self.path(f"{FIRST}/engine.cpp").read_text(encoding="utf-8").replace("stage1", "stage2"))
        self.assert_failure("engine.cpp is listed as different, and is the same")

    def test_new_file_has_to_be_listed(self):
        self.write(f"{SECOND}/decoding.h", "namespace stage2 {\n}\n")
        self.assert_failure("decoding.h is new and is not listed")
        diff_check.write_manifest(self.root)
        self.assertEqual(self.check(), [])
        self.path(f"{SECOND}/decoding.h").unlink()
        self.assert_failure("decoding.h is listed as new and is not")

    def test_new_file_that_grows_fails(self):
        self.write(f"{SECOND}/decoding.h", "namespace stage2 {\n}\n")
        diff_check.write_manifest(self.root)
        self.append(f"{SECOND}/decoding.h", "// More.\n")
        self.assert_failure("the new decoding.h has 3 lines, intended are 2")

    def test_file_that_is_gone_has_to_be_listed(self):
        self.path(f"{SECOND}/engine.h").unlink()
        self.assert_failure("engine.h is gone and is not listed")
        diff_check.write_manifest(self.root)
        self.assertEqual(self.check(), [])

    def test_readme_and_build_file_are_free(self):
        self.append(f"{SECOND}/README.md", "More.\n")
        self.append(f"{SECOND}/CMakeLists.txt", "# More.\n")
        self.assertEqual(self.check(), [])

    def test_pair_that_is_not_there_fails(self):
        manifest = diff_check.read_manifest(self.root)
        manifest["stage2_second -> stage3_third"] = {"changed": {}, "new": []}
        self.write("tests/repo/stage_diffs.json", json.dumps(manifest))
        self.assert_failure("no such neighbours", "stage3_third")

    def test_pair_without_an_entry_fails(self):
        self.write("tests/repo/stage_diffs.json", "{}")
        self.assert_failure("engine.cpp differs")

    def test_leftovers_of_editors_are_none_of_the_stage(self):
        self.write(f"{SECOND}/.engine.h.swp", "x")
        self.write(f"{SECOND}/engine.h.orig", "x")
        self.write(f"{SECOND}/__pycache__/x.pyc", "x")
        self.assertEqual(self.check(), [])


class Hygiene(Stages):
    def test_stage_number_in_a_file_name_fails(self):
        self.write(f"{SECOND}/stage2_kernels.h", "")
        diff_check.write_manifest(self.root)
        self.assert_failure("stage2_kernels.h", "a file's name")

    def test_stage_named_outside_its_namespace_line_fails(self):
        self.append(f"{FIRST}/engine.cpp", "int twice() { return 2 * stage1::run(); }\n")
        self.append(f"{SECOND}/engine.cpp", "int twice() { return 2 * stage2::run(); }\n")
        diff_check.write_manifest(self.root)
        failures = self.check()
        self.assertEqual(len(failures), 2, failures)
        self.assertIn("engine.cpp:8: names a stage", failures[0])

    def test_namespace_of_another_stage_fails(self):
        self.write(f"{SECOND}/engine.h", self.path(f"{FIRST}/engine.h").read_text(encoding="utf-8"))
        self.assert_failure("engine.h:1", "expected 'namespace stage2 {'")

    def test_alias_of_the_own_namespace_passes(self):
        for number, stage in ((1, FIRST), (2, SECOND)):
            self.append(f"{stage}/engine.cpp", f"namespace stage = stage{number};\n")
        self.assertEqual(self.check(), [])

    def test_include_of_another_stage_fails(self):
        for include in ('#include "../stage1_first/engine.h"', '#include "stage1_first/engine.h"',
                        "#include <stage1/a.h>", '#include "../engine.h"'):
            before = self.path(f"{SECOND}/engine.cpp").read_text(encoding="utf-8")
            self.append(f"{SECOND}/engine.cpp", include + "\n")
            diff_check.write_manifest(self.root)
            self.assert_failure("engine.cpp:8", "includes its own files")
            self.write(f"{SECOND}/engine.cpp", before)

    def test_a_subfolder_may_include_from_the_folder_above(self):
        self.write(f"{SECOND}/kernels/copy.cu", '#include "../engine.h"\n')
        diff_check.write_manifest(self.root)
        self.assertEqual(self.check(), [])
        self.append(f"{SECOND}/kernels/copy.cu", '#include "../../engine.h"\n')
        diff_check.write_manifest(self.root)
        self.assert_failure("copy.cu:2", "includes its own files")

    def test_include_of_a_stage_in_common_fails(self):
        self.write("common/model/llama.cpp", '#include "common/base/check.h"\n#include "stage1_first/engine.h"\n')
        self.assert_failure("common/model/llama.cpp:2", "common/ depends on no stage")

    def test_wrong_name_in_the_build_file_fails(self):
        self.write(f"{SECOND}/CMakeLists.txt", f"add_stage({FIRST})\n")
        self.assert_failure("CMakeLists.txt:1", f"expected add_stage({SECOND})")


class Order(Stages):
    def test_stages_are_ordered_by_number(self):
        for number in (10, 9):
            self.write(f"stage{number}_x/CMakeLists.txt", "")
        self.write("stage3_empty/notes.txt", "")
        self.assertEqual(diff_check.find_stages(self.root), [FIRST, SECOND, "stage9_x", "stage10_x"])


if __name__ == "__main__":
    unittest.main()
