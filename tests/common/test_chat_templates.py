#!/usr/bin/env python3
"""Chat templates that are accepted print what Jinja prints: test_chat_templates.py RENDER_CHATS [TEMPLATE...]

RENDER_CHATS is the program of render_chats.cpp. Without further arguments, the templates are those of
tests/golden/chat_templates, written for this test, and each must be accepted. Others, the originals of models for
example, are given as files or folders: each is accepted and equal, or refused, and the counts are printed. Jinja is set
up as transformers does it, without the day: strftime_now is not defined.
"""

import json
import pathlib
import random
import subprocess
import sys

try:
    import jinja2
    import jinja2.sandbox
except ImportError:
    print("skipped: needs the package python3-jinja2")
    sys.exit(77)

OWN = pathlib.Path(__file__).parent.parent / "golden/chat_templates"
ROLES = {"s": "system", "u": "user", "a": "assistant"}
ORDERS = ["u", "su", "uau", "suau", "s", "a", "ua", "uu", "au", "usu", "ssu", "suu", "sau", "uaau", "sua", "uaua",
          "uasu", "suauau", "uuau", "suas"]
CONTENTS = ["Hello", " Hello ", "", " \n ", "\n\nHi\n", "\u00a0x\u3000", "\x1cx\x1f", "\u200bx\ufeff",
            "\x85\u2028x\u2029\u180e", "\r\nx\r\n\t\v\f", "e\u0301", "<think>\nhm\n</think>\n\nYes",
            "x</think>\n\ny</think>\n\nz\n", "</think>", "<think>only", "<think>\n\n</think>\n\nq",
            "<|im_end|>\n<|im_start|>system\nno", "<tool_response>a</tool_response>", "<tool_response>only",
            "{{ x }}{% y %}", "[INST] <<SYS>> [/INST]"]


def conversations():
    """Each content at each place of each order of roles, at all places, and mixed."""
    draw = random.Random(7)
    texts = []
    for order in ORDERS:
        for content in CONTENTS:
            for place in range(len(order)):
                texts.append((order, [content if i == place else f"T{i}" for i in range(len(order))]))
            texts.append((order, [content] * len(order)))
        texts += [(order, [draw.choice(CONTENTS) for _ in order]) for _ in range(20)]
    return [[{"role": ROLES[role], "content": content} for role, content in zip(order, contents)]
            for order, contents in texts]


class Refusal(Exception):
    """What a template raises."""


def raise_exception(message):
    raise Refusal(message)


ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                           extensions=["jinja2.ext.loopcontrols"])
ENVIRONMENT.globals["raise_exception"] = raise_exception


def rendered(template, messages, **switches):
    """The text, or None if the template takes no such conversation."""
    try:
        return template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True,
                               bos_token="<s>", eos_token="</s>", **switches)
    except (Refusal, jinja2.TemplateError):
        return None


def difference(program, path, chats):
    """"refused", "" if all chats are equal, or the first that is not."""
    source = path.read_bytes().decode()
    outcome = subprocess.run([program], input=json.dumps({"template": source, "conversations": chats}), text=True,
                             check=True, capture_output=True)
    texts = json.loads(outcome.stdout)
    if texts is None:
        return "refused"
    try:
        template = ENVIRONMENT.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        return f"Jinja cannot read it: {error}"
    for i, messages in enumerate(chats):
        for text, switches in zip(texts[2 * i:2 * i + 2], ({}, {"enable_thinking": False})):
            expected = rendered(template, messages, **switches)
            if text != expected:
                return f"{messages}, {switches}:\n  Jinja {expected!r}\n  here  {text!r}"
    return ""


def main():
    program, *others = sys.argv[1:]
    paths = []
    for name in others or [OWN]:
        path = pathlib.Path(name)
        paths += sorted(path.glob("*.jinja")) if path.is_dir() else [path]
    chats = conversations()
    num_refused = num_different = 0
    for path in paths:
        problem = difference(program, path, chats)
        is_refused = problem == "refused"
        num_refused += is_refused
        if problem and (not is_refused or not others):
            print(f"{path.name}: {problem}")
            num_different += 1
    print(f"{len(paths)} templates, {2 * len(chats)} renderings each: {num_refused} refused, {num_different} wrong")
    return 1 if num_different or not paths else 0


sys.exit(main())
