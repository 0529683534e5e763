"""The Python interface: prompts in, texts out. It turns texts and messages into requests, and the engine's events into outputs.
It decides nothing about decoding.

    llm = LLM("smollm2-135m-instruct", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    print(llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=64))[0].text)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forerun import checks
from forerun.config import DEVICE, DTYPE, HEADS, QUANTIZATION, EngineConfig, Speculation, model_name
from forerun.drafters import Drafter
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.engine import Engine
from forerun.engine.memory import fits_memory
from forerun.engine.owner import Owner, Stream
from forerun.engine.scheduler import Sequence as Live
from forerun.engine.state import RowState
from forerun.engine.stats import DraftStats, EngineSnapshot, EngineStats, PredictionCounts, RequestStats, prediction_counts
from forerun.heads import layouts, loading
from forerun.heads.block import Block
from forerun.heads.chain import Chain
from forerun.idle import IdleDrafter
from forerun.models import hub, shipped
from forerun.models.decoder import KVCache, Target
from forerun.models.files import MANIFEST
from forerun.models.generation import default_sampling
from forerun.models.tokenizer import Detokenizer, Tokenizer
from forerun.prompts import Limits, Prompts
from forerun.types import (
    Event,
    FinishReason,
    Logprob,
    Request,
    SamplingParams,
    require,
    sampling_params,
)
from forerun.verify.grammar import Grammars
from forerun.verify.sampling import SamplingState

LOG = logging.getLogger("forerun")

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LoadedModel(NamedTuple):
    """Weights and tokenizer, which several LLMs can share. name: the name that was given; sampling: the recommendation of the
    model's generation_config.json; quantization: the setting with which it was loaded."""

    name: str
    folder: Path
    target: Target
    tokenizer: Tokenizer
    sampling: SamplingParams = SamplingParams()
    quantization: str = "auto"


class Timing(NamedTuple):
    """Seconds from a request's submission to its admission, to its first token and to its last token."""

    queued_s: float
    ttft_s: float
    e2e_s: float

    @property
    def prefill_s(self) -> float:
        """Seconds from its admission to its first token."""
        return self.ttft_s - self.queued_s

    @property
    def decode_s(self) -> float:
        """Seconds from its first token to its last one."""
        return self.e2e_s - self.ttft_s


class Piece(NamedTuple):
    """What one step added to a completion: the seconds since its submission, and the numbers of tokens and characters."""

    at_s: float
    tokens: int
    chars: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation of a prompt. text: without special tokens and stop strings; token_ids: all, a stop token included;
    pieces: one for each step. error: the cause if the finish reason is "error"; text and tokens are then those before the
    error. cached_tokens: of the prompt, found in the prefix cache. prediction: how many tokens of the prediction are in the
    completion; None without a prediction."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[Logprob, ...] | None
    stats: DraftStats
    timing: Timing
    pieces: tuple[Piece, ...] = ()
    error: str | None = None
    cached_tokens: int = 0
    prediction: PredictionCounts | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The n completions of one prompt."""

    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first completion's token ids."""
        return self.completions[0].token_ids


class Chunk(NamedTuple):
    """What one step added to a streamed answer. finish_reason: None before the last chunk. stats: the request's counts up to
    this chunk; later steps do not change them. logprobs: of token_ids; None if the request asked for none. error: the cause if
    the finish reason is "error". totals: all counts and times of the request, with the last chunk."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: DraftStats
    logprobs: tuple[Logprob, ...] | None = None
    error: str | None = None
    totals: RequestStats | None = None


def load_head(speculation: Speculation, loaded: LoadedModel) -> Chain | Block:
    """The head of a learned drafter. Raises LoadError for one that does not belong to this target."""
    target, name = loaded.target, speculation.model
    stored = (loaded.folder / MANIFEST).is_file()
    require(name is not None or not stored, "model", name, "a .gguf file holds no MTP modules; give the folder of a head")
    folder = loaded.folder if name is None else hub.resolve(name, head=True)
    return loading.load(folder, layouts.read_config(folder, speculation.method, target.config), target)


def in_turn(group: Sequence[Request], config: EngineConfig) -> tuple[Sequence[Request], Sequence[Request]]:
    """Of the n requests of a prompt, those to submit at once, and those to submit when the first has a token. By then the
    prompt is in the prefix cache, so it is computed once and not n times."""
    shares = config.enable_prefix_caching and len(group[0].prompt_ids) > config.block_size
    return (group[:1], group[1:]) if shares else (group, ())


class _Growing:
    """A completion that has not ended yet."""

    def __init__(self, live: Live, start: float) -> None:
        self.live, self.start = live, start
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.pieces: list[Piece] = []
        self.first = self.end = 0.0
        self.reason: FinishReason | None = None
        self.error: str | None = None

    def take(self, at: float, event: Event) -> None:
        """Add what one step gave. at: the time at which the step was read, in seconds."""
        self.end = at
        if event.tokens or event.finish_reason is None:
            self.first = self.first or at
            self.pieces.append(Piece(at - self.start, len(event.tokens), len(event.text)))
        self.text.append(event.text)
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.reason, self.error = event.finish_reason, event.error

    def done(self) -> Completion:
        """The completion. All its events must have been taken."""
        assert self.reason is not None
        start = self.start
        admitted, first = self.live.admitted_at or self.end, self.first or self.end
        timing = Timing(admitted - start, first - start, self.end - start)
        wanted = self.live.request.params.logprobs is not None
        logprobs = tuple(self.logprobs) if wanted else None
        pieces = tuple(self.pieces)
        text, tokens, stats = "".join(self.text), tuple(self.tokens), self.live.stats
        prediction = self.live.request.prediction
        found = prediction_counts(prediction, tokens) if prediction else None
        return Completion(
            text, tokens, self.reason, logprobs, stats, timing, pieces, self.error, self.live.cached, found
        )  # fmt: skip


class LLM:
    """A model with its engine. Any threads may share it."""

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        *,
        speculative_config: Speculation | Mapping[str, Any] | str | None = None,
        dtype: str = "auto",
        quantization: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        kv_cache_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        adaptive_drafts: bool = True,
        gpu_memory_utilization: float = 0.9,
    ) -> None:
        """model: a local folder, a Hugging Face id, a GGUF file, the default model (None), or a model that LLM.load returned.
        speculative_config: vLLM's keys, as a mapping or its JSON; None: decode without drafts. The other settings are those of
        EngineConfig. Raises SettingError, and LoadError if the weights do not fit."""
        config = EngineConfig(
            dtype,
            quantization,
            device,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            block_size,
            kv_cache_tokens,
            enable_prefix_caching,
            seed,
            adaptive_drafts,
            gpu_memory_utilization,
            Speculation.parse(speculative_config),
        )
        dtype, device, quantization = config.dtype, config.device, config.quantization
        loaded = model if isinstance(model, LoadedModel) else LLM.load(model, dtype, device, quantization)
        for name, given, there in (
            ("dtype", dtype, str(loaded.target.dtype).removeprefix("torch.")),
            ("quantization", quantization, loaded.quantization),
            ("device", device, loaded.target.device.type),
        ):
            require(given in ("auto", there), name, given, f"the loaded model's is {there}; give {there} or auto")
        config = replace(config, speculation=shipped.chosen(config.speculation, loaded.name))
        self.model, self.tokenizer = loaded, loaded.tokenizer
        tokenizer = loaded.tokenizer  # the engine refers to this, not to the LLM, so that an unused LLM is freed
        vocab = min(tokenizer.size, loaded.target.vocab)
        speculation = config.speculation
        drafter_model, head, context, each = None, None, None, loaded.target.kv_bytes_per_token
        if speculation is not None and speculation.method in HEADS:
            head = load_head(speculation, loaded)
            each += head.kv_bytes_per_token
        elif speculation is not None and speculation.model is not None:
            drafter = LLM.load(speculation.model, dtype, device, quantization)
            same = drafter.tokenizer.inner.get_vocab() == self.tokenizer.inner.get_vocab()
            require(
                same,
                "model",
                speculation.model,
                f"its vocabulary is not the target's ({loaded.name}); give a drafter of the same family",
            )
            drafter_model = drafter.target
            context = min(speculation.max_model_len or drafter.target.max_positions, drafter.target.max_positions)
            each += drafter.target.kv_bytes_per_token
        fits_memory(config.kv_cache_tokens, each, loaded.target.device)

        def make_drafter(
            state: RowState, mirror: RowState, sampling: SamplingState, kv: KVCache, padded: bool
        ) -> Drafter | None:
            if speculation is None:
                return None
            given = DrafterContext(state, mirror, sampling, kv, config, padded, vocab, drafter_model, head)
            return TABLE[speculation.method](speculation, given)

        end_ids = tuple(dict.fromkeys((*loaded.target.config.eos_ids, *tokenizer.end_ids)))
        grammars = Grammars(tokenizer, loaded.target.vocab, end_ids)
        self.engine = Engine(loaded.target, config, make_drafter, lambda: Detokenizer(tokenizer), grammars=grammars)
        self.engine.warm_up()
        self.owner = Owner(self.engine)
        LOG.info(self.engine.capacity())
        self._idle_drafter = IdleDrafter(speculation, config.max_num_seqs, context)
        limits = Limits(self.engine.max_model_len, loaded.target.vocab, end_ids, config.seed, speculation)
        self.prompts = Prompts(tokenizer, limits)

    @staticmethod
    def load(
        model: str | Path | None = None, dtype: str = "auto", device: str = "auto", quantization: str = "auto"
    ) -> LoadedModel:
        """Load a model and its tokenizer, which several LLMs can share; fetch the model first if needed. dtype, device,
        quantization: see EngineConfig. Raises SettingError, and LoadError for files that cannot be used."""
        name = hub.DEFAULT if model is None else model_name("model", model)
        dtype = DTYPE("dtype", "auto" if dtype is None else dtype)
        device = DEVICE("device", "auto" if device is None else device)
        quantization = QUANTIZATION("quantization", "auto" if quantization is None else quantization)
        there = device != "cuda" or torch.cuda.is_available()
        require(there, "device", device, "torch finds no CUDA device on this machine; give cpu or auto")
        folder = hub.resolve(name)
        where = torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")
        target, tokenizer = Target.load(folder, dtype, where, quantization=quantization), Tokenizer(folder)
        target.keep_vocabulary(tokenizer.size)
        return LoadedModel(name, folder, target, tokenizer, default_sampling(folder), quantization)

    def settings(self) -> dict[str, Any]:
        """All settings in force, defaults included. default_sampling: the values that requests without SamplingParams get,
        where the model's recommendation differs from SamplingParams()."""
        plain, recommended = asdict(SamplingParams()), asdict(self.model.sampling)
        sampling = {name: value for name, value in recommended.items() if value != plain[name]}
        return {"model": self.model.name, **self.engine.settings(), "default_sampling": sampling}

    @property
    def stats(self) -> EngineStats:
        """The engine's counts and times since its start or since `reset_stats`."""
        return self.engine.stats

    def snapshot(self) -> EngineSnapshot:
        """What operators watch: load, KV cache, counts, and the estimated speed-up over plain decoding. As plain data."""
        return self.owner.snapshot()

    def reset_stats(self) -> None:
        """Set the counts and times to zero, between two steps."""
        with self.owner.between_steps():
            self.engine.stats = EngineStats()

    def clear_prefix_cache(self) -> None:
        """Forget all pages of the prefix cache, between two steps. Running requests keep theirs."""
        with self.owner.between_steps():
            self.engine.scheduler.pages.clear()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Output]:
        """Continue each prompt (a text or token ids). params: one for all prompts, or one for each; None: the sampling that the
        model's generation_config.json recommends (see `settings`), and 16 tokens. progress: called after each step with
        (completions done, tokens produced). The outputs have the order of the prompts.

        Raises SettingError before anything runs. An interrupt aborts the running requests. A request that fails later ends
        alone: its completion has the finish reason "error" and the cause. Other threads, open streams and `progress` may use
        the same LLM meanwhile; all requests share one batch."""
        texts = [self.prompts.ids(prompt) for prompt in checks.prompts("prompts", prompts)]
        each = self._params(params, len(texts))
        usable = progress is None or callable(progress)
        require(usable, "progress", progress, "give a function of two numbers, for instance print")
        requests = [self._requests(prompt, p) for prompt, p in zip(texts, each, strict=True)]
        start = time.perf_counter()
        turns = [in_turn(group, self.engine.config) for group in requests]
        later = {first[0].id: rest for first, rest in turns}
        stream = self.owner.submit([request for first, _ in turns for request in first])
        growing = {name: _Growing(live, start) for name, live in stream.live.items()}
        produced = finished = 0
        try:
            for arrivals in stream:
                more: list[Request] = []
                for at, event in arrivals:
                    growing[event.request_id].take(at, event)
                    produced += len(event.tokens)
                    finished += event.finish_reason is not None
                    more += later.pop(event.request_id, ())
                if more:
                    stream.submit(more)
                    growing |= {request.id: _Growing(stream.live[request.id], start) for request in more}
                if progress is not None:
                    progress(finished, produced)
        finally:
            stream.close()
        self._idle_drafter.ended(self.stats.drafts)
        return [Output(group[0].prompt_ids, tuple(growing[r.id].done() for r in group)) for group in requests]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """Answer one conversation or several, rendered with the model's chat template. params, progress: see `generate`; the
        others: see `chat_ids`."""
        many = checks.conversations("conversations", conversations)
        prompts = [
            self.chat_ids(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in many
        ]
        return self.generate(prompts, params, progress)

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt ids of a conversation: see Prompts.chat_ids."""
        return self.prompts.chat_ids(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continue one prompt, with a chunk for each step that committed tokens. params: see `generate`. The request is
        submitted by this call, not at the first chunk. Closing the iterator, or dropping it, aborts the request. Any number of
        streams and other calls may run at once, in any threads. Raises SettingError."""
        given = self.model.sampling if params is None else sampling_params("params", params)
        require(given.n == 1, "n", given.n, "a stream is of one completion; give 1, or use generate")
        return self._chunks(self.owner.submit(self._requests(self.prompts.ids(checks.prompt("prompt", prompt)), given)))

    def _chunks(self, stream: Stream) -> Iterator[Chunk]:
        (live,) = stream.live.values()
        noted = live.request.params.logprobs is not None
        stats = DraftStats()
        try:
            for arrivals in stream:
                for _, event in arrivals:
                    if event.counts is not None:
                        stats.count(*event.counts)
                    logprobs = event.logprobs if noted else None
                    reason, now = event.finish_reason, stats.copy()
                    yield Chunk(event.text, event.tokens, reason, now, logprobs, event.error, event.stats)
            self._idle_drafter.ended(self.stats.drafts)
        finally:
            stream.close()

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Request:
        """The request that `stream` would submit, for a caller that submits it to `owner` itself. Raises SettingError."""
        require(sampling_params("params", params).n == 1, "n", params.n, "give 1")
        return self._requests(self.prompts.ids(checks.prompt("prompt", prompt)), params)[0]

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [self.model.sampling if params is None else params] * count
        remedy = f"give one SamplingParams for all, or one for each of the {count} prompts"
        each = checks.several("params", params, remedy)
        require(len(each) == count, "params", f"{len(each)} of them", remedy)
        return [sampling_params("params", one) for one in each]

    def _requests(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Request]:
        requests = self.prompts.requests(prompt, params)
        self._idle_drafter.asked(len(prompt), bool(requests[0].prediction), params.num_speculative_tokens == 0)
        return requests
