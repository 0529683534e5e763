"""Puts drafters that benchmarks/gpu/train_heads.py trained for the default model into the package, with a model card each that
is made from the records of their training.

    python benchmarks/heads/ship.py --run DIR --record FILE [--record FILE] [--prompts prompts.jsonl] [--from eagle3=NAME]

DIR has a folder for each drafter: eagle3, mtp, dflash, and draft_model or draft; files that were cut into NAME.00, NAME.01 and
so on are joined. --from: a drafter's folder and its key in the records have another name. Later records count more. --prompts:
what was asked, for the counts by task and source. A head's files are taken as they are; the draft model becomes a .gguf file in
blocks of 8 bits, with the tokenizer of the default model's. Each drafter is then tried on the default model. Ends with an error
if all together have more than 70 MB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from on_cpu import DRAFTS, interval
from prompts import PACKAGES

from forerun.llm import LLM
from forerun.models import gguf_writer, hub, shipped
from forerun.models.config import ModelConfig
from forerun.models.gguf_file import read_header
from forerun.types import SamplingParams

MOST = 70_000_000  # bytes of all drafters
LENGTHS = DRAFTS | {"draft_model": 4}
TITLES = {"eagle3": "EAGLE-3 head", "mtp": "MTP module", "dflash": "DFlash head", "draft_model": "Draft model"}
LAYOUTS = {
    "eagle3": "SpecForge's layout (safetensors, bfloat16), which vLLM and SGLang read",
    "mtp": "MiMo's layout (safetensors, bfloat16), which vLLM reads",
    "dflash": "z-lab's layout (safetensors, bfloat16), which vLLM reads",
    "draft_model": "GGUF, matrices in {formats}, with the target's tokenizer",
}
LICENCES = {
    "python": "PSF-2.0", "torch": "BSD-3-Clause", "numpy": "BSD-3-Clause", "transformers": "Apache-2.0",
    "networkx": "BSD-3-Clause", "sympy": "BSD-3-Clause", "scipy": "BSD-3-Clause", "pip": "MIT", "setuptools": "MIT",
    "rich": "MIT", "pydantic": "MIT", "jinja2": "BSD-3-Clause",
}  # fmt: skip
DEFAULTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}  # told if they differ
NOT_READ = {  # settings of training that a method does not read
    "eagle3": ("pace", "anchors", "noise"), "mtp": ("pace", "anchors", "noise"), "dflash": ("unroll", "noise"),
    "draft_model": ("pace", "anchors", "noise", "unroll", "fade"),
}  # fmt: skip
ASKED = (
    "Explain in three sentences why the sea is salty.",
    "Add a docstring:\ndef area(width, height):\n    return width * height",
)


def joined(folder: Path, to: Path) -> None:
    """Copy a folder's files; those that were cut are joined."""
    to.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        cut = len(file.suffix) == 3 and file.suffix[1:].isdigit()
        name = file.stem if cut else file.name
        if name == "README.md" or not file.is_file():
            continue
        with (to / name).open("ab" if cut else "wb") as out:
            out.write(file.read_bytes())


def place(method: str, source: Path, to: Path, embedding: str) -> None:
    """Put a drafter's files in the place of any others. embedding: the format of a draft model's."""
    if to.is_symlink():
        to.unlink()
    shutil.rmtree(to, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        whole = Path(work) / "whole"
        joined(source, whole)
        if method != "draft_model":
            shutil.copytree(whole, to)
            return
        to.mkdir(parents=True)
        vocabulary = next(hub.resolve().glob("*.gguf"))
        about = {"name": f"draft model of {shipped.TARGET}", "license": "apache-2.0"}
        gguf_writer.write(to / shipped.MODEL, whole, vocabulary, embedding, **about)


def shape(method: str, folder: Path) -> str:
    """What the drafter is, in a sentence or two."""
    if method == "draft_model":
        c = ModelConfig.read(hub.resolve(folder / shipped.MODEL))
        return (
            f"A Llama of {c.layers} layers, hidden size {c.hidden_size}, {c.heads} heads of {c.head_dim}, an MLP of "
            f"{c.intermediate_size}, and the target's vocabulary of {c.vocab_size:,} tokens."
        )
    c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    mlp = f"an MLP of {c['intermediate_size']:,}"
    shares = "It has no embedding and no vocabulary head: it uses the target's."
    if method == "mtp":
        return f"One decoder layer with {mlp} behind the target's last state, applied again for each drafted token. {shares}"
    if method == "dflash":
        states = ", ".join(str(i + 1) for i in c["dflash_config"]["target_layer_ids"])
        return (
            f"{c['num_hidden_layers']} layers with {mlp}, which draft a block of {c['block_size']} tokens (the last committed "
            f"one included) in one pass. It reads the target's states {states}. {shares}"
        )
    states = ", ".join(map(str, c["eagle_aux_hidden_state_layer_ids"]))
    return (
        f"One decoder layer with {mlp}. It reads the target's states {states}. It drafts the {c['draft_vocab_size']:,} tokens "
        f"that were most frequent in the answers, of the target's {c['vocab_size']:,}. It uses the target's embedding."
    )


def layout(method: str, folder: Path) -> str:
    """The format of a drafter's files."""
    if method != "draft_model":
        return LAYOUTS[method]
    kinds = {t.tensor_type.name for t in read_header(folder / shipped.MODEL).tensors if len(t.shape) > 1}
    return LAYOUTS[method].format(formats=" and ".join(sorted(kinds, reverse=True)))


def data(asked: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section about the data. asked: the record of the answers; prompts: those that were asked, if they are at hand."""
    sources = Counter(one["source"] for one in prompts if one.get("source"))
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    lines = [
        f"- Prompts: {asked['prompts']:,}, made from templates by `benchmarks/heads/prompts.py`. They ask for explanations, "
        "chat, code to edit and to return, code to explain and to write, summaries, rewriting, continuations, lists, "
        "translations and extraction. No prompt has a text of `forerun bench`, nor a subject of its tasks explain and chat.",
        f"- Answers: {asked['samples'] + asked['held_out']:,} by the target itself (SmolLM2-135M-Instruct, Apache-2.0), "
        f"{asked['answered_tokens']:,} tokens of answers to train on. About half were greedy, half sampled at temperature 0.7.",
        f"- Held out: {asked['held_out']:,} answers to prompts that were not trained on.",
        "- Texts in the prompts: source code, docstrings and licence texts of Python and of packages, under these licences.",
        "",
        "| source | version | licence |" + (" prompts |" if sources else ""),
        "|---|---|---|" + ("---:|" if sources else ""),
    ]
    for name, licence in LICENCES.items():
        if name in versions and (not sources or sources[name]):
            lines.append(f"| {name} | {versions[name]} | {licence} |" + (f" {sources[name]:,} |" if sources else ""))
    lines += ["", "The versions are those where this card was made. All other words of the prompts are Forerun's own."]
    if prompts:
        tasks = Counter(one["task"] for one in prompts)
        lines += ["", "Prompts by task: " + ", ".join(f"{task} {n:,}" for task, n in tasks.most_common()) + "."]
    return lines


def recipe(method: str, found: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """The section about the training."""
    left_out = {*NOT_READ[method], "feature_memory"}
    settings = {k: v for k, v in found["settings"].items() if k not in left_out and v is not None and v != DEFAULTS.get(k, ...)}
    settings |= {name: value for name, value in found.get("shape", {}).items()}
    rows = {"steps": found["steps"], "tokens of a step": round(found["tokens_per_step"])}
    rows |= {k.replace("_", " "): v for k, v in settings.items() if k not in ("steps", "tokens", "seed")}
    rows |= {"seed": found["settings"].get("seed", 0), "trained parameters": f"{found['parameters']:,}"}
    return [
        "Trained in bfloat16, with master weights in float32, by `benchmarks/gpu/train_heads.py`. `forerun train` has the same "
        "settings (docs/training.md).",
        "",
        "| setting | value |",
        "|---|---:|",
        *(f"| {name} | {', '.join(map(str, v)) if isinstance(v, list | tuple) else v} |" for name, v in rows.items()),
        "",
        f"Hardware: one {record['device']}, torch {record['torch']}, {record['date']}. Training took {found['train_s']:,.0f} "
        f"s, {found['steps_per_s']:.1f} steps/s. The answers, which all drafters share, took "
        f"{record['answers']['answer_s']:,.0f} s.",
    ]


def held_out(found: Mapping[str, Any]) -> list[str]:
    """Acceptance by position on held-out answers."""
    last = [one[2] for one in found["curve"] if one[0] == "held out"][-1]
    accepted, lengths = last["accepted"], last["lengths"]
    count = range(1, len(accepted) + 1)
    return [
        f"On {last['samples']:,} held-out answers, as the trainer walks over them (half of them sampled):",
        "",
        "| drafted tokens | " + " | ".join(map(str, count)) + " |",
        "|---|" + "---:|" * len(accepted),
        "| accepted up to this position, % of drafts | " + " | ".join(f"{100 * x:.1f}" for x in accepted) + " |",
        "| tokens a step, if so many are drafted | " + " | ".join(f"{x:.2f}" for x in lengths) + " |",
    ]


def by_task(method: str, measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """Acceptance length and speed on the tasks of forerun bench, one request at a time."""
    k = LENGTHS[method]
    one = [m for m in measured if m["rows"] == 1]
    plain = {m["task"]: m["tokens_per_s"] for m in one if m["arm"] == "plain"}
    arms = {name: {m["task"]: m for m in one if m["arm"] == name} for name in dict.fromkeys(m["arm"] for m in one)}
    greedy, drawn = (arms.get(f"{method} k={k}{rest}", {}) for rest in ("", ", drawn, fixed"))
    if not greedy:
        return []

    def length(m: Mapping[str, Any]) -> str:
        low, high = interval([(made - 1, steps) for made, steps in m["requests"]])
        return f"{m['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"

    columns = ["task", "requests", "tokens a step, greedy [95 %]", "speed over plain decoding"]
    columns += ["tokens a step, T = 0.7, drawn drafts [95 %]"] if drawn else []
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for task, m in greedy.items():
        cells = [task, str(len(m["requests"])), length(m), f"{m['tokens_per_s'] / plain[task]:.2f}"]
        cells += [length(drawn[task])] if task in drawn else [""] if drawn else []
        lines.append("| " + " | ".join(cells) + " |")
    return [
        f"On the tasks of `forerun bench`, whose texts and subjects are not in the training data; k = {k}, one request at a "
        "time, on the machine of the training. Intervals: requests drawn again with replacement.",
        "",
        *lines,
        "",
        "The engine chooses how many drafted tokens it verifies, by what a step costs on the machine. On another one both "
        "figures differ.",
    ]


def card(method: str, key: str, folder: Path, record: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]) -> str:
    """The model card of a drafter whose files are in this folder."""
    found, name = record[key], f"{shipped.TARGET}/{folder.name}"
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    k = LENGTHS[method]
    lines = [
        f"# {TITLES[method]} for SmolLM2-135M-Instruct",
        "",
        "It drafts tokens for this target in speculative decoding. " + shape(method, folder),
        "",
        "```python",
        "from forerun import LLM",
        "",
        f'llm = LLM("{shipped.TARGET}", speculative_config={{"method": "{method}", "num_speculative_tokens": {k}}})',
        "```",
        "",
        f"Its name is `{name}`. Format: {layout(method, folder)}; {size:.1f} MB. Licence: Apache-2.0, as the target's and "
        "Forerun's.",
        "",
        "## Data",
        "",
        *data(record["answers"], prompts),
        "",
        "## Recipe",
        "",
        *recipe(method, found, record),
        "",
        "## Acceptance",
        "",
        *held_out(found),
    ]
    measured = by_task(method, record.get("measure", []))
    lines += ["", *measured] if measured else []
    if method == "draft_model":
        lines += ["", "These figures are of the weights in bfloat16, before they were rounded to those of the file."]
    lines += [
        "",
        "## Limits",
        "",
        "It was trained on prompts in English and code in Python, for this target. Other languages, long contexts and other "
        "fine-tunes of the same base were not measured. A wrong draft costs time and never changes an answer.",
    ]
    return "\n".join(lines) + "\n"


def tried(method: str) -> float | None:
    """The acceptance length of the drafter in the package, on two prompts."""
    settings = {"method": method, "num_speculative_tokens": LENGTHS[method]}
    llm = LLM(speculative_config=settings, kv_cache_tokens=2048, max_model_len=512, adaptive_drafts=False)
    llm.chat([[{"role": "user", "content": text}] for text in ASKED], SamplingParams(temperature=0, max_tokens=64))
    return llm.stats.drafts.acceptance_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--record", type=Path, action="append", required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--from", dest="names", action="append", default=[], metavar="METHOD=NAME")
    parser.add_argument("--draft-embedding", default="Q8_0", help="Q8_0, Q5_1 or Q5_0; it is most of the draft model")
    parser.add_argument("--only", default=",".join(TITLES), help="methods, separated by commas")
    given = parser.parse_args()
    record: dict[str, Any] = {}
    for path in given.record:
        new = json.loads(path.read_text(encoding="utf-8"))
        record |= {key: value for key, value in new.items() if not str(value).startswith("failed")}
    prompts = []
    if given.prompts is not None:
        prompts = [json.loads(line) for line in given.prompts.read_text(encoding="utf-8").splitlines()]
        prompts = prompts[: record["answers"]["prompts"]]
    names = dict(one.split("=") for one in given.names)
    for method in given.only.split(","):
        choices = [names[method]] if method in names else [method, shipped.FOLDERS[method]]
        key = next((one for one in choices if (given.run / one).is_dir() and one in record), None)
        if key is None:
            sys.exit(f"{method}: {given.run} has no folder {' or '.join(choices)} that the records have too")
        folder = shipped.ROOT / shipped.TARGET / shipped.FOLDERS[method]
        place(method, given.run / key, folder, given.draft_embedding)
        (folder / "README.md").write_text(card(method, key, folder, record, prompts), encoding="utf-8")
        print(f"{folder}: {sum(f.stat().st_size for f in folder.iterdir()):,} bytes; {tried(method)} tokens a step", flush=True)
    total = sum(one.bytes for one in shipped.drafters())
    print(f"all: {total:,} bytes, torch {torch.__version__}")
    if total > MOST:
        sys.exit(f"that is more than {MOST:,}; give --draft-embedding Q5_1, or train with a smaller draft vocabulary")


if __name__ == "__main__":
    main()
