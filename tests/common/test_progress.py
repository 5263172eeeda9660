"""The seconds of passes while a plan is made."""

import time

from autopar.common.progress import Progress


def test_a_pass_within_another_one_counts_once_in_the_total():
    progress = Progress("plan", show=False)
    with progress.pass_("search"), progress.pass_("build stages"):
        time.sleep(0.02)
    with progress.pass_("record"):
        time.sleep(0.01)
    spent_s = progress.spent_s
    assert list(spent_s) == ["build stages", "search", "record"]
    assert progress.total_s == spent_s["search"] + spent_s["record"]
