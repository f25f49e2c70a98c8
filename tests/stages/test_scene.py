#!/usr/bin/env python3
"""`stageN scene`: test_scene.py build/stage2 block-table …

Goes through the lesson's commands, then through random ones of those that each state offers, and through wrong ones. In
every state the ledger of the blocks is checked.
"""

import json
import pathlib
import random
import subprocess
import sys

WRONG = ("nonsense", "free", "free a", "free AB", "free A A", "append A 0", "append A -1", "append A 1.5", "append A 99999999999999999999",
         "append Ä 1", "new \"A\" 1", "step 1", "add A 0 0", "fork", "fork A", "write", "set 0 1e9", "set 99 1", "set 0 nan")


def states_of(program, name, commands=None):
    """The states of a scene, as the stage's program prints them: of the lesson's commands, or of these."""
    shell = [] if commands is None else ["--shell"]
    result = subprocess.run([program, "scene", name, *shell], input="\n".join(commands or []), capture_output=True, text=True, check=False)
    return [json.loads(line) for line in result.stdout.splitlines()]


def check_ledger(state):
    """Every block is free, cached, or in as many tables as it has owners; lengths and tables fit together."""
    sizes = state["sizes"]
    owned = {}
    for request in state["requests"]:
        for sequence in request["sequences"]:
            assert len(set(sequence["blocks"])) == len(sequence["blocks"]), state
            assert sequence["length"] <= len(sequence["blocks"]) * sizes["block_size"], state
            for block in sequence["blocks"]:
                owned[block] = owned.get(block, 0) + 1
    cached = [block for block, _ in state["cached"] or []]
    everything = sorted([*owned, *state["free"], *cached])
    assert everything == list(range(sizes["blocks"])), f"free + owned + cached are not all blocks: {everything}"
    if state["references"]:
        assert state["references"][:sizes["blocks"]] == [owned.get(block, 0) for block in range(sizes["blocks"])], state
    else:
        assert all(count == 1 for count in owned.values()), state


def check_state(state):
    """What holds in every state of a scene with blocks."""
    if "sizes" in state:
        check_ledger(state)


class Session:
    """A program that reads commands and prints states."""

    def __init__(self, program, name):
        self.process = subprocess.Popen([program, "scene", name, "--shell"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, encoding="utf-8")
        self.first = self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the program ended: {self.process.stderr.read()}")
        return json.loads(line)

    def apply(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self):
        self.process.stdin.close()
        errors = self.process.stderr.read()
        return self.process.wait(), errors


def same(state, other):
    """Whether they differ in nothing but in what was said of the command that led to them."""
    said = ("command", "label", "said", "error", "copies", "evicted")
    return {key: value for key, value in state.items() if key not in said} == {key: value for key, value in other.items() if key not in said}


def check_lesson(program, name):
    result = subprocess.run([program, "scene", name], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stderr == "", result
    states = [json.loads(line) for line in result.stdout.splitlines()]
    for state in states:
        check_state(state)
        assert "error" not in state, state
        assert state["said"].endswith(".") and state["said"][0].isupper() or state["said"][0].isdigit(), state["said"]
    assert len(states) > 5
    return len(states) - 1


def check_random(program, name, count):
    session, generator = Session(program, name), random.Random(7)
    state = session.first
    seen = 0
    for _ in range(count):
        commands = [command for _, group in state["actions"] for command, _ in group]
        assert commands, "a state offers nothing to do"
        command, before = generator.choice(commands), state
        state = session.apply(command)
        assert "error" not in state, f"{command}, which the state offered: {state['error']}"
        check_state(state)
        if state["said"].startswith("Refused"):
            assert same(state, before), f"{command} was refused, and has changed something"
        seen += 1
    code, errors = session.end()
    assert code == 0 and errors == "", [code, errors]
    return seen


def check_wrong(program, name):
    session = Session(program, name)
    state = session.first
    count = 0
    for command in WRONG:
        after = session.apply(command)
        if "error" in after:
            count += 1
            assert same(after, state), f"{command} was wrong, and has changed something"
            assert "\n" not in after["error"] and len(after["error"]) < 160 and "said" not in after, after["error"]
        state = after
    code, errors = session.end()
    assert code == 1 and errors.count("\n") == 1 and f"{count} commands were wrong" in errors, [code, errors]
    result = subprocess.run([program, "scene", "no-such-scene"], capture_output=True, text=True, check=False)
    assert result.returncode == 2 and name in result.stderr, result
    return count


def main():
    program, *names = sys.argv[1:]
    record = json.loads(subprocess.run([program, "scene", "--record"], capture_output=True, text=True, check=True).stdout)
    assert list(record) == names, [list(record), names]
    for name in names:
        assert record[name]["states"] == states_of(program, name), "what is recorded is what is printed"
        print(f"{pathlib.Path(program).name} {name}: {check_lesson(program, name)} steps of the lesson, {check_random(program, name, 300)} random "
              f"commands, {check_wrong(program, name)} wrong ones")


if __name__ == "__main__":
    main()
