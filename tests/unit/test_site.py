"""The documentation as a site: it builds without a warning, its navigation has every page, and it needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.pages import ROOT
from tools.npm_package import NoPackage
from tools.site import scripts

#: What makes a browser load something: a script, a picture, a style sheet, a font.
LOADED = re.compile(r"""(?:\bsrc|srcset|<link[^>]*\bhref)=["']?((?:https?:)?//[^"'\s>]+)""")
LOADED_BY_STYLES = re.compile(r"url\(\s*[\"']?((?:https?:)?//[^\"')]+)")


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags for Python name functions of mkdocs' extensions."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def leaves(entry: Any) -> Iterator[str]:
    """The pages of an entry of the navigation, in order."""
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from leaves(each)


def test_the_navigation_has_every_page_once() -> None:
    """Each file of docs/ is in one place of the navigation, which has the six sections."""
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]
    assert [name for section in nav for name in section] == [
        *("Start", "Concepts", "Operate", "Integrate", "Reference", "Develop")
    ]
    folder = ROOT / "docs"
    assert sorted(leaves(nav)) == sorted(str(path.relative_to(folder)) for path in folder.rglob("*.md"))


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Every link and anchor resolves, and no page, script or style sheet of the site names a file of another host."""
    try:
        scripts()
    except NoPackage as exc:
        pytest.skip(str(exc))
    built = subprocess.run(
        [sys.executable, "-m", "tools.site", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        text = path.read_text()
        assert not LOADED.findall(text), path
        for file in re.findall(r"""\b(?:src|srcset|href)=["']?([^"'\s>#:]+)["'\s>#]""", text):
            assert (path.parent / file.lstrip("/")).exists(), f"{path.name} names {file}"
    for path in tmp_path.rglob("*.css"):
        assert not LOADED_BY_STYLES.findall(path.read_text()), path
