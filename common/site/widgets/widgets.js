// The widgets of the course's site: <div class="widget" data-widget="block-table"></div> becomes a scene of a lesson, which
// the reader goes through step by step, back and forth, or leaves for commands of his own. What is shown are states of
// the stage's own code (common/app/scene.h): compiled to WebAssembly, where the site was built with Emscripten, or
// recorded by the stage's program.
//
// bundle.py puts this file together with the live page's drawing code, and says in kStages which stage has which scenes.

const kFlashMilliseconds = 900;

// The states of a scene, as the program recorded them.
const recordings = new Map();  // by stage
window.courseRecordedScenes = (stage, scenes) => recordings.set(stage, scenes);

const folder = document.currentScript.src.replace(/[^/]*$/, "");
const scripts = new Map();
function loadScript(name) {
  if (!scripts.has(name)) {
    scripts.set(name, new Promise((resolve, reject) => {
      const script = Object.assign(document.createElement("script"), {src: folder + name, onload: resolve});
      script.onerror = () => reject(new Error(`${name} is missing`));
      document.head.append(script);
    }));
  }
  return scripts.get(name);
}

const modules = new Map();
// The stage's code, or null: the site has none, or this browser cannot run it.
function loadModule(stage) {
  if (!modules.has(stage)) {
    modules.set(stage, !kStages[stage].isCompiled ? Promise.resolve(null)
      : loadScript(`${stage}_wasm.js`).then(() => window[`course_${stage}`]()).catch(() => null));
  }
  return modules.get(stage);
}

// A scene that is running: commands in, states out.
class LiveScene {
  constructor(module, name) {
    this.module = module;
    this.name = name;
    this.player = 0;
  }
  restart() {
    if (this.player) this.module.ccall("scene_free", null, ["number"], [this.player]);
    this.player = this.module.ccall("scene_new", "number", ["string"], [this.name]);
    return this.apply("");
  }
  apply(command) {
    const text = this.module.ccall("scene_apply", "string", ["number", "string"], [this.player, command]);
    if (text.startsWith("!")) throw new Error(text.slice(1));
    return JSON.parse(text);
  }
}

// ---- From a state to a drawing ----

function snapshotOf(state) {
  const requests = new Map();
  for (const request of state.requests) {
    requests.set(request.id, {id: request.id, name: request.name, prompt: request.prompt, max: request.max, swapped: request.host_blocks > 0,
      hostBlocks: request.host_blocks, wasPreempted: request.preempted, sequences: new Map(request.sequences.map((sequence) => [sequence.id, sequence]))});
  }
  const batch = state.requests.filter((request) => request.computed > 0).map((request) => [request.id, request.computed]);
  return {...emptySnapshot(), sizes: state.sizes, running: state.running, waiting: state.waiting, requests, cached: new Map(state.cached ?? []),
          counters: {host_used: state.requests.reduce((sum, request) => sum + request.host_blocks, 0)},
          happened: {...noEvents(), copies: state.copies, evicted: state.evicted, batch}};
}

// Blocks that are not as they were.
function changedBlocks(before, after) {
  const changed = new Set();
  if (!before) return changed;
  for (let block = 0; block < after.sizes.blocks; ++block) {
    const old = stateOf(before, block), now = stateOf(after, block);
    if (["kind", "owner", "filled", "tables"].some((name) => old[name] !== now[name])) changed.add(block);
  }
  return changed;
}

function describePool(snapshot) {
  const parts = [];
  for (let block = 0; block < snapshot.sizes.blocks; ++block) {
    const {kind, filled, slots, tables} = stateOf(snapshot, block);
    const owners = (placesOf(snapshot).get(block) ?? []).map((place) => nameOf(place.request));
    parts.push(`block ${block}: ` + (kind === "owned" ? `${owners.join(", ")}, ${filled} of ${slots}${tables > 1 ? ", shared" : ""}` : kind));
  }
  return parts.join("; ");
}

// ---- In the page ----

function element(tag, properties = {}, ...children) {
  const {attributes = {}, ...rest} = properties;
  const made = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Elements for words with `code` in them.
const withCode = (text) => text.split("`").map((part, index) => index % 2 ? element("code", {textContent: part}) : part);

class Widget {
  constructor(root, stage, name, recorded, module) {
    this.root = root;
    this.stage = stage;
    this.name = name;
    this.recorded = recorded;
    this.scene = module ? new LiveScene(module, name) : null;
    this.script = recorded.states.slice(1);  // each with its command and what a button for it says
    this.commands = [];                      // that led to the states
    this.flashBegin = -Infinity;
    this.build();
    this.reset();
    const redraw = () => this.draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new MutationObserver(redraw).observe(document.documentElement, {attributeFilter: ["data-theme"]});
    new ResizeObserver(redraw).observe(this.root);
  }

  build() {
    const number = this.stage.replace("stage", "");
    const mode = this.scene
      ? `Runs stage ${number}'s own code in this page: ${kStages[this.stage].sources.map((name) => `\`${name}\``).join(", ")}, compiled to WebAssembly.`
      : kStages[this.stage].isCompiled ? "This browser cannot run the stage's code (WebAssembly with exceptions); what it shows was recorded."
      : `Recorded by \`build/${this.stage} scene ${this.name}\`. Built with Emscripten, this page would run the stage's code, and take commands of your own.`;
    this.said = element("p", {className: "widget-said", attributes: {role: "status", "aria-live": "polite"}});
    this.next = element("button", {type: "button", className: "widget-next", onclick: () => this.forward()});
    this.back = element("button", {type: "button", className: "widget-back", textContent: "◀ back", onclick: () => this.show(this.at - 1)});
    this.again = element("button", {type: "button", className: "widget-again", textContent: "start again", onclick: () => this.reset()});
    this.slider = element("input", {type: "range", min: 0, value: 0, oninput: () => this.goTo(Number(this.slider.value)),
                                    attributes: {"aria-label": `Step of: ${this.recorded.title}`}});
    this.moment = element("output");
    this.root.classList.add("palette");
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", this.recorded.title);
    this.root.replaceChildren(
      element("p", {className: "widget-title", textContent: this.recorded.title}),
      element("p", {className: "widget-mode"}, ...withCode(mode)),
      this.said, ...this.parts(),
      element("div", {className: "widget-controls"}, this.next, this.back, this.again,
              element("div", {className: "widget-time"}, this.slider, this.moment)));
    if (this.scene) {
      this.groups = element("div");
      this.line = element("input", {autocomplete: "off", spellcheck: false, attributes: {"aria-label": "a command"}});
      const form = element("form", {className: "widget-type", onsubmit: (event) => {
        event.preventDefault();
        if (this.line.value.trim() && this.own(this.line.value.trim())) this.line.value = "";
      }}, "or type it", this.line, element("button", {textContent: "do it"}));
      this.root.append(element("details", {}, element("summary", {textContent: "Leave the lesson: commands of your own"}), this.groups, form));
    }
  }

  // What shows the state.
  parts() {
    this.pool = element("canvas", {attributes: {role: "img"}});
    this.tablesTitle = element("h4", {textContent: "Block tables"});
    this.tables = element("canvas", {attributes: {"aria-hidden": "true"}});
    this.host = element("canvas", {attributes: {"aria-hidden": "true"}});
    this.lists = element("div", {className: "widget-lists"});
    this.counters = element("dl");
    return [this.pool, this.host, this.lists, this.tablesTitle, this.tables, this.counters];
  }

  reset() {
    this.commands = [];
    this.states = [this.scene ? this.scene.restart() : this.recorded.states[0]];
    this.snapshots = this.states.map((state) => this.snapshotOf(state));
    this.show(0);
  }

  // Whether all commands so far are the lesson's.
  get isLesson() { return this.commands.every((command, index) => command === this.script[index]?.command); }
  get last() { return this.isLesson ? this.script.length : this.commands.length; }

  push(command, state) {
    this.commands.push(command);
    this.states.push(state);
    this.snapshots.push(this.snapshotOf(state));
  }

  // Up to that step, through those of the lesson that have not been taken yet.
  goTo(step) {
    while (this.commands.length < Math.min(step, this.last)) {
      const {command} = this.script[this.commands.length];
      this.push(command, this.scene ? this.scene.apply(command) : this.recorded.states[this.commands.length + 1]);
    }
    this.show(Math.min(step, this.commands.length));
  }
  forward() { this.goTo(this.at + 1); }

  // A command of the reader's, after the state that is shown. Returns whether it was a right one.
  own(command) {
    if (this.at < this.commands.length) {  // back to this moment: the scene is where the last command has led
      this.commands.length = this.states.length = this.snapshots.length = this.at + 1;
      this.commands.length = this.at;
      this.scene.restart();
      for (const before of this.commands) this.scene.apply(before);
    }
    const state = this.scene.apply(command);
    if (state.error) {
      this.say(state.error, true);
      return false;
    }
    this.push(command, state);
    this.show(this.commands.length);
    return true;
  }

  say(text, isError = false) {
    this.said.classList.toggle("widget-error", isError);
    this.said.textContent = text;
  }

  show(step) {
    this.at = Math.max(0, Math.min(step, this.commands.length));
    const state = this.states[this.at], upcoming = this.at < this.commands.length ? this.states[this.at + 1] : this.isLesson ? this.script[this.at] : undefined;
    this.say(state.said);
    this.slider.max = this.last;
    this.slider.value = this.at;
    this.moment.textContent = this.at ? `after ${this.at} of ${this.last} commands` : "before the first command";
    this.slider.setAttribute("aria-valuetext", `${this.moment.textContent}. ${state.said}`);
    this.back.disabled = this.at === 0;
    this.again.disabled = this.commands.length === 0;
    this.next.disabled = !upcoming;
    this.next.textContent = upcoming ? `▶ ${upcoming.label}` : this.isLesson ? "the end of the lesson's steps" : "these were your own commands";
    this.fill(state);
    this.groups?.replaceChildren(...state.actions.map(([name, commands]) => {
      const request = state.requests?.find((candidate) => candidate.name === name);
      return element("div", {className: "widget-group"}, this.tag(name, request?.id),
        ...commands.map(([command, label]) => element("button", {type: "button", textContent: label, onclick: () => this.own(command),
                                                                 attributes: {"data-command": command}})));
    }));
    this.draw();
  }

  snapshotOf(state) { return snapshotOf(state); }

  fill(state) {
    this.changed = changedBlocks(this.snapshots[this.at - 1], this.snapshots[this.at]);
    this.flash();
    const chips = (title, blocks, kind) => element("div", {className: "widget-list"}, element("span", {textContent: title}),
      ...(blocks.length ? blocks.map((block, index) => element("span", {className: `widget-chip ${kind} ${index === 0 ? "widget-first" : ""}`, textContent: block})) : [element("span", {textContent: "none"})]));
    this.lists.replaceChildren();
    if (state.sizes.block_size > 1) {
      this.lists.append(chips("free list, next first", state.free, ""));
      if (state.cached) this.lists.append(chips("cached, next to be evicted first", state.cached.map(([block]) => block), "widget-cached"));
    } else {
      this.lists.append(...state.requests.map((request) => this.regionOf(request)));
    }
    const before = this.states[this.at - 1]?.counters ?? state.counters;
    this.counters.replaceChildren(...Object.entries(state.counters).map(([name, value]) => element("div", {}, element("dt", {textContent: name}),
      element("dd", {textContent: value.toLocaleString("en"), className: value === before[name] ? "" : "widget-new"}))));
  }

  tag(name, id) {
    const tag = element("span", {className: "widget-tag", textContent: name});
    if (id === undefined) {
      tag.style.border = "1px dashed var(--hatch)";
      tag.style.color = "var(--dim)";
    } else {
      tag.style.background = `hsl(${hueOf(id)} calc(var(--owner-saturation) * 1%) calc(var(--owner-lightness) * 1%))`;
    }
    return tag;
  }

  // A contiguous region: of a cache without blocks, each slot of which is drawn as one.
  regionOf(request) {
    const [sequence] = request.sequences, {blocks} = sequence;
    return element("div", {className: "widget-list"}, this.tag(request.name, request.id), `slots ${blocks[0]} to ${blocks.at(-1)}, ${sequence.length} of ${blocks.length} used`);
  }

  // The blocks that have changed are lit for a moment, and framed as long as the step is shown.
  flash() {
    if (this.changed.size === 0 || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    this.flashBegin = performance.now();
    const frame = () => {
      this.draw();
      if (performance.now() - this.flashBegin < kFlashMilliseconds) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  draw() {
    const snapshot = this.snapshots[this.at], theme = themeOf(this.root), {blocks, block_size: size} = snapshot.sizes;
    const width = this.pool.clientWidth;
    if (!width) return;
    let columns = size > 1 ? 8 : 16;
    while (columns > 1 && width / columns < (size > 1 ? 56 : 36)) columns /= 2;
    const rows = Math.ceil(blocks / columns), cell = Math.min(78, Math.floor((width - 4) / columns));
    this.pool.style.height = `${rows * cell + 4}px`;
    const pool = sizedContext(this.pool), layout = poolLayout(blocks, columns * cell, rows * cell);
    pool.context.translate(2, 2);  // frames are a little larger than their blocks
    drawPool(pool.context, snapshot, layout, theme, {lit: this.changed});
    const fade = 1 - (performance.now() - this.flashBegin) / kFlashMilliseconds;
    if (fade > 0) {
      pool.context.globalAlpha = 0.55 * fade;
      pool.context.fillStyle = theme.accent;
      for (const block of this.changed) {
        const {x, y, size: side} = blockRect(layout, block);
        pool.context.fillRect(x, y, side, side);
      }
      pool.context.globalAlpha = 1;
    }
    this.pool.setAttribute("aria-label", describePool(snapshot));
    this.tables.hidden = this.tablesTitle.hidden = size === 1 || snapshot.requests.size === 0;
    if (!this.tables.hidden) {
      const rowsOf = tablesLayout(snapshot, this.tables.clientWidth - 4, true, 21);
      this.tables.style.height = `${rowsOf.height + 4}px`;
      const tables = sizedContext(this.tables);
      tables.context.translate(2, 0);
      drawTables(tables.context, snapshot, rowsOf, 0, rowsOf.height + 4, theme, {lit: this.changed});
    }
    this.host.hidden = !snapshot.sizes.host_blocks;
    if (!this.host.hidden) {
      this.host.style.height = "34px";
      const host = sizedContext(this.host);
      drawHost(host.context, snapshot, host.width, host.height, theme);
    }
  }
}

// Scores that can be dragged, and what one query keeps of them from block to block.
class SoftmaxWidget extends Widget {
  snapshotOf(state) { return state; }

  parts() {
    this.bars = element("div", {className: "widget-blocks"});
    this.kept = element("table", {className: "widget-kept"});
    this.sliders = [];
    this.marks = [];
    const [first] = this.recorded.states;
    for (const {block, first: begin, count} of first.blocks) {
      const tokens = element("div", {className: "widget-tokens"});
      for (let position = begin; position < begin + count; ++position) {
        const slider = element("input", {type: "range", min: first.score_range[0], max: first.score_range[1], step: 0.5, disabled: !this.scene,
          onchange: () => this.own(`set ${position} ${slider.value}`), oninput: () => this.drag(position),
          attributes: {"aria-label": `score of position ${position}`, orient: "vertical"}});
        const mark = {score: element("span"), weight: element("span", {className: "widget-weight"}), number: element("span", {className: "widget-number"})};
        this.sliders.push(slider);
        this.marks.push(mark);
        tokens.append(element("div", {className: "widget-token"}, mark.score, slider, element("div", {className: "widget-well"}, mark.weight), mark.number,
                              element("span", {className: "widget-position", textContent: position})));
      }
      this.bars.append(element("div", {className: "widget-block", attributes: {"data-block": block}}, element("h4", {textContent: `block ${block}`}), tokens));
    }
    return [this.bars, element("p", {className: "widget-mode", textContent: this.scene
      ? "Drag a score. Below it its weight, as it counts now, and the token's position, which is its value."
      : "Each score, below it its weight, as it counts now, and the token's position, which is its value."}), this.kept];
  }

  drag(position) { this.marks[position].score.textContent = this.sliders[position].value; }

  fill(state) {
    const before = this.states[this.at - 1] ?? state;
    state.scores.forEach((score, position) => {
      const weight = state.weights[position], {score: number, weight: bar, number: text} = this.marks[position];
      this.sliders[position].value = score;
      number.textContent = score;
      bar.style.height = `${100 * Math.min(1, weight ?? 0)}%`;
      text.textContent = weight === undefined ? "" : Number(weight.toFixed(3));
    });
    state.blocks.forEach(({read}, index) => this.bars.children[index].classList.toggle("widget-read", read));
    const shown = (value) => value === null ? "–" : String(Number(value.toFixed(4)));
    const rows = [["row_max", "the largest score so far"], ["rescale", "what came before was multiplied by"], ["row_sum", "sum of the weights"],
                  ["output", "sum of weights times values"], ["result", "output / row_sum"]];
    this.kept.replaceChildren(...rows.map(([name, meaning]) => element("tr", {}, element("th", {}, element("code", {textContent: name})),
      element("td", {textContent: shown(state[name]), className: state[name] === before[name] ? "" : "widget-new"}), element("td", {textContent: meaning}))));
  }

  draw() {}
}

async function make(root) {
  const name = root.dataset.widget;
  const stage = Object.keys(kStages).find((candidate) => kStages[candidate].scenes.includes(name));
  if (!stage) {
    root.textContent = `There is no widget ${name}.`;
    return;
  }
  await loadScript(`${stage}_scenes.js`);
  const recorded = recordings.get(stage)[name], Kind = recorded.states[0].sizes ? Widget : SoftmaxWidget;
  root.widget = new Kind(root, stage, name, recorded, await loadModule(stage));
}

function begin() {
  document.head.prepend(element("style", {textContent: kStyles}));
  // Not before it is about to be seen: a stage's code takes a moment to load.
  const observer = new IntersectionObserver((entries) => {
    for (const {isIntersecting, target} of entries) {
      if (!isIntersecting) continue;
      observer.unobserve(target);
      make(target).catch((error) => { target.textContent = `This widget cannot be shown: ${error.message}`; });
    }
  }, {rootMargin: "600px"});
  for (const root of document.querySelectorAll(".widget[data-widget]")) observer.observe(root);
}
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin); else begin();
