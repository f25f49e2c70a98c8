#!/usr/bin/env python3
"""Runs the tests of one file: python3 tests/support/run_unittest.py repo/test_site.py

As `python3 -m unittest` does, from tests/; but where tests were skipped and none failed, it says why, a line for each reason,
and ends with 77, so that ctest reports "skipped" and not "passed".
"""

import os
import pathlib
import sys
import unittest

SKIPPED = 77  # the SKIP_RETURN_CODE in tests/CMakeLists.txt


def main(file):
    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    sys.path.insert(0, os.getcwd())
    tests = unittest.defaultTestLoader.loadTestsFromName(file.removesuffix(".py").replace("/", "."))
    result = unittest.TextTestRunner().run(tests)
    for reason in sorted({reason for _, reason in result.skipped}):
        print(f"skipped: {reason}")
    return 1 if not result.wasSuccessful() else SKIPPED if result.skipped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
