"""What the README shows is what the repository holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EXCERPT = re.compile(r"^<!-- excerpt (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^<!-- command (\w+) -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("path", "text"), EXCERPT.findall(README))
def test_every_code_block_is_an_excerpt_of_a_file_that_runs(path: str, text: str) -> None:
    assert text in (ROOT / path).read_text()


def test_every_code_block_is_either_a_command_or_an_excerpt() -> None:
    assert README.count("\n```") == 2 * (len(EXCERPT.findall(README)) + len(COMMAND.findall(README)))


def test_there_are_two_commands_and_each_is_one_line() -> None:
    commands = dict(COMMAND.findall(README))
    assert list(commands) == ["install", "test"]
    assert all(text.count("\n") == 1 for text in commands.values())


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_every_link_of_the_readme_leads_to_a_file(target: str) -> None:
    assert "://" not in target
    assert (ROOT / target).exists()
