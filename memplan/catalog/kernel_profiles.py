"""Kernel profiles: which implementation of each operation runs, where that moves memory."""

from dataclasses import fields, replace
from typing import Literal

from memplan.documents.frozen_values import dataclass

AttentionKernel = Literal["flash", "cudnn", "efficient", "math", "eager", "flex", "auto"]
NormKernel = Literal["fused", "composite", "in-place"]
OptimizerKernel = Literal["foreach", "fused", "for-loop"]
NewtonSchulzKernel = Literal["min", "fast", "torch"]
LossKernel = Literal[
    "bf16",
    "fp32",
    "chunked",
    "token-chunks",
    "token-chunks-fp32",
    "fused-head",
    "fused-linear",
    "cut-cross-entropy",
    "tiled-linear",
    "pieced-linear",
    "in-place",
    "chunked-backward",
    "chunked-logits",
    "fp32-pieces",
    "log-probabilities",
    "divergence",
    "fused-divergence",
    "logits",
    "hidden-states",
    "policy",
    "values",
    "fp32-stretches",
    "weighted-tokens",
]
ElementwiseKernel = Literal["composite", "fused", "in-place"]
RotaryKernel = Literal["composite", "fused", "complex", "pairs", "in-place", "together"]
AdapterKernel = Literal[
    "composite", "fused", "fused-qkv", "fused-o", "fused-mlp", "fused-qkv-o", "fused-qkv-mlp", "fused-o-mlp"
]
ADAPTED = ("qkv", "o", "mlp")
"""What adapters are fused with: query, key and value together; the attention's output; a gated part."""
LinearAttentionKernel = Literal["torch", "fla", "mamba"]


Feature = Literal[
    "bf16",
    "bitsandbytes-4bit",
    "bitsandbytes-8bit-optimizer",
    "bitsandbytes-int8",
    "cuda-graphs",
    "expandable-segments",
    "float8",
    "torch-compile",
    "torch-wheels",
    "torchao-fp8-optimizer",
    "triton-kernels",
    "trl-fused-head",
]
"""Something that not every card can do (configs/hardware/capabilities.yaml)."""


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """One choice for every operation that has several implementations.

    Attributes:
        attention: Backend of scaled-dot-product attention, of which ``math`` keeps the score matrix; ``eager`` is
            attention written out in Python, with an additive mask; ``auto`` leaves the backend to torch, which is flash
            until a card, a dtype and widths of heads say otherwise.
        norm: ``fused`` saves input and one statistic per row; ``composite`` is the usual
            chain of Python operations in fp32, which saves a copy in fp32 besides; ``in-place`` is fused, and
            writes the gradient of its input over that of its result.
        rotary: ``composite`` forms the rotated halves as tensors; ``fused`` is one kernel; ``complex`` takes neighbours
            for complex numbers, in fp32, and multiplies them; ``pairs`` turns neighbours in fp32, number by number;
            ``in-place`` is one kernel that turns what it is given; ``together`` is one for query and key, whose backward forms both gradients.
        activation: ``composite`` keeps activation and product apart; ``fused`` is one kernel
            for SwiGLU or GeGLU, which keeps only its inputs; ``in-place`` writes their gradients over them.
        optimizer: How AdamW with fp32 or bf16 states steps.
        newton_schulz: Workspace of Muon: ``min``, ``fast``, or that of ``torch.optim.Muon``.
        muon_batch_bytes: Scratch in which the bundled Muon updates matrices of one shape together; 0: one by one.
        loss: Cross-entropy on logits in the compute dtype (``bf16``), on an fp32 copy, or on
            ``loss_chunks`` chunks of tokens, each recomputed in backward (``chunked``), or run backward
            at once, before the next, as far as the head's input (``chunked-backward``); ``token-chunks`` are of a length of their
            own, and so are ``token-chunks-fp32``, whose rows and head are copied in fp32; ``fused-head`` multiplies by the head inside the loss and never has whole logits, nor does
            ``fused-linear``, which forms gradients in forward, and ``cut-cross-entropy``, which forms them in backward, block
            by block of logits that no tensor holds; ``tiled-linear`` has them in fp32, of some tokens and 16,384 words at a time, and
            forms the input's gradient in forward; ``pieced-linear`` is the same on cards of more than 24.5 GiB, where a short
            micro-batch has logits of some tokens and all words; ``in-place`` works in the fp32 copy; ``fp32-pieces``
            are pieces of that copy without the last token, one after another; ``fp32-stretches`` the same of stretches of
            each sequence, for which the head multiplies one after another, too; ``log-probabilities`` of whole fp32 logits
            are what preference methods compared before they had a fused head; ``divergence`` of whole logits from a teacher's is
            what distillation learns by, ``fused-divergence`` the same of hidden states, whose logits are formed tile by tile;
            ``logits`` and ``hidden-states`` are what a teacher returns, of which no loss is formed; ``policy`` and ``values`` are what
            PPO learns by, of whole logits and of a number for each token.
        loss_chunks: Chunks of a chunked loss.
        adapters: ``fused`` is one function for a projection, or several of one input, and its adapter; ``fused-qkv-mlp`` and
            its like are some of these without the others.
        linear_attention: Gated delta networks: ``torch`` is transformers' own code, which computes in fp32 and saves much;
            ``fla`` the kernels of flash-linear-attention and causal-conv1d, which its models run where both are installed. State
            space layers: ``torch`` likewise, or ``mamba`` for mamba-ssm's and causal-conv1d's.
    """

    attention: AttentionKernel = "flash"
    norm: NormKernel = "fused"
    rotary: RotaryKernel = "composite"
    activation: ElementwiseKernel = "composite"
    optimizer: OptimizerKernel = "foreach"
    newton_schulz: NewtonSchulzKernel = "min"
    muon_batch_bytes: int = 0
    loss: LossKernel = "bf16"
    loss_chunks: int = 8
    adapters: AdapterKernel = "composite"
    linear_attention: LinearAttentionKernel = "torch"

    @property
    def fused_adapters(self) -> tuple[str, ...]:
        """Which projections run as one function with their adapters: of ``qkv``, ``o`` and ``mlp``."""
        _, *parts = self.adapters.split("-")
        return ADAPTED if self.adapters == "fused" else tuple(parts)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The ``kernels`` key of a training config: choices that override those of its stack."""

    attention: AttentionKernel | None = None
    norm: NormKernel | None = None
    rotary: RotaryKernel | None = None
    activation: ElementwiseKernel | None = None
    optimizer: OptimizerKernel | None = None
    newton_schulz: NewtonSchulzKernel | None = None
    muon_batch_bytes: int | None = None
    loss: LossKernel | None = None
    loss_chunks: int | None = None
    adapters: AdapterKernel | None = None
    linear_attention: LinearAttentionKernel | None = None

    def over(self, own: KernelProfile) -> KernelProfile:
        """Return a stack's own choices with these put in."""
        chosen = {f.name: getattr(self, f.name) for f in fields(KernelProfile)}
        profile = KernelProfile(
            **{name: getattr(own, name) if value is None else value for name, value in chosen.items()}
        )
        return replace(profile, attention="flash") if profile.attention == "auto" else profile


@dataclass(frozen=True, slots=True)
class CodesLoading:
    """How weights that are quantised there come to the card: in 16 bits, one by one, into what one block of them all has left."""

    ahead: int  # How many more are sent while one is quantised, by threads
    cleared: bool  # Whether what is cached is given back to the driver before the first step
