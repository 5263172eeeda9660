"""The code of the tutorial and of the how-to pages runs as it stands there."""

import pytest

from tests.pages import blocks_of, outputs_of, run_page, texts_of
from tests.small_steps import ROOT

DOCS = ROOT / "docs"
TIMEOUT_S = 1200.0

# What each page is seen to print, beside running to its end.
PRINTED = {
    "tutorial": ("loss", "Plan of train_step on dgx-h100", "Instead, under tensor_parallel(size=8):"),
    "fit-a-large-model": ("expected at most 100 MB per device", "under combine(", "the largest batch that fits is"),
    "plan-for-absent-hardware": ("tpu-v5e:2x4: ", "on h100-ethernet", "a million"),
    "from-pjit": ("Plan of train_step on local-cpu-8", "Instead:"),
    "from-fsdp": ("Instead, under zero(3):",),
    "from-trainers": ("0.0",),
    "linen": ("up/kernel",),
    "nnx": ("Plan of train_step on local-cpu-8",),
    "equinox": ("Plan of train_step on local-cpu-8",),
    "haiku": ("Plan of train_step on local-cpu-8",),
    "plain-jax": ("Plan of train_step on local-cpu-8",),
    "explicit-sharding": ("pins", "ignore"),
    "lint": ("8 devices hold the same", "state/moments/up"),
    "command-line": ("Plan of train_step on dgx-h100", "state['w']", '"kind": "plans"', "removed"),
}


def test_a_page_runs(tmp_path):
    assert "pins" in run_page(DOCS / "pin-what-is-known.md", tmp_path, TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_every_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    printed = run_page(DOCS / f"{name}.md", tmp_path, TIMEOUT_S)
    assert not [text for text in PRINTED[name] if text not in printed], printed[-3000:]
    shown = outputs_of(DOCS / f"{name}.md")
    if name == "tutorial":
        shown += texts_of(DOCS / "reading-a-plan.md", "Instead, under tensor_parallel(size=8)")
    assert not [text for text in shown if text not in printed], printed[-9000:]


def test_outputs_that_pages_show_are_found():
    assert [text[:27] for text in outputs_of(DOCS / "tutorial.md")] == ["Plan of train_step on dgx-h"]
    assert len(texts_of(DOCS / "reading-a-plan.md", "Instead, under tensor_parallel(size=8)")) == 1


def test_every_page_of_steps_to_follow_has_code_that_runs():
    assert {name for name in (*PRINTED, "pin-what-is-known") if not blocks_of(DOCS / f"{name}.md")} == set()


def test_a_block_that_fails_fails_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint('one')\n```\n\n```python\nraise ValueError('two')\n```\n")
    with pytest.raises(AssertionError, match=r"(?s)one.*line 6.*two"):
        run_page(page, tmp_path, TIMEOUT_S)
