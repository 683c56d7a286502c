"""Stacks: whose training loop a job runs, and what of that loop decides memory."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from memplan.catalog.built_models import RotaryTables, StackModels
from memplan.catalog.config_keys.method_keys import Stage
from memplan.catalog.entries import Source
from memplan.catalog.kernel_profiles import AttentionKernel, CodesLoading, KernelProfile, LossKernel
from memplan.catalog.training_config import Checkpointing, NamesEnd
from memplan.documents.frozen_values import dataclass

AutocastRule = Literal["fp32-weights", "always", "never"]
AdapterDtype = Literal["fp32", "bf16", "weights"]
KbitFloats = Literal["as-is", "fp32", "fp32-but-ends", "fp32-norms", "coded-head", "stable-embedding"]
Level = Literal["traced", "read"]
Metrics = Literal["none", "accuracy", "accuracy-alone", "both", "entropy", "fused", "softmax", "rows"]
PairKernel = Literal["fused", "rows", "softmax"]
InputGradients = Literal[
    "never", "checkpointed", "checkpointed-adapted", "always", "trained-layers", "reentrant", "prepared-reentrant"
]
Cache = Literal["none", "views", "copies", "promoted-copies", "continued"]
UnusedParameters = Literal[
    "never", "unless-checkpointed", "whole-unless-checkpointed", "preferences-unless-checkpointed"
]
ModelCode = Literal["own", "transformers", "torchtune", "litgpt", "torchtitan", "unsloth"]


@dataclass(frozen=True, slots=True)
class StackCheckpointing:
    """How a stack checkpoints activations."""

    default: Checkpointing  # What it does where a config does not say
    default_quantised: Checkpointing  # The same where adapters stand on quantised weights
    reentrant: bool  # Whether layers are recomputed by ``torch.utils.checkpoint`` with ``use_reentrant=True``
    # What ``selective`` saves beside attention's results: ``products``, or the first of two matrices, the third and so on, of none stacked.
    selective: Literal["products", "alternate-products"]
    early_stop: bool  # Whether a layer is computed again no further than backward needs it
    replicas_reentrant: bool | None = None  # What ``reentrant`` is for replicas, if it is another
    partitioned_reentrant: bool = False  # Whether it is so for adapters under DeepSpeed's stage 3, whatever is said
    # Whether it runs a layer again through the unit that wraps it, whose hooks are then set again, and not inside of that.
    calls_units: bool = False
    # How what full checkpointing saves may wait in host memory: in ``buffers``, but for the last layer's input, as it does by
    # default; as ``copies`` of each input; or as what autograd's ``hooks`` copy of it, of the model alone or, each storage once,
    # of the loss too (``hooks-once``).
    offloads: Literal["none", "buffers", "copies", "hooks", "hooks-once"] = "none"

    @property
    def hooked(self) -> bool:
        """Whether autograd's hooks copy what is saved into host memory."""
        return self.offloads in ("hooks", "hooks-once")


@dataclass(frozen=True, slots=True)
class StackProjections:
    """How projections run whose weights are codes, or that have adapters."""

    # Dtype of a product with codes: ``compute``; or ``input``, that of what it is given, to which it is cast back.
    codes_result: Literal["compute", "input"]
    codes_cloned: bool  # Whether an adapter's part is added to a copy of the product with codes
    codes_scales: bool  # Whether decoding forms the scales of codes first where these are codes themselves
    # ``narrow`` casts an adapter's part to the projection's dtype before they are added, ``wide`` their sum; on codes
    # ``wide`` casts before, and casts nothing under autocast; ``uncast`` never casts anything.
    adapter_sum: Literal["narrow", "wide", "uncast"]
    # Dtype in which one function for a projection and its adapter forms the adapter's gradients: that of products
    # (``compute``), or at once that of the ``adapter``.
    fused_gradients: Literal["compute", "adapter"] = "compute"
    # Whether autograd saves codes as it does other tensors, so that backward asks for them before it decodes.
    codes_saved: bool = False
    # Whether the node of a product with codes has what it was given as an attribute, whether backward needs it or not.
    codes_keep_input: bool = False
    # Dtype that weights are quantised from: that which they are ``loaded`` in; or fp16 always, to which a product of
    # forward decodes them as well as one of backward, before they are cast.
    codes_from: Literal["loaded", "fp16"] = "loaded"
    # Bytes of an element of what adapters are given; 0 is that of their weights as products read these.
    adapter_input_bytes: int = 0
    # Whether one function for projections and their adapters writes its input's gradient over that input, and casts
    # adapters for each product instead of saving casts.
    fused_overwrites: bool = False


@dataclass(frozen=True, slots=True)
class Loop:
    """What a training loop has names for, and where its loss is formed."""

    # What it names through backward and ``until`` when: ``logits``, or the ``loss`` alone, either with what its graph still has.
    holds: tuple[Literal["logits", "loss"], ...]
    # ``model`` where the model's own forward forms it and returns logits beside it; ``loop`` where the loop does, and
    # lets go of logits as they are used; ``named`` where the loop does, and has a name for them meanwhile.
    loss: Literal["model", "loop", "named"]
    # ``shifted`` where the loss is given a copy of the labels, shifted by one token; ``cut`` where it is given copies of
    # logits without each row's last token and of labels without the first; ``given`` where neither.
    labels: Literal["given", "shifted", "cut"]
    until: NamesEnd = "next"  # Until each ``backward`` or the ``step`` ends, or the ``next`` forward takes the names
    # Whether the model's forward casts logits to ``fp32`` before it has a name for them, and returns those; or returns them
    # in the dtype of its products (``compute``), whatever the loss is formed in.
    logits: Literal["compute", "fp32"] = "compute"
    # What the metrics of a loss over whole logits copy of these, without each row's last token: nothing (``none``);
    # once for the ``accuracy``, after the entropy, or for the ``accuracy-alone``; once for the ``entropy``, let go then; or for ``both``. A loss over
    # preferences copies them itself, but under ``entropy``, and under ``fused``, where one kernel looks at them where
    # they are; ``softmax`` makes no metrics, and takes the log-softmax of whole logits to compare them; ``rows`` looks
    # at those of all tokens where they are, by a sum of exponentials for each row in turn.
    metrics: Metrics = "none"
    # How a loss over pairs without a reference model looks at whole logits where they are: by one kernel (``fused``),
    # or by a sum of exponentials for each row in turn (``rows``); or by their log-softmax (``softmax``), whose collator
    # has joined the rows.
    pairs: PairKernel = "rows"
    # Keys and values that models which are not checkpointed return beside logits: nothing (``none``), as they were formed
    # (``views``), or in ``copies``; in ``promoted-copies``, where values are in the dtype of the keys if that is wider.
    cache: Cache = "none"
    compiled: bool = True  # Whether torch compiles the loss too where it compiles layers
    # Whether the loss of unbalanced experts is added where a model's own config has a factor for it.
    balances: bool = False
    # Whether a reward model keeps its own head, whose loss nobody looks at, and has one of values beside it.
    value_head: bool = False

    @property
    def own_comparison(self) -> bool:
        """Whether it compares preferences itself, of models that it has put adapters on, and not in TRL's trainers as they are."""
        return self.metrics in ("softmax", "rows")


@dataclass(frozen=True, slots=True)
class BatchTensor:
    """A tensor of (batch, sequence) that the collator puts on the device."""

    name: str
    dtype: str
    kept: bool = False  # Whether those of all micro-steps stay until the optimizer has stepped
    in_turn: bool = False  # Whether those of a micro-step come to the device when it begins, and not with the first

    @property
    def element_bytes(self) -> int:
        """Bytes of an element: the bits that its dtype is named after; flags have one byte."""
        bits = "".join(filter(str.isdigit, self.dtype))
        return int(bits) // 8 if bits else 1


@dataclass(frozen=True, slots=True)
class OlderVersions:
    """What older versions of a stack did otherwise."""

    since: str  # The first version that it is about
    until: str  # The last
    changes: Mapping[str, Any]  # Keys of the stack with the values that they had, sections by the keys within them
    like: str = ""  # ``NAME@VERSION`` of another stack whose changes of that time are its own too, but for the above


@dataclass(frozen=True, slots=True)
class Stack:
    """One stack as its file in ``configs/stacks/`` describes it; every key is said."""

    description: str  # What it is, in words
    library: str  # The package whose loop it is
    versions: Mapping[str, str]  # Packages and the versions that were read, the library itself first
    # Whose implementation of a model it trains: a library's, where its families differ among each other, or its
    # ``own``.
    model_code: ModelCode
    level: Level  # ``traced`` where its own code can be run on tensors without memory, ``read`` where it is only read
    kernels: KernelProfile  # Which implementation of each operation it runs
    # ``fp32-weights`` runs the model under autocast where the hidden matrices are in fp32 and the compute dtype has 16
    # bits, ``always`` wherever the compute dtype has 16 bits, ``never`` never.
    autocast: AutocastRule
    # Dtype of adapters on plain weights where a config does not say; ``weights`` is that of the hidden matrices, or the
    # compute dtype where those are codes.
    adapter_dtype: AdapterDtype
    adapter_dtype_quantised: AdapterDtype  # The same on quantised weights
    projections: StackProjections  # How projections of codes and with adapters run
    # What is done to weights beside quantised ones: ``fp32`` casts embedding, head and norms; ``fp32-but-ends`` casts
    # those back, and leaves routers, biases and experts in fp32; ``fp32-norms`` casts embedding and head to bf16 again;
    # ``coded-head`` quantises the head too; ``stable-embedding`` does, and puts bitsandbytes' ``StableEmbedding`` in the place of
    # the embedding, which stays: with a norm behind it, and gradients that no step uses or takes away.
    kbit_floats: KbitFloats
    checkpointing: StackCheckpointing  # How it checkpoints activations
    models: StackModels  # How it builds models
    rotary_tables: RotaryTables  # What its models keep of cosines and sines
    loop: Loop  # What its loop keeps alive
    batch: tuple[BatchTensor, ...]  # Tensors of a micro-batch on the device
    # When a frozen embedding's output is made to need a gradient: where activations are ``checkpointed``, before
    # adapters are put on, or after them, which an adapter on the embedding tells; ``trained-layers`` does so with the
    # input of the first layer that trains, and checkpoints layers that train alone; ``reentrant`` where checkpointing is,
    # which would find nothing to train without, so that scripts see to it; ``prepared-reentrant`` is ``checkpointed``,
    # but ``reentrant`` where weights beside codes are prepared for training (``prepare_model_for_kbit_training``).
    input_gradients: InputGradients
    clip_gradients: bool  # Whether it clips where a config does not say
    not_modelled: tuple[str, ...]  # What else it does that the formula does not follow, a job of it being refused then
    keys: Mapping[str, str]  # Key of a training config -> what the stack calls it; none where it takes memplan's own
    # Keys whose values have other names there -> value -> the stack's own keys and values, one or several.
    values: Mapping[str, Mapping[str, Mapping[str, str]]]
    sources: tuple[Source, ...]  # Where all this was read
    history: tuple[OlderVersions, ...] = ()  # What older versions did otherwise, the oldest first
    aliases: tuple[str, ...] = ()  # Other names
    # What is done to embedding, head and norms where all weights are trained: ``fp32-unless-flash`` casts them, but
    # where attention is a library's flash kernel.
    full_floats: Literal["as-is", "fp32-unless-flash"] = "as-is"
    stages: tuple[Stage, ...] = ("sft",)  # What it can learn from whose steps the formula follows
    encoders: tuple[Stage, ...] = ()  # The same where its model is an encoder
    # Whether DoRA's magnitudes on quantised weights stay ``apart`` as PEFT makes them, or are ``cast`` like other
    # adapters, be it by its trainers of preferences alone.
    magnitudes: Literal["apart", "cast", "cast-but-sft"] = "apart"
    # When replicas look for parameters without a gradient, for which DistributedDataParallel copies what the model
    # returns: ``unless-checkpointed`` is where no model of transformers is checkpointed itself, so that with adapters,
    # which PEFT wraps it in, it is always; ``whole-unless-checkpointed`` is so without adapters alone, and
    # ``preferences-unless-checkpointed`` with preferences alone. ``parallel.unused_parameters`` goes before all but
    # ``never``.
    unused_parameters: UnusedParameters = "never"
    # Whether a step's forwards and backwards are captured as a CUDA graph, where no pipeline and no expert parallelism
    # divide the model: gradients then stay from step to step, filled with zeros, and the graph's memory serves nothing
    # else.
    cuda_graphs: bool = False
    # Whether a vision tower is trained and gets adapters like the rest (``as-language``), or is ``frozen``; with
    # ``frozen-as-loaded`` its weights stay in the dtype that they were loaded in where trained ones are cast.
    vision: Literal["as-language", "frozen", "frozen-as-loaded"] = "as-language"
    # How rows with images come to its models: pixels and ids for the ``model`` to join, ids with their ``positions``
    # beside them, or tokens that are ``embedded`` with what the tower returns before the forward, out of autocast;
    # rows of ``none`` were followed.
    images: Literal["none", "model", "positions", "embedded"] = "none"
    # Weight formats besides floats that its libraries hold weights in; none is all that products read as a decoded copy.
    quantised_formats: tuple[str, ...] | None = None
    quantised_optimizer: str = (
        ""  # What steps adapters over quantised weights, whatever class is asked for; empty for that
    )
    # Weight formats of shipped configs, and optimizers -> what it has in their place.
    own_formats: Mapping[str, str] = field(default_factory=dict)
    # What ``fully_shard`` gathers together besides each layer: the ``root`` with embedding, norm and head, or, where
    # these are not tied, ``ends-apart``: the embedding alone, and norm and head, which stay gathered; ``root-and-last`` has
    # the root, and the last layer stays gathered too until its backward has ended; ``accelerate``
    # has these too, casts trained weights to fp32 and reduces gradients in the compute dtype, only those of the last
    # micro-step; ``axolotl`` casts nothing, has a root and gathers it again for backward, as does ``root-again``, whose
    # loss is outside the root; ``lightning`` has flat tensors (FSDP1) alone, and a loss outside the root.
    sharded_units: Literal[
        "root", "root-again", "root-and-last", "ends-apart", "accelerate", "axolotl", "own-root", "lightning"
    ] = "root"
    stages_codes: bool = False  # Whether what it shards may be codes of 4 bits that were staged on the CPU
    adapted_loss: LossKernel | None = None  # Its loss where there are adapters, if it is another
    pair_kbit_floats: KbitFloats | None = None  # ``kbit_floats`` where pairs have no reference model, if it is another
    divides: tuple[str, ...] = ()  # Keys of ``parallel`` that divide a model as is followed, besides data parallelism
    # Key of ``kernels`` -> what is modelled of it besides its own: for attention, norm, rotation, activation, loss, adapters.
    runs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Kernels that it lets torch's attention choose among, the one that comes first first, where its ``attention`` is
    # ``auto``; nothing is all of them in torch's own order.
    attention_order: tuple[AttentionKernel, ...] = ()
    evaluates_alike: bool = False  # Whether it evaluates as many rows as it trains on, and has no key for others
    evaluates_in_place: bool = False  # Whether the rows of a step have made way by the time it evaluates as many others
    evaluates_epochs: bool = False  # Whether it evaluates as an epoch ends, behind its last step, and not between steps
    shares_states: bool = False  # Whether its own optimizer shares out states alone among GPUs (``zero_stage: 1``)
    shards_alone: bool = False  # Whether a model on one GPU is in FSDP too, over a group of one, and replicas are so
    # Dtype of modules trained whole beside adapters: that of the model's ``weights``, or of ``adapters``, as all that trains.
    saved_modules: Literal["weights", "adapters"] = "weights"
    # Family -> what names of the projector's parameters begin with, where the stack calls less of it so.
    projectors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # What the library, or the command that starts it, makes of torch's allocator where PYTORCH_CUDA_ALLOC_CONF is not set:
    # ``expandable`` segments always, only where it starts several processes itself, or only on NVIDIA's cards.
    allocator: Literal["native", "expandable", "expandable-of-several", "expandable-on-nvidia"] = "native"
    exempts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # Role -> classes that have exempt slots of it
    loads_codes: CodesLoading | None = None  # How weights are quantised on the card; none: they are made as they stay
    quantised_towers: bool = True  # Whether a vision tower and its projector are quantised with the text model
    name: str = ""  # Its name, put in where it is looked up
    version: str = ""  # The version of the library that is described, put in likewise

    @property
    def own_models(self) -> bool:
        """Whether it has models of its own, which no library's adapters are put on."""
        return self.model_code in ("own", "torchtitan")

    @property
    def label(self) -> str:
        """The stack and the version that is described, in words, with the package where that has another name."""
        package = next(iter(self.versions))
        return f"{self.name} {self.version}" if package == self.name else f"{self.name} ({package} {self.version})"
