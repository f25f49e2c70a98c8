"""A folder of its own for each test, to write files into; and what a command says."""

import contextlib
import io
import pathlib
import tempfile
import unittest


class TemporaryTree(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def output_of(main, *arguments):
    """(exit status, what was printed, what went to stderr)"""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = main(*arguments)
    return status, out.getvalue(), error.getvalue()
