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
import select
import signal
import struct
import subprocess
import sys
import termios
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import test_cli  # noqa: E402
from test_cli import ProgramTest, run, stage_number  # noqa: E402

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
        if not select.select([main], [], [], 60)[0]:
            process.kill()
            raise AssertionError(f"silent for a minute, {typed[:1]} is still to be typed: {shown!r}")
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
        prompts = ("--prompt", "Once upon a time", "--prompt", "king " * 1100, "--prompt", "The king",
                   "--max-new-tokens", "40", "--stop", "the w")
        at_the_end, streamed = (run("generate", *prompts, *option).stdout.decode().split("\nprompts ")[0]
                                for option in ((), ("--stream",)))
        self.assertEqual(streamed, at_the_end)
        self.assertIn("no reply: a prompt of", streamed)
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


def chat(*arguments, lines):
    """What `chat` answers to these lines from a pipe."""
    with start("chat", *arguments) as process:
        process.stdout_text, errors = process.communicate("".join(line + "\n" for line in lines).encode(),
                                                          timeout=TIMEOUT_SECONDS)
    process.stdout_text = process.stdout_text.decode()
    process.errors = test_cli.SIZE.sub(b"", test_cli.WHERE.sub(b"", errors)).decode().splitlines()
    return process


class Chat(ProgramTest):
    GREEDY = ("--temperature", "0", "--max-new-tokens", "24")
    FOUND = r"\[([\d,]+) of the conversation's ([\d,]+) tokens were in the prefix cache\]"

    def test_a_pipe_gets_replies_without_prompts_and_colours(self):
        result = chat(*self.GREEDY, lines=["Once upon a time", "", "The king"])
        self.assertEqual((result.returncode, result.errors), (0, []))
        reply = json.loads(run("generate", "--chat", *LONG[1:3], *self.GREEDY, "--json", "-").stdout)["requests"][0]
        self.assertEqual(result.stdout_text.splitlines()[0], reply["text"].split("\n")[0].lstrip())
        self.assertNotIn("\x1b", result.stdout_text)
        self.assertNotIn("> ", result.stdout_text)

    def test_the_next_turn_finds_all_full_blocks_of_the_reply(self):
        if stage_number() < 6:
            self.assertNotRegex(chat(*self.GREEDY, lines=["Once upon a time", "The king"]).stdout_text, "prefix cache")
            self.skipTest("the stage has no prefix cache")
        prompt = json.loads(run("generate", "--chat", *LONG[1:3], *self.GREEDY, "--json", "-").stdout)["requests"][0]
        self.assertEqual(len(prompt["tokens"]), 24)
        for sampling in ((), ("--temperature", "1.5", "--seed", "3", "--stop", "zzz")):
            result = chat(*self.GREEDY[2:], *(sampling or self.GREEDY[:2]), "--block-size", "4",
                          lines=["Once upon a time", "The king"])
            self.assertIn("cut after 24 tokens", result.stdout_text)
            found, _ = re.search(self.FOUND, result.stdout_text).groups()
            # The last token of a reply is not in the cache: nothing has been computed from it.
            self.assertEqual(int(found), (prompt["prompt_tokens"] + 24 - 1) // 4 * 4)
        without = chat(*self.GREEDY, "--no-prefix-cache", lines=["Once upon a time", "The king"])
        self.assertRegex(without.stdout_text, r"\[0 of the")

    def test_the_model_has_the_whole_conversation(self):
        told = chat(*self.GREEDY, lines=["Once upon a time", "The king"])
        alone = chat(*self.GREEDY, lines=["The king"])
        again = chat(*self.GREEDY, lines=["Once upon a time", "/reset", "The king"])
        self.assertNotEqual(told.stdout_text.splitlines()[-1], alone.stdout_text.splitlines()[-2])
        self.assertIn(alone.stdout_text, again.stdout_text)

    def test_a_system_prompt_stands_before_all(self):
        by_option = chat(*self.GREEDY, "--system", "There was a bear.", lines=["The bear"])
        by_command = chat(*self.GREEDY, lines=["/system There was a bear.", "The bear", "/system"])
        self.assertTrue(by_command.stdout_text.startswith(by_option.stdout_text))
        self.assertIn('[system: "There was a bear."]', by_command.stdout_text)
        self.assertNotEqual(by_option.stdout_text, chat(*self.GREEDY, lines=["The bear"]).stdout_text)
        text = json.loads(run("generate", "--chat", "--system", "There was a bear.", "--prompt", "The bear", *self.GREEDY,
                              "--json", "-").stdout)["requests"][0]["text"]
        self.assertEqual(by_option.stdout_text.splitlines()[0], text.split("\n")[0].lstrip())
        self.assert_bad_input(run("generate", "--system", "x", "--prompt", "a"), "--system", "--chat")

    def test_a_conversation_that_outgrows_its_room_says_so_and_can_begin_again(self):
        result = chat("--slots", "64", lines=["king " * 70, "/reset", "Once upon a time"])
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.errors[0], r"^error: .* has \d+ tokens, and the cache \(--slots\) has 64: /reset")
        self.assertGreater(len(result.stdout_text), 20)
        self.assertIn("the cache (--slots) of 64 tokens is full: /reset begins", result.stdout_text)
        self.assertIn("the context has 1024: /reset", chat(lines=["king " * 1100]).errors[0])

    def test_what_is_wrong_with_a_line_is_one_line_and_the_rest_is_answered(self):
        result = chat(*self.GREEDY, lines=["/nonsense", "/help", "Once upon a time"])
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.errors[0], 'error: no command "/nonsense"; /help lists them')
        self.assertEqual(len(result.errors), 2)
        for line in ("/reset", "/system TEXT", "/quit", "there was"):
            self.assertIn(line, result.stdout_text)
        with start("chat", *self.GREEDY) as process:
            _, errors = process.communicate(b"Once \xff\nThe king\n", timeout=TIMEOUT_SECONDS)
        self.assertIn(b"invalid UTF-8", errors)
        with open("/dev/full", "wb") as full, start("chat", stdout=full) as process:
            _, errors = process.communicate(b"Once upon a time\n", timeout=TIMEOUT_SECONDS)
            self.assertEqual(process.returncode, 1)
            self.assertIn(b"standard output", errors)

    def test_sampling_options_and_a_default_that_varies(self):
        self.assertRegex(run("chat", "--help").stdout.decode(), r"--temperature .*\(default: 0\.7\)")
        replies = [chat("--max-new-tokens", "24", *options, lines=["Once upon a time"]).stdout_text
                   for options in ((), (), ("--seed", "5"), ("--temperature", "0"))]
        self.assertEqual(replies[0], replies[1])
        self.assertEqual(len(set(replies)), 3)
        twice = chat("--max-new-tokens", "24", lines=["Once upon a time", "/reset", "Once upon a time"]).stdout_text
        self.assertEqual(twice.count(replies[0].splitlines()[0]), 1)

    def test_without_a_template_replies_end_with_a_sentence(self):
        lines = [line for line in chat(lines=["Once upon a time", "The king"]).stdout_text.splitlines()
                 if not line.startswith("[")]
        self.assertEqual(len(lines), 2)
        for line in lines:
            self.assertRegex(line, r'[.!?]"?$')

    def test_on_a_terminal_ctrl_c_ends_a_reply_and_ctrl_d_the_program(self):
        # With this seed, the first reply would have more than 500 tokens.
        code, shown = on_terminal("chat", "--max-new-tokens", "900", typed=[
            (b"\n> ", b"Once upon a time\n"), (b"time\r\n", b""), (b" ", b"\x03"), (b"\n> ", b"The king\n"),
            (b"> ", b"\x04")])
        self.assertEqual(code, 0, shown)
        self.assertIn("/help lists the commands", shown)
        self.assertIn("^C", shown)
        self.assertNotIn("ends]", shown, "Ctrl-C came during the reply")
        self.assertLess(len(shown.split("^C")[0]), 1500)
        self.assertGreater(len(shown.split("The king\n")[1].split("> ")[0]), 5)

    def test_ctrl_c_twice_at_an_empty_prompt_ends(self):
        code, shown = on_terminal("chat", typed=[(b"\n> ", b"\x03"), (b"ends]", b""), (b"> ", b"\x03")])
        self.assertEqual(code, 0, shown)
        self.assertIn("Ctrl-C once more, or Ctrl-D, ends", shown)

    def test_replies_are_wrapped_at_words_on_a_terminal(self):
        code, shown = on_terminal("chat", *self.GREEDY, columns=30, typed=[(b"\n> ", b"Once upon a time\n"),
                                                                         (b"> ", b"/quit\n")])
        self.assertEqual(code, 0, shown)
        reply = as_seen(shown.split("Once upon a time\n")[-1])
        words = chat(*self.GREEDY, lines=["Once upon a time"]).stdout_text.split("[")[0].split()
        self.assertGreater(len(reply), 4)
        self.assertEqual(" ".join(reply).split()[:len(words)], words)

    def test_an_interrupt_ends_a_piped_conversation(self):
        with start("chat", "--max-new-tokens", "900") as process:
            process.stdin.write(b"Once upon a time\n")
            process.stdin.flush()
            os.read(process.stdout.fileno(), 1)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(timeout=TIMEOUT_SECONDS), 130)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not os.access(sys.argv[1], os.X_OK):
        print("usage: test_live_cli.py PROGRAM [unittest options]", file=sys.stderr)
        sys.exit(1)
    test_cli.PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()
