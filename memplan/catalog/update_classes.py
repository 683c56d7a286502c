"""The optimizer classes whose updates were read and traced: what each keeps, and how its scratch memory arises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from memplan.catalog.entries import Form, Optimizer
from memplan.documents.frozen_values import dataclass
from memplan.errors import nearest_match

BUNDLED = "memplan.muon.Muon"
TORCH_ADAMW = "torch.optim.AdamW"
TORCH_MUON = "torch.optim.Muon"
NO_UPDATE = "none"
UNTRACED = "untraced"


@dataclass(frozen=True, slots=True)
class UpdateClass:
    """An optimizer class."""

    keeps: frozenset[str]  # Names of the state tensors that it may keep
    form: Form  # How its scratch memory arises
    fused: bool = False  # Whether it has a fused kernel, which keeps step counters on the device
    needs: Mapping[str, str] = field(default_factory=dict)  # State tensor -> the option without which it is not kept


UPDATE_CLASSES: Mapping[str, UpdateClass] = {
    "adam_mini.Adam_mini": UpdateClass(frozenset(("m", "vmean")), "adam-mini"),
    "bitsandbytes.optim.AdamW8bit": UpdateClass(
        frozenset(("state1", "state2", "absmax1", "absmax2")),
        "in-place",
    ),
    "bitsandbytes.optim.PagedAdamW": UpdateClass(frozenset(("state1", "state2")), "in-place"),
    "lion_pytorch.Lion": UpdateClass(frozenset(("exp_avg",)), "lion"),
    BUNDLED: UpdateClass(
        frozenset(("exp_avg", "exp_avg_sq", "momentum_buffer", "momentum_codes", "step")),
        "chunks",
    ),
    "torch.optim.Adafactor": UpdateClass(frozenset(("row_var", "col_var", "variance", "step")), "adafactor"),
    TORCH_ADAMW: UpdateClass(
        frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")),
        "adamw",
        fused=True,
        needs={"max_exp_avg_sq": "amsgrad"},
    ),
    TORCH_MUON: UpdateClass(frozenset(("momentum_buffer",)), "torch-muon"),
    "torch.optim.SGD": UpdateClass(
        frozenset(("momentum_buffer",)), "in-place", fused=True, needs={"momentum_buffer": "momentum"}
    ),
}
"""Class -> what is known of it. Any other class by its path is traced as it is, and planned as its entry says."""

Path = tuple[str | int, ...]
Problems = Iterator[tuple[Path, str]]


def is_known(implementation: str) -> bool:
    """Tell whether the update of a class was read, or there is none."""
    return implementation in UPDATE_CLASSES or implementation == NO_UPDATE


def optimizer_problems(entry: Optimizer) -> Problems:
    """Yield what in an optimizer's entry contradicts its class or itself, each with its path of keys."""
    yield from _scratch_problems(entry)
    kind = entry.implementation
    if kind in UPDATE_CLASSES:
        yield from _class_problems(entry, UPDATE_CLASSES[kind])
    elif kind not in (NO_UPDATE, UNTRACED) and "." not in kind:
        paths = {path.rpartition(".")[2]: path for path in (*UPDATE_CLASSES, UNTRACED)}
        match = nearest_match(kind, paths)
        known = f"known: {', '.join(paths.values())}, or any other class by its path"
        hint = known if match is None else f"did you mean {paths[match]!r}?"
        yield ("implementation",), f"no class is called {kind!r}; {hint}"
    if (entry.takes == "matrices") != (entry.rest is not None):
        yield ("rest",), "expected the optimizer of all other tensors where takes is matrices, and only there"


def _scratch_problems(entry: Optimizer) -> Problems:
    scratch = entry.scratch
    copies = scratch.all_tensors + scratch.largest_tensor
    if (scratch.form == "copies") != (copies > 0):
        yield (
            ("scratch",),
            "all_tensors and largest_tensor count the copies of form copies, which needs one of them, and of no other",
        )
    if (scratch.form == "chunks") != (entry.implementation == BUNDLED):
        yield ("scratch", "form"), f"chunks is what {BUNDLED} takes, and nothing else; got {scratch.form}"
    if scratch.form == "untraced" and entry.implementation != UNTRACED:
        yield ("scratch", "form"), f"untraced says that {entry.implementation} is not modelled; say what it takes"
    if entry.implementation == BUNDLED and entry.bundled is None:
        yield ("bundled",), f"required with {BUNDLED}: adamw or muon"


def _class_problems(entry: Optimizer, known: UpdateClass) -> Problems:
    if entry.scratch.form != known.form:
        yield ("scratch", "form"), f"{entry.implementation} takes {known.form}, not {entry.scratch.form}"
    names = list(dict.fromkeys(slot.name for slot in (*entry.slots, *entry.exempt_slots)))
    if unknown := [name for name in names if name not in known.keeps]:
        states = ", ".join(sorted(known.keeps))
        yield ("slots",), f"keeps {', '.join(unknown)}, which {entry.implementation} does not; it keeps {states}"
    for name in names:
        option = known.needs.get(name)
        if option is not None and option not in entry.options:
            yield ("options",), f"{entry.implementation} keeps {name} with option {option} alone, which is not given"
