"use strict";
// Time: the last steps as bars, and which of them the views show.

const kMaxSnapshots = 600;

class Timeline {
  // onShow(snapshot): another one is to be shown.
  constructor(canvas, onShow) {
    this.canvas = canvas;
    this.onShow = onShow;
    this.partOf = () => null;  // of a snapshot's number: what it belongs to, with a name; the page says
    this.snapshots = [emptySnapshot()];
    this.at = null;  // index of the snapshot shown; null: always the latest
    this.timer = null;
    this.pace = 1;  // of playing: a test has it smaller
    this.end = 0;  // where the visible bars end, of all bars: it stays as long as the step shown is in sight
    this.scrolling = null;
    this.isDirty = false;
    canvas.addEventListener("keydown", (event) => {
      const by = {ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageUp: 10, PageDown: -10, Home: -kMaxSnapshots}[event.key];
      if (event.key === "End") this.live();
      else if (by !== undefined) this.move(by);
      else return;
      event.preventDefault();
    });
    const stopScrolling = () => clearInterval(this.scrolling);
    const xOf = (event) => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      this.holdBarAt(xOf(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      stopScrolling();
      if ((event.buttons & 1) === 0 || !canvas.hasPointerCapture(event.pointerId)) return;
      // At an edge it goes on by itself, the faster the further out.
      const x = xOf(event), beyond = Math.max(0, x - canvas.clientWidth + 8) + Math.min(0, x - kStripLeft);
      const by = Math.sign(beyond) * Math.min(10, Math.ceil(Math.abs(beyond) / 10));
      this.holdBarAt(x);
      if (by) {
        this.scrolling = setInterval(() => {
          const least = Math.min(this.numBars, this.barCount(canvas.clientWidth));
          this.end = Math.max(least, Math.min(this.numBars, this.end + by));
          this.holdBarAt(x);
        }, 50);
      }
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) canvas.addEventListener(name, stopScrolling);
    new ResizeObserver(() => this.invalidate()).observe(canvas);
  }

  get latest() { return this.snapshots.at(-1); }
  get shown() { return this.at === null ? this.latest : this.snapshots[this.at]; }
  get isLive() { return this.at === null; }

  add(snapshot) {
    // A pause or an arrival is no step: it takes the place of the snapshot before, and goes back to it are not by halves.
    // A new pool does not: the last step in the one before stays as it was.
    const isStep = snapshot.steps.length > 0;
    if (!isStep && !snapshot.isNewPool) {
      const {steps, happened, isNewPool, number} = this.latest;
      this.snapshots[this.snapshots.length - 1] = {...snapshot, steps, happened, isNewPool, number};
    } else {
      this.snapshots.push(snapshot);
    }
    if (this.snapshots.length > kMaxSnapshots) {
      const gone = this.snapshots.shift();
      this.end -= gone.steps.length;
      if (this.at !== null) this.at = Math.max(0, this.at - 1);
    }
    this.invalidate();
    if (this.at === null) this.onShow(this.latest);
  }

  hold(index) {
    this.stop();
    this.at = Math.max(0, Math.min(this.snapshots.length - 1, index));
    this.changed();
  }
  move(by) {
    const index = (this.at ?? this.snapshots.length - 1) + by;
    if (this.at === null && by > 0) return;
    if (index >= this.snapshots.length) this.live(); else this.hold(index);
  }
  live() {
    this.stop();
    this.at = null;
    this.changed();
  }
  changed() {
    this.invalidate();
    this.onShow(this.shown);
  }

  // Shows step after step until it has caught up with the server and nothing runs, or until the next is not wanted; then
  // calls onEnd. Steps in which something happened are held for longer, the first two of each kind longest.
  play(index = this.at ?? 0, onEnd = () => this.live(), isWanted = () => true) {
    this.hold(index);
    const seen = new Map();
    const next = () => {
      const events = eventsOf(this.shown);
      for (const name of events) seen.set(name, (seen.get(name) ?? 0) + 1);
      const isNew = events.some((name) => seen.get(name) <= 2);
      this.timer = setTimeout(() => {
        const following = this.snapshots[this.at + 1];
        if (following && isWanted(following)) this.at += 1;
        else if (following || this.latest.requests.size === 0) return onEnd();
        next();
        this.changed();
      }, this.pace * (isNew ? kEventMilliseconds : events.length ? kRepeatedMilliseconds : kStepMilliseconds));
    };
    next();
    this.changed();
  }
  stop() {
    clearTimeout(this.timer);
    this.timer = null;
  }
  get isPlaying() { return this.timer !== null; }

  get numBars() { return this.snapshots.reduce((sum, snapshot) => sum + snapshot.steps.length, 0); }
  bars(width) {
    const all = this.snapshots.flatMap((snapshot) => snapshot.steps), count = this.barCount(width);
    let end = all.length;
    if (this.at !== null) {
      const last = all.findLastIndex((step) => step.number <= this.shown.number);
      end = Math.min(all.length, Math.max(this.end, count));
      const isInSight = last < end && last >= end - count;
      if (!isInSight) end = Math.min(all.length, Math.max(last + 1 + Math.floor(count / 2), count));
    }
    return {bars: all.slice(Math.max(0, end - count), end), end};
  }
  barCount(width) { return Math.max(1, Math.floor((width - kStripLeft) / kBarWidth)); }
  barAt(x) {
    const {bars} = this.bars(this.canvas.clientWidth);
    return bars[Math.max(0, Math.min(bars.length - 1, Math.floor((x - kStripLeft) / kBarWidth)))];
  }
  holdBarAt(x) {
    const bar = this.barAt(x);
    if (this.at === null) this.end = this.numBars;  // as they are drawn
    if (bar) this.hold(this.snapshots.findIndex((snapshot) => snapshot.number === bar.number));
  }

  invalidate() {
    if (this.isDirty) return;
    this.isDirty = true;
    requestAnimationFrame(() => {
      this.isDirty = false;
      this.draw();
    });
  }

  draw() {
    const {context, width, height} = sizedContext(this.canvas), theme = themeOf(document.body);
    const {bars, end} = this.bars(width), barWidth = kBarWidth, shown = this.shown, part = this.partOf(shown.number);
    this.end = end;
    context.clearRect(0, 0, width, height);
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const rows = ["preempted", "copied", "evicted", ...(bars.some((step) => step.drafts) ? ["drafts"] : [])], top = kNameHeight + 12 * rows.length;
    rows.forEach((name, index) => {
      context.fillStyle = theme.dim;
      context.fillText(name, kStripLeft - 6, kNameHeight + 6 + index * 12);
    });
    // A lane for each kind, on a scale of its own: a step may compute hundreds of tokens of prompts, and a few of replies.
    const lane = Math.floor((height - top - 6) / 2), floor = top + 2 + lane;  // where prompts' bars stand
    const largest = (count) => Math.max(4, ...bars.map(count)), mostPrompt = largest((step) => step.prompt), mostDecoded = largest((step) => step.decoded);
    const promptScale = lane / mostPrompt, scale = lane / mostDecoded;
    [["▨ prompt", mostPrompt, floor - lane / 2, theme.prompt], ["■ decode", mostDecoded, height - lane / 2, theme.accent]].forEach(([name, most, middle, color]) => {
      context.fillStyle = color;
      context.fillText(name, kStripLeft - 6, middle - 5);
      context.fillStyle = theme.dim;
      context.fillText(`up to ${most}`, kStripLeft - 6, middle + 7);
    });
    context.fillStyle = theme.line;
    context.fillRect(kStripLeft, floor, width - kStripLeft, 1);
    this.drawNames(context, bars, height, part, theme);
    bars.forEach((step, index) => {
      // Events that the counters do not have, in other pools or after the step that is shown, are paler.
      context.globalAlpha = step.pool === shown.poolsSeen && step.number <= shown.number ? 1 : 0.35;
      const x = kStripLeft + index * barWidth, prompt = step.prompt && Math.max(2, step.prompt * promptScale), back = (step.drafts - step.accepted) * scale;
      const decoded = step.decoded && Math.max(2, (step.decoded - step.drafts + step.accepted) * scale), base = decoded + back;
      if (step.number === shown.number && shown.steps.length) {
        context.fillStyle = theme.free;
        context.fillRect(x - 1, kNameHeight, barWidth, height - kNameHeight);
        context.strokeStyle = theme.lit;
        context.lineWidth = 1.5;
        context.strokeRect(x - 1, kNameHeight + 0.75, barWidth, height - kNameHeight - 1.5);
      }
      context.fillStyle = theme.accent;
      context.fillRect(x, height - decoded, barWidth - 1, decoded);
      if (step.accepted) {  // of the decoded: a line between them and the tokens that plain decoding would have computed
        context.fillStyle = theme.card;
        context.fillRect(x, height - decoded + step.accepted * scale - 1, barWidth - 1, 1);
      }
      if (back) {
        context.strokeStyle = theme.dim;
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, height - base + 0.5, barWidth - 2, Math.max(0, back - 1));
      }
      if (prompt) {
        hatch(context, x, floor - prompt, barWidth - 1, prompt, theme.prompt);
        context.strokeStyle = theme.prompt;
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, floor - prompt + 0.5, barWidth - 2, Math.max(0, prompt - 1));
      }
      context.fillStyle = theme.bad;
      context.save();
      context.translate(0, kNameHeight);
      if (step.preempted) { context.beginPath(); context.moveTo(x - 1, 2); context.lineTo(x + 5, 2); context.lineTo(x + 2, 10); context.fill(); }
      if (step.copied) { context.beginPath(); context.moveTo(x + 2, 13); context.lineTo(x + 5, 18); context.lineTo(x + 2, 23); context.lineTo(x - 1, 18); context.fill(); }
      if (step.drafts) {  // solid: some were accepted; hollow: all were taken back
        context.beginPath();
        for (const [right, down] of [[-1, 46], [2, 39], [5, 46]]) context.lineTo(x + right, down);
        context.closePath();
        context.fillStyle = context.strokeStyle = theme.accent;
        context.lineWidth = 1;
        if (step.accepted) context.fill(); else context.stroke();
      }
      if (step.evicted) { context.strokeStyle = theme.bad; context.lineWidth = 1.5; context.strokeRect(x - 0.5, 27, 5, 6); }
      context.restore();
    });
    context.globalAlpha = 1;
    if (bars.length === 0) {
      context.textAlign = "left";
      context.fillStyle = theme.dim;
      context.font = "13px system-ui, sans-serif";
      context.fillText("A bar for each step of the server comes here: how many tokens it computed, of prompts and of replies.", kStripLeft + 8, height / 2, width - kStripLeft - 10);
    }
    const first = this.snapshots[0], {canvas} = this;
    canvas.setAttribute("aria-valuemin", Math.max(0, first.step));
    canvas.setAttribute("aria-valuemax", Math.max(0, this.latest.step));
    canvas.setAttribute("aria-valuenow", Math.max(0, shown.step));
    canvas.setAttribute("aria-valuetext", `${part?.name ? part.name + ", " : ""}${shown.step < 0 ? "no step yet" : `step ${shown.step}`}${this.isLive ? ", live" : ""}. ${storyOf(shown)}`);
  }

  // Where a part begins, as a scene does: its name, and a line between it and the one before.
  drawNames(context, bars, height, shown, theme) {
    const parts = [];
    bars.forEach((step, index) => {
      const part = this.partOf(step.number), last = parts.at(-1);
      if (!last || last.part !== part || last.pool !== step.pool) parts.push({part, pool: step.pool, begin: index, end: index + 1});
      else last.end = index + 1;
    });
    context.textAlign = "left";
    for (const {part, begin, end} of parts) {
      const left = kStripLeft + begin * kBarWidth - 1.5, room = (end - begin) * kBarWidth - 4;
      if (begin > 0) {
        context.strokeStyle = theme.dim;
        context.lineWidth = 1;
        context.setLineDash([3, 3]);
        context.beginPath();
        context.moveTo(left, 0);
        context.lineTo(left, height);
        context.stroke();
        context.setLineDash([]);
      }
      if (!part?.name) continue;
      context.font = `${part === shown ? "700 " : ""}10px system-ui, sans-serif`;
      context.fillStyle = part === shown ? theme.text : theme.dim;
      context.fillText(shortened(context, part.name, room), left + 4, kNameHeight / 2);
    }
  }
}

// The part of a text that a width has room for.
function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = text.length - 1;
  while (length > 0 && context.measureText(text.slice(0, length) + "…").width > width) length -= 1;
  return length > 0 ? text.slice(0, length) + "…" : "";
}
const kStripLeft = 74, kBarWidth = 5, kNameHeight = 13;
const kStepMilliseconds = 300, kRepeatedMilliseconds = 600, kEventMilliseconds = 2500;
