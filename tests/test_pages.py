"""The page allocator and prefix cache."""

import random

import pytest

from forerun.engine.pages import ROOT, Pages


def fill(pages: Pages, ids: list[int]) -> list[int]:
    """Allocate and publish the whole pages of ids, as a sequence that computed them would."""
    own = pages.allocate(pages.needed(len(ids)))
    serial = ROOT
    for i in range(len(ids) // pages.block_size):
        serial = pages.publish(own[i], serial, ids[i * pages.block_size : (i + 1) * pages.block_size])
    return own


def test_what_was_published_is_found_and_nothing_else() -> None:
    pages = Pages(8, 4)
    ids = list(range(10))
    own = fill(pages, ids)
    assert pages.match(ids).pages == own[:2]
    assert pages.match(ids[:8]).pages == own[:1]  # one token must be left to compute
    assert pages.match([*range(4), 9, 9, 9, 9, 9]).pages == own[:1]
    assert pages.match([9, *ids]).pages == []
    assert pages.match([*range(4, 8), 1]).pages == []  # the same tokens after another prefix


def test_idle_pages_are_free_until_needed_and_ends_go_first() -> None:
    pages = Pages(4, 4)
    ids = list(range(13))
    own = fill(pages, ids)
    pages.release(own)
    assert pages.free == 4 and pages.match(ids).pages == own[:3]
    pages.allocate(2)  # the blank page and the end of the chain
    assert pages.match(ids).pages == own[:2]
    with pytest.raises(MemoryError, match="3 pages wanted, 2 free"):
        pages.allocate(3)


def test_held_pages_are_not_reused() -> None:
    pages = Pages(4, 4)
    ids = list(range(9))
    own = fill(pages, ids)
    pages.release(own)
    found = pages.match(ids)
    pages.hold(found.pages)
    assert pages.free == 2
    taken = pages.allocate(2)
    assert not set(taken) & set(found.pages)
    pages.release(found.pages)
    pages.release(taken)
    assert pages.free == 4


def test_the_first_of_two_equal_pages_stays_the_one_found() -> None:
    pages = Pages(8, 4)
    ids = list(range(9))
    first, second = fill(pages, ids), fill(pages, ids)
    assert pages.match(ids).pages == first[:2]
    pages.release(second)
    pages.release(first)
    assert pages.free == 8 and pages.match(ids).pages == first[:2]


def test_caching_off_and_clear_find_nothing() -> None:
    pages = Pages(4, 4, caching=False)
    ids = list(range(9))
    fill(pages, ids)
    assert pages.match(ids).pages == []
    pages = Pages(4, 4)
    pages.release(fill(pages, ids))
    pages.clear()
    assert pages.match(ids).pages == [] and pages.free == 4


def test_page_zero_is_never_handed_out_and_none_is_lost() -> None:
    """At random times pages are taken and released: each page is free or held, and at the end all are free."""
    rng = random.Random(0)
    pages = Pages(24, 4)
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(3000):
        if live and (rng.random() < 0.5 or pages.free < 6):
            own, _ = live.pop(rng.randrange(len(live)))
            pages.release(own)
            continue
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        prefix = pages.match(ids)
        pages.hold(prefix.pages)
        wanted = pages.needed(len(ids)) - len(prefix.pages)
        if wanted > pages.free:
            pages.release(prefix.pages)
            continue
        own = prefix.pages + pages.allocate(wanted)
        assert 0 not in own and len(set(own)) == len(own)
        fresh = set(own[len(prefix.pages) :])
        assert all(not fresh & set(others) for others, _ in live)
        serial = prefix.serial
        for i in range(len(prefix.pages), len(ids) // 4):
            serial = pages.publish(own[i], serial, ids[4 * i : 4 * i + 4])
        live.append((own, ids))
        for others, text in live:  # the pages found hold the tokens asked for
            for page, other in zip(pages.match(text).pages, others, strict=False):
                assert page == other or any(page in o for o, _ in live) or page in pages._idle
    for own, _ in live:
        pages.release(own)
    assert pages.free == 24
