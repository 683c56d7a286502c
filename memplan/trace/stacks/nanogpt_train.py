"""nanoGPT's model and loop, told anew: nanoGPT is no package, and its few operations are torch's own.

Source:
    ``GPT.forward``, ``Block``, ``CausalSelfAttention`` and ``MLP`` in model.py, and the loop of train.py, of
    https://github.com/karpathy/nanoGPT (3adf61e1).
"""

from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, ModelSpec
from memplan.step.compiled.compiled_model import is_gpt2_shaped
from memplan.trace.compiled.compiler import COMPILED_NOTE, pretended_compiler
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.valueless_tensors import AnyNumber
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.registry import STEPS, StackInputs, StackRun
from memplan.trace.stacks.watched_parts import pretended_card, refuse_settings, watch_parts, watch_states
from memplan.training.resolved import TrainingSetup

PACKAGES = ()


class _Block(nn.Module):
    """A layer: attention by one fused projection, and a feed-forward part."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, *, linear: bool, norm: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=norm), nn.LayerNorm(width, bias=norm)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=linear), nn.Linear(width, width, bias=linear)
        self.c_fc, self.down = nn.Linear(width, inner, bias=linear), nn.Linear(inner, width, bias=linear)
        self.gelu = nn.GELU()
        self.attention_dropout, self.mlp_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream behind the layer."""
        x = x + self.attend(self.ln_1(x))
        inner: Tensor = self.gelu(self.c_fc(self.ln_2(x)))
        down: Tensor = self.mlp_dropout(self.down(inner))
        return x + down

    def attend(self, x: Tensor) -> Tensor:
        """Return causal attention of ``x`` to itself."""
        batch, tokens, width = x.size()
        query, key, value = self.c_attn(x).split(width, dim=2)
        key = key.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        query = query.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        value = value.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, tokens, width)
        result: Tensor = self.attention_dropout(self.c_proj(y))
        return result


class _Gpt(nn.Module):
    """The model: two embeddings, layers, a norm and a head that is tied to the first embedding."""

    def __init__(self, spec: ModelSpec, dropout: float) -> None:
        super().__init__()
        layer, width = spec.runs[0].layer, spec.hidden_size
        heads = layer.attention
        assert isinstance(heads, Attention)
        assert layer.feed_forward is not None
        linear, norm, inner = heads.qkv_bias, spec.final_norm.bias, layer.feed_forward.intermediate_size
        self.wte, self.wpe = nn.Embedding(spec.vocab_size, width), nn.Embedding(spec.learned_positions, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(
            _Block(width, heads.num_heads, inner, dropout, linear=linear, norm=norm)
            for _ in range(spec.num_hidden_layers)
        )
        self.ln_f = nn.LayerNorm(width, bias=norm)
        self.lm_head = nn.Linear(width, spec.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and loss."""
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run nanoGPT's loop on the model that the inputs ask for."""
    setup, spec = inputs.setup, inputs.model.spec
    refuse_settings(setup, "nanogpt", evaluates=True, compiles="model")
    plain = is_gpt2_shaped(spec) and setup.config.adapter is None and setup.checkpointing == "none"
    if not plain or setup.format_names["hidden_matrix"] != "fp32":
        raise CannotAnswerError("nanoGPT trains GPT-2's shapes, in fp32 weights without adapters or checkpointing")
    compiles = setup.config.compile == "model"
    with ExitStack() as stack:
        stack.enter_context(pretended_card(inputs.compute_capability))
        with torch.device("meta"):
            model = _Gpt(spec, spec.dropout if setup.config.dropout is None else setup.config.dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=setup.profile.optimizer == "fused")
        watch_parts(model, () if compiles else model.h, None if compiles else model.lm_head, recorder)
        called: Any = model
        if compiles:
            stack.enter_context(pretended_compiler(inputs.compute_capability))
            called = torch.compile(model)
        with AnyNumber(), recorder:  # type: ignore[no-untyped-call]
            _loop(model, called, optimizer, setup, recorder)
    notes = (COMPILED_NOTE,) if compiles else ()
    return StackRun("nanoGPT's model and loop, told anew", spec.vocab_size, notes)


def _loop(model: Any, called: Any, optimizer: Any, setup: TrainingSetup, recorder: Recorder) -> None:
    """Train as train.py does; names live as long as they do there, the last step's among them."""
    config = setup.config
    steps = config.gradient_accumulation_steps

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.zeros(config.micro_batch_size, config.sequence_length, dtype=torch.long, device="meta")
        return x, torch.zeros_like(x)

    def region() -> Any:
        return torch.autocast("cuda", TORCH_DTYPES[config.compute_dtype]) if setup.autocast else nullcontext()

    x, y = batch()
    for step in range(STEPS):
        recorder.next_step()
        if config.evaluation and step:
            recorder.instant("evaluation")
            model.eval()
            _evaluate(called, batch, region)
            model.train()
        for micro_step in range(steps):
            recorder.instant("forward", later=micro_step > 0)
            recorder.forward_begins()
            with region():
                _, loss = called(x, y)
                loss = loss / steps
            x, y = batch()
            recorder.forward_ends()
            recorder.instant("loss backward", backward=True, later=micro_step > 0)
            loss.backward()
        if config.clip_gradients:
            recorder.instant("gradient clipping")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        recorder.instant("optimizer step")
        optimizer.step()
        watch_states(optimizer, recorder)
        optimizer.zero_grad(set_to_none=True)


def _evaluate(called: Any, batch: Any, region: Any) -> None:
    """Estimate the loss over two batches, as ``estimate_loss`` does over many."""
    with torch.no_grad():
        for _ in range(2):
            x, y = batch()
            with region():
                _logits, loss = called(x, y)  # the names outlive an iteration
            loss.item()
