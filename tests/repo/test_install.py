#!/usr/bin/env python3
"""Tests what `cmake --install` installs, away from the source tree: python3 tests/repo/test_install.py build"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = [f"stage{number}" for number in range(1, 9)]
BUILD = ROOT / "build"

# Calls the completion as bash does: $1 is the program, $2 the word at the cursor.
CALL = """
. "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
spec=$(complete -p "${1##*/}")  # complete -o default -F FUNCTION PROGRAM
spec=${spec#*-F }
"${spec%% *}" "$1" "${!#}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


class InstallTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.prefix = pathlib.Path(cls.folder.name) / "a prefix"
        cls.log = cls.run_program("cmake", "--install", BUILD, "--prefix", cls.prefix)

    @classmethod
    def run_program(cls, *command):
        return subprocess.run(command, cwd=cls.folder.name, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout

    def names(self, folder):
        return sorted(path.name for path in (self.prefix / folder).glob("*"))

    def test_files(self):
        self.assertEqual(self.names("bin"), STAGES)
        self.assertEqual(self.names("share/bash-completion/completions"), STAGES)
        self.assertEqual(self.names("share/zsh/site-functions"), [f"_{stage}" for stage in STAGES])
        self.assertEqual(self.names("share/fish/vendor_completions.d"), [f"{stage}.fish" for stage in STAGES])

    def test_manual(self):
        if not shutil.which("help2man"):
            self.assertIn("help2man is not installed", self.log)
            return
        self.assertEqual(self.names("share/man/man1"), [f"{stage}.1" for stage in STAGES])
        page = (self.prefix / "share/man/man1/stage8.1").read_text(encoding="utf-8")
        self.assertRegex(page, r"\n\.TH STAGE8 ")
        for command in ("generate", "serve", "demo"):
            self.assertIn(f'\n.SS "Options of {command}:"\n', page)
        self.assertIn("\\fB\\-\\-http\\fR ", page)

    def test_program_brings_its_model(self):
        command = ("generate", "--prompt", "Once upon a time", "--max-new-tokens", "8", "--quiet")
        self.assertEqual(self.run_program(self.prefix / "bin/stage4", *command), self.run_program(BUILD / "stage4", *command))

    def complete(self, *words):
        script = self.prefix / "share/bash-completion/completions" / pathlib.Path(words[0]).name
        return self.run_program("bash", "-c", CALL, "bash", script, *words).split()

    def test_completion_in_bash(self):
        program = str(self.prefix / "bin/stage8")
        self.assertEqual(self.complete(program, "ge"), ["generate"])
        self.assertEqual(self.complete(program, "bench", "--slo"), ["--slots"])
        self.assertEqual(self.complete(program, "bench", "--weights", ""), ["auto", "fp8"])
        self.assertEqual(self.complete(program, "bench", "--weights", "fp8", "--slo"), ["--slots"])
        self.assertEqual(self.complete(program, "bench", "--weights", "="), ["auto", "fp8"])  # as bash splits "--weights="
        self.assertEqual(self.complete(program, "bench", "--weights", "=", "f"), ["fp8"])
        self.assertEqual(self.complete(program, "bench", "--weights", "=", "fp8", "--slo"), ["--slots"])
        self.assertEqual(self.complete(program, "generate", "--model", "--s"), [])  # a file, which the shell completes
        self.assertEqual(self.complete(program, "nothing", "--v"), ["--version"])

    def test_completions_have_no_errors_in_syntax(self):
        for shell, option, file in (("bash", "-n", "bash-completion/completions/stage1"),
                                    ("zsh", "-n", "zsh/site-functions/_stage1"),
                                    ("fish", "--no-execute", "fish/vendor_completions.d/stage1.fish")):
            if shutil.which(shell):
                with self.subTest(shell=shell):
                    self.run_program(shell, option, self.prefix / "share" / file)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
