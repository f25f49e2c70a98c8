"use strict";
// From records (common/serving/pool_view.h) to snapshots. A snapshot is the whole state after a step. It never changes,
// so that going back in time is looking at an older one; consecutive snapshots share what a step did not change.
//
//   snapshot = {number, step, steps, sizes, paused, draining, running: [ids], waiting: [ids], requests: Map(id -> request),
//               ended: [requests], cached: Map(block -> texts), counters, atStart, poolsSeen, numRunning, numWaiting, happened}
//   ended: as they last were, where there is room for their tables: until the first request after them all
//   atStart: the counters when its pool was made; poolsSeen: how many pools this page has seen before it
//   happened: what pool_view.h says, and found: prompt tokens that were in the pool when their request was first admitted;
//   copies: without the second tier's, which are in tier: [source, destination], numbered from blocks + host_blocks on;
//   foundAgain: own tokens that resumed requests found; drafts: [{request, sequence, position, accepted, texts, drawn}],
//   drawn: what the model drew behind the accepted drafts; released: Map(block -> preempted request that had it);
//   shared: {blocks, saved}: blocks that were read once for several sequences, and how often they would have been read
//   besides; behind: how many blocks sequences have given up because they are behind their window
//   request  = {id, name, prompt, max, swapped, hostBlocks, wasPreempted, sequences: Map(id -> {id, length, blocks, texts}),
//               lastHeld: {sequences, tokens}}, how many it has in the pool or, since its preemption, had

const emptySnapshot = () => ({number: 0, step: -1, steps: [], paused: false, draining: false, running: [], waiting: [], requests: new Map(), ended: [],
                              cached: new Map(), counters: {}, atStart: {}, poolsSeen: 0, numRunning: 0, numWaiting: 0,
                              sizes: {slots: 0, block_size: 1, blocks: 0, host_blocks: 0, tier_blocks: 0, window_blocks: 0}, happened: noEvents()});
const noEvents = () => ({admitted: [], ended: [], recomputed: [], swapped_out: [], copies: [], tier: [], evicted: [], found: 0, foundAgain: 0, moves: 0, batch: [],
                         drafts: [], released: new Map(), shared: {blocks: [], saved: 0}, behind: 0});

function applyRequest(old, change) {
  const request = {id: change.id, prompt: change.prompt ?? old?.prompt ?? 0, max: change.max ?? old?.max ?? 0,
                   swapped: change.swapped ?? old?.swapped ?? false, sequences: new Map(old?.sequences ?? [])};
  for (const id of change.gone ?? []) request.sequences.delete(id);
  for (const {id, length, from, blocks, at, texts} of change.sequences ?? []) {
    const before = request.sequences.get(id);
    request.sequences.set(id, {id, length, blocks: [...(before?.blocks.slice(0, from) ?? []), ...blocks],
                               texts: [...(before?.texts.slice(0, at) ?? []), ...texts]});
  }
  const held = [...request.sequences.values()];
  request.lastHeld = held.length || !old ? {sequences: Math.max(1, held.length), tokens: held.reduce((sum, {length}) => sum + length, 0)} : old.lastHeld;
  return request;
}

// What a row of the tables is, with what stands beside it.
function rowSentence(snapshot, {request, sequence, hasEnded}) {
  if (hasEnded) return `${ownerName({request, sequence})} has ended: this was its table. Its blocks are free, cached, or in other tables by now`;
  if (!sequence) return `request ${request.id}, in the queue: no blocks in the pool`;
  const served = new Map(snapshot.happened.batch).get(request.id) ?? 0, drafts = draftsOf(snapshot, request.id, sequence.id);
  return `${ownerName({request, sequence})}: ${sequence.length} token${sequence.length === 1 ? "" : "s"} in the pool; ${served} computed in this step` +
    (request.sequences.size > 1 ? ", by all its sequences together" : "") +
    (drafts ? `; ${drafts.texts.length} of them drafts (guesses), of which ${drafts.accepted} became text` : "");
}

// A sequence's drafts in the snapshot's step, if it had some.
const draftsOf = (snapshot, request, sequence) =>
  snapshot.happened.drafts.find((drafts) => drafts.request === request && drafts.sequence === sequence);

// The drafts in one of a sequence's logical blocks, as {position, slot, text, isAccepted}.
function draftsIn(snapshot, {request, sequence, index}) {
  const drafts = snapshot.happened.drafts.length ? draftsOf(snapshot, request.id, sequence.id) : undefined;
  if (!drafts) return [];
  const begin = index * snapshot.sizes.block_size;
  return drafts.texts.map((text, number) => ({position: drafts.position + number, slot: drafts.position + number - begin, text,
                                              isAccepted: number < drafts.accepted, isFirstBack: number === drafts.accepted,
                                              drawn: number === drafts.accepted ? drafts.drawn : undefined}))
    .filter(({slot}) => slot >= 0 && slot < snapshot.sizes.block_size);
}

// The texts in a block of a sequence.
const textsIn = (sequence, index, blockSize) => sequence.texts.slice(index * blockSize, (index + 1) * blockSize);

// Cached blocks that have an owner again were found by their text, or evicted to make room for another.
function evictedBlocks(before, after, record) {
  const gone = new Set(record.uncached ?? []);
  if (gone.size === 0) return [];
  for (const {id} of record.requests) {
    for (const sequence of after.requests.get(id)?.sequences.values() ?? []) {
      sequence.blocks.forEach((block, index) => {
        const found = gone.has(block) &&
          textsIn(sequence, index, after.sizes.block_size).join("") === before.cached.get(block).join("");
        if (found) gone.delete(block);
      });
    }
  }
  return [...gone];
}

function applyRecord(last, record) {
  const before = record.whole ? {...emptySnapshot(), number: last.number, step: last.step, sizes: last.sizes} : last;
  const next = {number: last.number + 1, sizes: record.sizes ?? before.sizes, paused: record.paused, draining: record.draining ?? false, counters: record.counters,
                running: record.running ?? before.running, waiting: record.waiting ?? before.waiting,
                numRunning: record.num_running, numWaiting: record.num_waiting, happened: {...noEvents(), ...record.happened},
                requests: new Map(), cached: before.cached};
  // Pools are numbered. A server that was started again has a first pool too, and counts its steps and look-ups from 0.
  next.isNewPool = (last.sizes.pool !== undefined && next.sizes.pool !== last.sizes.pool) ||
    (last.step >= 0 && (record.counters.lookups < last.counters.lookups || record.steps[0]?.[0] <= last.step));
  const {preemptions, generated, drafts, accepted} = last.counters;
  const isNewServer = record.counters.generated < generated;  // which counts from 0: so do its pool's
  if (next.isNewPool) next.atStart = isNewServer ? {} : {preemptions, generated, drafts, accepted};
  else next.atStart = last.atStart;
  next.poolsSeen = last.poolsSeen + (next.isNewPool ? 1 : 0);
  const {blocks, host_blocks: hostBlocks} = next.sizes;
  const isOfTier = (copy) => Math.max(...copy) >= blocks + hostBlocks;
  next.happened.tier = next.happened.copies.filter(isOfTier);
  const copies = next.happened.copies = next.happened.copies.filter((copy) => !isOfTier(copy));
  const changes = new Map(record.requests.map((change) => [change.id, change]));
  for (const id of [...next.running, ...next.waiting]) {
    const old = before.requests.get(id), change = changes.get(id);
    let request = change ? applyRequest(old, change) : old ?? applyRequest(null, {id});
    const isPreempted = next.happened.recomputed.includes(id) || next.happened.swapped_out.includes(id);
    if (isPreempted && !request.wasPreempted) request = {...request, wasPreempted: true};
    for (const {blocks: lost} of isPreempted && old ? old.sequences.values() : []) lost.forEach((block) => next.happened.released.set(block, id));
    if (old?.wasPreempted && !request.wasPreempted) request = {...request, wasPreempted: true};
    if (request.swapped) {  // how many blocks it had is known from the last time that it had them
      const held = old?.hostBlocks ?? new Set([...(old?.sequences.values() ?? [])].flatMap((sequence) => sequence.blocks)).size;
      if (request.hostBlocks !== held) request = {...request, hostBlocks: held};
    }
    next.requests.set(id, request);
  }
  next.ended = next.isNewPool || record.whole || (last.requests.size === 0 && next.requests.size > 0) ? []
    : [...last.ended, ...[...last.requests.values()].filter(({id, sequences}) => sequences.size > 0 && !next.requests.has(id))];
  next.ended.splice(0, next.ended.length - Math.max(0, kMaxTables - next.requests.size));
  if (record.cached || record.uncached) {
    next.cached = new Map(before.cached);
    for (const block of record.uncached ?? []) next.cached.delete(block);
    for (const [block, texts] of record.cached ?? []) next.cached.set(block, texts);
    next.happened.evicted = record.whole ? [] : evictedBlocks(before, next, record);
    next.happened.oldTexts = new Map(next.happened.evicted.map((block) => [block, before.cached.get(block) ?? []]));
  }
  next.steps = record.steps.map(([index, prompt, decoded, milliseconds, preempted, copied, drafts, accepted]) => ({index, prompt, decoded,
    milliseconds, preempted, copied, drafts, accepted, evicted: 0, number: next.number,
    pool: next.poolsSeen}));
  next.happened.drafts = next.happened.drafts.map(([request, sequence, position, taken, texts, drawn]) => ({request, sequence, position, accepted: taken, texts, drawn}));
  const [sharedBlocks, saved] = record.happened.shared ?? [[], 0];
  next.happened.shared = {blocks: sharedBlocks, saved};
  for (const [id, {sequences}] of next.isNewPool ? [] : next.requests) {
    for (const sequence of sequences.values()) {
      const old = before.requests.get(id)?.sequences.get(sequence.id);
      if (old) next.happened.behind += Math.max(0, numStoodIn(sequence) - numStoodIn(old));
    }
  }
  if (next.steps.length) {
    next.steps.at(-1).evicted = next.happened.evicted.length;
    next.happened.copyOnWrites = copies.filter(([from, to]) => from < blocks && to < blocks);
    if (next.steps.length === 1) next.steps[0].copied = next.happened.copyOnWrites.length;  // swaps have a mark of their own
  }
  next.happened.moves = copies.length - (next.happened.copyOnWrites?.length ?? 0);
  // Counts from before this page's first record are not known.
  const isKnown = next.steps.length > 0 && (next.isNewPool || last.counters.lookups !== undefined);
  const since = (count) => isKnown ? Math.max(0, count(record.counters) - (next.isNewPool ? 0 : count(last.counters))) : 0;
  next.happened.found = since(({found}) => found);
  next.happened.foundAgain = since(foundAgain);
  next.step = next.steps.at(-1)?.index ?? (next.isNewPool ? -1 : before.step);
  return next;
}

const kMaxTables = 16;  // with more, those of requests that have ended are left out

// Tokens that requests found again when they were resumed after a preemption. /metrics does not count them as prefix
// hits.
const foundAgain = ({saved, found}) => Math.max(0, (saved ?? 0) - (found ?? 0));

// How much of a reply its beginning `text` is, or -1 if that is none. In `text`, a part of a character is U+FFFD for each
// of its bytes.
function lengthOf(text, reply) {
  let at = 0, most = 0;  // most: how many characters may stand where the bytes are
  for (const part of text.split(/(\ufffd+)/)) {
    if (part.startsWith("\ufffd")) {
      most = part.length;
    } else if (part !== "") {
      const found = reply.indexOf(part, at);
      if (found < 0 || found > at + most) return -1;
      at = found + part.length;
      most = 0;
    }
  }
  return at;
}

// What a request's sequences had written in the snapshot `at`: the texts that are in the pool there or, if it was
// preempted, its last texts. "none": it had not arrived yet; "all": it had ended; "past": its pool had ended.
// reply: {id, pool, number}: the request, its pool as poolsSeen counts, and the number of the latest snapshot when it was sent.
function writtenAt(snapshots, at, reply) {
  const requestIn = (snapshot) => snapshot?.poolsSeen === reply.pool ? snapshot.requests.get(reply.id) : undefined;
  if (snapshots[at].poolsSeen > reply.pool) return "past";
  if (snapshots[at].number < reply.number) return "none";
  if (!requestIn(snapshots[at])) return snapshots.findIndex(requestIn) > at ? "none" : "all";
  let best = [""], most = 0;
  for (let index = at; requestIn(snapshots[index]); --index) {
    const {prompt, sequences, wasPreempted} = requestIn(snapshots[index]);
    const texts = [...sequences.values()].map((sequence) => sequence.texts.slice(prompt).join(""));
    const length = Math.max(0, ...texts.map((text) => text.length));
    if (length > most) [best, most] = [texts, length];
    if (most > 0 && !wasPreempted) break;
  }
  return best;
}

// At how many places of its table a sequence has the block that stands in for those behind its window: from the first on.
// No other block is in a table twice.
function numStoodIn({blocks}) {
  let count = 0;
  while (blocks.length > 1 && blocks[0] === blocks[1] && blocks[count] === blocks[0]) count += 1;
  return count;
}

// By block: its places in block tables, as {request, sequence, index}; standsIn: at how many places it stands in, if it
// does. Computed for snapshots that are looked at.
function placesOf(snapshot) {
  if (!snapshot.places) {
    const places = new Map();
    for (const id of snapshot.running.concat(snapshot.waiting)) {
      const request = snapshot.requests.get(id);
      for (const sequence of request?.sequences.values() ?? []) {
        const standsIn = numStoodIn(sequence);
        sequence.blocks.forEach((block, index) => {
          if (index > 0 && index < standsIn) return;
          const list = places.get(block);
          const place = {request, sequence, index, standsIn: index < standsIn ? standsIn : 0};
          if (list) list.push(place); else places.set(block, [place]);
        });
      }
    }
    Object.defineProperty(snapshot, "places", {value: places, configurable: true});
  }
  return snapshot.places;
}

const filledSlots = (place, blockSize) => place.standsIn ? 0 : Math.max(0, Math.min(blockSize, place.sequence.length - place.index * blockSize));

// ---- In one sentence ----

// Control characters, and characters that turn the direction of text around, as their numbers.
const legible = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (character) => character === "\n" ? "↵" : character === "\t" ? "⇥"
  : `‹${character.codePointAt(0).toString(16).toUpperCase()}›`);
const visible = (text) => legible(text).replaceAll(" ", "·");
const plain = (text) => text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

// Requests of a server have numbers and no names.
const nameOf = (request) => request.name ?? request.id;

function ownerName({request, sequence}) {
  if (request.sequences.size === 1) return `request ${nameOf(request)}`;
  return `sequence ${[...request.sequences.keys()].indexOf(sequence.id) + 1} of request ${nameOf(request)}`;
}

function shortList(names) {
  const shown = names.slice(0, 4).map(String);
  if (names.length > 4) shown.push(`${names.length - 4} more`);
  return shown.length < 2 ? shown.join("") : shown.slice(0, -1).join(", ") + " and " + shown.at(-1);
}
const plural = (word, names) => `${word}${names.length === 1 ? "" : "s"} ${shortList(names)}`;

// "request 9", "requests 2, 3 and 4", "sequences 1 and 2 of request 0 and requests 5 and 6"
function ownerNames(places) {
  const whole = places.filter((place) => place.request.sequences.size === 1).map((place) => place.request.id), parts = [];
  const forked = new Map();
  for (const place of places.filter((candidate) => candidate.request.sequences.size > 1)) {
    forked.set(place.request, [...(forked.get(place.request) ?? []), place]);
  }
  for (const [request, list] of [...forked].slice(0, 3)) {
    const ids = [...request.sequences.keys()];
    parts.push(`${plural("sequence", list.map((place) => ids.indexOf(place.sequence.id) + 1))} of request ${request.id}`);
  }
  if (whole.length) parts.push(plural("request", whole));
  return parts.join(", and with ");
}

// target: {block}, or {block, sequence, index, position}: a place in a table, and a token there.
function sentenceOf(snapshot, target) {
  if (!target) return "";
  if (target.region !== undefined) return regionSentence(snapshot, target.region);
  const {block} = target, size = snapshot.sizes.block_size;
  const places = placesOf(snapshot).get(block) ?? [];
  const mine = places.find((place) => place.sequence.id === target.sequence && place.index === target.index) ?? places[0];
  const {happened} = snapshot;
  let text;
  if (mine?.standsIn) {
    text = `block ${block}: empty. It stands in for logical blocks 0 to ${mine.standsIn - 1} of ${ownerName(mine)}, which are behind the window: no query sees them any more, so they were given up`;
  } else if (mine) {
    const others = places.filter((place) => place !== mine);
    text = `block ${block}: logical block ${mine.index} of ${ownerName(mine)}, ${filledSlots(mine, size)} of ${size} slots` +
      (others.length ? `, shared with ${ownerNames(others)}` : "");
    if (target.position !== undefined && mine.sequence.texts[target.position] !== undefined) {
      const written = mine.sequence.texts[target.position];
      text += `; token ${target.position} is “${visible(written)}”${/^<.+>$/.test(written) ? ", a mark (⊢) and no text" : ""}, in slot ${block * size + target.position % size}`;
    }
    text += draftSentence(draftsIn(snapshot, mine), target.position, block * size);
  } else if (snapshot.cached.has(block)) {
    text = `block ${block}: cached. In no block table, but it still holds “${visible(snapshot.cached.get(block).join("")).slice(0, 60)}”, ` +
      "for a text that is the same from its start up to here, until it is evicted. It counts as available";
  } else {
    text = `block ${block}: free`;
  }
  const copies = happened.copyOnWrites ?? [], from = copies.find((copy) => copy[1] === block);
  const to = copies.filter((copy) => copy[0] === block).map((copy) => String(copy[1]));
  const loser = happened.released.get(block);
  if (loser !== undefined) text += `. In this step request ${loser}, which was preempted, released it`;
  if (from) text += `. In this step it became the copy of block ${from[0]}, because a sequence wrote to a block that others share`;
  if (to.length) text += `. In this step it was copied to ${plural("block", to)}, for sequences that shared it and write something else`;
  if (target.request !== undefined && !snapshot.requests.has(target.request)) {
    text += `. It was logical block ${target.index} of request ${target.request}, which has ended`;
  }
  if (happened.evicted.includes(block)) {
    text += `. In this step it was reused: its old text “${visible(happened.oldTexts.get(block).join("")).slice(0, 40)}” is no longer cached`;
  }
  return text;
}

// What the step did with the drafts in a block; of one slot, if a position is given. first: the block's first slot.
function draftSentence(drafts, position, first) {
  const one = drafts.find((draft) => draft.position === position);
  if (one?.isAccepted) return ". It was a draft, looked up in the text, and the model draws the same: one step, one token more";
  if (one?.isFirstBack) {
    const instead = one.drawn === undefined ? "another token" : `“${visible(one.drawn)}”`;
    return `. Slot ${first + one.slot} held the draft “${visible(one.text)}”: the model drew ${instead} instead, so the draft was taken back. The next step writes ` +
      (one.drawn === undefined ? "the slot again" : `${instead} into the slot`);
  }
  if (one) return `. Slot ${first + one.slot} held the draft “${visible(one.text)}”, behind one that the model did not draw, so it was taken back too. The slot is written again`;
  if (drafts.length === 0 || position !== undefined) return "";
  const accepted = drafts.filter((draft) => draft.isAccepted).length, back = drafts.length - accepted;
  return `. In this step it held ${drafts.length} draft${drafts.length === 1 ? "" : "s"} (guesses): ` +
    [...(accepted ? [`${accepted} became text`] : []), ...(back ? [`${back} ${back === 1 ? "was" : "were"} taken back`] : [])].join(", ");
}

// What a step did, for the strip and the log.
function storyOf(snapshot) {
  const {happened} = snapshot, story = [];
  if (happened.admitted.length) story.push(`admitted ${plural("request", happened.admitted)}`);
  // All blocks were in tables, or fewer were left than the next tokens needed: a cached one would have been evicted.
  const few = "too few blocks were left, free or cached";
  if (happened.recomputed.length) {
    story.push(`preempted ${plural("request", happened.recomputed)}: ${few}; ${happened.recomputed.length > 1 ? "they released theirs" : "it released its own"} (cached, until they are needed), and will be computed again`);
  }
  if (happened.swapped_out.length) {
    story.push(`swapped out ${plural("request", happened.swapped_out)}: ${few}; ${happened.swapped_out.length > 1 ? "theirs" : "its own"} were copied to the host's memory`);
  }
  if (happened.copyOnWrites?.length) story.push(`copied on write: ${shortList(happened.copyOnWrites.map(([from, to]) => `block ${from} to ${to}`))}`);
  if (happened.found) story.push(`prefix found: ${happened.found} prompt tokens were cached, and were not computed`);
  if (happened.foundAgain) story.push(`found again: ${happened.foundAgain} tokens of a preempted request were still cached`);
  const drafts = snapshot.steps.reduce((sum, step) => sum + step.drafts, 0), accepted = snapshot.steps.reduce((sum, step) => sum + step.accepted, 0);
  if (drafts) story.push(accepted === 0 ? `drafts: ${drafts}, all taken back` : `drafts: ${accepted} of ${drafts} accepted` + (accepted < drafts ? ", the rest taken back" : ""));
  const drawn = happened.drafts.filter((entry) => entry.accepted < entry.texts.length && entry.drawn !== undefined).map((entry) => `“${visible(entry.drawn)}”`);
  if (drawn.length) story.push(`drawn instead: ${shortList(drawn)}`);
  const moved = (isMove) => happened.copies.filter(isMove).length, blocksOf = (count) => `${count} block${count === 1 ? "" : "s"}`;
  const numOut = moved(([, to]) => to >= snapshot.sizes.blocks), numIn = moved(([from]) => from >= snapshot.sizes.blocks);
  if (numOut && !happened.swapped_out.length) story.push(`${blocksOf(numOut)} copied to the host's memory`);
  if (numIn) story.push(`swapped in: ${blocksOf(numIn)} copied back from the host's memory`);
  if (happened.evicted.length) story.push(`evicted ${plural("block", happened.evicted)}`);
  const {kept, back} = tierMoves(snapshot);
  if (kept) story.push(`kept on the host: ${blocksOf(kept)} that had been evicted`);
  if (back) story.push(`brought back from the host: ${blocksOf(back)}`);
  if (happened.behind) story.push(`behind the window: ${blocksOf(happened.behind)} given up`);
  if (happened.ended.length) story.push(`ended ${plural("request", happened.ended)}`);
  return story.join(" · ");
}

// What a step read once for several sequences.
function readOnce({happened: {shared: {blocks, saved}}}) {
  return blocks.length ? `read once: ${blocks.length} block${blocks.length === 1 ? "" : "s"} for several sequences, ${saved} fewer read${saved === 1 ? "" : "s"}` : "";
}

// How many blocks the step copied to the second tier, and from there.
function tierMoves({happened, sizes}) {
  const kept = happened.tier.filter(([, to]) => to >= sizes.blocks).length;
  return {kept, back: happened.tier.length - kept};
}

// The kinds of events in a step that are worth a longer look.
function eventsOf({happened, steps}) {
  if (!steps.length) return [];
  const counts = {preempted: happened.recomputed.length, swapped: happened.moves, copied: happened.copyOnWrites?.length,
                  evicted: happened.evicted.length, found: happened.found, foundAgain: happened.foundAgain,
                  accepted: steps.at(-1).accepted, takenBack: steps.at(-1).drafts - steps.at(-1).accepted};
  return Object.keys(counts).filter((name) => counts[name] > 0);
}

// The same requests in one contiguous region each, as stage 1 stores them: first fit, in order of arrival. A request
// that is preempted in the pool has its region all the same: where it fits, regions would never have preempted it.
function regionsOf(snapshot) {
  const {slots} = snapshot.sizes, regions = [];
  const refused = [];
  let end = 0, used = 0;
  const ids = [...snapshot.running, ...snapshot.waiting].sort((left, right) => left - right);
  for (const id of ids) {
    const {max, lastHeld} = snapshot.requests.get(id);
    const length = lastHeld.tokens, need = max * lastHeld.sequences;
    if (end + need > slots) {
      refused.push(id);
      continue;
    }
    regions.push({id, begin: end, length, need});
    end += need;
    used += length;
  }
  return {regions, refused, reserved: end, used};
}

const kRest = -1;  // in place of a region's request: the slots behind all regions

// The parts of the bar of regions, from left to right: {id, begin, need}.
function regionParts(snapshot) {
  const {regions, reserved} = regionsOf(snapshot), rest = snapshot.sizes.slots - reserved;
  return rest > 0 ? [...regions, {id: kRest, begin: reserved, need: rest}] : regions;
}

function regionSentence(snapshot, id) {
  const part = regionParts(snapshot).find((candidate) => candidate.id === id);
  if (!part) return "";
  const slots = part.need > 1 ? `slots ${part.begin} to ${part.begin + part.need - 1}` : `slot ${part.begin}`;
  if (id !== kRest) {
    return `request ${id}, if it had one contiguous region: ${slots}, as many as its text may become. ${part.length} would hold a token, ${part.need - part.length} ` +
      "would be reserved and empty (hatched)";
  }
  const {refused} = regionsOf(snapshot), [next] = refused;
  if (next === undefined) return `${slots}: in no region`;
  const {max, lastHeld} = snapshot.requests.get(next);
  return `${slots}: in no region. ${part.need} are left, and request ${next} needs ${max * lastHeld.sequences} in a row: it would wait` +
    (refused.length > 1 ? `, as would ${plural("request", refused.slice(1))}` : "");
}
