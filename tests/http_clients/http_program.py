"""Starts `stage8 serve --http` for tests, and ends it."""

import http.client
import json
import os
import re
import signal
import subprocess
import urllib.parse

READY = re.compile(r"on (http://\S+)/v1,")


class HttpProgram:
    """A running server. Use it in a `with` statement."""

    def __init__(self, program, *options, gpu=False, host="127.0.0.1", port=0, quiet=True,
                 environment=None):
        environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}) | (environment or {})
        # Quiet, because the lines are read only at the end, and a pipe that is full would stop the server.
        options = (*(("--quiet",) if quiet else ()), *options)
        self.process = subprocess.Popen([program, "serve", "--http", f"{host}:{port}", *options], env=environment,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True)
        self.first_line = self.process.stdout.readline()
        ready = READY.search(self.first_line)
        self.url = ready.group(1) if ready else ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def connect(self, timeout=60):
        return http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=timeout)

    def post(self, path, body):
        """(status, the JSON of the reply)"""
        connection = self.connect()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        return reply.status, json.loads(text)

    def get(self, path):
        """The JSON of the reply"""
        connection = self.connect()
        connection.request("GET", path)
        text = connection.getresponse().read()
        connection.close()
        return json.loads(text)

    def end(self, timeout=60):
        """Sends SIGTERM. Returns (exit code, what was printed since the first line, stderr)."""
        self.process.send_signal(signal.SIGTERM)
        output, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, output, errors
