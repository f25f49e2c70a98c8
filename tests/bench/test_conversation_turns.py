"""Tests of conversation_turns.py, with fakes of both engines: python3 -m unittest tests/bench/test_conversation_turns.py"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import textwrap
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import compare_engines
import conversation_turns
from test_compare_engines import FAKE_HTTP, MACHINE

FAKE_STAGE8 = """#!{python}
import sys
sys.path.insert(0, {folder!r})
import fake_http
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if {fails} and "--host-cache" in sys.argv:
    sys.exit("stage8: no memory is left")
fake_http.serve(int(sys.argv[sys.argv.index("--http") + 1].partition(":")[2]), 0.001)
"""
FAKE_VLLM = """
import sys, fake_http
with open({log!r}, "a") as log:
    log.write("vllm " + " ".join(sys.argv[1:]) + "\\n")
fake_http.serve(int(sys.argv[sys.argv.index("--port") + 1]), 0.001)
"""
SMALL = ("--conversations", "20", "--tokens", "96", "--message", "8", "--reply", "8", "--turns", "2")


class ConversationTurns(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.log, self.program, self.file = self.folder / "log", self.folder / "stage8", self.folder / "turns.json"
        self.write_program(fails=False)
        self.write("fake_http.py", textwrap.dedent(FAKE_HTTP))
        for package, version in {"torch": "2.14.0", "vllm": "0.33.0"}.items():
            self.write(f"{package}-{version}.dist-info/METADATA", f"Name: {package}\nVersion: {version}\n")
        for package in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
            self.write(f"{package}/__init__.py", "")
        self.write("vllm/entrypoints/openai/api_server.py", FAKE_VLLM.format(log=str(self.log)))

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def write_program(self, fails):
        self.write("stage8", FAKE_STAGE8.format(python=sys.executable, folder=str(self.folder), log=str(self.log),
                                                fails=fails))
        self.program.chmod(0o755)

    def run_main(self, *arguments):
        output = io.StringIO()
        with mock.patch.dict("os.environ", {"PYTHONPATH": str(self.folder)}), \
                mock.patch.object(compare_engines, "machine_text", lambda: MACHINE), \
                contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = conversation_turns.main(["--program", str(self.program), "--json", str(self.file),
                                            "--commit", "abc1234", *SMALL, *arguments])
        return code, output.getvalue()

    def rows(self):
        return json.loads(self.file.read_text(encoding="utf-8"))["figures"]["conversation_turns"]["rows"]

    def test_all_engines_have_the_same_pool_and_tier_and_a_row_for_each_turn(self):
        code, output = self.run_main()
        self.assertEqual(code, 0, output)
        self.assertEqual(list(self.rows()), [f"{engine}_{turn}" for engine in conversation_turns.ENGINES
                                             for turn in (1, 2)])
        self.assertIn("| vllm_with_2 |", output)
        without, with_tier, vllm, vllm_with = self.log.read_text(encoding="utf-8").splitlines()
        # 20 texts of 7 blocks, a tenth of them in the pool; 128 KiB a token.
        for line in (without, with_tier):
            self.assertIn("--slots 224 ", line)
        for line in (vllm, vllm_with):
            self.assertIn("--num-gpu-blocks-override 14", line)
        self.assertIn("--host-cache 0.2871GiB", with_tier)
        self.assertIn("--kv-offloading-size 0.2871 ", vllm_with)
        for line in (without, vllm):
            self.assertNotIn("offloading", line)
            self.assertNotIn("host-cache", line)

    def test_float8_halves_the_tier_of_both(self):
        code, output = self.run_main("--kv-cache", "fp8", "--engines", "with,vllm_with")
        self.assertEqual(code, 0, output)
        ours, theirs = self.log.read_text(encoding="utf-8").splitlines()
        self.assertIn("--kv-cache fp8", ours)
        self.assertIn("--host-cache 0.1436GiB", ours)
        self.assertIn("--kv-cache-dtype fp8", theirs)

    def test_a_conversation_goes_on_in_the_next_turn_and_begins_like_no_other(self):
        prompts = []
        with mock.patch.object(conversation_turns.serve_load.Client, "first_model", lambda _: "fake"), \
                mock.patch.object(conversation_turns.serve_load, "run", lambda client, tasks, *_, **__: (
                    prompts.append([client.prompt(*task[:2]) for task in tasks]) or
                    [{"first": 0.1, "between": [], "tokens": 1, "prompt_tokens": 1}], 1.0, 0.0)):
            options = mock.Mock(conversations=20, tokens=96, message=8, turns=2, reply=8, clients=2, pool=0.1, cpu=True,
                                host_gib=None, kv_cache="auto", seed=1)
            self.assertEqual(len(conversation_turns.Load(options).turns("http://127.0.0.1:1")), 2)
        warm_up, first, second = prompts
        self.assertEqual([text[:96] for text in second], first)
        self.assertEqual({len(text) for text in second}, {104})
        self.assertEqual(len({tuple(text[:16]) for text in [*warm_up, *first]}), 28)

    def test_an_engine_that_fails_does_not_take_the_others_with_it(self):
        self.write_program(fails=True)
        code, output = self.run_main("--engines", "without,with")
        self.assertEqual(code, 1)
        self.assertIn("failed: with: the server ended with 1", output)
        self.assertIn("no memory is left", output)
        self.assertEqual(list(self.rows()), ["without_1", "without_2"])
        self.write_program(fails=False)
        self.assertEqual(self.run_main("--engines", "with")[0], 0)
        self.assertEqual(len(self.rows()), 4)

    def test_figures_of_another_load_stay_in_their_file(self):
        self.run_main("--engines", "without")
        self.log.unlink()
        for other in (["--clients", "2"], ["--host-gib", "1"], ["--seed", "2"]):
            code, output = self.run_main("--engines", "without", *other)
            self.assertEqual(code, 1)
            self.assertIn("another load", output)
        self.assertFalse(self.log.exists())  # told before anything is measured

    def test_without_vllm_and_on_a_cpu_the_others_are_skipped(self):
        code, output = self.run_main("--cpu", "--engines", "with,vllm")
        self.assertEqual(code, 0, output)
        self.assertIn("skipped: vllm: on a CPU", output)
        self.assertIn("--device cpu", self.log.read_text(encoding="utf-8"))

    def test_what_makes_no_sense_is_one_line(self):
        for arguments, word in ((["--engines", "tier"], "tier"), (["--model", "llama"], "llama"),
                                (["--program", "/nowhere/stage8"], "/nowhere/stage8"),
                                (["--json", "/nowhere/turns.json"], "no such folder")):
            code, output = self.run_main(*arguments)
            self.assertEqual(code, 1)
            self.assertTrue(output.startswith("error: ") and word in output, output)
        for arguments in (["--pool", "0"], ["--turns", "0"], ["--host-gib", "nan"], ["--cpu", "--kv-cache", "fp8"]):
            with self.assertRaises(SystemExit):
                self.run_main(*arguments)


if __name__ == "__main__":
    unittest.main()
