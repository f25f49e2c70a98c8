#!/usr/bin/env python3
"""Makes the files that a page with widgets loads: bundle.py FOLDER [--compiled stage2,stage5] stage2=build/stage2 …

FOLDER/widgets.js            the widgets, with the live page's drawing code and their style sheet
FOLDER/stage2_scenes.js      what `stage2 scene --record` prints; stage 7's comes from kernel_count
FOLDER/stage2_wasm.js        is there already for the stages that --compiled names
"""

import argparse
import json
import pathlib
import re
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "serving/page"
# Stages whose scenes another program records: what is in them cannot run in a page.
RECORDERS = {"stage7": "kernel_count"}
SOURCES = {"stage8": ["kv_cache_manager", "prefix_cache", "scheduler"], "stage6": ["kv_cache_manager", "prefix_cache"],
           "stage3": ["attention"]}


def switched(palette):
    """The palette with the switch of the site's pages: data-theme of their root comes before what the system prefers."""
    dark = re.search(r"@media \(prefers-color-scheme: dark\) \{\n(.*?\n)\}\n", palette, re.DOTALL)
    return (palette[:dark.start(1)] + dark[1].replace(".palette", ":root:not([data-theme=light]) .palette") + palette[dark.end(1):] +
            dark[1].replace(".palette", ":root[data-theme=dark] .palette"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("programs", nargs="+", metavar="stage2=build/stage2")
    parser.add_argument("--compiled", default="", help="stages whose code is there as WebAssembly, with commas between them")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    stages = {}
    for stage, program in (entry.split("=", 1) for entry in arguments.programs):
        record = subprocess.run([program, "scene", "--record"], capture_output=True, text=True, check=True).stdout
        stages[stage] = {"scenes": list(json.loads(record)), "isCompiled": stage in arguments.compiled.split(","),
                         "program": RECORDERS.get(stage, stage), "canCompile": stage not in RECORDERS,
                         "sources": SOURCES.get(stage, ["kv_cache_manager"])}
        (arguments.folder / f"{stage}_scenes.js").write_text(f'courseRecordedScenes("{stage}", {record.strip()});\n')
    styles = "".join(switched(path.read_text()) for path in (PAGE / "palette.css", HERE / "widgets.css"))
    parts = ["(() => {", '"use strict";', *((PAGE / name).read_text() for name in ("snapshot.js", "drawing.js")),
             f"const kStages = {json.dumps(stages)};", f"const kStyles = {json.dumps(styles)};",
             (HERE / "widgets.js").read_text(), "})();"]
    (arguments.folder / "widgets.js").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
