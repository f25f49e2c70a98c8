#!/usr/bin/env python3
"""Every figure that a machine measured has one source, tests/bench/measured/; this puts figures into pages and checks them.

    python3 tests/figures.py --check              do the pages and file heads say what the data says? (readme_check.py asks too)
    python3 tests/figures.py --commits            the commits that the data cites and this history does not have
    python3 tests/figures.py --write              renew the generated tables
    python3 tests/figures.py --list h200.decode   the keys that begin so, with value, unit, date and command
    python3 tests/figures.py --suggest PAGE       the figures by hand in any page, and the keys that have their value

**Data.** tests/bench/measured/NAME.json holds what one machine measured: "machine", and under "figures" either one value or
a table. Each has a date, the commit that it came with, and the command that printed it (or "source", for what others
publish and for what is defined). A table has "columns", {name: unit}, and "rows", {name: values}. A key is the names from
the file's to the column's: `h200.read_ceiling`, `h200.decode.32.1b`. Digits are kept as they are written, so that 76.0 is
printed as 76.0. The ladder's figures are those of stage 7's ladder/figures.json, from which its picture is drawn; a step
without microseconds has not been measured yet, and has no keys. After another measurement: change values, date and
commit there, then --write, then mend the prose that --check names.

No expression takes figures that two chips measured: they differ in more than what it compares. (Data sheets may stand
beside anything.)

**Tables.** What stands between

    <!-- figures: table NAME -->
    <!-- figures: end -->

is generated from the template NAME in tests/bench/measured/tables.md. There, {key} becomes a value, {key.*} all values of
a row with " | " between them, and {expression ; format} a number in Python's format.

**Prose.** A comment right below a paragraph, a list or a table names the figures in it:

    <!-- figures: h200.decode.32.1b, 32 / h200.decode.32.1b s -->

Each entry is a key or an expression of keys and numbers, with the unit of its result behind it (an expression with % is a
ratio; none means a bare number). Its value has to stand in the text, rounded correctly, in that unit or another of its
kind. "shown" before an expression takes its numbers from the page's own output between `measured: begin` and `measured:
end`, where all of them have to stand: after a renewal of that output, --check names the prose that quotes it.

    <!-- figures: shown 1385.0 / 1024, shown 88.2 % -->

And each figure in the text that looks measured (milliseconds, microseconds, nanoseconds, tokens a second, GB/s,
TB/s, flop/s, a share of the memory's speed, a GPU's gigabytes) has to be the value of an entry. Code, output between
`measured: begin` and `measured: end`, and what stands in backticks is no prose.

**Files.** Source files have no such comments; tests/bench/measured/sources.json has the entries of each file.
"""

import argparse
import ast
import decimal
import json
import operator
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = pathlib.PurePath("tests/bench/measured")
LADDER = pathlib.PurePath("stage7_cuda_kernel/ladder/figures.json")

# The pages whose figures have to be bound: a stage's lesson may have several.
PAGES = ("README.md", "RESULTS.md", "stage*/*.md", "stage*/production/*.md", "common/paged/*.md")

# And the files in whose heads and comments they have to be.
SOURCES = ("stage7_cuda_kernel/ladder/*", "stage[78]_*/production/*", "stage[78]_*/kernels/*", "common/cuda/**/*",
           "common/paged/*")
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")

# unit: (its kind, how many of the kind's first unit it is)
UNITS = {
    "s": ("time", 1.0), "ms": ("time", 1e-3), "us": ("time", 1e-6), "µs": ("time", 1e-6), "ns": ("time", 1e-9),
    "GB/s": ("bandwidth", 1e9), "TB/s": ("bandwidth", 1e12), "GB a second": ("bandwidth", 1e9),
    "TB a second": ("bandwidth", 1e12), "tokens/s": ("tokens", 1.0), "tokens a second": ("tokens", 1.0),
    "tokens per second": ("tokens", 1.0), "Tflop/s": ("flops", 1e12), "TFLOP/s": ("flops", 1e12),
    "Gflop/s": ("flops", 1e9), "GFLOP/s": ("flops", 1e9), "KB": ("bytes", 1e3), "MB": ("bytes", 1e6), "GB": ("bytes", 1e9),
    "TB": ("bytes", 1e12), "KiB": ("bytes", 2.0**10), "MiB": ("bytes", 2.0**20), "GiB": ("bytes", 2.0**30), "%": ("share", 1.0),
}  # fmt: skip
NUMBER = r"(?<![\w.,^])(\d+(?:,\d{3})*(?:\.\d+)?)(?![\d.,]*\d)"
# A number of one of these kinds is measured, unless it is in whole seconds; and so is what one of these finds.
MEASURED_KINDS = ("time", "bandwidth", "tokens", "flops")
MEASURED = [
    re.compile(NUMBER + r"\s?(%)\sof\s(?:the\s)?(?:memory's|read|ceiling|reading|bandwidth)"),
    re.compile(r"(?:GPU|[HABV]\d00|RTX\s\d+)[^.;:]{0,30}?\s(?:has|with)\s" + NUMBER + r"\s(GB|GiB)(?!/)"),
    re.compile(NUMBER + r"\s(GB|GiB)\sof\s(?:device\s)?memory"),
]
HEADER_UNIT = re.compile(r"\b(?:us|µs|ms|ns)\b|tokens/s|tokens a second|GB/s|TB/s|[TG]flop/s|of the (?:ceiling|memory's speed)",
                         re.IGNORECASE)
KEY = re.compile(r"[a-z]\w*(?:\.\w+)+")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}

FENCE = re.compile(r"^\s*(?:```|~~~)")
TABLE_BEGIN = re.compile(r"^<!-- figures: table (\S+) -->$")
TABLE_END = "<!-- figures: end -->"
TEMPLATE = re.compile(r"^<!-- table: (\S+) -->$")
PLACEHOLDER = re.compile(r"\{([^{}]+)\}")


class FigureError(Exception):
    """What is wrong with the data, a template or an entry."""


class Figures:
    """What was measured, under its keys: a value as it is written, its unit, and where it comes from."""

    def __init__(self, root):
        self.values = {}  # key: (Decimal, unit, {date, command, …}), in the order of the files
        self.rows = {}  # key of a row: the keys of its columns
        for path in sorted((root / FOLDER).glob("*.json")):
            if path.name != "sources.json":
                content = load(path)
                for name, entry in content["figures"].items():
                    self.add(f"{path.stem}.{name}", entry, content["machine"])
        if (root / LADDER).exists():
            self.add_ladder(load(root / LADDER))

    def add(self, name, entry, machine):
        origin = {"machine": machine} | {field: entry[field] for field in ("machine", "date", "commit", "command", "source") if
                                         field in entry}
        if "source" not in origin and not {"date", "commit", "command"} <= origin.keys():
            raise FigureError(f"{name}: a figure has a date, a commit and a command, or a source")
        if "rows" not in entry:
            self.set(name, entry["value"], entry["unit"], origin)
            return
        for row, values in entry["rows"].items():
            if len(values) != len(entry["columns"]):
                raise FigureError(f"{name}.{row}: {len(values)} values in {len(entry['columns'])} columns")
            for (column, unit), value in zip(entry["columns"].items(), values):
                if value is not None:
                    self.set(f"{name}.{row}.{column}", value, unit, origin)
            self.rows[f"{name}.{row}"] = [f"{name}.{row}.{column}" for column in entry["columns"]]

    def set(self, key, value, unit, origin):
        if not KEY.fullmatch(key):
            raise FigureError(f"{key} can be no key: names of letters, digits and underscores, with dots between them")
        if key in self.values:
            raise FigureError(f"{key} is there twice")
        if unit and unit not in UNITS:
            raise FigureError(f"{key}: {unit} is no unit that is known")
        if not isinstance(value, decimal.Decimal):
            raise FigureError(f"{key}: {value!r} is no number")
        self.values[key] = (value, unit, origin)

    def add_ladder(self, content):
        """h200.ladder.step3.32x8192 and its h200.ladder.step3.32x8192_share; rows without a number go by their first word."""
        origin = {field: content[field] for field in ("machine", "date", "commit", "command")}
        self.set("h200.ladder.ceiling", content["read_ceiling_gigabytes_per_second"], "GB/s", origin)
        for step in content["steps"]:
            if "microseconds" not in step:
                continue
            word = step["step"].split()[0]
            row = f"step{word}" if word.isdigit() else word
            for cell, time, share in zip(content["cells"], step["microseconds"], step["percent"], strict=True):
                column = "mha" if "MHA" in cell else cell
                self.set(f"h200.ladder.{row}.{column}", time, "us", origin)
                self.set(f"h200.ladder.{row}.{column}_share", share, "%", origin)

    def value(self, key):
        if key not in self.values:
            raise FigureError(f"there is no figure {key}")
        return self.values[key]

    def evaluate(self, text):
        """(value, unit) of an entry: a key with its own unit, or an expression with the unit behind it."""
        text = " ".join(text.split())
        if KEY.fullmatch(text):
            value, unit, _ = self.value(text)
            return float(value), unit
        unit = next((unit for unit in UNITS if text.endswith(" " + unit)), "")
        expression = text.removesuffix(" " + unit) if unit else text
        keys = list(dict.fromkeys(KEY.findall(expression)))
        names = {f"_{index}": float(self.value(key)[0]) for index, key in enumerate(keys)}
        if not keys:
            raise FigureError(f"{text} names no figure")
        cards = sorted({card_of(self.value(key)[2]) for key in keys} - {""})
        if len(cards) > 1:
            raise FigureError(f"{text} compares {' with '.join(cards)}: measure both on one")
        code = KEY.sub(lambda match: f"_{keys.index(match.group())}", expression)
        try:
            result = compute(ast.parse(code, mode="eval").body, names)
        except SyntaxError:
            raise FigureError(f"{text} is no expression") from None
        return (result * 100 if unit == "%" else result), unit

    def cell(self, placeholder):
        """What a placeholder of a template becomes."""
        expression, _, form = (part.strip() for part in placeholder.partition(";"))
        if expression.endswith(".*"):
            row = expression.removesuffix(".*")
            if row not in self.rows:
                raise FigureError(f"there is no row {row}")
            return " | ".join(self.cell(key) if key in self.values else "–" for key in self.rows[row])
        if form:
            value, unit = self.evaluate(expression)
            return format(value, form) + (" %" if unit == "%" else "")
        value, unit, _ = self.value(expression)
        return f"{value:,}" + (" %" if unit == "%" else "")


def card_of(origin):
    """The chip of a figure's machine, "H200", or what else the machine is; "" for what no machine measured."""
    machine = origin["machine"]
    if "data sheet" in machine or machine.startswith("any"):
        return ""
    card = re.search(r"\b[A-Z]\d00(?=s?\b)", machine)
    return card[0] if card else machine.partition(",")[0]


def load(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_float=decimal.Decimal, parse_int=decimal.Decimal)
    except json.JSONDecodeError as error:
        raise FigureError(f"{path.name}: {error}") from None


def compute(node, names):
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](compute(node.left, names), compute(node.right, names))
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    raise FigureError("an expression has keys, numbers, + - * / ** and parentheses")


def read_templates(root):
    """{name: lines} of tables.md: a template goes from its marker to the next one."""
    templates, name = {}, None
    path = root / FOLDER / "tables.md"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        match = TEMPLATE.match(line)
        if match:
            name = match.group(1)
            templates[name] = []
        elif name:
            templates[name].append(line)
    return templates


def render(template, figures):
    lines = [PLACEHOLDER.sub(lambda match: figures.cell(match.group(1)), line) for line in template]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def fits(text, value):
    """Whether a number in a text is a correct rounding of a value. Zeros at the end of 1,850 or 600 may be rounding."""
    digits = text.replace(",", "")
    decimals = len(digits.partition(".")[2])
    if "." in digits:
        unit = 10.0**-decimals
    else:
        zeros = len(digits) - len(digits.rstrip("0"))
        unit = 10.0**max(min(zeros, len(digits) - 2), 0)
    return abs(float(digits) - value) <= unit / 2 * (1 + 1e-9)


def says(number, text_unit, value, unit):
    """Whether "number text_unit" in a text is the value of an entry."""
    digits = number.replace(",", "").lstrip("0.")
    if not text_unit and len(digits if "." in number else digits.rstrip("0")) < 2 and float(number.replace(",", "")) != value:
        return False  # a 2 somewhere is no rounding of 1.8, but 2.0 may be one of 2.04
    if not unit:
        return not text_unit and fits(number, value)
    kind, factor = UNITS[unit]
    text_kind, text_factor = UNITS[text_unit] if text_unit else (kind, factor)
    return kind == text_kind and fits(number, value * factor / text_factor)


def numbers_of(text):
    """(position, number, unit or "") of all numbers in a text. In "2, 3 or 4 us" all are microseconds, and may be bare."""
    units = "|".join(sorted((re.escape(unit).replace(r"\ ", r"\s") for unit in UNITS), key=len, reverse=True))
    following = ("", 0, "")  # the next number's unit and place, and what may stand before it
    found = []
    for match in reversed(list(re.finditer(NUMBER + rf"(?:\s?({units})(?![\w/]))?", text))):
        unit = " ".join((match.group(2) or "").split())
        found.append((match.start(), match.group(1), unit))
        join = r"\s(?:to|and|or)\s"
        if not unit and following[0] and re.fullmatch(following[2], text[match.end():following[1]]):
            unit, join = following[0], r",\s"
            found.append((match.start(), match.group(1), unit))
        following = (unit, match.start(), join)
    return found[::-1]


def check_text(text, entries, figures, shown=frozenset()):
    """Yields (position, problem): what in a text is bound to no entry, and which entries do not stand in it."""
    values = []
    for entry in entries:
        try:
            quoted = entry.removeprefix("shown ")
            values.append((entry, *(figures.evaluate(entry) if quoted == entry else shown_value(quoted, shown))))
        except FigureError as error:
            yield 0, str(error)
    numbers = list(numbers_of(text))
    for entry, value, unit in values:
        if not any(says(number, text_unit, value, unit) for _, number, text_unit in numbers):
            yield 0, f"{entry} is {value:,.6g}{' ' + unit if unit else ''}, which the text does not say"
    measured = [(position, number, unit) for position, number, unit in numbers if unit not in ("", "s") and
                UNITS[unit][0] in MEASURED_KINDS]
    measured += [(match.start(1), match.group(1), match.group(2)) for pattern in MEASURED for match in pattern.finditer(text)]
    for position, number, unit in sorted(set(measured)):
        if not any(says(number, unit, value, entry_unit) for _, value, entry_unit in values):
            yield position, f"{number} {unit} stands by hand: no entry below it has this value"


def shown_value(text, shown):
    """(value, unit) of an entry that quotes the page's own measured output, of which `shown` has the numbers."""
    unit = next((unit for unit in UNITS if text.endswith(" " + unit)), "")
    expression = text.removesuffix(" " + unit) if unit else text
    for number in re.findall(r"\d+(?:\.\d+)?", expression):
        if number not in shown:
            raise FigureError(f"shown {text}: no measured output of this page has {number}")
    try:
        return compute(ast.parse(expression.strip(), mode="eval").body, {}), unit
    except SyntaxError:
        raise FigureError(f"shown {text} is no expression") from None


def shown_numbers(lines):
    """The numbers, as expressions write them, in the output that a page shows between its marks of what was measured."""
    result, measured = set(), False
    for line in lines:
        if line.startswith("<!-- measured:"):
            measured = line.startswith("<!-- measured: begin")
        elif measured and not line.startswith("$ "):
            result.update(number.replace(",", "") for number in re.findall(NUMBER, line))
    return result


def split_entries(text):
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def plain(lines):
    """The text of a block without code and the targets of links, at the same positions."""
    text = "\n".join(lines)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", lambda match: re.sub(r"[^\n]", "_", match.group()), text)


def check_page(text, templates, figures):
    """Yields (line number, problem)."""
    lines = text.split("\n")
    shown = shown_numbers(lines)
    block, first = [], 0
    index = 0

    def finish(entries):
        nonlocal block
        content, block = plain(block), []
        for position, problem in check_text(content, entries, figures, shown):
            yield first + content.count("\n", 0, position), problem
        rows = [line for line in content.split("\n") if line.startswith("|")]
        if not entries and any(HEADER_UNIT.search(row) and re.search(r"\|\s*" + NUMBER, row + rows[-1]) for row in rows):
            yield first, "a table of figures stands by hand: generate it, or bind it"

    while index < len(lines):
        line = lines[index]
        table = TABLE_BEGIN.match(line)
        if FENCE.match(line):
            yield from finish([])
            fence = line.strip()[:3]
            index = next((i for i in range(index + 1, len(lines)) if lines[i].strip() == fence), len(lines) - 1)
        elif line.startswith("<!-- measured: begin"):
            yield from finish([])
            index = next((i for i in range(index, len(lines)) if lines[i].startswith("<!-- measured: end")), len(lines) - 1)
        elif table:
            yield from finish([])
            begin = index + 1
            index = next((i for i in range(begin, len(lines)) if lines[i] == TABLE_END), -1)
            if index < 0:
                yield begin, "a table of figures without an end"
                return
            yield from ((begin + offset, problem) for offset, problem in check_table(table.group(1), lines[begin:index], templates,
                                                                                     figures))
        elif line.lstrip().startswith("<!-- figures:"):
            end = next((i for i in range(index, len(lines)) if lines[i].rstrip().endswith("-->")), len(lines) - 1)
            entries = " ".join(part.strip() for part in lines[index:end + 1])
            if not block:
                yield index + 1, "figures are named right below what they stand in"
            yield from finish(split_entries(entries.removeprefix("<!-- figures:").removesuffix("-->")))
            index = end
        elif not line.strip():
            yield from finish([])
        else:
            first = first if block else index + 1
            block.append(line)
        index += 1
    yield from finish([])


def check_table(name, lines, templates, figures):
    if name not in templates:
        yield 0, f"there is no template {name}"
        return
    try:
        expected = render(templates[name], figures)
    except FigureError as error:
        yield 0, f"the template {name}: {error}"
        return
    for offset in range(max(len(lines), len(expected))):
        if lines[offset:offset + 1] != expected[offset:offset + 1]:
            data = expected[offset] if offset < len(expected) else "nothing more"
            yield offset + 1, f"the table {name} differs from the data, which have: {data}"
            return


def renew(text, templates, figures):
    """The page with its tables generated again."""
    lines, result = text.split("\n"), []
    index = 0
    while index < len(lines):
        result.append(lines[index])
        table = TABLE_BEGIN.match(lines[index])
        if table and table.group(1) in templates and TABLE_END in lines[index:]:
            result += render(templates[table.group(1)], figures)
            index = lines.index(TABLE_END, index)
            result.append(TABLE_END)
        index += 1
    return "\n".join(result)


def find_pages(root):
    return [path.relative_to(root).as_posix() for pattern in PAGES for path in sorted(root.glob(pattern))]


def unknown_commits(root=ROOT, log=print):
    """Those that the data cites and the checkout's history does not have; their number. Not part of check: in a copy
    without the history, nothing could be done about it."""
    commits = {origin["commit"] for _, _, origin in Figures(root).values.values() if "commit" in origin}
    if not shutil.which("git"):
        raise FigureError("looking for commits needs git, which is not installed (apt-get install git)")
    unknown = [commit for commit in sorted(commits) if subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", commit + "^{commit}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode != 0]
    for commit in unknown:
        log(f"{FOLDER}: there is no commit {commit}")
    return len(unknown)


def check(root=ROOT, pages=None, log=print):
    """Returns the number of problems."""
    problems = []
    pages = find_pages(root) if pages is None else pages
    try:
        figures = Figures(root)
        templates = read_templates(root)
        sources = json.loads((root / FOLDER / "sources.json").read_text(encoding="utf-8"))
    except FigureError as error:
        log(f"{FOLDER}: {error}")
        return 1
    for page in pages:
        text = (root / page).read_text(encoding="utf-8")
        problems += [f"{page}:{line}: {problem}" for line, problem in check_page(text, templates, figures)]
    for name in sorted(source for source in sources if not (root / source).exists()):
        problems.append(f"{FOLDER}/sources.json: there is no {name}")
    files = sorted({path.relative_to(root).as_posix() for pattern in SOURCES for path in root.glob(pattern) if
                    path.suffix in SUFFIXES} | {source for source in sources if (root / source).exists()})
    for source in files:
        text = re.sub(r"\n[ \t]*// ?", "\n", (root / source).read_text(encoding="utf-8"))
        problems += [f"{source}:{text.count(chr(10), 0, position) + 1}: {problem}"
                     for position, problem in check_text(text, sources.get(source, []), figures)]
    for problem in problems:
        log(problem)
    log(f"checked the figures of {len(pages)} pages and {len(files)} files, {len(problems)} problems")
    return len(problems)


def write(root=ROOT, pages=None, log=print):
    figures, templates = Figures(root), read_templates(root)
    for page in find_pages(root) if pages is None else pages:
        text = (root / page).read_text(encoding="utf-8")
        renewed = renew(text, templates, figures)
        if renewed != text:
            (root / page).write_text(renewed, encoding="utf-8")
            log(f"{page}: tables renewed")


def show(prefix):
    for key, (value, unit, origin) in Figures(ROOT).values.items():
        if key.startswith(prefix):
            print(f"{key:45} {value:>12,} {unit:10} {origin.get('date', ''):10}  {origin.get('command') or origin.get('source')}")


def suggest(page, root=ROOT, log=print):
    """For the one who binds a page: its problems, and below each the keys that would end it."""
    figures, templates = Figures(root), read_templates(root)
    for line, problem in check_page((root / page).read_text(encoding="utf-8"), templates, figures):
        log(f"{page}:{line}: {problem}")
        number, _, unit = problem.partition(" stands by hand")[0].partition(" ")
        if re.fullmatch(NUMBER, number) and unit in UNITS:
            for key, (value, key_unit, _) in figures.values.items():
                if key_unit and says(number, unit, float(value), key_unit):
                    log(f"    {key} is {value:,} {key_unit}")


def main():
    parser = argparse.ArgumentParser(description="Puts measured figures into pages and checks them.")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--check", action="store_true", help="compare pages and file heads with the data")
    group.add_argument("--commits", action="store_true", help="list cited commits that this history does not have")
    group.add_argument("--write", action="store_true", help="renew the generated tables, then check")
    group.add_argument("--list", metavar="PREFIX", help="show the keys that begin so")
    group.add_argument("--suggest", metavar="PAGE", help="show what a page has by hand, and keys with these values")
    arguments = parser.parse_args()
    try:
        if arguments.list is not None:
            show(arguments.list)
            return 0
        if arguments.commits:
            return 1 if unknown_commits() else 0
        if arguments.suggest:
            suggest(arguments.suggest)
            return 0
        if arguments.write:
            write()
    except FigureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if check() else 0


if __name__ == "__main__":
    sys.exit(main())
