"""Headless Chromium for tests: Selenium starts it, and pages are driven by DevTools' commands.

    with devtools.Browser() as browser:
        page = browser.open(url, width=1400, height=900)
        page.evaluate("document.title")
"""

import base64
import json
import pathlib
import shutil
import time

try:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
except ImportError:
    webdriver = None

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def program():
    """The browser's path, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def missing():
    """The packages that are not there, as Debian names them; empty if none is missing."""
    return " ".join(package for package, is_there in (("chromium", program()), ("chromium-driver", shutil.which("chromedriver")),
                                                      ("python3-selenium", webdriver)) if not is_there)


class Page:
    """A page, in a browser of its own."""

    def __init__(self, arguments=()):
        options = webdriver.ChromeOptions()
        options.binary_location = program()
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                         "--hide-scrollbars", *arguments):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)
        self.errors = []
        self.requests = []

    def call(self, method, **parameters):
        return self.driver.execute_cdp_cmd(method, parameters)

    def close(self):
        self.driver.quit()

    @property
    def problems(self):
        """Errors on the console and exceptions. The list may be changed."""
        self.errors += [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        return self.errors

    @property
    def addresses(self):
        """Of everything that the page has asked for."""
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
        return self.requests

    def evaluate(self, expression):
        """The value of an expression; a promise's is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", str(result)))
        return result["result"].get("value")

    def wait_for(self, expression, seconds=60.0):
        """For what has to come soon, on a machine that may have much else to do. Waits until the expression is true, and returns its value. TimeoutError names it."""
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
    """Opens pages, and closes them at the end of a `with` statement."""

    def __init__(self):
        self.pages = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for page in self.pages:
            page.close()

    def close(self, page):
        self.pages.remove(page)
        page.close()

    def open(self, url, width=1400, height=900, is_phone=False, is_dark=False, arguments=()):
        page = Page(arguments)
        self.pages.append(page)
        page.size(width, height, is_phone)
        page.dark(is_dark)
        page.call("Page.navigate", url=url)
        page.wait_for("document.readyState === 'complete'")
        return page
