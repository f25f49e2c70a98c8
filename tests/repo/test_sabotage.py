"""Tests of sabotage.py, and of the patches: each applies to the sources as they are and changes its own stage only."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest
from unittest import mock

import sabotage
from support import needs

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
    """Does without a compiler: the test program is a shell script that looks at what the sources print."""

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


@needs.git
class InARepository(unittest.TestCase):
    """A small repository with a patch."""

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

    def logged(self):
        return "\n".join(self.log)


class Checking(InARepository):
    def check(self, test='test "$(python3 stage1_first/sum.py)" = 2'):
        patch = sabotage.read_patch(self.root / "tests/sabotage/sum.patch")
        # Inside the repository, as by default: git must not skip the patch there.
        self.workshop = FakeWorkshop(self.root, self.root / "build" / "sabotage", test)
        return sabotage.check([patch], self.workshop, self.log.append)

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

    def test_bug_whose_test_never_ends_is_found(self):
        with mock.patch("sabotage.TEST_TIMEOUT_SECONDS", 2):
            self.assertEqual(self.check('test "$(python3 stage1_first/sum.py)" = 2 || exec sleep 60'), 0)

    def test_test_that_never_ends_anyway_proves_nothing(self):
        with mock.patch("sabotage.TEST_TIMEOUT_SECONDS", 0.1):
            self.assertEqual(self.check("exec sleep 60"), 1)
        self.assertIn("did not end in 0.1 seconds", self.logged())

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
        self.assertEqual(self.workshop.builds, 2)  # without the bug and with it

    def test_characters_with_a_meaning_to_catch_are_escaped(self):
        self.assertEqual(self.check('test "$1" = "sum\\, by \\[hand\\]" && ' +
                                    'test "$(python3 stage1_first/sum.py)" = 2'), 0)

    def test_what_the_test_prints_is_shown(self):
        shown = []
        self.check()
        sabotage.check([sabotage.read_patch(self.root / "tests/sabotage/sum.patch")],
                       FakeWorkshop(self.root, self.root / "build" / "sabotage",
                                    'n=$(python3 stage1_first/sum.py); echo "expected 2, got $n"; test "$n" = 2'),
                       self.log.append, shown.append)
        self.assertEqual(shown, ["expected 2, got 3"])

    def test_an_unpacked_archive_needs_no_git(self):
        shutil.rmtree(self.root / ".git")
        self.write("build-debug/left.py", "")
        self.write("stage1_first/__pycache__/sum.pyc", "")
        for missing in ("no tool", "git"):
            if not any(shutil.which(tool) for tool in {"git", "patch"} - {missing}):
                continue  # neither is here
            with self.subTest(missing=missing):
                which = lambda name: None if name == missing else shutil_which(name)
                shutil_which = shutil.which
                with mock.patch("sabotage.shutil.which", which):
                    self.assertEqual(self.check(), 0, self.logged())
                    self.assertEqual(self.check("true"), 1)
                self.assertFalse((self.workshop.sources / "build-debug").exists())
                self.assertFalse((self.workshop.sources / "stage1_first/__pycache__").exists())
        with mock.patch("sabotage.shutil.which", lambda name: None):
            self.assertEqual(self.check(), 1)
            self.assertIn("neither is installed", self.logged())

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


class Rounds(InARepository):
    """Bugs of several stages, planted at once."""

    def setUp(self):
        super().setUp()
        for name, stage, test in (("one", "stage1_first", "test_stage1"), ("other", "stage1_first", "test_stage1"),
                                  ("two", "stage2_second", "test_stage2"), ("both", "stage2_second", "collapse_2_1")):
            self.write(f"{stage}/{name}.py", "print(1 + 1)\n")
            self.write(f"tests/sabotage/{name}.patch", PATCH.replace("stage1_first", stage)
                       .replace("sum.py", f"{name}.py").replace('test_stage1 "sum, by [hand]"', test))
        (self.root / "tests/sabotage/sum.patch").unlink()
        self.patches = [sabotage.read_patch(path) for path in sorted((self.root / "tests/sabotage").iterdir())]

    def test_one_bug_of_each_stage_and_those_that_see_two_stages_alone(self):
        names = [[patch.name for patch in together] for together in sabotage.rounds(self.patches)]
        self.assertEqual(names, [["one", "two"], ["other"], ["both"]])

    def test_bugs_of_common_paged_take_turns_with_stage_7s(self):
        for name, stage in (("paged", "common/paged"), ("seven", "stage7_cuda_kernel")):
            self.write(f"tests/sabotage/{name}.patch", PATCH.replace("stage1_first", stage)
                       .replace('test_stage1 "sum, by [hand]"', "gpu_sum_stage7\n# executor: executor_sum_stage7"))
        paged, seven = (sabotage.read_patch(self.root / f"tests/sabotage/{name}.patch") for name in ("paged", "seven"))
        self.assertEqual(paged.stage_number(), "7")

        def names_of(patches):
            return [[patch.name for patch in together] for together in sabotage.rounds(patches)]
        on_executor = [patch.without_gpu() for patch in (self.patches[1], paged, seven)]
        self.assertEqual(names_of(on_executor), [["paged", on_executor[0].name], ["seven"]])
        # On a GPU, programs of stage 8 have the bug too.
        self.assertEqual(names_of([seven, paged, self.patches[1]]), [["seven", on_executor[0].name], ["paged"]])

    def test_each_bug_is_tried(self):
        workshop = FakeWorkshop(self.root, self.root / "build" / "sabotage", "! grep -q 2 */*.py")
        self.assertEqual(sabotage.check(self.patches, workshop, self.log.append), 0, self.logged())
        self.assertEqual(workshop.builds, 4)

    def test_a_bug_that_does_not_compile_does_not_hide_the_others(self):
        class Compiler(FakeWorkshop):
            def build(self, programs):
                if "test_stage1" in programs and "2" in (self.sources / "stage1_first/one.py").read_text():
                    raise sabotage.SabotageError("error: expected expression")
                super().build(programs)

        workshop = Compiler(self.root, self.root / "build" / "sabotage", "! grep -q 2 */*.py")
        self.assertEqual(sabotage.check(self.patches, workshop, self.log.append), 1)
        self.assertIn("expected expression", self.logged())
        self.assertNotIn("STAYS GREEN", self.logged())


@needs.git
class Patches(unittest.TestCase):
    """The real patches. Whether their tests turn red takes a compiler: sabotage.py itself checks that."""

    def setUp(self):
        folder = sabotage.ROOT / sabotage.PATCHES
        self.patches = [sabotage.read_patch(path) for path in sorted(folder.glob("*.patch"))]

    def test_each_applies_to_its_stage(self):
        self.assertTrue(self.patches)
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "copy"
            for stage in {patch.stage for patch in self.patches}:
                shutil.copytree(sabotage.ROOT / stage, copy / stage, dirs_exist_ok=True)
            for patch in self.patches:
                with self.subTest(patch.name):
                    originals = {name: (copy / name).read_bytes() for name in sabotage.patched_files(patch)}
                    sabotage.apply_patch(patch.path, copy)
                    for name, text in originals.items():
                        (copy / name).write_bytes(text)

    def test_each_names_a_test_case_that_is_written_somewhere(self):
        sources = "\n".join(path.read_text(encoding="utf-8") for path in (sabotage.ROOT / "tests").rglob("*.cpp"))
        for patch in self.patches:
            if patch.case:
                self.assertTrue(f'TEST_CASE("{patch.case}"' in sources, f"{patch.name}: {patch.case}")


if __name__ == "__main__":
    unittest.main()
