"""Operators that allocate inside themselves need, forward and backward, what the CPU's allocator hands out for them."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from memplan.dryrun.machine.known_values import KnownValues
from memplan.dryrun.machine.pretended_machine import pretended_machine
from memplan.dryrun.terms.outcome import Card
from memplan.dryrun.terms.script_lines import ScriptLines
from memplan.dryrun.watching.live_recorder import LiveRecorder
from memplan.dryrun.watching.watched_steps import WatchedSteps
from memplan.measure.measure_cpu import moments

pytestmark = pytest.mark.usefixtures("new_garbage_alone")

LINES = ScriptLines(__file__)
ROWS, COLUMNS = 96, 40
Case = Callable[[str], Tensor]


def weights(device: str, *shape: int) -> Tensor:
    return torch.randn(*(shape or (ROWS, COLUMNS)), device=device, requires_grad=True)


def targets(device: str) -> Tensor:
    return torch.rand(ROWS, COLUMNS, device=device)


def classes(device: str) -> Tensor:
    return torch.arange(ROWS, device=device) % COLUMNS


def mask(device: str) -> Tensor:
    return MASK.to(device, copy=True)


MASK = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 3 > 0


def connectionist(device: str) -> Tensor:
    logs = F.log_softmax(weights(device, 50, 8, COLUMNS), -1)
    return F.ctc_loss(logs, torch.ones(8, 10, dtype=torch.long).to(device), torch.full((8,), 50), torch.full((8,), 10))


def written_over(device: str) -> Tensor:
    result = weights(device) * 1
    result[mask(device)] = 0
    return result * 2


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": lambda x, y, **how: F.mse_loss(x, y, **how),
    "l1": lambda x, y, **how: F.l1_loss(x, y, **how),
    "smooth_l1": lambda x, y, **how: F.smooth_l1_loss(x, y, **how),
    "huber": lambda x, y, **how: F.huber_loss(x, y, **how),
    "binary": lambda x, y, **how: F.binary_cross_entropy(torch.sigmoid(x), y, **how),
    "logits": lambda x, y, **how: F.binary_cross_entropy_with_logits(x, y, **how),
    "weighted_logits": lambda x, y, **how: F.binary_cross_entropy_with_logits(
        x, y, pos_weight=torch.ones(COLUMNS, device=x.device), weight=torch.ones(ROWS, 1, device=x.device), **how
    ),
    "soft_margin": lambda x, y, **how: F.soft_margin_loss(x, y, **how),
    "gaussian": lambda x, y, **how: F.gaussian_nll_loss(x, y, y + 1, **how),
    "kl": lambda x, y, **how: F.kl_div(F.log_softmax(x, -1), y, **how),
    "poisson": lambda x, y, **how: F.poisson_nll_loss(x, y, **how),
    "cross_entropy": lambda x, y, **how: F.cross_entropy(x, classes(y.device), **how),
    "multi_margin": lambda x, y, **how: F.multi_margin_loss(x, classes(y.device), **how),
    "multilabel_margin": lambda x, y, **how: F.multilabel_margin_loss(x, torch.zeros_like(y, dtype=torch.long), **how),
    "cosine": lambda x, y, **how: F.cosine_embedding_loss(x, y, torch.ones(ROWS, device=y.device), **how),
    "triplet": lambda x, y, **how: F.triplet_margin_loss(x, y, y * 2, **how),
}


def forward_mode(device: str) -> Tensor:
    value, along = torch.func.jvp(torch.tanh, (weights(device),), (targets(device),))
    return value + along


OTHERS: dict[str, Case] = {
    "connectionist": connectionist,
    "mish": lambda device: F.mish(weights(device)) * 2,
    "chosen": lambda device: weights(device)[mask(device)] * 2,
    "chosen_rows": lambda device: weights(device)[mask(device)[:, 0]] * 2,
    "written_over": written_over,
    "index_select": lambda device: weights(device).index_select(0, classes(device)) * 2,
    "gather": lambda device: weights(device).gather(1, classes(device)[:, None]) * 2,
    "largest": lambda device: weights(device).topk(5)[0] * 2,
    "take": lambda device: weights(device).take(classes(device)) * 2,
    "norm_of_columns": lambda device: F.layer_norm(weights(device, 8, 16, 1000).transpose(1, 2), (16,)).exp(),
    "linear_of_columns": lambda device: F.linear(
        weights(device, 8, ROWS, COLUMNS).transpose(1, 2), weights(device, 50, ROWS), weights(device, 50)
    ).exp(),
}


def peak_when_executed(case: Case) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        end(case("cpu"))
    changes: list[Any] = sorted(moments(recorded.profiler.kineto_results.experimental_event_tree()))
    return peak(change for _, change in changes if isinstance(change, int))


def peak_when_pretended(case: Case) -> int:
    recorder = LiveRecorder(Card("card", "9.0", 2**36, 2**36), LINES, workspaces=False)
    with pretended_machine(recorder, KnownValues(LINES), kernels="cpu"), WatchedSteps(recorder, 9).watching():
        end(case("cuda"))
    return peak(recorder.records[index].bytes * (1 if begins else -1) for begins, index in recorder.events)


def end(result: Tensor) -> None:
    (result if result.dim() == 0 else result.sum()).backward()
    del result
    gc.collect()


def peak(changes: Any) -> int:
    total = most = 0
    for change in changes:
        total += change
        most = max(most, total)
    return most


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_keeps_and_takes_what_it_does_when_executed(name, reduction):
    def case(device: str) -> Tensor:
        return LOSSES[name](weights(device), targets(device), reduction=reduction) * 1

    really = peak_when_executed(case)
    assert abs(peak_when_pretended(case) - really) <= really / 1000


@pytest.mark.parametrize("name", OTHERS)
def test_an_operator_keeps_and_takes_what_it_does_when_executed(name):
    really = peak_when_executed(OTHERS[name])
    assert abs(peak_when_pretended(OTHERS[name]) - really) <= really / 1000


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_runs_under_the_names_that_torch_compiles_it_by():
    assert peak_when_pretended(forward_mode) >= 4 * weights("cpu").nbytes
