"""Headless Chromium, spoken to over pipes in the Chrome DevTools Protocol; nothing but the browser is needed.

`python -m tests.browser PAGE.html PICTURE.png --width 375 --dark` takes the pictures of docs/images.
"""

import argparse
import base64
import contextlib
import dataclasses
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT_S = 120.0
SCHEMES = ("light", "dark")

_PAINTED = """new Promise(resolve => {
  const found = () => performance.getEntriesByName("first-contentful-paint")[0];
  const look = () => found() ? resolve(found().startTime / 1000) : setTimeout(look, 5);
  look();
})"""
_WIDER = "Math.max(0, document.documentElement.scrollWidth - document.documentElement.clientWidth)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What was seen of a page: what the browser complained of, the addresses that it asked for beside the page's own,
    seconds until the first paint with content, until the load event, and pixels by which it is wider than its window.
    """

    errors: tuple[str, ...]
    requests: tuple[str, ...]
    first_paint_s: float
    load_s: float
    overflow: int


class Page:
    """A tab. `evaluate` waits for promises; `events` are those of the protocol so far."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest, self._number = read, write, b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the protocol. Raises: RuntimeError, TimeoutError."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._message(end_s)
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript. Raises: RuntimeError where it throws."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """A window of this many pixels, and the colours that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def visit(self, address: str) -> Visit:
        """Opens a page until it is loaded and painted."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        self._until("Page.loadEventFired")
        first_paint_s = self.evaluate(_PAINTED)
        load_s = self.evaluate("performance.getEntriesByType('navigation')[0].loadEventStart / 1000")
        overflow = self.evaluate(_WIDER)
        return Visit(
            errors=tuple(_complaints(self.events)),
            requests=tuple(_requests(self.events, address)),
            first_paint_s=first_paint_s,
            load_s=load_s,
            overflow=overflow,
        )

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Writes what the window shows as PNG, or the whole page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _until(self, method: str) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._message(end_s))

    def _message(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._read], [], [], left_s)[0]:
                raise TimeoutError(f"the browser said nothing for {TIMEOUT_S} s")
            read = os.read(self._read, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A tab in a browser of its own, which ends with the block."""
    assert CHROMIUM is not None, "no chromium is installed"
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        # Pages get nothing from outside, also where there is a network.
        options += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        # The protocol is read from descriptor 3 and written to 4; the shell puts them there whatever their numbers are.
        command = 'in=$1; out=$2; shift 2; eval "exec \\"\\$@\\" 3<&$in 4>&$out"'
        process = subprocess.Popen(
            ["bash", "-c", command, "bash", str(to_browser), str(from_browser), CHROMIUM, *options, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(read, write)
        finally:
            process.terminate()
            process.wait(timeout=TIMEOUT_S)
            os.close(read)
            os.close(write)


def _complaints(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        values = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            yield json.dumps(values["exceptionDetails"])[:500]
        elif event.get("method") == "Runtime.consoleAPICalled":
            yield f"{values['type']}: {[argument.get('value') for argument in values['args']]}"
        elif event.get("method") == "Log.entryAdded":
            yield f"{values['entry']['level']}: {values['entry']['text']}"


def _requests(events: list[dict[str, Any]], address: str) -> Iterator[str]:
    for event in events:
        if event.get("method") == "Network.requestWillBeSent":
            asked = event["params"]["request"]["url"]
            if asked != address and not asked.startswith("data:"):
                yield asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900, help="0: the whole page")
    parser.add_argument("--dark", action="store_true")
    parsed = parser.parse_args()
    with browser() as page:
        page.resize(parsed.width, parsed.height or 900, "dark" if parsed.dark else "light")
        print(page.visit(parsed.page.resolve().as_uri()))
        page.picture(parsed.picture, whole=not parsed.height)


if __name__ == "__main__":
    main()
