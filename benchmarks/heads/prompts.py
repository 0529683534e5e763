"""Makes prompts to train drafters on, from text that Python and its packages ship, and from subjects.toml. Needs no network.

    python benchmarks/heads/prompts.py --out prompts.jsonl [--count 40000] [--seed 0]

The tasks are of the kinds that forerun bench measures (explain, chat, code to return and to edit) and of others (summarise,
rewrite, continue, list, translate, extract). None of them has a text or a subject of the benchmark: see `Apart`. The same seed,
Python and packages give the same prompts. The texts are under the licences of Python and of these packages; a prompt that is
made of one names it in `source`.
"""

from __future__ import annotations

import argparse
import ast
import html.entities
import http
import importlib.metadata
import inspect
import json
import pydoc_data.topics
import random
import re
import sysconfig
import textwrap
import tomllib
import unicodedata
import zoneinfo
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from forerun.bench.workloads.tasks import TASKS
from forerun.bench.workloads.texts import texts

GRAM = 8  # so many words in a row that a prompt and the benchmark share are too many
SUBJECTS = (  # what the prompts of the tasks explain and chat are about, one phrase at least for each
    "sky", "bicycles?", "hash tables?", "bread", "tides?", "inflation", "refrigerators?|fridge", "leaves|leaf|foliage",
    "vaccines?|vaccination", "compilers?", "rainbows?", "sleep", "microphones?", "soil", "stars?", "metals?", "internet",
    "leap years?", "bees?|honey", "ice", "glass", "budgets?", "locks?|padlock", "volcano(?:es)?", "cameras?", "virus(?:es)?",
    "clouds?", "seasons?", "papers?", "friction", "sails?|sailing", "onions?", "mountains?", "web pages?|websites?", "guitars?",
    "plants", "passwords?", "paint|painting", "cats?",
)  # fmt: skip
PACKAGES = ("torch", "numpy", "transformers", "networkx", "sympy", "scipy", "pip", "setuptools", "rich", "pydantic", "jinja2")
FILES = 1500  # of a package, at most
SHARES = {  # of the prompts, by task
    "explain": 20, "ask": 8, "chat": 11, "edit-code": 24, "return-code": 14, "explain-code": 4, "write-code": 4, "summarise": 5,
    "rewrite": 4, "continue": 3, "list": 3, "translate": 2, "extract": 3, "topic": 2,
}  # fmt: skip


Code = ast.FunctionDef | ast.ClassDef


class Source(NamedTuple):
    """A piece of code or prose. package: what it is of."""

    package: str
    text: str


class Apart:
    """Tells prompts that share something with the benchmark."""

    def __init__(self) -> None:
        self._grams = {gram for text in benchmark_texts() for gram in grams(text)}
        self._subject = re.compile(rf"\b(?:{'|'.join(SUBJECTS)})\b", re.IGNORECASE)

    def shares_text(self, text: str) -> bool:
        """Whether GRAM words in a row are in a prompt or an expected answer of the benchmark."""
        return not self._grams.isdisjoint(grams(text))

    def shares_subject(self, text: str) -> bool:
        """Whether it names what the benchmark asks about."""
        return self._subject.search(text) is not None


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
    found = words_of(text)
    return {tuple(found[i : i + GRAM]) for i in range(len(found) - GRAM + 1)}


@cache
def benchmark_texts() -> tuple[str, ...]:
    """Every text that a prompt of the benchmark may contain: its data files, and all variants of its tasks."""
    found = [text for name in ("english", "functions", "chinese", "agent") for text in _leaves(texts(name))]
    for task in TASKS.values():
        for variant in range(task.variants):
            prompt = task.prompt(variant)
            found += [text for text in (prompt.message, prompt.text, prompt.prediction) if text]
            found += [str(message["content"]) for message in prompt.messages or ()]
    return tuple(dict.fromkeys(found))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif hasattr(value, "values"):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _leaves(one)


class Corpus:
    """What Python and its packages ship, in an order drawn from the seed. code: functions and small classes; prose: paragraphs;
    named: (name, what it is) of modules and functions; identifiers: words for new names."""

    def __init__(self, seed: int, packages: Sequence[str], files: int) -> None:
        draw = random.Random(f"corpus {seed}")
        self.code: list[Source] = []
        self.prose: list[Source] = []
        self.named: list[tuple[str, str]] = []
        names: Counter[str] = Counter()
        for package, paths in python_files(packages).items():
            picked = draw.sample(paths, min(files * (4 if package == "python" else 1), len(paths)))
            for path in sorted(picked):
                self._read(package, path, names)
        for topic, text in sorted(pydoc_data.topics.topics.items()):
            self._add_prose("python", text)
            self.named.append((f"the topic '{topic}' in Python", ""))
        for package, text in licences(packages):
            self._add_prose(package, text)
        self.identifiers = sorted(name for name, n in names.items() if n >= 3 and 3 < len(name) < 16)
        self.code = list({one.text: one for one in self.code}.values())
        self.prose = list({one.text: one for one in self.prose}.values())
        for pile in (self.code, self.prose, self.named):
            draw.shuffle(pile)

    def _read(self, package: str, path: Path, names: Counter[str]) -> None:
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            return
        lines = text.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                names[node.id] += node.id.islower()
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            doc = ast.get_docstring(node)
            if doc and not node.name.startswith("_"):
                self._add_prose(package, doc)
                first = doc.split("\n\n")[0].replace("\n", " ").strip()
                if isinstance(node, ast.FunctionDef) and 4 <= len(first.split()) <= 25:
                    self.named.append((f"{path.stem}.{node.name}", first))
            count = (node.end_lineno or 0) - node.lineno + 1
            if 4 <= count <= (32 if isinstance(node, ast.FunctionDef) else 26):
                source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
                short = len(source) < 1600 and max(map(len, source.split("\n"))) < 100
                if short and source.isascii() and "```" not in source and _parsed(source) is not None:
                    self.code.append(Source(package, source))
        self._add_prose(package, ast.get_docstring(tree) or "")

    def _add_prose(self, package: str, text: str) -> None:
        for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
            joined = " ".join(part.split())
            plain = sum(c.isalpha() or c in " ,.'" for c in joined) > 0.93 * len(joined)
            if plain and 40 <= len(joined.split()) <= 160 and joined[0].isupper() and joined[-1] in ".!?":
                self.prose.append(Source(package, joined))


def python_files(packages: Sequence[str]) -> dict[str, list[Path]]:
    """The source files of Python's library and of the packages that are here, in the order of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "ensurepip", "testing"}

    def under(folder: Path) -> list[Path]:
        return sorted(p for p in folder.rglob("*.py") if not skipped.intersection(p.relative_to(folder).parts))

    found = {"python": under(library)}
    for name in packages:
        folder = Path(sysconfig.get_paths()["purelib"]) / name
        if folder.is_dir():
            found[name] = under(folder)
    return found


def nouns() -> list[str]:
    """Things of daily life with an article: those that Unicode has pictures of."""
    left_out = re.compile("FACE|SIGN|SYMBOL|BUTTON|HAND|FINGER|ARROW|MARK|SQUARE|CIRCLE|SKIN|WITH|FOR|LETTER|OF|AND|GIRL|BOY")
    found = []
    for code in (*range(0x1F300, 0x1F650), *range(0x1F680, 0x1F6FD), *range(0x1F900, 0x1FA00)):
        name = unicodedata.name(chr(code), "")
        if name and name.replace(" ", "").isalpha() and len(name.split()) <= 2 and not left_out.search(name):
            word = name.lower()
            found.append(f"{'an' if word[0] in 'aeiou' else 'a'} {word}")
    return found


def licences(packages: Sequence[str]) -> list[tuple[str, str]]:
    """The licence texts and descriptions of installed packages."""
    found = []
    for one in sorted(importlib.metadata.distributions(), key=lambda d: str(d.name)):
        if one.name in packages:
            found.append((one.name, str(one.metadata.get_payload() or "")))
            found += [
                (one.name, Path(str(file.locate())).read_text(encoding="utf-8", errors="ignore"))
                for file in one.files or () if "LICENSE" in file.name.upper() and Path(str(file.locate())).is_file()
            ]  # fmt: skip
    return found


class Maker:
    """Makes prompts, one task after the other."""

    def __init__(self, seed: int, packages: Sequence[str] = PACKAGES, files: int = FILES) -> None:
        self.corpus, self._draw = Corpus(seed, packages, files), random.Random(f"prompts {seed}")
        self._known = tomllib.loads(Path(__file__).with_name("subjects.toml").read_text(encoding="utf-8"))
        self._apart, self.left_out = Apart(), Counter[str]()
        self._code, self._prose = _cycle(self.corpus.code), _cycle(self.corpus.prose)
        self._named = _cycle(self.corpus.named)
        self._cities = sorted({name.split("/")[-1].replace("_", " ") for name in zoneinfo.available_timezones() if "/" in name})
        self._nouns = nouns()
        self._makers: dict[str, Callable[[], dict[str, Any]]] = {
            "explain": self._explain, "ask": self._ask, "chat": self._chat, "edit-code": self._edit,
            "return-code": self._return, "explain-code": self._explain_code, "write-code": self._write_code,
            "summarise": self._summarise, "rewrite": self._rewrite, "continue": self._continue, "list": self._list,
            "translate": self._translate, "extract": self._extract, "topic": self._topic,
        }  # fmt: skip

    def prompts(self, count: int) -> Iterator[dict[str, Any]]:
        """count different lines for `forerun train`, mixed. Raises ValueError if the texts do not suffice."""
        order = [task for task, share in SHARES.items() for _ in range(round(count * share / sum(SHARES.values())) + 1)]
        self._draw.shuffle(order)
        seen: set[str] = set()
        for task in order[:count]:
            for _ in range(200):
                line = self._makers[task]()
                said = "\n".join(line["turns"]) if "turns" in line else line["prompt"]
                own = line.pop("about", said)
                if said in seen:
                    continue
                if self._apart.shares_text(said) or (own and self._apart.shares_subject(own)):
                    self.left_out[task] += 1
                    continue
                seen.add(said)
                yield {"task": task, **line}
                break
            else:
                raise ValueError(f"no more different prompts of the task {task}; ask for fewer than {count}")

    def _any(self, name: str) -> str:
        return str(self._draw.choice(self._known[name]))

    def _filled(self, form: str, **values: object) -> str:
        for name, value in ({"reader": self._any("readers"), "n": self._draw.randrange(3, 11)} | values).items():
            form = form.replace(f"{{{name}}}", str(value))
        return form

    def _explain(self) -> dict[str, Any]:
        thing = self._any("things")
        if self._draw.random() < 0.6:
            thing = self._any("thing_forms").replace("{x}", self._draw.choice(self._nouns))
        return {"prompt": self._filled(self._any("forms"), thing=thing)}

    def _ask(self) -> dict[str, Any]:
        it = self._any("activities")
        if self._draw.random() < 0.5:
            it = self._any("activity_forms").replace("{x}", self._draw.choice(self._nouns))
        return {"prompt": self._filled(self._any("asks"), it=it)}

    def _chat(self) -> dict[str, Any]:
        first = self._explain() if self._draw.random() < 0.3 else self._ask()
        more = self._draw.sample(self._known["then"], self._draw.choice((1, 1, 2)))
        return {"turns": [first["prompt"], *map(self._filled, more)]}

    def _topic(self) -> dict[str, Any]:
        draw, kind = self._draw, self._draw.randrange(4)
        if kind == 0:
            name, what = next(self._named)
            return {"prompt": f"What is {name} for?" + (f" Its documentation begins: {what}" if what else ""), "about": ""}
        if kind == 1:
            city = draw.choice(self._cities)
            ask = draw.choice(("Describe a day in {c}.", "Write two paragraphs about {c}.", "What is there to see in {c}?"))
            return {"prompt": ask.replace("{c}", city) + f" Write for {self._any('readers')}."}
        if kind == 2:
            sign = chr(draw.choice(sorted(set(html.entities.name2codepoint.values()))))
            return {"prompt": f"What is the sign {sign} ({unicodedata.name(sign, 'unnamed').lower()}) used for?"}
        status = draw.choice(list(http.HTTPStatus))
        who = self._any("readers")
        return {"prompt": f"When does a server answer {status.value} {status.phrase}, and what should {who} do?"}

    def _function(self) -> tuple[Source, Code]:
        """A piece of code and its tree, often without its docstring."""
        source = next(self._code)
        node = _parsed(source.text)
        assert node is not None
        doc = node.body[0]
        stated = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and len(node.body) > 1
        if stated and self._draw.random() < 0.7:
            lines = source.text.split("\n")
            del lines[doc.lineno - 1 : doc.end_lineno]
            shorter = _parsed("\n".join(lines))
            if shorter is not None:
                return Source(source.package, "\n".join(lines)), shorter
        return source, node

    def _fenced(self, asked: str, source: Source) -> dict[str, Any]:
        mark = self._draw.choice(("```python\n", "```python\n", "```\n", "\n"))
        text = f"{asked}\n\n{mark}{source.text}" + ("```" if "`" in mark else "")
        return {"prompt": text, "source": source.package, "about": ""}

    def _renaming(self, node: ast.AST) -> tuple[str, str] | None:
        """A local name of some code, and another for it."""
        used = Counter(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        used.update(a.arg for a in ast.walk(node) if isinstance(a, ast.arg) and a.arg not in ("self", "cls"))
        old = [name for name in sorted(used) if len(name) > 1]
        if not old:
            return None
        new = self._draw.choice(self.corpus.identifiers)
        if self._draw.random() < 0.5:
            new = f"{new}_{self._draw.choice(self.corpus.identifiers)}"
        return self._draw.choice(old), new

    def _return(self) -> dict[str, Any]:
        while True:
            source, node = self._function()
            if self._draw.random() < 0.2:
                ask = self._draw.choice((
                    "Repeat this code exactly as it is.", "Print the following code again, unchanged.",
                    "Return this Python code without any change.", "Copy this code into one code block.",
                ))  # fmt: skip
                return self._fenced(ask, source)
            renaming = self._renaming(node)
            if renaming is not None:
                ask = self._draw.choice((
                    "Rename `{a}` to `{b}` and give back all of the code.", "Call `{a}` `{b}` from now on. Return all code.",
                    "Replace the name `{a}` by `{b}` everywhere in this function and show the result.",
                    "In the code below, `{a}` should be named `{b}`. Write the whole code again with only this change.",
                    "Please rename the variable `{a}` to `{b}`. Change nothing else.",
                    "Rename `{a}` to `{b}` in this code. Answer with the code alone.",
                    "Use `{b}` in place of `{a}` and return the full Python code, otherwise unchanged.",
                ))  # fmt: skip
                return self._fenced(ask.replace("{a}", renaming[0]).replace("{b}", renaming[1]), source)

    def _edit(self) -> dict[str, Any]:
        while True:
            source, node = self._function()
            possible = list(self._edits(node))
            picked = self._draw.sample(possible, min(len(possible), self._draw.choice((1, 1, 1, 2))))
            renaming = self._renaming(node) if self._draw.random() < 0.6 else None
            if renaming is not None:
                picked.append(f"rename `{renaming[0]}` to `{renaming[1]}`")
            if not picked:
                continue
            what = ", and ".join(picked)
            ask = self._draw.choice((
                "Edit this code: {w}. Give back the complete code.", "Please {w}. Show the full code after the change.",
                "Change the following function: {w}. Answer with the whole code.", "{W}. Return all of the code.",
                "Here is some Python code. {W}. Write out the entire new version.", "Update this code: {w}. Return the code.",
                "In the code below, {w}. Print the complete result in one code block.",
                "I want you to {w}. Keep everything else as it is and return the code in full.",
            ))  # fmt: skip
            return self._fenced(ask.replace("{w}", what).replace("{W}", what[0].upper() + what[1:]), source)

    def _edits(self, node: Code) -> Iterator[str]:
        """Changes that can be made to some code."""
        draw, function = self._draw, node if isinstance(node, ast.FunctionDef) else None
        if ast.get_docstring(node) is None:
            yield draw.choice(("write a docstring of one line for it", "document it with a short docstring", "add a docstring"))
        if function is not None:
            given = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
            if function.returns is None:
                yield draw.choice(("add type hints", "annotate the arguments and the result with types"))
            if given:
                one = draw.choice(given)
                yield draw.choice((
                    f"raise a TypeError if `{one}` is None", f"print `{one}` at the beginning", f"make `{one}` keyword-only",
                    f"return early if `{one}` is empty", f"raise a ValueError if `{one}` is negative",
                    f"give `{one}` a default of None", f"log `{one}` with logging.debug first",
                ))  # fmt: skip
            if function.args.defaults and function.args.args:
                name = function.args.args[-1].arg
                yield f"change the default of `{name}` to {draw.choice(('None', 'True', '0', '1', '16', '100', repr('auto')))}"
            yield draw.choice(("add a parameter `verbose=False` that is not used yet", "give the function a clearer name"))
        found = {type(n) for n in ast.walk(node)}
        if ast.For in found:
            yield draw.choice(("put a comment above each loop", "count the rounds of the loop in a variable `rounds`"))
        if ast.If in found:
            yield draw.choice(("add a comment before every if", "turn the first condition around"))
        if ast.Raise in found:
            yield draw.choice(("raise a RuntimeError instead", "make the error message more helpful"))
        if ast.Return in found:
            yield draw.choice(("store the result in `result` before returning it", "print the result before it is returned"))
        if ast.Mod in found or ast.JoinedStr in found:
            yield draw.choice(("use str.format for the texts", "use f-strings for all texts"))
        numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is int]
        if numbers:
            yield f"replace the number {draw.choice(numbers)} by {draw.randrange(2, 200)}"
        if ast.Constant in found:
            yield draw.choice(("use double quotes for every string", "use single quotes for every string"))

    def _explain_code(self) -> dict[str, Any]:
        ask = self._draw.choice((
            "What does this code do?", "Explain this function line by line.", "Describe this code in three sentences.",
            "Which errors can this code raise?", "Review this code and suggest two improvements.", "Explain this code simply.",
            "Write a test for this code.", "List the variables of this code with their meaning.",
        ))  # fmt: skip
        return self._fenced(ask, self._function()[0])

    def _write_code(self) -> dict[str, Any]:
        name, what = next(self._named)
        while not what:
            name, what = next(self._named)
        ask = self._draw.choice((
            "Write a Python function `{n}` that does this: {w}", "Implement `{n}` in Python. {w}",
            "I need a small Python function called `{n}`. Its docstring says: {w}", "Write code and an example: {n}. {w}",
        ))  # fmt: skip
        return {"prompt": ask.replace("{n}", name.split(".")[-1]).replace("{w}", what), "about": ""}

    def _of_prose(self, asks: Sequence[str], before: bool = True, few: int = 0) -> dict[str, Any]:
        source = next(self._prose)
        words = source.text.split()
        text = " ".join(words[: self._draw.randrange(few, few + 20)]) if few else source.text
        ask = self._filled(self._draw.choice(asks))
        return {"prompt": f"{ask}\n\n{text}" if before else f"{text}\n\n{ask}", "source": source.package, "about": ""}

    def _summarise(self) -> dict[str, Any]:
        return self._of_prose((
            "Summarise this text in two sentences.", "What is the main point of this text?", "Give this a title and a summary.",
            "Summarise the following in three bullet points.", "Put this into one sentence for {reader}.",
            "Quote the two most important sentences of this text and say why they matter.", "List the facts in this text.",
            "Ask {n} questions that this text answers, with the answers in its own words.",
        ), before=self._draw.random() < 0.7)  # fmt: skip

    def _rewrite(self) -> dict[str, Any]:
        return self._of_prose((
            "Rewrite this in simpler words.", "Rewrite this text for {reader}.", "Make this more polite.", "Correct this text.",
            "Turn this text into a numbered list.", "Rewrite this in the past tense.", "Make this half as long.",
            "Repeat this text word for word.", "Replace every technical word by a plainer one.",
        ), before=self._draw.random() < 0.8)  # fmt: skip

    def _continue(self) -> dict[str, Any]:
        return self._of_prose(("Continue this text.", "Write what comes next.", "Finish this paragraph."), few=20)

    def _list(self) -> dict[str, Any]:
        ask = self._draw.choice((
            "List {n} {x}.", "Give me {n} {x}, with one sentence for each.", "Name {n} {x} as a numbered list.",
            "Make a table of {n} {x} and what they are good for.", "Which {x} should {reader} know? Name {n}.",
            "Write {n} {x}, in the order of the alphabet.", "Sort {n} {x} by size or importance, and say why.",
        ))  # fmt: skip
        return {"prompt": self._filled(ask, x=self._any("lists"))}

    def _translate(self) -> dict[str, Any]:
        text = " ".join(self._draw.sample(self._known["sentences"], self._draw.choice((1, 2, 3))))
        ask = self._draw.choice(("Translate into {l}:", "How do I say this in {l}?", "Say this in {l} and in English:"))
        return {"prompt": f"{ask.replace('{l}', self._any('languages'))} {text}"}

    def _extract(self) -> dict[str, Any]:
        """Records in prose that are to be written as JSON."""
        draw = self._draw
        first = ("Amara", "Jonas", "Mei", "Rafael", "Ingrid", "Tomas", "Leila", "Oskar", "Nadia", "Pavel", "Sofia", "Henrik")
        job = ("electrician", "teacher", "baker", "pilot", "translator", "gardener", "surgeon", "clerk", "welder", "actor")
        people = [
            f"{draw.choice(first)} is {draw.randrange(19, 80)} years old, lives in {draw.choice(self._cities)} and works as "
            f"{draw.choice(job)}." for _ in range(draw.randrange(2, 6))
        ]  # fmt: skip
        ask = draw.choice((
            "Write the people in this text as a JSON list of objects with name, age, city and job.",
            "Extract name, age, city and job as JSON, one object a line.", "Turn this text into a CSV file with a header.",
            "Make a Markdown table of this text.", "Give a YAML list of these people.",
        ))  # fmt: skip
        return {"prompt": f"{ask}\n\n{' '.join(people)}"}


def _parsed(text: str) -> Code | None:
    """The tree of a function or a class. None: it cannot stand alone."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    return body[0] if len(body) == 1 and isinstance(body[0], ast.FunctionDef | ast.ClassDef) else None


def _cycle(pile: list[Any]) -> Iterator[Any]:
    while pile:
        yield from pile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    maker, tasks = Maker(given.seed), Counter[str]()
    with given.out.open("w", encoding="utf-8") as file:
        for line in maker.prompts(given.count):
            tasks[line["task"]] += 1
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(f"{given.count} prompts from {len(maker.corpus.code)} pieces of code and {len(maker.corpus.prose)} paragraphs")
    print("by task:", dict(tasks), "left out since the benchmark has the like:", dict(maker.left_out))


if __name__ == "__main__":
    main()
