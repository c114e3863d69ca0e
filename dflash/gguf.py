"""A .gguf file (llama.cpp's format) turned into a plain Transformers folder. Knows nothing of pins and data roots."""

import importlib.util
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash.manifests import HOST, remove_leftovers

log = logging.getLogger(__name__)


def convert_gguf(path: Path, folder: Path) -> None:
    """Turn a .gguf file into a plain Transformers folder, written aside and renamed; a folder that is there is kept.

    Weights come out as bfloat16 where the file has any in bfloat16, else as float16, whose finer steps hold dequantised
    weights best. Raises ValueError where a package that reading it needs is missing.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(missing)
        raise ValueError(f"verifier.model: reading {path} needs more packages; run: pip install {packages}")
    from gguf import GGMLQuantizationType, GGUFReader  # an extra: only those with a .gguf file need it

    kinds = {tensor.tensor_type for tensor in GGUFReader(path).tensors}
    dtype = torch.bfloat16 if GGMLQuantizationType.BF16 in kinds else torch.float16
    log.info("converting %s to %s in %s", path, dtype, folder)
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "local_files_only": True,
    }
    unpack: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # weights stay packed, and cannot be saved, unless unpacking is asked for
        unpack["quantization_config"] = transformers.GgufConfig(dequantize=True)
    aside = folder.with_name(f".{folder.name}.{HOST}.{os.getpid()}")
    remove_leftovers(folder.parent, folder.name)
    try:
        AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, **unpack).save_pretrained(aside)
        AutoTokenizer.from_pretrained(**source).save_pretrained(aside)
        if not folder.exists():
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
