#!/usr/bin/env python3
"""Two servers behind HAProxy: python3 tests/http_clients/behind_haproxy.py build/stage8 [--measure]

Starts HAProxy with common/serving/haproxy.cfg and two servers with the bundled model, all on free ports of 127.0.0.1. Chats
of many turns go on while one server is killed and started again, and the other is drained and started again. A turn may
fail only if its stream had begun; every reply has to be what a server writes that nothing happened to. --measure instead
counts the tokens of prompts that are found in the prefix caches, with affinity and without. Needs the package `haproxy`;
without it, ends with 77: skipped. Standard library only.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import threading
import time

import http_program
from many_clients import metrics_of

CONFIGURATION = pathlib.Path(__file__).resolve().parents[2] / "common" / "serving" / "haproxy.cfg"
SKIPPED = 77
SUBJECTS = ("a king", "a wolf", "the sea", "a poor girl", "three brothers", "a golden bird", "the moon", "a miller",
            "an old soldier", "a fox", "the forest", "a giant")
QUESTIONS = ("Tell me a tale of {}. ", " And what did they say when it was dark? ", " Then somebody came to the door. ",
             " How did it go on in the morning? ", " And the mother of {}, where was she? ", " How does it end? ")
MAX_TOKENS = 24


def free_ports(count):
    """So many different ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for(what, condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not after {seconds} seconds")
        time.sleep(0.02)


def health(port):
    """The status code and the state that the server says; (0, "") if nothing listens there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read()).get("status", "")
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


class Balanced:
    """HAProxy and two servers, for a `with` statement."""

    def __init__(self, program, *options):
        self.program = program
        self.options = ("--device", "cpu", "--threads", "1", "--streams-wait", "--drain-notice", "2", *options)
        self.port, *self.ports = free_ports(3)
        self.servers = [None, None]
        self.haproxy = None

    def __enter__(self):
        try:
            for index in range(2):
                self.start(index)
            addresses = {name: f"127.0.0.1:{port}" for name, port in
                         zip(("BALANCER", "SERVER_A", "SERVER_B"), (self.port, *self.ports))}
            self.haproxy = subprocess.Popen([find_haproxy(), "-db", "-f", CONFIGURATION], env=os.environ | addresses,
                                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for("HAProxy", lambda: health(self.port)[0] == 200)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.haproxy is not None:
            self.haproxy.kill()
            self.haproxy.wait()
        for server in self.servers:
            if server is not None:
                server.__exit__()

    def start(self, index):
        self.servers[index] = http_program.HttpProgram(self.program, *self.options, port=self.ports[index])
        if not self.servers[index].url:
            raise RuntimeError(f"a server does not start: {self.servers[index].process.communicate(timeout=10)[1]}")

    def metric(self, index, name):
        return metrics_of(self.servers[index])["vllm:" + name]


class Refused(Exception):
    """No reply, or not one of a text: the request is lost."""


class BrokenOff(Exception):
    """The stream ended too early."""


def ask(port, messages, affinity=None, is_streamed=False):
    """(the text, the usage). Greedy, so that a text asked for twice is the same."""
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "repetition_penalty": 1, "stream": is_streamed}
    headers = {"Content-Type": "application/json"} | ({"X-Affinity": affinity} if affinity else {})
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    text, usage, has_ended = "", None, False
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise Refused(f"{reply.status} {reply.read().decode()}")
        if not is_streamed:
            document = json.loads(reply.read())
            return document["choices"][0]["message"]["content"], document["usage"]
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise (BrokenOff if text else Refused)(event["error"]["message"])
                text += event["choices"][0]["delta"].get("content", "") if event["choices"] else ""
                usage = event.get("usage") or usage
            has_ended = has_ended or line.startswith(b"data: [DONE]")
    except (OSError, http.client.HTTPException) as error:
        raise (BrokenOff if text else Refused)(repr(error)) from error
    finally:
        connection.close()
    if not has_ended:
        raise (BrokenOff if text else Refused)(f"the stream ended after {text!r}")
    return text, usage


class Chat:
    """A chat of all questions; each turn sends all that was said."""

    def __init__(self, index):
        self.name = f"chat {index}"
        self.subject = SUBJECTS[index % len(SUBJECTS)]
        self.is_streamed = index % 2 == 0
        self.messages = []
        self.replies = []  # the prompts' messages and the text
        self.broken_off, self.lost = 0, []

    def turn(self, port, number):
        """Asks the question until there is a reply."""
        self.messages.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)].format(self.subject)})
        while True:
            try:
                text, usage = ask(port, self.messages, self.name, self.is_streamed)
                break
            except BrokenOff:
                self.broken_off += 1
            except Refused as error:
                self.lost.append(f"{self.name}, turn {number}: {error}")
                if len(self.lost) > 3:
                    raise
        self.replies.append((list(self.messages), text))
        self.messages.append({"role": "assistant", "content": text})
        return usage

    def go_on(self, port, is_over):
        """Turns until the event, and one after it; when there are six, a new chat."""
        number, ends = 0, False
        while not ends:
            ends = is_over.is_set()
            if number % len(QUESTIONS) == 0:
                self.messages = []
            self.turn(port, number)
            number += 1


def control(port, action):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/pool/" + action, "{}", {"Content-Type": "application/json"})
    connection.getresponse().read()
    connection.close()


def kill_one(balanced, index):
    """Kills a server while requests wait in its queue, and starts it again."""
    control(balanced.ports[index], "pause")
    wait_for("requests in the queue", lambda: balanced.metric(index, "num_requests_waiting") > 1)
    num_waiting = balanced.metric(index, "num_requests_waiting")
    balanced.servers[index].process.kill()
    balanced.servers[index].__exit__()
    time.sleep(1)
    balanced.start(index)
    return int(num_waiting)


def restart_one(balanced, index):
    """Drains a server that has something to do, and starts it again."""
    wait_for("requests on the other server", lambda: balanced.metric(index, "num_requests_running") > 0)
    code, _, errors = balanced.servers[index].end(timeout=20)
    if code != 0:
        raise RuntimeError(f"the drained server ended with {code}: {errors}")
    time.sleep(0.5)
    balanced.start(index)


def test(program):
    chats = [Chat(index) for index in range(12)]
    is_over = threading.Event()
    with Balanced(program, "--max-sequences", "2", "--pool-controls") as balanced, \
            concurrent.futures.ThreadPoolExecutor(len(chats)) as pool:
        try:
            going = [pool.submit(chat.go_on, balanced.port, is_over) for chat in chats]
            time.sleep(0.5)
            num_waiting = kill_one(balanced, 0)
            wait_for("HAProxy's check of the server", lambda: balanced.metric(0, "num_requests_running") > 0)
            restart_one(balanced, 1)
            wait_for("HAProxy's check of the server", lambda: balanced.metric(1, "num_requests_running") > 0)
        finally:
            is_over.set()
        for one in going:
            one.result()
        lost = [problem for chat in chats for problem in chat.lost]
        replies = [reply for chat in chats for reply in chat.replies]
        sample = random.Random(1).sample(replies, min(40, len(replies)))
        wrong = [text for messages, text in sample if ask(balanced.ports[0], messages)[0] != text]
    print(f"{len(replies)} replies; killed with {num_waiting} requests in the queue; streams broken off: "
          f"{sum(chat.broken_off for chat in chats)}; lost: {len(lost)}; {len(sample)} texts compared, {len(wrong)} differ")
    if num_waiting < 2 or len(replies) < 40 or lost or wrong:
        sys.exit("\n".join(lost[:5] + wrong[:1]) or "too few requests for a test")


def measure(program):
    """Chats in a random order, one request at a time: the same counts every time."""
    for name, has_affinity in (("round robin", False), ("affinity", True)):
        with Balanced(program) as balanced:
            chats = [Chat(index) for index in range(12)]
            turns = [index for index in range(len(chats)) for _ in QUESTIONS]
            random.Random(3).shuffle(turns)
            num_prompt, num_cached = 0, 0
            for index in turns:
                chat = chats[index]
                chat.name = f"chat {index}" if has_affinity else None
                usage = chat.turn(balanced.port, len(chat.replies))
                num_prompt += usage["prompt_tokens"]
                num_cached += usage["prompt_tokens_details"]["cached_tokens"]
            requests = [int(balanced.metric(index, "request_success_total{length}")
                            + balanced.metric(index, "request_success_total{stop}")) for index in range(2)]
            print(f"{name:11}  {len(turns)} requests, {requests[0]} and {requests[1]}; {num_cached:,} of {num_prompt:,} "
                  f"prompt tokens found in the prefix caches, {100 * num_cached / num_prompt:.1f} %", flush=True)


def find_haproxy():
    """None: it is not installed. Debian puts it where only an administrator's PATH leads."""
    return shutil.which("haproxy", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    if find_haproxy() is None:
        print("skipped: haproxy is not installed (apt-get install haproxy)")
        sys.exit(SKIPPED)
    (measure if arguments.measure else test)(arguments.program)


if __name__ == "__main__":
    main()
