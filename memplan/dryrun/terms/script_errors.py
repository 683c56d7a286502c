"""What an error that ends a script is: a fault of its own, or something that cannot be pretended."""

import re
import sys
import traceback

from memplan.dryrun.terms.outcome import Ending
from memplan.dryrun.terms.script_lines import ScriptLines

_OF_META, _FAKE = re.compile(r"\bMeta(\w+)Type\b"), "torch._subclasses.fake_tensor"
"""How torch calls tensors without memory, and where errors of theirs come from that are others on a GPU."""
_FETCHES = ("couldn't connect to 'https://huggingface.co'", "OfflineModeIsEnabled", "LocalEntryNotFoundError")
"""What Hugging Face's libraries say where a name of the hub is not in their cache."""
_FETCHED_NOTHING = (
    "it names a model, a tokenizer or rows of the hub that are not in this machine's cache, and nothing is fetched here: "
    "fetch them once beforehand, or name a folder (of a model its config.json is enough)"
)
_OF_CUDA = ("not linked with support for cuda devices", "arguments from the 'CUDA' backend")
"""What a build of torch without CUDA says of a tensor that its own C++ takes for one of CUDA's."""
_NOT_KNOWN = {
    r"self\.shape_env must not be None|nested_int_memo": "rows of unequal lengths in one tensor (torch.nested) are not known here",
    r"Sparse(Csr)?Meta|got torch\.sparse_|Sparse CSR tensors|aten::_to_sparse": "sparse tensors are not known on the pretended GPU",
    r"Cannot access data pointer of Tensor": "it asks where a tensor's numbers lie (DLPack, code of its own below Python): none are here",
}
"""What torch says of fake tensors where they are nested, sparse, or left (torch/_subclasses/fake_tensor.py, c10/core/StorageImpl.cpp)."""
_NO_FORM = ("UnsupportedOperatorException", "DynamicOutputShapeException", "DataDependentOutputException")
"""What torch's fake tensors raise of operators that they know nothing of (torch/_subclasses/fake_tensor.py)."""
_OF_THE_COMPILER = ("BackendCompilerFailed", "InternalTorchDynamoError", "FailOnRecompileLimitHit")
"""What torch's compiler raises where it is the compiler that fails (torch/_dynamo/exc.py, v2.13.0)."""
_UNREGISTERED = (
    re.compile(r"no fake impl registered for <CustomOpDef\(([\w:]+)\)>"),
    re.compile(r"([\w:]+): attempted to run this operator with Meta tensors, but there was no fake impl"),
)
"""What torch says of its custom operators (torch/_library/custom_ops.py), and of its own (torch/_ops.py, v2.13.0)."""
_HIGHER_ORDER = re.compile(r"There was no rule registered for HigherOrderOperator (\w+) and mode")
"""What torch says of operators that take functions, where no compiler runs them (torch/_ops.py, v2.13.0)."""


def how_it_failed(error: BaseException, lines: ScriptLines) -> tuple[Ending, str]:
    """Tell a fault of the script from what cannot be pretended; show the script's own traceback of the first."""
    own = lines.innermost_of(error.__traceback__)
    text = " ".join(str(error).split())[:300]
    kind = type(error).__name__
    for said, why in _NOT_KNOWN.items():
        if re.search(said, text):
            return "refused", f"{own}: {why}"
    operator = _operator_without_form(error)
    if operator:
        return "refused", (
            f"{own}: {operator} has no form for tensors without memory; give it one in the script with "
            f"torch.library.register_fake({operator!r}), a function that returns empty results"
        )
    if any(words in f"{kind}: {text}" for words in _FETCHES):
        return "refused", f"{own}: {_FETCHED_NOTHING} ({kind})"
    if any(words in str(error) for words in _OF_CUDA):
        return "refused", f"{own}: {_of_cuda(error)} not known on the pretended GPU; run it without"
    higher = _HIGHER_ORDER.search(text)
    if higher:
        return "refused", f"{own}: {higher[1]} outside of compiled code is not known here; torch.compile what calls it"
    if kind in _OF_THE_COMPILER:
        if "No module named 'triton'" in str(error):
            return (
                "refused",
                f"{own}: what is compiled there is a Triton template: pip install triton, which needs no GPU",
            )
        return "refused", f"{own}: torch.compile cannot be pretended here ({text}); run it without"
    said = _OF_META.sub(r"torch.cuda.\1Tensor", str(error))
    if said != str(error) or type(error).__module__ == _FAKE:
        error, kind, text = RuntimeError(said).with_traceback(error.__traceback__), "RuntimeError", said[:300]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if lines.is_shown(frame.filename)]
    shown = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    print(*shown, *traceback.format_exception_only(error), sep="", end="", file=sys.stderr)
    return "failed", f"{own}: {kind}: {text}" if own else f"{kind}: {text}"


def _of_cuda(error: BaseException) -> str:
    """Return what it is that torch's own C++ took for CUDA's."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if any("/torchao/" in file for file in files):
        return "torchao's tensors (quantised weights, states of its optimizers) are"
    if any("/torch/_dynamo/" in file for file in files) and any("/torch/optim/" in file for file in files):
        return "a compiled step of an optimizer is"
    return "tensors of a class of their own are"


def _operator_without_form(error: BaseException) -> str:
    """Return the operator that cannot run on tensors without memory, or nothing where the error is another."""
    if type(error).__name__ in _NO_FORM:
        operator = getattr(error, "func", None)
        return "::".join(str(operator).split(".")[:2])
    said = (form.search(str(error)) for form in _UNREGISTERED)
    return next((match[1] for match in said if match), "")
