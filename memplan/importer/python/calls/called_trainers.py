"""TRL and transformers in Python: what a program gives their classes and PEFT's, in the keys that TRL's own parser takes."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memplan.importer.python.calls.called_names import (
    CONFIGS,
    DIRECT,
    DIRECT_CALLS,
    MODEL,
    OF_TRAINERS,
    OTHER_ADAPTERS,
    OWN,
    PLAIN,
    PLAIN_ARGUMENTS,
    PLAIN_DEFAULTS,
    RENAMED,
    TRAINERS,
)
from memplan.importer.python.calls.embedding_calls import PACKAGES, TRAINER, model_and_loss
from memplan.importer.python.python_literals import LENGTHS, TOKENIZER
from memplan.importer.python.python_settings import FROM_FILES, PARSED
from memplan.importer.python.python_words import VARIABLES
from memplan.importer.sources.conditions import is_on
from memplan.importer.sources.given_keys import MISSING, Expression, GivenKeys, Loaded

TRAINING = ("train", "hyperparameter_search")
EVALUATES = ("trainer_evaluate", "trainer_predict")
"""Methods that run the model over other rows, before or after training."""
OTHERWISE = ("_evaluate", "_predict", "_generate")
"""Methods that a program calls in place of those, which trains nothing then."""
OWN_PARTS: Mapping[str, str] = {
    "optimizers": "an optimizer that the trainer makes: the program gives it one; optim of its arguments is read",
    "optimizer_cls_and_kwargs": "an optimizer that optim of the trainer's arguments names: the program gives it a class",
    "compute_loss_func": "the trainer's own loss: compute_loss_func is the program's",
}
"""Keyword of a trainer -> what it would have to be without it (transformers/trainer.py, 5.24.0)."""
SCORED, SCORES = ("GRPOTrainer", "RLOOTrainer"), "ForSequenceClassification_from_pretrained"
"""Trainers of completions, whose ``reward_funcs`` may name or be a model (trl/trainer/grpo_trainer.py, 1.16.0, line 551)."""
POLICY_TRAINER, QUANTISES = "PPOTrainer", ("quantization_config", "load_in_4bit", "load_in_8bit")
"""The trainer of a policy, and keywords by which a model of its own is loaded as codes."""
OLD_POLICY, OLD_SCRIPT = "AutoModelForCausalLMWithValueHead", "stepped_ppo"
"""The policy of TRL's PPOTrainer before 0.12, which has a head of values of its own and whose ``step`` a program calls."""
KERNELS = ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp")
"""Functions of ``torch.backends.cuda`` that switch kernels of attention off."""
CAST = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
"""Methods of a model that cast all of its weights."""
KBIT = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
UNSLOTH = re.compile(r"Fast(Language|Vision|Text)?Model")
"""Classes of unsloth's, whose arguments are read with its own defaults."""


def trains(keys: GivenKeys) -> bool:
    """Whether a program calls unsloth, or a trainer that is read."""
    return any(name in TRAINERS or name in PLAIN or UNSLOTH.search(name) for name in keys.words) or bool(_direct(keys))


def reads_file(keys: GivenKeys) -> bool:
    """Whether a program's parser reads a file of keys into classes of the program's own; TRL's own scripts have TRL's ``ModelConfig``."""
    return any(word.endswith(FROM_FILES) for word in keys.words) and "ModelConfig" not in keys.words


def _direct(keys: GivenKeys) -> str:
    """Return what a program gives another trainer, by the name of the class or function; nothing where it calls none."""
    starts = any(word in DIRECT_CALLS or word.endswith(DIRECT_CALLS[:4]) for word in keys.words)
    return next((name for name in DIRECT if starts and _given(keys, name)), "")


def trainer_keys(keys: GivenKeys) -> GivenKeys:
    """Return a trainer's keys where a program calls it with arguments that stand in it; else the keys as they are."""
    called = next((name for name in (*TRAINERS, *PLAIN) if name in keys.words), None)
    arguments = next((name for name in CONFIGS if name in keys.words), None)
    own = called is not None and called in TRAINERS and arguments is None
    if called is not None and own and not {"args", "1"} & _given(keys, called).keys():
        arguments = f"{called.removesuffix('Trainer')}Config"  # it makes its own
    if direct := _direct(keys):
        given = _given(keys, direct)
        inner = given.get("0")
        data = inner if isinstance(inner, dict) else given
        lines: dict[tuple[str | int, ...], int] = {(name,): keys.lines.get((direct, name), 1) for name in data}
        return replace(keys, data=data, lines=lines, form="file", words=DIRECT[direct])
    if called is None or arguments is None or any(UNSLOTH.search(word) for word in keys.words):
        return keys
    if not any(word.endswith(TRAINING) for word in keys.words) and any(word.endswith(OTHERWISE) for word in keys.words):
        return keys
    result = _Taken(keys)
    if called in TRAINERS:
        for name in OF_TRAINERS:
            result.take(called, name, name)
        if "tokenizer" in _given(keys, called):
            result.data["tokenizer"], result.lines[("tokenizer",)] = True, keys.lines.get((called, "tokenizer"), 1)
    if called in TRAINERS and arguments in PLAIN_ARGUMENTS:
        result.data |= PLAIN_DEFAULTS
    for name in _given(keys, arguments):
        result.take(arguments, name, name)
    _take_model(result, called)
    _take_adapters(result, called)
    if called == POLICY_TRAINER:
        _take_beside_policy(result)
    if any(word.endswith("gradient_checkpointing_enable") for word in keys.words):  # arguments switch it on, never off
        result.data["gradient_checkpointing"] = True
    if any(word.endswith(EVALUATES) for word in keys.words):
        result.data["program_evaluates"] = True
    if called in PLAIN:
        _take_length(result)
    defaulted = [word for word in keys.words if word.endswith((*PARSED, *VARIABLES))][:1]
    return replace(
        keys,
        data=result.data,
        lines=result.lines,
        form="file",
        words=(
            *(("trl", f"{_script(keys, called)}.py") if called in TRAINERS else (PACKAGES[called], "Trainer")),
            *defaulted,
        ),
        absent=(*keys.absent, *_beyond(result, called)),
    )


def _script(keys: GivenKeys, called: str) -> str:
    """Return the name of the script of TRL's that has a trainer, or had it: before 0.12 a program stepped its policy itself."""
    stepped = called == POLICY_TRAINER and any(OLD_POLICY in word for word in keys.words)
    return OLD_SCRIPT if stepped else TRAINERS[called]


class _Taken:
    """Keys that are taken from calls."""

    def __init__(self, keys: GivenKeys) -> None:
        self.keys = keys
        self.data: dict[str, Any] = {}
        self.lines: dict[tuple[str | int, ...], int] = {}

    def take(self, called: str, name: str, key: str) -> None:
        """Take a keyword of a call, where it has that."""
        value = _given(self.keys, called).get(name, MISSING)
        if value is not MISSING:
            self.data[key], self.lines[(key,)] = value, self.keys.lines.get((called, name), 1)

    def all(self, called: str, kind: str) -> None:
        """Take all keywords of a call that change something, and its own defaults."""
        self.data |= {RENAMED[kind][name]: value for name, value in OWN.get(kind, {}).items()}
        for name, value in _given(self.keys, called).items():
            if key := RENAMED[kind].get(name, "" if _is_plain(name, value) else f"{called}.{name}"):
                self.take(called, name, key)


def _take_model(result: _Taken, called: str) -> None:
    """Take what a program says of its model: where it loads that, or by the name that it gives the trainer."""
    keys = result.keys
    given = _given(keys, called)
    loaded = next((word for word in keys.words if MODEL.fullmatch(word)), "")
    if called == TRAINER:
        for key, value, line in model_and_loss(keys):
            result.data[key], result.lines[(key,)] = value, line
        if result.data.pop("quantized", False) and "BitsAndBytesConfig" in keys.words:
            result.all("BitsAndBytesConfig", "BitsAndBytesConfig")
        return
    named = called in TRAINERS and any(type(given.get(name)) is str for name in ("0", "model"))
    if loaded and not named:  # else TRL loads it by its name, whatever else the program loads
        result.all(loaded, "model")
        result.data["model_class"] = loaded.removesuffix("_from_pretrained")
        for word in keys.words:
            if word.startswith("model_") and (kind := CAST.get(word.removeprefix("model_"))):
                result.data["dtype"] = kind
        if loaded.startswith("AutoLigerKernel"):
            result.data["use_liger_kernel"] = True
        quantised = _given(keys, loaded).get("quantization_config", MISSING)
    else:
        for name in ("0", "model"):
            result.take(called, name, "model_name_or_path")
        inner = result.data.pop("model_init_kwargs", None)
        result.data |= {
            RENAMED["model"].get(name, name): value
            for name, value in (inner if isinstance(inner, dict) else {}).items()
        }
        quantised = result.data.pop("quantization_config", given.get("quantization_config", MISSING))
    if "BitsAndBytesConfig" in keys.words and quantised not in (None, MISSING):
        result.all("BitsAndBytesConfig", "BitsAndBytesConfig")


def _take_beside_policy(result: _Taken) -> None:
    """Take the models that a policy's trainer is given beside it: what they are loaded from, and in which dtype."""
    for role in ("reward_model", "value_model"):
        loaded = _given(result.keys, POLICY_TRAINER).get(role, MISSING)
        if loaded is MISSING or loaded is None:
            continue
        given = loaded.keywords if isinstance(loaded, Loaded) else {"0": loaded}
        named = {RENAMED["model"].get(name, name): value for name, value in given.items()}
        for name, key in {"model_name_or_path": role, "dtype": f"{role}_dtype"}.items():
            result.data[key] = named.get(name, "auto" if name == "dtype" else loaded)
            result.lines[(key,)] = result.keys.lines.get((POLICY_TRAINER, role), 1)
        if any(named.get(name) not in (None, False) for name in QUANTISES):
            result.data[f"{role}_quantized"], result.lines[(f"{role}_quantized",)] = True, result.lines[(role,)]


def _take_adapters(result: _Taken, called: str) -> None:
    """Take adapters that a program makes itself, or has its trainer make."""
    keys = result.keys
    configured = _given(keys, called).get("peft_config", None)
    if "LoraConfig" in keys.words and (configured is not None or _wraps(keys)):
        result.all("LoraConfig", "LoraConfig")
        result.data["use_peft"], result.lines[("use_peft",)] = True, keys.lines.get(("LoraConfig", "r"), 1)
    other = next(
        (name for name in OTHER_ADAPTERS if name in keys.words and (configured is not None or _wraps(keys))), None
    )
    if other is not None:
        result.data["peft_method"] = other.removesuffix("Config")
    if _given(keys, LOADED).get("is_trainable") is True and not _wraps(keys) and configured is None:
        own = {"use_peft": True, "lora_r": Expression(LOADED), "lora_target_modules": Expression(LOADED)}
        line = keys.lines.get((LOADED, "is_trainable"), 1)
        result.data, result.lines = {**result.data, **own}, {**result.lines, **{(key,): line for key in own}}
    for prepared in (word for word in keys.words if word.endswith(KBIT)):
        result.data[KBIT[0]] = {"use_gradient_checkpointing": True, **{name: value for name, value in _given(keys, prepared).items() if name in ("use_gradient_checkpointing", "gradient_checkpointing_kwargs")}}  # fmt: skip


def _take_length(result: _Taken) -> None:
    """Take how long rows are: what a program cuts its texts to, in the first place that says a number."""
    keys, own = result.keys, {name.lower(): name for name in result.keys.data}
    loaded = [word for word in keys.words if word.endswith("Tokenizer_from_pretrained")]
    places = [(TOKENIZER, "max_length"), *((word, "model_max_length") for word in loaded)]
    places += [
        (called, name)
        for called, given in keys.data.items()
        for name in LENGTHS
        if isinstance(given, Mapping) and name in given
    ]
    plain = next((own[name] for name in LENGTHS if type(keys.data.get(own.get(name, ""))) is int), None)
    given = [(called, name) for called, name in places if name in _given(keys, called)]
    place = next((one for one in given if type(_given(keys, one[0])[one[1]]) is int), None)
    if place is None and plain is not None:
        result.data["max_length"], result.lines[("max_length",)] = keys.data[plain], keys.lines.get((plain,), 1)
    elif place is not None or given:
        result.take(*(place or given[0]), "max_length")


def _wraps(keys: GivenKeys) -> bool:
    return any(word.endswith(("get_peft_model", "add_adapter")) for word in keys.words)


LOADED = "PeftModel_from_pretrained"
"""What loads adapters of an earlier run, whose own configuration says of what kind they are."""
CHOSEN = ("requires_grad", "requires_grad_")
"""Ends of what a program calls, or sets, to say which weights train."""


def _beyond(result: _Taken, called: str) -> Iterator[str]:
    """Yield what has to be said otherwise for the program to be what its trainer's keys say."""
    keys = result.keys
    first = keys.words.index(called)
    for word in keys.words[:first]:
        if word == LOADED and not _wraps(keys):  # else adapters of an earlier run, where there are any
            yield f"adapters as the trainer makes them: {word} loads others, peft_config of its trainer is read"
        elif word.endswith(CHOSEN) and not _wraps(keys) and "embeddings" not in word:
            yield f"which weights train: the program sets requires_grad, which unfrozen parts of {'TRL' if called in TRAINERS else 'transformers'}'s model do not say"
        elif word == "torch_compile":
            yield "a model that is not compiled before its trainer has it; torch_compile of its arguments is read"
    yield from _parts_given(result, called)
    quantised = _given(keys, "BitsAndBytesConfig")
    if (
        result.data.get("load_in_4bit") is True
        and quantised
        and quantised.get("bnb_4bit_compute_dtype") not in ("bfloat16", "float16")
    ):
        yield "bnb_4bit_compute_dtype of 16 bits: products of 4-bit weights in fp32, its default, are not modelled"


def _parts_given(result: _Taken, called: str) -> Iterator[str]:
    """Yield what a program gives its trainer, PEFT or torch that decides what a step holds, and that no key says.

    Source:
        ``evaluation_loop`` and ``predict`` in transformers/trainer.py (5.24.0): logits of all rows are collected on the GPU where
        metrics are made of them, unless a function makes less of each batch's.
    """
    keys, given = result.keys, _given(result.keys, called)
    yield from (text for name, text in OWN_PARTS.items() if given.get(name) not in (None, [None, None]))
    evaluates = any(
        is_on(result.data.get(key)) for key in ("program_evaluates", "eval_strategy", "evaluation_strategy")
    )
    collected = given.get("compute_metrics") is not None or any(one.endswith("trainer_predict") for one in keys.words)
    whole = called in ("SFTTrainer", *PLAIN) and "ForSequenceClassification" not in str(result.data.get("model_class"))
    if whole and evaluates and collected and given.get("preprocess_logits_for_metrics") is None:
        yield "an evaluation of losses alone: metrics or predictions collect the logits of all rows on the GPU, as many as there are"
    if called in SCORED and (
        _names_a_model(given.get("reward_funcs")) or any(one.endswith(SCORES) for one in keys.words)
    ):
        yield "rewards that functions compute: the program has a reward model beside the policy"
    if _given(keys, "get_peft_model").get("autocast_adapter_dtype") is False:
        yield "adapters in fp32, which PEFT makes of them: autocast_adapter_dtype is false"
    if any(one.endswith("set_per_process_memory_fraction") for one in keys.words):
        yield "all of the GPU's memory: the program allows itself a fraction"
    chosen = str(result.data.get("attn_implementation", ""))
    off = [name for name in KERNELS if _given(keys, f"cuda_{name}").get("0") is False]
    if off and not chosen.startswith(("flash", "eager", "flex")):
        yield f"attention by the kernel that torch chooses: {off[0]} switches one off; attn_implementation is read"


def _names_a_model(scored: Any) -> bool:
    """Tell whether rewards that a program hands its trainer are, or have among them, a string: each is a model's name."""
    if not isinstance(scored, Expression):
        return any(isinstance(one, str) for one in (scored if isinstance(scored, list) else [scored]))
    try:
        node = ast.parse(scored, mode="eval").body
    except SyntaxError:  # cut
        return "/" in scored
    return any(isinstance(one, ast.Constant) for one in getattr(node, "elts", ())) or "/" in scored


def _given(keys: GivenKeys, called: str) -> Mapping[str, Any]:
    inner = keys.data.get(called)
    return inner if isinstance(inner, Mapping) else {}


def _is_plain(name: str, value: Any) -> bool:
    """Tell whether a keyword changes nothing of what is held on a GPU, as it stands."""
    quiet = ("quantization_config", "device_map", "trust_remote_code", "use_cache", "token", "use_auth_token", "cache_dir", "revision", "low_cpu_mem_usage", "bnb_4bit_compute_dtype", "local_files_only", "config", "id2label", "label2id", "pad_token_id", "1", "problem_type", "ignore_mismatched_sizes", "llm_int8_threshold")  # fmt: skip
    return name in quiet or (name == "bias" and value == "none") or value in (None, False)
