"""Tests of include_check.py: a planted circle, an arrow upwards and a second chooser turn red."""

import unittest

from repo import include_check
from support.temporary_tree import TemporaryTree


class Includes(TemporaryTree):
    def setUp(self):
        super().setUp()
        self.write("common/base/check.h", "#include <string>\n")
        self.write("common/math/product.h", '#include "common/base/check.h"\n')
        self.write("common/math/product.cpp", '#include "common/math/product.h"\n')
        self.write("stage7_gpu/CMakeLists.txt", "add_stage(stage7_gpu)\n")
        self.write("stage7_gpu/runner.h", '#include "common/math/product.h"\n')
        self.write("stage7_gpu/choice.cpp", '#include "runner.h"\n#include "production/fast.h"\n')
        self.write("stage7_gpu/production/fast.h", '#include "../runner.h"\n')

    def assert_failure(self, *parts):
        failures = include_check.check(self.root)
        self.assertEqual(len(failures), 1, failures)
        for part in parts:
            self.assertIn(part, failures[0])

    def test_arrows_that_run_downwards_pass(self):
        self.assertEqual(include_check.check(self.root), [])

    def test_a_circle_of_headers_fails(self):
        self.write("stage7_gpu/engine.h", '#include "size.h"\n')
        self.write("stage7_gpu/size.h", '#include "engine.h"\n')
        self.assert_failure("circle", "stage7_gpu/engine -> stage7_gpu/size -> stage7_gpu/engine")

    def test_a_circle_through_a_source_file_fails(self):
        self.write("stage7_gpu/runner.cpp", '#include "runner.h"\n#include "choice.h"\n')
        self.write("stage7_gpu/choice.h", "")
        self.assert_failure("circle", "runner", "choice")

    def plant_table_and_launch(self):
        """A table whose sources call a launch, which another source implements."""
        self.write("stage7_gpu/production/table.h",
                   "class Table {\n  int attend() const;\n};\nextern const Table kTable;\n")
        self.write("stage7_gpu/production/launches.h", "int launch(int count,\n           int size);\n")
        self.write("stage7_gpu/production/step.cpp",
                   '#include "launches.h"\n#include "table.h"\nint Table::attend() const { return launch(1, 2); }\n')
        self.write("stage7_gpu/production/plan.cu", '#include "launches.h"\nint launch(int count, int size) {}\n')

    def test_a_table_above_its_launches_passes(self):
        self.plant_table_and_launch()
        self.assertEqual(include_check.check(self.root), [])

    def test_a_circle_through_headers_that_others_implement_fails(self):
        self.plant_table_and_launch()
        self.write("stage7_gpu/production/plan.cu",
                   '#include "launches.h"\n#include "table.h"\n'
                   'int launch(int count, int size) { return kTable.attend(); }\n')
        self.assert_failure("circle", "production/plan.cu", "production/step.cpp")

    def test_an_arrow_upwards_fails(self):
        self.write("common/base/check.cpp", '#include "common/base/check.h"\n#include "common/math/lanes.h"\n')
        self.write("common/math/lanes.h", "")
        self.assert_failure("common/base/check.cpp", "common/base comes before common/math")

    def test_production_has_one_chooser(self):
        self.write("stage7_gpu/main.cpp", '#include "production/fast.h"\n')
        self.assert_failure("more than the one place", "stage7_gpu/choice", "stage7_gpu/main")

    def test_a_folder_of_production_has_a_chooser_of_its_own(self):
        self.write("stage7_gpu/production/topic/topic.h", '#include "../fast.h"\n')
        self.write("stage7_gpu/main.cpp", '#include "production/topic/topic.h"\n')
        self.assertEqual(include_check.check(self.root), [])
        self.write("stage7_gpu/other.cpp", '#include "production/topic/topic.h"\n')
        self.assert_failure("production/topic/ is included by more than the one place", "stage7_gpu/other")

    def test_a_stage_has_one_chooser_of_paged_kernels_and_may_implement_their_interface(self):
        for name in ("paged_kernels.h", "fast.h"):
            self.write(f"common/paged/{name}", "")
        self.write("stage7_gpu/kernels/plain.h", '#include "common/paged/paged_kernels.h"\n')
        self.write("stage7_gpu/ladder/production.cu", '#include "common/paged/fast.h"\n')
        self.write("stage7_gpu/choice.cpp", '#include "common/paged/fast.h"\n')
        self.write("stage8_more/CMakeLists.txt", "add_stage(stage8_more)\n")
        self.write("stage8_more/choice.cpp", '#include "common/paged/fast.h"\n')
        self.assertEqual(include_check.check(self.root), [])
        self.write("stage7_gpu/kernels/plain.cu", '#include "common/paged/fast.h"\n')
        self.assert_failure("common/paged/ is included by more than the one place", "stage7_gpu/choice",
                            "stage7_gpu/kernels/plain")

    def test_other_projects_headers_are_none_of_ours(self):
        self.write("common/base/check.h", '#include <common/math/product.h>\n#include "utf8proc.h"\n')
        self.assertEqual(include_check.check(self.root), [])


class Repository(unittest.TestCase):
    def test_there_are_arrows(self):
        graph = include_check.graph_of(include_check.ROOT)
        self.assertIn("common/model/gguf", graph["common/model/llama"])
        self.assertIn("stage2_blocks/kv_cache_manager", graph["stage2_blocks/engine"])


if __name__ == "__main__":
    unittest.main()
