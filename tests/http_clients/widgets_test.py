#!/usr/bin/env python3
"""The widgets of the course's site in headless Chromium: widgets_test.py build/site/widgets stage2=build/stage2 … [--pictures FOLDER]

A page from file:// with every widget, each of which goes through its scene by clicks: what it shows is compared with what
`build/stage2 scene` prints at each step, and the ledger of the blocks is checked. (Stage 7's scenes come from kernel_count, and
are recorded in any case.) Once with the stages' code as WebAssembly,
where the site has it, and once with the recorded scenes alone. Needs a `chromium`; where there is none, it says so and
exits with 77, which ctest counts as skipped. --pictures keeps screenshots, wide, narrow and dark.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import devtools

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "stages"))
from test_scene import check_state, states_of  # pylint: disable=wrong-import-position

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root {{ color-scheme: light dark }} body {{ max-width: 46rem; margin: 0 auto; padding: 0 10px }}</style></head><body>
{widgets}<script src="widgets/widgets.js"></script></body></html>"""


def check(name, condition, seen=""):
    if not condition:
        sys.exit(f"{name}: no; {seen}")
    print(f"{name}: yes")


# What the page shows of a widget: its state, and the elements that a reader sees.
SHOWN = """((name) => { const root = document.querySelector(`[data-widget="${name}"]`), widget = root.widget;
    const {command, label, ...state} = widget.states[widget.at];
    return {state, command, step: root.querySelector('.widget-step').textContent, legend: root.querySelectorAll('.widget-legend > span').length,
            whole: root.querySelector('.widget-whole')?.textContent, said: root.querySelector('.widget-said').textContent,
            counters: Object.fromEntries([...root.querySelectorAll('dl div')].map((item) =>
                [item.children[0].textContent, Number(item.children[1].textContent.replaceAll(',', ''))])),
            free: [...root.querySelectorAll('.widget-list:first-child .widget-chip')].map((chip) => Number(chip.textContent)),
            next: root.querySelector('.widget-next').textContent, nextDisabled: root.querySelector('.widget-next').disabled}; })"""


def press(page, name, what):
    page.evaluate(f"document.querySelector('[data-widget=\"{name}\"] {what}').click()")


def compare(name, page, expected, is_pool):
    shown = page.evaluate(f"{SHOWN}('{name}')")
    where = f"{name}, after {expected.get('command', 'nothing')}"
    state = {key: value for key, value in expected.items() if key not in ("command", "label")}
    assert shown["state"] == state, f"{where}: {shown['state']} and not {state}"
    assert shown["said"] == expected["said"], f"{where}: {shown['said']}"
    label = expected.get("label", "before the first step")
    assert shown["step"] == label[0].upper() + label[1:], f"{where}: {shown['step']}"
    if "counters" in expected:
        assert shown["counters"] == expected["counters"], f"{where}: {shown['counters']}"
        assert shown["legend"] > 2, f"{where}: {shown['legend']}"
    if is_pool:
        if expected["sizes"]["block_size"] > 1:
            assert shown["free"] == expected["free"], f"{where}: {shown['free']}"
        check_state(shown["state"])
    return shown


def check_loads(page, name, program, states):
    """What a warp loads: the whole kernel's counts are those that the program prints, and each load is seen."""
    whole = states[0]["whole"]
    _, *arguments = whole["command"].split()
    printed = subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
    row = re.search(r"^\| global loads +\| +([\d,]+) \| +[\d,]+ \| +([\d,]+) \| +([\d.]+) \| +([\d,]+) \|$", printed, re.MULTILINE).groups()
    shown = page.evaluate(f"{SHOWN}('{name}')")["whole"]
    numbers = re.findall(r"[\d,.]*\d", shown)
    assert numbers[:4] == list(row), [numbers, row]
    # A load's sectors are the sectors that its lanes' bytes lie in.
    for before, state in zip(states, states[1:]):
        grown = {key: state["counters"][key] - before["counters"][key] for key in state["counters"]}
        sectors = {(token, sector) for _, token, first, size in state["parts"] for sector in range(first // 32, (first + size - 1) // 32 + 1)}
        if grown["loads so far"] == 1:
            assert grown["sectors"] == len(sectors) and grown["bytes asked for"] == sum(size for *_, size in state["parts"]), [grown, state]
        assert {token for token, _ in sectors} <= set(states[0]["memory"]["tokens"]), state
    pixels = []
    for step in range(len(states)):
        pixels.append(page.evaluate(f"""(() => {{ const {{widget}} = document.querySelector('[data-widget="{name}"]'); widget.goTo({step});
            const [red, green, blue] = getComputedStyle(widget.root.querySelector('.widget-asked')).backgroundColor.match(/\\d+/g).map(Number);
            const {{data}} = widget.picture.getContext('2d').getImageData(0, 0, widget.picture.width, widget.picture.height);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) if (data[i] === red && data[i + 1] === green && data[i + 2] === blue) count += 1;
            return count; }})()"""))
    assert pixels[0] == 0 and min(pixels[1:]) > 100, pixels
    page.evaluate(f"document.querySelector('[data-widget=\"{name}\"]').widget.goTo(0)")


# Of each step: how far down the button for the next one is, and whether something of the steps before is left in the drawing.
DRAWN = """((name) => { const {widget} = document.querySelector(`[data-widget="${name}"]`), canvases = [widget.pool, widget.tables];
    return Array.from({length: widget.last + 1}, (_, step) => {
        widget.goTo(step);
        widget.flashBegin = -Infinity;
        widget.draw();
        const shown = canvases.filter((canvas) => canvas && !canvas.hidden), pictures = shown.map((canvas) => canvas.toDataURL());
        for (const canvas of shown) canvas.width = 0;
        widget.draw();
        return {button: widget.next.getBoundingClientRect().top - widget.root.getBoundingClientRect().top,
                isClean: shown.every((canvas, index) => canvas.toDataURL() === pictures[index])};
    }); })"""


def play(page, name, program, is_live):
    states = states_of(program, name)
    is_pool = "sizes" in states[0]
    compare(name, page, states[0], is_pool)
    if "whole" in states[0]:
        check_loads(page, name, program, states)
        press(page, name, ".widget-again")
    for state in states[1:]:
        shown = page.evaluate(f"{SHOWN}('{name}')")
        assert shown["next"] == "▶ " + state["label"], shown["next"]
        press(page, name, ".widget-next")
        compare(name, page, state, is_pool)
    check(f"{name}: {len(states) - 1} steps as {pathlib.Path(program).name} prints them", page.evaluate(f"{SHOWN}('{name}')")["nextDisabled"])
    for state in reversed(states[:-1]):
        press(page, name, ".widget-back")
        compare(name, page, state, is_pool)
    drawn = page.evaluate(f"{DRAWN}('{name}')")
    check(f"{name}: each step is drawn as if there had been none before", all(step["isClean"] for step in drawn), drawn)
    check(f"{name}: the button for the next step stays where it is", len({step["button"] for step in drawn}) == 1, drawn)
    middle = len(states) // 2
    page.evaluate(f"(() => {{ const slider = document.querySelector('[data-widget=\"{name}\"] .widget-time input'); slider.value = {middle};"
                  "slider.dispatchEvent(new Event('input')); })()")
    compare(name, page, states[middle], is_pool)
    check(f"{name}: back, and by the slider to step {middle}", True)
    if is_live:
        play_own(page, name, program, states, middle)
    press(page, name, ".widget-again")
    compare(name, page, states[0], is_pool)


def play_own(page, name, program, states, at):
    """Leaves the lesson in the middle: each button once, and wrong commands."""
    commands = [state["command"] for state in states[1:at + 1]]
    for number in range(12):
        actions = page.evaluate(f"[...document.querySelectorAll('[data-widget=\"{name}\"] [data-command]')].map((button) => button.dataset.command)")
        command = actions[(number * 5) % len(actions)]
        press(page, name, f"[data-command=\"{command}\"]")
        commands.append(command)
        compare(name, page, states_of(program, name, commands)[-1], "sizes" in states[0])
    for wrong in ("nonsense", "append", "append Ä 1", "free ZZ"):
        page.evaluate(f"(() => {{ const widget = document.querySelector('[data-widget=\"{name}\"]'); widget.querySelector('.widget-type input').value = "
                      f"{json.dumps(wrong)}; widget.querySelector('.widget-type').requestSubmit(); }})()")
        shown = page.evaluate(f"{SHOWN}('{name}')")
        expected = states_of(program, name, [*commands, wrong])[-1]
        assert shown["said"] == expected["error"], [shown["said"], expected]
        assert shown["step"] == wrong, [shown["step"], wrong]
    check(f"{name}: {len(commands)} commands, {len(commands) - at} of them the reader's, and wrong ones", True)


def run(folder, programs, stages, is_live, browser):
    scenes = {stage: stages[stage]["scenes"] for stage in stages}
    names = [name for stage in scenes for name in scenes[stage]]
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        shutil.copytree(folder, root / "widgets")
        if not is_live:
            for path in (root / "widgets").glob("*_wasm*"):
                path.unlink()
            bundle = root / "widgets/widgets.js"
            bundle.write_text(bundle.read_text().replace('"isCompiled": true', '"isCompiled": false'))
        widgets = "".join(f'<h2>{name}</h2><div class="widget" data-widget="{name}"></div>' for name in names)
        (root / "index.html").write_text(PAGE.format(widgets=widgets))
        page = browser.open(f"file://{root}/index.html")
        for stage, of_stage in scenes.items():
            for name in of_stage:
                page.evaluate(f"document.querySelector('[data-widget=\"{name}\"]').scrollIntoView()")
                page.wait_for(f"Boolean(document.querySelector('[data-widget=\"{name}\"]').widget)", 20)
                mode = page.evaluate(f"document.querySelector('[data-widget=\"{name}\"] .widget-mode').textContent")
                is_own = is_live and stages[stage]["canCompile"]
                check(f"{name} says where its states come from", ("compiled to WebAssembly" in mode) == is_own and
                      (f"Recorded by build/{pathlib.Path(programs[stage]).name} scene {name}" in mode) == (not is_own), mode)
                play(page, name, programs[stage], is_own)
                check(f"{name} is as wide as the page", page.evaluate("document.documentElement.scrollWidth <= innerWidth"))
        card = f"getComputedStyle(document.querySelector('[data-widget=\"{names[0]}\"]')).backgroundColor"
        colours = [page.evaluate(f"(() => {{ document.documentElement.dataset.theme = '{theme}'; return {card}; }})()")
                   for theme in ("light", "dark")]
        check("widgets follow the page's switch of colours", colours[0] != colours[1], colours)
        check("no error on the console", not page.problems, page.problems)
        check("nothing is loaded from elsewhere", all(address.startswith(("file:", "data:")) for address in page.addresses), page.addresses)


def take_pictures(folder, scenes, pictures):
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        shutil.copytree(folder, root / "widgets")
        for name in (name for stage in scenes for name in scenes[stage]):
            (root / "index.html").write_text(PAGE.format(widgets=f'<div class="widget" data-widget="{name}"></div>'))
            for size, width, is_dark in (("wide", 820, False), ("dark", 820, True), ("narrow", 360, False)):
                with devtools.Browser() as browser:
                    page = browser.open(f"file://{root}/index.html", width, 980, width < 400, is_dark)
                    page.wait_for("Boolean(document.querySelector('.widget').widget)", 20)
                    page.evaluate("(() => { const {widget} = document.querySelector('.widget'); widget.goTo(Math.ceil(widget.last * 0.6)); "
                                  "if (document.querySelector('details')) document.querySelector('details').open = true; })()")
                    time.sleep(1.3)
                    page.picture(pictures / f"{name}-{size}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("programs", nargs="+", metavar="stage2=build/stage2")
    parser.add_argument("--pictures", type=pathlib.Path)
    arguments = parser.parse_args()
    if devtools.missing():
        print(f"skipped: needs a browser (apt-get install {devtools.missing()})")
        sys.exit(77)
    if not (arguments.folder / "widgets.js").exists():
        print("skipped: there are no widgets yet (cmake --build build --target site)")
        sys.exit(77)
    programs = dict(entry.split("=", 1) for entry in arguments.programs)
    bundle = (arguments.folder / "widgets.js").read_text()
    stages = json.loads(re.search(r"^const kStages = (.*);$", bundle, re.MULTILINE)[1])
    scenes = {stage: stages[stage]["scenes"] for stage in stages}
    root = pathlib.Path(__file__).resolve().parents[2]
    lessons = "".join(path.read_text(encoding="utf-8") for path in root.glob("stage*/*.md"))
    missing = [name for stage in scenes for name in scenes[stage] if f"<!-- widget: {name} -->" not in lessons]
    check("every scene has its place in a lesson", not missing, missing)
    check("every stage has its program here", set(stages) == set(programs), [stages, programs])
    if arguments.pictures:
        take_pictures(arguments.folder, scenes, arguments.pictures)
        return
    with devtools.Browser() as browser:
        for is_live in ([True] if any(entry["isCompiled"] for entry in stages.values()) else []) + [False]:
            run(arguments.folder, programs, stages, is_live, browser)


if __name__ == "__main__":
    main()
