"""Writes the prompts of forerun bench's tasks as token ids, for scripts on a machine without the instrument's libraries.

    python benchmarks/heads/task_ids.py --out tasks.json [--tasks explain,chat,edit-code,return-code] [--count 64]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from forerun.bench.workloads.tasks import TASKS
from forerun.models import hub
from forerun.models.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default="explain,chat,edit-code,return-code")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--model", default=hub.DEFAULT)
    given = parser.parse_args()
    tokenizer = Tokenizer(hub.resolve(given.model))
    found = {}
    for name in given.tasks.split(","):
        prompts = [TASKS[name].prompt(variant) for variant in range(given.count)]
        found[name] = [list(tokenizer.encode_rendered([tokenizer.render_chat(p.conversation or ())])[0]) for p in prompts]
    given.out.write_text(json.dumps(found))
    print({name: sum(map(len, ids)) / len(ids) for name, ids in found.items()})


if __name__ == "__main__":
    main()
