"""Tests of sabotage.py, and of the patches: each applies to the sources as they are and changes its own stage only."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

import sabotage

PATCH = """# stage: stage1_first
# test: test_stage1 "sum, by [hand]"
# bug: one is added twice
diff --git a/stage1_first/sum.py b/stage1_first/sum.py
--- a/stage1_first/sum.py
+++ b/stage1_first/sum.py
@@ -1 +1 @@
-print(1 + 1)
+print(1 + 2)
"""


class FakeWorkshop(sabotage.Workshop):
    """Instead of a compiler: the program is a shell script that looks at what the sources print."""

    def __init__(self, root, scratch, test):
        super().__init__(root, scratch, 1)
        self.test = test
        self.builds = 0

    def build(self, programs):
        self.builds += 1
        folder = self.build_folder / "tests"
        folder.mkdir(parents=True, exist_ok=True)
        for program in programs:
            (folder / program).write_text("#!/bin/sh\n" + self.test + "\n", encoding="utf-8")
            (folder / program).chmod(0o755)


class Checking(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name) / "repository"
        self.write("stage1_first/sum.py", "print(1 + 1)\n")
        self.write("tests/sabotage/sum.patch", PATCH)
        subprocess.run(["git", "init", "--quiet", str(self.root)], check=True)
        self.log = []

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def check(self, test='test "$(python3 stage1_first/sum.py)" = 2'):
        patch = sabotage.read_patch(self.root / "tests/sabotage/sum.patch")
        # Inside the repository, as by default: git must not skip the patch there.
        self.workshop = FakeWorkshop(self.root, self.root / "build" / "sabotage", test)
        return sabotage.check([patch], self.workshop, self.log.append)

    def logged(self):
        return "\n".join(self.log)

    def test_bug_that_is_found_passes(self):
        self.assertEqual(self.check(), 0)
        self.assertIn('test_stage1 "sum, by [hand]"', self.logged())

    def test_bug_that_no_test_finds_fails(self):
        self.assertEqual(self.check("true"), 1)
        self.assertIn("STAYS GREEN although one is added twice", self.logged())

    def test_test_that_fails_anyway_proves_nothing(self):
        self.assertEqual(self.check("false"), 1)
        self.assertIn("fails without the bug", self.logged())

    def test_skipped_and_missing_tests_prove_nothing(self):
        self.assertEqual(self.check("exit 77"), 1)
        self.assertIn("was skipped", self.logged())
        self.assertEqual(self.check("echo 'No test cases matched'"), 1)
        self.assertIn("does not exist", self.logged())

    def test_patch_that_does_not_apply_fails(self):
        self.write("stage1_first/sum.py", "print(2)\n")
        self.assertEqual(self.check(), 1)
        self.assertIn("applying sum failed", self.logged())

    def test_patch_of_another_stage_fails(self):
        self.write("tests/sabotage/sum.patch", PATCH.replace("# stage: stage1_first", "# stage: stage2_second"))
        self.assertEqual(self.check(), 1)
        self.assertIn("does not belong to stage2_second", self.logged())

    def test_sources_are_as_before_afterwards(self):
        self.check()
        for folder in (self.root, self.workshop.sources):
            self.assertEqual((folder / "stage1_first/sum.py").read_text(encoding="utf-8"), "print(1 + 1)\n")
        self.assertEqual(self.workshop.builds, 3)  # without the bug, with it, and without it again

    def test_characters_with_a_meaning_to_catch_are_escaped(self):
        self.assertEqual(self.check('test "$1" = "sum\\, by \\[hand\\]" && ' +
                                    'test "$(python3 stage1_first/sum.py)" = 2'), 0)

    def test_copy_follows_the_repository(self):
        self.write(".gitignore", "/build*/\n")
        self.write("stage1_first/old.py", "")
        self.check()
        (self.root / "stage1_first/old.py").unlink()
        self.write("stage1_first/new.py", "")
        self.check()
        copied = sorted(path.name for path in (self.workshop.sources / "stage1_first").iterdir())
        self.assertEqual(copied, ["new.py", "sum.py"])

    def test_header_is_required(self):
        for line in ("# stage: stage1_first\n", '# test: test_stage1 "sum, by [hand]"\n',
                     "# bug: one is added twice\n"):
            self.write("tests/sabotage/sum.patch", PATCH.replace(line, ""))
            with self.assertRaises(sabotage.SabotageError):
                sabotage.read_patch(self.root / "tests/sabotage/sum.patch")


class Patches(unittest.TestCase):
    """The real ones. That their tests turn red takes a compiler, and is what sabotage.py itself checks."""

    def setUp(self):
        folder = sabotage.ROOT / sabotage.PATCHES
        self.patches = [sabotage.read_patch(path) for path in sorted(folder.glob("*.patch"))]

    def test_each_applies_to_its_stage(self):
        self.assertTrue(self.patches)
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "copy"
            for stage in {patch.stage for patch in self.patches}:
                shutil.copytree(sabotage.ROOT / stage, copy / stage)
            for patch in self.patches:
                with self.subTest(patch.name):
                    sabotage.patched_files(patch)
                    status, output = sabotage.run(["git", "apply", "--check", str(patch.path)], copy)
                    self.assertEqual(status, 0, output)

    def test_each_names_a_test_case_that_is_written_somewhere(self):
        sources = "\n".join(path.read_text(encoding="utf-8") for path in (sabotage.ROOT / "tests").rglob("*.cpp"))
        for patch in self.patches:
            if patch.case:
                self.assertTrue(f'TEST_CASE("{patch.case}"' in sources, f"{patch.name}: {patch.case}")


if __name__ == "__main__":
    unittest.main()
