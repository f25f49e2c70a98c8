#!/usr/bin/env python3
"""How `serve --http` starts and ends: python3 tests/http_clients/draining_test.py build/stage8

What /health says, who is refused and who is served to the end, with 200 requests in the queue, with clients that hang up,
and with signals at any time. Standard library only.
"""

import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import http_program
from behind_haproxy import control, free_ports, health, wait_for
from many_clients import metrics_of

PROGRAM = ""
NUM_QUEUED = 200


def server(*options, quiet=True):
    return http_program.HttpProgram(PROGRAM, "--device", "cpu", "--threads", "1", "--pool-controls", *options, quiet=quiet)


def port_of(program):
    return int(program.url.rpartition(":")[2])


def begin(program, max_tokens=8, is_streamed=False):
    """The connection of a request that is sent."""
    connection = program.connect()
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, "stream": is_streamed}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def end(connection):
    """(status, Retry-After, what has come)"""
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, reply.getheader("Retry-After"), text


class Ending(unittest.TestCase):
    def begin_many(self, program, max_tokens, is_streamed=lambda index: False):
        """So many requests that wait in a paused server's queue."""
        control(port_of(program), "pause")
        connections = [begin(program, max_tokens, is_streamed(index)) for index in range(NUM_QUEUED)]
        wait_for("all requests in the queue", lambda: metrics_of(program)["vllm:num_requests_waiting"] == NUM_QUEUED)
        return connections

    def assert_ends(self, program, seconds, code=0):
        _, errors = program.process.communicate(timeout=seconds)
        self.assertEqual(program.process.returncode, code, errors)

    def test_starting_is_said_until_it_serves(self):
        for is_stopped in (False, True):
            with self.subTest(is_stopped=is_stopped), tempfile.TemporaryDirectory() as folder:
                key = pathlib.Path(folder) / "key"
                os.mkfifo(key)  # the start waits for the key
                self.start_slowly(key, is_stopped)

    def start_slowly(self, key, is_stopped):
        (port,) = free_ports(1)
        process = subprocess.Popen([PROGRAM, "serve", "--http", f"127.0.0.1:{port}", "--device", "cpu", "--api-key-file", key],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for("a reply", lambda: health(port)[0] != 0)
            self.assertEqual(health(port), (503, "starting"))
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("POST", "/v1/completions", "{}", {"Content-Type": "application/json"})
            status, retry_after, text = end(connection)
            self.assertEqual((status, retry_after), (503, "1"))
            self.assertIn("starting", text)
            if not is_stopped:
                key.write_text("secret\n", encoding="ascii")
                wait_for("ready", lambda: health(port) == (200, "ready"))
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(timeout=5), -signal.SIGTERM if is_stopped else 0)
        finally:
            process.kill()
            process.wait()

    def test_what_waits_in_the_queue_is_served(self):
        with server() as program, concurrent.futures.ThreadPoolExecutor(NUM_QUEUED) as pool:
            self.assertEqual(health(port_of(program)), (200, "ready"))
            connections = self.begin_many(program, max_tokens=4)
            replies = [pool.submit(end, connection) for connection in connections]
            program.process.send_signal(signal.SIGTERM)  # it ends the pause too
            wait_for("draining", lambda: health(port_of(program)) == (503, "draining"))
            status, retry_after, _ = end(begin(program))
            self.assertEqual((status, retry_after), (503, "1"))
            self.assertEqual({reply.result()[0] for reply in replies}, {200})
            self.assert_ends(program, 5)

    def test_after_the_time_to_drain_what_has_not_begun_is_refused(self):
        with server("--drain-seconds", "1", "--streams-wait", "--max-sequences", "1") as program, \
                concurrent.futures.ThreadPoolExecutor(NUM_QUEUED) as pool:
            connections = self.begin_many(program, max_tokens=1000, is_streamed=lambda index: index % 2 == 0)
            replies = [pool.submit(end, connection) for connection in connections]
            program.process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            replies = [reply.result() for reply in replies]
            self.assert_ends(program, 5)
            self.assertLess(time.monotonic() - begun, 5)
        refused = [reply for reply in replies if reply[:2] == (503, "1") and "the server has ended" in reply[2]]
        broken_off = [reply for reply in replies if reply[0] == 200 and "the server has ended" in reply[2]]
        whole = [reply for reply in replies if reply[0] == 200 and "the server has ended" not in reply[2]]
        self.assertEqual(len(refused) + len(broken_off) + len(whole), NUM_QUEUED)
        self.assertLessEqual(len(broken_off), 1)  # of one at a time
        self.assertGreater(len(refused), NUM_QUEUED // 2)

    def test_a_client_that_hangs_up_is_not_waited_for(self):
        with server("--max-sequences", "1", quiet=False) as program:
            leaving = begin(program, max_tokens=1000, is_streamed=True)
            reply = leaving.getresponse()
            self.assertIn(b"data:", reply.readline())
            staying = begin(program, max_tokens=4)
            wait_for("the other in the queue", lambda: metrics_of(program)["vllm:num_requests_waiting"] == 1)
            control(port_of(program), "pause")
            program.process.send_signal(signal.SIGTERM)
            reply.close()
            leaving.close()
            self.assertEqual(end(staying)[0], 200)
            output, errors = program.process.communicate(timeout=5)
        self.assertEqual(program.process.returncode, 0, errors)
        computed = re.search(r", (\d+) out, .*: client gone", output)
        self.assertIsNotNone(computed, output)
        self.assertLess(int(computed[1]), 900)

    def test_a_second_signal_of_either_kind_ends_it(self):
        with server("--max-sequences", "1") as program:
            connections = self.begin_many(program, max_tokens=1000)
            program.process.send_signal(signal.SIGTERM)
            wait_for("draining", lambda: health(port_of(program)) == (503, "draining"))
            program.process.send_signal(signal.SIGINT)
            self.assert_ends(program, 5, -signal.SIGINT)
            for connection in connections:
                connection.close()

    def test_a_drain_that_is_announced_refuses_nothing_yet(self):
        with server("--drain-notice", "1") as program:
            program.process.send_signal(signal.SIGTERM)
            wait_for("draining", lambda: health(port_of(program)) == (503, "draining"))
            self.assertEqual(end(begin(program))[0], 200)
            self.assert_ends(program, 5)

    def test_the_time_to_drain_ends_the_notice_too(self):
        with server("--drain-notice", "60", "--drain-seconds", "1", quiet=False) as program:
            connection = begin(program, max_tokens=1000)
            wait_for("running", lambda: metrics_of(program)["vllm:num_requests_running"] == 1)
            control(port_of(program), "pause")
            program.process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            output, errors = program.process.communicate(timeout=10)
            self.assertLess(time.monotonic() - begun, 5)
            connection.close()
        self.assertEqual(program.process.returncode, 0, errors)
        self.assertIn("draining is announced: requests are taken for 1 s more; a second Ctrl-C ends the server\n", output)
        self.assertIn("draining: 1 request runs; the server ends at the latest in 0 s; a second Ctrl-C ends it\n", output)


if __name__ == "__main__":
    PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    unittest.main()
