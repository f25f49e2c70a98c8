#!/usr/bin/env python3
"""What a stage's program answers to bad input: python3 tests/stages/test_cli.py build/stage1

Bad input (a file, a prompt, a request that cannot fit) ends with exit code 1 and exactly one line on standard error that
names the problem. A wrong option ends with exit code 2, and a line that names program, command and option.
"""

import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from http_clients import http_program  # noqa: E402

PROGRAM = ""  # set from the command line
TIMEOUT_SECONDS = 300


# What a program says that can use a GPU: whether it does.
WHERE = re.compile(rb"^note: computing on [^\n]+\n", re.MULTILINE)
# And how large its cache is, where that is not given.
SIZE = re.compile(rb"^note: a cache of ([\d,]+) slots, [^\n]+\n", re.MULTILINE)
# And, after some seconds, how far it is.
PROGRESS = re.compile(rb"^[^\n]+: [\d,]+ of [\d,]+ \([\d.]+ %\), \d+ s left\n", re.MULTILINE)


def stage_number():
    """Of the program under test; 0 if its name has no number."""
    return int(re.sub(r"\D", "", pathlib.Path(PROGRAM).name) or 0)


def run(*arguments, stdout=subprocess.PIPE, environment=None):
    result = subprocess.run([PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
                            timeout=TIMEOUT_SECONDS, check=False, env=os.environ | (environment or {}))
    result.stderr, result.notes = WHERE.subn(b"", result.stderr)
    result.sizes = [int(size.replace(b",", b"")) for size in SIZE.findall(result.stderr)]
    result.stderr = PROGRESS.sub(b"", SIZE.sub(b"", result.stderr))
    return result


def with_window(model, window, period=0):
    """The bytes of a Llama's file, with further keys. The last one keeps the tensors where they are aligned."""
    def pair(key, value_type, value):
        return struct.pack("<Q", len(key)) + key + struct.pack("<I", value_type) + value

    added = pair(b"llama.attention.sliding_window", 4, struct.pack("<I", window))
    added += pair(b"llama.attention.sliding_window_pattern", 4, struct.pack("<I", period))
    missing = -len(added + pair(b"general.x", 8, bytes(8))) % 32
    added += pair(b"general.x", 8, struct.pack("<Q", missing) + bytes(missing))
    num_pairs = struct.unpack_from("<Q", model, 16)[0]
    return model[:16] + struct.pack("<Q", num_pairs + 3) + added + model[24:]


def let_signals_end_programs():
    """In a shell's background job and under nohup they would inherit that some are ignored."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def open_terminal(rows=24, columns=80):
    """Both ends of a pseudo-terminal of that size: what shows it, and what a program writes to."""
    try:
        main, end = pty.openpty()
    except OSError as error:  # as in a container without /dev/pts
        raise unittest.SkipTest(f"needs pseudo-terminals: {error}") from error
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return main, end


class ProgramTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def assert_bad_input(self, result, *words):
        """Exit code 1, one line on stderr, and each of the words in it."""
        message = result.stderr.decode("utf-8", errors="replace")
        self.assertEqual(result.returncode, 1, message)
        self.assertTrue(message.endswith("\n"), message)
        self.assertEqual(message.count("\n"), 1, message)
        for word in words:
            self.assertIn(word.lower(), message.lower())

    def assert_usage_error(self, result, *words):
        """Exit code 2; the first line names the program and the problem, the second one points to --help."""
        message = result.stderr.decode("utf-8", errors="replace")
        self.assertEqual(result.returncode, 2, message)
        lines = message.splitlines()
        self.assertEqual(len(lines), 2, message)
        self.assertTrue(lines[0].startswith(f"stage{stage_number() or ''}"), message)
        self.assertIn("--help", lines[1])
        for word in words:
            self.assertIn(word.lower(), lines[0].lower())


class Ladder(ProgramTest):
    def setUp(self):
        super().setUp()
        if b"  ladder " not in run("--help").stdout:
            self.skipTest("the stage has no ladder")

    def rows(self, step):
        """The cells of the second table: the first load of K of one warp."""
        result = run("ladder", "--step", str(step))
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        lines = result.stdout.decode().split("the first load of K")[1].splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]

    def test_neighbouring_threads_read_neighbouring_bytes_from_the_second_step_on(self):
        # Block 7 of the toy table, 2 kv heads of 4 rows of 256 bytes: its first row begins at byte 7 * 2 * 4 * 256.
        self.assertEqual(self.rows(2)[0], ["0", "0", "7", "0", "0", "14,336 to 14,351"])
        self.assertEqual(self.rows(2)[7], ["7", "0", "7", "0", "7", "14,448 to 14,463"])
        self.assertNotEqual(self.rows(1)[1][-1], self.rows(2)[1][-1])

    def test_a_split_of_one_block_of_the_context(self):
        output = run("ladder", "--step", "4").stdout.decode()
        self.assertRegex(output, r"\| +2 \| A, query head 0, tokens 8 to 9 \|")

    def test_a_step_that_there_is_not(self):
        self.assert_usage_error(run("ladder", "--step", "8"), "--step")


class Picture(ProgramTest):
    def setUp(self):
        super().setUp()
        if b"  picture " not in run("--help").stdout:
            self.skipTest("a reader's stage without pictures")

    def test_each_is_drawn_to_a_file_and_to_standard_output(self):
        names = [line.split()[0] for line in run("picture").stdout.decode().splitlines()]
        self.assertTrue(names)
        for name in names:
            path = self.folder / f"{name}.svg"
            result = run("picture", name, "--svg", str(path))
            self.assertEqual((result.returncode, result.stdout, result.stderr), (0, b"", b""))
            self.assertEqual(path.read_bytes(), run("picture", name).stdout)
            self.assertEqual(xml.etree.ElementTree.parse(path).getroot().tag, "{http://www.w3.org/2000/svg}svg")
            self.assertIn(name.encode(), run("picture", "--help").stdout)

    def test_a_picture_that_there_is_not(self):
        self.assert_usage_error(run("picture", "sunset"), "sunset")

    def test_a_path_that_can_not_be_written(self):
        name = run("picture").stdout.decode().split()[0]
        path = str(self.folder / "missing" / "picture.svg")
        self.assert_bad_input(run("picture", name, "--svg", path), path)
        self.assert_bad_input(run("picture", name, "--svg", str(self.folder)), str(self.folder))


class Gpu(ProgramTest):
    def setUp(self):
        super().setUp()
        if b"--device" not in run("generate", "--help").stdout:
            self.skipTest("the stage computes on the CPU")

    def test_without_a_gpu_it_goes_on(self):
        automatic = run("generate", "--prompt", "a", "--max-new-tokens", "2")
        self.assertEqual((automatic.returncode, automatic.stderr), (0, b""))
        asked_for = run("generate", "--prompt", "a", "--max-new-tokens", "2", "--device", "gpu")
        if asked_for.returncode != 0:
            self.assert_bad_input(asked_for, "gpu" if b"GPU" in asked_for.stderr else "cuda")
        on_cpu = run("generate", "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu")
        self.assertEqual((on_cpu.returncode, on_cpu.stderr, on_cpu.notes), (0, b"", 0))

    def test_that_there_is_no_gpu_is_said_once_on_a_terminal_and_never_into_a_pipe(self):
        if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"):
            self.skipTest("with a GPU's driver it is a surprise, and said in every run")
        command = ("generate", "--prompt", "a", "--max-new-tokens", "2")
        state = {"XDG_STATE_HOME": str(self.folder)}
        self.assertEqual(run(*command).notes, 0)
        shown = [Terminal.session(self, *command, typed=b"", environment=state) for _ in range(2)]
        self.assertIn("note: computing on the CPU: ", shown[0])
        self.assertNotIn("note: computing", shown[1])
        (self.folder / "paged_attention_course/cpu_note").write_text("another reason\n", encoding="utf-8")
        self.assertIn("note: computing on the CPU: ", Terminal.session(self, *command, typed=b"", environment=state))

    def test_a_program_without_cuda_says_how_to_build_one_with_it(self):
        result = run("generate", "--prompt", "a", "--device", "gpu")
        if b"without CUDA" not in result.stderr:
            self.skipTest("the program was built with CUDA")
        self.assert_bad_input(result, "cmake --preset cuda &&")

    def test_the_cpu_has_one_precision(self):
        if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/dxg"):  # not less exact for want of a GPU
            rounded = run("generate", "--prompt", "a", "--precision", "bf16")
            self.assert_bad_input(rounded, "gpu" if b"GPU" in rounded.stderr else "cuda")
        self.assert_bad_input(run("generate", "--prompt", "a", "--device", "cpu", "--precision", "bf16"), "float32")
        self.assert_usage_error(run("generate", "--prompt", "a", "--precision", "fp8"), "--precision")
        self.assert_usage_error(run("bench", "--kernels", "everything"), "--kernels")


class Model(ProgramTest):
    def test_missing_file(self):
        path = str(self.folder / "missing.gguf")
        self.assert_bad_input(run("generate", "--model", path), path)

    def test_not_a_gguf_file(self):
        path = self.folder / "picture.gguf"
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
        self.assert_bad_input(run("generate", "--model", str(path)), str(path), "gguf")

    def test_empty_file(self):
        path = self.folder / "empty.gguf"
        path.touch()
        self.assert_bad_input(run("generate", "--model", str(path)), str(path))

    def test_directory(self):
        self.assert_bad_input(run("generate", "--model", str(self.folder)), str(self.folder), "directory")

    def test_truncated_model(self):
        bundled = (ROOT / "common/model/tales/tales-5m-q8_0.gguf").read_bytes()
        for size in (3, 20, 1000, len(bundled) // 2, len(bundled) - 1):
            path = self.folder / "short.gguf"
            path.write_bytes(bundled[:size])
            self.assert_bad_input(run("generate", "--model", str(path)), str(path))

    @unittest.skipIf(os.geteuid() == 0, "root may read everything")
    def test_unreadable_file(self):
        path = self.folder / "secret.gguf"
        path.touch(mode=0)
        self.assert_bad_input(run("generate", "--model", str(path)), str(path))

    def test_a_weight_that_is_no_number_means_a_damaged_file(self):
        damaged = bytearray((ROOT / "common/model/tales/tales-5m-q8_0.gguf").read_bytes())
        damaged[-500_000:-499_900] = b"\xff" * 100  # scales among them, in which these bits are NaN
        path = self.folder / "damaged.gguf"
        path.write_bytes(damaged)
        self.assert_bad_input(run("generate", "--model", str(path)), str(path), "damaged")

    def test_layers_that_see_the_last_tokens_only(self):
        path = self.folder / "windows.gguf"
        path.write_bytes(with_window((ROOT / "common/model/tales/tales-5m-q8_0.gguf").read_bytes(), 16))
        prompt = ("--prompt", "Once upon a time", "--max-new-tokens")
        short = run("generate", "--model", str(path), *prompt, "8", "--quiet")
        self.assertEqual(short.stdout, run("generate", *prompt, "8", "--quiet").stdout)
        long = run("generate", "--model", str(path), *prompt, "64", "--quiet")
        has_production = stage_number() == 8 and b"needs production/" not in run(
            "generate", "--speculate", "1", *prompt, "1").stderr
        if has_production:
            self.assertEqual((long.returncode, long.stderr), (0, b""))
            whole = run("generate", *prompt, "64", "--quiet").stdout
            self.assertNotEqual(long.stdout, whole)
            self.assertEqual(long.stdout[:20], whole[:20])
            return
        self.assertEqual(long.returncode, 1)
        self.assertIn(b"layers of this model see the last 16 tokens only", long.stderr)
        self.assertIn(b"more than the model's context of 16", long.stderr)

    def test_several_texts_where_some_layers_see_the_last_tokens_only(self):
        if stage_number() != 8 or b"needs production/" in run("generate", "--speculate", "1", "--prompt", "1").stderr:
            self.skipTest("one text is computed at a time, or no windows are")
        path = self.folder / "windows.gguf"
        path.write_bytes(with_window((ROOT / "common/model/tales/tales-5m-q8_0.gguf").read_bytes(), 24, 2))
        for command in (("shared-reading", "--rounds", "1"),
                        ("serve", "--prompt", "Once", "--samples", "8", "--view", "quiet", "--temperature", "1")):
            result = run(*command, "--model", str(path), "--device", "cpu", "--threads", "1")
            self.assertEqual(result.returncode, 0, result.stderr)

    def test_synthetic_shapes_have_names(self):
        commands = ("bench", "serve", "compare", "speculate") if stage_number() == 8 else ("bench",)
        for command in commands:
            for name in ("gpt-5", ""):
                self.assert_usage_error(run(command, "--synthetic", name), "--synthetic", f'"{name}"', "smollm2-135m")

    def test_bench_checks_the_model_too(self):
        path = str(self.folder / "missing.gguf")
        self.assert_bad_input(run("bench", "--model", path), path)


class Prompt(ProgramTest):
    def test_empty(self):
        self.assert_usage_error(run("generate", "--prompt", ""), "--prompt", "empty")

    def test_one_empty_among_others(self):
        self.assert_usage_error(run("generate", "--prompt", "Once", "--prompt", ""), "--prompt", "empty")

    def test_what_makes_no_sense_without_another_option(self):
        self.assert_usage_error(run("generate", "--prompt", "Once", "--system", "Be brief"), "--system", "--chat")
        self.assert_usage_error(run("generate", "--chat"), "--chat", "--prompt")

    def test_invalid_utf8(self):
        for prompt in (b"Once \xff upon", b"\xc0\xaf", b"\xed\xa0\x80", b"cut \xe2\x82"):
            self.assert_bad_input(run(b"generate", b"--prompt", prompt), "utf-8")

    def test_a_file_that_is_no_prompt_is_named(self):
        path = self.folder / "prompt"
        for content, problem in ((b"", "empty"), (b"\n", "empty"), (b"Once \xff upon", "utf-8")):
            path.write_bytes(content)
            self.assert_bad_input(run("generate", "--prompt", "Once", "--prompt-file", str(path)), str(path), problem)

    def test_longer_than_the_context(self):
        # 4,000 words are at least 4,000 tokens; the bundled model's context has 1,024.
        self.assert_bad_input(run("generate", "--prompt", "king " * 4000), "1024")

    def test_longer_than_the_context_together_with_the_reply(self):
        self.assert_bad_input(run("generate", "--prompt", "Once", "--max-new-tokens", "5000"), "1024")

    def test_chat_without_a_template_continues_the_text_and_says_so(self):
        prompt = ("--prompt", "Who are you?", "--max-new-tokens", "12", "--json", "-")
        plain, chat = (run("generate", *option, *prompt) for option in ((), ("--chat",)))
        texts = [json.loads(result.stdout)["requests"][0]["text"] for result in (plain, chat)]
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(plain.stderr, b"")
        self.assertRegex(chat.stderr, rb"^note: the model has no chat template[^\n]+\n$")

    def test_quiet_prints_the_texts_alone(self):
        prompts = ("--prompt", "The king", "--prompt", "Once upon a time", "--max-new-tokens", "12")
        texts = [request["text"] for request in json.loads(run("generate", *prompts, "--json", "-").stdout)["requests"]]
        for option in ((), ("--stream",)):
            result = run("generate", *prompts, "--quiet", *option)
            self.assertEqual((result.returncode, result.stderr), (0, b""))
            self.assertEqual(result.stdout.decode(), "".join(text + "\n" for text in texts))
        json_alone = run("generate", *prompts, "--quiet", "--json", "-")  # there is nothing else to leave out
        self.assertEqual((json_alone.returncode, json_alone.stderr), (0, b""))
        self.assertEqual([request["text"] for request in json.loads(json_alone.stdout)["requests"]], texts)

    def test_json_says_why_a_text_ended(self):
        prompts = ("--prompt", "The old woman opened the door and", "--prompt", "king " * 1100, "--max-new-tokens", "20")
        requests = json.loads(run("generate", *prompts, "--stop", "o-m", "--json", "-").stdout)["requests"]
        self.assertEqual([request["finish_reason"] for request in requests], ["stop", "rejected"])
        one = json.loads(run("generate", *prompts[:2], "--max-new-tokens", "2", "--json", "-").stdout)["requests"][0]
        self.assertEqual(one["finish_reason"], "length")

    def test_a_reply_of_one_token_has_no_speed(self):
        result = run("generate", "--prompt", "The king", "--max-new-tokens", "1")
        self.assertEqual(result.returncode, 0)
        self.assertIn(b"\nprompts  ", result.stdout)
        self.assertNotIn(b"\nreplies", result.stdout)

    def test_what_changes_the_direction_of_a_text_is_escaped_in_a_prompts_echo(self):
        shown = run("generate", "--prompt", "The \u202egnik\x1b[2J", "--max-new-tokens", "2").stdout
        self.assertIn(b'"The \\xe2\\x80\\xaegnik\\x1b[2J"', shown)


class Cache(ProgramTest):
    def test_request_larger_than_the_cache(self):
        self.assert_bad_input(run("generate", "--prompt", "Once upon a time", "--slots", "16"), "16")

    def test_a_bench_without_slots_has_room_for_its_text(self):
        result = run("bench", "--prompt-tokens", "1000", "--new-tokens", "1", *self.cpu())
        self.assertEqual((result.returncode, result.stderr), (0, b""))

    def test_a_bench_in_too_few_slots_says_how_many_it_needs(self):
        result = run("bench", "--prompt-tokens", "100", "--new-tokens", "8", "--slots", "64", *self.cpu())
        self.assert_bad_input(result, "100 + 8 tokens", "--slots 108")

    def cpu(self):
        return ("--device", "cpu") if stage_number() >= 7 else ()

    def test_requests_that_do_not_fit_get_one_line_and_no_empty_report(self):
        result = run("generate", "--prompt", "x", "--max-new-tokens", "4000")
        self.assert_bad_input(result, "1024")
        self.assertEqual(result.stdout, b"")

    def test_a_request_that_does_not_fit_leaves_the_others_their_texts(self):
        result = run("generate", "--prompt", "Once upon a time", "--prompt", "king " * 400, "--max-new-tokens", "700",
                     "--stop", ".")
        self.assert_bad_input(result, "1024")
        self.assertIn(b"no reply: a prompt of 403 tokens", result.stdout)
        self.assertIn(b"| tokens computed", result.stdout)

    def test_prompt_larger_than_the_cache(self):
        self.assert_bad_input(
            run("generate", "--prompt", "king " * 100, "--max-new-tokens", "1", "--slots", "32"), "32")


class Options(ProgramTest):
    def test_zero_and_negative_counts(self):
        for option in ("--max-new-tokens", "--slots", "--chunk", "--threads"):
            for value in ("0", "-1", "-2147483648"):
                with self.subTest(option=option, value=value):
                    self.assert_usage_error(run("generate", "--prompt", "Once", option, value), option)

    def test_slot_numbers_are_ints(self):
        for value in ("16777217", "2147483647", "2147483648", "4294967296"):
            with self.subTest(value=value):
                self.assert_usage_error(run("generate", "--prompt", "Once", "--slots", value), "--slots")

    def test_counts_that_are_no_numbers(self):
        for option in ("--max-new-tokens", "--slots", "--chunk", "--threads", "--top-k"):
            for value in ("many", "1.5", "99999999999999999999", ""):
                with self.subTest(option=option, value=value):
                    self.assert_usage_error(run("generate", "--prompt", "Once", option, value), option)

    def test_sampling_out_of_range(self):
        for option, value in (("--temperature", "-0.5"), ("--temperature", "nan"), ("--top-k", "-1"),
                              ("--top-p", "-0.1"), ("--top-p", "1.5"), ("--top-p", "nan"), ("--min-p", "-0.1"),
                              ("--min-p", "1.1"), ("--min-p", "nan"), ("--repetition-penalty", "0"),
                              ("--repetition-penalty", "-1"), ("--repetition-penalty", "nan"), ("--logprobs", "-1"),
                              ("--logprobs", "21"), ("--stop", "")):
            with self.subTest(option=option, value=value):
                self.assert_usage_error(run("generate", "--prompt", "Once", option, value), option)
        self.assert_usage_error(run("generate", "--prompt", "Once", "--model", ""), "--model", "empty")
        message = run("generate", "--stop", "").stderr.decode()
        self.assertEqual(message.count("--stop"), 1, message)

    def test_a_chat_template_is_chosen_by_name(self):
        chat = ("generate", "--prompt", "Hello", "--chat", "--quiet", "--max-new-tokens", "4", "--chat-template")
        told = run(*chat, "llama2")
        self.assertEqual((told.returncode, told.stderr), (0, b""))  # the model's own none would be noted
        self.assertNotEqual(told.stdout, run(*chat, "none").stdout)
        self.assert_usage_error(run(*chat, "alpaca"), "--chat-template", "alpaca", "known: chatml, qwen3")
        self.assert_bad_input(run(*chat, "chatml"), "<|im_start|>", "--chat-template")
        self.assert_usage_error(run("generate", "--prompt", "Hello", "--chat-template", "none"), "--chat-template", "--chat")

    def test_prompts_that_are_equal_get_texts_of_their_own(self):
        requests = json.loads(run("generate", "--prompt", "Once upon a time", "--prompt", "Once upon a time",
                                  "--max-new-tokens", "12", "--temperature", "1", "--json", "-").stdout)["requests"]
        self.assertNotEqual(requests[0]["text"], requests[1]["text"])

    def test_a_stop_string_ends_the_text_and_is_no_part_of_it(self):
        prompt = ("--prompt", "The old woman opened the door and", "--max-new-tokens", "20")
        stopped, whole = (json.loads(run("generate", *prompt, *stop, "--json", "-").stdout)["requests"][0]
                          for stop in (("--stop", "o-m", "--stop", "zzz"), ("--stop", "zzz")))
        self.assertEqual(stopped["text"], whole["text"].split("o-m")[0])
        self.assertEqual(stopped["tokens"], whole["tokens"][:len(stopped["tokens"])])
        self.assertLess(len(stopped["tokens"]), len(whole["tokens"]))

    def test_log_probabilities_are_those_before_the_options(self):
        greedy = ("generate", "--prompt", "Once upon a time", "--max-new-tokens", "5", "--logprobs", "2", "--json", "-")
        plain, hot = (json.loads(run(*greedy, *options).stdout)["requests"][0]
                      for options in ((), ("--temperature", "0.9", "--top-k", "1")))
        self.assertEqual(plain["logprobs"], hot["logprobs"])
        self.assertEqual([entry["token"] for entry in plain["logprobs"]], plain["tokens"])
        for entry in plain["logprobs"]:
            self.assertEqual((entry["rank"], len(entry["best"])), (1, 2))
            self.assertEqual(entry["best"][0]["logprob"], entry["logprob"])
            self.assertLess(entry["best"][1]["logprob"], entry["logprob"])
        self.assertEqual(run(*greedy[:-2]).stdout.count(b"rank 1  best:"), 5)

    def test_a_repetition_penalty_changes_a_greedy_text(self):
        texts = [json.loads(run("generate", "--prompt", "a", "--max-new-tokens", "48", "--repetition-penalty", penalty,
                                "--json", "-").stdout)["requests"][0]["tokens"] for penalty in ("1", "1.8")]
        self.assertGreater(len(set(texts[1])), len(set(texts[0])))

    def test_seeds_that_are_none(self):
        for value in ("-1", "99999999999999999999", "1.5", ""):
            with self.subTest(value=value):
                for command in ("generate", *(("sample",) if stage_number() >= 5 else ()),
                                *(("serve", "compare") if stage_number() >= 8 else ())):
                    self.assert_usage_error(run(command, "--seed", value), "--seed")

    def test_an_option_twice(self):
        self.assert_usage_error(run("generate", "--slots", "64", "--slots", "128"), "--slots")

    def test_options_that_exclude_each_other(self):
        self.assert_usage_error(run("bench", "--synthetic", "llama-3-8b", "--model", "a.gguf"), "--synthetic")

    def test_rounds_shows_which_request_is_preempted_and_when_it_is_resumed(self):
        if "rounds" not in self.commands():
            self.skipTest("this stage has no rounds")
        small = ("rounds", "--slots", "32", "--max-new-tokens", "20")
        lines = run(*small, "--prompt", "A wolf", "--prompt", "The lion").stdout.decode().splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
        self.assertEqual([row[1] for row in cells],
                         ["0 and 1 are admitted", "1 is preempted for 0: 16 tokens in 1 block", "0 ends", "1 is admitted",
                          "1 ends"])
        self.assertEqual(cells[0][2:], ["2", "0"])
        self.assert_bad_input(run(*small, "--prompt", "A wolf " * 20), "slots")

    def test_unknown_option(self):
        self.assert_usage_error(run("generate", "--no-such-option"), "--no-such-option")

    def test_unknown_command(self):
        self.assert_usage_error(run("no-such-command"), "no command", "no-such-command")

    def test_version(self):
        result = run("--version")
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        self.assertRegex(result.stdout.decode(), r"^stage\d+ of paged_attention_course \d+\.\d+\n$")

    def test_without_a_command_they_are_listed(self):
        result = run()
        self.assertEqual((result.returncode, result.stdout), (2, b""))
        for command in (b"\n  generate  ", b"\n  chat  ", b"\n  bench  ", b"\n  demo  "):
            self.assertIn(command, result.stderr)

    def test_a_wrong_word_is_named_as_it_was_typed_with_what_may_have_been_meant(self):
        program = run("--version").stdout.decode().split()[0]
        for arguments, problem in (
                (("genrate",), 'no command "genrate"; did you mean generate?'),
                (("--hlp",), 'no option "--hlp"; did you mean --help?'),
                (("generate", "--promt", "hi"), 'no option "--promt"; did you mean --prompt?'),
                (("generate", "--prompt", "hi", "--temprature=2", "x"), 'no option "--temprature=2"; did you mean --temperature?'),
                (("generate", "-seed", "2"), 'no option "-seed"; did you mean --seed?'),
                (("generate", "--prompt", "hi", "--seed"), "--seed needs a value"),
                (("generate", "--max-new", "2"), 'no option "--max-new"; did you mean --max-new-tokens?'),
                (("generate", "--zzzzzz"), 'no option "--zzzzzz"'),
                (("generate", "hi"), 'unexpected "hi"; a text to continue goes after --prompt'),
                (("demo", "\x1b[2J"), 'unexpected "\\x1b[2J"'),
                (("generate", "--slots", "x"), '--slots: "x" is not a whole number from 1 to 16777216')):
            who = " ".join((program, arguments[0])) if arguments[0] in ("generate", "demo") else program
            result = run(*arguments)
            self.assertEqual((result.returncode, result.stdout), (2, b""))
            self.assertEqual(result.stderr.decode(), f"{who}: {problem}\ntry '{who} --help'\n")

    def test_option_without_its_value(self):
        self.assert_usage_error(run("generate", "--prompt"), "--prompt")

    def test_help(self):
        for arguments in (("--help",), ("generate", "--help"), ("bench", "--help"), ("demo", "--help")):
            result = run(*arguments)
            self.assertEqual(result.returncode, 0, arguments)
            self.assertEqual(result.stderr, b"")
        for words in ((), ("generate",)):
            self.assertEqual(run("help", *words).stdout, run(*words, "--help").stdout)
        self.assertEqual(run("help", "help").stdout, run("--help").stdout)
        self.assert_usage_error(run("help", "genrate"), 'no command "genrate"', "did you mean generate")
        self.assert_usage_error(run("hlep"), 'no command "hlep"', "did you mean help")
        for option in (b"--prompt", b"--model", b"--max-new-tokens", b"--slots", b"--chunk", b"--threads",
                       b"--temperature", b"--top-k", b"--top-p", b"--seed", b"--chat", b"--json"):
            self.assertIn(option, run("generate", "--help").stdout)

    def test_help_fits_a_terminal(self):
        for arguments in ((), *((command,) for command in self.commands())):
            for line in run(*arguments, "--help").stdout.decode().splitlines():
                self.assertLessEqual(len(line), 80, (arguments, line))

    def test_help_has_no_types_and_ranges_in_raw_form(self):
        for command in self.commands():
            self.assertNotRegex(run(command, "--help").stdout.decode(), r"\b(INT|UINT|FLOAT|ENUM)\b|->|[{}]| in \[", command)

    def test_help_says_which_options_take_a_file_and_an_empty_name_is_none(self):
        files = {"--model", "--prompt-file", "--json", "--svg", "--trace", "--plot", "--api-key-file", "--prompts", "--tokens"}
        for command in self.commands():
            for option, value in re.findall(r"^  (--[\w-]+) (FILE|TEXT)$", run(command, "--help").stdout.decode().replace("  ", "\n  "),
                                            re.MULTILINE):
                with self.subTest(f"{command} {option}"):
                    self.assertEqual(value, "FILE" if option in files else "TEXT")
                    if option in files:
                        self.assert_usage_error(run(command, option, ""), option, "name is empty")

    def commands(self):
        listed = run("--help").stdout.decode().split("Subcommands:")[1]
        commands = re.findall(r"^  ([\w-]+)", listed, re.MULTILINE)
        self.assertTrue({"generate", "bench", "demo"} <= set(commands))
        return commands

    def test_help_names_the_architectures_that_load(self):
        source = (ROOT / "common/model/llama.cpp").read_text(encoding="utf-8")
        names = re.findall(r'^\s*\{+"(\w+)"', source.split("kArchitectures")[1].split(";")[0], re.MULTILINE)
        self.assertGreaterEqual(len(names), 3)
        for command in ("generate", "bench", *(("plan",) if stage_number() >= 2 else ())):
            help_text = run(command, "--help").stdout.decode().lower().replace("gemma 3", "gemma3")
            for name in names:
                self.assertIn(name, help_text)

    def test_options_without_effect_are_not_offered(self):
        sampling = ["--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--sample-index", "--stop"]
        prompts = ["--prompt", "--prompt-file", "--chat", "--system", "--max-new-tokens"]
        not_offered = {"beam": [*sampling, "--seed"], "rounds": [*sampling, "--seed"], "bench": ["--context-length"],
                       "prefix": [*sampling, *prompts, "--seed", "--no-prefix-cache", "--context-length"],
                       "compare": [*sampling, *prompts, "--context-length"]}
        for command in set(self.commands()) & set(not_offered):
            help_text = run(command, "--help").stdout.decode()
            for option in not_offered[command]:
                with self.subTest(command=command, option=option):
                    self.assertNotRegex(help_text, rf"{option}\b")
                    self.assert_usage_error(run(command, option, "1"), option)


class Drafts(ProgramTest):
    """`speculate` with a file of prompts."""

    def setUp(self):
        super().setUp()
        if stage_number() < 8:
            self.skipTest("this stage has no drafts")
        self.prompts = self.folder / "prompts.txt"

    def speculate(self, text, *arguments):
        self.prompts.write_text(text, encoding="utf-8")
        return run("speculate", "--device", "cpu", "--prompts", str(self.prompts), "--max-new-tokens", "6", "--rounds", "1",
                   *arguments)

    def test_a_row_for_each_kind_of_prompt_and_one_for_all(self):
        result = self.speculate("== tale\nOnce upon a time\n\n== tale\nA wolf\n== other\nThe king\n")
        if b"needs production/" in result.stderr:
            self.skipTest("this build computes no drafts")
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = [line.split("|")[1].strip() for line in result.stdout.decode().split("\n\n")[0].splitlines()[2:]]
        self.assertEqual(rows, ["tale", "other", "all, temperature 1"])

    def test_prompts_as_tokens(self):
        result = self.speculate("== tale\nA wolf\n== other\nA\nwolf\n\n", "--tokens", "-")
        written = json.loads(result.stdout)
        self.assertEqual(written["max_new_tokens"], 6)
        self.assertEqual([prompt["kind"] for prompt in written["prompts"]], ["tale", "other"])
        self.assertTrue(all(prompt["tokens"] for prompt in written["prompts"]))

    def test_a_file_that_has_no_prompts(self):
        for text, words in (("", "cannot read"), ("A wolf\n", "== KIND"), ("== tale\n\n== tale\nA wolf\n", "is empty"),
                            ("== tale\n\xff".encode("latin-1"), "UTF-8")):
            with self.subTest(text=text):
                if isinstance(text, bytes):
                    self.prompts.write_bytes(text)
                    result = run("speculate", "--prompts", str(self.prompts))
                else:
                    result = self.speculate(text)
                result.stderr = re.sub(rb"^note: the model has no chat template[^\n]*\n", b"", result.stderr)
                self.assert_bad_input(result, str(self.prompts), words)
        self.assert_usage_error(run("speculate", "--prompts", str(self.prompts), "--prompt", "A"), "--prompt")
        self.assert_usage_error(run("speculate", "--tokens", "-"), "--prompts")


class Output(ProgramTest):
    def test_json_into_a_missing_folder(self):
        path = str(self.folder / "missing" / "result.json")
        self.assert_bad_input(run("generate", "--prompt", "Once", "--json", path), path, "No such file or directory")

    def test_json_into_a_folder(self):
        self.assert_bad_input(run("generate", "--prompt", "Once", "--json", str(self.folder)), str(self.folder))

    def test_full_disk(self):
        self.assert_bad_input(run("generate", "--prompt", "Once", "--max-new-tokens", "2", "--json", "/dev/full"),
                              "/dev/full", "No space left on device")

    def test_standard_output_on_a_full_disk(self):
        for arguments in (("--json", "-"), ()):
            with open("/dev/full", "wb") as full:
                result = run("generate", "--prompt", "Once", "--max-new-tokens", "2", *arguments, stdout=full)
            self.assert_bad_input(result, "output")

    def test_a_refused_request_leaves_an_old_result_alone(self):
        path = self.folder / "result.json"
        path.write_text("old", encoding="utf-8")
        empty = self.folder / "empty.txt"
        empty.touch()
        self.assert_bad_input(run("generate", "--prompt-file", str(empty), "--json", str(path)), "empty")
        self.assertEqual(path.read_text(encoding="utf-8"), "old")

    def test_an_interrupt_leaves_no_empty_file(self):
        path = self.folder / "result.json"
        prompts = ["--prompt", "Once upon a time"] * 40  # seconds of work
        process = subprocess.Popen([PROGRAM, "generate", *prompts, "--max-new-tokens", "400", "--json", str(path),
                                    "--threads", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=TIMEOUT_SECONDS)
        self.assertNotEqual(process.returncode, 0, "the run ended before the interrupt")
        self.assertFalse(path.exists())

    def test_a_model_that_is_not_there_leaves_no_empty_file(self):
        path = self.folder / "result.json"
        self.assert_bad_input(run("generate", "--model", "/nope", "--json", str(path)), "/nope")
        self.assertFalse(path.exists())

    def test_a_refused_request_leaves_no_empty_file(self):
        path = self.folder / "result.json"
        empty = self.folder / "empty.txt"
        empty.touch()
        self.assert_bad_input(run("generate", "--prompt-file", str(empty), "--json", str(path)), "empty")
        self.assertFalse(path.exists())


class Json(ProgramTest):
    ARGUMENTS = ("generate", "--prompt", "Once upon a time", "--prompt", "The king", "--max-new-tokens", "3")

    def test_the_table_has_each_counter_once(self):
        names = re.findall(rb"^\| (\w[^|]*?) +\| +[\d,.]+", run(*self.ARGUMENTS).stdout, re.MULTILINE)
        self.assertGreater(len(names), 5)
        self.assertEqual(sorted(set(names)), sorted(names))

    def check(self, text):
        result = json.loads(text)
        self.assertEqual(result["stage"], pathlib.Path(PROGRAM).name)
        self.assertEqual([request["prompt"] for request in result["requests"]], ["Once upon a time", "The king"])
        for request in result["requests"]:
            self.assertIsInstance(request["text"], str)
            self.assertIn(len(request["tokens"]), (1, 2, 3))
        # What a text costs: every token but the last drawn goes through the model once or, without a cache, every time.
        drawn = [(request["prompt_tokens"], len(request["tokens"]) + (len(request["tokens"]) < 3))
                 for request in result["requests"]]
        self.assertEqual(result["counters"]["tokens_computed"], sum(prompt + count - 1 for prompt, count in drawn))
        self.assertEqual(result["counters"]["tokens_without_cache"],
                         sum(prompt + i for prompt, count in drawn for i in range(count)))
        self.assertIsInstance(result["counters"]["slots_total"], int)
        self.assertGreater(result["counters"]["slots_reserved"], 0)
        self.assertGreater(result["counters"]["slots_used"], 0)
        self.assertLessEqual(result["counters"]["slots_used"], result["counters"]["slots_reserved"])
        self.assertGreater(result["timing"]["milliseconds_per_token"], 0)

    def test_to_standard_output_and_nothing_else_there(self):
        result = run(*self.ARGUMENTS, "--json", "-")
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        self.check(result.stdout)

    def test_to_a_file_and_nothing_on_standard_output(self):
        path = self.folder / "result.json"
        path.write_text("an old result, longer than nothing", encoding="utf-8")
        result = run(*self.ARGUMENTS, "--json", str(path))
        self.assertEqual((result.returncode, result.stderr, result.stdout), (0, b"", b""))
        self.check(path.read_text(encoding="utf-8"))

    def test_same_seed_same_text(self):
        sampled = (*self.ARGUMENTS, "--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--json", "-")
        first, again = (json.loads(run(*sampled, "--seed", "7").stdout)["requests"] for _ in range(2))
        self.assertEqual(first, again)


class Sharing(ProgramTest):
    """`sample` and `beam`, which stages have from the fifth on."""

    PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "12")

    def setUp(self):
        super().setUp()
        if stage_number() < 5:
            self.skipTest("this stage has no commands for it")

    def test_counts_out_of_range(self):
        for command, option in (("sample", "--samples"), ("beam", "--beams")):
            for value in ("0", "-1", "many", "1.5", "99999999999999999999"):
                with self.subTest(command=command, value=value):
                    self.assert_usage_error(run(command, *self.PROMPT, option, value), option)

    def test_samples_are_drawn_at_a_temperature_that_help_shows(self):
        self.assertRegex(run("sample", "--help").stdout.decode(), r"--temperature .*\(default: 0\.8\)")
        self.assertEqual(run("sample", *self.PROMPT).stdout,
                         run("sample", *self.PROMPT, "--temperature", "0.8").stdout)

    def test_length_penalty_out_of_range(self):
        for value in ("nan", "inf", "-inf", "-0.5", "11", "much"):
            with self.subTest(value=value):
                self.assert_usage_error(run("beam", *self.PROMPT, "--length-penalty", value), "--length-penalty")

    def test_pool_too_small(self):
        # Stage 8 rejects what may not fit. The earlier stages start it, and run out of blocks on the way.
        expected = "the blocks ran out after" if stage_number() < 8 else "blocks, and the whole cache has 6"
        for command in (("sample", "--samples", "8", "--temperature", "2"), ("beam", "--beams", "16")):
            result = run(*command, *self.PROMPT, "--slots", "24", "--block-size", "4")
            with self.subTest(command=command):
                self.assert_bad_input(result, expected)

    def test_request_larger_than_the_pool(self):
        for command in ("sample", "beam"):
            self.assert_bad_input(run(command, *self.PROMPT, "--slots", "8"), "8")

    def test_samples_are_those_of_lone_runs(self):
        sampled = ("--temperature", "0.9")
        shared = run("sample", *self.PROMPT, *sampled, "--samples", "3", "--seed", "5").stdout.decode()
        for index in (0, 1, 2):
            result = run("generate", *self.PROMPT, *sampled, "--seed", "5", "--sample-index", str(index), "--json", "-")
            text = json.loads(result.stdout)["requests"][0]["text"]
            self.assertIn(text.split("\n")[0], shared)

    def test_one_beam_is_greedy(self):
        text = json.loads(run("generate", *self.PROMPT, "--json", "-").stdout)["requests"][0]["text"]
        self.assertIn(text.split("\n")[0], run("beam", *self.PROMPT, "--beams", "1").stdout.decode())

    def test_trace(self):
        for command in ("sample", "beam"):
            result = run(command, *self.PROMPT, "--trace")
            self.assertEqual((result.returncode, result.stderr), (0, b""))
            self.assertIn(b"owners, 0 to 27 ", result.stdout)
            small = run(command, *self.PROMPT, "--trace", "--slots", "128")
            self.assertIn(b"owners of each block", small.stdout)

    def test_a_trace_fits_a_terminal(self):
        for option in (("sample", "--samples", "8"), ("beam", "--beams", "8"), ("beam", "--beams", "12")):
            for block_size in ("1", "16"):
                output = run(*option, *self.PROMPT, "--trace", "--block-size", block_size).stdout.decode()
                steps = re.findall(r"^step .*|^ *\d+ +\d+ .*\]$|^ *\d+ +\d+ .*\.\.\.$", output, re.MULTILINE)
                self.assertGreater(len(steps), 10, output)
                for line in steps:
                    self.assertLessEqual(len(line), 80, line)
        self.assertIn("...", steps[2], "the list of twelve branches is cut")


class Prefix(ProgramTest):
    """`prefix`, which stages have from the sixth on."""

    def setUp(self):
        super().setUp()
        if stage_number() < 6:
            self.skipTest("this stage has no command for it")

    def test_slots_that_fill_no_block_are_rounded_up(self):
        result = run("prefix", "--users", "1", "--prefix-tokens", "16", "--user-tokens", "4", "--turns", "1",
                     "--slots", "100", "--block-size", "128")
        self.assertEqual((result.returncode, result.stderr), (0, b""))


class Serving(ProgramTest):
    """`serve` and `compare`, which stages have from the eighth on."""

    PROMPTS = ("--prompt", "Once upon a time", "--prompt", "The king", "--max-new-tokens", "6", "--virtual-clock")

    def setUp(self):
        super().setUp()
        if stage_number() < 8:
            self.skipTest("this stage has no commands for it")

    def test_counts_out_of_range(self):
        for option in ("--budget", "--max-sequences", "--requests", "--samples", "--beams"):
            for value in ("0", "-1", "many", "1.5"):
                with self.subTest(option=option, value=value):
                    self.assert_usage_error(run("serve", *self.PROMPTS, option, value), option)
        self.assert_usage_error(run("serve", *self.PROMPTS, "--preemption", "never"), "--preemption")
        self.assert_usage_error(run("serve", *self.PROMPTS, "--stop", ""), "--stop")
        for rate in ("-1", "0", "1e-308", "nan"):
            self.assert_usage_error(run("compare", "--rate", rate), "--rate")

    def test_the_budget_alone_says_how_large_a_forward_pass_is(self):
        for command in ("serve", "compare"):
            self.assert_usage_error(run(command, "--chunk", "64"), "--chunk")
            help_text = run(command, "--help").stdout
            self.assertIn(b"--budget", help_text)
            self.assertNotIn(b"--chunk", help_text)

    def test_a_plot_stays_until_there_is_a_new_one(self):
        path = self.folder / "plot.svg"
        path.write_text("the last one", encoding="utf-8")
        self.assert_bad_input(run("compare", "--plot", str(path), "--max-length", "5000"), "can have")
        self.assertEqual(path.read_text(encoding="utf-8"), "the last one")

    def test_a_number_of_requests_is_for_prompts(self):
        path = self.folder / "trace"
        path.write_text("0 5 3\n", encoding="utf-8")
        for option, value in (("--arrivals", str(path)), ("--workload", "offline")):
            self.assert_usage_error(run("serve", option, value, "--requests", "3", "--synthetic", "tales-5m"), "--requests")
        result = run("serve", *self.PROMPTS, "--device", "cpu", "--arrivals", "poisson:10", "--requests", "3")
        self.assertIn(b"requests finished                    | 3 ", result.stdout)

    def test_arrivals_in_a_folder_are_no_arrivals(self):
        self.assert_bad_input(run("serve", *self.PROMPTS, "--arrivals", str(self.folder)), "it is a directory")

    def test_random_weights_and_a_model_exclude_each_other(self):
        for command in ("serve", "compare"):
            self.assert_usage_error(run(command, "--synthetic", "tales-5m", "--model", "a.gguf"), "--synthetic")

    def test_beams_exclude_samples_and_what_they_are_drawn_with(self):
        for option, value in (("--samples", "3"), ("--temperature", "0.8"), ("--top-k", "40"), ("--top-p", "0.9"),
                              ("--min-p", "0.1"), ("--repetition-penalty", "1.1"), ("--sample-index", "1")):
            for arguments in (("--beams", "4", option, value), (option, value, "--beams", "4")):
                self.assert_usage_error(run("serve", *self.PROMPTS, *arguments), "--beams", option)

    def test_a_run_in_which_all_requests_are_rejected_has_failed(self):
        for option, reason in (("--max-new-tokens=4000", "1024"), ("--samples=65", "65 sequences")):
            result = run("serve", "--prompt", "x", option, "--view", "quiet", "--virtual-clock")
            self.assert_bad_input(result, "no request was served", reason)
            self.assertRegex(result.stdout.decode(), rf"\n +0  rejected: .*{reason}")

    def test_no_memory_for_what_is_swapped_out_is_not_blamed_on_the_cache(self):
        limit = (3 << 30, 3 << 30)  # of address space: less than the host's slots need
        result = subprocess.run([PROGRAM, "serve", *self.PROMPTS, "--host-slots", str(1 << 24), "--device", "cpu"],
                                capture_output=True, check=False, timeout=TIMEOUT_SECONDS,
                                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit))
        if b"ReserveShadowMemoryRange" in result.stderr or b"Sanitizer" in result.stderr:
            self.skipTest("a sanitizer needs the address space")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn(b"--host-slots 16777216", result.stderr.splitlines()[-1])
        self.assertNotIn(b"(--slots)", result.stderr.splitlines()[-1])

    def test_sizes_of_the_host_cache_that_make_no_sense(self):
        for size in ("0", "-1GiB", "lots"):
            self.assert_usage_error(run("serve", *self.PROMPTS, "--host-cache=" + size), "--host-cache", "16GiB")
        for size, reason in (("1000", "less than one block"), ("7e15", "more than can be used")):
            result = run("serve", *self.PROMPTS, "--host-cache", size)
            if b"needs production/" in result.stderr:
                self.skipTest("this build has no second tier of the cache")
            self.assert_bad_input(result, "--host-cache", reason)

    def test_arrivals_that_make_no_sense(self):
        for rate in ("", "0", "-3", "nan", "soon"):
            self.assert_usage_error(run("serve", *self.PROMPTS, "--arrivals", "poisson:" + rate), "--arrivals", "poisson")
        missing = str(self.folder / "missing")
        self.assert_bad_input(run("serve", "--arrivals", missing), missing, "poisson:RATE")
        path = self.folder / "trace"
        path.write_text("0 5 3\n1 5\n", encoding="utf-8")
        self.assert_bad_input(run("serve", "--arrivals", str(path)), str(path), "line 2")
        for rate in ("1e-308", "1e300", "inf"):
            self.assert_usage_error(run("serve", *self.PROMPTS, "--arrivals", "poisson:" + rate), "requests a second")

    def test_a_prompt_that_is_too_long_is_rejected_before_it_is_made(self):
        path = self.folder / "trace"
        path.write_text("0 400000000 1\n0 5 3\n", encoding="utf-8")
        start = time.monotonic()
        result = run("serve", "--virtual-clock", "--view", "quiet", "--arrivals", str(path))
        self.assertIn(b"400000000 tokens", result.stdout)
        self.assertLess(time.monotonic() - start, 10)

    def test_compare_in_a_cache_of_one_slot(self):
        self.assert_bad_input(run("compare", "--slots", "1", "--requests", "2"), "--slots")

    def test_files_that_cannot_be_written(self):
        for option in ("--trace", "--json"):
            path = str(self.folder / "missing" / "file")
            result = run("serve", *self.PROMPTS, option, path)
            self.assert_bad_input(result, path, "No such file or directory")
            self.assertEqual(result.stdout, b"", "found out before anything is served")
            self.assert_bad_input(run("serve", *self.PROMPTS, option, "/dev/full"), "/dev/full")
        self.assert_bad_input(run("compare", "--plot", str(self.folder)), str(self.folder))

    def test_standard_output_on_a_full_disk(self):
        with open("/dev/full", "wb") as full:
            self.assert_bad_input(run("serve", *self.PROMPTS, stdout=full), "output")

    def test_the_texts_are_those_of_generate(self):
        texts = [request["text"] for request in
                 json.loads(run("generate", *self.PROMPTS[:-1], "--json", "-").stdout)["requests"]]
        result = run("serve", *self.PROMPTS)
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        for number, text in enumerate(texts):
            self.assertIn(f'  {number}  {json.dumps(text)}'.encode(), result.stdout)

    def test_the_cache_has_room_for_the_longest_request(self):
        device = ("--device", "cpu", "--virtual-clock", "--view", "quiet")
        path = self.folder / "trace"
        path.write_text("0 900 3\n", encoding="utf-8")
        self.assertEqual(run("serve", *device, "--arrivals", str(path)).sizes, [4096])
        path.write_text("0 900 61\n0 5 3\n", encoding="utf-8")  # the last token needs no slot: whole blocks
        long = run("serve", *device, "--arrivals", str(path), "--samples", "60")
        self.assertIn(b"rejected, cancelled, failed          | 0, 0, 0", long.stdout)
        self.assertEqual(long.sizes, [(900 // 16 + 60 * (960 // 16 - 900 // 16)) * 16])
        given = run("serve", *device, "--arrivals", str(path), "--slots", "512")
        self.assertEqual(given.sizes, [])
        self.assertIn(b"--slots 960 would do", given.stdout)

    def test_what_is_longer_than_the_context_needs_no_memory(self):
        for command in ("generate", "serve"):
            for count in ("8000000", "16777216"):
                result = run(command, "--prompt", "Once", "--max-new-tokens", count, "--device", "cpu")
                self.assertIn(b"more than the model's context of 1024; 1021 new ones fit", result.stdout + result.stderr)

    def test_a_context_length_bounds_requests(self):
        result = run("serve", *self.PROMPTS, "--view", "quiet", "--context-length", "8")
        self.assertIn(b"more than the --context-length of 8; 2 new ones fit", result.stdout)
        for option, value in (("--context-length", "0"), ("--memory-fraction", "0"), ("--memory-fraction", "1.5"),
                              ("--memory-fraction", "nan")):
            self.assert_usage_error(run("serve", *self.PROMPTS, option, value), option)

    def test_the_arrays_of_a_step(self):
        result = run("serve", *self.PROMPTS, "--device", "cpu", "--budget", "8", "--block-size", "4", "--show-batch", "1")
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        arrays = result.stdout[result.stdout.index(b"tokens  "):result.stdout.index(b"\n   1  ")].decode()
        self.assertEqual([line.split() for line in arrays.splitlines()[1:]],
                         [["positions", "6", "|", "2"], ["slot_mapping", "6", "|", "10"], ["query_starts", "0", "1", "2"],
                          ["context_lengths", "7", "3"], ["block_tables", "0", "1", "|", "2"],
                          ["table_starts", "0", "2", "3"], ["logits_rows", "0", "1"]])
        self.assertEqual(result.stdout.count(b"query_starts"), 1, "one step's, and no other's")
        self.assert_usage_error(run("serve", *self.PROMPTS, "--show-batch", "-1"), "--show-batch")
        self.assert_bad_input(run("serve", *self.PROMPTS, "--device", "cpu", "--show-batch", "6"), "--show-batch 6",
                              "the last step was 5")

    def test_each_request_of_a_prompt_has_a_seed_of_its_own(self):
        result = run("serve", *self.PROMPTS[:2], "--max-new-tokens", "8", "--virtual-clock", "--view", "quiet",
                     "--requests", "4", "--temperature", "1")
        texts = re.findall(rb'^  \d  (".*)$', result.stdout, re.MULTILINE)
        self.assertEqual((len(texts), len(set(texts))), (4, 4), texts)

    def test_the_plain_view_shows_what_might_have_begun_a_stop_string(self):
        arguments = ("serve", "--prompt", "The old woman opened the door and", "--max-new-tokens", "12",
                     "--virtual-clock", "--view", "plain")
        whole = self.shown_text(run(*arguments))
        self.assertEqual(self.shown_text(run(*arguments, "--stop", whole[-6:] + "ZZ")), whole)

    def shown_text(self, result):
        """What the plain view's lines say of request 0, after its name and in quotes."""
        self.assertEqual(result.returncode, 0, result.stderr)
        pieces = re.findall(r'^ *\d+ .*  0:"((?:[^"\\]|\\.)*)"', result.stdout.decode(), re.MULTILINE)
        self.assertTrue(pieces)
        return "".join(pieces)

    def test_a_stop_string_ends_the_text_and_is_no_part_of_it(self):
        result = run("serve", "--prompt", "The old woman opened the door and", "--virtual-clock", "--view", "quiet",
                     "--stop", "morning", "--stop", "zzz")
        self.assertIn(b'0  " said, \\"To-morrow "\n', result.stdout)

    def test_json_has_model_texts_and_times_of_each_request(self):
        texts = [request["text"] for request in
                 json.loads(run("generate", *self.PROMPTS[:-1], "--json", "-").stdout)["requests"]]
        document = json.loads(run("serve", *self.PROMPTS, "--json", "-").stdout)
        self.assertEqual(document["model"], "the bundled model")
        self.assertEqual([output["completions"][0]["text"] for output in document["outputs"]], texts)
        for number, output in enumerate(document["outputs"]):
            self.assertEqual(output["request"], number)
            self.assertLessEqual(output["arrival_seconds"], output["first_token_seconds"])
            self.assertLess(output["first_token_seconds"], output["end_seconds"])

    def test_json_has_whole_numbers_for_counts(self):
        counters = json.loads(run("serve", *self.PROMPTS, "--json", "-").stdout)["counters"]
        self.assertIsInstance(counters["slots_total"], int)

    def test_json_has_the_measurements_and_nothing_else(self):
        result = run("serve", *self.PROMPTS, "--json", "-", "--arrivals", "poisson:100", "--requests", "5")
        document = json.loads(result.stdout)
        self.assertEqual(document["requests"], {"finished": 5, "rejected": 0, "cancelled": 0, "failed": 0})
        for key in ("seconds_to_first_token", "seconds_between_tokens"):
            self.assertLessEqual(document[key]["p50"], document[key]["p99"])

    def test_the_trace_is_json_with_a_lane_a_request(self):
        path = self.folder / "trace.json"
        run("serve", *self.PROMPTS, "--trace", str(path))
        events = json.loads(path.read_text(encoding="utf-8"))
        lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
        self.assertEqual(lanes, {"steps", "request 0", "request 1"})
        self.assertTrue({"X", "i", "C"} <= {event["ph"] for event in events})
        for event in events:
            self.assertGreaterEqual(event["ts"], 0)

    def test_every_moment_of_a_trace_is_json_with_its_lanes_named(self):
        path = self.folder / "trace.json"
        with subprocess.Popen([PROGRAM, "serve", *self.PROMPTS[:2], "--device", "cpu", "--max-new-tokens", "900", "--stop",
                               "zzz", "--requests", "64", "--view", "quiet", "--trace", str(path)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not path.exists() or path.stat().st_size < 20000:
                self.assertIsNone(process.poll(), "it has ended too early to be killed")
                time.sleep(0.01)
            try:
                for _ in range(20):  # stopped, it is between two writes: beside a write, a reader could see half of it
                    process.send_signal(signal.SIGSTOP)
                    self.assertTrue(os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), "it has ended too early")
                    json.loads(path.read_text(encoding="utf-8"))
                    process.send_signal(signal.SIGCONT)
                    time.sleep(0.01)
                process.send_signal(signal.SIGSTOP)
                self.assertTrue(os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), "it has ended too early")
            finally:
                process.kill()
        events = json.loads(path.read_text(encoding="utf-8"))
        named = set()
        for event in events:
            self.assertTrue(event["ph"] == "M" or event["tid"] in named, event)
            named |= {event["tid"]} if event["ph"] == "M" else set()
        self.assertGreater(len(named), 2)

    def test_ctrl_c_writes_all_that_is_asked_for(self):
        results, trace = self.folder / "results.json", self.folder / "trace.json"
        with subprocess.Popen([PROGRAM, "serve", *self.PROMPTS[:2], "--device", "cpu", "--max-new-tokens", "900",
                               "--requests", "40", "--arrivals", "poisson:4", "--json", str(results), "--trace", str(trace)],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            while b"0:" not in process.stdout.readline():
                pass
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=TIMEOUT_SECONDS)[0].decode()
        self.assertEqual(process.returncode, 130)
        self.assertRegex(output, r"(?m)^  0  \".+\"")
        self.assertIn("| requests finished ", output)
        missing = int(re.search(r"interrupted: \d+ of 40 requests had not ended, and (\d+) of these had not arrived\n$",
                                output).group(1))
        document = json.loads(results.read_text(encoding="utf-8"))
        self.assertTrue(document["interrupted"])
        self.assertEqual(len(document["outputs"]), 40 - missing)
        self.assertGreater(missing, 0)
        # More arrive than can be served, so that some run when it comes.
        cancelled = [output for output in document["outputs"] if output["finish_reason"] == "cancelled"]
        self.assertTrue(cancelled)
        for output in cancelled:
            self.assertEqual([completion["finish_reason"] for completion in output["completions"]], ["cancelled"])
        self.assertTrue(document["outputs"][0]["completions"][0]["text"])
        self.assertIn("request 0", {event["args"]["name"] for event in json.loads(trace.read_text(encoding="utf-8"))
                                    if event["ph"] == "M"})

    def test_ctrl_c_ends_a_wait_for_the_next_request(self):
        path = self.folder / "arrivals"
        path.write_text("0 5 3\n1000 5 3\n", encoding="utf-8")
        with subprocess.Popen([PROGRAM, "serve", "--device", "cpu", "--arrivals", str(path)],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            while b"ends" not in process.stdout.readline():
                pass
            time.sleep(0.2)  # it waits
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=30)[0].decode()
        self.assertEqual(process.returncode, 130)
        self.assertIn("1 of 2 requests had not ended, and 1 of these had not arrived", output)

    def test_the_plot_is_well_formed(self):
        path = self.folder / "plot.svg"
        result = run("compare", "--virtual-clock", "--requests", "6", "--max-length", "48", "--slots", "96",
                     "--block-size", "4", "--plot", str(path))
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        plot = xml.etree.ElementTree.parse(path).getroot()
        self.assertEqual(plot.tag, "{http://www.w3.org/2000/svg}svg")
        self.assertEqual(sum("%" in (text.text or "") for text in plot.iter("{http://www.w3.org/2000/svg}text")), 1)

    def test_the_offline_workload_needs_a_model_with_room_for_it(self):
        self.assert_bad_input(run("serve", "--workload", "offline"), "2048 tokens", "1024")
        self.assert_usage_error(run("serve", "--workload", "offline", "--arrivals", "poisson:1"), "--arrivals")

    def test_groups_are_served_too(self):
        for options in (("--samples", "3", "--temperature", "0.8"), ("--beams", "3")):
            result = run("serve", *self.PROMPTS, *options)
            self.assertEqual((result.returncode, result.stderr), (0, b""))
            self.assertEqual(len(re.findall(rb"^  0  ", result.stdout, re.MULTILINE)), 3)


def read_to_end(terminal):
    """What is written to a pseudo-terminal until its other end is closed."""
    result = b""
    try:
        while piece := os.read(terminal, 65536):
            result += piece
    except OSError:  # closed
        pass
    return result


class Terminal(ProgramTest):
    def session(self, *arguments, typed, rows=24, columns=80, kind="xterm", until=None, environment=None, code=0):
        """What a terminal of that size shows; until: ends the program once it has shown that."""
        main, end = open_terminal(rows, columns)
        environment = ({name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": kind}
                       | (environment or {}))
        process = subprocess.Popen([PROGRAM, *arguments], stdin=end, stdout=end, stderr=end, env=environment,
                                   start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(end)
        os.write(main, typed)
        shown = b""
        while True:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            shown += piece
            if until is not None and re.search(until, shown):
                process.terminate()
                process.wait(timeout=TIMEOUT_SECONDS)
                break
            if not piece:
                break
        os.close(main)
        ended = process.wait(timeout=TIMEOUT_SECONDS)
        if until is None:
            self.assertEqual(ended, code, shown)
        return shown.decode(errors="replace")

    def test_the_shell_greets_and_prompts(self):
        shown = self.session("demo", "--shell", typed=b"new A 3\nquit\n")
        self.assertIn("'help' lists the commands", shown)
        self.assertEqual(len(re.findall(r"^> |> ", shown)), 2, shown)
        for columns in (60, 80):
            shown = self.session("demo", "--shell", typed=b"", until=rb"\n> ", columns=columns).replace("\r", "")
            while taken_back := re.search(r"\x1b\[(\d+)D\x1b\[K", shown):  # a word that begins the next line instead
                shown = shown[:taken_back.start() - int(taken_back[1])] + shown[taken_back.end():]
            self.assertIn("a digit how many", shown.replace("\n", " "))
            self.assertLessEqual(max(map(len, shown.split("\n"))), columns, shown)
        self.assertNotIn("> ", run("demo", "--shell").stdout.decode())

    def test_a_dumb_terminal_gets_no_escape_sequences(self):
        commands = [("demo",), ("generate", "--prompt", "Once", "--max-new-tokens", "4")]
        if stage_number() >= 5:
            commands.append(("beam", "--prompt", "Once", "--max-new-tokens", "4", "--trace"))
        if stage_number() >= 8:
            commands.append(("serve", "--prompt", "Once", "--max-new-tokens", "4"))
        for command in commands:
            self.assertNotIn("\x1b", self.session(*command, typed=b"", kind="dumb"), command)

    def test_a_long_prefix_run_shows_how_far_it_is(self):
        if stage_number() < 6:
            self.skipTest("this stage has no such command")
        line = r"tokens of prompts: [\d,]+ of [\d,]+ \([\d.]+ %\), \d+ s left"
        on_cpu = ["--device", "cpu"] if stage_number() >= 7 else []  # a GPU would be too fast to tell of progress
        shown = self.session("prefix", "--users", "40", "--prefix-tokens", "400", "--slots", "20000", "--threads", "1",
                             *on_cpu, typed=b"", until=line.encode())
        self.assertRegex(shown, line)

    def test_the_live_view_leaves_no_trace_and_fits(self):
        if stage_number() < 8:
            self.skipTest("the stage has no live view")
        shown = self.session("serve", "--requests", "24", "--block-size", "8", "--device", "cpu", typed=b"")
        before, _, rest = shown.partition("\x1b[?1049h")
        frames, _, after = rest.partition("\x1b[?1049l")
        self.assertNotIn("\x1b[H", before + after)
        self.assertGreater(frames.count("\x1b[H"), 1)
        for frame in frames.split("\x1b[H")[1:]:
            self.assertLessEqual(frame.count("\n"), 23)
        self.assertIn("output tokens a second", after)

    def test_ctrl_c_leaves_the_live_view_and_prints_the_report(self):
        if stage_number() < 8:
            self.skipTest("the stage has no live view")
        main, end = open_terminal()
        with subprocess.Popen([PROGRAM, "serve", "--requests", "24", "--arrivals", "poisson:3", "--device", "cpu"], stdin=end,
                              stdout=end, stderr=end, env=os.environ | {"TERM": "xterm"}, start_new_session=True,
                              preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) as process:
            os.close(end)
            shown = b""
            while shown.count(b"\x1b[H") < 3:
                shown += os.read(main, 65536)
            os.write(main, b"\x03")
            shown += read_to_end(main)
        os.close(main)
        self.assertEqual(process.returncode, 130)
        after = shown.partition(b"\x1b[?1049l")[2]
        for part in (b'  0  "', b"| requests finished", b"interrupted: "):
            self.assertIn(part, after)

    def test_a_signal_that_ends_the_program_leaves_the_live_view(self):
        if stage_number() < 8:
            self.skipTest("the stage has no live view")
        for number in (signal.SIGTERM, signal.SIGHUP):
            main, end = open_terminal()
            with subprocess.Popen([PROGRAM, "serve", "--requests", "24", "--arrivals", "poisson:3", "--device", "cpu"],
                                  stdin=end, stdout=end, stderr=end, env=os.environ | {"TERM": "xterm"}) as process:
                os.close(end)
                shown = b""
                while shown.count(b"\x1b[H") < 3:
                    shown += os.read(main, 65536)
                process.send_signal(number)
                shown += read_to_end(main)
            os.close(main)
            self.assertEqual(process.returncode, -number)
            self.assertTrue(shown.endswith(b"\x1b[?25h\x1b[?1049l"), shown[-40:])


class Http(ProgramTest):
    BODY = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}

    def setUp(self):
        super().setUp()
        if stage_number() < 8:
            self.skipTest("the stage serves nothing over HTTP")

    def test_bad_addresses_and_a_port_in_use_are_refused(self):
        for address in ("8080x", "127.0.0.1:99999", "", ":", "localhost:", "localhost:-1", "127.0.0.1: 80"):
            self.assert_usage_error(run("serve", "--http", address), "--http", f'not "{address}"')
        with http_program.HttpProgram(PROGRAM, "--slots", "10", "--block-size", "16") as server:
            self.assertIn(", 16 slots in blocks of 16,", server.first_line)
            address = server.url.removeprefix("http://")
            self.assert_bad_input(run("serve", "--http", address), "can't listen", address)

    def test_options_that_have_no_effect_without_http_or_with_it(self):
        for option, value in (("--api-key", "x"), ("--max-queue", "5"), ("--max-connections", "5"),
                              ("--client-timeout", "5"), ("--request-memory", "64"), ("--pool-controls", None), ("--no-pool-controls", None), ("--paused", None),
                              ("--api-key-file", "x"), ("--served-model-name", "x"), ("--chat-template", "none"),
                              ("--cors", "*"), ("--quiet", None), ("--drain-notice", "2"), ("--drain-seconds", "9"),
                              ("--streams-wait", None)):
            arguments = (option,) if value is None else (option, value)
            self.assert_usage_error(run("serve", "--prompt", "x", *arguments), option, "--http")
        self.assert_usage_error(run("serve", "--http", "127.0.0.1:0", "--paused", "--no-pool-controls"), "--paused", "--no-pool-controls")
        for options in (("--http", "0.0.0.0:0"), ("--http", "127.0.0.1:0", "--api-key", "x")):
            self.assert_usage_error(run("serve", *options, "--paused"), "--paused needs --pool-controls")
        for option, value in (("--temperature", "0.5"), ("--prompt", "x"), ("--max-new-tokens", "4"), ("--stop", "x"),
                              ("--requests", "3"), ("--samples", "2"), ("--beams", "2"), ("--arrivals", "poisson:1"),
                              ("--workload", "offline"), ("--json", "-"), ("--trace", "x"), ("--view", "quiet"),
                              ("--virtual-clock", None), ("--chat", None)):
            arguments = (option,) if value is None else (option, value)
            self.assert_usage_error(run("serve", "--http", "127.0.0.1:0", *arguments), option, "--http")

    def test_sigterm_refuses_what_is_new_and_serves_what_has_come(self):
        with http_program.HttpProgram(PROGRAM, "--device", "cpu") as server:
            _, whole = server.post("/v1/completions", self.BODY | {"stream": False})
            connection = server.connect()
            connection.request("POST", "/v1/completions", json.dumps(self.BODY), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            received = reply.read1(100)
            server.process.send_signal(signal.SIGTERM)
            received += reply.read()
            texts = [json.loads(line[6:])["choices"][0]["text"]
                     for line in received.decode().splitlines() if line.startswith("data: {")]
            self.assertEqual("".join(texts), whole["choices"][0]["text"])
            connection.close()
            output, errors = server.process.communicate(timeout=TIMEOUT_SECONDS)
            self.assertEqual(server.process.returncode, 0, errors)
            self.assertIn("draining: 1 request runs", output)

    def test_a_key_of_a_file_or_of_the_environment_is_asked_for(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "key")
            for content, problem in (("", "no API key"), ("\n", "empty"), ("a b\n", "one word"), ("a\nb\n", "more than one"),
                                     ("\u00e9\n", "ASCII"), (None, "No such file")):
                if content is None:
                    os.remove(path)
                else:
                    pathlib.Path(path).write_text(content, encoding="utf-8")
                self.assert_bad_input(run("serve", "--http", "127.0.0.1:0", "--api-key-file", path), path, problem)
            for key, problem in (("", "empty"), ("a b", "one word")):
                self.assert_usage_error(run("serve", "--http", "127.0.0.1:0", "--api-key", key), "--api-key", problem)
            self.assert_bad_input(run("serve", "--http", "127.0.0.1:0", environment={"COURSE_API_KEY": ""}),
                                  "COURSE_API_KEY", "empty")
            self.assert_usage_error(run("serve", "--http", "127.0.0.1:0", "--api-key", "x", "--api-key-file", path),
                                    "--api-key")
            pathlib.Path(path).write_text("secret\r\n", encoding="utf-8")
            for options, environment in ((("--api-key-file", path), {"COURSE_API_KEY": "other"}),
                                         ((), {"COURSE_API_KEY": "secret"})):
                with http_program.HttpProgram(PROGRAM, "--device", "cpu", *options, environment=environment) as server:
                    statuses = []
                    for key in ("", "Bearer other", "bearer secret"):
                        connection = server.connect()
                        connection.request("GET", "/v1/models", headers={"Authorization": key} if key else {})
                        statuses.append(connection.getresponse().status)
                        connection.close()
                    self.assertEqual(statuses, [401, 401, 200])

    def test_the_terminal_says_what_is_served_and_has_a_line_for_each_request(self):
        body = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
        with http_program.HttpProgram(PROGRAM, "--device", "cpu", "--served-model-name", "mine", "--chat-template",
                                      "none", quiet=False) as server:
            self.assertTrue(server.first_line.startswith("mine on "), server.first_line)
            self.assertIn("chats without a template", server.first_line)
            self.assertEqual(server.post("/v1/completions", body | {"model": "mine"})[1]["model"], "mine")
            self.assertEqual(server.post("/v1/completions", body | {"model": "tales-5m"})[0], 404)
            server.post("/v1/completions", body | {"top_p": 7})
            code, output, errors = server.end()
        self.assertEqual(code, 0, errors)
        # A line is written when its reply has been sent, so two of them may change places.
        lines = output.splitlines()
        self.assertEqual(len(lines), 4, output)
        for line in (r"POST /v1/completions 200, 6 tokens in \(0 cached\), 3 out, \d+ ms: length, cmpl-[0-9a-f]+-0",
                     r"POST /v1/completions 404, .*",
                     r"""POST /v1/completions 400, \d+ ms: "'top_p' must be a number from 0 to 1\"""",
                     r"(ending|draining).*"):
            self.assertEqual(sum(re.fullmatch(line, found) is not None for found in lines), 1, (line, output))

    def test_bad_templates_and_origins_are_refused_at_the_start(self):
        address = ("serve", "--http", "127.0.0.1:0")
        self.assert_usage_error(run(*address, "--chat-template", "alpaca"), "alpaca", "known: chatml, qwen3")
        self.assert_bad_input(run(*address, "--chat-template", "chatml"), "<|im_start|>")
        for origin in ("example.org", "https://example.org/"):
            self.assert_usage_error(run(*address, "--cors", origin), "--cors", "https://example.org")
        self.assert_usage_error(run(*address, "--served-model-name", "Gr\u00fcn"), "--served-model-name", "ASCII")

    def test_an_address_that_others_reach_is_open_only_with_a_note(self):
        for options, note in (((), True), (("--api-key", "x"), False)):
            with http_program.HttpProgram(PROGRAM, "--device", "cpu", *options, host="0.0.0.0") as server:
                code, _, errors = server.end()
                self.assertEqual(code, 0, errors)
                self.assertEqual("--api-key" in errors, note, errors)

    def test_the_page_steers_by_default_where_this_machine_alone_is_served(self):
        key = ("--api-key", "x")
        for host, options, is_on in (("127.0.0.1", (), True), ("127.0.0.1", key, False), ("0.0.0.0", (), False),
                                     ("0.0.0.0", ("--pool-controls",), True), ("127.0.0.1", ("--no-pool-controls",), False)):
            with self.subTest(host=host, options=options), \
                    http_program.HttpProgram(PROGRAM, "--device", "cpu", *options, host=host) as server:
                self.assertEqual("the pool is drawn and steered on http://" in server.first_line, is_on, server.first_line)
                self.assertEqual("no scenes without --pool-controls" in server.first_line, not is_on, server.first_line)
                server.url = server.url.replace("0.0.0.0", "127.0.0.1")
                if options != key:
                    self.assertEqual(server.post("/pool/run", {})[0], 200 if is_on else 403)

    def test_what_commands_of_the_demonstration_print_goes_to_their_client_alone(self):
        with http_program.HttpProgram(PROGRAM, "--device", "cpu") as server:
            for line, printed in (("new A 6; append A 6; fork A B; write B", "copied to block"), ("append A 999", "refused"),
                                  ("prompt C once; show", "slots"), ("nonsense", "error:")):
                status, reply = server.post("/pool/demo", {"line": line})
                self.assertEqual(status, 200)
                self.assertIn(printed, reply["output"])
            code, output, _ = server.end()
            self.assertEqual(code, 0)
            self.assertEqual(output.count("\n"), 1, output)  # that it ends

    def test_a_chat_works_out_of_the_box(self):
        with http_program.HttpProgram(PROGRAM, "--device", "cpu") as server:
            status, reply = server.post("/v1/chat/completions", {
                "messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 12, "temperature": 0})
            self.assertEqual(status, 200)
            self.assertTrue(reply["choices"][0]["message"]["content"])
            code, _, _ = server.end()
            self.assertEqual(code, 0)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not os.access(sys.argv[1], os.X_OK):
        print("usage: test_cli.py PROGRAM [unittest options]", file=sys.stderr)
        sys.exit(2)
    PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    let_signals_end_programs()
    unittest.main()
