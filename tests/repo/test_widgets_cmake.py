"""Tests that the target of the site's widgets finds Emscripten that was installed after the build was configured:
common/cmake/site_widgets.cmake, with a file in place of em++ and no stages."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = f"""cmake_minimum_required(VERSION 3.25)
project(widgets LANGUAGES NONE)
include("{ROOT}/common/cmake/site_widgets.cmake")
course_add_site_widgets()
"""


class WidgetsTest(unittest.TestCase):
    def test_em_that_comes_and_goes(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            programs = folder / "a folder"
            programs.mkdir()
            (folder / "CMakeLists.txt").write_text(PROJECT, encoding="utf-8")

            def found_after(*command):
                subprocess.run(["cmake", *command], check=True, capture_output=True,
                               env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"})
                return re.search(r"^COURSE_EMCXX:FILEPATH=(.*)$", (folder / "build/CMakeCache.txt").read_text(encoding="utf-8"),
                                 re.MULTILINE).group(1)

            compiler = programs / "em++"
            self.assertNotEqual(found_after("-S", folder, "-B", folder / "build", "-G", "Ninja"), str(compiler))
            compiler.write_text("#!/bin/sh\n", encoding="utf-8")
            compiler.chmod(0o755)
            self.assertEqual(found_after("--build", folder / "build"), str(compiler))
            compiler.unlink()
            self.assertNotEqual(found_after("--build", folder / "build"), str(compiler))


if __name__ == "__main__":
    unittest.main()
