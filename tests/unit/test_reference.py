"""The parts of the documentation that are made from the code are those that the code has now."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from streams.settings import Settings
from tests.helpers.pages import PAGES, ROOT
from tools import drawn_rules, reference, reference_tables


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- generated: " in (ROOT / page).read_text()])
def test_the_generated_parts_of_a_page_are_up_to_date(page: str) -> None:
    """`python -m tools.reference` would not change the page."""
    text = (ROOT / page).read_text()
    assert reference.rewritten(text) == text, f"{page} is out of date: run .venv/bin/python -m tools.reference"


def test_each_generated_part_is_on_one_page() -> None:
    """No part is missing, and none is there twice."""
    names = Counter(name for page in PAGES for name in reference.names_of((ROOT / page).read_text()))
    assert names == Counter(list(reference.PARTS))


def test_every_module_has_a_header() -> None:
    """Each module of the package has a docstring; apart from commands and packages, it says what lives there."""
    for path in sorted((ROOT / "streams").rglob("*.py")):
        header = reference_tables.header_of(path)
        assert header, f"{path} has no header"
        if path.name != "__init__.py" and path.parent.name not in ("cli", "commands", "checks"):
            assert "What lives here" in header, f"{path} does not say what lives there"


def test_the_page_on_the_architecture_stays_short() -> None:
    """Details have pages of their own."""
    assert (ROOT / "docs/architecture.md").stat().st_size <= 30_000


def test_a_batch_has_seven_effects() -> None:
    """The diagram has all of them."""
    assert len(drawn_rules.effects()) == 7


def test_the_units_of_settings_come_from_their_names() -> None:
    """A setting with a unit in its help has it in its name too."""
    assert reference_tables.unit_of("booking_ttl_s") == "s"
    assert reference_tables.unit_of("pool_gb_per_s") == "GB/s"
    assert all(
        reference_tables.unit_of(each.name)
        for each in fields(Settings)
        if "milliseconds" in each.metadata["help"] and isinstance(each.default, int)
    )
