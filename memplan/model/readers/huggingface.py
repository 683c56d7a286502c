"""A released model's ``config.json``, or a directory that holds one, to a :class:`Model`.

Nothing is downloaded and no weights are read: the shapes follow from the config.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memplan.documents.opening import is_file, is_folder, is_standard_input, path_kind, read_text, shown_path
from memplan.documents.strict_json import parse_object
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.families import read_config, with_towers
from memplan.model.families.config_values import INHERITED_KEYS
from memplan.model.model import Model

CONFIG_NAME = "config.json"
ADAPTER_NAME = "adapter_config.json"
INSTEAD = "give the folder of the model's config.json, or a .safetensors or .gguf file"


def read_huggingface(path: Path) -> Model:
    """Return the model that a ``config.json`` describes.

    Args:
        path: The file, or the directory that holds it; ``-`` is standard input.

    Raises:
        InvalidFileError: Unreadable, not JSON, or with keys that are missing or wrong.
        CannotAnswerError: A PEFT adapter, an unknown family, or keys that memplan does not model.
    """
    file = _config_file(path)
    text = read_text(file, instead=INSTEAD)
    source = shown_path(file)
    config = parse_object(text, source)
    if "peft_type" in config:
        raise _adapter_error(source, config)
    inner, notes = _text_part(config, source)
    name = _model_name(file, config)
    spec, more = read_config(inner, name, source, _locator(text, source))
    quantization, about_quantization = quantization_format(config, source)
    model = Model.from_spec(spec, source)
    return replace(
        model,
        quantization=quantization,
        notes=(*notes, *_dtype_note(config, inner), *about_quantization, *more),
    )


def _config_file(path: Path) -> Path:
    """Return the config that ``path`` means, refusing directories with an adapter only."""
    if is_standard_input(path) or not is_folder(path):
        return path
    config, adapter = path / CONFIG_NAME, path / ADAPTER_NAME
    if path_kind(config) != "nothing":
        return config
    if is_file(adapter):
        raise _adapter_error(shown_path(adapter), parse_object(read_text(adapter), shown_path(adapter)))
    raise InvalidFileError([f"{shown_path(path)}: has no {CONFIG_NAME}"])


def _adapter_error(source: str, config: Mapping[str, Any]) -> CannotAnswerError:
    base, rank = config.get("base_model_name_or_path"), config.get("r")
    named = f" ({base!r:.100})" if isinstance(base, str) and base else ""
    ranked = f" --set adapter.rank={rank}" if isinstance(rank, int) and not isinstance(rank, bool) else ""
    return CannotAnswerError(
        f"{source}: a PEFT adapter, which has no shapes of its own; plan its base model{named} "
        f"with --set adapter.kind=lora{ranked}"
    )


def _text_part(config: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the text model's keys, which multimodal configs nest, and a note if they were; a family with towers reads all."""
    inner = config.get("text_config")
    if inner is None or inner == {} or config.get("model_type") in with_towers():
        return config, ()
    if not isinstance(inner, dict):
        raise InvalidFileError([f"{source}: text_config: expected an object with keys, got {str(inner)!r:.40}"])
    inherited = {key: config[key] for key in INHERITED_KEYS if key in config}
    note = f"text model only: the other parts of {config.get('model_type')!r:.60} are left out"
    return inherited | inner, (note,)


def _locator(text: str, source: str) -> Callable[[str], str]:
    """Return a function from a key to ``file:line: key``, at the key's last line, which is the innermost."""

    def locate(key: str) -> str:
        position = text.rfind(f'"{key}"')
        return f"{source}: {key}" if position < 0 else f"{source}:{text[:position].count(chr(10)) + 1}: {key}"

    return locate


def _dtype_note(*configs: Mapping[str, Any]) -> tuple[str, ...]:
    for config in configs:
        for key in ("dtype", "torch_dtype"):
            value = config.get(key)
            if isinstance(value, str) and value:
                return (f"released in {value.removeprefix('torch.'):.30}",)
    return ()


def _model_name(file: Path, config: Mapping[str, Any]) -> str:
    """Return the name of the cache entry, the directory, or the one that the config states."""
    for part in file.parts:
        if part.startswith("models--"):
            return part.split("--")[-1][:100]
    folder = "" if is_standard_input(file) else file.absolute().parent.name
    if folder:
        return folder[:100]
    stated = config.get("_name_or_path")
    return stated.rsplit("/", 1)[-1][:100] if isinstance(stated, str) and stated else "model"


Answer = tuple[str | None, tuple[str, ...]]


def quantization_format(config: Mapping[str, Any], source: str) -> Answer:
    """Return the format that released weights are stored in, or None, and notes about it.

    Formats are named ``nf4``, ``fp4``, ``int8``, ``fp8-e4m3``, ``mxfp4``, ``nvfp4``, and
    ``gptq-int4``, ``awq-int4`` and so on where groups of weights share a scale.

    Args:
        config: All keys of ``config.json``.
        source: The file, for messages.

    Raises:
        InvalidFileError: ``quantization_config`` is no object.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None, ()
    if not isinstance(quantization, dict):
        raise InvalidFileError([f"{source}: quantization_config: expected an object, got {quantization!r:.60}"])
    name = _format_name(quantization)
    if name is None:
        method = quantization.get("quant_method")
        note = f"quantization_config {method!r:.60} is not known: weights are taken as the training config says"
        return None, (note,)
    return name, (f"released weights are quantised: {name}",)


def _format_name(quantization: Mapping[str, Any]) -> str | None:
    method = quantization.get("quant_method")
    if method == "bitsandbytes" or (
        method is None and ("load_in_4bit" in quantization or "load_in_8bit" in quantization)
    ):
        if quantization.get("load_in_4bit") is True:
            kind = quantization.get("bnb_4bit_quant_type", "fp4")
            return kind if kind in ("nf4", "fp4") else None
        return "int8" if quantization.get("load_in_8bit") is True else None
    if method in ("gptq", "awq"):
        bits = quantization.get("bits", quantization.get("w_bit"))
        return f"{method}-int{bits}" if type(bits) is int and 2 <= bits <= 8 else None
    if method in ("fp8", "fbgemm_fp8"):
        return f"fp8-{_text(quantization.get('fmt')) or 'e4m3'}"
    if method == "mxfp4":
        return "mxfp4"
    if method == "compressed-tensors":
        return _compressed_tensors(quantization)
    return None


def _compressed_tensors(quantization: Mapping[str, Any]) -> str | None:
    """Return the format of the weights if all groups of a compressed-tensors config share one."""
    if quantization.get("format") == "nvfp4-pack-quantized":
        return "nvfp4"
    groups = quantization.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    schemes = [group.get("weights") for group in listed if isinstance(group, dict)]
    names = {_scheme(weights) for weights in schemes if isinstance(weights, dict)}
    return names.pop() if len(names) == 1 else None


def _scheme(weights: Mapping[str, Any]) -> str | None:
    bits, kind = weights.get("num_bits"), weights.get("type")
    if type(bits) is not int or not 2 <= bits <= 8:
        return None
    if kind == "float":
        return "fp8-e4m3" if bits == 8 else None
    return f"int{bits}" if kind == "int" else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value in ("e4m3", "e5m2") else None
