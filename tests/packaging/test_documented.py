"""What is public is in the reference: C and C++, Python, the ops of torch, commands and environment variables.

The pages are those in the folder that PHALANX_DOCS_HTML names, as the part docs of .ci/run has built them; without it
they are built here, which takes a minute or two. `python tests/packaging/test_documented.py FOLDER` prints how many
names of each kind the pages in a folder have.
"""

import functools
import html
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "core" / "include" / "phalanx"
C_HEADERS = [*INCLUDE.glob("*.h"), ROOT / "core" / "torch" / "phalanx_torch.h"]
PACKAGES = ("core", "collectives", "symm_mem", "dtensor", "inductor_plugin")
PRIVATE = re.compile(r"_private_|PRIVATE|_H$|^PHX_(API|FN)$")


# ---- what is public --------------------------------------------------------------------------------------------------


def in_headers(pattern: str) -> set[str]:
    """What a pattern finds in the C headers, without what is private to them."""
    texts = [path.read_text() for path in C_HEADERS]
    found = {name for text in texts for name in re.findall(pattern, text, re.MULTILINE)}
    return {name for name in found if not PRIVATE.search(name)}


def c_functions() -> set[str]:
    """The symbols of libphalanx by its version script, those of libphalanx_torch, and the functions of device.h."""
    symbols = set(re.findall(r"^    (phx_\w+);", (ROOT / "core" / "abi" / "libphalanx.map").read_text(), re.MULTILINE))
    return symbols | in_headers(r"^PHX_API\s[^;(]*?\b(phxt_\w+)\(") | in_headers(r"^PHX_FN\s[^;(]*?\b(phx_\w+)\(")


def c_names() -> set[str]:
    """Types, constants and macros."""
    types = in_headers(r"^typedef (?:struct|int32_t) (\w+)") | in_headers(r"^typedef .*\(\*(\w+)\)")
    return types | in_headers(r"\b(PHX_[A-Z0-9_]+) = ") | in_headers(r"^#define (PHXT?_\w+)")


def cpp_names() -> set[str]:
    """The classes, functions and constants of namespace phalanx."""
    text = (INCLUDE / "phalanx.hpp").read_text()
    text = re.sub(r"^namespace detail \{.*?^\}  // namespace detail", "", text, flags=re.MULTILINE | re.DOTALL)
    classes = re.findall(
        r"^(?:enum class|class|struct) (?:\[\[nodiscard\]\] )?(\w+)(?= |;|$)(?! <|::)", text, re.MULTILINE
    )
    functions = re.findall(r"^(?:inline|constexpr) [^=\n(]*?(\w+)\(", text, re.MULTILINE)
    members = re.findall(r"^inline [^\n(]*\w+::\w+\(", text, re.MULTILINE)  # defined behind their class
    behind = {re.search(r"(\w+)\($", member)[1] for member in members}  # type: ignore[index]
    return {f"phalanx::{name}" for name in {*classes, *functions} - behind}


def python_names() -> set[str]:
    """The names in `__all__` of the public modules; without it, what a module defines and its package does not have."""
    found = set()
    for package in PACKAGES:
        top = importlib.import_module(f"phalanx.{package}")
        names = [top.__name__, *(each.name for each in pkgutil.walk_packages(top.__path__, f"{top.__name__}."))]
        for name in names:
            if any(part.startswith("_") for part in name.split(".")):
                continue
            module = importlib.import_module(name)
            if hasattr(module, "__all__"):
                found |= {f"{name}.{each}" for each in module.__all__}
                continue
            own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
            exported = getattr(sys.modules[name.rpartition(".")[0]], "__all__", ())
            defined = [key for key in own if inspect.isclass(vars(module)[key]) or inspect.isroutine(vars(module)[key])]
            found |= {f"{name}.{key}" for key in defined if not key.startswith("_") and key not in exported}
    return found


def ops() -> set[str]:
    """The registered ops."""
    import torch

    for package in PACKAGES[1:]:
        importlib.import_module(f"phalanx.{package}")
    names = torch._C._dispatch_get_all_op_names()
    listed = ("phalanx::", "phalanx_ordered::", "phalanx_c10d::", "phalanx_dtensor::")
    return {"torch.ops." + name.replace("::", ".") for name in names if name.startswith(listed)}


def options_of_commands() -> set[str]:
    """Each command of `phalanx`, and each option in its help."""
    phalanx = [sys.executable, "-c", "from phalanx.core._cli import main; raise SystemExit(main())"]
    found = set()
    for command in ("doctor", "version", *(point.name for point in entry_points(group="phalanx.commands"))):
        ran = subprocess.run([*phalanx, command, "--help"], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", ran.stdout)) - {"--help"}
        found |= {f"phalanx {command}"} | {f"phalanx {command} {option}" for option in options}
    return found


def environment_variables() -> set[str]:
    """The variables in the table of the library, where it has one, and those that the sources ask for."""
    table = importlib.util.find_spec("phalanx.core.environment")
    listed = importlib.import_module("phalanx.core.environment").variables() if table else ()
    sources = [*(ROOT / "core" / "src").rglob("*.[ch]pp"), *(ROOT / "core" / "src").rglob("*.h")]
    sources += [*(ROOT / "core" / "torch").glob("*.cpp"), *(ROOT / "core" / "python").rglob("*.py")]
    sources += [*(ROOT / "packages").glob("*/src/**/*.py"), *(ROOT / "tools" / "src").rglob("*.py")]
    texts = [path.read_text() for path in sources]
    asked = r"(?:getenv\(|environ\.get\(|environ\[|environ\.setdefault\(|getenv\()\"(PHALANX_[A-Z_]+)\""
    return {row.name for row in listed} | {name for text in texts for name in re.findall(asked, text)}


# ---- what is documented ----------------------------------------------------------------------------------------------


@functools.cache
def inventory(folder: Path) -> dict[str, set[str]]:
    """The names in objects.inv, by domain."""
    _, _, _, _, packed = (folder / "objects.inv").read_bytes().split(b"\n", 4)
    found: dict[str, set[str]] = {}
    for line in zlib.decompress(packed).decode().splitlines():
        match = re.match(r"(.+?) (\w+):([\w-]+) -?\d+ (\S+)", line)
        assert match, line
        found.setdefault(match[2], set()).add(match[1])
    return found


@functools.cache
def page(folder: Path, name: str) -> str:
    """The text of a page of the reference, with a line `## TITLE` where a section begins."""
    path = folder / "reference" / f"{name}.html"
    text = re.sub(r"<h2>(.*?)<a ", r"\n## \1\n<a ", path.read_text() if path.exists() else "")
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def has_command(folder: Path, name: str) -> bool:
    """Whether the page of the commands has a command, and its option in the section of the command."""
    program, _, option = name.partition(" --")
    text = page(folder, "commands")
    section = re.search(rf"^## {program}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if not option:
        return f"{program} " in text or f"{program}\n" in text
    return section is not None and re.search(rf"(?<![\w-])--{option}(?![\w-])", section[1]) is not None


def has_variable(folder: Path, name: str) -> bool:
    """Whether the page of the environment variables has one."""
    return re.search(rf"\b{name}\b", page(folder, "environment")) is not None


def is_in_inventory(domain: str) -> Callable[[Path, str], bool]:
    return lambda folder, name: name in inventory(folder).get(domain, ())


KINDS: dict[str, tuple[Callable[[], set[str]], Callable[[Path, str], bool]]] = {
    "functions of C": (c_functions, is_in_inventory("c")),
    "types, constants and macros of C": (c_names, is_in_inventory("c")),
    "names of C++": (cpp_names, is_in_inventory("cpp")),
    "names of Python": (python_names, is_in_inventory("py")),
    "ops of torch": (ops, is_in_inventory("py")),
    "commands and their options": (options_of_commands, has_command),
    "environment variables": (environment_variables, has_variable),
}


def counts(folder: Path) -> Iterator[tuple[str, int, list[str]]]:
    """The number of names of each kind, and those of them that the pages lack."""
    for kind, (public, is_documented) in KINDS.items():
        names = public()
        yield kind, len(names), sorted(name for name in names if not is_documented(folder, name))


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages."""
    given = os.environ.get("PHALANX_DOCS_HTML")
    if given:
        return Path(given)
    if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None:
        pytest.skip("Sphinx and what docs/conf.py needs are not installed")
    folder = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(ROOT / "docs"), str(folder)]
    subprocess.run(command, check=True, timeout=320)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_public_name_is_in_the_reference(kind: str, pages: Path) -> None:
    public, is_documented = KINDS[kind]
    names = public()
    assert names
    assert sorted(name for name in names if not is_documented(pages, name)) == []


def test_functions_of_c_say_what_their_parameters_mean_and_who_calls_them(pages: Path) -> None:
    found = set()
    for path in sorted((pages / "reference" / "c").glob("*.html")):
        for entry in path.read_text().split('<dl class="c function">')[1:]:
            head, _, body = entry.partition("<dd>")
            body = body.partition('<dl class="c ')[0]
            names = re.findall(r'id="c\.(\w+)"', head)
            text = re.sub(r"\(\*(\w+)\)\([^()]*\)", r"\1", html.unescape(re.sub(r"<[^>]+>", "", head)))
            listed = re.findall(r"\(([^()]*)\)", text)
            parameters = {word for each in listed for word in re.findall(r"(\w+)(?=,|$)", each)} - {"void"}
            assert parameters == set(re.findall(r"<strong>(\w+)</strong> \W (?!</p>)", body)), names
            assert "Called by" in body or path.stem == "device", names
            found |= set(names)
    assert found == c_functions()


def test_what_is_not_documented_is_seen(pages: Path) -> None:
    for kind, (_, is_documented) in KINDS.items():
        assert not is_documented(pages, "phalanx nothing --nothing"), kind


if __name__ == "__main__":
    for kind, total, missing in counts(Path(sys.argv[1])):
        print(f"{kind}: {total - len(missing)} of {total}", *missing[:8] if "-v" in sys.argv else ())
