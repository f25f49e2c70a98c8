"""Headless Chromium through its DevTools protocol, with nothing but the standard library.

    with devtools.Browser() as browser:
        page = browser.open(url, width=1400, height=900)
        page.evaluate("document.title")
"""

import base64
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def program():
    """The browser's path, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class WebSocket:
    """A client of RFC 6455, as far as DevTools needs one: text messages, no extensions."""

    def __init__(self, port, path):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.stream = self.socket.makefile("rb")
        if b" 101 " not in self.stream.readline():
            raise ConnectionError("the browser speaks no WebSocket")
        while self.stream.readline() != b"\r\n":
            pass

    def send(self, text):
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        if size < 126:
            head = struct.pack("!BB", 0x81, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, size)
        self.socket.sendall(head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))

    def receive(self):
        text = b""
        while True:
            first, second = self.stream.read(2)
            size = second & 0x7F
            if size == 126:
                size = struct.unpack("!H", self.stream.read(2))[0]
            elif size == 127:
                size = struct.unpack("!Q", self.stream.read(8))[0]
            data = self.stream.read(size)
            if first & 0x0F < 3:  # text or its continuation; the others are pings
                text += data
                if first & 0x80:
                    return text.decode()


class Page:
    def __init__(self, port, target):
        self.socket = WebSocket(port, target["webSocketDebuggerUrl"].split(str(port), 1)[1])
        self.num_calls = 0
        self.problems = []   # errors on the console and exceptions
        self.addresses = []  # all that was asked for

    def call(self, method, **parameters):
        self.num_calls += 1
        number = self.num_calls
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.note(message.get("method"), message.get("params", {}))

    def note(self, method, parameters):
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.problems.append(str(parameters["args"]))
        elif method == "Network.requestWillBeSent":
            self.addresses.append(parameters["request"]["url"])

    def evaluate(self, expression):
        """The value of an expression; a promise's is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", str(result)))
        return result["result"].get("value")

    def wait_for(self, expression, seconds=10.0):
        """Waits until the expression is true, and returns its value. TimeoutError names it."""
        end = time.monotonic() + seconds
        while True:
            value = self.evaluate(expression)
            if value:
                return value
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.02)

    def size(self, width, height, is_phone=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)

    def dark(self, is_dark):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}])

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def touch(self, x, y):
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, name, code=None):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36,
                 "End": 35}
        text = {"text": name} if len(name) == 1 else {}
        number = code or codes.get(name, ord(name[0].upper()))
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=number, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=number)

    def picture(self, path):
        pathlib.Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


class Browser:
    """A running browser with a profile of its own. Use it in a `with` statement."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [program(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--hide-scrollbars", "--remote-debugging-port=0", "--user-data-dir=" + self.folder.name, "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        said = pathlib.Path(self.folder.name) / "DevToolsActivePort"
        end = time.monotonic() + 30
        while not (said.exists() and said.read_text().count("\n")):
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise ConnectionError("the browser does not start")
            time.sleep(0.02)
        self.port = int(said.read_text().split("\n", maxsplit=1)[0])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: the browser and its helpers
        except ProcessLookupError:
            pass
        self.process.wait()
        self.folder.cleanup()

    def open(self, url, width=1400, height=900, is_phone=False, is_dark=False):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("PUT", "/json/new?about:blank")
        page = Page(self.port, json.loads(connection.getresponse().read()))
        connection.close()
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(domain + ".enable")
        page.size(width, height, is_phone)
        page.dark(is_dark)
        page.call("Page.navigate", url=url)
        page.wait_for("document.readyState === 'complete'")
        return page
