// What the pages do besides being read: the hunks beside the text follow it, terms are explained, a search, a switch for the
// colours, buttons that copy. Without it, everything is there to be read.
"use strict";

const base = document.body.dataset.base;
const find = (selector, inside = document) => inside.querySelector(selector);
const findAll = (selector, inside = document) => [...inside.querySelectorAll(selector)];

// The file system's pages have no storage in some browsers.
function keep(name, value) {
  try { localStorage.setItem(name, value); } catch { /* for this page alone */ }
}

// The switch: as the system, light, dark.
const themes = ["auto", "light", "dark"];

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "auto";
  find("#theme span").textContent = theme[0].toUpperCase() + theme.slice(1);
  find("#theme").setAttribute("aria-label", `Colours: ${theme}`);
}

find("#theme").addEventListener("click", () => {
  const theme = themes[(themes.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % themes.length];
  if (theme === "auto") {
    delete document.documentElement.dataset.theme;
  } else {
    document.documentElement.dataset.theme = theme;
  }
  keep("theme", theme === "auto" ? "" : theme);
  showTheme();
});
showTheme();

// Buttons that copy.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest(".copy");
  if (!button) return;
  const done = await copy(find("code", button.parentElement).textContent);
  button.textContent = done ? "Copied" : "Not copied";
  find("#said").textContent = button.textContent;
  setTimeout(() => { button.textContent = "Copy"; find("#said").textContent = ""; }, 1600);
});

// The hunks of the paragraph that is being read stand beside it; where there is no room, they are closed, below it.
const isWide = matchMedia("(min-width: 1180px)");
const walks = findAll(".walk").map((walk) => ({walk, notes: findAll(".note", walk), active: null}));

function activate(state, note) {
  if (state.active === note) return;
  state.active?.classList.remove("active");
  state.active?.nextElementSibling.classList.remove("active");
  state.active = note;
  note.classList.add("active");
  note.nextElementSibling.classList.add("active");
  note.nextElementSibling.scrollTop = 0;
}

function follow() {
  const line = innerHeight * 0.38;
  for (const state of walks) {
    if (state.notes.length === 0) continue;
    const above = state.notes.filter((note) => note.getBoundingClientRect().top <= line);
    activate(state, above.at(-1) ?? state.notes[0]);
  }
}

function openHunks() {
  for (const hunk of findAll(".hunks .hunk")) hunk.open = isWide.matches;
  for (const hunks of findAll(".hunks")) hunks.tabIndex = isWide.matches ? 0 : -1;
  follow();
}

// A paragraph that is chosen, by a click, the keyboard or a link to its heading, stays so until the page is scrolled by a hand's breadth from where
// it has come to rest: a link's own scrolling, which may take a while, chooses nothing.
const kReleaseDistance = 60;
const kRestMilliseconds = 150;
let chosen = null;  // {state, note, at: where the page rested, null while it moves}
let restTimer = 0;

function choose(state, note) {
  if (!isWide.matches) return;
  activate(state, note);
  chosen = {state, note, at: null};
  waitForRest();
}

function waitForRest() {
  clearTimeout(restTimer);
  restTimer = setTimeout(() => { if (chosen && chosen.at === null) chosen.at = scrollY; }, kRestMilliseconds);
}

function followUnlessChosen() {
  if (!chosen) {
    follow();
  } else if (chosen.at === null) {
    waitForRest();
  } else if (Math.abs(scrollY - chosen.at) > kReleaseDistance) {
    chosen = null;
    follow();
  }
}

for (const state of walks) {
  for (const note of state.notes) {
    note.addEventListener("click", () => choose(state, note));
    note.addEventListener("focusin", () => choose(state, note));
  }
}
isWide.addEventListener("change", openHunks);
openHunks();

// Where in the page one is.
const links = findAll(".contents a");
const headings = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1))));

function showPlace() {
  let at = -1;
  headings.forEach((heading, index) => { if (heading && heading.getBoundingClientRect().top < innerHeight * 0.3) at = index; });
  for (const item of findAll(".contents > nav > ol > li")) item.classList.toggle("open", at >= 0 && item.contains(links[at]));
  links.forEach((link, index) => {
    if (index === at) link.setAttribute("aria-current", "location"); else link.removeAttribute("aria-current");
  });
}

let isAsked = false;
addEventListener("scroll", () => {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    followUnlessChosen();
    showPlace();
    hideMeaning();
  });
}, {passive: true});
addEventListener("resize", follow);
if (matchMedia("(max-width: 1020px)").matches) for (const contents of findAll(".contents")) contents.open = false;
showPlace();

// On paper everything is open.
let closed = [];
addEventListener("beforeprint", () => {
  closed = findAll("details:not([open])");
  for (const details of closed) details.open = true;
});
addEventListener("afterprint", () => { for (const details of closed) details.open = false; });

// A link into a part that is closed opens it.
function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let element = target; element; element = element.parentElement) if (element.tagName === "DETAILS") element.open = true;
  target.scrollIntoView();
  // The first paragraph of a part, or of a section in it, is what the link is about, however short it is.
  const isFrom = (note) => note === target || note.contains(target) || target.compareDocumentPosition(note) & Node.DOCUMENT_POSITION_FOLLOWING;
  const part = target.closest("section");
  for (const state of walks) {
    if (!part?.contains(state.walk)) continue;
    const note = state.notes.find(isFrom);
    if (note) choose(state, note);
  }
}
addEventListener("hashchange", openTarget);
document.addEventListener("click", (event) => {  // to where one has been before: no hashchange
  const link = event.target.closest("a");
  if (link && link.hash && link.href === location.href) setTimeout(openTarget);
});
openTarget();

// Terms: what they mean, by pointer, touch and keyboard.
const meaning = find("#meaning");
let termShown = null;
let hideTimer = 0;

function showMeaning(term) {
  const [stage, text] = globalThis.siteTerms?.[term.dataset.term] ?? [];
  if (!text) return;
  hideMeaning();
  clearTimeout(hideTimer);
  const name = document.createElement("b");
  name.textContent = term.dataset.term;
  const link = document.createElement("a");
  link.href = term.href;
  link.tabIndex = -1;
  link.textContent = `Glossary, stage ${stage}`;
  meaning.replaceChildren(name, text, document.createElement("br"), link);
  meaning.hidden = false;
  const place = term.getClientRects()[0];
  const left = Math.max(16, Math.min(place.left, document.documentElement.clientWidth - meaning.offsetWidth - 16));
  const below = place.bottom + meaning.offsetHeight + 12 < innerHeight;
  meaning.style.left = `${left + scrollX}px`;
  meaning.style.top = `${(below ? place.bottom + 6 : place.top - meaning.offsetHeight - 6) + scrollY}px`;
  term.setAttribute("aria-describedby", "meaning");
  termShown = term;
}

function hideMeaning() {
  termShown?.removeAttribute("aria-describedby");
  termShown = null;
  meaning.hidden = true;
}

const hideSoon = () => { clearTimeout(hideTimer); hideTimer = setTimeout(hideMeaning, 250); };
for (const term of findAll(".term")) {
  let isTouch = false;
  term.addEventListener("pointerdown", (event) => { isTouch = event.pointerType === "touch"; });
  term.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") showMeaning(term); });
  term.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hideSoon(); });
  term.addEventListener("focus", () => { if (!isTouch) showMeaning(term); });
  term.addEventListener("blur", hideSoon);
  term.addEventListener("click", (event) => {
    if (!isTouch) return;
    event.preventDefault();
    isTouch = false;
    if (termShown === term) hideMeaning(); else showMeaning(term);
  });
}
meaning.addEventListener("pointerenter", () => clearTimeout(hideTimer));
meaning.addEventListener("pointerleave", hideSoon);
document.addEventListener("pointerdown", (event) => { if (termShown && !event.target.closest(".term, #meaning")) hideMeaning(); });

// The search. Its index is a script, because pages on a disk cannot fetch.
const dialog = find("#search");
const input = find("#search-text");
const maxResults = 40;
let isLoading = false;

function loadIndex() {
  if (isLoading) return;
  isLoading = true;
  const script = document.createElement("script");
  script.src = base + "assets/search.js";
  script.onload = search;
  document.head.append(script);
}

function openSearch() {
  if (dialog.open) return;
  loadIndex();
  dialog.showModal();
  input.focus();
  input.select();
}

// How well a section fits: a word in its heading counts more than one in its text; each word has to be in one of them.
function rank(section, words) {
  const [page, , heading, text] = section;
  const [head, body] = [heading.toLowerCase(), text.toLowerCase()];
  let sum = 0;
  for (const word of words) {
    const inHead = head.includes(word);
    const at = body.indexOf(word);
    if (!inHead && at < 0) return 0;
    sum += (inHead ? 20 : 0) + (at < 0 ? 0 : 1 + Math.min(8, body.split(word).length - 1));
    if (new RegExp(`(^|\\W)${word.replace(/\W/g, "\\$&")}`).test(inHead ? head : body)) sum += 4;
  }
  return page.startsWith("code/") ? sum * 0.4 : sum;
}

function marked(text, words) {
  const parts = document.createDocumentFragment();
  const pattern = new RegExp(words.map((word) => word.replace(/[^\w\s]/g, "\\$&")).join("|"), "gi");
  let position = 0;
  for (const match of text.matchAll(pattern)) {
    const mark = document.createElement("mark");
    mark.textContent = match[0];
    parts.append(text.slice(position, match.index), mark);
    position = match.index + match[0].length;
  }
  parts.append(text.slice(position));
  return parts;
}

function search() {
  const index = globalThis.siteIndex;
  const words = input.value.toLowerCase().split(/\s+/).filter((word) => word !== "");
  const results = find("#search-results");
  results.replaceChildren();
  find("#search-count").textContent = index ? "" : "Loading the index…";
  if (!index || words.join("").length < 2) return;
  const found = index.sections.map((section) => [rank(section, words), section]).filter(([points]) => points > 0)
      .sort((one, other) => other[0] - one[0]);
  find("#search-count").textContent = found.length === 0 ? "Nothing is found." : `${found.length} ${found.length === 1 ? "place" : "places"}` +
      (found.length > maxResults ? `, the best ${maxResults}:` : "");
  for (const [, [page, anchor, heading, text]] of found.slice(0, maxResults)) {
    const link = document.createElement("a");
    link.href = base + page + (anchor ? "#" + anchor : "");
    const name = document.createElement("b");
    name.append(marked(heading, words));
    // From some words before the first that was searched for, or from the beginning if only the heading has it.
    const places = words.map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 60);
    const at = places.length > 0 ? text.indexOf(" ", Math.min(...places) - 60) + 1 : 0;
    const end = text.length > at + 180 ? text.lastIndexOf(" ", at + 180) : text.length;
    const where = document.createElement("small");
    where.textContent = index.pages[page] ?? "Code";
    const excerpt = document.createElement("small");
    excerpt.append(at > 0 ? "… " : "", marked(text.slice(at, end), words), end < text.length ? " …" : "");
    link.append(name, where, text ? excerpt : "");
    const item = document.createElement("li");
    item.append(link);
    results.append(item);
  }
}

find("#search-open").addEventListener("click", openSearch);
input.addEventListener("input", search);
find("#search form").addEventListener("submit", (event) => {
  const first = find("#search-results a");
  if (event.submitter === null || !first || document.activeElement !== input) return;
});
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  const first = find("#search-results a");
  if (first) { dialog.close(); location.href = first.href; }
});
find("#search-results").addEventListener("click", (event) => { if (event.target.closest("a")) dialog.close(); });
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideMeaning();
  const isTyping = event.target.closest?.("input, textarea, select, [contenteditable]");
  if ((event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey) || (event.key === "k" && (event.ctrlKey || event.metaKey))) {
    event.preventDefault();
    openSearch();
  }
});
