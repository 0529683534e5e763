"""Every public parameter and setting, given values of each type and range: it is converted, or refused with a SettingError that
names the setting and a value that works. A new setting or parameter without its values here fails the tests.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from forerun import cli
from forerun.bench.command import plan_of, subject_of
from forerun.bench.options import Options
from forerun.checks import LARGEST
from forerun.cli import bench, generate
from forerun.config import EngineConfig, Speculation
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.engine import Engine
from forerun.llm import LLM, LoadedModel
from forerun.models.tokenizer import Detokenizer
from forerun.options import option_of
from forerun.structured import StructuredOutput
from forerun.types import Request, SamplingParams, SettingError
from tests.tiny import VOCAB, tiny_model

NAN, INF = math.nan, math.inf
SURROGATE = "half a pair: \ud800"


class Values(NamedTuple):
    """Of one setting. works: a value that every refusal names, as the message writes it, and that is accepted. refused: values.
    converted: pairs of a value and what it becomes. beside: other settings that go with it."""

    works: Any
    refused: Sequence[Any]
    converted: Sequence[tuple[Any, Any]] = ()
    beside: Mapping[str, Any] = MappingProxyType({})


NOT_WHOLE = (
    True, np.True_, torch.tensor(True), 2.5, np.float32(2.5), torch.tensor(2.5), "4", b"4", [4], (4,), {4}, {4: 4}, NAN, INF,
    -INF, 1j, object(), np.array([4]), np.array(["4"]), torch.tensor([4, 5]), Decimal(4), 10**5000, -(10**5000), 1e300,
)  # fmt: skip
HUGE = (2**31, 2**63, -(2**63) - 1, 2**64, 1e18, np.uint64(2**63))
NOT_NUMBER = (
    True, np.False_, torch.tensor(True), "0.5", b"0.5", [0.5], {}, NAN, INF, -INF, 1j, object(), np.float32("nan"),
    torch.tensor(float("inf")), Decimal("NaN"), Decimal("sNaN"), np.array([0.5]), torch.tensor([0.5]), 10**400, 10**5000,
)  # fmt: skip
NOT_FLAG = ("yes", "False", "", b"1", 2, -1, 0.5, NAN, [], [True], {}, object(), np.array([True]), np.int64(3), 1j)
NOT_TEXT = (5, 2.5, True, b"x", ["x"], {"x": 1}, object(), NAN, SURROGATE, np.array(["x"]))
NOT_TEXTS = (5, True, b"x", {"x": 1}, [""], "", [5], [None], ["x", b"y"], object(), NAN, SURROGATE, ["x", SURROGATE])
NOT_IDS = (
    5, True, "5", b"5", {5: 1}, [2.5], [True], ["5"], [None], [-1], [2**63], [NAN], [[5]], object(), np.array([1.5]),
    np.array(5), torch.tensor([[5]]), [10**5000],
)  # fmt: skip
NOT_SEQUENCES = (5, "5", [5], [[]], [["5"]], [[2.5]], [[True]], [[-1]], [[2**63]], [None], {5: [6]}, [{5: 6}], [{5}], [[5], 6])


def wholes(works: int, low: int, high: int, *more: Any, none: Any = None) -> Values:
    """Of a setting that takes whole numbers from low to high. none: what None becomes."""
    refused = [*NOT_WHOLE, *(v for v in HUGE if not low <= int(v) <= high), low - 1, high + 1, *more]
    converted = [
        (low, low), (high, high), (float(works), works), (np.int64(works), works), (np.int16(works), works),
        (np.float64(works), works), (np.array(works), works), (torch.tensor(works), works), (torch.tensor(float(works)), works),
        (None, none),
    ]  # fmt: skip
    return Values(works, refused, converted)


def numbers(works: float, low: float, high: float, *more: Any, none: Any = None) -> Values:
    """The same for other numbers."""
    converted = [
        (high, high), (int(high), high), (np.float64(works), works), (np.array(works), works), (np.float32(0.5), 0.5),
        (torch.tensor(0.5), 0.5), (Fraction(1, 2), 0.5), (Decimal("0.5"), 0.5), (np.int8(1), 1.0), (None, none),
    ]  # fmt: skip
    refused = [*NOT_NUMBER, np.nextafter(high, INF), low - 1, np.nextafter(low, -INF), *more]
    return Values(works, refused, converted)


def flags(default: bool) -> Values:
    pairs = [(False, False), (0, False), (1, True), (np.True_, True), (np.array(False), False), (torch.tensor(True), True)]
    return Values(True, NOT_FLAG, [*pairs, (None, default)])


class Walked:
    """It can be walked through, any number of times, and nothing else."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __iter__(self) -> Any:
        return iter(self.values)


def texts(works: str) -> Values:
    pairs = [("x", ("x",)), (["x", "y"], ("x", "y")), (Walked(["x"]), ("x",)), (np.array(["x", "y"]), ("x", "y"))]
    return Values(works, NOT_TEXTS, [*pairs, (None, ()), ([], ()), (np.str_("x"), ("x",))])


def ids(works: str, *more: Any) -> Values:
    pairs = [
        ([5, 6], (5, 6)), ([5.0], (5,)), (np.array([5, 6]), (5, 6)), (torch.tensor([5, 6]), (5, 6)), ([np.int64(5)], (5,)),
        ([torch.tensor(5)], (5,)), (Walked([5]), (5,)), ([], ()), (np.array([5.0]), (5,)), (range(2), (0, 1)),
    ]  # fmt: skip
    return Values(works, (*NOT_IDS, *more), pairs)


SEQUENCES = Values(
    "[[5, 6], [7]]", NOT_SEQUENCES,
    [([[5]], ((5,),)), ([[5.0], (6, 7)], ((5,), (6, 7))), (np.array([[5, 6], [7, 8]]), ((5, 6), (7, 8)))],
)  # fmt: skip
SEED = Values(
    0,
    [v for v in NOT_WHOLE if not isinstance(v, int | float) or isinstance(v, bool) or v in (2.5, INF, -INF) or v != v],
    [
        (-1, -1), (2**63, 2**63), (2**64 - 1, 2**64 - 1), (-(2**63), -(2**63)), (2**64, 0), (2**70 + 5, 5), (7.0, 7),
        (np.int64(7), 7), (torch.tensor(7), 7), (10**5000, 10**5000 % 2**64),
    ],
)  # fmt: skip

TEMPERATURE = numbers(0.7, 0.0, 100.0, none=1.0)

PARAMS = {
    "n": wholes(4, 1, 1024, none=1),
    "temperature": TEMPERATURE._replace(
        converted=[*TEMPERATURE.converted, (1e-46, 0.0), (1e-6, 0.0), (5e-324, 0.0), (1e-5, 1e-5), (-0.0, 0.0)]
    ),
    "top_k": wholes(50, -1, LARGEST, none=0),
    "top_p": numbers(0.9, 0.0, 1.0, 0, 0.0, -0.0, none=1.0),
    "min_p": numbers(0.05, 0.0, 1.0, none=0.0),
    "repetition_penalty": numbers(1.1, 0.01, 100.0, 0, 1e-38, 1e-3, none=1.0),
    "presence_penalty": numbers(0.5, -2.0, 2.0, none=0.0),
    "frequency_penalty": numbers(0.5, -2.0, 2.0, none=0.0),
    "logit_bias": Values(
        "{50: -100.0}",
        [5, "x", [5], [(5, 1.0)], {5}, True, {5: "1"}, {5: None}, {5: NAN}, {5: INF}, {5: 200}, {5: -100.5}, {5: True},
         {5: [1]}, {"x": 1}, {"-5": 1}, {"5.0": 1}, {"": 1}, {"٣": 1}, {b"5": 1}, {None: 1}, {-1: 1}, {2.5: 1}, {2**63: 1},
         {(5,): 1}, {True: 1}, {5: 1, "5": 2}, {"9" * 5000: 1}, {5: 10**400}],
        [({5: 1}, {5: 1.0}), ({"5": 1}, {5: 1.0}), ({np.int64(5): np.float32(0.5)}, {5: 0.5}), ({5.0: -100}, {5: -100.0}),
         ({torch.tensor(5): torch.tensor(0.5)}, {5: 0.5}), (None, None), ({}, {})],
    ),
    "bad_words": texts("maybe"),
    "banned_token_ids": SEQUENCES._replace(converted=[*SEQUENCES.converted, (None, ()), ([], ())]),
    "max_tokens": wholes(256, 1, LARGEST),
    "min_tokens": wholes(1, 0, LARGEST, none=0)._replace(beside={"max_tokens": None}),
    "stop": texts("END"),
    "stop_token_ids": ids("[2]")._replace(converted=[*ids("[2]").converted, (None, ()), ({5}, (5,))]),
    "ignore_eos": flags(False),
    "include_stop_str_in_output": flags(False),
    "logprobs": wholes(5, 0, 100),
    "seed": SEED._replace(converted=[*SEED.converted, (None, None)]),
    "prediction": Values(
        "the text that is expected", NOT_TEXT, [("", ""), (np.str_("x"), "x"), (None, None)]
    ),
    "detokenize": flags(True),
    "cache_salt": Values("client-1", NOT_TEXT, [("", None), ("a", "a"), (np.str_("x"), "x"), (None, None)]),
    "priority": wholes(0, -LARGEST, LARGEST, none=0),
    "num_speculative_tokens": wholes(2, 0, LARGEST),
    "drafters": texts("ngram"),
    "structured": Values(
        "{'choice': ['yes', 'no']}",
        [5, True, "x", "", b"x", [], ["choice"], {}, {"words": ["x"]}, {5: 1}, {"regex": "a", "choice": ["a"]}, object(), NAN,
         {"regex": None}, {"json_object": False}, {"choice": []}],
        [({"choice": "x"}, StructuredOutput(choice=("x",))), ({"regex": "a"}, StructuredOutput(regex="a")), (None, None)],
    ),
}  # fmt: skip

SPECULATION = {
    "method": Values(
        "ngram",
        [None, 5, True, "", "NGRAM", "medusa", b"ngram", ["ngram"], object(), SURROGATE,
         np.array(["ngram", "suffix"])],
        [(np.str_("ngram"), "ngram")],
    ),
    "num_speculative_tokens": wholes(4, 1, 64)._replace(converted=wholes(4, 1, 64).converted[:-1]),
    "prompt_lookup_min": wholes(1, 1, 64, none=5),
    "prompt_lookup_max": wholes(5, 1, 64, none=5)._replace(converted=[(64, 64), (1, 1), (np.int8(3), 3), (3.0, 3), (None, 5)]),
    "suffix_decoding_max_tree_depth": wholes(24, 2, 1024, none=24)._replace(beside={"method": "suffix"}),
    "suffix_decoding_max_cached_requests": wholes(10000, 0, LARGEST, none=10000)._replace(beside={"method": "suffix"}),
    "suffix_decoding_max_spec_factor": numbers(1.0, 0, 100.0, 0, none=1.0)._replace(beside={"method": "suffix"}),
    "suffix_decoding_min_token_prob": numbers(0.1, 0, 1.0, none=0.1)._replace(beside={"method": "suffix"}),
    "model": Values(
        "smollm2-135m-instruct", [*NOT_TEXT, ""], [("x", "x"), (Path("a/b"), "a/b")], {"method": "draft_model"},
    ),
    "max_model_len": wholes(2048, 2, LARGEST)._replace(beside={"method": "draft_model", "model": "x"}),
    "draft_sample_method": Values(
        "greedy", [5, True, "", "Greedy", b"greedy", ["greedy"], object()],
        [("probabilistic", "probabilistic"), (None, "greedy")],
        {"method": "draft_model", "model": "x"},
    ),
    "rejection_sample_method": Values(
        "standard", [5, True, "", "typical", b"block", ["block"], object()], [("block", "block"), (None, "standard")],
    ),
    "num_speculative_tokens_per_batch_size": Values(
        "[[1, 8, 1], [9, 64, 0]]",
        [5, "x", True, {}, {1: 2}, [], [5], [[1, 8]], [[1, 8, 1, 1]], [[1, 8, "1"]], [[1, 8, 1.5]], [[1, 8, True]],
         [[1, 8, None]], [[0, 8, 1]], [[8, 1, 1]], [[1, 8, -1]], [[-1, 8, 1]], [[1, 8, NAN]], [[1, INF, 1]], [[1, 2**63, 1]],
         [[1, 8, 2**63]], [[1, 8, 1], [8, 16, 0]], [[1, 8, 1], [1, 8, 1]], [[9, 64, 0], [1, 9, 1]], [[1, 100, 1], [5, 6, 0]],
         "[[1, 8, 1]]", [None]],
        [([[9, 64, 0], [1, 8, 1]], ((1, 8, 1), (9, 64, 0))), (np.array([[1, 8, 1]]), ((1, 8, 1),)),
         ([[1.0, 8, 4]], ((1, 8, 4),)), (None, None)],
    ),
}  # fmt: skip

ENGINE = {
    "dtype": Values(
        "auto", [5, True, "", "int8", "float", b"float32", ["float32"], torch.int8, object()],
        [(torch.float32, "float32"), ("bfloat16", "bfloat16"), (None, "auto"), (np.str_("float16"), "float16")],
    ),
    "quantization": Values(
        "auto", [5, True, "", "int3", "Q8_0", 8, b"int8", ["int8"], torch.int32, object()],
        [("int8", "int8"), (torch.int8, "int8"), ("int4", "int4"), (None, "auto"), (np.str_("int8"), "int8")],
    ),
    "device": Values(
        "auto", [5, True, "", "gpu", "tpu", "cuda:7", b"cpu", ["cpu"], object(), torch.device("cuda:1")],
        [(torch.device("cpu"), "cpu"), ("cuda", "cuda"), (None, "auto")],
    ),
    "max_model_len": wholes(2048, 2, LARGEST),
    "max_num_seqs": wholes(32, 1, 1024, 4096, none=32),
    "max_num_batched_tokens": wholes(2048, 1, LARGEST)._replace(
        converted=[*wholes(2048, 32, LARGEST).converted], beside={"max_num_seqs": 32}
    ),
    "block_size": Values(
        "16", [*NOT_WHOLE, *HUGE, 0, 4, 12, 256, -16], [(8, 8), (128, 128), (16.0, 16), (np.int8(16), 16), (None, 16)],
    ),
    "kv_cache_tokens": wholes(8192, 16, 2**40)._replace(refused=[*NOT_WHOLE, 0, -5, 8, 15, 2**40 + 1, 2**63]),
    "enable_prefix_caching": flags(True),
    "seed": SEED._replace(converted=[*SEED.converted, (None, 0)]),
    "adaptive_drafts": flags(True),
    "gpu_memory_utilization": numbers(0.9, 0.0, 1.0, 0, none=0.9),
    "speculation": Values(
        "ngram",
        [5, True, [], [1], "", "medusa", "{", "5", "[]", '"ngram"', "null", "true", "{}",
         {}, {"method": "medusa"}, b"ngram", object(), {1: 2}, "[" * 100_000, '{"method": "ngram",}', SURROGATE],
        [("none", None), (None, None), ("ngram", Speculation("ngram", 4)), ({"method": "ngram"}, Speculation("ngram", 4)),
         (' {"method": "ngram", "num_speculative_tokens": 2.0}', Speculation("ngram", 2)),
         ("suffix", Speculation("suffix", 24))],
    ),
}  # fmt: skip

REQUEST = {
    "id": Values("request-1", [None, *NOT_TEXT, ""], [("x", "x"), (np.str_("x"), "x")]),
    "prompt_ids": ids("[1, 2, 3]", None, {5}, frozenset([5]), SURROGATE),
    "params": Values(
        "SamplingParams(max_tokens=64)", [None, 5, "x", {}, {"temperature": 0}, SamplingParams, [SamplingParams()]]
    ),
    "max_tokens": wholes(256, 0, LARGEST, None)._replace(converted=wholes(256, 0, LARGEST).converted[:-1]),
    "seed": SEED._replace(refused=[*SEED.refused, None]),
    "stop_ids": ids("[2]")._replace(converted=[*ids("[2]").converted, (None, ())]),
    "banned": SEQUENCES._replace(converted=[*SEQUENCES.converted, (None, ())]),
    "prediction": ids("[1, 2, 3]", {5})._replace(converted=[*ids("[1, 2, 3]").converted, (None, ())]),
}


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**given)


def parsed(**given: Any) -> Speculation:
    """As users give it, from a mapping."""
    found = Speculation.parse({"method": "ngram", **given})
    assert found is not None
    return found


def speculation(**given: Any) -> Speculation:
    return Speculation(**{"method": "ngram", "num_speculative_tokens": 4, **given})


def config(**given: Any) -> EngineConfig:
    return EngineConfig(**given)


def form(**given: Any) -> StructuredOutput:
    return StructuredOutput(**given)


def request(**given: Any) -> Request:
    return Request(**{"id": "a", "prompt_ids": (5,), "params": SamplingParams(), "max_tokens": 4, "seed": 0, **given})


STRUCTURED = {
    "json_object": Values(True, [v for v in NOT_FLAG if v]),
    "json_schema": Values(
        "{'type': 'object', 'properties': {'age': {'type': 'integer'}}}",
        [5, True, False, "true", "x", "{", "[]", b"{}", [], object(), NAN, {"a": object()}, {"a": NAN}, {"a": SURROGATE},
         "[" * 100_000, {"a": {1, 2}}, '{"a": NaN}'],
        [({"type": "object"}, '{"type": "object"}'), ('{"b":1,  "a":2}', '{"b": 1, "a": 2}'), ({}, "{}"), ("{}", "{}")],
    ),
    "regex": Values("yes|no", [*NOT_TEXT, ""], [("a", "a"), (np.str_("a"), "a")]),
    "grammar": Values('start: "yes" | "no"', [*NOT_TEXT, ""], [("a", "a")]),
    "choice": texts("yes")._replace(converted=texts("yes").converted[:-3]),
}  # fmt: skip


TABLES: list[tuple[Callable[..., Any], type, dict[str, Values]]] = [
    (params, SamplingParams, PARAMS),
    (speculation, Speculation, SPECULATION),
    (config, EngineConfig, ENGINE),
    (request, Request, REQUEST),
    (form, StructuredOutput, STRUCTURED),
]
EVERY = [pytest.param(build, name, v, id=f"{build.__name__}.{name}") for build, _, table in TABLES for name, v in table.items()]


def refusal(call: Callable[[], object], name: str, works: Any) -> None:
    """The call raises a SettingError that names the setting and a value that works."""
    with pytest.raises(SettingError) as error:
        call()
    said = str(error.value)
    assert error.value.name == name and said.startswith(f"{name}=") and str(works) in said, said
    assert len(said) < 1000 and "\n" not in said
    said.encode()  # it can be printed


def meant(works: Any) -> Any:
    """The value that a message wrote."""
    return eval(works) if isinstance(works, str) and (works[0] in "[{S" or works.isdigit()) else works


def same(value: Any, expected: Any) -> bool:
    """Equal, and of exactly the same types within."""
    if isinstance(expected, tuple):
        return type(value) is tuple and len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(expected, dict):
        return same(tuple(value.items()), tuple(expected.items()))
    return type(value) is type(expected) and value == expected


def test_the_tables_are_whole() -> None:
    for _, owner, table in TABLES:
        assert set(table) == {field.name for field in dataclasses.fields(owner)}
    assert sum(len(v.refused) for _, _, table in TABLES for v in table.values()) >= 500
    assert all(v.refused for _, _, table in TABLES for v in table.values())


@pytest.mark.parametrize("build,name,values", EVERY)
def test_what_cannot_be_used_is_refused_with_a_value_that_works(build: Callable[..., Any], name: str, values: Values) -> None:
    for bad in values.refused:
        said = culprit(bad) if name == "speculation" else name
        refusal(lambda bad=bad: build(**values.beside, **{name: bad}), said, values.works)  # type: ignore[misc]
    build(**values.beside, **{name: meant(values.works)})


def culprit(bad: object) -> str:
    """What an error about a whole speculative configuration names."""
    if isinstance(bad, dict):
        return "1" if 1 in bad else "method"
    return "method" if bad == "{}" else "speculative_config"


@pytest.mark.parametrize("build,name,values", EVERY)
def test_what_can_be_converted_is(build: Callable[..., Any], name: str, values: Values) -> None:
    for given, expected in values.converted:
        got = getattr(build(**values.beside, **{name: given}), name)
        assert same(got, expected), (given, got)


@pytest.mark.parametrize("name", SPECULATION)
def test_a_mapping_and_its_json_are_checked_alike(name: str) -> None:
    values = SPECULATION[name]
    for bad in values.refused:
        if bad is not None or name == "method":
            refusal(lambda bad=bad: parsed(**{**values.beside, name: bad}), name, values.works)
        try:
            text = json.dumps({"method": "ngram", **values.beside, name: bad})
        except (TypeError, ValueError):
            continue
        if bad is not None and not isinstance(bad, tuple):
            refusal(lambda text=text: Speculation.parse(text), name, values.works)


# --- what the Python door is called with --------------------------------------------------------------------------------

NOT_PARAMS = (5, "x", {}, {"temperature": 0}, SamplingParams, object(), True, 0)
NOT_PROMPT = (
    None, 5, 2.5, True, b"text", {"a": 1}, {1, 2}, object(), [None], [2.5], [True], ["a", "b"], [-1], [2**63], [NAN], [[5]],
    np.array([1.5, 2]), np.array(5), torch.tensor([[5]]), [10**5000], SURROGATE,
)  # fmt: skip
NO_TOKENS = ("", [], (), np.array([], dtype=np.int64))
NOT_PROMPTS = (
    None, 5, 2.5, True, b"text", {"a": 1}, {"a", "b"}, object(), [None], [b"x"], [[5], [2.5]], [[True]], [["a"]], [[-1]],
    [[2**63]], [NAN], [5, "a"], ["a", 5], [5, [5]], np.array([1.5, 2]), np.array(5), torch.tensor([[1.5]]), [{5, 6}],
    [{"a": 1}], SURROGATE, ["a", SURROGATE],
)  # fmt: skip
USER = {"role": "user", "content": "hello"}
NOT_MESSAGES = (
    None, 5, True, "hello", b"hello", USER, [], [5], ["hello"], [None], [{"content": "x"}], [{"role": 5, "content": "x"}],
    [USER, 5], [[USER]], {1, 2}, object(),
)  # fmt: skip
NOT_CONVERSATIONS = (
    None, 5, True, "hello", b"hello", USER, {1, 2}, object(), [5], ["hello"], [None], [[]], [[5]], [[USER], []], [[USER], [{}]],
    [{"content": "x"}], [USER, 5],
)  # fmt: skip
NOT_MODEL = (5, 2.5, True, b"x", "", [], {}, object(), SURROGATE)
TEXT, EXAMPLE = "Once upon a time", "SamplingParams(max_tokens=64)"
MESSAGE = "[{'role': 'user', 'content': 'Hello'}]"

# method -> parameter -> what is refused, and what a message about it must hold
TEMPLATE: dict[str, tuple[Sequence[Any], str]] = {
    "tools": ((5, "x", True, {}, [5], ["x"], [None], b"x", object()), "[{'type': 'function', 'function': {'name': 'time'}}]"),
    "add_generation_prompt": (NOT_FLAG, "give True or False"),
    "continue_final_message": (NOT_FLAG, "give True or False"),
    "chat_template_kwargs": ((5, "x", True, [], [5], {5: 1}, {b"x": 1}, object()), "{'enable_thinking': False}"),
}
CALLS: dict[str, dict[str, tuple[Sequence[Any], str]]] = {
    "generate": {
        "prompts": (NOT_PROMPTS, TEXT),
        "params": (
            (*NOT_PARAMS, [], [None], [SamplingParams()] * 2, [{}], [SamplingParams(), 5]), "SamplingParams"
        ),
        "progress": ((5, "x", True, [print]), "print"),
    },
    "chat": {
        "conversations": (NOT_CONVERSATIONS, MESSAGE),
        "params": ((*NOT_PARAMS, [], [None]), "SamplingParams"),
        "progress": ((5, "x", True), "print"),
        **TEMPLATE,
    },
    "chat_ids": {"messages": (NOT_MESSAGES, MESSAGE), **TEMPLATE},
    "stream": {"prompt": (NOT_PROMPT, TEXT), "params": ((*NOT_PARAMS, [SamplingParams()]), EXAMPLE)},
    "prepare": {"prompt": (NOT_PROMPT, TEXT), "params": ((None, *NOT_PARAMS, [SamplingParams()]), EXAMPLE)},
    "load": {
        "model": (NOT_MODEL, "smollm2-135m-instruct"),
        "dtype": (ENGINE["dtype"].refused, "auto"),
        "device": (ENGINE["device"].refused, "auto"),
        "quantization": (ENGINE["quantization"].refused, "auto"),
    },
}  # fmt: skip
GOOD = {"prompts": "the", "prompt": "the", "conversations": [USER], "messages": [USER], "params": SamplingParams()}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LLM.load(tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(loaded: LoadedModel) -> LLM:
    return LLM(loaded, kv_cache_tokens=2048, max_model_len=64)


def idle(it: LLM) -> bool:
    pages = it.engine.scheduler.pages
    return not it.engine.has_work and pages.free == pages.count


def parameters(method: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(method).parameters) - {"self"}


def test_the_tables_hold_every_parameter() -> None:
    methods = {name: getattr(LLM, name) for name, is_ in vars(LLM).items() if name[0] != "_" and not isinstance(is_, property)}
    taking = {name: parameters(method) for name, method in methods.items() if parameters(method)}
    assert taking == {name: set(by) for name, by in CALLS.items()}
    assert parameters(LLM.__init__) == {"model", "speculative_config"} | set(ENGINE) - {"speculation"}


@pytest.mark.parametrize("method,name", [(method, name) for method, by in CALLS.items() for name in by])
def test_a_call_refuses_before_anything_runs(llm: LLM, method: str, name: str) -> None:
    refused, works = CALLS[method][name]
    needed = {key: GOOD[key] for key in parameters(getattr(LLM, method)) if key in GOOD}
    for bad in refused:

        def call(bad: Any = bad) -> object:
            made = getattr(llm, method)(**{**needed, name: bad})
            return list(made) if isinstance(made, Iterator) else made

        refusal(call, name, works)
        assert idle(llm)


@pytest.mark.parametrize("name", sorted(parameters(LLM.__init__)))
def test_an_engine_is_not_started_with_what_cannot_be_used(loaded: LoadedModel, name: str) -> None:
    if name == "model":
        for bad in NOT_MODEL:
            refusal(lambda bad=bad: LLM(bad), "model", "smollm2-135m-instruct")  # type: ignore[misc]
        return
    values = ENGINE["speculation" if name == "speculative_config" else name]
    for bad in values.refused[:8]:
        said = culprit(bad) if name == "speculative_config" else name
        refusal(lambda bad=bad: LLM(loaded, **{name: bad}), said, values.works)  # type: ignore[misc]


@pytest.mark.parametrize("bad", NO_TOKENS, ids=repr)
def test_a_prompt_without_tokens_is_refused(llm: LLM, bad: Any) -> None:
    for call in (lambda: llm.generate([bad]), lambda: list(llm.stream(bad)), lambda: llm.prepare(bad, SamplingParams())):
        refusal(call, "prompt", TEXT)
    assert llm.generate([]) == [] and llm.chat([]) == []


@pytest.mark.parametrize(
    "given",
    [[5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), 6.0], [torch.tensor(5), 6], range(5, 7)],
    ids=repr,
)
def test_token_ids_of_any_kind_make_a_prompt(llm: LLM, given: Any) -> None:
    few = SamplingParams(temperature=0, max_tokens=2)
    assert [o.prompt_ids for o in llm.generate(given, few)] == [(5, 6)]
    assert llm.generate([given, "the"], few)[0].prompt_ids == (5, 6)
    assert llm.prepare(given, few).prompt_ids == (5, 6)
    assert [o.prompt_ids for o in llm.generate(np.array([[5, 6], [7, 8]]), few)] == [(5, 6), (7, 8)]
    assert [o.prompt_ids for o in llm.generate(iter(["the"]), few)] == [o.prompt_ids for o in llm.generate("the", few)]


def test_content_that_the_template_cannot_write_is_refused(llm: LLM) -> None:
    for content in (None, 5, ["x"], b"x", SURROGATE):
        with pytest.raises(SettingError, match=r"^messages="):
            llm.chat([{"role": "user", "content": content}])


# what only the model and the engine know: the vocabulary, the context, the requests there are
IMPOSSIBLE: list[tuple[str, str, dict[str, Any]]] = [
    ("prompt_ids", "[268]", {"prompt_ids": ()}),
    ("prompt", "to 268", {"prompt_ids": (5, VOCAB)}),
    ("prompt", "context", {"prompt_ids": (5,) * 64}),
    ("max_tokens", "256", {"max_tokens": 0}),
    ("max_tokens", "leaves 63", {"max_tokens": 64}),
    ("max_tokens", "leaves 63", {"max_tokens": LARGEST}),
    ("min_tokens", "for instance 4", {"params": SamplingParams(min_tokens=5, max_tokens=None)}),
    ("min_tokens", "for instance 4", {"params": SamplingParams(min_tokens=LARGEST, max_tokens=None)}),
    ("logit_bias", "268", {"params": SamplingParams(logit_bias={VOCAB: 1})}),
    ("logit_bias", "268", {"params": SamplingParams(logit_bias={LARGEST: 1})}),
    ("stop_token_ids", "268", {"params": SamplingParams(stop_token_ids=[VOCAB])}),
    ("banned_token_ids", "268", {"banned": [[5, LARGEST]]}),
]


@pytest.mark.parametrize("name,works,changes", IMPOSSIBLE)
def test_a_request_that_can_never_run_is_not_added(llm: LLM, name: str, works: str, changes: dict[str, Any]) -> None:
    good = request()
    refusal(lambda: llm.engine.add(replace(good, **changes)), name, works)
    assert idle(llm)


@pytest.mark.parametrize(
    "bad", [None, 5, "x", {}, Request, object(), SimpleNamespace(id="a")], ids=lambda bad: type(bad).__name__
)
def test_what_is_no_request_is_not_added(llm: LLM, bad: Any) -> None:
    refusal(lambda: llm.engine.add(bad), "request", "forerun.types.Request")
    assert idle(llm)


# --- values that go together --------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(loaded: LoadedModel) -> None:
    refusal(lambda: LLM.load(loaded.folder, device="cuda"), "device", "cpu")
    refusal(lambda: LLM(loaded.folder, device="cuda"), "device", "cpu")
    refusal(lambda: LLM(loaded, device="cuda"), "device", "cpu")


def test_a_loaded_model_is_not_asked_to_be_another(loaded: LoadedModel) -> None:
    refusal(lambda: LLM(loaded, dtype="bfloat16"), "dtype", "float32")
    refusal(lambda: LLM(loaded, quantization="int8"), "quantization", "auto")
    assert LLM(loaded, dtype=torch.float32, device=torch.device("cpu"), kv_cache_tokens=64).engine.kv_tokens == 64  # type: ignore[arg-type]


def test_a_kv_cache_larger_than_the_memory_is_refused(loaded: LoadedModel) -> None:
    refusal(lambda: LLM(loaded, kv_cache_tokens=2**40), "kv_cache_tokens", "GB")


@pytest.mark.parametrize(
    "given,name,suggested",
    [
        ({"max_num_seqs": 4096}, "max_num_seqs", 32),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 256}, "max_num_batched_tokens", 512),
        ({"max_num_batched_tokens": 16}, "max_num_batched_tokens", 32),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", 2048),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 8, "speculation": speculation(num_speculative_tokens=16)},
         "max_num_batched_tokens", 17),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 64, "speculation": speculation(num_speculative_tokens=16)},
         "max_num_batched_tokens", 64),
        ({"kv_cache_tokens": 31, "block_size": 32}, "kv_cache_tokens", 8192),
        ({"kv_cache_tokens": 0, "block_size": 128}, "kv_cache_tokens", 8192),
    ],
)  # fmt: skip
def test_an_error_about_a_budget_names_what_was_given_and_what_is_accepted(
    given: dict[str, Any], name: str, suggested: int
) -> None:
    """Some settings bound each other; what a message suggests is not refused next."""
    assert name in given
    refusal(lambda: EngineConfig(**given), name, suggested)
    EngineConfig(**{**given, name: suggested})


@pytest.mark.parametrize(
    "given,name,suggested",
    [
        ({"num_speculative_tokens": 100}, "num_speculative_tokens", 4),
        ({"num_speculative_tokens": 0, "prompt_lookup_max": 2}, "num_speculative_tokens", 4),
        ({"prompt_lookup_min": 6, "prompt_lookup_max": 5}, "prompt_lookup_min", 5),
        ({"prompt_lookup_min": 0, "prompt_lookup_max": 1}, "prompt_lookup_min", 1),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 5000}, "suffix_decoding_max_tree_depth", 24),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 9]]},
         "num_speculative_tokens_per_batch_size", "[[1, 8, 4], [9, 64, 0]]"),
        ({"num_speculative_tokens": 1, "num_speculative_tokens_per_batch_size": [[1, 8, 2]]},
         "num_speculative_tokens_per_batch_size", "[[1, 8, 1], [9, 64, 0]]"),
    ],
)  # fmt: skip
def test_an_error_about_drafts_names_what_was_given_and_what_is_accepted(
    given: dict[str, Any], name: str, suggested: Any
) -> None:
    assert name in given
    refusal(lambda: parsed(**given), name, suggested)
    parsed(**{**given, name: meant(suggested)})


def test_a_deep_suffix_tree_alone_is_no_error() -> None:
    """Its depth is the default of k, which is bounded more tightly."""
    assert parsed(method="suffix", suffix_decoding_max_tree_depth=200).num_speculative_tokens == 64


@pytest.mark.parametrize(
    "name,value", [("model", "x"), ("suffix_decoding_max_tree_depth", 8), ("draft_sample_method", "probabilistic")]
)
def test_a_setting_that_the_method_does_not_read_is_refused(name: str, value: Any) -> None:
    for build in (parsed, speculation):
        refusal(lambda build=build: build(**{name: value}), name, "leave it out")  # type: ignore[misc]


def test_changing_a_mapping_later_changes_no_request() -> None:
    bias = {5: 1.0}
    given = SamplingParams(logit_bias=bias)
    bias[6] = NAN
    assert given.logit_bias == {5: 1.0}


# --- and nobody else notices --------------------------------------------------------------------------------------------


def intruder(it: Engine, rng: random.Random, name: str) -> Request | None:
    """A request with two settings taken from the tables, added to the engine; None if it was refused."""
    chosen = rng.sample([key for key in PARAMS if key != "n"], 2)
    kinds = {key: (PARAMS[key].refused, [value for value, _ in PARAMS[key].converted]) for key in chosen}
    given = {key: rng.choice(rng.choices(kind, (1, 3))[0]) for key, kind in kinds.items()}
    prompt = rng.choice((*NOT_PROMPT, *NO_TOKENS)) if rng.random() < 0.2 else (5, 6, 5, 6)
    try:
        params = SamplingParams(**{"max_tokens": 6, **given})
        asked = Request(name, prompt, params, 6 if params.max_tokens is None else params.max_tokens, rng.getrandbits(70))
        it.add(asked)
    except SettingError:
        return None
    return asked


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    "speculation", [None, Speculation("ngram", 3, 1, 3), Speculation("prediction", 3)], ids=["plain", "ngram", "prediction"]
)
def test_others_get_their_own_answers_whatever_is_asked_beside_them(
    loaded: LoadedModel, speculation: Speculation | None, fixed: bool
) -> None:
    """Requests with values from the tables come at every step. Each is refused or answered in full; the steady ones get what
    they get alone, and no page is lost."""
    config = EngineConfig(kv_cache_tokens=1024, max_model_len=128, max_num_seqs=4, speculation=speculation)

    def make(slots: Any, mirror: Any, sampling: Any, kv: Any, fixed: bool) -> Any:
        around = DrafterContext(slots, mirror, sampling, kv, config, fixed, loaded.target.vocab, None)
        return TABLE[speculation.method](speculation, around) if speculation else None

    def steady(i: int) -> Request:
        params = SamplingParams(temperature=0.8 * (i % 2), top_k=20 * (i % 3), max_tokens=50, repetition_penalty=1.0 + i / 10)
        return Request(f"steady {i}", (5, 6, 7, 5, 6, i + 3), params, 50, i, prediction=(5, 6, 7))

    def answered(it: Engine, rng: random.Random | None) -> tuple[dict[str, list[int]], int, int]:
        found: dict[str, list[int]] = {}
        beside: dict[str, Request] = {}
        refused = 0
        while it.has_work:
            if rng is not None and len(beside) < 60:
                asked = intruder(it, rng, f"beside {len(beside)}")
                refused += asked is None
                beside |= {asked.id: asked} if asked is not None else {}
            for event in it.step():
                found.setdefault(event.request_id, []).extend(event.tokens)
                assert event.finish_reason in (None, "length", "stop"), event
        for name, asked in beside.items():
            assert len(found[name]) <= asked.max_tokens and all(0 <= token < VOCAB for token in found.pop(name))
        return found, refused, len(beside)

    alone: dict[str, list[int]] = {}
    for i in range(3):
        it = Engine(loaded.target, config, make, lambda: Detokenizer(loaded.tokenizer), fixed)
        it.add(steady(i))
        alone |= answered(it, None)[0]
    it = Engine(loaded.target, config, make, lambda: Detokenizer(loaded.tokenizer), fixed)
    for i in range(3):
        it.add(steady(i))
    found, refused, taken = answered(it, random.Random(f"{speculation} {fixed}"))
    assert found == alone and refused > 10 and taken > 10
    assert it.scheduler.pages.free == it.scheduler.pages.count


# --- the command line's numbers -----------------------------------------------------------------------------------------

NUMBERS = ("nan", "-inf", "1e400", "-1", "0", "2.5", "x", "", "9" * 25, "0,1")
FINE = {  # of these, what is accepted
    "generate --max-tokens": (), "generate --temperature": ("0", "2.5"), "generate --top-k": ("-1", "0"),
    "generate --top-p": (), "generate --min-p": ("0",), "generate --repetition-penalty": ("2.5",),
    "generate --presence-penalty": ("-1", "0"), "generate --frequency-penalty": ("-1", "0"),
    "generate --seed": ("-1", "0", "9" * 25), "generate --max-model-len": (),
    "bench --repetitions": (), "bench --warmups": ("0",), "bench --max-tokens": (), "bench --concurrency": ("",),
    "bench --rate": ("2.5", ""), "bench --requests": (), "bench --samples": ("0",), "bench --seed": ("-1", "0", "9" * 25),
    "bench --slots": (), "bench --timeout": (), "bench --connect-timeout": (), "bench --idle-timeout": (),
    "bench --context": (), "bench --trace-speed": (), "bench --budget-minutes": ("0", "2.5"),
}  # fmt: skip


def test_the_numbers_of_every_option_are_in_the_table() -> None:
    for name, groups in (("generate", [generate.Options]), ("bench", [Options, bench.RunOptions])):
        every = [field for group in groups for field in fields(group) if re.search(r"\b(int|float)\b", str(field.type))]
        options = {f"{name} {option_of(field).flags[0]}" for field in every}
        assert options and options <= set(FINE), options - set(FINE)


@pytest.mark.parametrize("option", FINE)
def test_a_number_that_an_option_cannot_use_is_found_before_anything_is_loaded(option: str) -> None:
    """An error names the option; what is accepted goes on to the model, which is not there."""
    name, flag = option.split()
    for text in NUMBERS:
        asked = [name, *(["x"] if name == "generate" else []), "-m", "/nowhere/at/all", f"{flag}={text}"]
        shown = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, asked)
        assert shown.exit_code == 2 and "Traceback" not in shown.stderr
        said = shown.stderr
        if text in FINE[option]:
            assert "error: model='/nowhere/at/all'" in said
        else:
            assert re.search(rf"error: {flag[2:].replace('-', '_')}=|Invalid value for '{flag}'", said), (text, said)


def test_a_run_of_too_many_prompts_says_how_many_would_do() -> None:
    many = Options(tasks=("copy",), concurrency=(64,))
    refusal(lambda: plan_of(many), "repetitions", "at most 7")
    assert plan_of(replace(many, repetitions=7)).prompts_needed <= 512
    more = Options(tasks=("copy",), concurrency=(8, 2048))
    refusal(lambda: plan_of(more), "requests", "at most 28")
    assert plan_of(replace(more, requests=28)).prompts_needed <= 512
    refusal(lambda: subject_of(replace(many, slots=5000), plan_of(replace(many, requests=8))), "slots", "1024")
    refusal(lambda: subject_of(more, plan_of(replace(more, requests=8))), "concurrency", "1024")
