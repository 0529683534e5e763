"""The page at / in a real browser: what it shows is what the server says, and it asks no other server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2 as httpx
import pytest

from forerun.llm import LLM
from tests import browser
from tests.serving import Inside, wait_for
from tests.tiny import tiny_model

PROMPT = "the thing in the thing in the thing"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = LLM(
        tiny_model(tmp_path_factory.mktemp("tiny"), positions=1024), speculative_config=speculation, adaptive_drafts=False,
        max_num_seqs=2, kv_cache_tokens=4096,
    )  # fmt: skip
    inside = Inside(llm)
    yield inside
    inside.close()


def test_each_token_is_told_to_be_an_accepted_draft_or_not(server: Inside) -> None:
    """As many as the metrics count, also in a stream."""
    asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_accepted": True}
    answer = httpx.post(server.url + "/v1/completions", json=asked).json()
    marks, metrics = answer["choices"][0]["accepted"], answer["metrics"]
    assert len(marks) == 60 and 0 < sum(marks) == metrics["accepted_tokens"] and not marks[0]
    plain = httpx.post(server.url + "/v1/completions", json=asked | {"return_accepted": False}).json()
    assert "accepted" not in plain["choices"][0]


@pytest.mark.skipif(browser.program() is None, reason="there is no Chromium")
def test_the_page_in_a_browser(server: Inside) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "temperature": 0}
    expected = httpx.post(server.url + "/v1/chat/completions", json=body | {"return_accepted": True}).json()
    with browser.page() as page:
        page.call("Page.navigate", url=server.url + "/")
        wait_for(lambda: page.value("document.getElementById('now')?.children.length") == 7, 30)
        page.value(f"document.getElementById('prompt').value = {PROMPT!r}; document.getElementById('most').value = 40; 0")
        page.value("document.getElementById('send').click()")
        wait_for(lambda: "tokens a step" in page.value("document.getElementById('told').textContent"), 30)
        shown = re.sub(r"<\|\w+\|>", "", page.value("document.getElementById('answer').textContent"))  # special tokens
        assert shown == expected["choices"][0]["message"]["content"]
        marked = page.value("document.querySelectorAll('#answer .accepted').length")
        assert marked == sum(expected["choices"][0]["accepted"]) > 0
        wait_for(lambda: page.value("document.getElementById('positions').children.length") == 3, 30)
        assert page.value("document.getElementById('requests').children.length") == 0
        assert not page.complaints(), page.complaints()
        assert all(url.startswith(server.url) for url in page.requests())
