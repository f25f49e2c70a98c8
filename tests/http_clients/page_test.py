#!/usr/bin/env python3
"""The page of `serve --http` in headless Chromium: python3 tests/http_clients/page_test.py build/stage8 [--pictures FOLDER] [--measure]

Needs a `chromium` and nothing else; where there is none, it says so and exits with 77, which ctest counts as skipped.
--pictures keeps screenshots in three sizes, light and dark.
"""

import argparse
import http.client
import http.server
import json
import pathlib
import re
import signal
import struct
import sys
import tempfile
import threading
import time
import urllib.parse

import devtools
import http_program
import windowed_model

SMALL = ["--device", "cpu", "--pool-controls", "--slots", "256", "--block-size", "4", "--budget", "64", "--paused"]
SIZES = ((1400, 900), (1920, 1080))


def check(name, condition, seen=""):
    if not condition:
        sys.exit(f"{name}: no; {seen}")
    print(f"{name}: yes")


def text(page, name):
    return page.evaluate(f"document.getElementById('{name}').textContent")


def click(page, name):
    page.evaluate(f"document.getElementById('{name}').click()")


def ask(page, prompts, max_tokens=16, samples=1, beams=False):
    page.evaluate(f"""(() => {{
        const set = (name, value) => document.getElementById(name).value = value;
        set('prompts', {json.dumps(chr(10).join(prompts))}); set('max-tokens', {max_tokens}); set('samples', {samples});
        document.getElementById('beams').checked = {json.dumps(beams)}; set('seed', 3);
        document.getElementById('send').requestSubmit(); }})()""")


def end_all(page):
    """Lets the server finish everything."""
    click(page, "run")
    page.wait_for("timeline.latest.step >= 0 && timeline.latest.requests.size === 0 && !document.querySelector('#replies button')")


def point_of(page, view, rect):
    """Where the first slot of a block or a cell is on the screen."""
    return page.evaluate(f"""(() => {{ const box = views.{view}.getBoundingClientRect(), rect = {rect};
        return [box.left + rect.x + 12, box.top + rect.y + 20]; }})()""")


# The share of a rectangle's left edge, of a block in the pool or of a cell in the tables, that has the frame's colour.
FRAME = """((view, rect) => {
    const canvas = views[view], size = rect.height ?? rect.size, context = canvas.getContext('2d');
    const pixels = context.getImageData(rect.x - 1, rect.y + 2, 1, size - 4).data;
    const hex = views.theme.lit.replace('#', ''), level = parseInt(hex[0] + hex[0], 16);
    let lit = 0;
    for (let at = 0; at < pixels.length; at += 4) lit += Math.abs(pixels[at] - level) < 40 && pixels[at + 3] > 200;
    return lit / (pixels.length / 4); })"""


def framed(page, view, rect):
    page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")
    return page.evaluate(f"{FRAME}('{view}', {rect})") > 0.8


def pool_rect(block):
    return f"blockRect(views.poolLayout, {block})"


def table_rect(row, index):
    return f"cellRect(views.tablesLayout, views.tablesLayout.rows[{row}], {index})"


def check_joined(page):
    ask(page, ["The king had a garden"], samples=2)
    page.wait_for("timeline.latest.numWaiting === 1")
    click(page, "step")
    page.wait_for("timeline.latest.step === 0")
    page.move(*point_of(page, "pool", pool_rect(1)))
    page.wait_for("views.target?.block === 1")
    check("a sentence says what a block is", text(page, "sentence") ==
          "block 1: logical block 1 of sequence 1 of request 0, 2 of 4 slots, shared with sequence 2 of request 0", text(page, "sentence"))
    check("the block is lit in the pool", framed(page, "pool", pool_rect(1)))
    check("and in both block tables", framed(page, "tables", table_rect(0, 1)) and framed(page, "tables", table_rect(1, 1)))
    check("no other cell is", not framed(page, "pool", pool_rect(5)) and not framed(page, "tables", table_rect(0, 0)))
    click(page, "step")
    page.wait_for("timeline.latest.step === 1")
    check("a write to a shared block is a copy from block to block",
          page.evaluate("JSON.stringify(timeline.latest.happened.copyOnWrites)") == "[[1,2]]",
          page.evaluate("JSON.stringify(timeline.latest.happened)"))
    check("and the step says so", text(page, "story") == "Step 1: copied on write: block 1 to 2", text(page, "story"))
    page.move(*point_of(page, "tables", table_rect(0, 1)))
    page.wait_for("views.target?.index === 1")
    block = page.evaluate("views.target.block")
    check("pointing at a table lights the pool", framed(page, "pool", pool_rect(block)))
    check("the sentence has the token's text", "is “·" in text(page, "sentence"), text(page, "sentence"))
    page.move(5, 5)
    page.wait_for("views.target === null")
    end_all(page)


def check_time(page):
    # By hand: on a busy machine a record may have several steps.
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    ask(page, ["Once upon a time"], max_tokens=40)
    page.wait_for("timeline.latest.numWaiting === 1")
    page.evaluate("""(async () => { while (timeline.latest.requests.size) {
        const {number} = timeline.latest;
        await stepOnce();
        await until(() => timeline.latest.number > number); } })()""")
    end_all(page)
    page.wait_for("timeline.latest.step >= 40")
    numbers = page.evaluate("timeline.snapshots.filter((shown) => shown.steps.length).map((shown) => shown.step)")
    check("every step is there", numbers == list(range(len(numbers))), numbers)
    click(page, "back")
    page.evaluate("timeline.hold(timeline.snapshots.length - 20)")
    step, length = page.evaluate("[timeline.shown.step, [...timeline.shown.requests.values()][0].sequences.values().next().value.length]")
    click(page, "forward")
    check("a step forward is one token more", page.evaluate(
        "[timeline.shown.step, [...timeline.shown.requests.values()][0].sequences.values().next().value.length]") == [step + 1, length + 1])
    check("the views show it", page.evaluate("views.snapshot === timeline.shown") and f"held: step {step + 1}" in text(page, "moment"),
          text(page, "moment"))
    page.evaluate("document.getElementById('strip').focus()")
    page.key("ArrowLeft")
    page.key("ArrowLeft")
    check("arrow keys step back", page.evaluate("timeline.shown.step") == step - 1)
    check("and the slider says where", page.evaluate("document.getElementById('strip').getAttribute('aria-valuenow')") is not None)
    left, top = page.evaluate("(() => { const box = document.getElementById('strip').getBoundingClientRect(); return [box.left, box.top]; })()")
    page.click(left + 74 + 5 * 4 + 2, top + 40)
    check("a click on a bar shows its step", page.evaluate("timeline.shown.step") == 4, page.evaluate("timeline.shown.step"))
    ends = []
    page.call("Input.dispatchMouseEvent", type="mousePressed", x=left + 90, y=top + 40, button="left", buttons=1, clickCount=1)
    for x in range(90, 230, 20):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + x, y=top + 40, button="left", buttons=1)
        ends.append(page.evaluate("[timeline.end, timeline.shown.step]"))
    page.call("Input.dispatchMouseEvent", type="mouseReleased", x=left + 230, y=top + 40, button="left")
    check("the strip does not scroll while it is dragged in", len({end for end, _ in ends}) == 1 and [step for _, step in ends] ==
          list(range(ends[0][1], ends[0][1] + 4 * len(ends), 4)), ends)
    page.evaluate("timeline.hold(2)")
    number, latest = page.evaluate("[timeline.shown.number, timeline.latest.number]")
    page.evaluate("document.getElementById('strip').focus()")
    page.evaluate("ask('/v1/completions', {prompt: 'A', max_tokens: 4}).then((reply) => reply.json()).then(() => 1)")
    page.wait_for(f"timeline.latest.number > {latest}")
    check("new steps don't move what is held", page.evaluate("timeline.shown.number") == number)
    page.key("End")
    check("End is live again", page.evaluate("timeline.isLive"))


def check_edges(page):
    """More steps than the strip has room for: dragging beyond an edge of it scrolls."""
    click(page, "run")
    while page.evaluate("timeline.numBars") < page.evaluate("timeline.barCount(timeline.canvas.clientWidth)") + 40:
        page.evaluate("ask('/v1/completions', {prompt: 'A wolf', max_tokens: 120, ignore_eos: true}).then((reply) => reply.json()).then(() => 1)")
        page.wait_for("timeline.latest.numRunning + timeline.latest.numWaiting === 0")
    page.evaluate("timeline.live()")
    left, top, width = page.evaluate("(() => { const box = timeline.canvas.getBoundingClientRect(); return [box.left, box.top, box.width]; })()")

    def mouse(kind, x, buttons):
        page.call("Input.dispatchMouseEvent", type=kind, x=left + x, y=top + 40, button="left" if buttons or kind == "mouseReleased" else "none",
                  buttons=buttons, clickCount=1)

    def frame():
        page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")

    frame()
    end, count = page.evaluate("[timeline.end, timeline.barCount(timeline.canvas.clientWidth)]")
    mouse("mousePressed", 30, 1)
    time.sleep(0.3)
    check("a press beside the bars does not scroll", page.evaluate("timeline.end") == end, page.evaluate("[timeline.end, timeline.at]"))
    mouse("mouseReleased", 30, 0)
    mouse("mousePressed", 200, 1)
    mouse("mouseMoved", 40, 1)
    page.wait_for(f"timeline.end === {count}")
    number = page.evaluate("timeline.shown.number")
    check("dragging beyond the left edge scrolls to the first step that is kept", page.evaluate(
        "timeline.shown.number === timeline.snapshots.find((snapshot) => snapshot.steps.length).number"), number)
    mouse("mouseReleased", 40, 0)
    frame()
    check("and the strip stays where it was left", page.evaluate("[timeline.end, timeline.shown.number]") == [count, number],
          page.evaluate("[timeline.end, timeline.shown.number]"))
    mouse("mousePressed", 200, 1)
    mouse("mouseMoved", width - 3, 1)
    page.wait_for("timeline.end === timeline.numBars && timeline.shown.number === timeline.latest.number")
    check("the right edge leads to the last step", True)
    mouse("mouseMoved", 40, 1)
    page.wait_for("timeline.end < timeline.numBars")
    mouse("mouseMoved", 60, 0)  # let go where the page did not hear of it
    frame()
    end = page.evaluate("timeline.end")
    time.sleep(0.3)
    check("a button that was let go elsewhere does not go on scrolling", page.evaluate("timeline.end") == end)
    mouse("mouseReleased", 60, 0)
    page.evaluate("timeline.hold(timeline.snapshots.length - 100)")
    frame()
    number, end = page.evaluate("[timeline.shown.number, timeline.end]")
    bars = page.evaluate("timeline.bars(timeline.canvas.clientWidth).bars.map((step) => step.number)")
    while page.evaluate("timeline.snapshots.length") < 600 or page.evaluate("timeline.snapshots[0].number") < 5:
        page.evaluate("ask('/v1/completions', {prompt: 'A wolf', max_tokens: 120, ignore_eos: true}).then((reply) => reply.json()).then(() => 1)")
        page.wait_for("timeline.latest.numRunning + timeline.latest.numWaiting === 0")
        if page.evaluate("timeline.shown.number") != number:
            break
    frame()
    seen = page.evaluate("timeline.bars(timeline.canvas.clientWidth).bars.map((step) => step.number)")
    check("steps that are forgotten at the beginning do not move what is looked at", page.evaluate("timeline.shown.number") == number and seen == bars,
          [seen[:1], bars[:1], page.evaluate("[timeline.shown.number, timeline.end]"), number, end])
    page.evaluate("timeline.live()")


def check_replies(page):
    """Replies are shown as far as they were written at the step that is shown."""
    click(page, "run")
    end_all(page)
    page.evaluate("document.getElementById('replies').replaceChildren()")
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    before = page.evaluate("timeline.latest.number")
    ask(page, ["The king had a garden", "A wolf"], max_tokens=9, samples=2)
    page.wait_for("timeline.latest.numWaiting === 2")
    end_all(page)

    def texts():
        return page.evaluate("[...document.querySelectorAll('#replies li')].map((item) => item.hidden ? null : "
                             "[...item.querySelectorAll('.text')].map((text) => text.textContent))")

    whole = texts()
    check("both replies have two texts", len(whole) == 2 and all(text for item in whole for text in item), whole)
    steps = page.evaluate(f"timeline.snapshots.filter((shown) => shown.number > {before} && shown.steps.length).map((shown) => shown.number)")

    def at(number):
        page.evaluate(f"timeline.hold(timeline.snapshots.findIndex((shown) => shown.number === {number}))")
        return texts()

    check("after the prompts' step nothing of them is in the pool", at(steps[0]) == [["", ""], ["", ""]], at(steps[0]))
    lengths = []
    for number in steps[:-1]:
        shown = at(number)
        check("each text is shown to where its table is", all(full.startswith(part) for one, other in zip(whole, shown)
              for full, part in zip(one, other)), shown)
        lengths.append(sum(len(part) for item in shown for part in item))
    check("and grows from step to step", lengths == sorted(lengths) and lengths[1] > 0 and len(set(lengths)) > 5, lengths)
    known = page.evaluate(f"""(() => {{ const shown = timeline.snapshots.find((snapshot) => snapshot.number === {steps[4]}), [request] = shown.requests.values();
        return [...request.sequences.values()].map((sequence) => sequence.texts.slice(request.prompt).join('')); }})()""")
    check("it is the text that the tables have", sorted(known) == sorted(at(steps[4])[0]), [known, at(steps[4])])
    check("at the last step they are whole", at(steps[-1]) == whole, at(steps[-1]))
    check("before they were sent they are not there", at(before - 1) == [None, None] if before else True, texts())
    page.evaluate("timeline.live()")
    check("live, all of it is there", texts() == whole and text(page, "replies-title") == "Replies of “What you sent”.", text(page, "replies-title"))
    tags = "[...document.querySelectorAll('#replies li')].filter((item) => !item.hidden).map((item) => item.querySelector('.tag').textContent)"
    before, ids = page.evaluate("timeline.latest.number"), page.evaluate(tags)
    page.evaluate("ask('/pool/restart', {slots: 256, block_size: 4, budget: 64, swap: false}).then(() => 1)")
    page.wait_for("timeline.latest.isNewPool")
    check("in a new pool there is none of them", page.evaluate(tags) == [], page.evaluate(tags))
    page.evaluate("attempt(() => post(['A fox'], {max_tokens: 3, seed: 1})).then(() => 1)")
    page.wait_for("timeline.latest.step >= 0 && !document.querySelector('#replies button')")
    check("but the reply of its own request", page.evaluate(tags) == ["0"], page.evaluate(tags))
    check("and it says where the others are", text(page, "replies-title") == "Replies of “New pool”. Those of earlier pools are shown with their steps.",
          text(page, "replies-title"))
    page.evaluate(f"timeline.hold(timeline.snapshots.findIndex((shown) => shown.number === {before}))")
    check("which is there", page.evaluate(tags) == ids, [page.evaluate(tags), ids])
    page.evaluate("timeline.live()")


def check_more(page):
    """The folded fields, Stop, and how fast a reply was."""
    page.evaluate("document.getElementById('more-ask').open = true")
    server = page.evaluate("Object.fromEntries(kMore.map(([name]) => [name, document.getElementById(`ask-${name}`).placeholder]))")
    check("the folded fields show the server's defaults", server == {"top_k": "40", "top_p": "0.95", "min_p": "0", "repetition_penalty": "1",
                                                                     "presence_penalty": "0", "frequency_penalty": "0"}, server)
    page.evaluate("window.asked = []; window.plainFetch = fetch; window.fetch = (path, options) => { asked.push(options.body); return plainFetch(path, options); }")
    click(page, "run")
    page.wait_for("!timeline.latest.paused")

    def sent(fields):
        page.evaluate(f"for (const [id, value] of Object.entries({json.dumps(fields)})) document.getElementById(id).value = value")
        ask(page, ["A wolf"], max_tokens=40)
        page.wait_for("timeline.latest.counters.generated > 0 && !document.querySelector('#replies button')")
        body = json.loads(page.evaluate("asked.filter((body) => body?.includes('prompt')).at(-1)"))
        return {name: body.get(name) for name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop")}

    nothing = dict.fromkeys(("ask-top_k", "ask-top_p", "ask-min_p", "ask-repetition_penalty", "ask-presence_penalty", "ask-frequency_penalty", "ask-stop"), "")
    check("what is empty is not sent", set(sent(nothing).values()) == {None}, page.evaluate("asked.at(-1)"))
    pace = page.evaluate("document.querySelector('#replies li .pace').textContent")
    usage = page.evaluate("plainFetch('/v1/completions', {method: 'POST', headers: headers(), body: JSON.stringify({...JSON.parse(asked.findLast("
                          "(body) => body?.includes('prompt'))), stream: false, stream_options: null})}).then((reply) => reply.json())")["usage"]
    check("a reply says how long it is, and how fast it was", re.fullmatch(rf"{usage['completion_tokens']} tokens, [\d.]+ tokens/s", pace), [usage, pace])
    found = sent({"ask-top_k": 5, "ask-top_p": 0.5, "ask-min_p": 0.1, "ask-repetition_penalty": 1.2, "ask-presence_penalty": 0.3, "ask-frequency_penalty": -0.2,
                  "ask-stop": " the\n."})
    check("what is given is sent", found == {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2,
                                             "stop": [" the", "."]}, found)
    check("and the server takes it", text(page, "problem") == "" and page.evaluate("!document.querySelector('#replies li').textContent.includes(' the')"), text(page, "problem"))
    sent(nothing)
    page.evaluate("window.fetch = plainFetch; document.getElementById('more-ask').open = false")
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    for how in ("the button", "Escape"):
        check("nothing runs, nothing to stop", page.evaluate("document.getElementById('stop').disabled"))
        ask(page, ["A wolf", "A fox"], max_tokens=50)
        page.wait_for("timeline.latest.numWaiting === 2")
        click(page, "step")
        page.wait_for("timeline.latest.numRunning === 2")
        if how == "Escape":
            page.evaluate("document.getElementById('prompts').focus()")
            page.key("Escape")
        else:
            click(page, "stop")
        page.wait_for("timeline.latest.numRunning === 0 && !document.querySelector('#replies button')")
        ends = page.evaluate("[...document.querySelectorAll('#replies li')].slice(0, 2).map((item) => item.lastChild.textContent)")
        check(f"{how} stops a reply", ends == ["stopped", "stopped"], ends)
    page.evaluate("document.activeElement.blur()")
    check("chat is off without a template, and says why", page.evaluate("document.getElementById('tab-chat').getAttribute('aria-disabled')") == "true")
    click(page, "tab-chat")
    check("where it would be", page.evaluate("document.getElementById('no-chat').offsetParent !== null && document.getElementById('say').offsetParent === null") and
          "no chat template" in text(page, "no-chat"), text(page, "no-chat"))
    click(page, "tab-ask")


def check_form(page):
    """What is refused, and what is left empty."""
    page.wait_for("document.getElementById('max-tokens').max === '256'")
    check("no more tokens than there may be", True)
    count = "document.querySelectorAll('#replies li').length"
    before = page.evaluate(count)
    ask(page, [""])
    check("no prompt: a word", text(page, "problem").startswith("There is no prompt") and page.evaluate("document.activeElement.id") == "prompts", text(page, "problem"))
    page.evaluate("document.getElementById('ask-top_k').value = -5")
    ask(page, ["A wolf"])
    page.wait_for("document.getElementById('problem').textContent.includes('top_k')")
    check("a refusal has the field's label", "'top_k' (Top-k)" in text(page, "problem"), text(page, "problem"))
    check("marks the field", page.evaluate("[...document.querySelectorAll('[aria-invalid]')].map((field) => field.id)") == ["ask-top_k"])
    check("and leaves no reply", page.evaluate(count) == before, page.evaluate(count))
    page.evaluate("document.getElementById('ask-top_k').value = ''")
    ask(page, ["A wolf"], max_tokens=99999)
    check("it goes away with the next try, which the browser refuses", text(page, "problem") == "" and page.evaluate(count) == before, text(page, "problem"))
    page.evaluate("document.activeElement.blur()")
    click(page, "run")
    ask(page, ["A wolf"], max_tokens="''")
    page.wait_for(f"{count} === {before + 1} && timeline.latest.requests.size === 0 && !document.querySelector('#replies button') && timeline.isLive")
    check("an empty field is the server's default", text(page, "problem") == "" and 0 < page.evaluate("document.querySelector('#replies li').counts[0]") <= 16, text(page, "problem"))
    page.wait_for("/^Done: /.test(views.ended)")  # said when the picture has been drawn
    check("what is over says where it can be seen", re.match(r"Done: \d+ steps\. Drag in the strip below", page.evaluate("views.ended")), page.evaluate("views.ended"))
    page.problems[:] = [problem for problem in page.problems if "400" not in problem]


def check_hand(page):
    click(page, "tab-hand")
    for command in ("empty the pool", "new A 6, append A 6", "fork A B"):
        page.evaluate(f"[...document.querySelectorAll('#chips button')].find((chip) => chip.textContent === '{command}').click()")
        page.wait_for({"e": "document.querySelectorAll('#demo-tables tr').length === 0", "n": "document.getElementById('demo-tables').textContent.includes('6 tokens')",
                       "f": "document.querySelectorAll('#demo-tables tr').length === 2"}[command[0]])
    check("by hand, a fork shares", ", 2 of them shared" in page.evaluate("document.getElementById('demo-pool').getAttribute('aria-label')"), text(page, "demo-tables"))
    page.evaluate("document.getElementById('line').value = 'quit'; document.getElementById('demo').requestSubmit()")
    check("quit gets a word", "nothing to leave" in text(page, "output"), text(page, "output"))
    click(page, "tab-ask")


def check_moments(page):
    """What two scenes say is so."""
    page.evaluate("timeline.pace = 0.002")
    for name in ("Blocks, not regions", "A full queue"):
        page.evaluate(f"[...document.querySelectorAll('#scenes button')].find((button) => button.textContent === '{name}').click()")
        page.wait_for(f"shownChapter.scene?.name === '{name}' && timeline.latest.step > 3 && timeline.latest.requests.size === 0 && !timeline.isPlaying && "
                      "timeline.at !== null && !document.querySelector('#replies button')")
        run, fit = page.evaluate("[timeline.shown.numRunning, regionsOf(timeline.shown).regions.length]")
        check(f"{name}: more run than regions would fit", run > fit, [run, fit])
        if name == "Blocks, not regions":
            lengths = page.evaluate("[...document.querySelectorAll('#replies li')].slice(0, 8).map((item) => item.counts[0])")
            check("all 8 run; none writes 90 tokens, most not half of that", run == 8 and max(lengths) < 90 and sum(length < 45 for length in lengths) > 4, [run, lengths])
    page.evaluate("views.point({block: 1}, 'pool', true)")
    click(page, "restore")
    page.wait_for("timeline.latest.sizes.slots === 256")
    page.evaluate("timeline.live()")
    check("a new pool lets go of a block", page.evaluate("views.target === null"))
    page.wait_for("timeline.canvas.getAttribute('aria-valuetext').includes('no step yet')")
    check("and has no step -1", True)


def check_regions(page):
    """The bar of regions says what it shows, as the blocks do."""
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    ask(page, ["The king had a garden", "A wolf", "Once upon a time"], max_tokens=100)
    page.wait_for("timeline.latest.numWaiting === 3")
    click(page, "step")
    page.wait_for("timeline.latest.numRunning === 3")
    first, last = page.evaluate("[timeline.latest.running[0], timeline.latest.running[2]]")
    box = page.evaluate("(() => { const box = views.regions.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()")
    check("it is high enough to be touched", box[3] >= 24, box)
    page.move(box[0] + 4, box[1] + 8)
    page.wait_for("views.target?.region !== undefined")
    check("pointing at a region says whose it is", re.fullmatch(rf"request {first}, if it had one contiguous region: slots 0 to 104, as many as its text may become\. "
                                                              r"6 would hold a token, 99 would be reserved and empty \(hatched\)", text(page, "sentence")), text(page, "sentence"))
    page.move(box[0] + box[2] - 4, box[1] + 8)
    page.wait_for("views.target?.region === -1")
    check("and behind them all, what does not fit", "are left, and request" in text(page, "sentence") and "it would wait" in text(page, "sentence"), text(page, "sentence"))
    page.move(5, 5)
    page.wait_for("views.target === null")
    page.evaluate("views.regions.focus()")
    page.key("Home")
    check("by key", text(page, "sentence").startswith(f"request {first}, "), text(page, "sentence"))
    page.key("ArrowRight")
    second = text(page, "sentence")
    page.key("End")
    check("from region to region", second.startswith("request ") and text(page, "sentence").startswith("slots "), [second, text(page, "sentence")])
    check("request by request", last in page.evaluate("regionsOf(timeline.latest).refused"))
    page.key("Escape")
    page.evaluate("document.activeElement.blur()")
    end_all(page)


def check_words(page):
    """What a newcomer has to know stands where the word does."""
    words = page.evaluate("[...document.querySelectorAll('.word')].map((word) => [word.textContent, word.getAttribute('aria-description')])")
    check("each word has a meaning", all(meaning and meaning != "undefined" for _, meaning in words), words)
    names = {name.lower() for name, _ in words}
    for name in ("blocks", "slots", "block tables", "shared", "cached", "swapped out", "preemptions", "blocks copied", "prompt tokens found cached"):
        check(f"{name} is explained where it stands", name in names, names)
    page.evaluate("document.getElementById('pool-count').querySelector('.word').focus()")
    check("by key", page.evaluate("!document.getElementById('meaning').hidden") and text(page, "meaning") == "a few slots, side by side; blocks are given out whole",
          text(page, "meaning"))
    page.key("ArrowRight")
    check("the next one too", text(page, "meaning") == "room for one token's notes", text(page, "meaning"))
    page.key("Escape")
    check("Escape closes it", page.evaluate("document.getElementById('meaning').hidden"))
    page.move(*page.evaluate("(() => { const box = document.querySelector('#tables-words .word').getBoundingClientRect(); return [box.left + 5, box.top + 5]; })()"))
    check("and by pointing at it", text(page, "meaning").startswith("which blocks a sequence has"), text(page, "meaning"))
    box = page.evaluate("(() => { const box = document.getElementById('meaning').getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; })()")
    check("inside the window", box[0] >= 0 and box[1] >= 0 and box[2] <= 1400 and box[3] <= 900, box)
    page.move(5, 5)
    page.evaluate("document.activeElement.blur()")
    check("what +4 means is on the page", "+4: tokens computed in this step" in page.evaluate("document.querySelector('.options').textContent"))
    check("and when lines are drawn", "pointed at" in page.evaluate("document.getElementById('lines').parentElement.textContent"))
    labels = page.evaluate("['server-label', 'picture-label'].map((id) => { const label = document.getElementById(id), box = label.getBoundingClientRect(); "
                           "return label.offsetParent !== null && box.right <= innerWidth && box.bottom <= innerHeight && label.textContent; })")
    check("each set of buttons says what it steers", all(labels) and "server" in labels[0] and "recording" in labels[1], labels)
    check("forward is of the picture alone", page.evaluate("timeline.isLive && document.getElementById('forward').disabled"))
    click(page, "help")
    check("the glossary opens at its top", page.evaluate("[document.getElementById('glossary').scrollTop, document.activeElement.id]") == [0, "glossary-title"],
          page.evaluate("[document.getElementById('glossary').scrollTop, document.activeElement.id]"))
    page.evaluate("document.getElementById('glossary').close(); document.activeElement.blur()")
    missing = page.evaluate("kWords.filter(([, name]) => !meanings.has(name)).map(([, name]) => name)")
    check("the glossary has them all", missing == [], missing)


def check_keyboard(page):
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    ask(page, ["The king had a garden", "A wolf"])
    page.wait_for("timeline.latest.numWaiting === 2")
    click(page, "step")
    page.wait_for("timeline.latest.numRunning === 2")
    page.evaluate("document.getElementById('help').focus()")  # from the top
    seen = []
    for _ in range(85):
        page.key("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    for name in ("step", "Beams", "pool", "regions", "tables", "tab-ask", "prompts", "submit", "strip", "back", "live"):
        check(f"Tab reaches {name}", name in seen, seen)
    order = [seen.index(name) for name in ("Beams", "pool", "regions", "tables", "prompts", "strip", "step", "back")]
    check("in the order of the screen", order == sorted(order), seen)
    page.evaluate("views.point(null, 'pool', false); views.pool.focus()")
    page.key("Home")
    page.key("ArrowRight")
    check("arrow keys reach a block", text(page, "sentence").startswith("block 1: "), text(page, "sentence"))
    check("the ring is inside, where it is seen", page.evaluate("getComputedStyle(views.pool).outlineOffset") == "-2px")
    page.evaluate("document.getElementById('prompts').focus()")
    check("a block is let go with the focus", page.evaluate("views.target === null"))
    page.evaluate("views.tables.focus()")
    page.key("Escape")
    page.key("ArrowDown")
    page.key("ArrowDown")
    check("and a place in a table", "logical block 0 of request" in text(page, "sentence"), text(page, "sentence"))
    check("of the second request", page.evaluate("views.target.request") == page.evaluate("timeline.latest.running[1]"))
    page.key("Escape")
    page.evaluate("document.activeElement.blur()")
    page.key("r")
    page.wait_for("!timeline.latest.paused")
    end_all(page)


def check_heights(page):
    places = {}
    for count in (0, 1, 8, 64):
        if count:
            click(page, "pause")
            page.wait_for("timeline.latest.paused")
            ask(page, [f"A wolf {i}" for i in range(count)], max_tokens=12)
            page.wait_for(f"timeline.latest.numWaiting === {count}")
            click(page, "step")
            page.wait_for("timeline.latest.numRunning > 0")
        for width, height in SIZES:
            page.size(width, height)
            page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")
            found = page.evaluate("""[document.documentElement.scrollHeight, ...['pool', 'tables', 'sentence', 'strip', 'side'].flatMap((name) => {
                const box = document.getElementById(name).getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })]""")
            check(f"{count} requests: {width}x{height} holds all", found[0] == height, found)
            bottom = page.evaluate("document.getElementById('time').getBoundingClientRect().bottom")
            check("and is as high as the screen", height - 20 < bottom <= height, bottom)
            check("and all is where it was", places.setdefault((width, height), found) == found, (places[width, height], found))
        if count:
            end_all(page)
    page.size(*SIZES[0])


def check_idle(page):
    end_all(page)
    page.wait_for("document.getElementById('number-tokens-a-second').textContent === 'idle'")
    check("nothing runs: no tokens a second", text(page, "state").startswith("idle"), text(page, "state"))


def check_scenes(page, browser):
    for name, counter, kind in (("Preempted: computed again", "recomputed", "preempted"), ("Preempted: swapped out", "swapped_out", "swapped out")):
        number = page.evaluate("timeline.latest.number")
        for begin in (number, None):  # the second time it is open already
            begin = page.evaluate("timeline.latest.number") if begin is None else begin
            page.evaluate(f"timeline.pace = 1; [...document.querySelectorAll('#scenes button')].find((button) => button.textContent === '{name}').click()")
            page.wait_for(f"timeline.snapshots.some((snapshot) => snapshot.number > {begin} && snapshot.happened.{counter}.length) && timeline.latest.requests.size === 0")
        check("pressed again, it is named once", text(page, "watch").count(name) == 1, text(page, "watch"))
        check(f"{name}: says what to watch", text(page, "watch").startswith(name + ". "))
        check("and plays it slowly", page.evaluate("timeline.isPlaying"))
        check("the setting is the server's", page.evaluate("document.getElementById('swap').checked") == (counter == "swapped_out"))
        page.evaluate("timeline.pace = 0.002; timeline.play(timeline.snapshots.length - 8, () => showMoment(shownChapter))")
        page.wait_for("!timeline.isPlaying")
        check("it ends where its moment is", page.evaluate(f"timeline.shown.happened.{counter}.length") > 0)
        click(page, "live")
        click(page, "show-moment")
        check("which a button shows again", page.evaluate(f"timeline.shown.happened.{counter}.length") > 0)
        check("the bar names its regions, and what would wait", text(page, "regions-text").startswith(
            "In one contiguous region each, requests 0 and 2 would fit, requests 1 and 3 would wait"), text(page, "regions-text"))
        check("the counts are of this scene", text(page, "number-preemptions") == "1", text(page, "number-preemptions"))
        check("the state says that it is not now", text(page, "state").startswith(f"showing step {page.evaluate('timeline.shown.step')} of ") and "(server idle)" in text(page, "state"),
              text(page, "state"))
        check("the step says who, and why", f"{kind} request 3: too few blocks were left, free or cached; it" in text(page, "story"), text(page, "story"))
        check("what is cached then was released in this step", page.evaluate(
            "timeline.shown.cached.size > 0 && [...timeline.shown.cached.keys()].every((block) => timeline.shown.happened.released.get(block) === 3)"),
            page.evaluate("[timeline.shown.step, [...timeline.shown.cached.keys()], [...timeline.shown.happened.released]]"))
        page.evaluate("views.point({block: [...timeline.shown.cached.keys()][0]}, 'pool', true)")
        check("and says so", text(page, "sentence").endswith("In this step request 3, which was preempted, released it"), text(page, "sentence"))
        page.evaluate("views.point(null, 'pool', false)")
        page.evaluate(f"timeline.hold(timeline.snapshots.findLastIndex((snapshot) => snapshot.happened.{counter}.length))")
        check("the replies are the scene's", page.evaluate("[...document.querySelectorAll('#replies li')].filter((item) => !item.hidden).map((item) => item.querySelector('.tag').textContent)")
              == ["0", "1", "2", "3"] and text(page, "replies-title").startswith(f"Replies of “{name}”, as far as"), text(page, "replies-title"))
    check("what is swapped out has its blocks in the host's memory",
          page.evaluate("[...timeline.shown.requests.values()].some((request) => request.swapped && request.hostBlocks > 0)"))
    other = browser.open(page.evaluate("location.href"))
    other.wait_for("timeline.latest.sizes.blocks > 0")
    found = [text(other, "number-blocks-copied"), text(other, "number-blocks-moved")]
    page.call("Page.bringToFront")
    check("nor are they in a page that was opened after them", found == ["0", str(page.evaluate("timeline.latest.counters.moved"))], found)
    check("swaps are no copies on write", text(page, "number-blocks-copied") == "0" and int(text(page, "number-blocks-moved")) > 7,
          [text(page, "number-blocks-copied"), text(page, "number-blocks-moved")])
    check("and none of the four is computed again", not page.evaluate(
        f"timeline.snapshots.some((snapshot) => snapshot.number > {number} && snapshot.happened.recomputed.length)"))
    names = drawn_texts(page)
    check("the strip names both scenes", {name[:12] for name in names} >= {"Preempted: c", "Preempted: s"}, names)  # cut where few bars are in sight
    check("what the counters do not have is pale", page.evaluate(MARKS) == [[0.35], [1]], page.evaluate(MARKS))
    page.evaluate(f"timeline.hold(timeline.snapshots.findIndex((snapshot) => snapshot.number === {number}))")
    check("an older step has the caption of its scene", text(page, "watch").startswith("Preempted: computed again") and page.evaluate(
        "document.querySelector('#scenes [aria-pressed]').textContent") == "Preempted: computed again", text(page, "watch"))
    click(page, "restore")
    page.wait_for("timeline.latest.sizes.slots === 256")
    timeline = page.evaluate("timeline.live()")
    check("the pool is as before", timeline is None)


# How opaque the marks of evictions are: of evictions that the counters do not have, and of those that they have.
MARKS = """(() => { const context = timeline.canvas.getContext('2d'), marks = [], plain = context.strokeRect;
    context.strokeRect = function (x, y, width, height) { if (width === 5 && height === 6) marks.push([x, context.globalAlpha]); plain.call(context, x, y, width, height); };
    timeline.draw();
    delete context.strokeRect;
    const {bars} = timeline.bars(timeline.canvas.clientWidth), {poolsSeen, number} = timeline.shown;
    const isCounted = (step) => step.pool === poolsSeen && step.number <= number;
    const isHere = (x) => isCounted(bars[Math.floor((x + 0.5 - kStripLeft) / kBarWidth)]);
    return [false, true].map((wanted) => [...new Set(marks.filter(([x]) => isHere(x) === wanted).map(([, alpha]) => Math.round(100 * alpha) / 100))]); })()"""


def drawn_texts(page):
    """What is written in the strip."""
    return page.evaluate("""(() => { const context = timeline.canvas.getContext('2d'), texts = [], plain = context.fillText;
        context.fillText = function (text, ...at) { texts.push(text); plain.call(context, text, ...at); };
        timeline.draw();
        delete context.fillText;
        return texts; })()""")


def check_copies(page):
    """What a step copied is drawn beside the slots, and not over them."""
    page.evaluate("timeline.pace = 0.002; [...document.querySelectorAll('#scenes button')].find((button) => button.textContent === 'Samples and copy-on-write').click()")
    page.wait_for("shownChapter.scene?.name.startsWith('Samples') && timeline.latest.requests.size === 0 && !timeline.isPlaying && timeline.at !== null")
    copies = page.evaluate("timeline.shown.happened.copyOnWrites")
    check("the scene ends where three blocks are copied", len(copies) == 3, copies)
    page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")
    count = """((block, isInside) => { const {x, y, size, height} = blockRect(views.poolLayout, block), context = document.createElement('canvas').getContext('2d');
        context.fillStyle = views.theme.bad; context.fillRect(0, 0, 1, 1);
        const wanted = context.getImageData(0, 0, 1, 1).data, [left, top, width, down] = isInside ? [x + 4, y + 16, size - 8, height - 20] : [x - 2, y - 2, size + 4, height + 8];
        const {data} = views.pool.getContext('2d').getImageData(left, top, width, down);
        let found = 0;
        for (let at = 0; at < data.length; at += 4) found += [0, 1, 2].every((part) => Math.abs(data[at + part] - wanted[part]) < 40) && data[at + 3] > 200;
        return found; })"""
    blocks = page.evaluate("timeline.shown.sizes.blocks")
    covered = page.evaluate(f"Array.from({{length: {blocks}}}, (_, block) => block).filter((block) => {count}(block, true) > 0)")
    check("no slot is covered", covered == [], covered)
    marked = page.evaluate(f"{json.dumps(copies)}.every(([from, to]) => {count}(from, false) > 0 && {count}(to, false) > 40)")
    check("and each copy is marked", marked)
    # Another way: up, down, and along, in a pool of many rows.
    crossed = page.evaluate("""(() => { const layout = poolLayout(64, 400, 400), inside = [];
        for (const [from, to] of [[0, 63], [63, 0], [9, 10], [10, 9], [3, 11], [11, 3], [7, 56], [56, 7], [8, 8 + layout.columns]]) {
            const way = copyWay(layout, from, to, 1);
            for (let at = 1; at < way.length; ++at) for (let share = 0; share <= 1; share += 0.01) {
                const x = way[at - 1].x + share * (way[at].x - way[at - 1].x), y = way[at - 1].y + share * (way[at].y - way[at - 1].y), block = blockAt(layout, x, y);
                if (block === undefined) continue;
                const rect = blockRect(layout, block);
                if (x > rect.x + 2 && x < rect.x + rect.size - 2 && y > rect.y + 2 && y < rect.y + rect.height - 2) inside.push([from, to, block]);
            } }
        return inside; })()""")
    check("the ways lead between the blocks", crossed == [], crossed)
    page.evaluate("timeline.live()")


def check_found_again(page, server):
    """What a preempted request finds of its own is told apart, as /metrics does."""
    page.evaluate("ask('/pool/restart', {slots: 96, block_size: 4, budget: 64, swap: false}).then(() => 1)")
    page.wait_for("timeline.latest.sizes.slots === 96")
    number = page.evaluate("timeline.latest.number")
    for prompts, max_tokens in ((["A wolf", "The king", "A fox"], 36), (["A wolf went into the forest and met a bear", "A wolf went into the forest and met a hare"], 4)):
        click(page, "pause")
        page.wait_for("timeline.latest.paused")
        page.evaluate(f"attempt(() => post({json.dumps(prompts)}, {{max_tokens: {max_tokens}, temperature: 0, ignore_eos: true}})).then(() => 1)")
        page.wait_for(f"timeline.latest.numWaiting === {len(prompts)}")
        end_all(page)
    found, again = page.evaluate(f"timeline.snapshots.filter((shown) => shown.number > {number}).reduce((sum, {{happened}}) => "
                                 "[sum[0] + happened.found, sum[1] + happened.foundAgain], [0, 0])")
    metrics = page.evaluate("ask('/metrics').then((reply) => reply.text())")
    hits = int(re.search(r"^vllm:prefix_cache_hits_total\{.*\} (\d+)$", metrics, re.MULTILINE).group(1))
    check("a resumed request has found its own blocks", again > 0, [found, again])
    check("they are no prefix hits, as in /metrics", found == hits > 0, [found, hits])
    check("the counter says both", text(page, "number-prompt-tokens-found-cached") == f"{hits} + {again} again",
          text(page, "number-prompt-tokens-found-cached"))
    page.evaluate("document.getElementById('number-prompt-tokens-found-cached').querySelector('.word').focus()")
    check("“again” is explained by key", text(page, "meaning").startswith("what is still cached of a preempted request that resumes"), text(page, "meaning"))
    page.key("ArrowRight")
    check("among the other words", page.evaluate("document.activeElement.textContent") != "again" and not page.evaluate("document.getElementById('meaning').hidden"))
    page.evaluate("document.activeElement.blur()")
    page.evaluate("timeline.hold(timeline.snapshots.findLastIndex((shown) => shown.happened.foundAgain))")
    check("and the step", f"found again: {again} tokens of a preempted request" in text(page, "story"), text(page, "story"))
    click(page, "restore")
    page.wait_for("timeline.latest.sizes.slots === 256")
    page.evaluate("timeline.live()")


def check_drafts(page):
    """Drafts are seen as drafts, in both views and in the strip."""
    check("no drafts, no legend of them", page.evaluate("document.getElementById('draft-legend').hidden"))
    page.evaluate("[...document.querySelectorAll('#scenes button')].find((button) => button.textContent === 'Drafts').click()")
    page.wait_for("shownChapter.scene?.name === 'Drafts' && timeline.latest.counters.drafts > 0 && timeline.latest.requests.size === 0 && !timeline.isPlaying")
    drafts = page.evaluate("timeline.shown.happened.drafts[0]")
    check("the scene ends where a draft was accepted and another one taken back", 0 < drafts["accepted"] < len(drafts["texts"]), drafts)
    check("the step says so", f"drafts: {drafts['accepted']} of {len(drafts['texts'])} accepted" in text(page, "story"), text(page, "story"))
    steps = page.evaluate("timeline.snapshots.slice(0, timeline.at + 1).filter((shown) => shown.sizes.pool === timeline.shown.sizes.pool).flatMap((shown) => shown.steps)")
    check("drafts are no prompt tokens", [step["prompt"] > 0 for step in steps] == [True] + [False] * (len(steps) - 1), steps)
    sums = [sum(step[name] for step in steps) for name in ("accepted", "drafts")]
    check("the counter agrees with the steps", text(page, "number-drafts-accepted") == f"{sums[0]} of {sums[1]}", [text(page, "number-drafts-accepted"), sums])
    after = page.evaluate("(() => { const at = timeline.at + 1, [request] = timeline.snapshots[at].requests.values(); "
                          "return [...request.sequences.values()][0].texts; })()")
    begin, accepted = drafts["position"], drafts["accepted"]
    check("what was accepted is text", after[begin:begin + accepted] == drafts["texts"][:accepted], [after, drafts])
    check("and what was taken back is not", after[begin + accepted] != drafts["texts"][accepted], [after, drafts])
    check("what the model drew is text there", drafts["drawn"] == after[begin + accepted], [after, drafts])
    instead = "“" + drafts["drawn"].replace(" ", "·") + "”"
    check("the step says what it is", f"drawn instead: {instead}" in text(page, "story"), text(page, "story"))

    def slot_rect(position):
        page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")
        return page.evaluate(f"""(() => {{ const {{tablesLayout: layout, snapshot}} = views, size = snapshot.sizes.block_size, row = layout.rows[0];
            const cell = cellRect(layout, row, Math.floor({position} / size)), slot = {position} % size, width = (cell.width - 4) / layout.slotColumns;
            return [cell.x + 2 + slot % layout.slotColumns * width, cell.y + kHeaderHeight + Math.floor(slot / layout.slotColumns) * kSlotHeight, width]; }})()""")

    def has_color(name, left, top, width, height):
        """Whether a colour of the theme is in a part of the tables' drawing."""
        return page.evaluate(f"""(() => {{ const context = document.createElement('canvas').getContext('2d');
            context.fillStyle = views.theme.{name}; context.fillRect(0, 0, 1, 1);
            const wanted = context.getImageData(0, 0, 1, 1).data, {{data}} = views.tables.getContext('2d').getImageData({left}, {top}, {width}, {height});
            for (let at = 0; at < data.length; at += 4) if ([0, 1, 2].every((part) => Math.abs(data[at + part] - wanted[part]) < 24) && data[at + 3] > 250) return true;
            return false; }})()""")

    def is_struck(position):
        left, top, width = slot_rect(position)
        return has_color("bad", left + 1, top + 6, width - 2, 4)

    def is_framed(position):
        left, top, width = slot_rect(position)
        return has_color("text", left + width - 3.5, top + 4, 4, 6)

    places = range(begin - 1, begin + len(drafts["texts"]))
    check("accepted drafts are framed in their table", [is_framed(place) for place in places] == [begin <= place < begin + accepted for place in places], [is_framed(place) for place in places])
    check("and those taken back struck through", [is_struck(place) for place in places] == [place >= begin + accepted for place in places])
    size = page.evaluate("timeline.shown.sizes.block_size")
    left, top, _ = slot_rect(begin + accepted)
    box = page.evaluate("(() => { const box = views.tables.getBoundingClientRect(); return [box.left, box.top]; })()")
    page.move(box[0] + left + 8, box[1] + top + 6)
    page.wait_for("views.target !== null")
    check("the sentence says what a slot held", "held the draft “" in text(page, "sentence") and "taken back" in text(page, "sentence"), text(page, "sentence"))
    check("and what comes there instead", f"the model drew {instead} instead" in text(page, "sentence"), text(page, "sentence"))

    def says_instead(index):
        left, top, width = page.evaluate(f"(() => {{ const cell = {table_rect(0, index)}; return [cell.x, cell.y, cell.width]; }})()")
        return has_color("accent", left + width / 2, top + 1, width / 2 - 3, 11)

    last = (begin + accepted) // size
    check("which stands in its block of the table, and in no other", [says_instead(index) for index in range(last + 1)] == [False] * last + [True])
    page.move(5, 5)
    block = page.evaluate(f"[...timeline.shown.requests.values()][0].sequences.values().next().value.blocks[{(begin + accepted) // size}]")
    page.evaluate(f"views.point({{block: {block}}}, 'pool', true)")
    check("and what a block did", "draft" in text(page, "sentence"), text(page, "sentence"))
    check("the legend has them", page.evaluate("!document.getElementById('draft-legend').hidden"))
    fits = page.evaluate("(() => { const list = document.getElementById('numbers'); return [list.scrollWidth, list.clientWidth]; })()")
    check("all numbers fit", fits[0] <= fits[1], fits)
    page.evaluate("views.point(null, 'pool', false)")
    click(page, "restore")
    page.wait_for("timeline.latest.sizes.slots === 256")
    page.evaluate("timeline.live()")


def check_hostile(page):
    prompts = ["<script>window.isBroken = 1</script><img src=x onerror='window.isBroken = 1'>", "abc\u202edef \u2066ghi\u200f", "日本語 \U0001f43a"]
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    ask(page, prompts)
    page.wait_for("timeline.latest.numWaiting === 3")
    known = page.evaluate("timeline.latest.number")
    for step in range(3):  # their prompts are longer than one step's budget
        click(page, "step")
        page.wait_for(f"timeline.latest.number > {known + step}")
    page.wait_for("timeline.latest.numRunning === 3")
    check("texts are no code", page.evaluate("window.isBroken === undefined && !document.querySelector('#replies script, #replies img')"))
    seen = page.evaluate("""[...timeline.latest.requests.values()].flatMap((request) => [...request.sequences.values()].flatMap((sequence) =>
        sequence.texts.map((_, position) => sentenceOf(timeline.latest, {block: sequence.blocks[Math.floor(position / 4)], sequence: sequence.id,
        request: request.id, index: Math.floor(position / 4), position})))).join('\\n')""")
    check("no sentence turns its direction around", "\u202e" not in seen and "\u200f" not in seen)
    check("and half characters are marked", "\ufffd" in seen or "本" in seen, seen)
    check("nor does a reply", page.evaluate("!/[\\u202e\\u2066\\u200f]/.test(document.getElementById('replies').textContent)"))
    end_all(page)


def check_many(page):
    """200 requests at once, and what drawing them takes."""
    page.evaluate("views.frameTimes.length = 0; traffic.bytes = 0; traffic.begin = performance.now()")
    ask(page, [f"A wolf {i}" for i in range(200)], max_tokens=8)
    page.wait_for("timeline.latest.numRunning + timeline.latest.numWaiting > 100 || timeline.latest.counters.generated > 0")
    end_all(page)
    texts = page.evaluate("[...document.querySelectorAll('#replies li')].slice(0, 200).filter((item) => item.reply.texts[0].full !== '').length")
    check("200 requests at once have 200 texts", texts == 200, texts)
    times = sorted(page.evaluate("views.frameTimes"))
    seconds = page.evaluate("(performance.now() - traffic.begin) / 1000")
    print(f"a frame takes {times[len(times) // 2]:.1f} ms, at most {times[-1]:.1f}; {page.evaluate('traffic.bytes') / 1000:.0f} kB in {seconds:.1f} s")


# What is written in the tables: [text, left, width, room], as far as it is in sight.
WRITTEN = """(() => { const context = views.tables.getContext('2d'), texts = [], plain = context.fillText;
    context.fillText = function (text, x, y, room) { texts.push([String(text), x, context.measureText(text).width, room ?? Infinity]); plain.call(context, text, x, y, room); };
    views.draw();
    delete context.fillText;
    return texts; })()"""


def check_load(page):
    """24 requests that begin alike: their texts are there, the width is used, and what they share is of none of their colours."""
    page.evaluate("ask('/pool/restart', {slots: 1024, block_size: 16, budget: 1024, swap: false}).then(() => 1)")
    page.wait_for("timeline.latest.sizes.slots === 1024")
    page.evaluate("attempt(() => post([kShared], {max_tokens: 2, ignore_eos: true})).then(() => 1)")
    end_all(page)
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    page.evaluate("attempt(() => post(Array.from({length: 24}, (_, index) => `${kShared} ${index}`), {max_tokens: 40, temperature: 0, ignore_eos: true})).then(() => 1)")
    page.wait_for("timeline.latest.numWaiting === 24")
    click(page, "step")
    page.wait_for("timeline.latest.numRunning === 24")
    written = page.evaluate(WRITTEN)
    check("24 requests have texts in their tables", sum("king who had three sons" in text for text, *_ in written) > 5, written)
    check("and use the width", page.evaluate("(() => { const {rows, columns} = views.tablesLayout, cell = cellRect(views.tablesLayout, rows[0], columns - 1); "
                                             "return cell.x + cell.width > 0.95 * views.tables.clientWidth; })()"))
    names = [(width, room) for text, _, width, room in written if re.fullmatch(r"\d+ ×24", text)]
    check("a shared block has a label that fits", len(names) > 10 and all(width <= room for width, room in names), [names, written])
    page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")
    colors = page.evaluate("""(() => { const at = ({x, y, height}) => [...views.tables.getContext('2d').getImageData(x + 3, y + height - 3, 1, 1).data].join();
        return views.tablesLayout.rows.slice(0, 5).map((row) => [at(cellRect(views.tablesLayout, row, 0)), at(cellRect(views.tablesLayout, row, row.sequence.blocks.length - 1))]); })()""")
    check("which has the same colour in all tables, and no owner's", len({shared for shared, _ in colors}) == 1 and len({own for _, own in colors} - {colors[0][0]}) == 5, colors)
    check("24 run", "In blocks, 24 requests run, " in text(page, "regions-text"), text(page, "regions-text"))
    check("the host's memory is no subject where there is none of it", page.evaluate("document.getElementById('host').offsetParent === null"))
    bars = page.evaluate("""(() => { const context = timeline.canvas.getContext('2d'), heights = [], plain = context.fillRect;
        context.fillRect = function (x, y, width, height) { if (width === kBarWidth - 1) heights.push(height); plain.call(context, x, y, width, height); };
        timeline.draw();
        delete context.fillRect;
        return heights; })()""")
    check("decoded tokens have bars that are seen beside those of prompts", max(bars[-8:]) > 15, bars[-8:])
    click(page, "stop")
    page.wait_for("timeline.latest.requests.size === 0")
    click(page, "restore")
    page.wait_for("timeline.latest.sizes.slots === 256")
    page.evaluate("timeline.live()")


def check_ended(page):
    """Tables of requests that have ended stay, until the next one."""
    ended = "views.tablesLayout.rows.map((row) => [row.request.id, row.hasEnded])"
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    ask(page, ["The king had a garden", "A wolf"], max_tokens=6)
    page.wait_for("timeline.latest.numWaiting === 2")
    end_all(page)
    page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")
    rows = page.evaluate(ended)
    check("tables of what has ended stay", len(rows) == 2 and all(has_ended for _, has_ended in rows), rows)
    written = [text for text, *_ in page.evaluate(WRITTEN)]
    check("with their texts", "·garden" in written and any(text.startswith("Done: ") for text in written), written)
    grey = page.evaluate("[...views.tables.getContext('2d').getImageData(3, views.tablesLayout.rows[0].y + 4, 1, 1).data].slice(0, 3)")
    check("and grey", max(grey) - min(grey) < 24, grey)
    page.move(*point_of(page, "tables", table_rect(0, 0)))
    page.wait_for("views.target !== null")
    check("a block of theirs says what it was", re.search(rf"It was logical block 0 of request {rows[0][0]}, which has ended", text(page, "sentence")), text(page, "sentence"))
    page.move(5, 5)
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    ask(page, ["A fox"], max_tokens=6)
    page.wait_for("timeline.latest.numWaiting === 1")
    page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")
    rows = page.evaluate(ended)
    check("until the next request", len(rows) == 1 and not rows[0][1], rows)
    end_all(page)
    click(page, "pause")


def check_motion(page):
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    number = page.evaluate("timeline.latest.number")
    page.evaluate("document.querySelector('#scenes button').click()")
    page.wait_for(f"timeline.at !== null && timeline.shown.number > {number} && timeline.latest.requests.size === 0")
    check("with reduced motion, a scene waits at its first step", page.evaluate("timeline.at !== null && !timeline.isPlaying"))
    click(page, "restore")
    page.wait_for("timeline.latest.sizes.slots === 256")
    page.evaluate("timeline.live()")


def check_phone(browser, url):
    page = browser.open(url + "/", 390, 844, is_phone=True, is_dark=True)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    page.wait_for("timeline.latest.sizes.blocks > 0")
    height = page.evaluate("document.documentElement.scrollHeight")
    check("a phone: nothing is wider than it", page.evaluate("document.documentElement.scrollWidth") <= 390)
    tops = page.evaluate("['story', 'pool', 'sentence', 'strip', 'tables', 'side'].map((name) => document.getElementById(name).getBoundingClientRect().top)")
    check("in order of importance: the steps stand below the pool", tops == sorted(tops) and tops[0] < 844 / 2, tops)
    ask(page, ["A wolf"] * 8, max_tokens=8)
    page.wait_for("timeline.latest.step > 0")
    page.wait_for("timeline.latest.requests.size === 0")
    check("and as high as before", page.evaluate("document.documentElement.scrollHeight") == height)
    page.evaluate("timeline.hold(timeline.snapshots.length - 4)")
    page.evaluate("new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)))")
    page.touch(*point_of(page, "pool", pool_rect(2)))
    page.wait_for("views.target?.block === 2")
    check("held, all is where it was", page.evaluate("['story', 'pool', 'sentence', 'strip', 'tables', 'side'].map((name) => document.getElementById(name)"
                                                     ".getBoundingClientRect().top)") == tops, tops)
    box = page.evaluate("(() => { const pill = document.getElementById('state'), box = pill.getBoundingClientRect(); "
                        "return [box.left, box.top, box.right, pill.scrollHeight, pill.clientHeight]; })()")
    check("and the state is readable", box[0] >= 0 and box[1] >= 0 and box[2] <= 390 and box[3] <= box[4], box)
    check("a touch says what a block is", text(page, "sentence").startswith("block 2: "))
    page.evaluate("views.regions.scrollIntoView({block: 'center'})")
    page.touch(*page.evaluate("(() => { const box = views.regions.getBoundingClientRect(); return [box.left + 4, box.top + 8]; })()"))
    page.wait_for("views.target?.region !== undefined")
    check("and what a region is", text(page, "sentence").startswith("request "), text(page, "sentence"))
    page.evaluate("scrollTo(0, 0)")
    page.touch(*page.evaluate("(() => { const box = document.querySelector('#pool-count .word').getBoundingClientRect(); return [box.left + 8, box.top + 8]; })()"))
    page.wait_for("!document.getElementById('meaning').hidden")
    check("and what a word means", text(page, "meaning").startswith("a few slots"), text(page, "meaning"))
    check("no error on the phone", not page.problems, page.problems)


def contrast(page, is_dark):
    """The worst contrast of the colours that text has on what lies behind it, as WCAG counts it."""
    page.dark(is_dark)
    return page.evaluate("""(() => {
        const style = getComputedStyle(document.body), context = document.createElement('canvas').getContext('2d');
        const parse = (color) => { context.fillStyle = color; context.fillRect(0, 0, 1, 1); return [...context.getImageData(0, 0, 1, 1).data]; };
        const light = (color) => { const [r, g, b] = parse(color).map((level) => level / 255).map((level) => level <= 0.04045 ? level / 12.92 :
            ((level + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const ratio = (one, other) => { const [low, high] = [light(one), light(other)].sort((a, b) => a - b); return (high + 0.05) / (low + 0.05); };
        const value = (name) => style.getPropertyValue(name).trim(), theme = themeOf(document.body);
        const pairs = [['--text', '--back'], ['--text', '--card'], ['--dim', '--back'], ['--dim', '--card'], ['--dim', '--free'], ['--accent', '--card'],
            ['--bad', '--card'], ['--prompt', '--card'], ['--on-accent', '--accent']].map(([text, back]) => ratio(value(text), value(back)));
        for (let id = 0; id < 60; ++id) pairs.push(ratio(theme.onOwner, colorOf(theme, id)));
        const ended = endedTheme(theme);
        pairs.push(ratio(theme.onOwner, theme.shared), ratio(ended.onOwner, colorOf(ended, 0)), ratio(ended.text, colorOf(ended, 0, true)));
        return Math.min(...pairs); })()""")


def check_colors(page):
    for is_dark in (False, True):
        worst = contrast(page, is_dark)
        check(f"text has a contrast of 4.5 at least, {'dark' if is_dark else 'light'}", worst >= 4.5, worst)
    page.dark(False)


def check_old_steps(url):
    """A client that asks for what was before gets what is now."""
    for headers in ({}, {"Last-Event-ID": "-5"}, {"Last-Event-ID": "0"}):
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=10)
        connection.request("GET", "/pool/events?from=-1&step=99999999999999999999", headers=headers)
        reply = connection.getresponse()
        record = json.loads(reply.readline().removeprefix(b"data: "))
        check(f"a whole record comes first {headers}", record["whole"] and "sizes" in record)
        connection.close()


def check_lost(page, server):
    problems = list(page.problems)
    check("no error, and nothing from elsewhere", not problems and all(address.startswith((server.url, "data:")) for address in page.addresses), problems)
    server.process.send_signal(signal.SIGSTOP)
    page.wait_for("document.body.classList.contains('lost')")
    check("a server that is silent is lost", text(page, "state") == "server lost" and "does not answer" in text(page, "problem"),
          text(page, "problem"))
    check("and so are its numbers", text(page, "number-tokens-a-second") == "–")
    server.process.send_signal(signal.SIGCONT)
    page.wait_for("!document.body.classList.contains('lost') && timeline.latest.sizes.blocks > 0")
    check("it can come back", text(page, "problem") == "", text(page, "problem"))
    page.evaluate("attempt(() => post(Array(16).fill('A wolf'), {max_tokens: 240, ignore_eos: true}))&&1")
    page.wait_for("timeline.latest.numRunning > 0")
    server.process.send_signal(signal.SIGTERM)
    page.wait_for("document.body.classList.contains('lost')", 120)
    check("a server that drains is shown as it ends, and not as lost", page.evaluate(
        "timeline.snapshots.some((shown) => shown.draining) && timeline.latest.numRunning + timeline.latest.numWaiting === 0"))
    check("one that has ended is lost too", text(page, "state") == "server lost")
    page.evaluate("document.querySelector('#scenes button').click()")
    page.wait_for("document.getElementById('problem').textContent.includes('does not answer')")
    check("a scene does not begin without a server", page.evaluate("document.querySelector('#scenes [aria-pressed]') === null"))
    ask(page, ["One", "Two"])
    page.wait_for("!document.querySelector('#replies button')")
    check("no prompt waits for it", page.evaluate("[...document.querySelectorAll('#replies li')].slice(0, 2).every((item) => "
                                                  "item.textContent.includes('does not answer'))"))


def check_first_visit(browser, program):
    """From the line that the README gives, without a click."""
    with http_program.HttpProgram(program, "--device", "cpu") as server:
        page = browser.open(server.url + "/")
        page.wait_for("shownChapter?.scene === kScenes[0] && timeline.shown.numRunning > 1")
        check("the first scene plays on a first visit", text(page, "watch").startswith("Blocks, not regions. "))
        page.wait_for("timeline.latest.sizes.slots === 4096 && timeline.latest.poolsSeen === 2", 60)
        check("and the pool is then made again as it was", page.evaluate("document.getElementById('restore').hidden"))
        page.evaluate("timeline.pace = 0.002; timeline.play(timeline.at, () => showMoment(shownChapter), (shown) => chapterOf(shown.number) === shownChapter)")
        page.wait_for("!timeline.isPlaying")
        check("it ends where its moment is", page.evaluate("timeline.shown.numRunning === 8 && shownChapter.scene === kScenes[0]"))
        second = browser.open(server.url + "/")
        second.wait_for("timeline.latest.sizes.blocks > 0")
        time.sleep(0.5)
        check("a server that has computed something is left alone", second.evaluate("timeline.latest.sizes.slots === 4096 && timeline.latest.poolsSeen === 0 && "
                                                                                    "shownChapter.scene === undefined"))
        page.evaluate("document.querySelector('#scenes button').click()")
        second.wait_for("timeline.latest.sizes.slots === 240")
        click(page, "pause")
        second.wait_for("timeline.latest.paused")
        check("another page sees that the pool is a scene's", text(second, "restore") == "Back to 4096 slots" and second.evaluate("!document.getElementById('restore').hidden"))
        browser.close(page)
        browser.close(second)
        begin = time.monotonic()
        while (limit := server.get("/v1/models")["data"][0]["max_model_len"]) != 1024 and time.monotonic() < begin + 60:
            time.sleep(0.1)
        check("when all pages have gone, the pool is made again as it was", limit == 1024, limit)
        status, reply = server.post("/v1/completions", {"prompt": "A wolf", "max_tokens": 4})
        check("and is not paused", status == 200, reply)


def check_tier(browser, program):
    with http_program.HttpProgram(program, *SMALL[:-1], "--host-cache", "1MiB") as server:
        page = browser.open(server.url + "/")
        page.wait_for("timeline.latest.sizes.blocks > 0")
        check("the second tier is shown where there is one", page.evaluate(
            "!document.getElementById('tier').hidden && timeline.latest.sizes.tier_blocks === 85"))
        page.evaluate("[...document.querySelectorAll('#scenes button')].find((button) => button.textContent === 'Evicted, and back').click()")
        page.wait_for("timeline.latest.counters.tier_restored > 0 && timeline.latest.requests.size === 0")
        page.evaluate("timeline.pace = 0.002; timeline.play(timeline.snapshots.length - 8, () => showMoment(shownChapter))")
        page.wait_for("!timeline.isPlaying")
        check("its scene ends where blocks come back", page.evaluate("tierMoves(timeline.shown).back") > 0)
        check("the step says so", re.search(r"brought back from the host: \d+ blocks", text(page, "story")), text(page, "story"))
        check("it says what is kept", page.evaluate("timeline.snapshots.some((shown) => storyOf(shown).includes('kept on the host: '))"))
        check("these are no swaps, and no copies on write", page.evaluate(
            "timeline.snapshots.every((shown) => shown.happened.copies.length === 0)") and text(page, "number-blocks-copied") == "0", text(page, "number-blocks-copied"))
        check("the number is the server's", int(text(page, "number-brought-back")) == page.evaluate("timeline.shown.counters.tier_restored"))
        hatched = page.evaluate("""(() => { const tier = document.getElementById('tier'), {data} = tier.getContext('2d').getImageData(0, 0, tier.width, tier.height);
            return new Set(new Uint32Array(data.buffer)).size; })()""")
        check("the tier's blocks are drawn", hatched > 2, hatched)
        browser.close(page)


def play_scene(page, name, is_over):
    """To the moment that the scene is about."""
    page.evaluate(f"[...document.querySelectorAll('#scenes button')].find((button) => button.textContent === '{name}').click()")
    page.wait_for(f"shownChapter.scene?.name === '{name}' && timeline.latest.step > 3 && timeline.latest.requests.size === 0 && {is_over}")
    page.evaluate("timeline.pace = 0.002; timeline.play(timeline.snapshots.length - 8, () => showMoment(shownChapter))")
    page.wait_for("!timeline.isPlaying")


def check_shared_reading(page):
    play_scene(page, "Read once", "timeline.latest.counters.generated > 0")
    blocks = page.evaluate("timeline.shown.happened.shared.blocks")
    check("its scene ends where blocks are read once", len(blocks) == 4, blocks)
    check("the step says so", text(page, "story").endswith(f"read once: {len(blocks)} blocks for several sequences, {3 * len(blocks)} fewer reads"), text(page, "story"))
    check("these are the blocks that all four samples begin with", page.evaluate(
        "[...timeline.shown.requests.values()][0].sequences.size === 4 && [...[...timeline.shown.requests.values()][0].sequences.values()]"
        ".every(({blocks}) => timeline.shown.happened.shared.blocks.every((block, index) => blocks[index] === block))"))
    check("the prompt's step has none", page.evaluate("timeline.snapshots.find(({steps, poolsSeen}) => steps.length && poolsSeen === timeline.shown.poolsSeen)"
                                                      ".happened.shared.blocks.length") == 0)
    line = page.evaluate("""(() => { const [block] = timeline.shown.happened.shared.blocks, {x, y, size, height} = blockRect(views.poolLayout, block);
        const ratio = devicePixelRatio, at = [(x + size / 2) * ratio, (y + height + 1) * ratio];
        return [...views.pool.getContext('2d').getImageData(...at.map(Math.round), 1, 1).data].slice(0, 3); })()""")
    accent = page.evaluate("""(() => { const context = new OffscreenCanvas(1, 1).getContext('2d'); context.fillStyle = views.theme.accent;
        context.fillRect(0, 0, 1, 1); return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3); })()""")
    check("they are underlined", line == accent, [line, accent])
    check("a model without a window has no scene for one", page.evaluate("document.querySelector('[data-needs-window]').hidden"))


def check_windows(browser, program):
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "windowed.gguf"
        windowed_model.write(model, 24)
        with http_program.HttpProgram(program, "--model", str(model), *SMALL[:-1]) as server:
            page = browser.open(server.url + "/")
            page.wait_for("timeline.latest.sizes.blocks > 0")
            check("a model's window is known", page.evaluate("timeline.latest.sizes.window === 24 && !document.querySelector('[data-needs-window]').hidden"))
            play_scene(page, "Behind the window", "timeline.latest.counters.generated > 100")
            check("its scene ends where blocks are given up", re.search(r"behind the window: \d blocks? given up", text(page, "story")), text(page, "story"))
            check("both texts run, although the pool could not hold them as wholes", page.evaluate(
                "timeline.shown.numRunning === 2 && timeline.latest.counters.preemptions === 0 && "
                "[...timeline.shown.requests.values()].reduce((sum, {lastHeld}) => sum + lastHeld.tokens, 0) > timeline.shown.sizes.slots"))
            stood_in = page.evaluate("(() => { const [request] = timeline.shown.requests.values(), [sequence] = request.sequences.values();"
                                     " return [numStoodIn(sequence), sequence.length, sequence.blocks[0]]; })()")
            check("a block stands in for what is behind the window", stood_in[0] == (stood_in[1] - 24 + 1) // 4 or stood_in[0] == (stood_in[1] - 24) // 4, stood_in)
            page.evaluate(f"views.point({{block: {stood_in[2]}}}, 'pool', true)")
            check("and says so", f"It stands in for logical blocks 0 to {stood_in[0] - 1} of request 0, which are behind the window" in text(page, "sentence"), text(page, "sentence"))
            check("it is drawn as empty", page.evaluate(f"stateOf(timeline.shown, {stood_in[2]}).filled") == 0)
            given_up = page.evaluate("timeline.snapshots.reduce((sum, {happened}) => sum + happened.behind, 0)")
            check("blocks are counted once each", given_up >= 2 * stood_in[0] and given_up <= 2 * stood_in[0] + 2, [given_up, stood_in])
            browser.close(page)


def check_others(browser, program):
    """Pages of another origin, and this page under another name of the machine, steer nothing, even with --cors '*'."""
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>another page</title>")

        def log_message(self, *_):
            pass

    steer = """(async () => { const said = [];
        for (const path of ['pause', 'step', 'restart', 'demo', 'run']) for (const [mode, type] of [['cors', 'application/json'], ['no-cors', 'text/plain']]) {
            const body = path === 'restart' ? '{"slots": 64}' : '{}';
            said.push(await fetch('%s/pool/' + path, {method: 'POST', mode, headers: {'Content-Type': type}, body}).then((reply) => reply.status, () => 'blocked'));
        }
        return said; })()"""
    others = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=others.serve_forever, daemon=True).start()
    with http_program.HttpProgram(program, "--device", "cpu", "--pool-controls", "--cors", "*") as server:
        port = urllib.parse.urlsplit(server.url).port
        page = browser.open(f"http://127.0.0.1:{others.server_port}/")
        said = page.evaluate(steer % server.url)
        check("a page of another origin steers nothing", set(said) <= {403, 0, "blocked"}, said)
        check("but --cors lets it use the API", page.evaluate(f"fetch('{server.url}/v1/models').then((reply) => reply.status)") == 200)
        rebound = browser.open(f"http://rebound.test:{port}/", arguments=["--host-resolver-rules=MAP rebound.test 127.0.0.1"])
        check("under another name the page is refused", "refused" in rebound.evaluate("document.body.textContent"), rebound.evaluate("document.body.textContent"))
        said = rebound.evaluate(steer % "")
        check("and steers nothing", set(said) <= {403, 0, "blocked"}, said)
        own = browser.open(server.url + "/")
        own.wait_for("timeline.latest.sizes.blocks > 0 && running.size === 0 && timeline.latest.requests.size === 0")
        own.wait_for("timeline.latest.sizes.slots === 4096")
        check("the server runs as before", not own.evaluate("timeline.latest.paused"))
        said = own.evaluate("fetch('/pool/pause', {method: 'POST', headers: headers(), body: '{}'}).then((reply) => reply.status)")
        check("the server's own page steers it", said == 200, said)
    others.shutdown()


def check_without_controls(browser, program):
    with http_program.HttpProgram(program, "--device", "cpu", "--api-key", "secret") as server:
        page = browser.open(server.url + "/")
        page.wait_for("!document.getElementById('key').hidden")
        page.wait_for("document.activeElement.id === 'api-key'")
        is_lost = "document.body.classList.contains('lost') || document.getElementById('state').textContent === 'server lost'"
        check("the page asks for the key", text(page, "key").startswith("This server asks for a key") and text(page, "state") == "waiting for a key")
        check("as for something usual", not page.evaluate(is_lost) and text(page, "problem") == "", text(page, "problem"))
        for key in ("wrong", "secret"):
            page.evaluate(f"document.getElementById('api-key').value = '{key}'; document.getElementById('key').requestSubmit()")
            if key == "wrong":
                page.wait_for("document.getElementById('problem').textContent === 'The server does not take this key.'")
        page.wait_for("timeline.latest.sizes.blocks > 0")
        check("with the key it shows the pool", text(page, "problem") == "" and not page.evaluate(is_lost), text(page, "problem"))
        check("without --pool-controls the page says so", "--pool-controls" in text(page, "watch"))
        check("and offers nothing that is off", page.evaluate(
            "[...document.querySelectorAll('#scenes button:not(#restore)')].every((button) => button.disabled) && "
            "document.querySelector('.controls').offsetParent === null && document.getElementById('tab-sizes').hidden"))


LLAMA2 = (pathlib.Path(__file__).parents[1] / "golden/chat_templates/llama2.jinja").read_text()


def with_template(model):
    """The bytes of a GGUF file with a chat template: an entry more in its header, and the alignment after it."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    num_tensors, num_entries = struct.unpack_from("<QQ", model, 8)
    at = 24

    def skip_text(at):
        return at + 8 + struct.unpack_from("<Q", model, at)[0]

    def skip_value(kind, at):
        if kind == 8:
            return skip_text(at)
        if kind != 9:
            return at + sizes[kind]
        kind, count = struct.unpack_from("<IQ", model, at)
        at += 12
        if kind in sizes:
            return at + count * sizes[kind]
        for _ in range(count):
            at = skip_value(kind, at)
        return at

    for _ in range(num_entries):
        at = skip_text(at)
        at = skip_value(struct.unpack_from("<I", model, at)[0], at + 4)
    entries_end = at
    for _ in range(num_tensors):
        at = skip_text(at)
        at += 4 + 8 * struct.unpack_from("<I", model, at)[0] + 4 + 8
    name, value = b"tokenizer.chat_template", LLAMA2.encode()
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value
    head = model[:16] + struct.pack("<Q", num_entries + 1) + model[24:entries_end] + entry + model[entries_end:at]
    return head + bytes(-len(head) % 32) + model[at + -at % 32:]


def check_chat(browser, program):
    model = pathlib.Path(__file__).parents[2] / "common/model/tales/tales-5m-q8_0.gguf"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "chat.gguf"
        path.write_bytes(with_template(model.read_bytes()))
        with http_program.HttpProgram(program, "--device", "cpu", "--pool-controls", "--model", str(path)) as server:
            converse(browser.open(server.url + "/"), server)


def said(page):
    """The conversation as it is shown: texts without numbers and notes."""
    return page.evaluate("[...document.querySelectorAll('#turns li')].map((item) => (item.querySelector('.text') ?? item).textContent)")


def note(page):
    return page.evaluate("document.querySelector('#turns li:last-child p').textContent")


def say(page, message, waits=True):
    page.evaluate("document.getElementById('message').focus()")
    page.call("Input.insertText", text=message)
    page.key("Enter", 13)
    if waits:
        page.wait_for("talk === null")


def begin_reply(page):
    """A reply that has begun and does not end, because the server computes step by step."""
    click(page, "pause")
    page.wait_for("timeline.latest.paused")
    say(page, "Tell it to its end.", waits=False)
    page.wait_for("timeline.latest.numWaiting === 1")
    lengths = []
    while len(set(lengths)) < 4:
        step = page.evaluate("timeline.latest.step")
        click(page, "step")
        page.wait_for(f"timeline.latest.step > {step}")
        lengths.append(page.evaluate("document.querySelector('#turns li:last-child .text').textContent.length"))
    check("a reply comes in pieces", lengths == sorted(lengths) and page.evaluate("talk !== null"), lengths)


def converse(page, server):
    """Several turns, by key, with a model that has a chat template."""
    page.wait_for("timeline.latest.sizes.blocks > 0")
    check("a model with a template is talked to", page.evaluate("document.querySelector('[role=tab][aria-selected=true]').id") == "tab-chat")
    page.evaluate("document.getElementById('chat-tokens').value = 40; document.getElementById('chat-seed').value = 3")
    say(page, "Tell me of <b>a wolf</b>.")
    check("a message is answered", text(page, "problem") == "" and len(said(page)) == 2 and said(page)[1] != "", [text(page, "problem"), said(page)])
    check("what was said is text", page.evaluate("!document.querySelector('#turns b')"))
    check("an end by length says so", note(page).endswith("cut off after 40 tokens") == ("; reply: 40 tokens" in note(page)), note(page))
    check("and how fast it was", re.search(r"; reply: \d+ tokens, [\d.]+ tokens/s", note(page)), note(page))
    first = page.evaluate("conversation")
    say(page, "And then?")
    check("the next message has what was said before it", page.evaluate("conversation.slice(0, 2)") == first and len(said(page)) == 4, said(page))
    prompt, found = map(int, re.match(r"prompt: (\d+) tokens, (\d+) of them found in the pool", note(page)).groups())
    check("which is found in the pool", 0 < found < prompt, note(page))
    _, reply = server.post("/v1/chat/completions", {"messages": [*first, {"role": "user", "content": "And then?"}], "max_tokens": 40, "seed": 3})
    check("the reply is the one of /v1/chat/completions", reply["choices"][0]["message"]["content"] == said(page)[3], [reply, said(page)])
    conversation = page.evaluate("conversation")
    click(page, "again")
    page.wait_for("talk === null")
    check("once more, with the same seed, is the same", page.evaluate("conversation") == conversation and len(said(page)) == 4, page.evaluate("conversation"))
    page.evaluate("document.getElementById('chat-tokens').value = 400; document.getElementById('chat-seed').value = ''")
    for how in ("the button", "Escape"):
        begin_reply(page)
        page.call("Input.insertText", text="typed meanwhile")
        page.key("Enter", 13)
        check("what is typed meanwhile waits", page.evaluate("document.getElementById('message').value") == "typed meanwhile" and page.evaluate("talk !== null"))
        page.evaluate("document.getElementById('message').value = ''")
        if how == "Escape":
            page.key("Escape")
        else:
            click(page, "stop-reply")
        page.wait_for("talk === null")
        check(f"{how} stops it", note(page) == "stopped", note(page))
        page.wait_for("timeline.latest.numRunning === 0")
        check("in the engine too", True)
        check("and it stays in the conversation", page.evaluate("conversation.at(-1).content") == said(page)[-1], said(page))
    page.wait_for("document.getElementById('chat-tokens').max !== ''")
    page.evaluate("document.getElementById('chat-tokens').value = document.getElementById('chat-tokens').max")  # more than the prompt leaves room for
    click(page, "run")
    say(page, "This is not allowed.")
    check("a refusal is shown, and the message is kept", "max_tokens" in text(page, "problem") and
          page.evaluate("document.getElementById('message').value") == "This is not allowed.", text(page, "problem"))
    check("and is no part of the conversation", page.evaluate("conversation.length") == 8, page.evaluate("conversation"))
    page.evaluate("document.getElementById('chat-tokens').value = 400; document.getElementById('message').value = ''")
    begin_reply(page)
    click(page, "forget")
    page.wait_for("timeline.latest.numRunning === 0")
    check("a new conversation ends the one before", said(page) == [] and page.evaluate("talk === null && conversation.length === 0"), said(page))
    click(page, "run")
    page.evaluate("document.getElementById('chat-tokens').value = 8; document.getElementById('system').value = 'You are a wolf.'")
    say(page, "Who are you?")
    page.wait_for("timeline.snapshots.some((shown) => [...shown.requests.values()].some((request) => [...request.sequences.values()]"
                  ".some((sequence) => sequence.texts.join('').includes('You are a wolf.'))))")
    check("a system message is part of the prompt", True)
    check("no error in the chat but the refusal", all("400" in problem for problem in page.problems), page.problems)
    page.evaluate("document.getElementById('chat-tokens').value = 400")
    begin_reply(page)
    server.process.kill()
    page.wait_for("talk === null")
    check("a lost server is said under the reply", "the server does not answer" in note(page), note(page))
    say(page, "Are you there?")
    check("and a message to it is kept", page.evaluate("document.getElementById('message').value") == "Are you there?" and
          page.evaluate("conversation.length") == 4, said(page))


def measure(browser, program):
    """256 requests in a pool of 4096 blocks."""
    options = ["--device", "cpu", "--no-pool-controls", "--slots", str(4096 * 16), "--block-size", "16", "--budget", "1024", "--max-sequences", "256"]
    with http_program.HttpProgram(program, *options) as server:
        page = browser.open(server.url + "/", 1920, 1080)
        page.wait_for("timeline.latest.sizes.blocks === 4096")
        page.evaluate("views.frameTimes.length = 0; traffic.bytes = 0; traffic.records = 0; traffic.begin = performance.now()")
        page.evaluate("attempt(() => post(Array.from({length: 256}, (_, index) => 'A wolf ' + index), {max_tokens: 160, seed: 1})).then(() => 1)")
        page.wait_for("timeline.latest.numRunning === 256", 60)
        page.wait_for("timeline.latest.requests.size === 0", 120)
        times = sorted(page.evaluate("views.frameTimes"))
        num_bytes, records, seconds = page.evaluate("[traffic.bytes, traffic.records, (performance.now() - traffic.begin) / 1000]")
        print(f"drawing takes {times[len(times) // 2]:.1f} ms (median), {times[int(0.95 * len(times))]:.1f} ms (95 %); "
              f"a record has {num_bytes / records / 1000:.1f} kB; {records} records in {seconds:.1f} s")


def take_pictures(program, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for width, height in (*SIZES, (390, 844)):
        for is_dark in (False, True):
            # Of its own, because a browser has six connections for all its pages.
            with devtools.Browser() as browser, http_program.HttpProgram(program, *SMALL) as server:
                page = browser.open(server.url + "/", width, height, width < 500, is_dark)
                ask(page, ["The king had a garden", "A wolf", "Once upon a time"], max_tokens=30, samples=2)
                page.wait_for("timeline.latest.numWaiting === 3")
                for step in range(12):
                    click(page, "step")
                    page.wait_for(f"timeline.latest.step === {step}")
                page.evaluate("views.point({block: 1}, 'pool', true)")
                page.evaluate("explain(document.querySelector('#pool-count .word'), meanings.get('block'))")
                time.sleep(0.2)
                page.picture(folder / f"{width}-{'dark' if is_dark else 'light'}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--pictures", type=pathlib.Path)
    parser.add_argument("--measure", action="store_true", help="what a large pool takes, and nothing else")
    arguments = parser.parse_args()
    if devtools.missing():
        print(f"skipped: needs a browser (apt-get install {devtools.missing()})")
        sys.exit(77)
    begin = time.monotonic()
    with devtools.Browser() as browser:
        if arguments.measure:
            return measure(browser, arguments.program)
        with http_program.HttpProgram(arguments.program, *SMALL) as server:
            page = browser.open(server.url + "/")
            page.wait_for("timeline.latest.sizes.blocks > 0")
            for part in (check_joined, check_time, check_replies, check_words, check_more, check_form, check_hand, check_regions, check_edges, check_keyboard, check_heights):
                part(page)
            check_scenes(page, browser)
            check_moments(page)
            check_copies(page)
            check_found_again(page, server)
            check_drafts(page)
            check_shared_reading(page)
            for part in (check_ended, check_load, check_hostile, check_many, check_idle, check_motion, check_colors):
                part(page)
            check_phone(browser, server.url)
            check_old_steps(server.url)
            check_lost(page, server)
        check_first_visit(browser, arguments.program)
        check_tier(browser, arguments.program)
        check_windows(browser, arguments.program)
        check_others(browser, arguments.program)
        check_without_controls(browser, arguments.program)
        check_chat(browser, arguments.program)
        if arguments.pictures:
            take_pictures(arguments.program, arguments.pictures)
    print(f"{time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
