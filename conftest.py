"""Every test of this repository may use tests/support, which pyproject.toml puts on the path."""

pytest_plugins = ["ranks"]
