"""What the documentation shows, works: its Python runs, its links lead somewhere, the docstrings' examples hold.

How a page says what is to be done with its next block of Python, in an HTML comment before it:

- nothing: it is run, in an empty folder; the blocks of one page share their names, from the top to the bottom;
- `<!-- no-run: why -->`: it is only compiled;
- `<!-- run: s3 -->`: it is run against the tests' S3 server: the environment has credentials and the address, and
  every bucket that an `s3://bucket` in the block names is there.
"""

from __future__ import annotations

import doctest
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

if TYPE_CHECKING:
    from tests.conftest import S3

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted([*(ROOT / "lsm").rglob("*.py"), *(ROOT / "saver").rglob("*.py")])

BLOCK = re.compile(
    r"^(?: *<!-- (?P<mark>[^\n]*?) -->\n\s*)? *(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<source>.*?)^ *(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)|^\[[^\]]+\]: +(?P<reference>\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of Python on a page.

    Attributes:
        line: The line of the page that its first line is.
        mark: The comment before it, or an empty string.
    """

    line: int
    mark: str
    source: str


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    return [
        Block(text.count("\n", 0, found.start("source")) + 1, found["mark"] or "", dedent(found["source"]))
        for found in BLOCK.finditer(text)
        if found["language"] == "python"
    ]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them; blocks of code have none."""
    headings = HEADING.findall(BLOCK.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_on_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        # The empty lines make line numbers in a traceback those of the page.
        code = compile("\n" * (block.line - 1) + block.source, str(page), "exec", dont_inherit=True)
        match block.mark.partition(": "):
            case ("", _, _):
                pass
            case ("run", _, "s3"):
                offer_s3(request.getfixturevalue("s3"), block.source, monkeypatch)
            case ("no-run", _, why) if why:
                continue
            case _:
                pytest.fail(f"{name(page)}, line {block.line - 2}: what is <!-- {block.mark} -->?")
        exec(code, names)


def offer_s3(s3: S3, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bucket in set(re.findall(r"s3://([a-z0-9.-]+)", source)):
        s3.server.make_bucket(bucket)
    options = s3.store_options
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["aws_endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["aws_access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["aws_secret_access_key"])
    monkeypatch.setenv("AWS_REGION", options["aws_region"])
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for found in LINK.finditer(re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text))):
        target = found["target"] or found["reference"]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name(page)}: {target} is not there"
        assert linked.is_relative_to(ROOT), f"{name(page)}: {target} is outside of the project"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{name(page)}: no heading for {target}"


@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_examples_in_docstrings_hold(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = source.relative_to(ROOT / "saver" if source.is_relative_to(ROOT / "saver") else ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0


def test_tests_that_a_page_names_exist() -> None:
    """A file by its path, and what is in it by its name, after the path and in the same row or paragraph."""
    named = 0
    for page in PAGES:
        for row in re.split(r"\n\n|\n(?=[|-])", page.read_text(encoding="utf-8")):
            files = re.findall(r"`(tests/[\w/]+\.py)`", row)
            source = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
            for test in re.findall(r"`(test_\w+)`", row):
                assert f"def {test}(" in source, f"{name(page)}: there is no {test} in {files}"
            named += len(files)
    assert named > 20


def test_blocks_are_found_with_their_marks_and_lines() -> None:
    marked = "<!-- no-run: needs a bucket -->\n```python\na = 1\n```\n"
    quoted = "````md\n```python\nno\n```\n````\n"
    indented = "1. Do:\n\n   ```python\n   if b:\n       c\n   ```\n"
    text = f"# Title\n\n{marked}\n{quoted}{indented}"
    assert blocks(text) == [Block(5, "no-run: needs a bucket", "a = 1\n"), Block(16, "", "if b:\n    c\n")]
