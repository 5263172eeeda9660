"""One of two processes that shard data in different ways: the program of tests/train/data/test_alike.py.

Writes the error of each way, or the number of batches.
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.in_processes import join

WAYS = {
    "seed": lambda me: {"seed": me},
    "examples": lambda me: {"source": np.arange(40 - 2 * me)},
    "batch size and tail": lambda me: {"batch_size": 8 * (1 + me), "tail": ("pad", "drop")[me]},
    "epochs": lambda me: {"epochs": 1 + me},
    "content": lambda me: {"source": np.arange(40) + me},
    "type": lambda me: {"source": np.arange(40, dtype=("int32", "float32")[me])},
    "iterable": lambda me: {"source": iter(range(me, 40))},
    "alike": lambda me: {},
}


def main(task):
    join(task)

    import autopar
    from autopar.errors import ProcessMismatchError
    from tests.train.data.test_order import NoPlan

    ended = {}
    for name, options_of in WAYS.items():
        options = {"source": np.arange(40), "batch_size": 8, **options_of(task["process"])}
        data = autopar.data.shard(options.pop("source"), NoPlan(), **options)
        try:
            ended[name] = len(list(data))
        except ProcessMismatchError as error:
            ended[name] = str(error)
    (Path(task["folder"]) / f"result{task['process']}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
