"""The page of a plan in headless Chromium: no error, nothing requested, and every control does what it says."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import autopar
from autopar.plan.schema import PlanRecord
from tests.plan.records import module, pipeline, program

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT_S = 120
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")

# What a reader does, and what they see then, as JSON in the title.
VISIT = """
<script>
"use strict";
const errors = window.seen;
const rows = () => [...document.querySelectorAll("tr.module")].filter(row => !row.hidden).length;
const search = document.getElementById("search"), canvas = document.getElementById("timeline");
const look = text => { search.value = text; search.dispatchEvent(new Event("input")); return rows(); };
const out = { rows: rows() };
const name = document.querySelector("button.name");
name.focus();
out.focus = document.activeElement === name;
name.click();
out.opened = !name.closest("tr").nextElementSibling.hidden;
name.click();
out.closed = name.closest("tr").nextElementSibling.hidden;
out.found = look("layer1/mlp");
out.told = document.getElementById("found").textContent;
out.missing = look("zzz");
out.cleared = look("");
document.getElementById("fold").click();
out.folded = rows();
document.getElementById("unfold").click();
out.unfolded = rows();
const before = canvas.toDataURL();
canvas.focus();
canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
out.zoomed = document.activeElement === canvas && canvas.toDataURL() !== before;
document.querySelector("[data-zoom=all]").click();
out.whole = canvas.toDataURL() === before;
out.overflow = Math.max(0, document.documentElement.scrollWidth - document.documentElement.clientWidth);
out.images = document.images.length;
out.requests = performance.getEntriesByType("resource").length;
out.errors = errors;
document.title = "RESULT" + JSON.stringify(out) + "END";
</script>
"""
WATCH = "<script>window.seen = []; window.addEventListener('error', e => window.seen.push(e.message));</script>"


def visited(record: PlanRecord, folder: Path, width: int) -> tuple[dict, str]:
    """What a reader of the page sees in a window of this width, and what the browser logged."""
    path = folder / "plan.html"
    autopar.Plan(record).report(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace("<style>", f"{WATCH}<style>", 1).replace("</body>", f"{VISIT}</body>"), encoding="utf-8"
    )
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = re.search(r"<title>RESULT(.*)END</title>", ran.stdout)
    assert found is not None, ran.stderr[-2000:]
    console = "\n".join(line for line in ran.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")), console


@pytest.mark.parametrize("width", [375, 1440])
@pytest.mark.parametrize("record", [program(layers=4), pipeline(layers=4)], ids=["program", "pipeline"])
def test_a_reader_reaches_everything(record, width, tmp_path):
    seen, console = visited(record, tmp_path, width)
    assert console == ""
    modules = 3 if record.pipeline is None else 2
    assert seen == {
        "rows": modules,
        "focus": True,
        "opened": True,
        "closed": True,
        "found": 2,
        "told": "1 found",
        "missing": 0,
        "cleared": modules,
        "folded": 1,
        "unfolded": modules,
        "zoomed": True,
        "whole": True,
        "overflow": 0,
        "images": 0,
        "requests": 0,
        "errors": [],
    }


def test_a_hostile_name_is_shown_as_text(tmp_path):
    hostile = "</script><img src=x onerror=document.title='broken'>"
    seen, console = visited(program(modules=(module(hostile, compute_s=1.0),)), tmp_path, 1440)
    assert (console, seen["images"], seen["errors"]) == ("", 0, [])
