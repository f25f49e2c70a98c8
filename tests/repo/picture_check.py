#!/usr/bin/env python3
"""Draws the READMEs' pictures again and compares them with the files, byte for byte.

    python3 tests/repo/picture_check.py                        all stages, with the programs in build/
    python3 tests/repo/picture_check.py build/stage2           one of them
    python3 tests/repo/picture_check.py --update               draw the files again, and remove those no longer drawn

A stage's program lists its pictures (`stage2 picture`), and draws each into a file of that name beside the README. Every
picture is shown by a README of the repository.
"""

import argparse
import difflib
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TIMEOUT_SECONDS = 600
# Pictures that another command draws, with options.
OTHERS = {
    8: {"compare": ["compare", "--requests", "24", "--slots", "1024", "--max-length", "256", "--block-size", "8",
                    "--virtual-clock", "--device", "cpu", "--plot"]},
}
IMAGE = re.compile(r"!\[([^\]]+)\]\(([^)\s]+\.svg)\)")
SVG = "{http://www.w3.org/2000/svg}"


def run(arguments):
    result = subprocess.run(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=TIMEOUT_SECONDS,
                            check=True)
    return result.stdout


def commands(program, number):
    """{name of the picture: the command that draws it to standard output}"""
    names = [line.split()[0] for line in run([program, "picture"]).decode().splitlines()]
    result = {name: [program, "picture", name] for name in names}
    for name, arguments in OTHERS.get(number, {}).items():
        result[name] = [program, *arguments, "-"]
    return result


def svg_of(output):
    """The picture alone, without what else the command prints."""
    begin, end = output.find(b"<svg"), output.find(b"</svg>\n")
    return output[begin:end + len(b"</svg>\n")] if 0 <= begin < end else b""


def check_drawing(drawing):
    """What is wrong with a picture alone, or an empty string."""
    try:
        picture = xml.etree.ElementTree.fromstring(drawing)
    except xml.etree.ElementTree.ParseError as error:
        return f"is no SVG: {error}"
    for name in ("title", "desc"):
        element = picture.find(SVG + name)
        if element is None or not (element.text or "").strip():
            return f"has no <{name}>"
    if b"prefers-color-scheme:dark" not in drawing:
        return "has no colours for dark pages"
    small = [text.text for text in picture.iter(SVG + "text") if float(text.get("font-size", "0")) < 13]
    return f"has letters smaller than 13 pixels: {small[0]}" if small else ""


def shown_pictures(root):
    """The files that the READMEs show with an alternative text."""
    result = set()
    for readme in root.glob("**/*.md"):
        for _, path in IMAGE.findall(readme.read_text(encoding="utf-8")):
            result.add((readme.parent / path).resolve())
    return result


def check_stage(program, folder, number, update, shown):
    """Returns the failures."""
    failures = []
    drawn = set()
    for name, command in commands(program, number).items():
        path = folder / f"{name}.svg"
        drawn.add(path)
        drawing = svg_of(run(command))
        problem = check_drawing(drawing)
        if problem:
            failures.append(f"{path.name} {problem}")
        if update:
            path.write_bytes(drawing)
        elif not path.exists():
            failures.append(f"{path.name} is not there")
        elif path.read_bytes() != drawing:
            before = path.read_text(encoding="utf-8").splitlines()
            after = drawing.decode("utf-8").splitlines()
            difference = list(difflib.unified_diff(before, after, "in the file", "drawn now", lineterm="", n=0))
            failures.append("\n".join([f"{path.name} is not what the program draws:", *difference[:12]]))
        if path.resolve() not in shown:
            failures.append(f"{path.name} is shown by no README")
    for path in sorted(set(folder.glob("*.svg")) - drawn):
        if update:
            path.unlink()
        else:
            failures.append(f"{path.name} is drawn by no command")
    return [f"{folder.name}/{failure}" for failure in failures]


def main():
    parser = argparse.ArgumentParser(description="Compares the READMEs' pictures with what the programs draw.")
    parser.add_argument("programs", nargs="*", type=pathlib.Path, help="stages' programs (default: build/stage*)")
    parser.add_argument("--update", action="store_true", help="write the pictures' files again")
    arguments = parser.parse_args()
    programs = arguments.programs or sorted(path for path in (ROOT / "build").glob("stage[0-9]") if path.is_file())
    if not programs:
        print("error: there is no program; build first: cmake --workflow --preset course", file=sys.stderr)
        return 1
    shown = shown_pictures(ROOT)
    failures = []
    for program in programs:
        number = int(re.fullmatch(r"stage(\d+)", program.name).group(1))
        folder = next(ROOT.glob(f"stage{number}_*"))
        failures += check_stage(program.resolve(), folder, number, arguments.update, shown)
    for failure in failures:
        print(failure)
    print(f"{len(programs)} programs, {len(failures)} failures")
    if failures and not arguments.update:
        print("draw them again with: python3 tests/repo/picture_check.py --update")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
