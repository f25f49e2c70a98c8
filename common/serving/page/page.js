"use strict";
// The page around the views: the connection, the counters, the forms.

const hasControls = document.body.dataset.controls === "1", hasChat = document.body.dataset.chat === "1";
const defaults = JSON.parse(document.body.dataset.sampling ?? "{}");  // the server's, of requests that do not say
let key = sessionStorage.getItem("key") || "";

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const headers = () => ({"Content-Type": "application/json", ...(key ? {Authorization: "Bearer " + key} : {})});

// What a message for a command line says, put for a slider; and a field of the API, with its label here.
const kLabels = {max_tokens: "Tokens", temperature: "Temperature", n: "Samples", seed: "Seed", top_k: "Top-k", top_p: "Top-p", min_p: "Min-p",
                 repetition_penalty: "Repetition penalty", presence_penalty: "Presence penalty", frequency_penalty: "Frequency penalty", stop: "Stop texts"};
const complain = (text) => {
  $("problem").textContent = plain(text.replace(/--slots (\d+) would do/, "$1 slots would do (under Pool)")
    .replace(/'(\w+)'/, (name, field) => Object.hasOwn(kLabels, field) ? `${name} (${kLabels[field]})` : name));
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
};
// The browser refuses a field by itself: then what was said of the try before is over.
document.addEventListener("invalid", () => { if (!isLost) complain(""); }, true);

let givenKey = null;  // resolves the promise of a key

async function ask(path, body, options = {}) {
  let reply;
  try {
    reply = await fetch(path, {method: body === undefined ? "GET" : "POST", headers: headers(),
                               body: body === undefined ? undefined : JSON.stringify(body), ...options});
  } catch (error) {
    throw options.signal?.aborted ? error : new Error("the server does not answer");
  }
  $("key").hidden = reply.status !== 401;
  if (!reply.ok) {
    const error = await reply.json().catch(() => null);
    throw Object.assign(new Error(error?.error?.message ?? `the server answers ${reply.status}`), {isRefusal: true, needsKey: reply.status === 401, field: error?.error?.param});
  }
  return reply;
}

// Calls onEvent with the JSON of each server-sent event, to the end of the reply.
async function readEvents(reply, onEvent, onBytes = () => {}) {
  const reader = reply.body.getReader(), decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const {value, done} = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("the server does not answer");
    });
    if (done) return;
    onBytes(value.length);
    text += decoder.decode(value, {stream: true});
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ") && event !== "data: [DONE]") onEvent(JSON.parse(event.slice(6)));
    }
  }
}

async function attempt(action) {
  try {
    complain("");
    return await action();
  } catch (error) {
    complain(error.message);
  }
}

// ---- What is shown ----

const isTouched = matchMedia("(pointer: coarse), (max-width: 820px)");
const views = new Views((sentence) => {
  $("sentence").textContent = plain(sentence) || (isTouched.matches
    ? "Touch a block, in the pool or in a table, to see what it is and where else it is used."
    : "Point at a block, in the pool or in a table, to see what it is and where else it is used. Or use Tab and the arrow keys.");
});
const timeline = new Timeline($("strip"), showSnapshot);
const traffic = {bytes: 0, records: 0, begin: performance.now()};  // for measurements
let failure = "", isLost = true, needsKey = false, isFirst = true, shownRegions = "";

// ---- Words, explained where they stand ----

// A word that says what it means when it is pointed at, touched, or reached by key: by Tab to the first of its group, and
// by arrow keys to the others.
function wordFor(text, meaning) {
  const word = element("span", {className: "word", textContent: text, onpointerenter: () => explain(word, meaning),
                                onpointerleave: () => explain(document.activeElement === word ? word : null, meaning),
                                onfocus: () => { reachBy(word); explain(word, meaning); }, onblur: () => explain(null)});
  word.setAttribute("role", "note");
  word.setAttribute("aria-description", meaning);
  word.onkeydown = (event) => {
    if (event.key === "Escape") explain(null);
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key], words = wordsBeside(word).filter((other) => other.offsetParent !== null);
    if (by === undefined) return;
    event.preventDefault();
    words[(words.indexOf(word) + by + words.length) % words.length].focus();
  };
  return word;
}
const wordsBeside = (word) => [...word.closest("[data-words]").querySelectorAll(".word")];
function reachBy(word) {
  for (const other of wordsBeside(word)) other.tabIndex = other === word ? 0 : -1;
}

let explained = null;
function explain(word, meaning) {
  const bubble = $("meaning");
  explained = word;
  bubble.hidden = word === null;
  if (word === null) return;
  bubble.textContent = meaning;
  const at = word.getBoundingClientRect(), {width, height} = bubble.getBoundingClientRect();
  const isBelow = at.bottom + 4 + height <= window.innerHeight;
  bubble.style.left = `${Math.max(4, Math.min(at.left, window.innerWidth - width - 4))}px`;
  bubble.style.top = `${isBelow ? at.bottom + 4 : at.top - 4 - height}px`;
}

// The glossary's words, as they stand in texts; longer ones first.
const kWords = [["prefix found", "prefix hit"], ["found again", "found again"], ["copied on write", "copy-on-write"], ["copy-on-write", "copy-on-write"], ["block tables", "block table"],
                ["swapped out", "swapped out"], ["preempted", "preempted"], ["computed again", "computed again"], ["physical", "physical block"],
                ["logical", "logical block"], ["sequence", "sequence"], ["evicted", "evicted"], ["brought back", "second tier"], ["kept on the host", "second tier"], ["read once", "read once"], ["behind the window", "window"], ["in a table", "block table"], ["shared", "shared"],
                ["drafts", "draft"], ["draft", "draft"], ["taken back", "taken back"], ["cached", "cached"], ["free", "free"], ["blocks", "block"], ["slots", "slot"], ["slot", "slot"]];
const meanings = new Map([...document.querySelectorAll("#glossary dt")].flatMap((word) => word.textContent.split(", ")
  .map((name) => [name, word.nextElementSibling.textContent])));

// A text with each of the words explained where it first stands, if `place` does not have it already.
function showWords(place, text) {
  if (place.text === text) return;
  place.text = text;
  const known = new Set(), spellings = kWords.map(([spelling]) => spelling).join("|");
  const parts = text.split(new RegExp(`\\b(${spellings})\\b`, "i")).map((part, index) => {
    const name = index % 2 ? kWords.find(([spelling]) => spelling === part.toLowerCase())[1] : undefined;
    if (name === undefined || known.has(name)) return part;
    known.add(name);
    return wordFor(part, meanings.get(name));
  });
  place.replaceChildren(...parts);
  const first = place.closest("[data-words]").querySelector(".word");
  if (first) reachBy(first);
  if (explained && !explained.isConnected) explain(null);
}

const percent = (part, whole) => `${Math.round(100 * part / Math.max(whole, 1))} %`;

// The counts are of this pool: a scene makes a new one.
const kMeanings = {
  "tokens a second": "over the last two seconds, of all requests together",
  "running": "requests that have blocks, and get a token in each step",
  "waiting": "requests in the queue, without blocks",
  "slots in use": "slots that hold a token, of all in the pool",
  "preemptions": "times that a running request released its blocks, because too few were left, free or cached",
  "blocks copied": "copy-on-write: a sequence had to write into a block that others share, and got a copy of its own",
  "blocks moved": "swapped out to the host's memory, or back",
  "brought back": "blocks of the second tier that were copied back into the pool, and not computed again",
  "window blocks": "of the layers that see the last tokens only: blocks that a window reaches, of all that these layers have",
  "prompt tokens found cached": "in blocks that were in the pool already, so they were not computed; “again”: by requests that came back from a preemption",
  "drafts accepted": "guesses of the next tokens that became text, of all that were computed",
  "evictions": "cached blocks whose text was given up because a block was needed",
  "tokens written": "in replies"};

function showNumbers(snapshot) {
  const {counters, atStart, sizes} = snapshot, drafts = (counters.drafts ?? 0) - (atStart.drafts ?? 0);
  const numbers = {"tokens a second": speed(), "running": snapshot.numRunning, "waiting": snapshot.numWaiting,
                   "slots in use": percent(counters.used ?? 0, sizes.slots), "preemptions": (counters.preemptions ?? 0) - (atStart.preemptions ?? 0),
                   "blocks copied": (counters.copied ?? 0) - (counters.moved ?? 0), "blocks moved": sizes.host_blocks ? counters.moved ?? 0 : null,
                   "brought back": sizes.tier_blocks ? counters.tier_restored ?? 0 : null,
                   "window blocks": sizes.window_blocks ? `${counters.window_held ?? 0} of ${sizes.window_blocks}` : null,
                   "prompt tokens found cached": (counters.found ?? 0) + (foundAgain(counters) ? ` + ${foundAgain(counters)} again` : ""),
                   "drafts accepted": drafts ? `${(counters.accepted ?? 0) - (atStart.accepted ?? 0)} of ${drafts}` : null,
                   "evictions": counters.evictions ?? 0, "tokens written": (counters.generated ?? 0) - (atStart.generated ?? 0)};
  for (const [name, value] of Object.entries(numbers)) {  // null: there is no such thing here
    const id = "number-" + name.replaceAll(" ", "-");
    if (!$(id)) {
      $("numbers").append(element("div", {}, element("dt", {}, wordFor(name, kMeanings[name])), element("dd", {id})));
      reachBy($("numbers").querySelector(".word"));
    }
    $(id).parentElement.hidden = value === null;
    if (value === null || $(id).textContent === String(value)) continue;
    $(id).textContent = value;
    if (!String(value).endsWith(" again")) continue;
    $(id).textContent = value.slice(0, -5);
    $(id).append(wordFor("again", meanings.get("found again")));
    reachBy($("numbers").querySelector(".word"));
  }
}

// Over the last two seconds, and nothing as soon as nothing is computed.
let progress = [];
function speed() {
  const {latest} = timeline, now = performance.now();
  progress = progress.filter(([time]) => now - time < 2000);
  if (isLost) return "–";
  if (latest.paused) return "paused";
  if (latest.numRunning + latest.numWaiting === 0) return "idle";
  const [first, last] = [progress[0], progress.at(-1)];
  return first && last[0] - first[0] > 100 ? String(Math.round(1000 * (last[1] - first[1]) / (last[0] - first[0]))) : "…";
}

// The last step of the pool that a snapshot is of.
function lastStepOf(index) {
  let last = index;
  while (last + 1 < timeline.snapshots.length && !timeline.snapshots[last + 1].isNewPool) last += 1;
  return timeline.snapshots[last].step;
}

function showState() {
  const {latest, shown} = timeline;
  const isIdle = latest.numRunning + latest.numWaiting === 0;
  const activity = latest.paused ? "paused" : isIdle ? "idle" : "running";
  $("state").textContent = failure ? "the engine has failed" : needsKey ? "waiting for a key" : isLost ? "server lost" :
    latest.draining ? `the server is ending, requests to complete: ${latest.numRunning + latest.numWaiting}` :
    timeline.isLive ? `${activity}, step ${Math.max(0, latest.step)}` :
    `showing step ${Math.max(0, shown.step)} of ${Math.max(0, lastStepOf(timeline.at))} (server ${activity})`;
  document.body.classList.toggle("lost", (isLost && !needsKey) || failure !== "");
  $("pause").disabled = latest.paused || isLost;
  $("run").disabled = !latest.paused || isLost;
  $("step").disabled = isLost;
  $("live").setAttribute("aria-pressed", timeline.isLive);
  $("play").setAttribute("aria-pressed", timeline.isPlaying);
  $("play").textContent = timeline.isPlaying ? "❚❚ Hold" : "▶ Play the recording";
  $("back").disabled = timeline.at === 0 || timeline.snapshots.length < 2;
  $("forward").disabled = timeline.isLive;
  const where = timeline.isLive ? "live" : timeline.isPlaying ? "played" : "held";
  const missed = shown.steps.length > 1 ? ` (with the ${shown.steps.length - 1} before it)` : "";
  const took = shown.steps.length ? `, ${shown.steps.at(-1).milliseconds.toFixed(1)} ms` : "";
  $("moment").textContent = shown.step < 0 ? "no step yet" : `${where}: step ${shown.step}${missed}${took}`;
  const story = storyOf(shown) || [computedIn(shown), readOnce(shown)].filter((part) => part).join(" · ");
  $("story").title = story;
  showWords($("story"), story ? `Step ${shown.step}: ${story}` : "No step yet.");
  showNumbers(shown);
  const hasDrafts = timeline.snapshots.some((snapshot) => snapshot.poolsSeen === shown.poolsSeen && snapshot.happened.drafts.length > 0);
  if ($("draft-legend").hidden === hasDrafts) {
    $("draft-legend").hidden = !hasDrafts;
    drawLegend();
  }
}

// What a step computed in which nothing else happened.
function computedIn({steps}) {
  const sum = (name) => steps.reduce((total, step) => total + step[name], 0), prompt = sum("prompt"), decoded = sum("decoded");
  const tokens = (count, of) => count ? [`${count} token${count === 1 ? "" : "s"} of ${of}`] : [];
  const parts = [...tokens(prompt, "prompts"), ...tokens(decoded, "replies")];
  return parts.length ? `computed ${parts.join(" and ")}` : "";
}

// What the bar under the pool shows, and the same in blocks.
function regionsSentence(snapshot, places) {
  const {regions, refused, reserved, used} = regionsOf(snapshot), {counters} = snapshot;
  if (regions.length + refused.length === 0) return "This bar shows the same requests in one contiguous region each, as long as the longest text that they may become.";
  const named = (ids, many) => ids.length > 3 ? `${ids.length} ${many}` : plural("request", ids);
  const fit = `${regions.length ? named(regions.map((region) => region.id), "requests") : "none"} would fit`;
  const wait = refused.length ? `, ${named(refused, regions.length ? "others" : "requests")} would wait` : "";
  const empty = used ? `; ${percent(reserved - used, reserved)} of the slots reserved would be empty (hatched)` : "";
  const run = snapshot.numRunning === 1 ? "1 request runs" : `${snapshot.numRunning} requests run`;
  let blocks = snapshot.numRunning ? `${run}, ${percent(counters.reserved - counters.used, counters.reserved)} of the slots taken are empty` : "all wait as yet";
  const all = [...places.values()].reduce((sum, list) => sum + list.length, 0);
  if (all > places.size) blocks += `; ${places.size} blocks used, ${all} without sharing`;
  return `In one contiguous region each, ${fit}${wait}${empty}. In blocks, ${blocks}.`;
}

function showSnapshot(snapshot) {
  showChapter();
  views.ended = endedText();
  views.show(snapshot);
  const places = placesOf(snapshot), {sizes} = snapshot;
  let shared = 0;
  for (const list of places.values()) shared += list.length > 1;
  const free = sizes.blocks - places.size - snapshot.cached.size;
  const counts = `${places.size} in tables, ${shared} of them shared, ${snapshot.cached.size} cached, ${Math.max(0, free)} free`;
  showWords($("pool-count"), `${sizes.blocks} blocks of ${sizes.block_size} slots` + (sizes.blocks > kMaxDrawn ? ` (the first ${kMaxDrawn} are drawn)` : ""));
  $("host").hidden = $("host-legend").hidden = sizes.host_blocks === 0;
  $("tier").hidden = !sizes.tier_blocks;
  $("pool").setAttribute("aria-label", `Map of the pool's blocks: ${counts}. Arrow keys move from block to block.`);
  const text = regionsSentence(snapshot, places);
  if (text !== shownRegions) {
    $("regions-text").textContent = shownRegions = text;
    $("regions-text").title = text;
    $("regions").setAttribute("aria-label", `${text} Arrow keys move from region to region.`);
  }
  showState();
  showReplies();
}

function takeRecord(record) {
  traffic.records += 1;
  failure = record.failure ?? "";
  if (failure) {
    complain("the engine has failed: " + failure);
    return showState();
  }
  const snapshot = applyRecord(timeline.latest, record);
  progress.push([performance.now(), snapshot.counters.generated]);
  const story = storyOf(snapshot);
  if (story && snapshot.steps.length) {
    $("log").prepend(element("li", {textContent: `step ${snapshot.step}: ${story}`}));
    while ($("log").children.length > 200) $("log").lastChild.remove();
  }
  if (snapshot.isNewPool && !isSceneComing) beginChapter({name: "New pool"});
  isSceneComing &&= !snapshot.isNewPool;
  timeline.add(snapshot);
  if (record.sizes) showSizes(record.sizes);
  if (!timeline.isLive) showState();
  if (isFirst) playFirstScene();
  isFirst = false;
}

// ---- The connection ----

let lastHeard = performance.now(), stream = null;

async function watch() {
  for (;;) {
    stream = new AbortController();
    try {
      const reply = await ask("/pool/events", undefined, {signal: stream.signal});
      isLost = needsKey = false;
      views.invitation = kInvitation;
      complain("");
      lastHeard = performance.now();
      await readEvents(reply, takeRecord, (count) => {
        lastHeard = performance.now();
        traffic.bytes += count;
      });
      lose("the server has ended");
    } catch (error) {
      if (error.needsKey) {
        await askForKey();
        continue;
      }
      lose(error.name === "TypeError" || error.name === "AbortError" ? "the server does not answer" : error.message);
    }
    await new Promise((resume) => setTimeout(resume, 1000));
  }
}

// Returns when the reader has given a key, right or wrong.
async function askForKey() {
  needsKey = isLost = true;
  views.invitation = key ? "The server does not take this key." : "This server asks for a key.";
  complain(key ? "The server does not take this key." : "");
  $("api-key").focus();
  showState();
  views.invalidate();
  await new Promise((resolve) => { givenKey = resolve; });
}

function lose(reason) {
  needsKey = false;
  if (!isLost || timeline.latest.step < 0) {
    complain(`${new Date().toLocaleTimeString()}: ${reason}. What you see is how it was then. Asking again every second.`);
  }
  isLost = true;
  showState();
}

// A stream can be silent because nothing happens, or because the server is gone.
setInterval(async () => {
  showNumbers(timeline.shown);
  if (isLost || performance.now() - lastHeard < 2500) return;
  lastHeard = performance.now();
  try {
    await fetch("/health", {signal: AbortSignal.timeout(2000)});
  } catch {
    stream.abort();
  }
}, 500);

// ---- Steering ----

// When nobody watches any more, the server undoes it.
const steer = (action, body = {}) => ask("/pool/" + action, {...body, while_watched: true});
const control = (action, body) => attempt(() => steer(action, body));
const stepOnce = () => { timeline.live(); return control("step"); };
$("pause").onclick = () => control("pause");
$("step").onclick = stepOnce;
$("run").onclick = () => { timeline.live(); control("run"); };
$("back").onclick = () => timeline.move(-1);
$("forward").onclick = () => timeline.move(1);
$("play").onclick = () => timeline.isPlaying ? timeline.hold(timeline.at) : timeline.play();
$("live").onclick = () => timeline.live();
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea")) return;
  const action = hasControls && {p: "pause", s: "step", r: "run"}[event.key];
  if (action) $(action).click();
});

let restart = 0;
const sizeOf = (id) => 2 ** $(id).value;
// A reply is as long as the model allows, and the pool.
async function showLimit() {
  const limit = await ask("/v1/models").then((reply) => reply.json()).then(({data}) => data[0].max_model_len).catch(() => "");
  for (const id of ["max-tokens", "chat-tokens"]) $(id).max = limit;
}
function showSizes(sizes) {
  showLimit();
  for (const [id, value] of [["slots", sizes.slots], ["block-size", sizes.block_size], ["budget", sizes.budget]]) {
    $(id).value = Math.round(Math.log2(value));
    $(id + "-value").textContent = value;
  }
  $("swap").checked = sizes.host_blocks > 0;
  for (const button of document.querySelectorAll("[data-needs-drafts]")) button.disabled = !hasControls || sizes.max_drafts === 0;
  for (const button of document.querySelectorAll("[data-needs-tier]")) button.hidden = !sizes.tier_blocks;
  for (const button of document.querySelectorAll("[data-needs-reads-once]")) button.hidden = !sizes.reads_once;
  for (const button of document.querySelectorAll("[data-needs-window]")) button.hidden = !sizes.window || sizes.window > kMaxWindow;
  $("restore").hidden = !hasControls || !sizes.is_changed;
  $("restore").textContent = `Back to ${sizes.slots_at_start} slots`;
}
for (const id of ["slots", "block-size", "budget", "swap"]) {
  $(id).oninput = () => {
    if (id !== "swap") $(id + "-value").textContent = sizeOf(id);
    clearTimeout(restart);  // one for all moves of a slider
    restart = setTimeout(() => {
      control("restart", {slots: sizeOf("slots"), block_size: sizeOf("block-size"), budget: sizeOf("budget"), swap: $("swap").checked});
    }, 600);
  };
}

$("key").onsubmit = (event) => {
  event.preventDefault();
  key = $("api-key").value;
  sessionStorage.setItem("key", key);
  $("key").hidden = true;
  complain("");
  givenKey?.();
};

// ---- Tabs ----

const tabs = [...document.querySelectorAll("[role=tab]")].filter((tab) => hasControls || !["tab-hand", "tab-sizes"].includes(tab.id));
for (const tab of document.querySelectorAll("[role=tab]")) tab.hidden = !tabs.includes(tab);
if (!hasChat) {  // it stays, so that a reader learns why there is none
  $("tab-chat").setAttribute("aria-disabled", true);
  $("no-chat").hidden = false;
  $("turns").hidden = $("say").hidden = true;
}
function selectTab(selected) {
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", tab === selected);
    tab.tabIndex = tab === selected ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = tab !== selected;
  }
}
for (const tab of tabs) {
  tab.onclick = () => selectTab(tab);
  tab.onkeydown = (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    const next = tabs[(tabs.indexOf(tab) + by + tabs.length) % tabs.length];
    selectTab(next);
    next.focus();
  };
}

// ---- Prompts ----

function tagOf(id) {
  const tag = element("span", {className: "tag", textContent: id});
  tag.dataset.owner = id;
  tag.style.setProperty("--owner", colorOf(themeOf(document.body), id));
  return tag;
}

// Replies of the pool that is shown, each as long as it was at the step that is shown: in another pool, the same
// numbers and colours are other requests'. Turns of a conversation stay: each message sends them all.
let replies = [];  // {item, texts: [{element, full}], isSearch, isTurn, chapter, id, pool, number}; the last three as writtenAt() takes them
let areCut = false, repliesPool = 0;

function addReply(item, elements, {isSearch = false, isTurn = false} = {}) {
  const {poolsSeen, number} = timeline.latest;
  const reply = {item, isSearch, isTurn, texts: elements.map((place) => ({element: place, full: ""})), chapter: chapters.at(-1).name, pool: poolsSeen, number};
  replies.push(reply);
  return reply;
}
function extendReply(reply, index, piece) {
  reply.texts[index].full += piece;
  if (areCut) showReply(reply); else reply.texts[index].element.append(plain(piece));
}
function showReply(reply) {
  const {isLive, shown} = timeline, isPast = shown.poolsSeen > reply.pool;
  const written = isPast ? "past" : isLive ? "all" : reply.id === undefined ? "none" : writtenAt(timeline.snapshots, timeline.at, reply);
  reply.item.hidden = written === "none" || (isPast && !reply.isTurn);
  reply.item.classList.toggle("partly", Array.isArray(written));
  if (reply.isTurn) for (const tag of reply.item.querySelectorAll(".tag")) tag.hidden = isPast;
  for (const {element, full} of reply.texts) {
    let length = full.length;
    if (Array.isArray(written)) {  // a search has its texts at its end
      length = reply.isSearch ? 0 : Math.max(...written.map((text) => lengthOf(text, full)));
    }
    const shown = plain(length < 0 ? full : full.slice(0, length));  // none of the texts: this one had ended
    if (element.textContent !== shown) element.textContent = shown;
  }
}
function showReplies() {
  const {isLive, shown} = timeline;
  if (!isLive || areCut || repliesPool !== shown.poolsSeen) {
    areCut = !isLive;
    repliesPool = shown.poolsSeen;
    replies.forEach(showReply);
  }
  showRepliesTitle();
}
function showRepliesTitle() {
  const {isLive, shown} = timeline, listed = replies.filter(({item, isTurn}) => item.isConnected && !isTurn), here = listed.filter(({item}) => !item.hidden);
  const names = [...new Set(here.map(({chapter}) => chapter))].join("”, “");
  const parts = here.length ? [`Replies of “${names}”${isLive ? "" : ", as far as they were written at the step shown"}.`] : listed.length ? ["No reply yet at the step shown."] : [];
  if (listed.some(({pool}) => pool < shown.poolsSeen)) parts.push("Those of earlier pools are shown with their steps.");
  $("replies-title").textContent = parts.join(" ");
  $("replies-title").hidden = parts.length === 0;
}

// How much was written, and how fast. pace: {written, first, sent, begin, last}: tokens, and how many of them the first event
// had; when the prompt was sent, and when the first and the last token came.
const newPace = () => ({written: 0, sent: performance.now()});
function paceOf({written, first, sent, begin, last}) {
  const text = `${written} token${written === 1 ? "" : "s"}`;
  if (written <= 4) return text;
  // A short text may come all at once: then it is measured from when it was asked for.
  const perSecond = 1000 * (last - begin > kLeastMilliseconds ? (written - first) / (last - begin) : written / (last - sent));
  return `${text}, ${Number(perSecond.toPrecision(2))} tokens/s`;
}
const kLeastMilliseconds = 20;
function count(pace, written) {
  if (written === pace.written) return;
  pace.written = written;
  pace.last = performance.now();
  pace.begin ??= pace.last;
  pace.first ??= written;
}
const kStreamed = {stream: true, stream_options: {include_usage: true, continuous_usage_stats: true}};

// What is folded away in both forms: fields of the API, each with the server's default in it as long as it is empty.
const kMore = [["top_k", "Top-k (0, -1: all)"], ["top_p", "Top-p"], ["min_p", "Min-p"], ["repetition_penalty", "Repetition penalty"],
               ["presence_penalty", "Presence penalty"], ["frequency_penalty", "Frequency penalty"]];
function makeMore(place, prefix) {
  const fields = kMore.map(([name, label]) => element("label", {}, label, element("input", {id: `${prefix}-${name}`, type: "number", step: "any", placeholder: defaults[name] ?? ""})));
  place.append(element("p", {className: "dim", textContent: "Where a field is empty, the server's default counts, which stands in it."}),
               element("fieldset", {id: `${prefix}-sampling`}, element("div", {className: "row"}, ...fields)),
               element("label", {}, "Stop texts, one on each line", element("textarea", {id: `${prefix}-stop`, rows: 2, placeholder: "none"})));
}
function moreOptions(prefix) {
  const options = {}, stop = $(`${prefix}-stop`).value.split("\n").filter((line) => line !== "");
  for (const [name] of $(`${prefix}-sampling`).disabled ? [] : kMore) {
    if ($(`${prefix}-${name}`).value !== "") options[name] = Number($(`${prefix}-${name}`).value);
  }
  if (stop.length) options.stop = stop;
  return options;
}
makeMore($("more-ask"), "ask");
makeMore($("more-chat"), "chat");
$("max-tokens").title = "how many a reply may have; empty: the server's default";
$("temperature").placeholder = defaults.temperature ?? "default";
$("temperature").title = `the server's default is ${defaults.temperature}`;
$("chat-temperature").placeholder = defaults.temperature ?? "default";

// Requests for replies that have not ended.
const running = new Set();
function stopRunning() {
  for (const abort of running) abort.abort();
}
$("stop").onclick = stopRunning;
$("ask").addEventListener("keydown", (event) => { if (event.key === "Escape") stopRunning(); });

// Sends all prompts in one request, so that they are queued together, and shows the texts as they come. Returns when
// the server has them or, with firstOnly, when the first token is there.
async function post(prompts, {firstOnly = false, ...options}) {
  const body = {prompt: prompts, ...kStreamed, ...options}, samples = options.n ?? 1;
  const abort = new AbortController(), list = $("replies");
  const items = prompts.map((prompt) => {
    const item = element("li", {}, element("span", {className: "dim", textContent: plain(prompt) + " "}));
    const texts = Array.from({length: samples}, () => element("div", {className: "text", dir: "auto"}));
    item.append(...texts);
    item.reply = addReply(item, texts, {isSearch: options.use_beam_search});
    item.pace = newPace();
    item.counts = Array(samples).fill(0);  // tokens of each text
    return item;
  });
  const stop = element("button", {type: "button", textContent: "Stop", onclick: () => abort.abort()});
  items[0].firstChild.after(stop);
  list.prepend(...items);
  while (list.children.length > 300) list.lastChild.remove();
  replies = replies.filter((reply) => reply.item.isConnected);
  showRepliesTitle();
  running.add(abort);
  $("stop").disabled = false;
  const end = (error) => {
    const reason = error && (abort.signal.aborted ? "stopped" : plain(error.message));
    if (error) for (const item of items) item.append(element("p", {className: "dim", textContent: reason}));
    for (const item of error ? [] : items) item.append(element("p", {className: "dim small pace", textContent: paceOf(item.pace)}));
    stop.remove();
    running.delete(abort);
    $("stop").disabled = running.size === 0;
  };
  try {
    const reply = await ask("/v1/completions", body, {signal: abort.signal});
    reply.headers.get("X-Request-Ids").split(",").forEach((id, index) => {
      items[index].prepend(tagOf(Number(id)));
      items[index].reply.id = Number(id);
    });
    await new Promise((begun) => {
      readEvents(reply, (event) => {
        if (event.error) throw new Error(event.error.message);
        for (const choice of event.choices) {
          const item = items[Math.floor(choice.index / samples)];
          item.counts[choice.index % samples] = event.usage.completion_tokens;
          count(item.pace, item.counts.reduce((sum, tokens) => sum + tokens));
          extendReply(item.reply, choice.index % samples, choice.text);
        }
        begun();
      }).then(() => end(), end).finally(begun);
      if (!firstOnly) begun();
    });
  } catch (error) {
    end(error);
    if (error.isRefusal) {  // it is said once, and there is no reply
      for (const item of items) item.remove();
      replies = replies.filter((reply) => reply.item.isConnected);
      showRepliesTitle();
    }
    throw error;
  }
}

$("beams").onchange = () => { $("temperature").disabled = $("ask-sampling").disabled = $("beams").checked; };
$("send").onsubmit = (event) => {
  event.preventDefault();
  const prompts = $("prompts").value.split("\n").filter((line) => line.trim() !== "").map((line) => $("prefix").value + line);
  if (prompts.length === 0) {
    complain("There is no prompt: write one, in a line of its own.");
    $("prompts").setAttribute("aria-invalid", true);
    return $("prompts").focus();
  }
  // An empty field has the server's value.
  const options = moreOptions("ask"), fields = {max_tokens: "max-tokens", n: "samples", seed: "seed", ...($("beams").checked ? {} : {temperature: "temperature"})};
  for (const [name, id] of Object.entries(fields)) if ($(id).value !== "") options[name] = Number($(id).value);
  if ($("beams").checked) options.use_beam_search = true;
  timeline.live();
  beginChapter({name: "What you sent", text: kOwn});
  attempt(() => post(prompts, options).catch((error) => {
    complain(error.message);
    $(fields[error.field] ?? `ask-${error.field}`)?.setAttribute("aria-invalid", true);
    if (!error.isRefusal) throw error;
  }));
  $("ask").scrollTop = $("ask").scrollHeight;  // its reply is there
};
$("prompts").onkeydown = (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("send").requestSubmit();
};

// ---- Scenes ----

async function until(condition) {
  for (let waited = 0; waited < 100 && !condition(); ++waited) await new Promise((resume) => setTimeout(resume, 20));
}

async function runScene(scene, button) {
  await attempt(async () => {
    timeline.live();
    const before = timeline.latest.sizes.pool;
    isSceneComing = true;
    try {
      await steer("restart", scene.sizes);
      await steer("run");
      await until(() => timeline.latest.sizes.pool !== before);  // so that what is sent is known to be in the new one
    } catch (error) {
      isSceneComing = false;
      throw error;
    }
    beginChapter({name: scene.name, scene, button});
    selectTab($("tab-ask"));  // its replies are there
    playAfter(timeline.latest.number);
    await scene.send(post);
  });
}

// What the strip is of, in order: scenes, and what the reader has sent. The caption goes with the step that is shown.
const chapters = [{number: 0, name: ""}];  // {number: of the first snapshot, name, scene?, button?, text?}
let shownChapter = null, isSceneComing = false;
const chapterOf = (number) => chapters.findLast((known) => known.number <= number) ?? chapters[0];
timeline.partOf = chapterOf;
function beginChapter(chapter) {
  chapters.push({number: timeline.latest.number + 1, ...chapter});
  showChapter();
}
function showChapter() {
  const chapter = chapterOf(timeline.isLive ? Infinity : timeline.shown.number);
  if (chapter === shownChapter) return;
  shownChapter = chapter;
  for (const other of $("scenes").children) other.removeAttribute("aria-pressed");
  chapter.button?.setAttribute("aria-pressed", "true");
  if (chapter.button) $("scenes").scrollLeft = chapter.button.offsetLeft - $("scenes").offsetLeft - 8;
  const {scene} = chapter;
  $("watch-name").textContent = scene ? `${scene.name}. ` : "";
  showWords($("watch-text"), scene ? scene.watch : chapter.text ?? kStart);
  $("watch").title = $("watch").textContent;
  $("show-moment").hidden = !scene;
}
// What ran is over, perhaps before it was seen: where it can be seen.
function endedText() {
  const {isLive, snapshots} = timeline, chapter = chapters.at(-1);
  const count = chapter.name ? snapshots.reduce((sum, {number, steps}) => sum + (number >= chapter.number ? steps.length : 0), 0) : 0;
  return isLive && count ? `Done: ${count} step${count === 1 ? "" : "s"}. Drag in the strip below, or press “back”, to see ${count === 1 ? "it" : "them"}.` : "";
}
// The index of the step that has what the chapter's scene is about, or -1.
function momentIn(chapter) {
  const end = chapters[chapters.indexOf(chapter) + 1]?.number ?? Infinity;
  const begin = timeline.snapshots.findIndex((snapshot) => snapshot.number >= chapter.number);
  const after = timeline.snapshots.findIndex((snapshot) => snapshot.number >= end);
  return begin < 0 ? -1 : momentOf(chapter.scene, timeline.snapshots, begin, after < 0 ? timeline.snapshots.length : after);
}
function showMoment(chapter) {
  const index = momentIn(chapter);
  if (index >= 0) timeline.hold(index);
  return index >= 0;
}
$("show-moment").onclick = () => {
  if (!showMoment(shownChapter)) complain("that step has not been computed yet, or is no longer kept");
};
function playAfter(number) {
  const chapter = chapters.at(-1);
  const add = timeline.add.bind(timeline);
  timeline.add = (snapshot) => {
    add(snapshot);
    const index = timeline.snapshots.findIndex((known) => known.number > number && known.steps.length && known.requests.size);
    if (index < 0) return;
    delete timeline.add;
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) timeline.hold(index);
    else timeline.play(index, () => showMoment(chapter) || timeline.live(), (snapshot) => chapterOf(snapshot.number) === chapter);
  };
}
// On a first visit to a server that has computed nothing yet, the page shows what it is for. The pool is then made again as
// it was: what else is sent to the server is to find it so. A model with a chat is for that.
async function playFirstScene() {
  const {latest} = timeline;
  if (!hasControls || hasChat || localStorage.getItem("visited") || latest.paused || latest.counters.generated > 0 || latest.requests.size > 0) return;
  localStorage.setItem("visited", "1");
  await runScene(kScenes[0], $("scenes").firstChild);
  const {pool} = timeline.latest.sizes, isOver = () => running.size === 0 && timeline.latest.requests.size === 0;
  while (!isOver()) await new Promise((resume) => setTimeout(resume, 50));
  if (timeline.latest.sizes.pool === pool) restorePool();
}
const restorePool = () => control("restart", {as_started: true});
makeScenes($("scenes"), hasControls, runScene);
$("scenes").append(element("button", {id: "restore", hidden: true, onclick: () => {
  timeline.live();
  restorePool();
}}));
const kOwn = "What you have sent. The prompts are queued together; each step computes a part of them and a token more for each reply.";
const kInvitation = hasControls ? "Nothing runs. Choose a scene above, or send a prompt." : "Nothing runs. Send a prompt.";
const kStart = "To continue a text, the model keeps notes (keys and values) on every token. One slot holds one token's notes; a block is a few slots. " + (hasControls
  ? "Choose a scene: it makes a small pool, sends its requests, and shows what happened step by step. That ends what runs."
  : "What is sent to this server is drawn. The scenes need a small pool of their own, and are off: --pool-controls lets them have it.");
$("watch-only").hidden = hasControls;
showChapter();

// ---- Chat ----

// Each message sends the whole conversation; the server keeps none of it, except for the blocks that are still in the
// pool.
let conversation = [];  // {role, content}, by turns
let talk = null;        // what stops the reply that is being written; null: none is
const kTalk = "Each message sends the whole conversation again, as one prompt. What of it is still in the pool is found and not computed.";

$("forget").onclick = () => {
  talk?.abort();
  talk = null;
  conversation = [];
  $("turns").replaceChildren();
  showTalk();
};
$("message").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("say").requestSubmit();  // during a reply, what is typed waits
};
$("chat").addEventListener("keydown", (event) => { if (event.key === "Escape") talk?.abort(); });
$("stop-reply").onclick = () => talk?.abort();
$("again").onclick = () => {
  conversation.pop();
  const {content} = conversation.pop();
  // What is no part of the conversation goes with what came before it.
  for (let count = 0; count < 2; $("turns").lastChild.remove()) count += $("turns").lastChild.dataset.dropped === undefined ? 1 : 0;
  sayTo(content);
};
$("say").onsubmit = (event) => {
  event.preventDefault();
  const content = $("message").value.trim();
  if (content === "" || talk) return;
  $("message").value = "";
  sayTo(content);
};

function showTalk() {
  $("say-it").disabled = talk !== null;
  $("stop-reply").disabled = talk === null;
  $("again").disabled = talk !== null || conversation.length === 0;
}

// A value that is not given is the model file's recommendation, or the server's.
function chatOptions() {
  const options = {...kStreamed, ...moreOptions("chat")};
  for (const [name, id] of [["temperature", "chat-temperature"], ["max_tokens", "chat-tokens"], ["seed", "chat-seed"]]) {
    if ($(id).value !== "") options[name] = Number($(id).value);
  }
  return options;
}

// Under a reply: what its prompt cost, and how fast it was.
function talkNote({usage, reason, pace}) {
  const found = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = usage && pace.begin ? [`prompt: ${usage.prompt_tokens} tokens, ${found} of them found in the pool`, `reply: ${paceOf(pace)}`] : [];
  if (reason) parts.push(reason);
  return element("p", {className: "dim small", textContent: plain(parts.join("; "))});
}

async function sayTo(content) {
  const mine = talk = new AbortController(), messages = [...conversation, {role: "user", content}], system = $("system").value.trim();
  const answer = element("div", {className: "text", dir: "auto"}), said = element("li", {className: "user text", textContent: plain(content), dir: "auto"});
  const item = element("li", {ariaBusy: "true"}, answer), turns = $("turns");
  timeline.live();
  beginChapter({name: "Chat", text: kTalk});
  turns.append(said, item);
  turns.scrollTop = turns.scrollHeight;
  showTalk();
  let text = "", end = {pace: newPace()};
  replies = replies.filter((reply) => reply.item.isConnected);
  const shown = addReply(item, [answer], {isTurn: true});
  const body = {messages: system ? [{role: "system", content: system}, ...messages] : messages, ...chatOptions()};
  try {
    complain("");
    const reply = await ask("/v1/chat/completions", body, {signal: mine.signal});
    shown.id = Number(reply.headers.get("X-Request-Ids"));
    answer.before(tagOf(shown.id));
    await readEvents(reply, (part) => {
      if (part.error) throw new Error(part.error.message);
      if (part.choices.length === 0) end.usage = part.usage;
      else count(end.pace, part.usage.completion_tokens);
      const piece = part.choices[0]?.delta.content ?? "";
      if (part.choices[0]?.finish_reason === "length") end.reason = body.max_tokens ? `cut off after ${body.max_tokens} tokens` : "cut off: there is no room for more";
      if (piece === "") return;
      text += piece;
      const isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;  // else the reader looks at what was before
      extendReply(shown, 0, piece);
      if (isAtEnd) turns.scrollTop = turns.scrollHeight;
    });
  } catch (error) {
    end.reason = mine.signal.aborted ? "stopped" : error.message;
    if (!mine.signal.aborted) complain(error.message);
  }
  if (!item.isConnected) return;  // a new conversation has begun
  talk = null;
  // A reply that was stopped is what was said; one that never began was not.
  if (text !== "") conversation = [...messages, {role: "assistant", content: text}];
  else {
    end.reason = `${end.reason ?? "nothing"}; not a part of the conversation`;
    said.dataset.dropped = item.dataset.dropped = "";
    if ($("message").value === "") $("message").value = content;
  }
  item.ariaBusy = "false";
  item.append(talkNote(end));
  turns.scrollTop = turns.scrollHeight;
  showTalk();
}
if (hasChat) selectTab($("tab-chat"));
showTalk();

// ---- By hand ----

async function demo(body) {
  const state = await (await ask("/pool/demo", body)).json(), {blocks, sequences} = state;
  const snapshot = {...emptySnapshot(), sizes: {blocks: blocks.total, block_size: blocks.block_size, slots: blocks.total * blocks.block_size, host_blocks: 0},
                    running: sequences.map((sequence) => sequence.id), cached: new Map(blocks.cached.map((block) => [block, []]))};
  for (const {id, length, table} of sequences) {
    snapshot.requests.set(id, {id, sequences: new Map([[id, {id, length, blocks: table, texts: []}]])});
  }
  const places = placesOf(snapshot), shared = [...places.values()].filter((list) => list.length > 1).length;
  $("demo-pool").setAttribute("aria-label", `${places.size} blocks in tables, ${shared} of them shared, ${blocks.cached.length} cached, ` +
    `${blocks.total - places.size - blocks.cached.length} free`);
  const {context, width, height} = sizedContext($("demo-pool"));
  drawPool(context, snapshot, poolLayout(blocks.total, width, height), views.theme);
  $("demo-tables").replaceChildren(...sequences.map((sequence) => element("tr", {},
    element("th", {}, Object.assign(tagOf(sequence.id), {textContent: sequence.name})), element("td", {textContent: `${sequence.length} token${sequence.length === 1 ? "" : "s"}`}),
    element("td", {textContent: `blocks ${sequence.table.join(", ")}`}))));
  if (body.line) {
    for (const line of `> ${body.line}\n${plain(state.output)}`.trimEnd().split("\n")) $("output").append(element("span", {textContent: line}));
    $("output").scrollTop = $("output").scrollHeight;
  }
}

$("demo").onsubmit = (event) => {
  event.preventDefault();
  const line = $("line").value;
  if (/^\s*(quit|exit)\s*$/.test(line)) $("output").append(element("span", {textContent: `> ${line.trim()}: there is nothing to leave here; “empty the pool” begins anew`}));
  else attempt(() => demo({line}));
  $("line").value = "";
};
for (const line of ["new A 6, append A 6", "fork A B", "write B", "free A", "free B", "prompt C once_upon_a_time",
                    "prompt D once_upon_a_hill", "free C", "free D", "show", "help"]) {
  $("chips").append(element("button", {type: "button", textContent: line, onclick: () => attempt(async () => {
    for (const one of line.split(", ")) await demo({line: one});
  })}));
}
$("chips").append(element("button", {type: "button", textContent: "empty the pool", onclick: () => attempt(() => demo({blocks: 8, block_size: 4}))}));
$("tab-hand").addEventListener("click", () => attempt(() => demo({line: ""})));

// ---- The legend, drawn by what draws the blocks ----

function drawLegend() {
  const states = {owned: {kind: "owned", owner: 7, filled: 3, slots: 4, tables: 1}, shared: {kind: "owned", owner: 7, filled: 4, slots: 4, tables: 2},
                  cached: {kind: "cached"}, free: {kind: "free"}, host: {kind: "host", owner: 7}, reused: {kind: "free"}};
  for (const canvas of document.querySelectorAll("[data-legend]")) {
    const {context, width, height} = sizedContext(canvas);
    context.clearRect(0, 0, width, height);
    const {legend} = canvas.dataset;
    if (legend === "accepted" || legend === "takenBack") {  // marks of slots
      context.fillStyle = legend === "accepted" ? colorOf(views.theme, 7) : views.theme.card;
      context.fillRect(0, 0, width, height);
      drawDraft(context, 0, 0, width, height, legend === "accepted", views.theme);
      continue;
    }
    context.scale(width / 44, height / 44);  // as it looks in a small pool
    drawBlock(context, 2, 2, 40, 40, states[legend], views.theme);
    if (legend === "reused") drawReused(context, 2, 2, 40, views.theme);
  }
}
drawLegend();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  views.theme = themeOf(document.body);
  drawLegend();
  for (const tag of document.querySelectorAll(".tag")) tag.style.setProperty("--owner", colorOf(views.theme, Number(tag.dataset.owner)));
});
$("help").onclick = () => {
  $("glossary").showModal();
  $("glossary").scrollTop = 0;
};
showWords($("tables-words"), $("tables-words").textContent);
for (const item of document.querySelectorAll(".legend li > span, #draft-legend > span")) showWords(item, item.textContent);
views.point(null, "pool", false);
watch();
