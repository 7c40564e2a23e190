"""The documentation as a site: `python -m tools.site` builds it with mkdocs into build/site, and fails at a warning.

What lives here: what mkdocs.yml cannot say. mkdocs calls the functions `on_...` of this file (its hooks).
What must not: the pages, and their order (docs/, mkdocs.yml).

A page of the site loads nothing from other places, so the scripts that it needs are copied into the site.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from tools import npm_package

#: Scripts that are copied into the site: what to install, its checksum, and the script in it. The second one lets the
#: search work without a server; mkdocs.yml names its file.
_MERMAID = (
    "mermaid@11.17.2",
    "57a2b70bc101744b0f1595d228c25eea9a50384371b87011afd1af1d7e21878e"
    "e501b84c443f6a7f8a042bb2e869143150b31af34feab798073bbdda0a578106",
    "dist/mermaid.min.js",
)
_IFRAME_WORKER = (
    "iframe-worker@1.0.4",
    "ae879a688f8b8352c935f8290a3a117bff96cc48f2f7e674f0ba04beef393023"
    "db063c26faa5f3f00839534e651dae95d42cac6721b313448e900b52500e6aed",
    "shim/index.js",
)
_FOLDER = "assets/javascripts"

#: A link to a file of the repository that is no page. The site has no such file, so only the text of the link is left.
_LINK_OUT = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


#: A link to a page whose text is the name of its file, as it is good to have in a repository.
_LINK_BY_FILE = re.compile(r"\[[\w-]+\.md\](\(([\w-]+\.md)(?:#[\w-]+)?\))")

#: Diagrams have their natural size, and scroll where the page is narrower. Shrunk, nobody could read them on a phone.
_NATURAL_SIZE = (
    '%%{init: {"themeVariables": {"fontSize": "14px"}, '
    '"flowchart": {"useMaxWidth": false, "nodeSpacing": 30, "rankSpacing": 40}, '
    '"sequence": {"useMaxWidth": false, "actorMargin": 30, "width": 120}, "state": {"useMaxWidth": false}}}%%'
)

#: Where a name in a table may break: behind these characters, so that no line begins in the middle of a word.
_MAY_BREAK = re.compile(r"(::|[_/=,])(?=[\w{])")
_CELL, _CODE = re.compile(r"(?<!<tr>\n)<td.*?</td>", re.DOTALL), re.compile(r"(?<=<code>)[^<]+")


def scripts() -> dict[str, Path]:
    """The scripts and their licences by their names in the site; they are downloaded once. Raises NoPackage."""
    found: dict[str, Path] = {}
    for package, sha512, script in (_MERMAID, _IFRAME_WORKER):

        def keep(unpacked: Path, folder: Path, script: str = script) -> None:
            shutil.copy(unpacked / script, folder / "script.js")
            shutil.copy(unpacked / "LICENSE", folder)

        name, folder = package.partition("@")[0], npm_package.installed(package, sha512, keep)
        found |= {f"{name}.js": folder / "script.js", f"{name}.LICENSE.txt": folder / "LICENSE"}
    return found


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Links to files of the repository become text, links named by a file get the page's title, diagrams their size."""
    folder = Path(config["docs_dir"])
    markdown = _LINK_OUT.sub(r"\1", markdown)
    markdown = _LINK_BY_FILE.sub(lambda link: f"[{_title(folder / link[2])}]{link[1]}", markdown)
    return markdown.replace("```mermaid\n", f"```mermaid\n{_NATURAL_SIZE}\n")


def _title(page: Path) -> str:
    """The title of a page, without what comes after a colon."""
    with page.open() as lines:
        return next(lines).removeprefix("# ").partition(":")[0].strip()


def on_page_content(html: str, **_: Any) -> str:
    """Names in tables may break between their words, except those that begin a row."""
    return _CELL.sub(lambda cell: _CODE.sub(lambda code: _MAY_BREAK.sub(r"\1<wbr>", code[0]), cell[0]), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A page with a diagram loads the script before the theme's own, which then does not ask for it elsewhere."""
    if '<pre class="mermaid">' not in output:
        return output
    up = "../" * page.url.count("/")
    return output.replace("</head>", f'<script src="{up}{_FOLDER}/mermaid.js"></script></head>', 1)


def on_post_build(config: Any, **_: Any) -> None:
    """Copy the scripts into the site."""
    folder = Path(config["site_dir"]) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in scripts().items():
        shutil.copy(path, folder / name)


def main() -> None:
    """Build the site, or run another command of mkdocs: `python -m tools.site serve` shows changes while you write."""
    # The theme's note about versions of mkdocs that are not used here would look like a warning.
    os.environ["DISABLE_MKDOCS_2_WARNING"] = "true"
    from mkdocs.__main__ import cli

    cli(sys.argv[1:] or ["build", "--strict"])


if __name__ == "__main__":
    main()
