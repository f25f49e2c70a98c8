#!/usr/bin/env python3
"""Texts that are shown while they are generated: python3 tests/stages/test_live_cli.py build/stage1

On a pseudo-terminal and through pipes.
"""

import fcntl
import json
import os
import pathlib
import re
import resource
import select
import signal
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


def on_terminal(*arguments, typed=(), columns=80, term="xterm", state="/nonexistent"):
    """Exit code and what the terminal gets. typed: pairs (what is waited for, what is then typed)."""
    main, end = test_cli.open_terminal(columns=columns)
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": term,
                                                                                                       "XDG_STATE_HOME": state}
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
    flags = termios.tcgetattr(main)[3]
    assert flags & termios.ECHO and flags & termios.ICANON, "the terminal is not as it was before"
    assert shown.count(b"\x1b[?2004h") == shown.count(b"\x1b[?2004l"), "pastes are still marked"
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
        self.assertRegex(shown, r"(?s)there.*\n\ninterrupted after \d+ tokens, [\d.]+ tokens/s\n$")
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


class Demonstration(ProgramTest):
    def test_ctrl_c_drops_a_line_and_keeps_the_pool(self):
        code, shown = on_terminal("demo", "--shell", typed=[
            (b"> ", b"new A 3\r"), (b"A 3", b""), (b"> ", b"nonsense"), (b"nonsense", b"\x03"), (b"ends]", b""),
            (b"> ", b"free A\r"), (b"> ", b"quit\r")])
        self.assertEqual(code, 0, shown)
        self.assertNotIn("error", shown)


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
        self.assert_bad_input(run("generate", "--prompt-file", missing), missing, "No such file or directory")
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
        answer, told = by_command.stdout_text.split("\n", 1)
        self.assertEqual(answer, '[a new conversation, with the system prompt "There was a bear."]')
        self.assertTrue(told.startswith(by_option.stdout_text))
        self.assertIn('[system: "There was a bear."]', by_command.stdout_text)
        self.assertNotEqual(by_option.stdout_text, chat(*self.GREEDY, lines=["The bear"]).stdout_text)
        text = json.loads(run("generate", "--chat", "--system", "There was a bear.", "--prompt", "The bear", *self.GREEDY,
                              "--json", "-").stdout)["requests"][0]["text"]
        self.assertEqual(by_option.stdout_text.splitlines()[0], text.split("\n")[0].lstrip())
        self.assert_usage_error(run("generate", "--system", "x", "--prompt", "a"), "--system", "--chat")

    def test_a_conversation_that_outgrows_its_room_says_so_and_goes_on_without_its_oldest_messages(self):
        result = chat("--slots", "64", "--max-new-tokens", "20", lines=["Once upon a time", "king " * 40, "Once"])
        self.assertEqual((result.returncode, result.errors), (0, []))
        warning = "nearly full: soon the oldest messages are left out"
        filling = chat("--slots", "96", "--max-new-tokens", "6", lines=[f"king {n}" for n in range(24)]).stdout_text
        warned = 0
        for part in filling.split("messages are left out from here on"):  # once before each time
            self.assertLessEqual(part.count(warning), 1, filling)
            warned += part.count(warning)
        self.assertGreater(warned, 1, filling)
        left_out = "[the oldest {} messages are left out from here on: the cache (--slots) has 64 tokens]"
        self.assertIn(left_out.format(2), result.stdout_text)
        self.assertIn(left_out.format(4), result.stdout_text)
        full = chat("--slots", "64", lines=["Once upon a time"]).stdout_text
        self.assertIn("the cache (--slots) of 64 tokens is full: from now on the oldest messages are left out", full)
        # A message that is too long by itself fits into no new conversation either.
        for options, limit in ((("--slots", "64"), r"the cache \(--slots\) has 64"), ((), "the context has 1024"),
                               (("--system", "king " * 1000), "the context has 1024")):
            alone = chat(*options, lines=["king " * 1100])
            self.assertRegex(alone.errors[0], rf"^error: this message( and the system prompt)? ha(s|ve) \d+ tokens, and {limit}$")

    def test_a_new_conversation_is_told(self):
        told = chat(lines=["/reset", "/system Be brief.", "/reset", '/system ""'])
        self.assertEqual((told.returncode, told.errors), (0, []))
        without, with_prompt = "[a new conversation]", '[a new conversation, with the system prompt "Be brief."]'
        self.assertEqual(told.stdout_text.splitlines(), [without, with_prompt, with_prompt, without])

    def test_a_message_begins_with_a_slash_behind_a_blank(self):
        path = self.folder / "conversation"
        told = chat(*self.GREEDY, lines=["/etc/passwd", " /etc/passwd", " Once", f"/save {path}"])
        self.assertEqual(told.errors[0], 'error: no command "/etc/passwd"; /help lists them, and a blank before the / makes it a message')
        self.assertEqual(len(told.errors), 2)
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        self.assertEqual([message["content"].rstrip() for message in messages[::2]], ["/etc/passwd", " Once"])

    def test_what_is_wrong_with_a_line_is_one_line_and_the_rest_is_answered(self):
        result = chat(*self.GREEDY, lines=["/nonsense", "/help", "Once upon a time"])
        self.assertEqual(result.returncode, 1)
        self.assertTrue(result.errors[0].startswith('error: no command "/nonsense"; /help lists them'))
        self.assertEqual(len(result.errors), 2)
        for line in ("/reset", "/system TEXT", "/quit", "there was"):
            self.assertIn(line, result.stdout_text)
        self.assertLessEqual(max(map(len, chat(lines=["/help"]).stdout_text.split("\n"))), 80)
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

    def test_ctrl_d_that_is_typed_during_a_reply_ends_the_program_after_it(self):
        code, shown = on_terminal("chat", *self.GREEDY, typed=[(b"\n> ", b"Once upon a time\r"), (b"there", b"\x04")])
        self.assertEqual(code, 0, shown)
        self.assertIn("24 tokens, the first", shown)

    def edited(self):
        if b"--keep-history" not in run("chat", "--help").stdout:
            self.skipTest("this build has no line editor")
        return ("chat", "--temperature", "0", "--max-new-tokens", "4")

    def typed_messages(self, *typed, **options):
        """What the program understood: the user's messages of a conversation in which this is typed, each at a prompt."""
        path = self.folder / "conversation"
        at_prompt = b"\n> "
        code, shown = on_terminal(*self.edited(), *options.pop("arguments", ()), **options, typed=[
            *((at_prompt, text.encode()) for text in typed), (at_prompt, f"/save {path}\r".encode()), (b"messages in", b""),
            (b"> ", b"\x04")])
        self.assertEqual(code, 0, shown)
        # A model without a template may have taken a message for the end of a paragraph.
        return [message["content"].removesuffix("\n") for message in json.loads(path.read_text(encoding="utf-8"))["messages"]
                if message["role"] == "user"]

    def test_lines_are_edited_and_found_again(self):
        left, up, home, delete = "\x1b[D", "\x1b[A", "\x01", "\x1b[3~"
        self.assertEqual(
            self.typed_messages(f"Once upon a tme{left}{left}i\r", f"xking{home}{delete}The \r", f"{up}{up}s\r",
                                "日本語\x7f\x7fはな\x7f\r", "one two\x17three\r"),
            ["Once upon a time", "The king", "Once upon a times", "日は", "one three"])

    def test_wide_characters_leave_nothing_behind(self):
        code, shown = on_terminal(*self.edited(), typed=[(b"\n> ", "日本語".encode()), ("語".encode(), b"\x7f"),
                                                         (b"\x1b[K", b"\x15/quit\r")])
        self.assertEqual(code, 0, shown)
        # "> " and two characters take six columns: the seventh, where the third began, is where it is erased from.
        self.assertIn("\x1b[7G\x1b[K", shown)

    def test_a_paste_is_one_message_and_can_be_edited(self):
        paste = "\x1b[200~first\rsecond \x1b[31m\tline\r\x1b[201~"
        self.assertEqual(self.typed_messages(paste + "!\r", "The king\r"), ["first\nsecond [31m\tline!", "The king"])

    def test_messages_of_several_lines(self):
        self.assertEqual(self.typed_messages("one \\\rtwo\r", '\"\"\"three\rfour\"\"\"\r'), ["one \ntwo", "three\nfour"])
        told = chat(*self.GREEDY, lines=["Once upon\\", "a time", '"""The', 'king"""', "/save " + str(self.folder / "x")])
        self.assertEqual((told.returncode, told.errors), (0, []))
        messages = json.loads((self.folder / "x").read_text(encoding="utf-8"))["messages"]
        self.assertEqual([messages[0]["content"], messages[2]["content"]], ["Once upon\na time", "The\nking"])

    def test_what_is_typed_during_a_reply_waits_until_it_has_ended(self):
        path = self.folder / "conversation"
        code, shown = on_terminal("chat", "--max-new-tokens", "900", typed=[
            (b"\n> ", b"Once upon a time\r"), (b"there", b"Zebras\r/save " + str(path).encode() + b"\r"),
            (b"messages in", b""), (b"> ", b"\x04")])
        self.assertEqual(code, 0, shown)
        reply = shown.split("there", 1)[1].split("\n\x1b[2m[")[0]
        self.assertGreater(len(reply), 100)
        self.assertNotIn("Zebras", reply)
        self.assertNotIn("/save", reply)
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        self.assertEqual([message["content"].strip() for message in messages[::2]], ["Once upon a time", "Zebras"])

    def test_a_signal_that_ends_the_program_leaves_the_terminal_as_it_was(self):
        with self.subTest("Ctrl-\\ at the prompt"):
            self.assertEqual(on_terminal("chat", typed=[(b"\n> ", b"abc\x1c")])[0], -signal.SIGQUIT)
        with self.subTest("Ctrl-\\ in a reply"):
            self.assertEqual(on_terminal("chat", "--max-new-tokens", "900", typed=[
                (b"\n> ", b"Once upon a time\r"), (b"there", b"\x1c")])[0], -signal.SIGQUIT)

    def test_what_was_typed_is_kept_for_the_next_conversation_if_that_is_asked_for(self):
        state = str(self.folder)
        self.typed_messages("The king\r", state=state)
        self.assertEqual(list(self.folder.glob("paged_attention_course/chat*")), [])
        self.typed_messages("The king\r", "\x1b[200~two\rlines\x1b[201~\r", state=state, arguments=("--keep-history",))
        history, = self.folder.glob("paged_attention_course/chat*")
        self.assertEqual(history.stat().st_mode & 0o777, 0o600)
        up = "\x1b[A"
        # The last thing that was typed is /save.
        self.assertEqual(self.typed_messages(up + up + "\r", up * 4 + "\r", state=state, arguments=("--keep-history",)),
                         ["two\nlines", "The king"])

    def test_on_a_terminal_each_reply_has_its_speed_and_what_the_cache_saved(self):
        code, shown = on_terminal("chat", *self.GREEDY, columns=160, typed=[
            (b"\n> ", b"Once upon a time\n"), (b"\n> ", b"The king\n"), (b"\n> ", b"\x04")])
        self.assertEqual(code, 0, shown)
        self.assertEqual(len(re.findall(r"\[24 tokens, the first after \d+ ms, then [\d,]+ tokens/s[;\]]", shown)), 2, shown)
        if stage_number() >= 6:
            self.assertRegex(shown, r"tokens/s; [\d,]+ of the conversation's [\d,]+ tokens were in the prefix cache\]")

    def test_one_token_is_no_plural(self):
        code, shown = on_terminal("chat", "--temperature", "0", "--max-new-tokens", "1", columns=160, typed=[
            (b"\n> ", b"The king\n"), (b"\n> ", b"\x04")])
        self.assertEqual(code, 0, shown)
        self.assertRegex(shown, r"\[1 token, the first after \d+ ms")
        self.assertIn("[cut after 1 token (/set max_tokens)]", shown)

    def test_settings_are_shown_and_changed(self):
        result = chat("--max-new-tokens", "24", lines=["/set", "/set temperature 0", "/set top-k 7", "/set max_tokens = 5",
                                                       "Once upon a time", "/set", "/set top_p 2", "/set size 3"])
        notes = [line for line in result.stdout_text.splitlines() if line.startswith("[temperature")]
        self.assertEqual(notes[0], "[temperature 0.7, top_k 40, top_p 0.95, min_p 0, repetition_penalty 1, seed 0, max_tokens 24]")
        self.assertEqual(notes[-1], "[temperature 0, top_k 7, top_p 0.95, min_p 0, repetition_penalty 1, seed 0, max_tokens 5]")
        self.assertIn("cut after 5 tokens", result.stdout_text)
        greedy = chat("--temperature", "0", "--max-new-tokens", "5", lines=["Once upon a time"]).stdout_text
        self.assertIn(greedy, result.stdout_text)
        self.assertEqual(result.errors[0], 'error: top_p: "2" is not a number from 0 to 1')
        self.assertRegex(result.errors[1], r'^error: no setting "size"; there are: temperature')

    def test_a_reply_is_drawn_anew_in_place_of_the_last(self):
        path = self.folder / "conversation"
        result = chat("--max-new-tokens", "12", lines=["/regenerate", "Once upon a time", "/regenerate", f"/save {path}"])
        self.assertEqual(result.errors[0], "error: there is no reply yet")
        replies = [line for line in result.stdout_text.splitlines() if not line.startswith("[")]
        self.assertEqual(len(set(replies)), 2, replies)
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        self.assertEqual([message["role"] for message in messages], ["user", "assistant"])
        self.assertEqual(messages[1]["content"].strip(), replies[1])
        self.assertIn("the reply is the same", chat(*self.GREEDY, lines=["Once", "/regenerate"]).stdout_text)

    def test_a_reply_is_kept_until_another_has_ended(self):
        path = self.folder / "conversation"
        messages = [{"role": "user", "content": "king " * 1100}, {"role": "assistant", "content": "No."}]
        path.write_text(json.dumps({"messages": messages}), encoding="utf-8")
        failed = chat(lines=[f"/load {path}", "/regenerate", f"/save {path}"])
        self.assertIn("the context has 1024", failed.errors[0])
        self.assertEqual(json.loads(path.read_text(encoding="utf-8"))["messages"], messages)
        first = json.loads(run("generate", "--chat", *LONG[1:3], *self.GREEDY, "--json", "-").stdout)["requests"][0]["text"]
        code, shown = on_terminal("chat", *self.GREEDY[:3], "24", columns=200, typed=[
            (b"\n> ", b"Once upon a time\n"), (b"\n> ", b"/set max_tokens 900\n"), (b"\n> ", b"/regenerate\n"),
            (b"there", b"\x03"), (b"\n> ", f"/save {path}\n".encode()), (b"\n> ", b"\x04")])
        self.assertEqual(code, 0, shown)
        self.assertIn("[the reply before is kept]", shown)
        kept = json.loads(path.read_text(encoding="utf-8"))["messages"]
        self.assertEqual([message["role"] for message in kept], ["user", "assistant"])
        self.assertEqual(kept[1]["content"].strip(), first.strip())

    def test_a_saved_conversation_goes_on(self):
        path = self.folder / "conversation"
        whole = chat(*self.GREEDY, "--system", "There was a bear.", lines=["Once upon a time", f"/save {path}", "The king"])
        rest = chat(*self.GREEDY, lines=[f"/load {path}", "The king", "/system"])
        self.assertEqual(rest.errors, [])
        texts = [[line for line in result.stdout_text.splitlines() if not line.startswith("[")] for result in (whole, rest)]
        self.assertEqual(texts[1], texts[0][1:])
        self.assertIn('[system: "There was a bear."]', rest.stdout_text)
        for content, problem in (("{}", "no conversation"), ("x", "no conversation"),
                                 ('{"messages": [{"role": "assistant", "content": "x"}]}', "do not take turns"),
                                 ('{"messages": [{"role": "user", "content": 5}]}', "no conversation")):
            path.write_text(content, encoding="utf-8")
            self.assertIn(problem, chat(lines=[f"/load {path}"]).errors[0])
        absent, below = self.folder / "none", self.folder / "none" / "x"
        self.assertEqual(chat(lines=[f"/load {absent}", f"/save {below}"]).errors[:2],
                         [f"error: {absent}: cannot open: No such file or directory",
                          f"error: can't write to '{below}': No such file or directory"])
        self.assertIn("needs the name", chat(lines=["/save"]).errors[0])

    def test_a_conversation_that_cannot_be_saved_does_not_cost_the_one_before(self):
        path, link = self.folder / "conversation", self.folder / "link"
        path.write_text("{}", encoding="utf-8")
        link.symlink_to(path)
        self.assertEqual(chat(*self.GREEDY, lines=["Once upon a time", f"/save {link}"]).errors, [])
        before = path.read_text(encoding="utf-8")
        self.assertTrue(link.is_symlink())
        broken = self.folder / "broken"
        broken.symlink_to("nothing")
        self.assertEqual(chat(*self.GREEDY, lines=[f"/save {broken}"]).errors[0],
                         f"error: can't write to '{broken}': a link to nothing")
        self.assertTrue(broken.is_symlink())
        broken.unlink()

        def limit_files():  # as a full disk
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

        with start("chat", *self.GREEDY, preexec_fn=limit_files) as process:
            _, errors = process.communicate(f"The king\n/save {path}\n".encode(), timeout=TIMEOUT_SECONDS)
        self.assertIn(f"can't write to '{path}': File too large\n".encode(), errors)
        self.assertEqual(path.read_text(encoding="utf-8"), before)
        self.assertEqual(sorted(self.folder.iterdir()), [path, link])

    def test_files_that_are_no_conversations_change_nothing(self):
        path, kept = self.folder / "broken", self.folder / "kept"
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        for content in ('{"messages": null}', '{"messages": {"a": {"role": "user", "content": "x"}}}', '{"messages": "x"}', "[" * 100_000,
                        "[" * 200_000 + "]" * 200_000, '{"messages": ' + "[" * 200_000 + "]" * 200_000 + "}",
                        '{"messages": [{"role": "user", "content": "x", "more": ' + '{"a":' * 200_000 + "1" + "}" * 200_000 + "}]}",
                        '{"messages": [{"role": "user", "content": ' + "[" * 100_000, "\0" * 100, '{"messages": [null]}'):
            path.write_text(content, encoding="utf-8")
            result = chat(*self.GREEDY, lines=["/system There was a bear.", f"/load {path}", "/system", f"/save {kept}"])
            self.assertIn("no conversation", result.errors[0], content[:50])
            self.assertIn('[system: "There was a bear."]', result.stdout_text)
            self.assertIn("[1 message in ", result.stdout_text)
        with open(path, "wb") as file:
            file.truncate(100 << 20)
        for place, problem in ((path, "larger than"), (self.folder, "no regular file"), (pipe, "no regular file")):
            result = chat(*self.GREEDY, lines=[f"/load {place}", "Once upon a time"])
            self.assertIn(problem, result.errors[0])
            self.assertIn("there was", result.stdout_text, "the conversation goes on")
        for place in (self.folder, pipe):
            self.assertIn("no regular file", chat(lines=[f"/save {place}"]).errors[0])

    def test_tokens_that_a_saved_conversation_cannot_have_are_not_used(self):
        path = self.folder / "conversation"
        whole = chat(*self.GREEDY, lines=["Once upon a time", f"/save {path}", "The king"]).stdout_text.splitlines()
        reply = [line for line in whole if not line.startswith("[")][-1]
        document = json.loads(path.read_text(encoding="utf-8"))
        for tokens in ([1e30, 5], [10 ** 30], [-1], [2 ** 32 + 5], [5], ["a"], "abc", {"a": 5}):
            document["messages"][1]["tokens"] = tokens
            path.write_text(json.dumps(document), encoding="utf-8")
            result = chat(*self.GREEDY, lines=[f"/load {path}", "The king"])
            self.assertEqual(result.errors, [], tokens)
            self.assertIn("[2 messages from ", result.stdout_text)
            self.assertIn(reply[:20], result.stdout_text)

    def test_several_lines_are_no_name_of_a_file(self):
        result = chat(*self.GREEDY, lines=[f'"""/save {self.folder}/a', 'b"""'])
        self.assertIn("needs the name of a file", result.errors[0])
        self.assertEqual(list(self.folder.glob("a*")), [])

    def test_ctrl_c_twice_at_an_empty_prompt_ends(self):
        code, shown = on_terminal(*self.edited(), typed=[(b"\n> ", b"\x03"), (b"ends]", b""), (b"> ", b"\x03")])
        self.assertEqual(code, 0, shown)
        self.assertIn("Ctrl-C once more, or Ctrl-D, ends", shown)

    def goes_on(self, *typed, **options):
        """What a terminal shows of a conversation that is still there after this is typed."""
        path = self.folder / "conversation"
        code, shown = on_terminal("chat", "--max-new-tokens", "900", **options, typed=[
            *typed, (b"> ", f"/save {path}\r".encode()), (b"messages in", b""), (b"> ", b"\x04")])
        self.assertEqual(code, 0, shown)
        self.assertIn("messages in", shown)
        return shown

    def test_ctrl_c_that_has_ended_a_reply_is_not_counted_at_the_prompt(self):
        self.edited()
        shown = self.goes_on((b"\n> ", b"Once upon a time\r"), (b"there", b"\x03"), (b"^C", b""), (b"> ", b"\x03"), (b"ends]", b""))
        self.assertEqual(shown.count("^C"), 2)

    def test_ctrl_c_on_a_line_clears_the_line_and_is_not_counted(self):
        self.edited()
        for typed in ([(b"> ", b"The king"), (b"king", b"\x03")],
                      [(b"> ", b"The \\\r"), (b"... ", b"\x03")],
                      [(b"> ", b'"""\r'), (b"... ", b"\x03")],
                      [(b"> ", b"ab"), (b"ab", b"\x7f\x7f"), (b"\x1b[K", b"\x03")]):  # a line that has been emptied
            with self.subTest(typed):
                shown = self.goes_on((b"\n> ", b"\x03"), (b"ends]", b""), *typed, (b"^C", b""), (b"> ", b"\x03"), (b"ends]", b""),
                                     (b"> ", b"\r"))
                self.assertEqual(shown.count("ends]"), 2)

    def test_without_a_line_editor_ctrl_c_clears_the_line_and_never_ends(self):
        shown = self.goes_on(*[(b"> ", b"\x03"), (b"^C\r\n", b"")] * 3, term="dumb")
        self.assertEqual(shown.count("^C"), 3)

    def test_ctrl_c_stands_behind_the_line_that_it_clears(self):
        self.edited()
        left = [(b"\x08", b"\x1b[D")] * 3
        shown = self.goes_on((b"\n> ", b"The king"), (b"king", b"\x1b[D"), *left, (b"\x08", b"\x03"), (b"^C", b""))
        self.assertIn("\x08king^C\n", shown)

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
        sys.exit(2)
    test_cli.PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    test_cli.let_signals_end_programs()
    unittest.main()
