"""Tests of compare_engines.py, with fakes of both engines: python3 -m unittest tests/bench/test_compare_engines.py"""

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
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import compare_engines
import figures
from compare_engines import MODELS, Batch, Cell
from support import needs

MACHINE = "NVIDIA H200, driver 1.2, CUDA 13.0"

# Both take the time that they say: this one FAKE_SECONDS for each token, by default a microsecond, and vLLM two.
FAKE_STAGE8 = '''
    import json, os, pathlib, sys
    sys.path.insert(0, {tests!r})
    import fake_http
    arguments = sys.argv[1:]
    with open({log!r}, "a") as log:
        log.write(" ".join(arguments) + "\\n")
    def values(name):
        return [arguments[i + 1] for i, argument in enumerate(arguments) if argument == name]
    if values("--http"):
        fake_http.serve(int(values("--http")[0].partition(":")[2]), 0.002)
    if "0.8" in values("--temperature") and os.environ.get("FAKE_FAILS"):
        sys.exit("stage8: no memory is left")
    outputs, saved = [], 0
    if values("--prompt-file"):
        texts = [pathlib.Path(path).read_text() for path in values("--prompt-file")]
        for i, text in enumerate(texts):
            saved += 8000 if i and text[:7999] == texts[0][:7999] and len(text) == 8099 and text.isdigit() else 0
            outputs.append({{"arrival_seconds": i / 4, "first_token_seconds": i / 4 + (0.004 if i else 0.03)}})
    else:
        ended = 0.0
        requests = [line.split() for line in pathlib.Path(values("--arrivals")[0]).read_text().splitlines()]
        for at in dict.fromkeys(request[0] for request in requests):
            group = [int(output) for time, _, output in requests if time == at]
            ended = max(ended, float(at)) + sum(group) * float(os.environ.get("FAKE_SECONDS", "1e-6"))
            outputs += [{{"end_seconds": ended, "completions": [{{"tokens": [1] * output}}]}} for output in group]
    report = {{"outputs": outputs, "counters": {{"prefix_tokens_saved": saved}}}}
    pathlib.Path(values("--json")[0]).write_text(json.dumps(report))
'''
FAKE_VLLM = '''
    import os, time
    class SamplingParams:
        def __init__(self, **fields):
            self.__dict__.update(fields)
    class Result:
        def __init__(self, count):
            self.outputs, self.token_ids = [self], [1] * count
    class LLM:
        def __init__(self, model, **options):
            assert os.path.exists(os.path.join(model, "config.json")) and options["max_num_seqs"] == 256
            self.seen = []
        def generate(self, prompts, parameters, use_tqdm):
            if os.environ.get("FAKE_FAILS") and getattr(parameters[0], "top_k", 0) == 40:
                raise RuntimeError("no kernel for this")
            if os.environ.get("FAKE_DIES") and parameters[0].temperature == 0.6:
                os._exit(9)
            texts = [tuple(prompt["prompt_token_ids"]) for prompt in prompts]
            starts = {text[:16] for text in texts}
            if len(prompts) > 1:
                assert len(starts) == len(texts) and not starts & set(self.seen), "prompts begin alike"
            if len(prompts) == 1:
                cached = texts[0][:8000] in self.seen
                time.sleep(0.0 if cached else 0.3)
                self.seen.append(texts[0][:8000])
            self.seen += starts
            time.sleep(2e-6 * sum(entry.max_tokens for entry in parameters))
            return [Result(entry.max_tokens) for entry in parameters]
'''
FAKE_HTTP = '''
    import http.server, json, sys, time
    def serve(port, seconds):
        class Server(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass
            def reply(self, text):
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            allocated = 0
            def do_GET(self):
                if self.path == "/metrics":  # of a tier whose blocks arrive from request to request
                    Server.allocated = min(Server.allocated + 8, 10)
                    return self.reply(b"course:host_cache_blocks 10\\ncourse:host_cache_blocks_allocated %d\\n" %
                                      Server.allocated)
                self.reply(json.dumps({"data": [{"id": "fake"}]}).encode())
            def do_POST(self):
                count = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
                time.sleep(seconds)
                events = [{"choices": [{"text": "x"}]}, {"choices": [], "usage": {"completion_tokens": count}}]
                text = "".join(f"data: {json.dumps(event)}\\n\\n" for event in events) + "data: [DONE]\\n\\n"
                self.reply(text.encode())
        http.server.ThreadingHTTPServer(("127.0.0.1", port), Server).serve_forever()
'''


class CompareEngines(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.log, self.program, self.file = self.folder / "log", self.folder / "stage8", self.folder / "engines.json"
        self.write("stage8", f"#!{sys.executable}\n" +
                   textwrap.dedent(FAKE_STAGE8).format(tests=str(self.folder), log=str(self.log)))
        self.program.chmod(0o755)
        self.write("fake_http.py", textwrap.dedent(FAKE_HTTP))
        for package, version in {"torch": "2.14.0", "vllm": "0.33.0"}.items():
            self.write(f"{package}-{version}.dist-info/METADATA", f"Name: {package}\nVersion: {version}\n")
        self.write("vllm/__init__.py", textwrap.dedent(FAKE_VLLM))
        self.write("vllm/entrypoints/__init__.py", "")
        self.write("vllm/entrypoints/openai/__init__.py", "")
        self.write("vllm/entrypoints/openai/api_server.py",
                   "import os, sys, fake_http\n"
                   "seconds = 0.1 if os.environ.get('VLLM_USE_RUST_FRONTEND') else 0.3\n"
                   "fake_http.serve(int(sys.argv[sys.argv.index('--port') + 1]), seconds)\n")
        self.environment = {"PYTHONPATH": str(self.folder)}

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run_main(self, *arguments, machine=MACHINE, **environment):
        output, errors = io.StringIO(), io.StringIO()
        with mock.patch.dict("os.environ", self.environment | environment), \
                mock.patch.object(compare_engines, "machine_text", lambda: machine), \
                mock.patch.object(compare_engines, "FURTHER", 256), \
                contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = compare_engines.main(["--program", str(self.program), "--json", str(self.file),
                                         "--commit", "abc1234", *arguments])
        return code, output.getvalue() + errors.getvalue()

    def row(self, group, row):
        figure = json.loads(self.file.read_text(encoding="utf-8"))["figures"][group]
        return dict(zip(figure["columns"], figure["rows"][row]))

    def commands(self):
        return self.log.read_text(encoding="utf-8").splitlines()

    def test_both_engines_by_turns(self):
        code, output = self.run_main("--groups", "decode,hits", "--models", "llama-3-8b")
        self.assertEqual(code, 0, output)
        self.assertNotIn("failed", output)
        row = self.row("decode", "8b_32")
        self.assertAlmostEqual(row["ours_first"], 1e6, delta=1e3)  # a microsecond for each token
        self.assertLess(0, row["theirs"])
        # Two, and what time.sleep adds. It does not add the same to both runs whose difference this is.
        self.assertLess(row["theirs"], 600000)
        self.assertEqual((row["ours"], row["ratio"]), (row["ours_again"], round(row["ours"] / row["theirs"], 2)))
        hit = self.row("hits", "8b_100")
        self.assertEqual((hit["ours"], hit["ours_cold"]), (4.0, 30.0))
        self.assertGreater(hit["theirs_cold"], 300)
        self.assertLess(hit["theirs"], 300)
        self.assertAlmostEqual(hit["ratio"], hit["theirs"] / hit["ours"], delta=0.005 + 1e-9)  # two digits
        self.assertEqual(["--prompt-file" in command for command in self.commands()], [False, True] * 2)
        self.assertTrue(all("--synthetic llama-3-8b --precision bf16" in command for command in self.commands()))
        self.assertLess(output.index("ours_first:"), output.index("theirs:"))
        self.assertLess(output.index("theirs:"), output.index("ours_again:"))

    def test_the_file_is_data_for_the_pages(self):
        self.run_main("--groups", "decode", "--models", "llama-3.2-1b", "--turns", "ours_first")
        self.run_main("--groups", "long", "--models", "llama-3-8b", "--turns", "ours_first")
        content = json.loads(self.file.read_text(encoding="utf-8"))
        self.assertEqual(list(content["figures"]["decode"]["rows"]), ["1b_1", "1b_32", "1b_128", "8b_128"])
        measured = self.folder / figures.FOLDER / "engines.json"
        measured.parent.mkdir(parents=True)
        measured.write_text(self.file.read_text(encoding="utf-8"), encoding="utf-8")
        value, unit, origin = figures.Figures(self.folder).value("engines.decode.8b_128.ours")
        self.assertEqual((unit, origin["commit"], origin["machine"]), ("tokens/s", "abc1234", MACHINE))
        self.assertGreater(value, 0)
        with self.assertRaises(figures.FigureError):
            figures.Figures(self.folder).value("engines.decode.8b_128.theirs")  # not measured is no figure

    def test_what_fails_is_said_and_the_rest_goes_on(self):
        code, output = self.run_main("--groups", "sampling", "--models", "llama-3.2-1b", FAKE_FAILS="1")
        self.assertEqual(code, 0, output)
        self.assertIn("failed: this engine, llama-3.2-1b, t08: stage8 ended with 1:\n    stage8: no memory is left",
                      output)
        self.assertIn("failed: vLLM, llama-3.2-1b, 64x100_100_filtered: RuntimeError: no kernel for this", output)
        found = {name: tuple(self.row("sampling", f"1b_64x100_{name}")[side] is not None for side in ("ours", "theirs"))
                 for name in ("greedy", "t08", "filtered")}
        self.assertEqual(found, {"greedy": (True, True), "t08": (False, True), "filtered": (False, False)})

    def test_a_vllm_that_dies_leaves_what_it_has_measured(self):
        code, output = self.run_main("--groups", "offline", "--models", "qwen3-0.6b", FAKE_DIES="1")
        self.assertEqual(code, 0, output)
        self.assertIn("failed: qwen3-0.6b, theirs: ", output)
        self.assertIn("ended with 9", output)
        self.assertIsNotNone(self.row("offline", "qwen_greedy")["ratio"])
        self.assertEqual([self.row("offline", "qwen_t06")[side] is None for side in ("ours", "theirs")], [False, True])

    def test_batches_that_run_into_each_other_are_run_again_more_slowly(self):
        code, output = self.run_main("--groups", "long", "--models", "llama-3-8b", "--turns", "ours_first",
                                     FAKE_SECONDS="2e-4")
        self.assertEqual(code, 0, output)
        self.assertIn("once more, more slowly", output)
        self.assertAlmostEqual(self.row("decode", "8b_128")["ours"], 5000, delta=5)

    def test_without_vllm_this_engine_is_measured_alone(self):
        with mock.patch.object(compare_engines, "vllm_versions", lambda _: {}):
            code, output = self.run_main("--groups", "long", "--models", "llama-3-8b")
        self.assertEqual(code, 0, output)
        self.assertIn("has no vLLM", output)
        row = self.row("decode", "8b_128")
        self.assertEqual((row["theirs"], row["ratio"]), (None, None))

    @needs.semaphores
    def test_servers(self):
        with mock.patch.object(compare_engines, "CLIENTS", {1: 2, 4: 8}):
            code, output = self.run_main("--groups", "http", "--models", "llama-3.2-1b")
        self.assertEqual(code, 0, output)
        self.assertNotIn("failed", output)
        self.assertIn("vllm 0.33.0, torch 2.14.0", output)
        for clients in (1, 4):
            row = self.row("http", f"1b_{clients}")
            self.assertGreater(row["ratio"], 1.2)
            self.assertGreater(row["theirs_first_token"], 300)
            self.assertGreater(row["theirs_first_token"], row["theirs_rust_first_token"])
            self.assertGreater(row["theirs_rust_first_token"], row["ours_first_token"])
            self.assertGreater(row["theirs_rust"], row["theirs"])

    def test_parts_are_put_together_and_machines_are_not(self):
        self.file.write_text(json.dumps({"machine": "another", "figures": {}}), encoding="utf-8")
        code, output = self.run_main("--groups", "decode")
        self.assertEqual(code, 1)
        self.assertEqual(len(output.splitlines()), 1, output)
        self.assertIn("is of another machine (another)", output)

    def test_bad_input_is_a_line(self):
        for arguments, said in ((("--groups", "decoding"), "there is no group 'decoding'"),
                                (("--models", "gpt"), "there is no model 'gpt'"),
                                (("--program", "/nothing"), "there is no program /nothing"),
                                (("--python", "/nothing"), "cannot run /nothing"),
                                (("--show", "/nothing"), "/nothing is no file of this program")):
            code, output = self.run_main(*arguments)
            self.assertEqual((code, output.count("\n"), said in output), (1, 1, True), output)

    def test_a_cell_of_two_batches_is_their_difference(self):
        batches = [Batch(name, (8,) * 4, (length,) * 4, "greedy") for name, length in (("short", 10), ("long", 60))]
        cell = Cell("decode", "x", tuple(batches))
        self.assertEqual(cell.rate({"short": [1.0, 0.5], "long": [3.0, 2.5]}), 100.0)  # 200 tokens more in 2 s
        self.assertIsNone(cell.rate({"long": [3.0]}))
        self.assertIsNone(cell.rate({"short": [3.0], "long": [3.0]}))

    def test_the_cells_of_the_groups(self):
        everything = [cell.row for model in MODELS.values()
                      for cell in compare_engines.cells_of(model, compare_engines.GROUPS)]
        self.assertEqual(len(everything), len(set(everything)))
        self.assertEqual(len(everything), 3 + 6 + 3 + 4 + 2)
        offline = compare_engines.cells_of(MODELS["qwen3-0.6b"], ["offline"])[0].batches[0]
        self.assertEqual(len(offline.prompts), 256)
        self.assertTrue(all(100 <= length <= 1024 for length in offline.prompts + offline.outputs))
        self.assertEqual(round(MODELS["llama-3.2-1b"].num_weights() / 1e6), 1236)
        self.assertEqual(MODELS["llama-3-8b"].kv_bytes(), 128 << 10)


if __name__ == "__main__":
    unittest.main()
