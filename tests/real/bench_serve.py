"""`python -m tests.real.bench_serve`: vLLM's own load generator against the front, in several routing modes.

What lives here: `vllm bench serve` with prompts that share prefixes, and what its engines found in their caches. What
must not: the comparison of single answers (agreement). All prefixes together fit in the caches of both engines, and not
in one of them. vLLM's own counters say how many tokens were found.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import click

from tests.real.engine import ANSWER_TIMEOUT_S, RealEngine
from tests.real.environment import FULL, environment, missing, model_folder
from tests.real.fleet import running

#: Each engine has 19,200 tokens of cache.
FLAGS = ("--num-gpu-blocks-override", "600")
N_PREFIXES = 60
PREFIX_TOKENS = 448
SUFFIX_TOKENS = 64
OUTPUT_TOKENS = 8

MODES = ("expected-time", "kv", "round-robin")

_FOUND = re.compile(r"^vllm:prefix_cache_(queries|hits)_total{[^}]*} ([\d.e+]+)$", re.MULTILINE)


def counted(engine: RealEngine) -> dict[str, float]:
    """How many prompt tokens an engine has looked up, and how many it found, by its metrics."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=ANSWER_TIMEOUT_S) as page:
        return {what: float(n) for what, n in _FOUND.findall(page.read().decode())}


def bench(url: str, n_prompts: int, rate: float, directory: Path) -> dict[str, Any]:
    """Run vLLM's load generator, and return its result. Raises CalledProcessError with its output if it fails."""
    options = {
        "backend": "openai",
        "base-url": url,
        "model": FULL,
        "tokenizer": str(model_folder(FULL)),
        "dataset-name": "prefix_repetition",
        "num-prompts": str(n_prompts),
        "prefix-repetition-num-prefixes": str(N_PREFIXES),
        "prefix-repetition-prefix-len": str(PREFIX_TOKENS),
        "prefix-repetition-suffix-len": str(SUFFIX_TOKENS),
        "prefix-repetition-output-len": str(OUTPUT_TOKENS),
        "request-rate": str(rate),
        "seed": "1",
        "result-dir": str(directory),
        "result-filename": "result.json",
    }
    command = [str(environment() / "bin" / "vllm"), "bench", "serve", "--save-result", "--disable-tqdm"]
    for name, value in options.items():
        command += [f"--{name}", value]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ended.returncode:
        raise click.ClickException(ended.stdout[-4000:])
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


@click.command()
@click.option("--prompts", "n_prompts", default=300, show_default=True)
@click.option("--rate", default=4.0, show_default=True, help="requests per second")
@click.option("--mode", "modes", multiple=True, default=MODES, show_default=True, help="routing modes")
def main(n_prompts: int, rate: float, modes: tuple[str, ...]) -> None:
    """Send the same prompts in each routing mode, to two new engines each time. Exits with 1 if a request failed."""
    reason = missing()
    if reason is not None:
        raise click.ClickException(reason)
    failed = 0
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix="kvstreams-real-") as name:
            directory = Path(name)
            engines = [RealEngine(number, FULL, directory / "engines", FLAGS) for number in (1, 2)]
            with running(engines, directory, router_mode=mode) as fleet:
                result = bench(fleet.front.url, n_prompts, rate, directory)
                counts = [counted(engine) for engine in engines]
        looked_up, found = (sum(count.get(what, 0.0) for count in counts) for what in ("queries", "hits"))
        failed += n_prompts - result["completed"]
        click.echo(
            f"{mode}: {result['completed']} of {n_prompts} answered; {found:.0f} of {looked_up:.0f} prompt tokens "
            f"({found / looked_up:.1%}) were cached; TTFT {result['mean_ttft_ms']:.0f} ms, p99 "
            f"{result['p99_ttft_ms']:.0f} ms"
        )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
