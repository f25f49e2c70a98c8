"""Tests of tests/bench/vllm_drafts.py with an engine that needs neither vLLM nor a GPU."""

import types
import unittest

from bench import vllm_drafts

REQUESTS = {"max_new_tokens": 9, "stop_tokens": [2],
            "prompts": [{"kind": "edit", "tokens": [5, 6]}, {"kind": "edit", "tokens": [7]}, {"kind": "chat", "tokens": [8]}]}


class Engine:
    """Its clock goes on by 1 s for a prompt and by 2 s a step; a step has two drafts, of which one is accepted."""

    def __init__(self, drafts):
        self.drafts, self.now, self.steps, self.asked = drafts, 0.0, 0, []

    def generate(self, prompts, options, use_tqdm):
        self.asked.append((prompts[0]["prompt_token_ids"], options["max_tokens"], options["stop_token_ids"]))
        steps = (options["max_tokens"] - 1) // (2 if self.drafts else 1)
        self.now += 1 + 2 * steps
        self.steps += steps
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[0] * options["max_tokens"])])]

    def get_metrics(self):
        counts = {"num_draft_tokens": 2 * self.steps, "num_accepted_tokens": self.steps} if self.drafts else {}
        return [types.SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in counts.items()]


def measure(engine):
    return vllm_drafts.measure(REQUESTS, engine, 2, dict, lambda: engine.now)


class Measure(unittest.TestCase):
    def test_the_prompts_step_counts_in_no_row(self):
        engine = Engine(drafts=False)
        rows = measure(engine)
        self.assertEqual([row["kind"] for row in rows], ["edit", "edit", "chat"])
        self.assertEqual(rows[0], {"kind": "edit", "tokens": 8, "seconds": 16, "drafts": 0, "accepted": 0})
        self.assertIn(([5, 6], 9, [2]), engine.asked)

    def test_drafts_are_counted_by_reply(self):
        self.assertEqual(measure(Engine(drafts=True))[2],
                         {"kind": "chat", "tokens": 8, "seconds": 8, "drafts": 8, "accepted": 4})

    def test_the_table_sums_by_kind(self):
        lines = vllm_drafts.table(measure(Engine(drafts=False)), measure(Engine(drafts=True))).splitlines()
        self.assertEqual(lines[2:], ["| edit | 16 | 8 | 2.00 | 0 tokens/s | 1 tokens/s | 2.00 |",
                                     "| chat | 8 | 4 | 2.00 | 0 tokens/s | 1 tokens/s | 2.00 |"])


if __name__ == "__main__":
    unittest.main()
