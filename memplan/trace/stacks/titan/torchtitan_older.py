"""torchtitan 0.2.2 and 0.1.0, which read TOML files: their Llama, checkpointing, sharding and their own step.

What is called on a stand-in for the trainer are ``Trainer.train_step`` and ``Trainer.forward_backward_step`` themselves, and
``parallelize_llama`` on the model.
"""

import contextlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed.utils import maybe_enable_amp
from torchtitan.models.llama3.infra import parallelize
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.tools import utils
from torchtitan.train import Trainer

from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, Mlp, ModelSpec
from memplan.step.states.parallel_shards import is_sharded
from memplan.trace.compiled.compiler import COMPILED_NOTE, pretended_compiler
from memplan.trace.jobs.training_job import watch_layers
from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.trace.ranks.fully_shard import ShardedRecorder, mesh_degrees, sharding
from memplan.trace.recording.recorder import Recorder
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.registry import StackInputs, StackRun
from memplan.trace.stacks.titan.torchtitan_steps import run_steps
from memplan.trace.stacks.watched_parts import pretended_card, refuse_settings, watch_states, watch_tensors
from memplan.training.resolved import TrainingSetup

if FIRST := version("torchtitan").startswith("0.1."):  # with both in other places
    from torchtitan.config_manager import ActivationCheckpoint
else:
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.distributed import activation_checkpoint

PACKAGES = ("torchtitan",)
VERSION = "0.1.0" if FIRST else "0.2.2"
META = torch.device("meta")
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
"""Dtypes as a TOML file says them."""


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run torchtitan's trainer on the Llama that the inputs ask for."""
    logging.getLogger().setLevel(logging.ERROR)
    setup = inputs.setup
    refuse_settings(setup, "torchtitan", compiles="layers")
    _refuse_other(inputs.model.spec, setup)
    with ExitStack() as around:
        around.enter_context(pretended_card(inputs.compute_capability))
        if setup.config.compile == "layers":
            around.enter_context(pretended_compiler(inputs.compute_capability))
        model, dims = _parallelized(_built(inputs.model.spec, setup), setup, recorder, around)
        trainer = _Trainer(model, setup, recorder, dims)
        run_steps(trainer.step, recorder)
    compiled = (COMPILED_NOTE,) if setup.config.compile == "layers" else ()
    return StackRun("torchtitan's llama3", inputs.model.spec.vocab_size, compiled)


def _refuse_other(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Refuse what this version's Llama or its loop has not, or what is not traced."""
    config, layer = setup.config, spec.runs[0].layer
    heads, parallel = layer.attention, config.parallel
    assert isinstance(heads, Attention)
    plain = setup.format_names["hidden_matrix"] in TORCH_NAMES and config.adapter is None
    whole = heads.num_heads * heads.head_dim == spec.hidden_size
    ranks = parallel.tensor * parallel.pipeline == 1
    own = setup.profile.loss == "fp32" and config.kernels.attention is None
    if not (plain and whole and ranks and own and spec.architecture == "llama" and setup.stack.version == VERSION):
        raise CannotAnswerError(
            f"torchtitan {VERSION} is traced with its own Llama, whose heads are as wide as the model, in fp32 or bf16, over "
            f"shards at most: --stack torchtitan@{VERSION}"
        )
    if any(entry.orthogonalises for entry in setup.optimizers.values()):
        raise CannotAnswerError(
            f"optimizer: torchtitan {VERSION} is traced with its own AdamW alone; Muon is with 0.3.0"
        )


# -------------------------------------------------------------------- model
def _built(spec: ModelSpec, setup: TrainingSetup) -> Any:
    """Return torchtitan's Llama of these shapes, without memory."""
    heads, mlp = spec.runs[0].layer.attention, spec.runs[0].layer.feed_forward
    assert isinstance(heads, Attention)
    assert isinstance(mlp, Mlp)
    args = TransformerModelArgs(
        dim=spec.hidden_size,
        n_layers=sum(run.count for run in spec.runs),
        n_heads=heads.num_heads,
        n_kv_heads=heads.num_key_value_heads,
        vocab_size=spec.vocab_size,
        multiple_of=mlp.intermediate_size,
        ffn_dim_multiplier=1.5 / (8 * spec.hidden_size // 3),  # one column, rounded up to the multiple
        max_seq_len=setup.config.sequence_length,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_DTYPES[setup.format_names["hidden_matrix"]])
    try:
        with META:
            model = Transformer(args)
    finally:
        torch.set_default_dtype(default)
    model.train()
    return model


def _parallelized(model: Any, setup: TrainingSetup, recorder: Recorder, around: ExitStack) -> tuple[Any, Any]:
    """Return a model that is checkpointed and sharded by ``parallelize_llama``, and the degrees that the trainer reads."""
    parallel, mesh = setup.config.parallel, None
    if is_sharded(parallel):
        assert isinstance(recorder, ShardedRecorder)
        mesh = around.enter_context(sharding(parallelize, mesh_degrees(parallel), recorder))
    dims = SimpleNamespace(
        seq_len_divisor=1,
        tp_enabled=False,
        cp_enabled=False,
        pp_enabled=False,
        ep_enabled=False,
        dp_enabled=False,  # sums of counts over ranks are left out
        fsdp_enabled=mesh is not None,
        dp_replicate_enabled=mesh is not None and parallel.replicate > 1,
        get_mesh=lambda _: mesh,
        get_optional_mesh=lambda _: None,
        dp_shard_enabled=mesh is not None,
        dp_cp_enabled=False,
    )
    reduced = TORCH_NAMES[setup.format_names["hidden_matrix"]]
    training: dict[str, Any] = {
        "mixed_precision_param": TORCH_NAMES[setup.config.compute_dtype],
        "mixed_precision_reduce": reduced,
    }
    compiling = _compiling(setup)
    training |= {"seq_len": setup.config.sequence_length, "enable_cpu_offload": False, "compile": compiling.enable}
    config = SimpleNamespace(
        training=SimpleNamespace(**training),
        compile=compiling,
        activation_checkpoint=_checkpointing(setup),
        parallelism=SimpleNamespace(
            fsdp_reshard_after_forward="default" if parallel.reshard_after_forward else "never"
        ),
        job=SimpleNamespace(dump_folder=""),
    )
    if not FIRST:
        return parallelize.parallelize_llama(model, dims, config), dims
    with _root_gathered(model):
        return parallelize.parallelize_llama(model, _Meshes(mesh), dims, config), dims


class _Meshes:
    """What 0.1.0 asks for parts of a mesh."""

    ndim = 1

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def __getitem__(self, names: object) -> Any:
        return self._mesh


@contextlib.contextmanager
def _root_gathered(model: Any) -> Iterator[None]:
    """Shard as torch up to 2.7, which leaves the root gathered after forward even where it is told to let go of it.

    Source:
        ``_lazy_init`` in torch/distributed/fsdp/_fully_shard/_fsdp_state.py (v2.7.1).
    """
    made = parallelize.fully_shard

    def sharded(module: Any, **options: Any) -> Any:
        return made(module, **(options | {"reshard_after_forward": None} if module is model else options))

    with replaced(parallelize, {"fully_shard": sharded}):
        yield


def _compiling(setup: TrainingSetup) -> Any:
    """Return what a TOML file says of the compiler."""
    return SimpleNamespace(enable=setup.config.compile == "layers", components=["model", "loss"], backend="inductor")


def _checkpointing(setup: TrainingSetup) -> ActivationCheckpoint:
    """Return what a TOML file says of checkpointing."""
    layers = setup.config.checkpointed_layers
    if layers.first is not None or (layers.every > 1 and setup.checkpointing != "full"):
        raise CannotAnswerError(f"checkpointed_layers: torchtitan {VERSION} checkpoints every so many-th layer, whole")
    if layers.every > 1:
        if FIRST:
            parallelize.ptd_checkpoint_wrapper.__dict__["_count"] = 0
        else:
            activation_checkpoint._layer_sac_count = 0
        return ActivationCheckpoint(mode="selective", selective_ac_option=str(layers.every))
    return ActivationCheckpoint(mode=setup.checkpointing, selective_ac_option="op")


# -------------------------------------------------------------------- trainer
class _Trainer:
    """A stand-in that has what the trainer's own step reads."""

    def __init__(self, model: Any, setup: TrainingSetup, recorder: Recorder, dims: Any) -> None:
        self.model, self.setup, self.recorder, self.dims, self.done = model, setup, recorder, dims, 0
        compiling = _compiling(setup)
        told = SimpleNamespace(compile=compiling, training=SimpleNamespace(compile=compiling.enable))
        self.loss: Any = build_cross_entropy_loss(told)
        kind = setup.profile.optimizer
        options = {"lr": 1e-4, "fused": kind == "fused", "foreach": kind == "foreach"}
        self.optimizers: Any = OptimizersContainer([model], torch.optim.AdamW, options)
        self.batches = self._moved()
        watch_tensors(model, recorder)
        watch_layers(model.layers.values(), model.output, recorder)

    def step(self) -> None:
        """Run ``Trainer.train_step`` once."""
        self.done = 0
        Trainer.train_step(self._stand_in(), self.batches)

    def _rows(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield batches of the host."""
        shape = self.setup.config.micro_batch_size, self.setup.config.sequence_length
        while True:
            rows = [torch.zeros(shape, dtype=torch.long) for _ in range(2)]
            yield {"input": rows[0]}, rows[1]

    def _moved(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Return batches as the trainer's generator yields them: 0.1.0 moves each when it is asked for."""
        utils.device_type = "meta"
        trainer = SimpleNamespace(
            metrics_processor=SimpleNamespace(ntokens_since_last_log=0, data_loading_times=[]), ntokens_seen=0
        )
        moved: Iterator[tuple[dict[str, Tensor], Tensor]] = Trainer.batch_generator(trainer, self._rows())
        return moved

    def _stand_in(self) -> Any:
        config, nothing = self.setup.config, (lambda *_, **__: None)
        clipped = 1.0 if config.clip_gradients else float("inf")
        dtype = TORCH_NAMES[config.compute_dtype]
        return SimpleNamespace(
            job_config=SimpleNamespace(training=SimpleNamespace(max_norm=clipped)),
            step=1,
            device=META,
            model_args=self.model.model_args,
            model_parts=[self.model],
            parallel_dims=self.dims,
            loss_fn=self.loss,
            train_context=lambda *_: contextlib.nullcontext(),
            ft_manager=SimpleNamespace(enabled=False),
            maybe_enable_amp=self._amp(maybe_enable_amp(self.dims, dtype, "cuda")),
            optimizers=SimpleNamespace(zero_grad=self.optimizers.zero_grad, step=self._update),
            lr_schedulers=SimpleNamespace(schedulers=[SimpleNamespace(get_last_lr=lambda: [0.0])], step=nothing),
            metrics_processor=SimpleNamespace(should_log=lambda _: False),
            checkpointer=SimpleNamespace(maybe_wait_for_staging=nothing),
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            forward_backward_step=self._forward_backward,
            post_dataloading_process=lambda rows, labels: (rows["input"], labels, {}, {}),
        )

    def _forward_backward(self, *batch: Any, **arguments: Any) -> Tensor:
        """Run ``Trainer.forward_backward_step``."""
        self.recorder.instant("forward", later=self.done > 0)
        self.recorder.forward_begins()
        loss: Tensor = Trainer.forward_backward_step(self._stand_in(), *batch, **arguments)
        self.done += 1
        if self.done == self.setup.config.gradient_accumulation_steps:
            self.recorder.instant("gradient clipping")
        return loss

    @contextlib.contextmanager
    def _amp(self, region: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """Tell that backward begins where the region of model and loss ends, whose casts of weights go with it."""
        with region:
            yield
        self.recorder.forward_ends()
        self.recorder.instant("loss backward", backward=True, later=self.done > 0)

    def _update(self) -> None:
        self.recorder.instant("optimizer step")
        self.optimizers.step()
        for optimizer in self.optimizers:
            watch_states(optimizer, self.recorder)
