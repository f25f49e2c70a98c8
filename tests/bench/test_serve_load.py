"""Tests of serve_load.py against a server of its own: python3 -m unittest tests/bench/test_serve_load.py"""

import contextlib
import http.server
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import xml.etree.ElementTree
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import serve_load
from support import needs


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Writes a token every 5 ms, after 20 ms."""

    bodies = []

    def do_GET(self):
        self.reply(json.dumps({"data": [{"id": "fake"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if body["max_tokens"] == 13:
            self.send_error(500)
            return
        if body["max_tokens"] == 14:
            self.send_response(200)
            self.end_headers()
            self.event({"choices": [{"text": "x"}]})
            return
        self.send_response(200)
        self.end_headers()
        time.sleep(0.02)
        for number in range(body["max_tokens"]):
            time.sleep(0.005 if number else 0)
            self.event({"choices": [{"text": "x"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, document):
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        self.wfile.flush()

    def reply(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@needs.semaphores
class ServeLoad(unittest.TestCase):
    def setUp(self):
        FakeServer.bodies = []
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.url = "http://127.0.0.1:%d" % self.server.server_port

    def run_main(self, *arguments):
        output = io.StringIO()
        with mock.patch.object(sys, "argv", ["serve_load.py", self.url, *arguments]), \
                contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            return serve_load.main(), output.getvalue()

    def test_percentiles(self):
        values = list(range(1, 101))
        self.assertEqual(serve_load.percentile(values, 0.5), 50)
        self.assertEqual(serve_load.percentile(values, 0.99), 99)
        self.assertEqual(serve_load.percentile([7.0], 0.99), 7.0)

    def test_arrivals_have_the_rate_and_lengths_the_shape(self):
        times = serve_load.poisson_times(20000, 8.0, 1)
        self.assertAlmostEqual(20000 / times[-1], 8.0, delta=0.2)
        gaps = [later - earlier for earlier, later in zip(times, times[1:])]
        self.assertAlmostEqual(statistics.pstdev(gaps), 1 / 8.0, delta=0.005)  # exponential: as large as the mean
        chat = serve_load.draw_lengths("chat", 20000, 1 << 20, 1)
        self.assertAlmostEqual(statistics.mean(prompt for prompt, _ in chat), 161, delta=6)
        self.assertAlmostEqual(statistics.mean(reply for _, reply in chat), 338, delta=12)
        offline = serve_load.draw_lengths("offline", 256, 0, 1)
        self.assertTrue(all(100 <= length <= 1024 for pair in offline for length in pair))

    def test_a_sweep_measures_what_the_server_does(self):
        with tempfile.TemporaryDirectory() as folder:
            path, picture = pathlib.Path(folder) / "rows.json", pathlib.Path(folder) / "load.svg"
            code, output = self.run_main("--requests", "12", "--max-length", "20", "--concurrency", "1", "4",
                                         "--json", str(path), "--svg", str(picture), "--token-prompts")
            self.assertEqual(code, 0, output)
            rows = json.loads(path.read_text(encoding="utf-8"))
            xml.etree.ElementTree.parse(picture)
        self.assertEqual([row["served"] for row in rows], [12, 12])
        self.assertGreater(rows[1]["tokens_per_second"], 1.5 * rows[0]["tokens_per_second"])
        for row in rows:
            self.assertGreater(row["first_p50"], 0.019)
            self.assertGreater(row["between_p50"], 0.004)
            self.assertLess(row["between_p50"], 0.1)
        self.assertEqual(sum(body["max_tokens"] for body in FakeServer.bodies), 2 * rows[0]["tokens"])
        self.assertIn("| 4 at once |", output)

    def test_shared_prefix(self):
        self.run_main("--requests", "3", "--lengths", "9", "1", "--token-prompts", "--shared-prefix", "6")
        prompts = [body["prompt"] for body in FakeServer.bodies]
        self.assertEqual([len(prompt) for prompt in prompts], [9] * 3)
        self.assertEqual((len({str(prompt[:6]) for prompt in prompts}), len({str(prompt[6:]) for prompt in prompts})), (1, 3))

    def test_no_prompt_comes_twice(self):
        for option in ("--token-prompts", "--words-per-token=2"):
            with mock.patch.object(serve_load, "draw_lengths", lambda *_: [(8, 2)] * 5):
                code, output = self.run_main("--concurrency", "1", "2", "--temperature", "0", "1", option)
            self.assertEqual(code, 0, output)
            prompts = {str(body["prompt"]) for body in FakeServer.bodies}
            self.assertEqual((len(FakeServer.bodies), len(prompts)), (20, 20))
            FakeServer.bodies.clear()

    def test_temperatures_are_a_sweep_within_the_sweep(self):
        with mock.patch.object(serve_load, "draw_lengths", lambda *_: [(8, 2)]):
            _, output = self.run_main("--concurrency", "1", "2", "--temperature", "0", "0.5", "--top-k", "40")
        for name in ("1 at once, T 0", "1 at once, T 0.5", "2 at once, T 0", "2 at once, T 0.5"):
            self.assertIn(name + " |", output)
        self.assertEqual([body["temperature"] for body in FakeServer.bodies], [0.0, 0.5] * 2)
        self.assertEqual({(body["top_k"], "top_p" in body) for body in FakeServer.bodies}, {(40, False)})

    def test_each_value_may_have_its_own_number_of_requests(self):
        with mock.patch.object(serve_load, "draw_lengths", lambda _, count, *__: [(8, 2)] * count):
            code, output = self.run_main("--concurrency", "1", "2", "--requests", "3", "5")
        self.assertEqual((code, len(FakeServer.bodies)), (0, 8), output)

    @unittest.skipUnless(pathlib.Path("/proc/self/stat").exists(), "reads /proc")
    def test_the_processor_time_of_the_server_is_counted(self):
        with mock.patch.object(serve_load, "draw_lengths", lambda *_: [(8, 2)]), \
                mock.patch.object(serve_load, "processor_seconds", side_effect=[1.0, 1.5]):
            _, output = self.run_main("--concurrency", "1", "--pid", "1")
        self.assertIn("tokens/processor s", output)
        self.assertIn(" 4 |", output)  # two tokens in half a second
        begin, spent = serve_load.processor_seconds(os.getpid()), time.process_time()
        while time.process_time() - spent < 0.1:
            pass
        self.assertGreater(serve_load.processor_seconds(os.getpid()) - begin, 0.05)

    def test_lengths_may_be_the_same_for_all(self):
        code, output = self.run_main("--concurrency", "1", "--requests", "3", "--lengths", "7", "2", "--token-prompts")
        self.assertEqual(code, 0, output)
        self.assertEqual([(len(body["prompt"]), body["max_tokens"]) for body in FakeServer.bodies], [(7, 2)] * 3)

    def test_a_reply_that_breaks_off_is_a_failure(self):
        with mock.patch.object(serve_load, "draw_lengths", lambda *_: [(3, 14), (3, 2)]):
            code, output = self.run_main("--concurrency", "1")
        self.assertEqual(code, 1)
        self.assertIn("broke off", output)

    def test_events_have_the_time_at_which_they_were_whole(self):
        data = b'data: {"a": 1}\n\ndata: {"a": 2}\n\n: a comment\ndata: [DONE]\n\n'
        cut = data.index(b"2")
        arrived = [(1.0, 3), (2.0, cut), (3.0, len(data))]
        self.assertEqual(serve_load.pieces_of(arrived, data), [(2.0, {"a": 1}), (3.0, {"a": 2}), (3.0, None)])

    def test_no_client_outlives_a_load_that_is_ended(self):
        path = pathlib.Path(serve_load.__file__)
        with subprocess.Popen([sys.executable, str(path), self.url, "--concurrency", "4", "--requests", "100000"],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as load:
            while load.poll() is None and len(FakeServer.bodies) < 8:
                time.sleep(0.05)
            load.terminate()
            self.assertEqual(load.wait(timeout=60), 128 + 15)
        time.sleep(0.2)
        num_sent = len(FakeServer.bodies)
        time.sleep(1)
        self.assertEqual(len(FakeServer.bodies), num_sent)

    def test_failures_are_counted_and_said(self):
        with mock.patch.object(serve_load, "draw_lengths", lambda *_: [(3, 13), (3, 2)]):
            code, output = self.run_main("--rate", "100")
        self.assertEqual(code, 1)
        self.assertIn("failed: 500", output)


if __name__ == "__main__":
    unittest.main()
