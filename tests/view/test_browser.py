"""What a person does, in a headless Chromium: clicks, keys, screens, and a run that goes on."""

import asyncio
import time

import pytest

from tests.helpers.recorded_runs import unpack
from tests.view import chromium
from tests.view.conftest import build, shown

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.FOUND is None, reason="no Chromium: apt-get install chromium"),
]
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
WIDER = "document.documentElement.scrollWidth > innerWidth + 1"


def in_browser(folder, work):
    """Serve a folder, and let `work(tab, server)` look at it."""

    async def look(server):
        async with chromium.tab(folder / "profile") as tab:
            await work(tab, server)
            broken = [each for each in tab.events if each["method"] == "Runtime.exceptionThrown"]
            refused = [each for each in tab.events if each["method"] == "Log.entryAdded"]
            assert broken + refused == []

    with shown(folder / "runs") as server:
        asyncio.run(look(server))


@pytest.fixture
def run(tmp_path):
    found = unpack("finished", tmp_path / "runs")
    (found.logs / "learner.log").write_text(HOSTILE)
    build(found)
    return found


def test_three_clicks_lead_from_the_curve_to_the_tokens_of_a_turn(run, tmp_path):
    async def work(tab, server):
        await tab.look()
        await tab.open(f"{server.address}runs/finished/")
        await tab.click("a.link[href$='step/2']")
        await tab.click("li a.what")
        await tab.click("a.completion")
        assert await tab.do("document.querySelectorAll('.tokens tbody tr').length") == 2
        await tab.until("!document.body.textContent.includes('being computed')")
        cells = await tab.do("[...document.querySelectorAll('.tokens td')].map(c => c.textContent)")
        assert len(cells) == 10  # of the word, and 2 of the tag, which followed without a choice
        cells = cells[:8]
        assert "–" not in cells

    in_browser(tmp_path, work)


def test_the_keyboard_goes_everywhere(run, tmp_path):
    async def work(tab, server):
        await tab.look()
        await tab.open(f"{server.address}runs/finished/step/2")
        for _ in range(2):
            await tab.press("j")
        marked = await tab.do("document.activeElement.textContent")
        await tab.press("k")
        assert marked != await tab.do("document.activeElement.textContent")
        for key, arrived in (
            ("ArrowRight", "/step/3"),
            ("ArrowLeft", "/step/2"),
            ("u", "/finished/"),
        ):
            await tab.press(key)
            await tab.until(f"location.pathname.endsWith('{arrived}')")
            await tab.until("document.readyState === 'complete'")
        await tab.press("?")
        assert await tab.do("document.getElementById('help').open")
        await tab.do("document.getElementById('help').close()")
        await tab.press("/")
        assert await tab.do("document.activeElement.name") == "text"

    in_browser(tmp_path, work)


def test_a_phone_and_a_dark_screen_show_every_page(run, tmp_path):
    async def work(tab, server):
        pages = ("", "step/2", "trials", "evaluation", "processes", "config", "play")
        await tab.open(f"{server.address}runs/finished/step/2")
        group = await tab.do("document.querySelector('li a.what').href")
        colours = set()
        for is_dark in (False, True):
            await tab.look(width=390, height=800, is_dark=is_dark)
            for address in (*(f"{server.address}runs/finished/{page}" for page in pages), group):
                await tab.open(address)
                assert not await tab.do(WIDER), address
            colours.add(await tab.do("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
        assert await tab.do("window.hacked") is None

    in_browser(tmp_path, work)


def test_a_step_appears_on_the_open_page_while_a_run_goes_on(run, tmp_path):
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:3]))

    async def work(tab, server):
        await tab.look()
        await tab.open(f"{server.address}runs/finished/")
        await tab.until("document.body.textContent.includes('batch of step 3')")
        await tab.until("document.getElementById('live').classList.contains('on')")
        began = time.monotonic()
        with run.metrics.open("a") as out:
            out.write(lines[3])
        await tab.until("document.body.textContent.includes('batch of step 4')")
        assert time.monotonic() - began < 20  # 2 s where a machine does nothing else
        assert await tab.do("document.querySelector(\"a.link[href$='step/4']\") !== null")

    in_browser(tmp_path, work)


def test_a_hidden_page_keeps_no_connection_and_catches_up_when_it_is_shown(run, tmp_path):
    """A browser has six connections to a server: with six tabs a seventh would never load."""
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:3]))
    watched = (
        "const Source = EventSource; window.sources = []; window.isHidden = false;"
        "window.EventSource = function (url) {"
        " sources.push(new Source(url)); return sources.at(-1); };"
        "Object.defineProperty(document, 'hidden', { get: () => isHidden });"
    )
    turned = "document.dispatchEvent(new Event('visibilitychange', { bubbles: true }))"

    async def work(tab, server):
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=watched)
        await tab.open(f"{server.address}runs/finished/")
        await tab.until("sources.some(each => each.readyState === 1)")
        await tab.do(f"window.isHidden = true; {turned}")
        assert await tab.do("sources.every(each => each.readyState === 2)")
        with run.metrics.open("a") as out:
            out.write(lines[3])
        await tab.do(f"window.isHidden = false; {turned}")
        await tab.until("document.body.textContent.includes('batch of step 4')")

    in_browser(tmp_path, work)


def test_a_form_of_ours_is_answered(run, tmp_path):
    """A browser says `Origin: null` of a form on a page that allows no referrer at all."""

    async def work(tab, server):
        await tab.open(f"{server.address}runs/finished/play")
        await tab.do("document.querySelector('[name=member]').value = 'nobody'")
        await tab.click("[name=watch]")
        await tab.until("document.body.textContent.includes('no member')")

    in_browser(tmp_path, work)


def test_long_numbers_and_names_stay_in_their_places(run, tmp_path):
    async def work(tab, server):
        for width in (1280, 390):
            await tab.look(width=width)
            await tab.open(f"{server.address}runs/finished/")
            await tab.do("document.querySelector('h1').prepend('Name'.repeat(50))")
            await tab.do("document.querySelector('figcaption').prepend('Name'.repeat(50))")
            for selector, text in (("b", "+0.00042"), (".interval", "± 0.00033")):
                found = f"document.querySelector('.hero .big {selector}')"
                await tab.do(f"{found}.textContent = '{text}'")
            assert not await tab.do(WIDER)
            figure = "document.querySelector('figure')"
            assert await tab.do(f"{figure}.scrollWidth <= {figure}.clientWidth")
            lone = "document.querySelector('.pair:has(figure)')"
            await tab.do(f"{lone}.lastElementChild.remove()")
            share = f"{lone}.firstElementChild.offsetWidth / {lone}.offsetWidth"
            assert await tab.do(share) < 0.6 or width < 600
            hero = "document.querySelector('.hero')"
            assert await tab.do(f"{hero}.scrollWidth <= {hero}.clientWidth")
        await tab.open(f"{server.address}runs/finished/step/2")
        await tab.click("li a.what")
        await tab.do(
            "document.querySelector('.completion .words').textContent = 'Word'.repeat(99);"
            "document.querySelector('.completion').innerHTML += '<i class=advantage></i>'"
        )
        assert await tab.do("document.querySelector('.advantage').offsetWidth") == 7

    in_browser(tmp_path, work)
