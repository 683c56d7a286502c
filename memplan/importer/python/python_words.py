"""Functions, methods and signs of a Python program whose results are known from their arguments, or from the GPU that is asked for."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from textwrap import dedent
from typing import Any

from memplan.importer.python.python_paths import PathText, folder_of
from memplan.importer.shell.expansions import COMPARISONS
from memplan.importer.sources.given_keys import Expression

LOADED = ("safe_load", "yaml_load", "json_load", "json_loads", "full_load", "OmegaConf_load")
"""Functions that read a file of keys, or ``open``'s result."""
VARIABLES = ("os_getenv", "environ_get", "os_environ_get")
"""Functions that return a variable of the environment, or their second argument where it is not set."""
PROCESSES = "WORLD_SIZE"
"""The variable with the number of processes (torch/distributed/run.py); where nothing says it, there is one."""
COUNTED = ("cuda_device_count", "get_world_size")
"""Functions that return how many GPUs a job has."""
YES = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available", "cuda_is_available")
"""Questions that a GPU of compute capability 8.0 and above answers with yes, as memplan takes it where a trainer asks."""
NO = ("mps_is_available", "xpu_is_available", "npu_is_available", "is_torch_xla_available")
"""Questions about other devices than NVIDIA's."""
CAPABILITY = Expression("the first number of the GPU's compute capability")
MAPPED = ("dict", "SimpleNamespace", "Namespace", "OmegaConf_create", "DictConfig", "EasyDict", "DotDict", "AttrDict", "Box", "DictDefault", "ConfigDict")  # fmt: skip
"""Functions that return what they are given as a mapping, whose keys are attributes too."""
CONVERTED: Mapping[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "bool": bool, "len": len, "list": list, "tuple": list, "sorted": sorted, "round": round, "abs": abs, "Path": PathText, "path_dirname": folder_of, "path_abspath": PathText, "path_realpath": PathText, "dedent": dedent, "textwrap_dedent": dedent}  # fmt: skip
"""Functions of one literal, such as that of a variable of the environment, which is text."""
METHODS = ("lower", "upper", "strip", "split", "copy", "removeprefix", "removesuffix", "get", "resolve", "absolute", "expanduser", "as_posix", "joinpath")  # fmt: skip
"""Methods of texts, mappings and paths that change nothing."""
SIGNATURE = re.compile(r"param|signature|fields|supported|accepted|allowed", re.IGNORECASE)
"""Names of what a program asks whether a class takes an argument, as the version that is read does."""
FILTER = re.compile(r"filter|supported|compat|clean|drop|strip|valid", re.IGNORECASE)
"""Names of functions that leave out of a mapping what a class does not take."""
LARGEST = 2**40
LARGEST_VALUE = 100_000
"""Letters and items of a value; a file may double one in each line."""
MOST_STEPS = 100_000

COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    **COMPARISONS,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
COMPUTED: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
MADE = re.compile(r"[\w.]*\b[A-Z]\w*\(")
"""How an expression begins that makes an instance of a class, which is true, and not None."""


_CONSTANT = re.compile(
    r"torch\.(\w+)|(?:\w+\.)*(?:IntervalStrategy|EvaluationStrategy|SaveStrategy|OptimizerNames)\.(\w+)(?:\.value)?"
)
_LONGER = {"adamw_bnb": "adamw_bnb_8bit", "lion": "lion_32bit", "paged_adamw": "paged_adamw_32bit", "paged_ademamix": "paged_ademamix_32bit", "paged_lion": "paged_lion_32bit", "rmsprop_8bit": "rmsprop_bnb_8bit", "rmsprop_32bit": "rmsprop_bnb_32bit"}  # fmt: skip
"""Members of ``OptimizerNames`` whose values say more than their names (transformers/training_args.py, 5.24.0)."""


def constant_of(text: str) -> str:
    """Return what a member of torch, or of an enumeration that transformers' arguments take, is called there; nothing for others.

    Example:
        >>> constant_of("torch.bfloat16"), constant_of("IntervalStrategy.STEPS"), constant_of("OptimizerNames.PAGED_ADAMW")
        ('bfloat16', 'steps', 'paged_adamw_32bit')
    """
    match = _CONSTANT.fullmatch(text)
    if match is None or match[1]:
        return match[1] if match else ""
    return _LONGER.get(match[2].lower(), match[2].lower())
