// The widgets of the course's site: <div class="widget" data-widget="block-table"></div> becomes a scene of a lesson, which
// the reader goes through step by step, back and forth, or leaves for commands of their own. What is shown are states
// of the stage's own code (common/app/scene.h): compiled to WebAssembly, where the site was built with Emscripten, or
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
  // A short row of slots stands side by side, as in the lessons' pictures.
  const sizes = {...state.sizes, columns: Math.min(state.sizes.block_size, 4)};
  return {...emptySnapshot(), sizes, running: state.running, waiting: state.waiting, requests, cached: new Map(state.cached ?? []),
          counters: {host_used: state.requests.reduce((sum, request) => sum + request.host_blocks, 0)},
          happened: {...noEvents(), copies: state.copies, evicted: state.evicted, batch}};
}

// The first owners have the colours of the lessons' pictures.
const kNumOwnColors = 5;
function widgetTheme(root) {
  const style = getComputedStyle(root);
  return {...themeOf(root), owners: Array.from({length: kNumOwnColors}, (_, id) => style.getPropertyValue(`--owner-${id}`).trim())};
}

// Frames are a little larger than their blocks. All of the canvas is cleared, not only what the next step draws on.
const kFrameMargin = 4;
function framedContext(canvas) {
  const {context, width, height} = sizedContext(canvas);
  context.clearRect(0, 0, width, height);
  context.translate(kFrameMargin, kFrameMargin);
  return context;
}

// Blocks that have changed.
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
      : !kStages[this.stage].canCompile ? `Recorded by \`build/${kStages[this.stage].program} scene ${this.name}\`, which runs the kernel on the executor.`
      : `Recorded by \`build/${this.stage} scene ${this.name}\`, from stage ${number}'s own code. ` + (kStages[this.stage].isCompiled
        ? "In a browser that runs WebAssembly with exceptions, the page also takes commands of your own."
        : "With Emscripten installed when the site is built, the page also takes commands of your own.");
    this.step = element("b", {className: "widget-step"});
    this.said = element("p", {className: "widget-said"});
    this.after = element("h4", {className: "widget-after"});
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
      // Above everything that grows and shrinks with a step, so that the button stays under the pointer.
      element("div", {className: "widget-controls"}, this.next, this.back,
              element("div", {className: "widget-time"}, this.again, this.slider, this.moment)),
      element("div", {className: "widget-what", attributes: {role: "status", "aria-live": "polite"}}, this.step, this.said),
      this.after, ...this.parts());
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
    return [this.pool, this.host, this.legend(), this.lists, this.tablesTitle, this.tables, this.counters];
  }

  // What a block may look like in this scene, as drawBlock() draws it.
  legend() {
    const {states} = this.recorded, [{sizes}] = states, size = sizes.block_size;
    const isShared = states.some(({references}) => references.some((count) => count > 1));
    const owned = (filled, tables = 1) => ({kind: "owned", owner: 0, filled, slots: size, columns: Math.min(size, 4), tables});
    const entries = size === 1 ? [[owned(1), "a slot with a token"], [owned(0), "reserved, but empty"], [{kind: "free"}, "free"]]
      : [[owned(Math.ceil(size / 2)), `a sequence's block, with ${Math.ceil(size / 2)} of ${size} slots used`], ...(isShared ? [[owned(size, 2), "in several block tables"]] : []),
         ...(states.some(({cached}) => cached?.length) ? [[{kind: "cached"}, "cached: no owner, but still findable"]] : []), [{kind: "free"}, "free"]];
    entries.push([{...owned(size), isLit: true}, "changed by this step"]);
    this.swatches = entries.map(([look]) => ({look, canvas: element("canvas", {attributes: {"aria-hidden": "true"}})}));
    const arrow = states.some(({copies}) => copies.length) ? [element("span", {}, element("span", {className: "widget-arrow", textContent: "→"}), "copied")] : [];
    return element("p", {className: "widget-legend"}, ...entries.map(([, text], index) => element("span", {}, this.swatches[index].canvas, text)), ...arrow);
  }

  drawLegend(theme) {
    for (const {look, canvas} of this.swatches) {
      const {context, width, height} = sizedContext(canvas);
      context.clearRect(0, 0, width, height);
      drawBlock(context, 3, 3, width - 6, height - 6, look, theme);
      if (look.isLit) frame(context, 3, 3, width - 6, height - 6, theme);
    }
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

  // Up to that step, through the lesson's steps that have not been taken yet.
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
      this.step.textContent = command;
      this.after.textContent = "As it was before";
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
    this.step.textContent = this.at ? state.label[0].toUpperCase() + state.label.slice(1) : "Before the first step";
    this.after.textContent = this.at ? this.afterText : "What is there";
    this.say(state.said);
    this.slider.max = this.last;
    this.slider.value = this.at;
    this.moment.textContent = `${this.at} of ${this.last} done`;
    this.slider.setAttribute("aria-valuetext", `${this.step.textContent}. ${state.said}`);
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

  get afterText() { return "After this step"; }

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
    this.fillCounters(state);
  }

  fillCounters(state) {
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
      tag.style.background = id < kNumOwnColors ? `var(--owner-${id})` : `hsl(${hueOf(id)} calc(var(--owner-saturation) * 1%) calc(var(--owner-lightness) * 1%))`;
    }
    return tag;
  }

  // A contiguous region, in a cache without blocks: each slot is drawn as a block.
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
    const snapshot = this.snapshots[this.at], theme = widgetTheme(this.root), {blocks, block_size: size} = snapshot.sizes;
    const width = this.pool.clientWidth;
    if (!width) return;
    this.drawLegend(theme);
    let columns = size > 1 ? 8 : 16;
    while (columns > 1 && width / columns < (size > 1 ? 56 : 36)) columns /= 2;
    const rows = Math.ceil(blocks / columns), cell = Math.min(78, Math.floor((width - 2 * kFrameMargin) / columns)), rowHeight = size > 1 ? 56 : cell;
    this.pool.style.height = `${rows * rowHeight + 2 * kFrameMargin}px`;
    const pool = framedContext(this.pool);
    const layout = {drawn: blocks, count: blocks, width: columns * cell, height: rows * rowHeight, cell, rowHeight, columns, gap: size > 1 ? 7 : 6};
    drawPool(pool, snapshot, layout, theme, {lit: this.changed});
    const fade = 1 - (performance.now() - this.flashBegin) / kFlashMilliseconds;
    if (fade > 0) {
      pool.globalAlpha = 0.55 * fade;
      pool.fillStyle = theme.accent;
      for (const block of this.changed) {
        const {x, y, size: side, height} = blockRect(layout, block);
        pool.fillRect(x, y, side, height);
      }
      pool.globalAlpha = 1;
    }
    this.pool.setAttribute("aria-label", describePool(snapshot));
    this.tables.hidden = this.tablesTitle.hidden = size === 1 || snapshot.requests.size === 0;
    if (!this.tables.hidden) {
      const rowsOf = tablesLayout(snapshot, this.tables.clientWidth - 2 * kFrameMargin, true, 21);
      this.tables.style.height = `${rowsOf.height + 2 * kFrameMargin}px`;
      drawTables(framedContext(this.tables), snapshot, rowsOf, 0, rowsOf.height, theme, {lit: this.changed});
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

// What one warp of a ladder's step loads: lanes above, and below them the rows of K and V, a column for each token, in sectors.
class LoadsWidget extends Widget {
  snapshotOf(state) { return state; }

  get afterText() { return "The load, and what the ones before it have taken"; }

  parts() {
    this.picture = element("canvas", {attributes: {role: "img"}});
    this.between = element("p", {className: "widget-mode"});
    this.counters = element("dl");
    const {whole} = this.recorded.states[0], number = (value) => value.toLocaleString("en");
    const totals = [["requests", number(whole.requests)], ["sectors", number(whole.sectors)], ["sectors of a request", (whole.sectors / whole.requests).toFixed(2)],
                    ["fewest possible sectors", number(whole.fewest)],
                    ...(whole.bulk_copies ? [["bulk copies", number(whole.bulk_copies)], ["bytes of bulk copies", number(whole.bulk_bytes)]] : [])];
    const swatch = (kind, text) => element("span", {}, element("span", {className: `widget-sector widget-${kind}`}), text);
    return [this.picture,
      element("p", {className: "widget-legend"}, swatch("asked", "bytes that lanes ask for"), swatch("fetched", "the rest of their sectors"),
              swatch("earlier", "taken by an earlier load that is shown"), swatch("untouched", "by none of them")),
      this.between, element("h4", {textContent: "This warp, all its loads of K and V so far"}), this.counters,
      element("h4", {}, "The whole kernel, as ", element("code", {textContent: whole.command}), " counts its global loads"),
      element("div", {className: "widget-whole"}, ...totals.map(([name, value]) => element("span", {}, `${name} `, element("b", {textContent: value}))))];
  }

  fill(state) {
    this.fillCounters(state);
    const others = (state.between ?? []).map(([name, count]) => `${name}${count > 1 ? ` (${count} times)` : ""}`);
    this.between.textContent = others.length ? `Just before it, the warp loads ${others.length > 1 ? others.slice(0, -1).join(", ") + " and " : ""}${others.at(-1)}.` : "";
  }

  draw() {
    const width = this.picture.clientWidth;
    if (!width) return;
    const {memory} = this.recorded.states[0], {tokens, blocks} = memory, size = tokens.length / blocks.length, numSectors = memory.row_bytes / 32;
    const theme = widgetTheme(this.root), state = this.states[this.at];
    const left = 16, gap = 10, column = (width - left - gap * (blocks.length - 1)) / Math.max(tokens.length, 32), row = 11;
    const laneWidth = (width - left) / 32, lanesHeight = 16, arraysTop = [78, 78 + numSectors * row + 34], height = arraysTop[1] + numSectors * row + 18;
    this.picture.style.height = `${height}px`;
    const {context} = sizedContext(this.picture);
    context.clearRect(0, 0, width, height);
    const xOf = (token) => { const index = tokens.indexOf(token); return left + index * column + Math.floor(index / size) * gap; };
    const text = (said, x, y, color = theme.dim, font = "11px system-ui, sans-serif", align = "left") => {
      Object.assign(context, {font, fillStyle: color, textAlign: align, textBaseline: "middle"});
      context.fillText(said, x, y);
    };
    const parts = state.parts ?? [], active = new Set(parts.map(([lane]) => lane));
    text("lanes of the warp", left, 7);
    for (let lane = 0; lane < 32; ++lane) {
      const x = left + lane * laneWidth;
      context.fillStyle = active.has(lane) ? theme.accent : theme.free;
      context.fillRect(x, 16, laneWidth - 1.5, lanesHeight);
      if (laneWidth >= 14 || lane % 4 === 0) text(lane, x + (laneWidth - 1.5) / 2, 24.5, active.has(lane) ? theme.onAccent : theme.dim, "10px system-ui, sans-serif", "center");
    }
    const sectorOf = (byte) => Math.floor(byte / 32);
    ["K", "V"].forEach((name, array) => {
      const top = arraysTop[array];
      text(name, 2, top + numSectors * row / 2, theme.text, "600 12px system-ui, sans-serif");
      blocks.forEach(([block, first]) => {
        const x = xOf(first), room = size * column;
        const said = [`block ${block}, tokens ${first} to ${first + size - 1}`, `block ${block}`].find((one) => context.measureText(one).width < room) ?? "";
        text(said, x, top - 9, theme.dim, "10.5px system-ui, sans-serif");
      });
      const earlier = new Set();
      for (const before of this.states.slice(1, this.at)) {
        if (before.of !== name) continue;
        for (const [, token, byte, bytes] of before.parts) {
          for (let sector = sectorOf(byte); sector <= sectorOf(byte + bytes - 1); ++sector) earlier.add(`${token},${sector}`);
        }
      }
      for (const token of tokens) {
        for (let sector = 0; sector < numSectors; ++sector) {
          context.fillStyle = theme.free;
          context.fillRect(xOf(token), top + sector * row, column - 1.5, row - 1.5);
          if (earlier.has(`${token},${sector}`)) hatch(context, xOf(token), top + sector * row, column - 1.5, row - 1.5, theme.hatch);
        }
      }
      if (state.of !== name) return;
      this.drawLines(context, parts, theme.accent, (lane) => left + (lane + 0.5) * laneWidth, 16 + lanesHeight,
                     (token, byte) => xOf(token) + byte % 32 / 32 * (column - 1.5) + 1, (byte) => top + sectorOf(byte) * row);
      for (const [, token, byte, bytes] of parts) {
        for (let sector = sectorOf(byte); sector <= sectorOf(byte + bytes - 1); ++sector) {
          context.fillStyle = theme.owners[1];
          context.fillRect(xOf(token), top + sector * row, column - 1.5, row - 1.5);
        }
      }
      for (const [, token, byte, bytes] of parts) {
        for (let sector = sectorOf(byte); sector <= sectorOf(byte + bytes - 1); ++sector) {
          const begin = Math.max(byte, sector * 32) - sector * 32, end = Math.min(byte + bytes, sector * 32 + 32) - sector * 32;
          context.fillStyle = theme.accent;
          context.fillRect(xOf(token) + begin / 32 * (column - 1.5), top + sector * row, Math.max(1.5, (end - begin) / 32 * (column - 1.5)), row - 1.5);
        }
      }
    });
    this.picture.setAttribute("aria-label", state.said);
  }

  // From a lane to what it asks for; if that is several rows, to the first.
  drawLines(context, parts, color, xOfLane, yOfLanes, xOf, yOf) {
    const seen = new Set();
    context.strokeStyle = color;
    context.lineWidth = 1;
    context.globalAlpha = 0.4;
    for (const [lane, token, byte] of parts) {
      if (seen.has(lane)) continue;
      seen.add(lane);
      const from = xOfLane(lane), x = xOf(token, byte);
      context.beginPath();
      context.moveTo(from, yOfLanes);
      context.bezierCurveTo(from, 56, x, 48, x, yOf(byte));
      context.stroke();
    }
    context.globalAlpha = 1;
  }
}

async function make(root) {
  const name = root.dataset.widget;
  const stage = Object.keys(kStages).find((candidate) => kStages[candidate].scenes.includes(name));
  if (!stage) {
    root.textContent = `Nothing has recorded the scene ${name}: this site was built without the program that does.`;
    return;
  }
  await loadScript(`${stage}_scenes.js`);
  const recorded = recordings.get(stage)[name], [first] = recorded.states, Kind = first.sizes ? Widget : first.memory ? LoadsWidget : SoftmaxWidget;
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
