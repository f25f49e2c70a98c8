#!/usr/bin/env python3
"""Texts that are shown while they are generated: python3 tests/stages/test_live_cli.py build/stage1

On a pseudo-terminal and through pipes.
"""

import fcntl
import json
import os
import pathlib
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import test_cli  # noqa: E402
from test_cli import ProgramTest, run  # noqa: E402

TIMEOUT_SECONDS = test_cli.TIMEOUT_SECONDS
LONG = ("generate", "--prompt", "Once upon a time", "--max-new-tokens", "900")


def start(*arguments, **streams):
    return subprocess.Popen([test_cli.PROGRAM, *arguments], **({"stdin": subprocess.PIPE, "stdout": subprocess.PIPE,
                                                               "stderr": subprocess.PIPE} | streams))


def on_terminal(*arguments, typed=(), columns=80, term="xterm"):
    """Exit code and what the terminal gets. typed: pairs (what is waited for, what is then typed)."""
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": term}
    process = start(*arguments, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True,
                    preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(end)
    shown = b""
    typed = list(typed)
    seen = 0
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
        while typed and typed[0][0] in shown[seen:]:
            seen = shown.index(typed[0][0], seen) + len(typed[0][0])
            os.write(main, typed.pop(0)[1])
    os.close(main)
    return process.wait(timeout=TIMEOUT_SECONDS), shown.decode(errors="replace").replace("\r\n", "\n")


def as_seen(shown):
    """The lines of what a terminal shows, without colours."""
    lines = [""]
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|\n|[^\x1b\n]+", shown):
        if part == "\n":
            lines.append("")
        elif part.endswith("D") and part.startswith("\x1b"):
            lines[-1] = lines[-1][:len(lines[-1]) - int(part[2:-1])]
        elif not part.startswith("\x1b"):
            lines[-1] += part
    return lines


class Streaming(ProgramTest):
    def test_streamed_texts_are_those_that_come_at_the_end(self):
        prompts = ("--prompt", "Once upon a time", "--prompt", "The king", "--max-new-tokens", "40", "--stop", "the w")
        at_the_end, streamed = (run("generate", *prompts, *option).stdout.decode().split("\nprompts ")[0]
                                for option in ((), ("--stream",)))
        self.assertEqual(streamed, at_the_end)
        self.assert_usage_error(run(*LONG, "--stream", "--json", "-"), "--stream")

    def test_the_text_comes_before_the_run_has_ended(self):
        with start(*LONG, "--stream") as process:
            self.assertIn(b"Once", os.read(process.stdout.fileno(), 100))
            self.assertIsNone(process.poll())
            process.kill()

    def test_a_terminal_gets_lines_of_whole_words(self):
        code, shown = on_terminal(*LONG[:3], "--max-new-tokens", "60", columns=40)
        self.assertEqual(code, 0)
        seen = as_seen(shown[shown.index(" 0  "):shown.index("\n| counter")])
        self.assertGreater(len(seen), 6)
        for line in seen:
            self.assertLess(len(line), 40)
        text = json.loads(run(*LONG[:3], "--max-new-tokens", "60", "--json", "-").stdout)["requests"][0]["text"]
        self.assertEqual(" ".join(seen[1:]).split(), text.split())

    def test_a_dumb_terminal_gets_no_escape_sequences(self):
        self.assertNotIn("\x1b", on_terminal(*LONG[:3], "--max-new-tokens", "60", columns=40, term="dumb")[1])

    def test_ctrl_c_keeps_the_text(self):
        code, shown = on_terminal(*LONG, typed=[(b"there", b"\x03")])
        self.assertEqual(code, 130, shown)
        self.assertRegex(shown, r"there.*\n\ninterrupted after \d+ tokens, [\d.]+ tokens/s\n$")
        self.assertNotIn("| counter", shown)

    def test_an_interrupt_keeps_the_text_in_a_pipe_too(self):
        with start(*LONG, "--stream") as process:
            first = os.read(process.stdout.fileno(), 100)
            while b"there" not in first:
                first += os.read(process.stdout.fileno(), 100)
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        self.assertEqual(process.returncode, 130)
        self.assertRegex((first + rest).decode(), r"there[^|]*\n\ninterrupted after \d+ tokens")
        self.assertNotIn(b"interrupted", errors)

    def test_a_reader_that_leaves_ends_the_run(self):
        with start(*LONG, "--stream") as process:
            os.read(process.stdout.fileno(), 10)
            process.stdout.close()
            errors = process.stderr.read()
            self.assertEqual(process.wait(timeout=TIMEOUT_SECONDS), -signal.SIGPIPE)
        self.assertEqual(test_cli.SIZE.sub(b"", test_cli.WHERE.sub(b"", errors)), b"")


class PromptSources(ProgramTest):
    def texts(self, *arguments, typed=b""):
        with start("generate", *arguments, "--max-new-tokens", "4", "--json", "-") as process:
            output, errors = process.communicate(typed, timeout=TIMEOUT_SECONDS)
        self.assertEqual(process.returncode, 0, errors)
        return [(request["prompt"], request["text"]) for request in json.loads(output)["requests"]]

    def test_standard_input_and_files_are_prompts_without_their_last_line_end(self):
        for name, text in (("unix", "The king\n"), ("windows", "The king\r\n"), ("bare", "The king")):
            (self.folder / name).write_text(text, encoding="utf-8", newline="")
        expected = self.texts("--prompt", "The king")
        self.assertEqual(self.texts("--prompt", "-", typed=b"The king\n"), expected)
        for name in ("unix", "windows", "bare"):
            self.assertEqual(self.texts("--prompt-file", str(self.folder / name)), expected)
        two_lines = self.texts("--prompt", "-", typed=b"The king\n\n")
        self.assertEqual(two_lines[0][0], "The king\n")

    def test_prompts_that_cannot_be_read(self):
        self.assert_bad_input(run("generate", "--prompt-file", str(self.folder)), str(self.folder), "directory")
        missing = str(self.folder / "missing")
        self.assert_bad_input(run("generate", "--prompt-file", missing), missing)
        self.assert_bad_input(run("generate", "--prompt", "-"), "prompt", "empty")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not os.access(sys.argv[1], os.X_OK):
        print("usage: test_live_cli.py PROGRAM [unittest options]", file=sys.stderr)
        sys.exit(1)
    test_cli.PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()
