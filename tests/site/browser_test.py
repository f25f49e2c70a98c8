#!/usr/bin/env python3
"""The site in a browser: python3 tests/site/browser_test.py [--site build/site] [--pictures FOLDER]

Opens every page from the disk, wide and narrow, light and dark. Ends with 77, which is "skipped", where there is no Chromium or
the site can't be made. --pictures also leaves screenshots of some pages.
"""

import argparse
import contextlib
import io
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "http_clients")]

import build_site
import devtools

WIDE, NARROW = (1400, 900), (390, 844)
LESSON = "stage5_cow_beam/index.html"
num_checks = 0
# Elements that are wider than the window, and in nothing that scrolls.
TOO_WIDE = """(() => {
    if (document.documentElement.scrollWidth <= innerWidth) return '';
    const wide = [...document.querySelectorAll('body *')].filter((element) => element.getBoundingClientRect().right > innerWidth + 1);
    return (wide.at(-1) ?? document.body).outerHTML.slice(0, 200);
})()"""
# Which of the pictures are seen: on-light, on-dark, or both.
PICTURES = """[...new Set([...document.querySelectorAll('.on-light, .on-dark')].filter((image) =>
    getComputedStyle(image).display !== 'none').map((image) => image.className))].join()"""


def check(what, holds, seen=None):
    global num_checks
    num_checks += 1
    if not holds:
        print(f"FAILED: {what}" + ("" if seen is None else f": {seen}"))
        sys.exit(1)


def go(page, site, name):
    page.call("Page.navigate", url=(site / name).as_uri() if "#" not in name else
              (site / name.partition("#")[0]).as_uri() + "#" + name.partition("#")[2])
    page.wait_for("document.readyState === 'complete'")


def settle(page):
    page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")


def check_pages(page, site):
    """Every page: no error, nothing from elsewhere, nothing wider than the window. Of the pages with a file's code, which are
    made alike, the longest and every 24th."""
    paths = sorted(site.rglob("*.html"), key=lambda path: path.stat().st_size, reverse=True)
    names = [path.relative_to(site).as_posix() for path in paths]
    names = [name for name in names if not name.startswith("code/")] + [name for name in names if name.startswith("code/")][::24]
    for name in names:
        go(page, site, name)
        # Each size and each colour with each other, a change at a time.
        for size, is_dark in ((WIDE, False), (WIDE, True), (NARROW, True), (NARROW, False)):
            page.size(*size)
            page.dark(is_dark)
            seen = page.evaluate(f"({{headings: document.querySelectorAll('h1').length, wide: {TOO_WIDE}, pictures: {PICTURES}, "
                                 "back: getComputedStyle(document.body).backgroundColor})")
            where = f"{name}, {size[0]} pixels, {'dark' if is_dark else 'light'}"
            check(f"{where}: a heading", seen["headings"] == 1)
            check(f"{where}: nothing is wider", not seen["wide"], seen["wide"])
            check(f"{where}: the colours", (seen["back"] != "rgb(255, 255, 255)") == is_dark, seen["back"])
            check(f"{where}: the right pictures", seen["pictures"] in ("", "on-dark" if is_dark else "on-light"), seen["pictures"])
        check(f"{name}: no error", not page.problems, page.problems)
    check("nothing from elsewhere", all(address.startswith(("file:", "data:")) for address in page.addresses))
    return len(names)


def check_walk(page, site):
    page.size(*WIDE)
    page.dark(False)
    go(page, site, LESSON)
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    count = page.evaluate("document.querySelectorAll('.note').length")
    check("a lesson has notes", count > 10)
    shown = []
    for index in range(count):
        page.evaluate(f"scrollTo(0, document.querySelectorAll('.note')[{index}].getBoundingClientRect().top + scrollY - innerHeight * 0.3)")
        settle(page)
        shown.append(page.evaluate("""(() => {
            const walk = document.querySelectorAll('.note')[INDEX].closest('.walk');
            const hunks = [...document.querySelectorAll('.hunks')].map((one, index) => [one, index]).filter(([one]) => one.offsetHeight > 0 && walk.contains(one));
            const [box, note] = [hunks[0][0].getBoundingClientRect(), walk.querySelector('.note.active').getBoundingClientRect()];
            return {index: hunks.map(([, index]) => index), beside: box.left > note.right, inView: box.top < innerHeight / 2 && box.bottom > note.top && box.bottom <= innerHeight + 1};
        })()""".replace("INDEX", str(index))))
    check("the hunks follow the text", [one["index"] for one in shown] == [[index] for index in range(count)], shown)
    check("beside it", all(one["beside"] for one in shown))
    check("and are in view", all(one["inView"] for one in shown), shown)
    page.evaluate("document.querySelectorAll('.note')[3].click()")
    check("a click chooses", page.evaluate("document.querySelectorAll('.hunks')[3].offsetHeight > 0"))
    page.size(*NARROW)
    settle(page)
    check("in a narrow window they are closed and below",
          page.evaluate("[...document.querySelectorAll('.hunks')].every((one) => one.offsetHeight > 0 && [...one.querySelectorAll('details')].every((hunk) => !hunk.open))"))
    page.evaluate("document.querySelector('.hunks summary').click()")
    check("and open with a click", page.evaluate("document.querySelector('.hunks pre').offsetHeight > 0"))


def check_headings(page, site):
    """A link to a part or a section of the walk lights the first paragraph that follows, however short it is."""
    page.size(*WIDE)
    go(page, site, LESSON)
    anchors = page.evaluate("""(() => { const section = document.querySelector('.walk').closest('section');
        return [...section.querySelectorAll('h2, h3')].map((heading) => heading.id); })()""")
    check("the walk has sections", len(anchors) > 2, anchors)
    for anchor in [*anchors, anchors[0]]:
        page.evaluate(f"document.querySelector('.contents a[href=\"#{anchor}\"]').click()")
        expected = page.evaluate(f"""[...document.querySelectorAll('.note')].findIndex((note) =>
            document.getElementById('{anchor}').compareDocumentPosition(note) & Node.DOCUMENT_POSITION_FOLLOWING)""")
        page.evaluate("new Promise((resume) => { let timer; const wait = () => { clearTimeout(timer); timer = setTimeout(resume, 400); };"
                      " addEventListener('scroll', wait); wait(); })")
        active = page.evaluate("[...document.querySelectorAll('.note')].findIndex((note) => note.classList.contains('active'))")
        check(f"a link to {anchor} lights what follows it", active == expected, [active, expected])
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'; scrollBy(0, 3000)")
    settle(page)
    settle(page)
    check("until one reads on", page.evaluate("[...document.querySelectorAll('.note')].findIndex((note) => note.classList.contains('active'))") > expected)


# Lines of code that are partly hidden, and what scrolls without saying so.
CUT = """(() => {
    for (const details of document.querySelectorAll('details')) details.open = true;
    const isCut = (line) => line.scrollWidth > line.clientWidth + 1 || line.getBoundingClientRect().right > line.closest('.box, .listing').getBoundingClientRect().right + 1;
    const lines = [...document.querySelectorAll('.box pre.code span, .listing pre.code span')].filter((line) => line.offsetHeight > 0 && isCut(line));
    const silent = [...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth && !getComputedStyle(one).backgroundImage.includes('gradient'));
    return {cut: lines.slice(0, 3).map((line) => line.textContent), silent: silent.length, wrapped: [...document.querySelectorAll('pre.code span')].filter((line) =>
        line.offsetHeight > 30).length};
})()"""

# Pictures that are much smaller than they were drawn for.
SMALL = """[...document.querySelectorAll('article img[width]')].filter((image) => getComputedStyle(image).display !== 'none' &&
    image.getBoundingClientRect().width < 0.79 * Number(image.getAttribute('width'))).map((image) => image.getAttribute('src'))"""


def check_lines(page, site):
    for name in (LESSON, "stage2_blocks/index.html", "stage5_cow_beam/diff-4-5.html"):
        for size in (WIDE, NARROW):
            page.size(*size)
            go(page, site, name)
            seen = page.evaluate(CUT)
            check(f"{name}, {size[0]} pixels: all of a long line is seen", not seen["cut"] and (seen["wrapped"] > 0 or size == WIDE), seen)
            check(f"{name}, {size[0]} pixels: what scrolls shows it", seen["silent"] == 0, seen)
            small = page.evaluate(SMALL)
            check(f"{name}, {size[0]} pixels: the writing in pictures can be read", not small, small)
    page.size(*WIDE)


def check_keyboard(page, site):
    page.size(*WIDE)
    go(page, site, LESSON)
    page.key("Tab")
    check("the first key leads past the menus", page.evaluate("document.activeElement.className") == "skip")
    page.evaluate("document.querySelector('.term').focus()")
    seen = page.evaluate("[document.getElementById('meaning').hidden, document.getElementById('meaning').textContent, "
                         "document.activeElement.getAttribute('aria-describedby')]")
    check("a term is explained to the keyboard", seen[0] is False and "Glossary" in seen[1] and seen[2] == "meaning", seen)
    check("inside the window", page.evaluate("(() => { const box = document.getElementById('meaning').getBoundingClientRect();"
                                             " return box.left >= 0 && box.right <= innerWidth && box.bottom <= innerHeight; })()"))
    page.key("Escape")
    check("until Escape", page.evaluate("document.getElementById('meaning').hidden"))
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    check("the focus is seen", outline == "solid", outline)
    check("all that scrolls and all buttons have names", page.evaluate(
        "[...document.querySelectorAll('button, input')].every((one) => one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length)"))


def check_touch(page, site):
    page.size(*NARROW, is_phone=True)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    go(page, site, LESSON)
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'; document.querySelector('.term').scrollIntoView({block: 'center'})")
    settle(page)
    page.touch(*page.evaluate("(() => { const box = document.querySelector('.term').getClientRects()[0]; return [box.left + 5, box.top + 5]; })()"))
    page.wait_for("!document.getElementById('meaning').hidden", 3)
    check("a touch explains a term and stays on the page", page.evaluate("location.pathname").endswith(LESSON))
    page.call("Emulation.setTouchEmulationEnabled", enabled=False)
    page.size(*WIDE)


def check_search(page, site):
    go(page, site, LESSON)
    page.key("/")
    page.wait_for("document.getElementById('search').open")
    page.wait_for("globalThis.siteIndex")
    for text, target, heading in (("free list", "stage2_blocks/", ""), ("online softmax rescal", "stage3_online_softmax/", ""),
                                  ("second part beam search", LESSON, "beam")):
        page.evaluate(f"(() => {{ const input = document.getElementById('search-text'); input.value = {text!r}; "
                      "input.dispatchEvent(new Event('input')); })()")
        found = page.evaluate("[...document.querySelectorAll('#search-results a')].map((one) => [one.href, one.textContent])")
        check(f"'{text}' is found", any(target in address and heading in said.lower() for address, said in found[:5]), found[:5])
    # Of many sections with these words, the one with them in its heading.
    page.evaluate("(() => { const input = document.getElementById('search-text'); input.value = 'three wastes'; input.dispatchEvent(new Event('input')); })()")
    first = page.evaluate("document.querySelector('#search-results b').textContent")
    check("a heading comes first", "three wastes" in first, first)
    page.evaluate("(() => { const input = document.getElementById('search-text'); input.value = 'zzyzx'; input.dispatchEvent(new Event('input')); })()")
    check("what is nowhere is not", page.evaluate("document.getElementById('search-count').textContent") == "Nothing is found.")
    page.evaluate("(() => { const input = document.getElementById('search-text'); input.value = '<b>('; input.dispatchEvent(new Event('input')); })()")
    page.evaluate("(() => { const input = document.getElementById('search-text'); input.value = 'glossary memory'; input.dispatchEvent(new Event('input')); input.focus(); })()")
    address = page.evaluate("document.querySelector('#search-results a').href")
    page.key("Enter")
    page.wait_for(f"location.href === {address!r}")
    check("Enter goes there", True)


def check_switch(page, site):
    go(page, site, "index.html")
    page.dark(False)
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.evaluate("document.getElementById('theme').click(); document.getElementById('theme').click()")
    dark = page.evaluate(back)
    check("the switch makes it dark", dark != light and page.evaluate("document.getElementById('theme').getAttribute('aria-label')") == "Colours: dark")
    go(page, site, LESSON)
    check("and is kept", page.evaluate(back) == dark)
    check("pictures too", page.evaluate(PICTURES) == "on-dark", page.evaluate(PICTURES))
    page.evaluate("document.getElementById('theme').click()")
    go(page, site, LESSON)
    check("back to the system's", page.evaluate(back) == light)
    page.evaluate("document.getElementById('theme').click()")
    page.dark(True)
    check("light where the system is dark", page.evaluate(back) == light and page.evaluate(PICTURES) == "on-light")
    page.evaluate("document.getElementById('theme').click(); document.getElementById('theme').click()")
    page.dark(False)


def check_copy(page, site):
    go(page, site, LESSON)
    page.evaluate("navigator.clipboard.writeText = (text) => { globalThis.copied = text; return Promise.resolve(); }")
    page.evaluate("document.querySelector('.milestone .copy').click()")
    page.wait_for("document.querySelector('.milestone .copy').textContent === 'Copied'")
    check("a milestone's command is copied", page.evaluate("copied") == "python3 tests/exercise.py 5 --test 1", page.evaluate("copied"))


def check_print(page, site):
    go(page, site, LESSON)
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    check("on paper all is open, without the bar", page.evaluate(
        "document.querySelectorAll('details:not([open])').length === 0 && document.querySelector('.top').offsetHeight === 0 && "
        "[...document.querySelectorAll('.hunks')].every((one) => one.offsetHeight > 0)"))
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.call("Emulation.setEmulatedMedia", media="", features=[])


def check_plain(page, site):
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    go(page, site, LESSON)
    check("without scripts the hunks are there", page.evaluate("[...document.querySelectorAll('.hunks')].every((one) => one.offsetHeight > 0)"))
    page.call("Emulation.setScriptExecutionDisabled", value=False)


def take_pictures(browser, site, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, note in (("index.html", None), ("stage2_blocks/index.html", 2), (LESSON, 5), ("stage8_batching/index.html", 8)):
        for size in (WIDE, NARROW):
            for is_dark in (False, True):
                page = browser.open((site / name).as_uri(), *size, size == NARROW, is_dark)
                page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
                if note is not None:
                    page.evaluate(f"document.querySelectorAll('.note')[{note}].scrollIntoView({{block: 'center'}})")
                settle(page)
                stem = name.partition("/")[0].removesuffix(".html")
                page.picture(folder / f"{stem}-{size[0]}-{'dark' if is_dark else 'light'}.png")
                page.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=pathlib.Path, help="a site that has been made; else one is made for the test")
    parser.add_argument("--pictures", type=pathlib.Path)
    options = parser.parse_args()
    if devtools.missing():
        print(f"skipped: needs a browser (apt-get install {devtools.missing()})")
        sys.exit(77)
    if build_site.markup is None:
        print(f"skipped: the site {build_site.stage_diff.INSTALL}")
        sys.exit(77)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        site = options.site.resolve() if options.site else pathlib.Path(folder)
        if not options.site:
            with contextlib.redirect_stdout(io.StringIO()):
                check("the site can be made", build_site.main([str(site)]) == 0)
        made = time.monotonic()
        with devtools.Browser() as browser:
            page = browser.open((site / "index.html").as_uri(), *WIDE)
            for part in (check_walk, check_headings, check_lines, check_keyboard, check_touch, check_search, check_switch, check_copy, check_print, check_plain):
                part(page, site)
            num_pages = check_pages(page, site)
            if options.pictures:
                take_pictures(browser, site, options.pictures)
    print(f"{num_pages} pages, {num_checks} checks; made in {made - begin:.1f} s, looked at in {time.monotonic() - made:.1f} s")


if __name__ == "__main__":
    main()
