"""Compile the native fast path for the torch that is installed: python -m phalanx.dtensor.build_native."""

import sys

from phalanx.dtensor import native


def main() -> int:
    """Compile it, whether or not it is there. Returns the exit status: 1 if it cannot be built."""
    try:
        print(native.build())
    except (RuntimeError, OSError) as error:
        print(f"phalanx.dtensor.build_native: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
