"use strict";
// From a snapshot to a drawing: pure functions, which know nothing of the page around them: the live page and the widgets
// of the course's site (common/site/widgets) draw with them. Sizes in CSS pixels.
//
//   const layout = poolLayout(snapshot.sizes.blocks, width, height);
//   drawPool(context, snapshot, layout, themeOf(element), {lit: new Set([12])});

// What is drawn differs in shape too, and not in colour alone:
//   in a table   filled with its owner's colour, a mark for each slot that holds a token
//   shared       the same in a colour of no owner, in a frame (a double one, where there is room), with the number of tables
//   cached       hatched, without a number of an owner
//   free         an empty frame
//   swapped out  dotted
//   a copy       in a frame, with the block that it was copied from: 7 ← 3
//   read once    underlined, in the gap below, in the step in which several sequences' queries read it together
//   a draft      accepted: framed inside; taken back: hatched, its text struck through

function themeOf(element) {
  const style = getComputedStyle(element), value = (name) => style.getPropertyValue(name).trim();
  return {text: value("--text"), dim: value("--dim"), line: value("--line"), card: value("--card"), free: value("--free"),
          hatch: value("--hatch"), accent: value("--accent"), onAccent: value("--on-accent"), bad: value("--bad"), shared: value("--shared"), prompt: value("--prompt"), lit: value("--lit"),
          onOwner: value("--on-owner"), lightness: Number(value("--owner-lightness")), saturation: Number(value("--owner-saturation"))};
}

// A canvas with as many pixels as its place has, and its context in CSS pixels.
function sizedContext(canvas) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return {context, width, height};
}

const hueOf = (id) => (id * 137.5 + 210) % 360;
const colors = new Map();
function colorOf(theme, id, isFaint = false) {
  if (theme.hasEnded) return isFaint ? theme.free : theme.line;
  if (theme.owners?.[id]) return theme.owners[id] + (isFaint ? "59" : "");
  const name = `${id},${isFaint},${theme.lightness}`;
  if (!colors.has(name)) {
    if (colors.size > 5000) colors.clear();
    colors.set(name, `hsl(${hueOf(id)} ${theme.saturation}% ${theme.lightness}% / ${isFaint ? 0.35 : 1})`);
  }
  return colors.get(name);
}

const endedTheme = (theme) => ({...theme, hasEnded: true, text: theme.dim, onOwner: theme.text});

// The colour of a block that is in `tables` tables: what several have is of none of them.
const blockColor = (theme, owner, tables, isFaint = false) =>
  tables > 1 ? theme.shared + (isFaint ? "59" : "") : colorOf(theme, owner, isFaint);

const kMaxDrawn = 8192;  // blocks; of a larger pool the first are drawn

// The largest cells with which `count` blocks fill a width and a height.
function poolLayout(count, width, height) {
  const drawn = Math.min(count, kMaxDrawn);
  let cell = Math.min(92, Math.floor(Math.sqrt(width * height / Math.max(drawn, 1))) + 1);
  const columnsOf = () => Math.max(1, Math.floor(width / cell));
  while (cell > 3 && Math.ceil(drawn / columnsOf()) * cell > height) cell -= 1;
  return {drawn, count, width, height, cell, columns: columnsOf(), gap: cell >= 40 ? 6 : cell >= 24 ? 4 : cell >= 8 ? 2 : 1};
}

// Cells are squares, unless the layout has a rowHeight.
function blockRect(layout, block) {
  const {cell, columns, gap, rowHeight = cell} = layout;
  return {x: (block % columns) * cell, y: Math.floor(block / columns) * rowHeight, size: cell - gap, height: rowHeight - gap};
}

function blockAt(layout, x, y) {
  const column = Math.floor(x / layout.cell), block = Math.floor(y / (layout.rowHeight ?? layout.cell)) * layout.columns + column;
  return x >= 0 && y >= 0 && column < layout.columns && block < layout.drawn ? block : undefined;
}

// A tile of diagonal lines, made once for each colour: thousands of cells are hatched in each frame.
const hatches = new Map();
function hatch(context, x, y, width, height, color) {
  if (!hatches.has(color)) {
    const tile = Object.assign(document.createElement("canvas"), {width: 10, height: 10}), lines = tile.getContext("2d");
    lines.scale(2, 2);
    lines.strokeStyle = color;
    lines.lineWidth = 1.1;
    for (const [fromX, fromY, toX, toY] of [[-1, 6, 6, -1], [-1, 1, 1, -1], [4, 6, 6, 4]]) {
      lines.moveTo(fromX, fromY);
      lines.lineTo(toX, toY);
    }
    lines.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(0.5));
    hatches.set(color, pattern);
  }
  context.fillStyle = hatches.get(color);
  context.fillRect(x, y, width, height);
}

function dots(context, x, y, width, height, color) {
  context.fillStyle = color;
  for (let row = y + 3; row < y + height - 1; row += 5) {
    for (let column = x + 3; column < x + width - 1; column += 5) context.fillRect(column, row, 2, 2);
  }
}

const kLeastForTwo = 32;  // the height from which a shared block has two frames: in a lower one they would strike through its number

// state: {kind: "free" | "cached" | "owned" | "host", owner, filled, slots, tables, label, drafts, copyOf}; drafts as
// draftsIn() has them
function drawBlock(context, x, y, width, height, state, theme) {
  const isSmall = Math.min(width, height) < 9;
  if (state.kind === "free") {
    context.fillStyle = theme.free;
    context.fillRect(x, y, width, height);
    if (!isSmall) {
      context.strokeStyle = theme.line;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    }
  } else if (state.kind === "cached") {
    context.fillStyle = theme.free;
    context.fillRect(x, y, width, height);
    hatch(context, x, y, width, height, theme.hatch);
  } else if (state.kind === "host") {
    context.fillStyle = colorOf(theme, state.owner);
    context.fillRect(x, y, width, height);
    dots(context, x, y, width, height, theme.onOwner);
  } else {
    const color = blockColor(theme, state.owner, state.tables);
    context.fillStyle = theme.card;
    context.fillRect(x, y, width, height);
    context.fillStyle = blockColor(theme, state.owner, state.tables, true);
    context.fillRect(x, y, width, height);
    context.fillStyle = color;
    if (height < 24 || state.slots > 64) {  // no room for a mark for each slot: a bar, which leaves the number readable
      const bar = width >= 17 ? 5 : height;
      context.fillRect(x, y + height - bar, width * state.filled / state.slots, bar);
      for (const {slot, isAccepted} of state.drafts ?? []) {
        drawDraft(context, x + width * slot / state.slots, y + height - bar, width / state.slots, bar, isAccepted, theme);
      }
    } else {
      drawSlots(context, x, y, width, height, state, color, theme);
    }
    if (state.tables > 1) {
      context.strokeStyle = theme.text;
      context.lineWidth = isSmall ? 1 : 1.5;
      context.strokeRect(x + 0.75, y + 0.75, width - 1.5, height - 1.5);
      if (height >= kLeastForTwo) context.strokeRect(x + 3.25, y + 3.25, width - 6.5, height - 6.5);
    }
  }
  if (state.label !== undefined && width >= 17) {
    context.font = `600 ${height >= 24 ? 10 : 9}px system-ui, sans-serif`;
    const isNarrow = width < 44, isFramed = state.tables > 1, inset = isFramed && height >= kLeastForTwo ? 6 : isFramed ? 3 : isNarrow ? 2.5 : 5;
    const fits = (candidate) => context.measureText(candidate).width <= width - 2 * inset;
    const more = state.copyOf !== undefined && isNarrow ? `←${state.copyOf}` : state.tables > 1 ? `×${state.tables}` : "";
    const text = [`${state.label} ${more}`, `${state.label}${more}`].find((candidate) => more && fits(candidate)) ?? String(state.label);  // or the number alone
    context.textBaseline = height >= 24 ? "top" : "middle";
    context.textAlign = "left";
    if (state.kind === "cached" || state.kind === "host") {
      context.fillStyle = theme.card;
      context.fillRect(x + inset - 2, height >= 24 ? y + 3 : y + height / 2 - 6, Math.min(width - inset, context.measureText(text).width + 4), 12);
    }
    context.fillStyle = state.kind === "free" ? theme.dim : theme.text;
    const line = height >= 24 ? y + (isFramed ? 6 : 5) : y + height / 2 - (state.kind === "owned" ? 1.5 : -0.5);
    context.fillText(text, x + inset, line, width - 2 * inset + 1);
    const end = context.measureText(text).width + 7, origin = `← ${state.copyOf}`;
    if (state.copyOf !== undefined && width - end > 18) {
      const room = Math.min(context.measureText(origin).width, width - end - 5);
      context.fillStyle = theme.card;  // on an owner's colour it would be hard to read
      context.fillRect(x + end, height >= 24 ? y + 3 : line - 6, room + 4, 12);
      context.fillStyle = theme.bad;
      context.fillText(origin, x + end + 2, line, room);
    }
  }
}

// Below the number, if there is one: a mark for each slot, solid where a token is stored.
function drawSlots(context, x, y, width, height, state, color, theme) {
  const top = y + (state.label === undefined ? 4 : 16), room = {width: width - 8, height: y + height - 4 - top};
  let columns = state.columns ?? 1;
  while (!state.columns && columns < state.slots && Math.min(room.width / columns, room.height / Math.ceil(state.slots / columns)) <
         Math.min(room.width / (columns + 1), room.height / Math.ceil(state.slots / (columns + 1)))) columns += 1;
  const size = Math.min(room.width / columns, room.height / Math.ceil(state.slots / columns));
  for (let slot = 0; slot < state.slots; ++slot) {
    const left = x + 4 + (slot % columns) * size, up = top + Math.floor(slot / columns) * size, side = Math.max(1.5, size - 1.5);
    if (slot < state.filled) {
      context.fillStyle = color;
      context.fillRect(left, up, side, side);
      if (size > 5) {
        context.strokeStyle = theme.onOwner;
        context.lineWidth = 0.5;
        context.strokeRect(left, up, side, side);
      }
    } else if (size > 3) {
      context.strokeStyle = theme.hatch;
      context.lineWidth = 0.75;
      context.strokeRect(left + 0.5, up + 0.5, side - 1, side - 1);
    }
    const draft = state.drafts?.find((candidate) => candidate.slot === slot);
    if (draft) drawDraft(context, left, up, side, side, draft.isAccepted, theme);
  }
}

// The mark of a slot that held a draft, over the slot.
function drawDraft(context, x, y, width, height, isAccepted, theme) {
  const line = Math.min(width, height) > 8 ? 2 : 1;
  if (width < 5) {  // a slot of a bar: of its whole height, or of half
    context.fillStyle = isAccepted ? theme.text : theme.bad;
    return context.fillRect(x, y, Math.max(1, width - 0.5), isAccepted ? height : height / 2);
  }
  if (!isAccepted) hatch(context, x, y, width, height, theme.hatch);
  context.strokeStyle = isAccepted ? theme.text : theme.bad;
  context.lineWidth = line;
  if (isAccepted) return context.strokeRect(x + line / 2 + 0.5, y + line / 2 + 0.5, width - line - 1, height - line - 1);
  context.beginPath();
  context.moveTo(x + 1, y + height / 2);
  context.lineTo(x + width - 1, y + height / 2);
  context.stroke();
}

function stateOf(snapshot, block) {
  const places = placesOf(snapshot).get(block), slots = snapshot.sizes.block_size;
  if (places) {
    let filled = 0;
    for (const place of places) filled = Math.max(filled, filledSlots(place, slots));
    const drafts = snapshot.happened.drafts.length ? places.flatMap((place) => draftsIn(snapshot, place)) : [];
    return {kind: "owned", owner: places[0].request.id, filled, slots, columns: snapshot.sizes.columns, tables: places.length,
            label: block, drafts};
  }
  return {kind: snapshot.cached.has(block) ? "cached" : "free", owner: -1, filled: 0, slots, tables: 0, label: block};
}

// The corner of a block whose cached text was given up.
function drawReused(context, x, y, size, theme) {
  context.fillStyle = theme.dim;
  context.beginPath();
  context.moveTo(x + size / 2, y);
  context.lineTo(x + size, y);
  context.lineTo(x + size, y + size / 2);
  context.fill();
}

function frame(context, x, y, width, height, theme) {
  context.strokeStyle = theme.card;
  context.lineWidth = 5;
  context.strokeRect(x - 1, y - 1, width + 2, height + 2);
  context.strokeStyle = theme.lit;
  context.lineWidth = 2.5;
  context.strokeRect(x - 1, y - 1, width + 2, height + 2);
}

// bend: how far its middle is off the straight line.
function arrow(context, from, to, color, bend = 0) {
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1, head = 8;
  const middle = {x: (from.x + to.x) / 2 - 2 * bend * (to.y - from.y) / length, y: (from.y + to.y) / 2 + 2 * bend * (to.x - from.x) / length};
  const angle = Math.atan2(to.y - middle.y, to.x - middle.x);
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = 2.5;
  context.beginPath();
  context.moveTo(from.x, from.y);
  context.quadraticCurveTo(middle.x, middle.y, to.x, to.y);
  context.stroke();
  context.beginPath();
  context.moveTo(to.x, to.y);
  for (const turn of [2.6, -2.6]) context.lineTo(to.x + head * Math.cos(angle + turn), to.y + head * Math.sin(angle + turn));
  context.fill();
}

function caption(context, text, x, y, layout, theme) {
  context.font = "600 11px system-ui, sans-serif";
  const width = Math.min(46, context.measureText(text).width + 8);
  const left = Math.max(0, Math.min(layout.width - width, x - width / 2)), top = Math.max(0, Math.min(layout.height - 16, y - 8));
  context.fillStyle = theme.dim;
  context.fillRect(left, top, width, 16);
  context.fillStyle = theme.card;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(text, left + 3, top + 8.5, width - 6);
}

const kLeastForWays = 24;  // smaller cells have no gaps to draw in, and no marks of slots that an arrow would hide

// The way of a copy from block to block: through the gaps between blocks, so that it hides no slot. lane: how far it is from
// the gap's middle. In the same row it leaves and arrives below.
function copyWay(layout, from, to, lane) {
  const source = blockRect(layout, from), target = blockRect(layout, to), half = layout.gap / 2, rowHeight = layout.rowHeight ?? layout.cell;
  const rows = Math.round((target.y - source.y) / rowHeight), isDown = rows >= 0;
  const leave = source.x + source.size / 2 - 5, arrive = target.x + target.size / 2 + 5;
  const begin = isDown ? source.y + source.height : source.y, gap = begin + (isDown ? half : -half) + lane;
  const end = rows > 0 ? target.y : target.y + target.height;
  const way = [{x: leave, y: begin}, {x: leave, y: gap}];
  if (rows > 1 || rows < -1) {
    const beside = target.x + target.size + half + lane, last = end + (rows > 0 ? -half : half) + lane;
    way.push({x: beside, y: gap}, {x: beside, y: last}, {x: arrive, y: last});
  } else {
    way.push({x: arrive, y: gap});
  }
  return [...way, {x: arrive, y: end + (rows > 0 ? 1 : -1)}];
}

// Copies of the same block share its way.
function drawCopies(context, copies, layout, theme) {
  const sources = [...new Set(copies.map(([from]) => from))];
  context.save();  // the next frames have corners
  for (const [from, to] of copies) {
    const lane = [0, 1, -1][sources.indexOf(from) % 3] * layout.gap / 3, way = copyWay(layout, from, to, lane);
    context.strokeStyle = context.fillStyle = theme.bad;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    for (const {x, y} of way) context.lineTo(x, y);
    context.stroke();
    const {x, y} = way.at(-1), back = Math.sign(way.at(-2).y - y) || 1;
    context.beginPath();
    for (const [right, up] of [[0, -2], [4.5, 4.5], [-4.5, 4.5]]) context.lineTo(x + right, y + up * back);
    context.fill();
    context.beginPath();
    context.arc(way[0].x, way[0].y, 2.5, 0, 2 * Math.PI);
    context.fill();
  }
  context.restore();
}

// A block that moved to the host's memory below, or from there: a mark at its lower edge.
function drawMove(context, block, isOut, layout, theme) {
  const {x, y, size, height} = blockRect(layout, block), reach = Math.max(2, Math.min(4.5, size / 6)), edge = y + height;
  context.fillStyle = theme.bad;
  context.beginPath();
  for (const [right, down] of [[-1, -1], [1, -1], [0, 1]]) context.lineTo(x + size / 2 + 1.3 * reach * right, edge + reach * (isOut ? down : -down));
  context.fill();
}

// The line under a block that was read once for several sequences.
function drawReadOnce(context, {x, y, size, width = size, height}, theme) {
  context.fillStyle = theme.accent;
  context.fillRect(x, y + height - (height < 24 ? 2 : 0), width, height < 24 ? 2 : 3);
}

// lit: blocks to put a frame around. What the snapshot's step did is drawn where it did it.
function drawPool(context, snapshot, layout, theme, {lit = new Set()} = {}) {
  context.clearRect(-4, -4, layout.width + 8, layout.height + 8);  // frames are a little larger than their blocks
  const isInside = ([from, to]) => from < layout.count && to < layout.count;
  const copies = snapshot.happened.copies.filter((copy) => isInside(copy) && Math.max(...copy) < layout.drawn);
  const origins = new Map(copies.map(([from, to]) => [to, from]));
  for (let block = 0; block < layout.drawn; ++block) {
    const {x, y, size, height} = blockRect(layout, block);
    drawBlock(context, x, y, size, height, {...stateOf(snapshot, block), copyOf: origins.get(block)}, theme);
    if (!origins.has(block) || layout.cell < kLeastForWays) continue;
    context.strokeStyle = theme.bad;
    context.lineWidth = 1.5;
    context.strokeRect(x - 0.25, y - 0.25, size + 0.5, height + 0.5);
  }
  for (const block of snapshot.happened.evicted) {
    if (block >= layout.drawn) continue;
    const {x, y, size} = blockRect(layout, block);
    const isReused = placesOf(snapshot).has(block);
    if (size >= 64 && !origins.has(block)) caption(context, isReused ? "reused" : "evicted", x + size - 24, y + 9, layout, theme);
    else if (size >= 6) {  // no room for a word beside the block's number: a corner
      drawReused(context, x, y, size, theme);
    }
  }
  for (const block of snapshot.happened.shared.blocks) {
    if (block < layout.drawn) drawReadOnce(context, blockRect(layout, block), theme);
  }
  for (const block of lit) {
    if (block >= layout.drawn) continue;
    const {x, y, size, height} = blockRect(layout, block);
    frame(context, x, y, size, height, theme);
  }
  const center = (block) => {
    const {x, y, size, height} = blockRect(layout, block);
    return {x: x + size / 2, y: y + height / 2};
  };
  if (layout.cell >= kLeastForWays) drawCopies(context, copies, layout, theme);
  else copies.forEach(([from, to], index) => arrow(context, center(from), center(to), theme.bad, 6 + 5 * index));
  const moves = [...snapshot.happened.copies, ...snapshot.happened.tier];
  for (const [from, to] of moves.filter((copy) => !isInside(copy) && Math.min(...copy) < layout.drawn)) {
    drawMove(context, Math.min(from, to), from < to, layout, theme);
  }
}

// How many blocks the step moved to the host's memory, and from there.
function movesText({happened, sizes}) {
  const numOut = happened.copies.filter(([, to]) => to >= sizes.blocks).length, numIn = happened.copies.filter(([from]) => from >= sizes.blocks).length;
  return [...(numOut ? [`${numOut} swapped out ↓`] : []), ...(numIn ? [`${numIn} swapped in ↑`] : [])].join(", ");
}

// Blocks in the host's memory, in groups by the request that is swapped out.
function drawHost(context, snapshot, width, height, theme) {
  context.clearRect(0, 0, width, height);
  if (snapshot.sizes.host_blocks === 0) return;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.fillStyle = theme.dim;
  const used = snapshot.counters.host_used ?? 0, total = snapshot.sizes.host_blocks;
  const text = `host's memory: ${used} of ${total}`, moves = movesText(snapshot);
  context.fillText(text, 0, height / 2 - (moves ? 7 : 0), width);
  context.fillStyle = theme.bad;
  context.fillText(moves, 0, height / 2 + 7, width);
  let x = Math.max(context.measureText("host's memory: 0000 of 0000").width, context.measureText(moves).width) + 8;
  const blocks = [...snapshot.requests.values()].filter((request) => request.swapped).flatMap((request) => Array(request.hostBlocks).fill(request));
  const cell = Math.max(4, Math.min(24, Math.floor((width - x) / Math.max(blocks.length, 1))));
  for (const request of blocks) {
    drawBlock(context, x, (height - cell) / 2, cell - 2, cell - 2, {kind: "host", owner: request.id, label: nameOf(request)}, theme);
    x += cell;
  }
}

// The second tier as a bar: its blocks with a text are hatched, as cached ones are. Blocks whose memory has not arrived
// yet have no frame.
function drawTier(context, snapshot, width, height, theme) {
  context.clearRect(0, 0, width, height);
  const {tier_blocks: total} = snapshot.sizes, used = snapshot.counters.tier_used ?? 0;
  const allocated = snapshot.counters.tier_allocated ?? total;
  if (!total) return;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.fillStyle = theme.dim;
  const {kept, back} = tierMoves(snapshot);
  const moves = [...(kept ? [`${kept} kept ↓`] : []), ...(back ? [`${back} brought back ↑`] : [])].join(", ");
  const size = allocated < total ? `${allocated} allocated, ${total} asked for` : `${total}`;
  context.fillText(`second tier: ${used} of ${size}`, 0, height / 2 - (moves ? 7 : 0), width);
  context.fillStyle = theme.bad;
  context.fillText(moves, 0, height / 2 + 7, width);
  const x = Math.max(context.measureText(`second tier: 0000 of ${size}`).width, context.measureText(moves).width) + 8;
  drawBlock(context, x, 6, (width - x) * allocated / total, height - 12, {kind: "free"}, theme);
  if (used) drawBlock(context, x, 6, (width - x) * used / total, height - 12, {kind: "cached"}, theme);
}

// A bar of all slots, with a region for each request that would fit: solid where tokens are, hatched where reserved.
// lit: the request whose region to put a frame around, or kRest.
function drawRegions(context, snapshot, width, height, theme, lit) {
  context.clearRect(0, 0, width, height);
  context.fillStyle = theme.free;
  context.fillRect(0, 0, width, height);
  const scale = width / Math.max(snapshot.sizes.slots, 1);
  for (const {id, begin, length, need} of regionsOf(snapshot).regions) {
    context.fillStyle = colorOf(theme, id);
    context.fillRect(begin * scale, 0, length * scale, height);
    if ((need - length) * scale > 2) hatch(context, (begin + length) * scale, 0, (need - length) * scale, height, theme.hatch);
    if (need * scale < 4) continue;
    context.strokeStyle = theme.text;
    context.lineWidth = 1;
    context.strokeRect(begin * scale + 0.5, 0.5, need * scale - 1, height - 1);
    if (need * scale < 22) continue;
    context.fillStyle = theme.card;
    context.fillRect(begin * scale + 2, 2, 17, height - 4);
    context.fillStyle = theme.text;
    context.font = "600 10px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(id, begin * scale + 10.5, height / 2 + 0.5, 16);
  }
  const part = regionParts(snapshot).find(({id}) => id === lit);
  if (part) frame(context, part.begin * scale + 2, 3, part.need * scale - 4, height - 6, theme);
}

// The request whose region is at a point of the bar, or kRest.
function regionAt(snapshot, width, x) {
  const slot = x * snapshot.sizes.slots / Math.max(width, 1);
  return regionParts(snapshot).find(({begin, need}) => slot >= begin && slot < begin + need)?.id;
}

// ---- Block tables ----

const kLabelWidth = 62, kSlotWidth = 40, kSlotHeight = 15, kHeaderHeight = 13, kQueueHeight = 19, kLineCellHeight = 31;

// Rows of sequences, and where their logical blocks are. hasTexts: with the tokens' texts in the slots, which have
// slotWidth or more. isBrief: with a line of text in a block instead, for many sequences.
function tablesLayout(snapshot, width, hasTexts, slotWidth = kSlotWidth, isBrief = false) {
  const size = snapshot.sizes.block_size, slotColumns = size <= 16 ? Math.min(size, 4) : 8;
  const withTexts = hasTexts && size <= 32 && !isBrief, withLine = hasTexts && !withTexts;
  const cellHeight = withTexts ? kHeaderHeight + Math.ceil(size / slotColumns) * kSlotHeight + 2 : withLine ? kLineCellHeight : 17;
  const gap = withTexts ? 4 : 2, least = withTexts ? slotColumns * slotWidth + 4 : withLine ? 88 : 40;
  const live = [...snapshot.running, ...snapshot.waiting].map((id) => snapshot.requests.get(id)), ended = snapshot.ended ?? [];
  let columns = Math.max(1, Math.floor((width - kLabelWidth) / (least + gap)));
  if (!withTexts) {  // what the longest table needs, in steps, so that widths seldom change
    const longest = Math.max(1, ...[...live, ...ended].flatMap(({sequences}) => [...sequences.values()].map(({blocks}) => blocks.length)));
    columns = Math.min(columns, 4 * Math.ceil(longest / 4));
  }
  const cellWidth = Math.floor((width - kLabelWidth) / columns) - gap;  // cells take what there is
  const rows = [];
  let y = 3;
  let isFirst = true;  // of the swapped-out requests
  const add = (request, hasEnded) => {
    for (const sequence of request.sequences.values()) {
      const height = Math.max(1, Math.ceil(sequence.blocks.length / columns)) * (cellHeight + gap) + (withTexts ? 4 : 2);
      rows.push({request, sequence, y, height, hasEnded});
      y += height;
    }
  };
  for (const request of live) {
    add(request, false);
    if (request.sequences.size === 0) {
      rows.push({request, sequence: null, y, height: kQueueHeight, isFirst: request.swapped && isFirst});
      isFirst &&= !request.swapped;
      y += kQueueHeight;
    }
  }
  for (const request of ended) add(request, true);
  return {rows, width, height: y + 4, cellWidth, cellHeight, gap, columns, withTexts, withLine, slotColumns};
}

function cellRect(layout, row, index) {
  return {x: kLabelWidth + (index % layout.columns) * (layout.cellWidth + layout.gap),
          y: row.y + Math.floor(index / layout.columns) * (layout.cellHeight + layout.gap) + 1, width: layout.cellWidth, height: layout.cellHeight};
}

// The row whose label is at a point.
const labelAt = (layout, x, y) => x >= kLabelWidth ? undefined : layout?.rows.find((row) => y >= row.y && y < row.y + row.height);

// The place in a table at a point, as sentenceOf() takes it.
function placeAt(snapshot, layout, x, y) {
  let low = 0, high = layout.rows.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (layout.rows[middle].y <= y) low = middle; else high = middle - 1;
  }
  const row = layout.rows[low];
  if (!row?.sequence || x < kLabelWidth) return undefined;
  const column = Math.floor((x - kLabelWidth) / (layout.cellWidth + layout.gap));
  const index = Math.floor((y - row.y) / (layout.cellHeight + layout.gap)) * layout.columns + column;
  if (column >= layout.columns || row.sequence.blocks[index] === undefined) return undefined;
  const place = {block: row.sequence.blocks[index], sequence: row.sequence.id, request: row.request.id, index};
  if (layout.withTexts) {
    const cell = cellRect(layout, row, index), size = snapshot.sizes.block_size;
    const slotColumn = Math.min(layout.slotColumns - 1, Math.floor((x - cell.x - 2) / ((cell.width - 4) / layout.slotColumns)));
    const slot = Math.floor((y - cell.y - kHeaderHeight) / kSlotHeight) * layout.slotColumns + slotColumn;
    const isDraft = draftsIn(snapshot, {...row, index}).some((draft) => draft.slot === slot);
    if (slot >= 0 && slot < size && (isDraft || index * size + slot < row.sequence.length)) place.position = index * size + slot;
  }
  return place;
}

function drawTables(context, snapshot, layout, scrollTop, height, liveTheme, {lit = new Set()} = {}) {
  context.clearRect(-4, 0, layout.width + 8, height);
  const size = snapshot.sizes.block_size, batch = new Map(snapshot.happened.batch), readTogether = new Set(snapshot.happened.shared.blocks);
  context.save();
  context.translate(0, -scrollTop);
  for (const row of layout.rows) {
    if (row.y + row.height < scrollTop || row.y > scrollTop + height) continue;
    const theme = row.hasEnded ? endedTheme(liveTheme) : liveTheme;
    drawRowLabel(context, row, batch, theme);
    if (!row.sequence) {
      drawQueued(context, snapshot, row, layout, theme);
      continue;
    }
    const standsIn = numStoodIn(row.sequence);
    row.sequence.blocks.forEach((block, index) => {
      const cell = cellRect(layout, row, index);
      if (cell.y + cell.height < scrollTop || cell.y > scrollTop + height) return;
      const tables = row.hasEnded ? 1 : placesOf(snapshot).get(block)?.length ?? 1;
      const filled = filledSlots({sequence: row.sequence, index}, size), drafts = row.hasEnded ? [] : draftsIn(snapshot, {...row, index});
      if (index < standsIn) drawStandIn(context, cell, index, block, layout, theme);
      else if (layout.withTexts) drawTexts(context, cell, layout, row, index, {block, tables, filled, size, drafts}, theme);
      else if (layout.withLine) drawLine(context, cell, row, index, {block, tables, filled, size, drafts}, theme);
      else drawBlock(context, cell.x, cell.y, cell.width, cell.height, {kind: "owned", owner: row.request.id, filled, slots: size, tables, label: block, drafts}, theme);
      if (!row.hasEnded && readTogether.has(block)) drawReadOnce(context, cell, theme);
      if (lit.has(block)) frame(context, cell.x, cell.y, cell.width, cell.height, theme);
    });
  }
  context.restore();
}

// A place in a table behind the window: the block there is another one, which is empty.
function drawStandIn(context, {x, y, width, height}, index, block, layout, theme) {
  drawBlock(context, x, y, width, height, {kind: "free", label: layout.withTexts ? `${index} → block ${block}, stands in` : block}, theme);
}

function drawRowLabel(context, row, batch, theme) {
  const sequences = [...row.request.sequences.keys()], number = row.sequence ? sequences.indexOf(row.sequence.id) : 0;
  context.fillStyle = colorOf(theme, row.request.id);
  context.fillRect(0, row.y + 2, 32, 15);
  context.fillStyle = theme.onOwner;
  context.font = "600 11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "center";
  context.fillText(nameOf(row.request), 16, row.y + 10, 30);
  context.textAlign = "left";
  context.font = "10px system-ui, sans-serif";
  context.fillStyle = theme.dim;
  if (sequences.length > 1) context.fillText(`.${number + 1}`, 34, row.y + 10, 26);
  if (row.hasEnded && sequences.length < 2) context.fillText("ended", 34, row.y + 10, 27);
  const served = number === 0 && !row.hasEnded ? batch.get(row.request.id) : 0;
  if (served && sequences.length < 2) context.fillText(`+${served}`, 36, row.y + 10, 24);
  if (row.sequence && row.height > 30) context.fillText(`${row.sequence.length} tokens`, 0, row.y + 25, 58);
}

function drawQueued(context, snapshot, row, layout, theme) {
  const {request} = row;
  const text = request.swapped ? `swapped out: ${request.hostBlocks} block${request.hostBlocks === 1 ? "" : "s"} in the host's memory; ${row.isFirst ? "comes back first" : "then this one"}`
    : request.wasPreempted ? "preempted: it released its blocks, and is computed again when there is room"
    : `waits in the queue, with a prompt of ${request.prompt} tokens`;
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = request.swapped || request.wasPreempted ? theme.bad : theme.dim;
  context.fillText(text, kLabelWidth, row.y + 10, layout.width - kLabelWidth);
}

// A block with its text in a line, as far as there is room: one that is being written shows where that is.
function drawLine(context, cell, row, index, {block, tables, filled, size, drafts}, theme) {
  const {x, y, width, height} = cell, bar = 4;
  context.fillStyle = blockColor(theme, row.request.id, tables, true);
  context.fillRect(x, y, width, height);
  context.fillStyle = blockColor(theme, row.request.id, tables);
  context.fillRect(x, y + height - bar, width * filled / size, bar);
  for (const {slot, isAccepted} of drafts) drawDraft(context, x + width * slot / size, y + height - bar, width / size, bar, isAccepted, theme);
  if (tables > 1) {
    context.strokeStyle = theme.text;
    context.lineWidth = 1.5;
    context.strokeRect(x + 0.75, y + 0.75, width - 1.5, height - 1.5);
  }
  context.fillStyle = theme.text;
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.font = "600 10px system-ui, sans-serif";
  context.fillText(`${block}${tables > 1 ? ` ×${tables}` : ""}`, x + 4, y + 8, width - 8);
  const text = legible(textsIn(row.sequence, index, size).slice(0, filled).filter((token) => !/^<.+>$/.test(token)).join("")).trim();
  context.font = "11px system-ui, sans-serif";
  const isCut = context.measureText(text).width > width - 8, isWritten = filled < size;
  context.save();
  context.beginPath();
  context.rect(x + 4, y, width - 8, height);
  context.clip();
  context.textAlign = isCut && isWritten ? "right" : "left";
  context.fillText(text, isCut && isWritten ? x + width - 4 : x + 4, y + 20);
  context.restore();
}

// A logical block: its number, the physical block that it is, and its slots with the texts of their tokens.
function drawTexts(context, cell, layout, row, index, {block, tables, filled, size, drafts}, theme) {
  const slotWidth = (cell.width - 4) / layout.slotColumns;
  context.fillStyle = blockColor(theme, row.request.id, tables, true);
  context.fillRect(cell.x, cell.y, cell.width, cell.height);
  context.textBaseline = "middle";
  context.font = "600 10px system-ui, sans-serif";
  context.fillStyle = theme.text;
  context.textAlign = "left";
  const name = `${index} → block ${block}${tables > 1 ? `  ×${tables}` : ""}`, instead = drafts.find(({drawn}) => drawn !== undefined);
  context.fillText(name, cell.x + 4, cell.y + 7.5, cell.width - 8);
  if (instead) {  // the first draft that was taken back, and what the model drew
    const text = `instead: ${visible(instead.drawn)}`, room = Math.min(context.measureText(text).width, cell.width - context.measureText(name).width - 16);
    context.fillStyle = theme.card;
    context.fillRect(cell.x + cell.width - room - 6, cell.y + 1, room + 4, 12);
    context.fillStyle = theme.accent;
    context.fillText(text, cell.x + cell.width - room - 4, cell.y + 7.5, room);
  }
  context.font = "11px ui-monospace, monospace";
  for (let slot = 0; slot < size; ++slot) {
    const x = cell.x + 2 + (slot % layout.slotColumns) * slotWidth, y = cell.y + kHeaderHeight + Math.floor(slot / layout.slotColumns) * kSlotHeight;
    const text = row.sequence.texts[index * size + slot];
    if (slot < filled) {
      context.fillStyle = blockColor(theme, row.request.id, tables);
      context.fillRect(x + 0.5, y + 0.5, slotWidth - 1, kSlotHeight - 1.5);
      context.fillStyle = theme.onOwner;
      if (text !== undefined) context.fillText(/^<.+>$/.test(text) ? "⊢" : visible(text).slice(0, 12), x + 2, y + 7.5, slotWidth - 4);
    } else {
      context.strokeStyle = theme.hatch;
      context.lineWidth = 0.75;
      context.strokeRect(x + 1, y + 1, slotWidth - 2, kSlotHeight - 3);
    }
    const draft = drafts.find((candidate) => candidate.slot === slot);
    if (draft?.isAccepted === false) {  // hatched around its text, which stays readable
      const guess = visible(draft.text).slice(0, 12), width = Math.min(slotWidth - 4, context.measureText(guess).width + 2);
      hatch(context, x + 0.5, y + 0.5, slotWidth - 1, kSlotHeight - 1.5, theme.hatch);
      context.fillStyle = theme.card;
      context.fillRect(x + 2, y + 1.5, width, kSlotHeight - 4);
      context.fillStyle = theme.text;
      context.fillText(guess, x + 2, y + 7.5, slotWidth - 4);
      context.fillStyle = theme.bad;
      context.fillRect(x + 1, y + 8, width + 2, 1);
      if (draft === instead) {
        context.strokeStyle = theme.accent;
        context.lineWidth = 1.5;
        context.strokeRect(x + 0.75, y + 0.75, slotWidth - 1.5, kSlotHeight - 2);
      }
    } else if (draft) {
      drawDraft(context, x, y, slotWidth, kSlotHeight, true, theme);
    }
  }
  if (tables > 1) {
    context.strokeStyle = theme.text;
    context.lineWidth = 1.2;
    context.strokeRect(cell.x + 0.6, cell.y + 0.6, cell.width - 1.2, cell.height - 1.2);
    context.strokeRect(cell.x - 1.6, cell.y - 1.6, cell.width + 3.2, cell.height + 3.2);
  }
}
