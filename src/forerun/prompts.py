"""Texts, messages and sampling parameters to requests, for LLM and for a server's process that has no engine. Does not use
torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun import checks
from forerun.config import Speculation
from forerun.models.tokenizer import Tokenizer
from forerun.seeds import child_seed, request_seed
from forerun.types import Request, SamplingParams, SettingError, require


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine takes. max_model_len: tokens of prompt and answer together; vocab: the target's, padding included;
    end_ids: the tokens that end an answer, unless ignore_eos; seed: for requests without one."""

    max_model_len: int
    vocab: int
    end_ids: tuple[int, ...]
    seed: int
    speculation: Speculation | None


class Prompts:
    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self._numbers = itertools.count()

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt ids of a conversation. tools: descriptions of functions, for templates that read them.
        add_generation_prompt: end the prompt with the header of an answer; None: the opposite of continue_final_message.
        continue_final_message: end the prompt inside the last message, so that the model continues it.
        chat_template_kwargs: other variables of the template, for instance enable_thinking or documents. Raises SettingError
        for a variable that the template does not read."""
        given = checks.messages("messages", messages)
        going_on = checks.Flag()("continue_final_message", continue_final_message)
        begun = not going_on if add_generation_prompt is None else checks.Flag()("add_generation_prompt", add_generation_prompt)
        remedy = "continue_final_message is on; give one of the two"
        require(not (begun and going_on), "add_generation_prompt", add_generation_prompt, remedy)
        described = None if tools is None else checks.tools("tools", tools)
        variables = None if chat_template_kwargs is None else checks.variables("chat_template_kwargs", chat_template_kwargs)
        text = self.tokenizer.render_chat(given, begun or going_on, described, variables, going_on)
        return self.tokenizer.encode(checks.written("messages", text, "Hello"), add_special_tokens=False)

    def ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        """The token ids of a prompt. Raises SettingError if there are none."""
        ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
        require(bool(ids), "prompt", prompt, "it has no tokens; give at least one, for instance 'Once upon a time'")
        return ids

    def requests(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Request]:
        """The n requests of a prompt, each with its own seed, with all defaults filled in. Raises SettingError."""
        limits, tokenizer = self.limits, self.tokenizer
        speculation, left = limits.speculation, limits.max_model_len - len(prompt)
        if params.prediction is not None and (speculation is None or speculation.method != "prediction"):
            raise SettingError(
                "prediction",
                params.prediction[:20],
                'this engine does not use it; start it with speculative_config "prediction"',
            )
        banned = params.banned_token_ids + tuple(ids for word in params.bad_words for ids in self._spellings(word))
        stop = params.stop_token_ids + (() if params.ignore_eos else limits.end_ids)
        prediction = tuple(tokenizer.encode(params.prediction, add_special_tokens=False)) if params.prediction else ()
        number = next(self._numbers)
        seed = request_seed(limits.seed, number) if params.seed is None else params.seed
        return [
            Request(
                id=f"{number}.{i}",
                prompt_ids=prompt,
                params=params,
                max_tokens=max(left, 0) if params.max_tokens is None else params.max_tokens,
                seed=seed if params.n == 1 else child_seed(seed, i),
                stop_ids=tuple(dict.fromkeys(stop)),
                banned=banned,
                prediction=prediction,
            )
            for i in range(params.n)
        ]

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences of a bad word, with and without a space before it. Sequences with a token that the model lacks
        are left out, since it never produces them."""
        found = {tuple(self.tokenizer.encode(text, False, continues=True)) for text in (word, " " + word.lstrip())}
        return [ids for ids in found if ids and max(ids) < self.limits.vocab]
