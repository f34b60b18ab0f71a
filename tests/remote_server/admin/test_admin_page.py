"""The page in a real browser, over a real server."""

import asyncio
from functools import partial
from typing import Any

import pytest
from admin_http import TOKEN, served, write_token
from browser import Browser, find_chromium
from bucket_helpers import ROW_BYTES, chain_of, folder_url, hello
from wire_peer import Peer

from remote_server.protocol import EngineReport, Stretch
from remote_server.store.bucket.objects.objects import Failure
from remote_server.store.eviction import hazard

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("no_old_answers")]

NASTY = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"

chromium = find_chromium()
needs_browser = pytest.mark.skipif(
    chromium is None, reason="no Chromium: set KVFERRY_CHROMIUM, or have one on the PATH"
)


@pytest.fixture
async def browser():
    async with Browser(chromium) as browser:
        yield browser


async def assert_readable(browser: Browser) -> None:
    """On a narrow screen, light and dark, and to a screen reader."""
    for dark in (False, True):
        await browser.show(320, 568, dark=dark)
        assert await browser.value("document.documentElement.scrollWidth") <= 320
        assert await browser.value(UNREADABLE) == []
    assert await browser.value(UNNAMED) == [] and browser.problems == []


@needs_browser
async def test_the_page_shows_what_happens_keeps_names_as_text_and_fits_every_screen(
    browser, context
):
    with served() as (server, admin):
        peer = Peer(context, server.endpoint)
        peer.hello(NASTY, client="engine-1")
        await browser.open(admin.url + "/")
        await browser.until("document.getElementById('state').textContent === 'serving'")
        before = await browser.value("document.getElementById('namespaces').innerText")
        assert NASTY in before and "engine-1" in before
        assert await browser.value("document.getElementById('bucket').hidden")
        rule = await browser.value("document.getElementById('eviction-rule').innerText")
        assert "lru reigns" in rule
        assert await browser.value("document.getElementById('engines-part').hidden")
        report = EngineReport("vLLM 0.32.0", 1000, {"engine": 100, "server": 250})
        facts = {"dtype": NASTY}
        engine = Peer(context, server.endpoint)
        engine.hello("llama", client=NASTY, fingerprint=facts, report=report)
        peer.put(range(8), namespace=NASTY)
        peer.get(range(8), namespace=NASTY)
        await browser.until("Number(document.body.dataset.looks) >= 2")
        names = await browser.value("document.getElementById('namespaces').innerText")
        assert NASTY in names and "32.0 KiB" in names
        shown = await browser.value("document.getElementById('engines').innerText")
        assert "vLLM 0.32.0" in shown and "1,000\t10.0 %\t25.0 %" in shown and NASTY in shown
        tiers = await browser.value("document.getElementById('tiers').innerText")
        assert "memory" in tiers and "16.0 MiB" in tiers and "\t8\t" in tiers
        times = await browser.value("document.getElementById('times').innerText")
        assert "put" in times and "stream" in times
        assert await browser.value("document.title") == "kvferry"
        assert await browser.value("document.images.length") == 0
        colours = set()
        for dark in (False, True):
            for width, height in ((1280, 900), (390, 844), (320, 568)):
                await browser.show(width, height, dark=dark)
                wide = await browser.value("document.documentElement.scrollWidth")
                assert wide <= width, "nothing is scrolled sideways but a table in its frame"
            assert await browser.value(UNREADABLE) == []
            colours.add(await browser.value("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2, "light and dark differ"
        assert await browser.value(UNNAMED) == []
        assert browser.problems == []
        await browser.value("fetch('https://example.com/').catch(() => 0).then(() => 0)")
        assert any("Content Security Policy" in one for one in browser.problems)


@needs_browser
async def test_the_page_shows_the_bucket_of_a_server_that_has_one(browser, context, tmp_path):
    with served(bucket=folder_url(tmp_path), eviction="lru") as (server, admin):
        peer = hello(Peer(context, server.endpoint))
        peer.put(range(8), length=ROW_BYTES, chain=chain_of(8))
        peer.lookup(range(8), chain=chain_of(8))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 1)
        await browser.open(admin.url + "/")
        await browser.until("document.getElementById('bucket-state').textContent === 'answers'")
        assert await browser.value("document.getElementById('eviction').hidden"), "nothing learns"
        facts = await browser.value("document.getElementById('bucket-facts').innerText")
        assert facts.startswith("1 packs known; 0 wait to be written; ")
        calls = await browser.value("document.getElementById('bucket-calls').innerText")
        assert [line.split("\t")[0] for line in calls.splitlines()] == ["put", "header", "list"]
        tiers = await browser.value("document.getElementById('tiers').innerText")
        assert "no limit" in tiers, "a bucket without a budget"
        tier: Any = server.store.tier_stack.tiers[0]
        available = tier.availability
        server.loop_calls.call(partial(available.failed, Failure.THROTTLED)).result(60)
        await browser.value("look()")
        state = await browser.value("document.getElementById('bucket-state').innerText")
        assert state.startswith("left alone for ")
        await assert_readable(browser)


@needs_browser
async def test_the_page_shows_the_rule_of_eviction_and_the_chances_that_it_learned(
    browser, context
):
    with served(eviction="learned") as (server, admin):
        learner: Any = server.store.memory.learner
        sampled = range(hazard.UPDATE_EVERY)
        for now in (0.0, 90.0):
            learner.hazards.use(sampled, [hazard.class_of(0, 0)], now)
        await browser.open(admin.url + "/")
        await browser.until("!document.getElementById('eviction').hidden")
        rule = await browser.value("document.getElementById('eviction-rule').innerText")
        assert rule == "lru reigns; lru would find 0.0 %, learned would find 0.0 %"
        rows = await browser.value("document.getElementById('returns').innerText")
        assert rows.startswith("turn 1") and rows.count("%") == 3
        note = await browser.value("document.getElementById('eviction-note').innerText")
        assert "0 switches of the rule" in note
        await assert_readable(browser)


@needs_browser
async def test_the_page_draws_what_other_sizes_would_find_and_why_tokens_were_not_found(
    browser, context
):
    with served() as (server, admin):
        peer = Peer(context, server.endpoint)
        peer.hello()
        await browser.open(admin.url + "/")
        await browser.until("!document.getElementById('sizes-part').hidden")
        few = await browser.value("document.getElementById('sizes-part').innerText")
        assert few.split("\n", 1)[1].strip() == (
            "So far engines looked up 0 tokens: too few to conclude from."
        )
        assert await browser.value("document.getElementById('missed-part').hidden")
        peer.put(range(200), chain=[Stretch(200, 0, 0, 512)])
        peer.lookup(range(400), chain=[Stretch(400, 0, 0, 512)])
        await browser.until("document.querySelectorAll('#sizes figure').length === 1")
        figure = await browser.value("document.querySelector('#sizes figure').innerText")
        assert figure.startswith("memory") and "learned, the rule in force" in figure
        assert "50\u00a0% are found today, and more memory would not change that" in figure
        name = await browser.value("document.querySelector('svg.curve').getAttribute('aria-label')")
        assert name.startswith("memory, tokens found by size: ") and "in 16.0 MiB, today" in name
        texts = await browser.value(
            "[...document.querySelectorAll('svg.curve text')].map((n) => n.textContent)"
        )
        assert texts[3:10] == ["2", "4", "8", "16", "32", "64", "128"]
        assert "MiB of memory" in texts and "today: 50.0 %" in texts
        lines = "[...document.querySelectorAll('svg.curve polyline')].map((n) => n.classList[0])"
        assert await browser.value(lines) == ["lru", "rule"]
        await browser.value("document.querySelector('#sizes details').open = true")
        await browser.value("look()")
        assert await browser.value("document.querySelector('#sizes details').open"), "as it was"
        table = await browser.value("document.querySelector('#sizes tbody').innerText")
        assert len(table.splitlines()) == 7 and "16.0 MiB, today\t50.0 %\t" in table
        cells = "[...document.querySelectorAll('#missed tr')].map((n) => [...n.cells].map("
        cells += "(cell) => cell.textContent))"
        assert await browser.value(cells) == [
            ["found", "", "50.0 %", "102,400"],
            ["never seen before", "", "50.0 %", "102,400"],
        ]
        await assert_readable(browser)
        await browser.value("look()")
        assert await browser.value(CUT) == []


CUT = """[...document.querySelectorAll("svg.curve text")].filter((n) => {
  const [a, b] = [n, n.ownerSVGElement].map((one) => one.getBoundingClientRect());
  return a.left < b.left - 1 || a.right > b.right + 1
    || a.top < b.top - 1 || a.bottom > b.bottom + 1;
}).map((n) => n.textContent)"""
"""Texts of a curve that are not wholly inside it."""

UNREADABLE = """(() => {
  const light = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map((v) => { v /= 255;
    return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
    return .2126 * r + .7152 * g + .0722 * b; };
  const behind = (n) => { for (; n; n = n.parentElement) {
    const c = getComputedStyle(n).backgroundColor; if (c !== "rgba(0, 0, 0, 0)") return c; } };
  const texts = "h1,h2,th,td,dt,dd,p,a,summary,text,figcaption,.figure,#state";
  return [...document.querySelectorAll(texts)].filter((n) => {
    const [a, b] = [light(getComputedStyle(n).color), light(behind(n))].sort((x, y) => y - x);
    return n.textContent.trim() && n.getClientRects().length && (a + .05) / (b + .05) < 4.5;
  }).map((n) => n.outerHTML);
})()"""
"""Text whose contrast to what is behind it is below 4.5 to 1."""

UNNAMED = """[...document.querySelectorAll(
  "progress,input,summary,[role=region],[role=img],th")].filter(
  (n) => !(n.getAttribute("aria-label") || n.getAttribute("aria-labelledby") || n.labels?.length
    || n.textContent.trim())).map((n) => n.outerHTML)"""
"""What a screen reader would have no name for."""


@needs_browser
async def test_the_page_asks_for_a_token_where_one_is_needed_and_says_when_the_server_is_away(
    browser, tmp_path
):
    settings = {"admin": "http://0.0.0.0:*", "admin_token_file": write_token(tmp_path)}
    with served(**settings) as (server, admin):
        await browser.open(admin.url.replace("0.0.0.0", "127.0.0.1") + "/")
        await browser.until("document.getElementById('state').textContent === 'locked'")
        assert await browser.value("!document.getElementById('ask').hidden")
        await browser.value(
            f"document.getElementById('token').value = '{TOKEN}';"
            "document.querySelector('form').requestSubmit()"
        )
        await browser.until("document.getElementById('state').textContent === 'serving'")
        assert await browser.value("document.getElementById('ask').hidden")
        server.leave()
        assert await asyncio.to_thread(server.wait_until_drained, 60)
        await browser.value("look()")
        assert await browser.value("document.getElementById('state').textContent") == "away"


def test_the_page_names_no_address_but_its_own():
    from importlib.resources import files

    text = files("remote_server.admin").joinpath("page.html").read_text("utf-8")
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in text and "//cdn" not in text
    assert "innerHTML" not in text and "style=" not in text and "onclick" not in text
