"""`python -m autopar.launch`."""

import sys

from autopar.train.launch.command_line import parse
from autopar.train.launch.supervisor import launch

if __name__ == "__main__":
    sys.exit(launch(parse(sys.argv[1:])))
