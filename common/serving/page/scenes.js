"use strict";
// Prepared scenes: what the pool has to be, what is sent, what to watch, and in which of the steps that is to be seen.
// The server computes them at its own speed; the page then shows them step by step.

const kStory = ["Once upon a time", "The king had a garden", "A wolf", "There was a poor woodcutter", "The queen said", "In the middle of the forest",
                "A fox met", "The youngest son"];
const kShared = "There was once a king who had three sons, and the youngest of them was called the simpleton. One day the king said to them, " +
  "whoever brings me the most beautiful ring shall have the kingdom. The eldest";

const kScenes = [
  {name: "Blocks, not regions", sizes: {slots: 240, block_size: 4, budget: 64, swap: false},
   send: (post) => post(kStory, {max_tokens: 90, stop: [".", ";"], temperature: 0.8, seed: 3}),
   watch: "Each of the 8 may write 90 tokens; none does, and most end before half of that. Look at the bar under the pool: regions of full length for two would take it all, " +
     "and stay hatched, reserved for nothing. Blocks are taken one by one, so all 8 run.",
   isMoment: (step, best) => step.numRunning >= (best?.numRunning ?? 1)},
  {name: "A shared beginning", sizes: {slots: 512, block_size: 8, budget: 128, swap: false},
   send: async (post) => {
     await post([kShared + " went east"], {max_tokens: 12, temperature: 0, firstOnly: true});
     await post([" went west", " rode away", " took a boat", " asked the wind"].map((end) => kShared + end), {max_tokens: 20, temperature: 0});
   },
   watch: "The first request computes its prompt. The four that follow begin alike, as with a common system prompt: their tables point at the same blocks (grey, in a frame, ×n), and only what differs is computed: " +
     "see how short their prompt bars are.",
   isMoment: (step) => step.happened.found > 0},
  {name: "Read once", needsReadsOnce: true, sizes: {slots: 256, block_size: 4, budget: 64, swap: false},
   send: (post) => post(["There was once a king who had three sons, and the youngest of them"], {max_tokens: 12, n: 4, temperature: 1, seed: 5}),
   watch: "Four samples share the blocks of their prompt. In each step, four queries read them: not one after the other, but block by block, all four at a time. So each of these blocks " +
     "(underlined) is read from memory once.",
   isMoment: (step) => step.happened.shared.saved > 0 && storyOf(step) === ""},
  {name: "Samples and copy-on-write", sizes: {slots: 256, block_size: 4, budget: 64, swap: false},
   send: (post) => post(["The king had a garden"], {max_tokens: 14, n: 4, temperature: 1, seed: 5}),
   watch: "Four samples share the prompt's blocks. In the step after, each has a word of its own to write into the last one, which is only partly full: " +
     "the arrows are the copies. The last owner writes in place.",
   isMoment: (step, best) => !best && step.happened.copyOnWrites.length > 0},
  {name: "Beams", sizes: {slots: 256, block_size: 4, budget: 64, swap: false},
   send: (post) => post(["Once upon a time"], {max_tokens: 18, n: 4, use_beam_search: true}),
   watch: "In each step the four best continuations go on. A beam that splits shares all its blocks with its twin and copies one when it writes; when one loses, only the blocks " +
     "that no other shares are freed.",
   isMoment: (step, best) => step.happened.copyOnWrites.length > (best?.happened.copyOnWrites.length ?? 0)},
  {name: "Preempted: computed again", sizes: {slots: 96, block_size: 4, budget: 64, swap: false},
   send: (post) => post(kStory.slice(0, 4), {max_tokens: 44, temperature: 0.8, seed: 1, ignore_eos: true}),
   watch: "Four texts grow until no block is left, free or cached. The latest request then releases its blocks and goes back to the queue (▼ in the strip). When there is room it " +
     "computes prompt and text again, but for what is still cached: a hatched bar.",
   isMoment: (step, best) => !best && step.happened.recomputed.length > 0},
  {name: "Preempted: swapped out", sizes: {slots: 96, block_size: 4, budget: 64, swap: true},
   send: (post) => post(kStory.slice(0, 4), {max_tokens: 44, temperature: 0.8, seed: 1, ignore_eos: true}),
   watch: "The same four texts, but the latest request's blocks are copied to the host's memory (dotted, under the pool), and later back into other blocks: same logical order, " +
     "new numbers. The host has room for all of them here, so nothing is computed again.",
   isMoment: (step, best) => !best && step.happened.swapped_out.length > 0},
  {name: "A full queue", sizes: {slots: 160, block_size: 4, budget: 64, swap: false},
   send: (post) => post(Array.from({length: 24}, (_, index) => kStory[index % kStory.length]), {max_tokens: 12, temperature: 0.8, seed: 1, ignore_eos: true}),
   watch: "24 requests at once, blocks for a few. Those that do not fit wait, in the order in which they came. Whenever one ends, its blocks are free, and in the step after it the " +
     "next is admitted, without a pause for the others. One that was let in too early is preempted (▼) and waits first in line.",
   // Of these steps, the one in which most run: early ones come after preemptions, and have fewer than regions would.
   isMoment: (step, best, before) => step.happened.admitted.length > 0 && before?.happened.ended.length > 0 && step.numRunning > (best?.numRunning ?? 0)},
  {name: "Evicted, and back", needsTier: true, sizes: {slots: 96, block_size: 4, budget: 128, swap: false},
   send: async (post) => {
     for (const ask of [kShared, "In the middle of the forest stood a little house. " + kShared, kShared + " went east"]) {
       await post([ask], {max_tokens: 4, temperature: 0, firstOnly: true});
     }
   },
   watch: "The pool has room for one of these prompts. The second evicts the first one's blocks, which are copied to the host's memory (hatched, under the pool). The third goes on " +
     "where the first has ended: its blocks are copied back (▲ at their lower edge), and only what is new is computed.",
   isMoment: (step) => step.happened.tier.some(([from]) => from >= step.sizes.blocks)},
  {name: "Behind the window", needsWindow: true, sizes: {slots: 96, block_size: 4, budget: 64, swap: false},
   send: (post) => post(kStory.slice(0, 2), {max_tokens: 64, temperature: 0.8, seed: 2, ignore_eos: true}),
   watch: "Each query of this model sees the last tokens only, as far as its window reaches. Blocks behind the window are given up while the text goes on: one empty block stands in for all of them " +
     "(empty, in the table), so that the others keep their places. The pool could not hold all of both texts.",
   isMoment: (step) => step.happened.behind > 0 && step.numRunning > 1},
  {name: "Drafts", needsDrafts: true, sizes: {slots: 128, block_size: 4, budget: 64, swap: false},
   send: (post) => post(["The cat said, who is there? The dog said, who is there? The cock said,"], {max_tokens: 32, temperature: 0, num_speculative_tokens: 4}),
   watch: "Where the text repeats itself, what follows is looked up in it: drafts, which a step computes behind the text's last token. Those that the model would write anyway " +
     "(framed) become text: several tokens in one step. The others (struck through) are taken back: the table says what the model drew instead.",
   isMoment: (step, best) => numOutcomes(step) > (best ? numOutcomes(best) : 0)},
];

const kMaxWindow = 32;  // with which two texts of that scene give blocks up

// Of two: drafts that were accepted, drafts that were taken back.
const numOutcomes = ({steps}) => (steps.at(-1).accepted > 0) + (steps.at(-1).drafts > steps.at(-1).accepted && steps.at(-1).accepted > 0);

// The index of the step, among the snapshots from begin to end, that has what the scene is about, or -1.
function momentOf(scene, snapshots, begin, end) {
  let best = -1;
  for (let index = begin; index < end; ++index) {
    if (snapshots[index].steps.length === 0) continue;
    const is = scene.isMoment(snapshots[index], snapshots[best] ?? null, snapshots[index - 1]);
    if (is) best = index;
  }
  return best;
}

// Buttons for the scenes. run(scene): starts one.
function makeScenes(place, hasControls, run) {
  kScenes.forEach((scene, index) => {
    const button = document.createElement("button");
    button.textContent = scene.name;
    button.dataset.scene = index;
    if (scene.needsDrafts) button.dataset.needsDrafts = "";
    if (scene.needsTier) button.dataset.needsTier = "";
    if (scene.needsReadsOnce) button.dataset.needsReadsOnce = "";
    if (scene.needsWindow) button.dataset.needsWindow = "";
    button.disabled = !hasControls;
    if (!hasControls) button.title = "off on this server (--pool-controls): the scene makes a small pool";
    button.onclick = () => run(scene, button);
    place.append(button);
  });
}
