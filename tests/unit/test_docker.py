"""The image and the compose file: settings that a container needs, checked as text, since tests have no Docker."""

from __future__ import annotations

import re
from pathlib import Path

from streams.settings import unknown_variables

DOCKER = Path(__file__).parents[2] / "docker"


def test_the_image_keeps_compiled_kernels_in_its_volume() -> None:
    """NUMBA_CACHE_DIR is a folder of the volume that the image creates, so that only the first start compiles."""
    text = (DOCKER / "Dockerfile").read_text()
    volume = re.search(r"^VOLUME (\S+)$", text, re.MULTILINE)
    cache = re.search(r"\bNUMBA_CACHE_DIR=(\S+)", text)
    assert volume is not None and cache is not None
    assert Path(volume[1]) in Path(cache[1]).parents
    assert f"mkdir -p {cache[1]}" in text
    assert f"chown -R kvstreams {volume[1]}" in text


def test_the_containers_of_the_compose_file_share_compiled_kernels() -> None:
    """The folder of the image is a named volume, which all containers of kvstreams mount."""
    cache = re.search(r"\bNUMBA_CACHE_DIR=(\S+)", (DOCKER / "Dockerfile").read_text())
    assert cache is not None
    assert f"kernels:{cache[1]}" in (DOCKER / "compose.yaml").read_text()


def test_every_variable_of_the_containers_is_a_setting() -> None:
    """A mistyped KVSTREAMS_ variable would have no effect."""
    names = {
        name
        for file in ("Dockerfile", "compose.yaml")
        for name in re.findall(r"\bKVSTREAMS_[A-Z_]+", (DOCKER / file).read_text())
    }
    assert names
    assert unknown_variables(dict.fromkeys(names, "")) == {}
