#!/usr/bin/env python3
"""The page of `serve --http` in a real browser: python3 tests/http_clients/page_test.py build/stage8 [--pictures FOLDER]

Needs the package `playwright` from PyPI, in an environment outside of the repository, and Debian's `chromium`. Types a prompt
and looks for blocks in the pool, tries fork, write and free by hand, steps, pauses, provokes a preemption, makes the pool
anew, uses the keyboard alone, and looks for anything that does not fit into 390 pixels, in light and dark.
--pictures keeps screenshots.
"""

import argparse
import pathlib
import re
import shutil
import sys

import http_program
from playwright import sync_api

OPTIONS = ["--device", "cpu", "--pool-controls",
           "--slots", "128", "--block-size", "4", "--budget", "64", "--headroom", "0"]


def check(name, condition, seen=""):
    if not condition:
        sys.exit(f"{name}: no; {seen}")
    print(f"{name}: yes")


class Page:
    def __init__(self, browser, url, width, scheme, headers=None):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme,
                                           reduced_motion="reduce")
        self.page = self.context.new_page()
        self.problems = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.problems.append(request.url)
                     if not request.url.startswith(url) else None)
        self.page.goto(url + "/")
        self.wait_for("the state", lambda: "step" in self.text("state"))

    def text(self, name):
        return self.page.inner_text("#" + name)

    def pool(self, name="pool"):
        """(owned, shared, cached, free)"""
        return tuple(int(number) for number in re.findall(r"\d+", self.page.get_attribute("#" + name, "aria-label")))

    def wait_for(self, name, condition, seconds=20):
        for _ in range(int(seconds * 20)):
            if condition():
                print(f"{name}: yes")
                return
            self.page.wait_for_timeout(50)
        sys.exit(f"{name}: no; pool {self.pool()}, state {self.text('state')}, problem {self.text('problem')}")

    def command(self, line):
        self.page.fill("#line", line)
        self.page.press("#line", "Enter")
        self.page.wait_for_function("line => document.getElementById('output').textContent.includes('> ' + line)", arg=line)
        return self.pool("demo-pool")


def check_prompts(page):
    page.page.click("#pause")
    page.wait_for("paused", lambda: page.text("state").startswith("paused"))
    page.page.fill("#prompts", "Once upon a time")
    page.page.fill("#samples", "2")
    page.page.fill("#max-tokens", "40")
    page.page.click("#submit")
    page.wait_for("the request waits", lambda: "no request" not in page.text("waiting"))
    check("an empty pool", page.pool()[0] == 0, page.pool())
    page.page.click("#step")
    page.wait_for("blocks appear, and both samples share them", lambda: page.pool()[:2] == (2, 2))
    page.page.click("#step")
    page.wait_for("a write copies the block that is not full", lambda: page.text("number-blocks-copied") == "1")
    check("one block is still shared", page.pool()[:2] == (3, 1), page.pool())
    page.page.click("#run")
    page.wait_for("the texts are complete", lambda: page.page.locator("#replies button").count() == 0, 60)
    check("two texts", all(page.page.locator("#replies .text").nth(i).inner_text().strip() for i in range(2)))
    page.wait_for("the blocks are given back, and full ones are cached", lambda: page.pool()[0] == 0 and page.pool()[2] > 0)
    check("tokens are counted", int(page.text("number-tokens-written")) > 60)
    page.page.check("#beams")
    check("a search has no temperature", page.page.is_disabled("#temperature"))
    page.page.fill("#max-tokens", "8")
    page.page.click("#submit")
    page.wait_for("beams are served", lambda: page.page.locator("#replies .text").count() == 4
                  and all(page.page.locator("#replies .text").all_inner_texts()), 60)
    page.page.uncheck("#beams")


def check_preemption(page):
    page.page.fill("#prompts", "\n".join(["Once upon a time", "The king had a garden", "A wolf"]))
    page.page.fill("#samples", "1")
    page.page.fill("#temperature", "0")
    page.page.fill("#max-tokens", "90")
    page.page.click("#pause")
    page.page.press("#prompts", "Control+Enter")
    page.wait_for("all three wait", lambda: page.text("number-running-waiting") == "0, 3")
    page.page.click("#run")
    page.wait_for("a preemption", lambda: int(page.text("number-preemptions")) > 0, 60)
    check("it is in the log", "preempted, because a block was missing" in page.text("log"))
    page.wait_for("all three end", lambda: page.page.locator("#replies button").count() == 0, 60)


def check_by_hand(page):
    page.page.click("text=empty the pool")
    page.wait_for("an empty pool of eight", lambda: page.pool("demo-pool") == (0, 0, 0, 8))
    check("new: two blocks", page.command("new A 6") == (2, 0, 0, 6), page.pool("demo-pool"))
    page.command("append A 6")
    check("fork shares both", page.command("fork A B") == (2, 2, 0, 6), page.pool("demo-pool"))
    check("write copies one", page.command("write B") == (3, 1, 0, 5), page.pool("demo-pool"))
    check("and says so", "copied to block" in page.text("output"), page.text("output"))
    check("free frees what is not shared", page.command("free B") == (2, 0, 0, 6), page.pool("demo-pool"))
    page.page.click("#chips >> text=free A")
    page.wait_for("a click does the same", lambda: page.pool("demo-pool") == (0, 0, 0, 8))
    page.command("prompt C once_upon_a_time")
    check("a prompt's blocks stay cached", page.command("free C")[2] == 4, page.pool("demo-pool"))
    check("and are found again", "12 of 16 tokens are in the cache" in (page.command("prompt D once_upon_a_hill"), page.text("output"))[1],
          page.text("output"))
    check("a wrong command is an error", "error:" in (page.command("fork Z Y"), page.text("output"))[1])


def check_sizes(page):
    before = page.pool()
    page.page.focus("#slots")
    page.page.keyboard.press("ArrowRight")
    page.wait_for("the pool is made anew, twice as large", lambda: sum(page.pool()[i] for i in (0, 2, 3)) == 64)
    check("it had half of that", before[0] + before[2] + before[3] == 32, before)
    page.page.keyboard.press("ArrowLeft")
    page.wait_for("and as it was", lambda: sum(page.pool()[i] for i in (0, 2, 3)) == 32)


def check_keyboard(page):
    page.page.evaluate("document.activeElement.blur()")
    page.page.keyboard.press("p")
    page.wait_for("key p pauses", lambda: page.text("state").startswith("paused"))
    page.page.keyboard.press("r")
    page.wait_for("key r runs", lambda: page.text("state").startswith("running"))
    names = []
    for _ in range(45):
        page.page.keyboard.press("Tab")
        names.append(page.page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    for name in ("pause", "prompts", "submit", "slots", "budget", "line"):
        check(f"Tab reaches {name}", name in names or name == "pause", names)


def check_width(page, width):
    widest = page.page.evaluate("document.documentElement.scrollWidth")
    check(f"nothing is wider than {width} pixels", widest <= width, widest)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--pictures", type=pathlib.Path)
    arguments = parser.parse_args()
    with http_program.HttpProgram(arguments.program, *OPTIONS) as server, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (390, "dark"), (1280, "dark"), (390, "light")):
            page = Page(browser, server.url, width, scheme)
            if scheme == "light":
                check_by_hand(page)
                check_prompts(page)
                check_preemption(page)
                check_sizes(page)
            check_keyboard(page)
            check_width(page, width)
            if arguments.pictures:
                arguments.pictures.mkdir(parents=True, exist_ok=True)
                page.page.click("#pause")
                page.page.fill("#max-tokens", "110")
                page.page.click("#submit")
                for _ in range(40):
                    page.page.click("#step")
                page.wait_for("requests run", lambda: page.pool()[0] > 12)
                page.page.screenshot(path=arguments.pictures / f"page-{width}-{scheme}.png", full_page=True)
                page.page.click("#run")
            check("no error, and nothing from elsewhere", not page.problems, page.problems)
            page.context.close()
        browser.close()
        code, _, errors = server.end()
        check("the server ends", code == 0, errors)
    with http_program.HttpProgram(arguments.program, *OPTIONS, "--api-key", "secret") as server, \
            sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.url + "/")
        page.wait_for_selector("#key", state="visible")
        page.fill("#api-key", "secret")
        page.press("#api-key", "Enter")
        page.wait_for_function("document.getElementById('state').textContent.includes('step')")
        print("the page asks for the key: yes")
        browser.close()


if __name__ == "__main__":
    main()
