"""`python -m phalanx.dtensor._demo`: the same as `phalanx demo`."""

import sys

from phalanx.dtensor._demo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
