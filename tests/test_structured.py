"""Structured output: masks against an acceptor that knows all texts of a grammar, answers of engines with every drafter against
plain decoding, and the distribution of sampled answers against the one that is known."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.engine.engine import Engine
from forerun.llm import LLM, LoadedModel
from forerun.models.tokenizer import Tokenizer
from forerun.structured import StructuredOutput
from forerun.types import Draft, Request, SamplingParams, SettingError
from forerun.verify import grammar
from forerun.verify.accept import accept_block, accept_ratio
from forerun.verify.grammar import Grammars, Matcher
from forerun.verify.sampling import Features, SamplingState
from tests.statistical import PASS, REJECT, chi_square
from tests.tiny import VOCAB, tiny_model

END = 2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["the", "thing", "other"]}, "maxItems": 3},
        "done": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "done"],
    "additionalProperties": False,
}


def valid(value: Any) -> bool:
    """Whether SCHEMA allows a value."""
    return (
        isinstance(value, dict) and list(value) == ["name", "age", "tags", "done"] and len(value["name"]) <= 6
        and type(value["age"]) is int and 0 <= value["age"] <= 120 and isinstance(value["done"], bool)
        and len(value["tags"]) <= 3 and set(value["tags"]) <= {"the", "thing", "other"}
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, [END])


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return LLM.load(folder)


# Masks


def some_language(rng: random.Random, depth: int = 3) -> tuple[str, set[str]]:
    """A regular expression and all texts that it matches."""
    kind = rng.choice(["text", "text", "either", "both", "many", "maybe"]) if depth else "text"
    if kind == "text":
        text = rng.choice(["t", "h", "th", "the", " the", "in", "ing", "a", "an", "é", ".", "er"])
        return re.escape(text).replace(r"\ ", " "), {text}
    left, first = some_language(rng, depth - 1)
    if kind == "maybe":
        return f"(?:{left})?", first | {""}
    if kind == "many":
        low, high = rng.choice([(0, 2), (1, 2), (2, 2), (1, 3)])
        texts = {"".join(parts) for n in range(low, high + 1) for parts in itertools.product(sorted(first)[:6], repeat=n)}
        return f"(?:{'|'.join(re.escape(t).replace(chr(92) + ' ', ' ') for t in sorted(first)[:6])}){{{low},{high}}}", texts
    right, second = some_language(rng, depth - 1)
    if kind == "either":
        return f"(?:{left}|{right})", first | second
    return left + right, {a + b for a in first for b in second}


def languages(count: int) -> Iterator[tuple[random.Random, str, set[str]]]:
    for seed in range(count):
        rng = random.Random(seed)
        pattern, texts = some_language(rng)
        if len(texts) < 400 and texts != {""}:
            yield rng, pattern, texts


def follow(grammars: Grammars, wanted: StructuredOutput, stops: tuple[int, ...] = (END,)) -> Matcher:
    return grammars.matcher(Request("a", (1,), SamplingParams(structured=wanted), 9, 0, stops))


def allowed(masks: np.ndarray) -> list[set[int]]:
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


class Acceptor:
    """Knows all texts of a language."""

    def __init__(self, texts: set[str], tokenizer: Tokenizer, stops: tuple[int, ...] = (END,)) -> None:
        self.texts, self.stops = {text.encode() for text in texts}, set(stops)
        self.bytes_of = {i: tokenizer.token_bytes(i) if i > END else b"\0\0" for i in range(VOCAB)}

    def allowed(self, ids: list[int]) -> set[int]:
        before = b"".join(self.bytes_of[i] for i in ids)
        begun = {text[: i + 1] for text in self.texts if text.startswith(before) for i in range(len(before), len(text))}
        stops = self.stops if before in self.texts else set()
        return {i for i, more in self.bytes_of.items() if i not in self.stops and before + more in begun} | stops


def fits(mask: set[int], options: set[int], acceptor: Acceptor, ids: list[int]) -> bool:
    """Whether a mask allows what may follow. Where the next bytes are certain it may be the tokenizer's own token for them."""
    if mask == options:
        return bool(mask)
    before = b"".join(acceptor.bytes_of[i] for i in ids)
    (token,) = mask
    left = [text for text in acceptor.texts if text.startswith(before)]
    return token in options and all(text.startswith(before + acceptor.bytes_of[token]) for text in left)


def test_masks_along_random_drafts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The masks are those of an acceptor that knows all texts; drafts are cut where it refuses a token; forced tokens are those
    that it leaves; a walk along a draft leaves no trace."""
    cuts = forced = walks = 0
    for rng, pattern, texts in languages(150):
        assert all(re.fullmatch(pattern, text) for text in texts)
        stops = rng.choice([(END,), (5, END), (END, 0)])
        it, acceptor, ids = follow(grammars, StructuredOutput(regex=pattern), stops), Acceptor(texts, tokenizer, stops), []
        for _ in range(12):
            likely = ids[:]
            for _ in range(rng.randint(0, 5)):
                options = acceptor.allowed(likely)
                if not options or (likely and likely[-1] in stops):
                    break
                likely.append(rng.choice(sorted(options)) if rng.random() < 0.8 else rng.randrange(VOCAB))
            draft, most, drawn = likely[len(ids) :], rng.randint(0, 6), rng.random() < 0.5
            block = it.block(draft, most, drawn)
            assert it.error is None and len(block.tokens) <= most and len(block.forced) == len(block.tokens)
            walk, given = ids[:], draft[:most]
            for place, (token, certain) in enumerate(zip(block.tokens, block.forced, strict=True)):
                options = acceptor.allowed(walk)
                assert fits(allowed(block.masks)[place], options, acceptor, walk), (pattern, walk)
                forced += certain
                if not certain:
                    assert token == given[place]
                mask = allowed(block.masks)[place]
                if token not in mask:
                    assert drawn and place == len(block.tokens) - 1 == len(block.masks) - 1
                walk.append(token)
            ended = bool(block.tokens) and (block.tokens[-1] in stops or token not in mask)
            if not ended:
                assert len(block.masks) == len(block.tokens) + 1
                assert fits(allowed(block.masks)[-1], acceptor.allowed(walk), acceptor, walk), (pattern, walk)
                if len(block.tokens) < min(len(given), most):  # cut
                    cuts += 1
                    assert given[len(block.tokens)] not in allowed(block.masks)[-1]
            again = it.block(draft, most, drawn)
            assert again.tokens == block.tokens and (again.masks == block.masks).all()
            walks += 1
            places = allowed(block.masks)
            count = rng.randint(0, len(places) - 1)  # accepted drafts, then a token of the target's own
            ids += [*block.tokens[:count], rng.choice(sorted(places[count]))]
            if set(ids) & set(stops):
                break
            it.follow(ids)
        assert it.error is None
    assert cuts > 10 and forced > 100 and walks > 300


def test_a_token_is_forced_only_where_one_text_follows(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for _, pattern, texts in languages(80):
        block = follow(grammars, StructuredOutput(regex=pattern)).block([], 20, False)
        tokens = block.tokens[:-1] if block.tokens[-1:] == [END] else block.tokens
        begin = b"".join(tokenizer.token_bytes(i) for i in tokens)
        assert all(text.encode().startswith(begin) for text in texts)
        if len(texts) == 1:
            assert begin == next(iter(texts)).encode() and block.tokens[-1] == END


WORDS = ('say "a\\b"', "naïve\n", "/x/", "~ü~", "say", "\x00\u2028", "{}|()[].*+?^$#-")


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"choice": WORDS}, list(WORDS), ["sa", "/x"]),
        ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "(((x)))"], ["(x", "x)"]),
        ({"regex": r"\d{2}-[^x]+"}, ["12-ü", "07-abc"], ["1-a", "12-x"]),
        ({"json_object": True}, ['{"a": [1, {"b": null}]}', "{}"], ["[]", '{"a" 1}', '{"a":1']),
        ({"json_schema": SCHEMA}, ['{"name": "x", "age": 3, "tags": [], "done": true}'], ['{"age": 3}', "{}"]),
        ({"json_schema": json.dumps({"const": {"é": [1, "x"]}})}, ['{"é": [1, "x"]}', '{"é":[1,"x"]}'], ['{"é": [1]}']),
        ({"json_schema": {}}, ["1", '"x"', "[true]"], ["tru", "01"]),
    ],
)
def test_texts_of_each_kind(
    grammars: Grammars, tokenizer: Tokenizer, wanted: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in (*good, *bad):
        ids = [*tokenizer.encode(text, add_special_tokens=False), END]
        block = follow(grammars, StructuredOutput(**wanted)).block(ids, 99, False)
        written = b"".join(map(tokenizer.token_bytes, block.tokens[:-1])).decode()
        assert (written == text and block.tokens[-1] == END) == (text in good), text


def test_the_two_forms_of_the_mask_agree() -> None:
    rng = np.random.default_rng(0)
    for vocab in (5, 64, 100):
        length = torch.tensor([7, 9, 4, 1])
        state = SamplingState(torch.zeros(4, 20, dtype=torch.int64), length, vocab)
        width = 3
        masks = [rng.integers(-(2**31), 2**31, (n, -(-vocab // 32)), dtype=np.int32) for n in (4, 2)]
        state.mask([0, 2], masks, width)
        slot = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 3])
        position = torch.tensor([7, 8, 9, 10, 9, 4, 5, 6, 1])
        logits = torch.from_numpy(rng.standard_normal((9, vocab)).astype(np.float32))
        on_host = state.shape(logits, slot, position, Features(grammar=True))
        state.host = False
        on_device = state.shape(logits, slot, position, Features(grammar=True))
        assert on_host.equal(on_device) and not on_host.equal(logits)
        want = logits.clone()
        for row, mask in zip((0, 1, 2, 3, 5, 6), [*masks[0], *masks[1]], strict=True):
            for token in range(vocab):
                if not mask[token // 32] >> (token % 32) & 1:
                    want[row, token] = -torch.inf
        assert want.equal(on_host)


# Engines

DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "ngram_gpu": {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "prediction": {"method": "prediction"},
    "draft_model": {"method": "draft_model"},
    "drawn": {"method": "draft_model", "draft_sample_method": "probabilistic"},
    "block": {"method": "draft_model", "draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
}
FORMS: tuple[dict[str, Any] | None, ...] = (
    {"json_schema": SCHEMA},
    None,
    {"regex": r"(the thing|in|on|a)( (the|thing|other)){2,9}\."},
    {"choice": ["the thing", "the other thing", "in an ingot"]},
    {"grammar": 'start: "[" item ("," item)* "]"\nitem: "the" | "in" | start'},
    {"json_object": True},
)


def make(
    loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, padded: bool, k: int = 4, **settings: Any
) -> LLM:
    config = DRAFTERS[drafter]
    if config is not None:
        config = config | {"num_speculative_tokens": k} | ({"model": str(folder)} if "draft_model" in config.values() else {})
    real = Engine.__init__

    def init(self: Engine, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs | {"padded": padded})

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "__init__", init)
        return LLM(loaded, speculative_config=config, **{"kv_cache_tokens": 2048, "max_num_seqs": 8} | settings)


PROMPTS = ("the thing in the thing", "on", "an other thing in the ing", "the", "in the in", "a thing")


def asked(temperature: float, drafter: str) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=temperature, max_tokens=40, seed=i, structured=form, logprobs=2 if i % 2 else None,
            repetition_penalty=1.2 if i == 2 else 1.0, n=2 if i == 3 else 1,
            prediction='{"name": "the thing' if drafter == "prediction" else None,
        )
        for i, form in enumerate(FORMS)
    ]  # fmt: skip


def answers(it: LLM, params: list[SamplingParams]) -> list[Any]:
    return [[(c.token_ids, c.text, c.finish_reason, c.error) for c in o.completions] for o in it.generate(PROMPTS, params)]


def keeps_form(form: dict[str, Any] | None, text: str, reason: str) -> bool:
    if form is None or reason == "length":
        return True
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    if "choice" in form:
        return text in form["choice"]
    if "grammar" in form:
        return isinstance(json.loads(re.sub("the|in", "1", text)), list)
    value = json.loads(text)
    return valid(value) if "json_schema" in form else isinstance(value, dict)


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_drafters_change_no_token(
    loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, drafter: str, padded: bool
) -> None:
    """Beside requests without a grammar, with few pages, so that some are preempted."""
    folder = tiny_model(tmp_path_factory.mktemp("other"), seed=0)
    plain = make(loaded, folder, monkeypatch, "none", False)
    it = make(loaded, folder, monkeypatch, drafter, padded, kv_cache_tokens=96, adaptive_drafts=False)
    for temperature in (0.0, 0.9):
        want = answers(plain, asked(temperature, ""))
        got = answers(it, asked(temperature, drafter))
        if temperature == 0 or drafter not in ("drawn", "block"):
            assert got == want
        assert got[1] == want[1] or drafter in ("drawn", "block")
        ended = 0
        for form, group in zip(FORMS, got, strict=True):
            for _, text, reason, error in group:
                assert error is None and keeps_form(form, text, reason), (form, text)
                ended += reason == "stop"
        assert ended >= 3
    assert it.stats.preemptions
    if drafter != "none":
        assert it.stats.drafts.accepted > 20


def test_the_prefix_cache_and_many_requests(loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = make(loaded, folder, monkeypatch, "ngram", False)
    params = SamplingParams(temperature=0.8, max_tokens=60, seed=3, structured={"json_schema": SCHEMA}, n=3)
    long = "the thing in the other thing " * 4
    first, again = (it.generate(long, params)[0] for _ in range(2))
    assert [c.token_ids for c in first.completions] == [c.token_ids for c in again.completions]
    assert len({c.token_ids for c in first.completions}) == 3 and it.stats.cached_tokens > 0


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_forced_tokens_take_no_step(loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch, padded: bool) -> None:
    """One text is possible: each step commits k + 1 tokens of it, though the look-up finds nothing."""
    it = make(loaded, folder, monkeypatch, "ngram", padded, k=7, adaptive_drafts=False)
    text = "QUARTZ, VEX; JUMPY?!"
    done = it.generate("one", SamplingParams(temperature=0, max_tokens=60, structured={"choice": [text]}))[0].completions[0]
    assert done.text == text and done.token_ids[-1] == END
    assert done.stats.steps <= -(-len(done.token_ids) // 8) + 2 and done.stats.accepted == done.stats.drafted


def test_the_default_policy_takes_forced_tokens(loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = make(loaded, folder, monkeypatch, "suffix", False, k=7)
    done = it.generate("one", SamplingParams(temperature=0, max_tokens=60, structured={"choice": ["QUARTZ, VEX; JUMPY?!"]}))
    assert done[0].completions[0].stats.accepted >= 10


# The distribution


TEXTS = {a + b for a in ("th", "in", "a", "on") for b in ("e", "er", "n", "")}
LIKELY = {"t": 5.0, "h": 5.0, "e": 6.0, "a": 5.0, "n": 5.0, "i": 5.0, "o": 5.0, "r": 6.0, "th": 5.0, "in": 5.0, "er": 5.0}


def exact(it: LLM, acceptor: Acceptor, prompt: list[int], bias: Mapping[int, float]) -> dict[tuple[int, ...], float]:
    """The probability of each answer under the masked target, from its log-probabilities."""
    found: dict[tuple[int, ...], float] = {}
    target, open_ = it.model.target, [((), 1.0)]
    while open_:
        ids, chance = open_.pop()
        state = it.engine.state
        state.tokens[0, : len(prompt) + len(ids)] = torch.tensor([*prompt, *ids])
        state.block_table[0] = torch.arange(1, state.block_table.shape[1] + 1)
        n = len(prompt) + len(ids)
        with torch.inference_mode():
            batch = state.batch(np.array([0]), np.array([0]), np.array([n]), np.array([n - 1]))
            logits = target.forward(batch, it.engine.kv).logits[0].double()
        logits = logits.index_add(0, torch.tensor(list(bias)), torch.tensor(list(bias.values())).double())
        options = sorted(acceptor.allowed(list(ids)))
        for token, p in zip(options, logits[options].softmax(0).tolist(), strict=True):
            answer = (*ids, token)
            if token == END:
                found[answer] = found.get(answer, 0.0) + chance * p
            else:
                open_.append((answer, chance * p))
    return found


FORM = {"regex": "(t|h|in|a)([einaot]z|xy)[a-e]{9}"}  # behind x, y is forced


def blocks(grammars: Grammars, drawn: bool) -> Callable[[tuple[int, ...]], grammar.Block]:
    it = follow(grammars, StructuredOutput(**FORM))
    return functools.cache(lambda draft: it.block(draft, len(draft), drawn))


def outcomes(grammars: Grammars, tokenizer: Tokenizer, rule: Any, drawn: bool, count: int = 20_000) -> float:
    """The p-value of the first three tokens, over blocks of three drawn drafts, each completed by the masked target alone.
    drawn: False: refused tokens are left out, as if they were point masses."""
    rng, torch_rng = np.random.default_rng(3), torch.Generator().manual_seed(3)
    p, q = (rng.dirichlet(np.full(VOCAB, 0.02), 3) for _ in range(2))
    useful = [tokenizer.encode(t)[0] for t in ("t", "h", "in", "a", "e", "x", "z", "y", "b")]
    for one, seed in ((p, 1), (q, 2)):
        one *= 0.3
        one[:, useful] += 0.7 * np.random.default_rng(seed).dirichlet(np.full(len(useful), 0.5), 3)
    walk, masked = blocks(grammars, drawn), blocks(grammars, False)

    def target(place: int, mask: set[int]) -> np.ndarray:
        only = np.zeros(VOCAB)
        only[list(mask)] = p[place][list(mask)]
        return only / only.sum()

    @functools.cache
    def after(prefix: tuple[int, ...]) -> np.ndarray:
        return target(len(prefix), allowed(masked(prefix).masks)[len(prefix)])

    drafts = np.stack([rng.choice(VOCAB, count, p=q[i]) for i in range(3)], 1)
    tokens, size = np.zeros((count, 3), np.int64), np.zeros(count, np.int64)
    at_target, at_draft = np.zeros((count, 4, VOCAB)), np.zeros((count, 3, VOCAB), np.float32)
    at_target[:, :, 0] = 1
    for row, draft in enumerate(map(tuple, drafts.tolist())):
        block = walk(draft)
        size[row] = len(block.tokens)
        tokens[row, : size[row]] = block.tokens
        for i, mask in enumerate(allowed(block.masks)[:3]):
            at_target[row, i] = target(i, mask)
        for i, certain in enumerate(block.forced):
            at_draft[row, i] = np.eye(VOCAB)[block.tokens[i]] if certain else q[i]
    u_accept, u_redraw = (torch.rand(count, n, generator=torch_rng, dtype=torch.float64) for n in (3, 4))
    given = Draft(torch.from_numpy(tokens), torch.from_numpy(size), torch.from_numpy(at_draft))
    verdict = rule(torch.from_numpy(at_target), given, u_accept, u_redraw)
    found: dict[tuple[int, ...], int] = {}
    for row, n in zip(verdict.tokens.tolist(), verdict.count.tolist(), strict=True):
        ids = tuple(row[: min(n, 3)])
        while len(ids) < 3:
            ids = (*ids, int(rng.choice(VOCAB, p=after(ids))))
        found[ids] = found.get(ids, 0) + 1
    want = {(): 1.0}
    for _ in range(3):
        want = {(*ids, t): chance * after(ids)[t] for ids, chance in want.items() for t in np.flatnonzero(after(ids)).tolist()}
    assert set(found) <= set(want)
    return chi_square(np.array([found.get(key, 0) for key in want]), np.array(list(want.values())))


@pytest.mark.parametrize("rule", [accept_ratio, accept_block])
def test_drawn_drafts_under_a_grammar_are_lossless(grammars: Grammars, tokenizer: Tokenizer, rule: Any) -> None:
    assert outcomes(grammars, tokenizer, rule, True) > PASS
    assert outcomes(grammars, tokenizer, rule, False) < REJECT


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("drafter", ["ngram", "drawn", "block"])
def test_sampled_answers_of_an_engine_have_the_masked_targets_distribution(
    loaded: LoadedModel, folder: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, drafter: str,
    padded: bool,
) -> None:  # fmt: skip
    other = tiny_model(tmp_path, seed=5)
    it = make(loaded, other, monkeypatch, drafter, padded, k=3, adaptive_drafts=False, max_num_seqs=32)
    prompt, bias = tokenizer.encode("on the thing"), {tokenizer.encode(text)[0]: value for text, value in LIKELY.items()}
    want = exact(make(loaded, folder, monkeypatch, "none", False), Acceptor(TEXTS, tokenizer), prompt, bias)
    keys = sorted(want)
    form = {"regex": "|".join(sorted(TEXTS))}

    def p_value(n: int) -> float:
        params = SamplingParams(temperature=1.0, max_tokens=9, n=n, seed=2, structured=form, logit_bias=bias)
        found = [one.token_ids for one in it.generate([prompt], params)[0].completions]
        return chi_square(np.array([found.count(key) for key in keys]), np.array([want[key] for key in keys]))

    assert p_value(600) > PASS
    assert it.stats.drafts.accepted > 100


# Errors

BAD = (
    ({"regex": "(["}, "regex"),
    ({"regex": r"(a)\1"}, "regex"),
    ({"grammar": "start: missing"}, "grammar"),
    ({"grammar": "no grammar at all"}, "grammar"),
    ({"json_schema": {"type": "strange"}}, "json_schema"),
    ({"json_schema": {"type": "string", "unevaluatedThings": 1, "not": {"const": "a"}, "$ref": "#/nowhere"}}, "json_schema"),
    ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "json_schema"),
)


@pytest.mark.parametrize(("form", "name"), BAD)
def test_a_bad_grammar_is_refused_before_the_request_runs(loaded: LoadedModel, form: dict[str, Any], name: str) -> None:
    it = LLM(loaded, kv_cache_tokens=512)
    for _ in range(2):
        with pytest.raises(SettingError) as error:
            it.generate("the", SamplingParams(structured=form))
        said = str(error.value)
        assert error.value.name == name and "docs/structured.md" in said and len(said) < 600 and "\n" not in said, said
    assert not it.engine.has_work
    assert it.generate("the", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids


def test_a_request_that_no_token_can_end_is_refused(loaded: LoadedModel) -> None:
    it = LLM(loaded, kv_cache_tokens=512)
    with pytest.raises(SettingError, match="ignore_eos=True: with a structured output a stop token must end the answer"):
        it.generate("the", SamplingParams(structured={"choice": ["a"]}, ignore_eos=True))
    done = it.generate("the", SamplingParams(structured={"choice": ["a"]}, ignore_eos=True, stop_token_ids=(9,), max_tokens=4))
    assert done[0].text == "a" and done[0].token_ids[-1] == 9


@pytest.mark.parametrize("more", [{"logit_bias": {67: -100, 68: -100}}, {"min_tokens": 3}, {"bad_words": ("a", "b")}])
def test_where_no_token_is_left_the_request_fails_alone(loaded: LoadedModel, more: dict[str, Any]) -> None:
    it = LLM(loaded, kv_cache_tokens=512)
    bound = SamplingParams(structured={"choice": ["a", "b"]}, max_tokens=4, **more)
    other = SamplingParams(temperature=0, max_tokens=6)
    failed, fine = it.generate(["the", "thing"], [bound, other])
    assert failed.completions[0].finish_reason == "error" and "the grammar allows no token" in str(failed.completions[0].error)
    assert fine.token_ids == it.generate("thing", other)[0].token_ids


def test_one_grammar_is_compiled_once(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    it = LLM(loaded, kv_cache_tokens=512)
    made: list[str] = []
    real = Grammars._source
    monkeypatch.setattr(Grammars, "_source", lambda self, wanted: made.append(wanted.kind) or real(self, wanted))
    for form in ({"choice": ["a", "b"]}, {"regex": "a|b"}, {"choice": ["a", "b"]}):
        it.generate(["the", "in"], SamplingParams(structured=form, max_tokens=3, n=2))
    assert made == ["choice", "regex"]


# The default model

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_the_default_model_fills_in_a_schema() -> None:
    """With a look-up, a head and none: the same text, which is JSON of the schema. Forced tokens save steps."""
    loaded = LLM.load()
    asked = [{"role": "user", "content": "Invent a person. Answer in JSON with name, age and skills."}]
    found = []
    for method in (None, "ngram", "eagle3"):
        it = LLM(loaded, speculative_config=method, kv_cache_tokens=1024, adaptive_drafts=False)
        params = [SamplingParams(temperature=t, seed=1, max_tokens=80, structured={"json_schema": PERSON}) for t in (0.0, 0.7)]
        found.append([one.completions[0] for one in it.chat([asked, asked], params)])
    for answers_ in zip(*found, strict=True):
        assert len({one.token_ids for one in answers_}) == 1
        person = json.loads(answers_[0].text)
        assert list(person) == ["name", "age", "skills"] and 0 <= person["age"] <= 120 and 1 <= len(person["skills"]) <= 3
        assert all(one.stats.steps < answers_[0].stats.steps for one in answers_[1:])
