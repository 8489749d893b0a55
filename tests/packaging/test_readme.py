"""What the README shows is what the repository holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EXCERPT = re.compile(r"^<!-- excerpt (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = re.compile(r"^<!-- run -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^<!-- command (\w+) -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("path", "text"), EXCERPT.findall(README))
def test_every_code_block_is_an_excerpt_of_a_file_that_runs(path: str, text: str) -> None:
    assert text in (ROOT / path).read_text()


def test_every_program_is_shown_whole() -> None:
    for path, text in EXCERPT.findall(README):
        assert path.endswith("CMakeLists.txt") or text == (ROOT / path).read_text(), path


def test_every_code_block_is_a_command_a_way_to_run_or_an_excerpt() -> None:
    blocks = [*EXCERPT.findall(README), *COMMAND.findall(README), *RUN.findall(README)]
    assert README.count("\n```") == 2 * len(blocks)


def test_every_program_in_python_is_run_by_torchrun() -> None:
    programs = [path for path, _ in EXCERPT.findall(README) if path.endswith(".py")]
    assert [text for text in RUN.findall(README) if "torchrun" in text] == [
        f".venv/bin/torchrun --nproc-per-node 2 {path}\n" for path in programs
    ]


def test_there_are_two_commands_and_each_is_one_line() -> None:
    commands = dict(COMMAND.findall(README))
    assert list(commands) == ["install", "test"]
    assert all(text.count("\n") == 1 for text in commands.values())


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_every_link_of_the_readme_leads_to_a_file(target: str) -> None:
    assert "://" not in target
    assert (ROOT / target).exists()
