"""The command line of the benchmarks: `python -m benchmarks NAME --set key=value`."""

import sys

from benchmarks.runner import command

sys.exit(command(sys.argv[1:]))
