"use strict";
// The two views of one snapshot, joined: what is pointed at in one is lit in both.

const $ = (id) => document.getElementById(id);

const kOverHeight = 28;  // of the line under the tables of requests that have ended

// onPoint(sentence): what is pointed at has changed.
class Views {
  constructor(onPoint) {
    this.onPoint = onPoint;
    this.snapshot = emptySnapshot();
    this.target = null;     // {block, sequence?, request?, index?, position?}, or {region}: a request's, or kRest
    this.from = "pool";     // the view that it was chosen in
    this.isPinned = false;  // chosen by key, click or touch: leaving with the pointer keeps it
    this.ended = "";        // said where nothing runs any more
    this.invitation = "";   // said where nothing has run
    this.frameTimes = [];   // of the last drawings, in milliseconds
    this.isDirty = false;
    this.theme = themeOf(document.body);
    this.pool = $("pool");
    this.tables = $("tables");
    this.scroll = $("tables-scroll");
    const redraw = () => { this.theme = themeOf(document.body); this.invalidate(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new ResizeObserver(redraw).observe(document.body);
    new ResizeObserver(redraw).observe(this.pool.parentElement);
    this.scroll.addEventListener("scroll", () => this.invalidate());
    for (const id of ["lines", "texts"]) $(id).addEventListener("change", () => this.invalidate());
    this.listen(this.pool, "pool", (x, y) => {
      const block = this.poolLayout && blockAt(this.poolLayout, x, y);
      return block === undefined ? null : {block};
    });
    this.listen(this.tables, "tables", (x, y) => {
      this.row = labelAt(this.tablesLayout, x, y + this.scroll.scrollTop);
      return placeAt(this.snapshot, this.tablesLayout, x, y + this.scroll.scrollTop) ?? null;
    });
    this.regions = $("regions");
    this.listen(this.regions, "regions", (x) => {
      const region = regionAt(this.snapshot, this.regions.clientWidth, x);
      return region === undefined ? null : {region};
    });
    this.regions.addEventListener("keydown", (event) => this.moveRegions(event));
    this.pool.addEventListener("keydown", (event) => this.movePool(event));
    this.tables.addEventListener("keydown", (event) => this.moveTables(event));
  }

  show(snapshot) {
    if (snapshot.poolsSeen !== this.snapshot.poolsSeen) {  // the same number is another block
      this.target = null;
      this.isPinned = false;
    }
    this.snapshot = snapshot;
    this.row = null;
    if (this.target?.sequence !== undefined) {  // the table may have another block there now
      const sequence = snapshot.requests.get(this.target.request)?.sequences.get(this.target.sequence);
      const block = sequence?.blocks[this.target.index];
      this.target = block === undefined ? {block: this.target.block} : {...this.target, block};
    }
    if (this.target && (this.target.block >= snapshot.sizes.blocks || sentenceOf(snapshot, this.target) === "")) this.target = null;
    this.tell();
    this.invalidate();
  }

  point(target, from, isPinned) {
    this.target = target;
    this.from = from;
    this.isPinned = isPinned && target !== null;
    this.tell();
    this.invalidate();
  }

  tell() { this.onPoint(this.target || !this.row ? sentenceOf(this.snapshot, this.target) : rowSentence(this.snapshot, this.row)); }

  listen(canvas, name, targetAt) {
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return targetAt(event.clientX - box.left, event.clientY - box.top);
    };
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse" && !this.isPinned) this.point(at(event), name, false);
    });
    canvas.addEventListener("pointerleave", () => { this.row = null; if (!this.isPinned) this.point(null, name, false); });
    canvas.addEventListener("click", (event) => {
      const target = at(event), isSame = this.isPinned && target && target.block === this.target?.block && target.region === this.target?.region;
      this.point(isSame ? null : target, name, true);
    });
    canvas.addEventListener("focus", () => {
      if (!this.target && canvas.matches(":focus-visible")) this.first(name);
    });
    // What was chosen is let go with the focus, but can be followed from step to step, and from one view to the other.
    canvas.addEventListener("blur", (event) => {
      if (document.hasFocus() && !event.relatedTarget?.closest("#time, canvas, .options")) this.point(null, name, false);
    });
  }

  first(name) {
    if (name === "pool") return this.snapshot.sizes.blocks > 0 && this.point({block: 0}, name, true);
    if (name === "regions") return this.snapshot.sizes.slots > 0 && this.point({region: regionParts(this.snapshot)[0].id}, name, true);
    const row = this.tablesLayout?.rows.find((candidate) => candidate.sequence?.blocks.length);
    if (row) this.point(this.placeIn(row, 0), name, true);
  }

  placeIn(row, index) {
    const at = Math.max(0, Math.min(row.sequence.blocks.length - 1, index));
    return {block: row.sequence.blocks[at], sequence: row.sequence.id, request: row.request.id, index: at};
  }

  movePool(event) {
    const {columns, drawn} = this.poolLayout;
    const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -drawn, End: drawn}[event.key];
    if (event.key === "Escape") this.point(null, "pool", false);
    if (step === undefined || drawn === 0) return;
    event.preventDefault();
    const block = this.target?.block !== undefined ? Math.max(0, Math.min(drawn - 1, this.target.block + step)) : 0;
    this.point({block}, "pool", true);
  }

  moveTables(event) {
    const rows = this.tablesLayout.rows.filter((row) => row.sequence?.blocks.length);
    if (event.key === "Escape") this.point(null, "tables", false);
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key) || rows.length === 0) return;
    event.preventDefault();
    let at = rows.findIndex((row) => row.sequence.id === this.target?.sequence && row.request.id === this.target?.request);
    if (at < 0) return this.first("tables");
    at = Math.max(0, Math.min(rows.length - 1, at + ({ArrowUp: -1, ArrowDown: 1}[event.key] ?? 0)));
    const last = rows[at].sequence.blocks.length - 1;
    const index = {ArrowLeft: this.target.index - 1, ArrowRight: this.target.index + 1, Home: 0, End: last}[event.key] ?? this.target.index;
    this.point(this.placeIn(rows[at], index), "tables", true);
    const cell = cellRect(this.tablesLayout, rows[at], this.target.index), room = this.scroll.clientHeight;
    if (cell.y < this.scroll.scrollTop) this.scroll.scrollTop = cell.y - 4;
    if (cell.y + cell.height > this.scroll.scrollTop + room) this.scroll.scrollTop = cell.y + cell.height - room + 4;
  }

  moveRegions(event) {
    const parts = regionParts(this.snapshot), at = parts.findIndex(({id}) => id === this.target?.region);
    const to = {ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: parts.length - 1}[event.key];
    if (event.key === "Escape") this.point(null, "regions", false);
    if (to === undefined || parts.length === 0) return;
    event.preventDefault();
    this.point({region: parts[Math.max(0, Math.min(parts.length - 1, to))].id}, "regions", true);
  }

  // One drawing for all changes between two frames of the screen.
  invalidate() {
    if (this.isDirty) return;
    this.isDirty = true;
    requestAnimationFrame(() => {
      this.isDirty = false;
      const begin = performance.now();
      this.draw();
      this.frameTimes.push(performance.now() - begin);
      if (this.frameTimes.length > 300) this.frameTimes.shift();
    });
  }

  draw() {
    const {snapshot, theme} = this, lit = new Set(this.target?.block !== undefined ? [this.target.block] : []);
    const pool = sizedContext(this.pool);
    this.poolLayout = poolLayout(snapshot.sizes.blocks, pool.width, pool.height);
    drawPool(pool.context, snapshot, this.poolLayout, theme, {lit});
    const tables = sizedContext(this.tables);
    let numSequences = 0;  // with many, a line of each block's text is enough
    for (const id of snapshot.running) numSequences += snapshot.requests.get(id).sequences.size;
    this.tablesLayout = tablesLayout(snapshot, tables.width, $("texts").checked, kSlotWidth, numSequences > 16);
    const isOver = snapshot.requests.size === 0 && this.tablesLayout.rows.length > 0;
    $("tables-size").style.height = `${this.tablesLayout.height + (isOver ? kOverHeight : 0)}px`;
    drawTables(tables.context, snapshot, this.tablesLayout, this.scroll.scrollTop, tables.height, theme, {lit});
    if (this.tablesLayout.rows.length === 0) this.drawNothing(tables);
    if (isOver) {
      tables.context.fillStyle = theme.dim;
      tables.context.font = "13px system-ui, sans-serif";
      tables.context.textAlign = "left";
      tables.context.fillText(this.ended, 0, this.tablesLayout.height - this.scroll.scrollTop + kOverHeight / 2, tables.width);
    }
    const host = sizedContext($("host"));
    drawHost(host.context, snapshot, host.width, host.height, theme);
    const tier = sizedContext($("tier"));
    drawTier(tier.context, snapshot, tier.width, tier.height, theme);
    const regions = sizedContext($("regions"));
    drawRegions(regions.context, snapshot, regions.width, regions.height, theme, this.target?.region);
    this.drawLines();
  }

  drawNothing({context, width, height}) {
    context.fillStyle = this.theme.dim;
    context.font = "13px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    const lines = [this.ended || this.invitation,
                   "Each request then gets a row here: its logical blocks 0, 1, 2, … in order,",
                   "each with the physical block that holds it. That row is the block table."];
    lines.forEach((line, index) => context.fillText(line, width / 2, height / 2 + (index - 1) * 20, width - 10));
  }

  // From the block in the pool to each of its places in the tables.
  drawLines() {
    const {context, width, height} = sizedContext($("overlay"));
    context.clearRect(0, 0, width, height);
    if (this.target?.block === undefined || !$("lines").checked || this.target.block >= this.poolLayout.drawn) return;
    const origin = $("overlay").getBoundingClientRect(), pool = this.pool.getBoundingClientRect(), scroll = this.scroll.getBoundingClientRect();
    const rect = blockRect(this.poolLayout, this.target.block);
    const isBeside = scroll.left >= pool.right;
    if (!isBeside && scroll.top - pool.bottom > 60) return;  // a line through the text between them would hide it
    const from = {x: pool.left - origin.left + rect.x + rect.size / (isBeside ? 1 : 2), y: pool.top - origin.top + rect.y + rect.size / (isBeside ? 2 : 1)};
    let drawn = 0;
    context.beginPath();
    context.rect(0, 0, width, scroll.bottom - origin.top);
    context.clip();
    for (const row of this.tablesLayout.rows) {
      row.sequence?.blocks.forEach((block, index) => {
        if (block !== this.target.block || drawn >= 32) return;
        const cell = cellRect(this.tablesLayout, row, index), y = cell.y - this.scroll.scrollTop;
        if (y + cell.height < 0 || y > scroll.height) return;
        drawn += 1;
        const to = {x: scroll.left - origin.left + cell.x, y: scroll.top - origin.top + y + cell.height / 2};
        for (const [color, lineWidth] of [[this.theme.card, 5], [this.theme.lit, 2]]) {
          context.strokeStyle = color;
          context.lineWidth = lineWidth;
          context.beginPath();
          context.moveTo(from.x, from.y);
          if (isBeside) context.bezierCurveTo((from.x + to.x) / 2, from.y, (from.x + to.x) / 2, to.y, to.x, to.y);
          else context.bezierCurveTo(from.x, (from.y + to.y) / 2, to.x - 30, to.y, to.x, to.y);
          context.stroke();
        }
      });
    }
  }
}
