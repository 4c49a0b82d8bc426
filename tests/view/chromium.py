"""A headless Chromium, driven by its own protocol over a WebSocket: no driver to install."""

import asyncio
import base64
import itertools
import json
import os
import shutil
from contextlib import asynccontextmanager

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE_S = 60.0


class Tab:
    """One page of the browser."""

    def __init__(self, socket):
        self._socket, self._ids = socket, itertools.count(1)
        self._answers, self.events = {}, []

    async def listen(self):
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self.events.append(said)

    async def call(self, method, **params):
        number, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            said = await answer
        assert "error" not in said, f"{method}: {said}"
        return said["result"]

    async def do(self, code):
        """The value of an expression on the page; a promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, code):
        """Wait until an expression is true, and return it; pages in between are no error."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = await self.call("Runtime.evaluate", expression=code, returnByValue=True)
                if value := answer["result"].get("value"):
                    return value
                await asyncio.sleep(0.02)

    async def open(self, address):
        await self.call("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def click(self, selector):
        """A real click of the mouse in the middle of an element; the next page is waited for."""
        name = json.dumps(selector)
        await self.until(f"document.querySelector({name}) !== null")
        await self.do("window.before = true")
        await self.do(f"document.querySelector({name}).scrollIntoView({{block: 'center'}})")
        place = await self.do(
            f"(() => {{ const r = document.querySelector({name}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=place[0], y=place[1], button="left", clickCount=1,
            )  # fmt: skip
        await self.until("!window.before && document.readyState === 'complete'")

    async def press(self, key):
        """A key by its name, such as "j" or "ArrowLeft"."""
        text = key if len(key) == 1 else ""
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def look(self, *, width=1280, height=900, is_dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    async def picture(self):
        """What is seen, as the bytes of a PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def tab(folder):
    """A new browser with one page; `folder` is its own."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    flags += ["--no-first-run", "--disable-extensions", "--disable-dev-shm-usage"]
    process = await asyncio.create_subprocess_exec(
        FOUND, *flags, f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"HOME": str(folder)},
    )  # fmt: skip
    try:
        port = await _port(process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = await answer.json()
            address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                made = Tab(socket)
                listening = asyncio.create_task(made.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await made.call(f"{domain}.enable")
                yield made
                listening.cancel()
    finally:
        process.kill()
        await process.wait()


async def _port(process):
    async with asyncio.timeout(PATIENCE_S):
        while line := (await process.stderr.readline()).decode():
            if "DevTools listening on" in line:
                return line.split("127.0.0.1:")[1].split("/")[0]
    raise AssertionError("Chromium did not start")
