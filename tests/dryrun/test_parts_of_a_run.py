"""Parts of a dry run that need no process of their own: steps, limits, files, values."""

import copy
import inspect
import os
import shutil
import subprocess
import tarfile
import threading
import weakref
from inspect import signature

import pytest
import torch
from torch.optim import lbfgs

from memplan.dryrun.files.sandboxed_files import SandboxedFiles
from memplan.dryrun.libraries.flash_attn_package import flash_attn_installed
from memplan.dryrun.machine.cuda_runtime import pretended_runtime
from memplan.dryrun.machine.data_loaders import data_loaders
from memplan.dryrun.machine.known_values import KnownValues
from memplan.dryrun.machine.pretended_machine import pretended_machine
from memplan.dryrun.machine.pretended_tensors import answered
from memplan.dryrun.script_child import _fullest
from memplan.dryrun.terms.kernel_checks import check_arguments
from memplan.dryrun.terms.other_programs import harmless_program, refuse_launcher
from memplan.dryrun.terms.outcome import Card, Ranks, RefusedError
from memplan.dryrun.terms.script_lines import ScriptLines, _answer
from memplan.dryrun.watching.live_recorder import LiveRecorder
from memplan.errors import UnknownNameError
from memplan.library.runs.dry_run_answer import budgeted_job, findings
from memplan.trace.recording.assembly import assembled

LINES = ScriptLines(__file__)
GIB = 2**30


def recorder_of(card_bytes: int) -> LiveRecorder:
    return LiveRecorder(Card("card", "9.0", card_bytes, card_bytes), LINES, workspaces=False)


def test_the_fullest_step_may_be_an_earlier_one():
    recorder = recorder_of(GIB)
    for step, size in enumerate((1024, 4096, 2048), start=1):
        recorder.next_step()
        recorder.instant("forward")
        recorder._born(size, f"made in step {step}", (size // 4,))
        recorder._freed(step)
        recorder.instant(f"end of step {step}")
        recorder.events.append((False, step - 1))
    number, trace, peaks = _fullest(recorder, 0)
    assert (number, peaks) == (2, (0, 1024, 4096, 2048))
    assert (trace.peak_bytes, trace.peak.operation) == (4096, "made in step 2")
    assert not trace.instants.keys() & {"end of step 1", "end of step 3"}
    assert len(recorder.records) == 3


def test_what_goes_while_a_run_is_summed_up_is_none_of_the_fullest_step(monkeypatch):
    recorder = recorder_of(GIB)
    for step, size in enumerate((4096, 1024), start=1):
        recorder.next_step()
        recorder.instant("forward")
        recorder._born(size, f"made in step {step}", (size // 4,))

    def assembled_late(given, *rest):
        recorder.events.append((False, 1))  # a cycle of the last step is collected
        return assembled(given, *rest)

    monkeypatch.setattr("memplan.dryrun.script_child.assembled", assembled_late)
    number, trace, _ = _fullest(recorder, 0, 1)
    assert (number, len(trace.storages), len(trace.events)) == (1, 1, 1)


def test_a_share_of_the_card_that_a_script_allows_itself_is_a_limit():
    recorder = recorder_of(8 * GIB)
    with pretended_runtime(recorder):
        torch.cuda.set_per_process_memory_fraction(0.25)
        recorder._born(GIB, "first", (1,))
        assert recorder.runs_out is None
        recorder._born(2 * GIB, "second", (1,))
        recorder._born(16 * GIB, "third", (1,))
    assert recorder.runs_out is not None
    assert recorder.runs_out.operation == "second"
    assert "of which 7.00 GiB is free" in recorder.runs_out.message


@pytest.mark.parametrize("command", ["git rev-parse HEAD", ["git", "status", "-s"], "hostname", ["uname", "-r"]])
def test_programs_that_only_tell_something_are_started(command):
    assert harmless_program(command) is command


@pytest.mark.parametrize(
    "command",
    ["git commit", "git log > log", "git log --output=log", "hostname mine", "true", "", [], [3], 'echo "', None],
)
def test_programs_that_may_do_anything_are_not(command):
    assert harmless_program(command) is None


def test_a_launcher_is_refused_for_the_script_that_it_starts():
    refuse_launcher("torch.distributed.pipelining")
    with pytest.raises(RefusedError, match="name the script that it starts"):
        refuse_launcher("torch.distributed.run")


def test_the_driver_tells_of_the_pretended_card():
    query = "nvidia-smi --query-gpu=index,memory.used,memory.total,power.draw --format=csv"
    with pretended_runtime(recorder_of(8 * GIB)):
        assert harmless_program(f"{query},noheader,nounits") == "echo '0, 0, 8192, [N/A]'"
        assert harmless_program(query.split())[1].splitlines()[1] == "0, 0 MiB, 8192 MiB, [N/A]"
        assert harmless_program(["/usr/bin/nvidia-smi"])[1].endswith("0MiB / 8192MiB")


CHECKED = {
    "mat1 and mat2 must have the same dtype, but got Half and Float": (
        torch.ops.aten.bmm.default, (torch.ones(1, 2, 2).half(), torch.ones(1, 2, 2)),
    ),
    "number -1 where an embedding has 5 rows": (
        torch.ops.aten.embedding.default, (torch.ones(5, 2), torch.tensor([4, -1])),
    ),
    "number 7 where a loss has 7 classes": (
        torch.ops.aten.nll_loss_forward.default, (torch.ones(2, 7), torch.tensor([7, -100]), None, 1, -100),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", CHECKED)
def test_what_kernels_refuse_is_told(message):
    operator, arguments = CHECKED[message]
    with pytest.raises(RuntimeError, match=message):
        check_arguments(operator, arguments, lambda tensor: tensor)


def test_files_and_programs_of_a_script_are_kept(tmp_path):
    place, scratch = tmp_path / "place", tmp_path / "scratch"
    place.mkdir()
    scratch.mkdir()
    files = SandboxedFiles(str(scratch), LINES, allow_writes=False)
    with files.sandbox():
        (place / "touched").touch()
        os.close(os.open(place / "opened", os.O_CREAT | os.O_WRONLY))
        with pytest.raises(RefusedError, match=r"test_parts_of_a_run.py:\d+"):
            subprocess.run(["true"], check=False)
        with pytest.raises(RefusedError):
            os.system("true")
    assert list(place.iterdir()) == []
    assert {os.path.basename(name) for name in files.skipped} == {"touched", "opened"}
    assert subprocess.run(["true"], check=False).returncode == 0


def test_a_folder_holds_what_is_there_and_what_a_script_has_made_of_it(tmp_path):
    place, scratch = tmp_path / "place", tmp_path / "scratch"
    for folder in (place / "old", scratch):
        folder.mkdir(parents=True)
    (place / "rows.txt").write_text("1")
    (place / "log.txt").write_text("3")
    (place / "old" / "step.txt").write_text("2")
    with SandboxedFiles(str(scratch), LINES, allow_writes=False).sandbox():
        pytest.importorskip("numpy").savetxt(place / "more.txt", [3.0])
        with tarfile.open(place / "all.tar", "w") as archive:
            archive.add(place / "rows.txt")
        assert {path.name for path in place.iterdir()} == {"all.tar", "log.txt", "more.txt", "old", "rows.txt"}
        shutil.rmtree(place / "old")
        assert not (place / "old").exists()
        (place / "old").mkdir()
        assert {path.name for path in place.rglob("*.txt")} == {"log.txt", "more.txt", "rows.txt"}
        (place / "rows.txt").unlink()
        with pytest.raises(FileNotFoundError):
            (place / "rows.txt").read_text()
        assert {entry.name for entry in os.scandir(place)} == {"all.tar", "log.txt", "more.txt", "old"}
        assert set(os.listdir(os.fsencode(place))) == {b"all.tar", b"log.txt", b"more.txt", b"old"}
        with (place / "log.txt").open("a") as log:
            log.write("4")
        assert (place / "log.txt").rename(place / "log.old").read_text() == "34"
        assert not (place / "log.txt").exists()
    assert (place / "log.txt").read_text() == "3"
    assert sorted(path.name for path in place.rglob("*")) == ["log.txt", "old", "rows.txt", "step.txt"]


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("name", ["unique", "unique_consecutive"])
def test_distinct_elements_have_the_shapes_of_real_ones(name, dim):
    function = getattr(torch, name)
    real = function(torch.arange(32.0).view(4, 8), return_inverse=True, return_counts=True, dim=dim)
    with pretended_machine(recorder_of(GIB), KnownValues(LINES, "worst"), kernels="cpu"):
        made = function(torch.empty(4, 8, device="cuda"), return_inverse=True, return_counts=True, dim=dim)
        assert [one.shape for one in made] == [one.shape for one in real]


@pytest.mark.parametrize(("routing", "count"), [("balanced", 5), ("worst", 9)])
def test_boxes_that_overlap_are_suppressed_by_rule(routing, count):
    values = KnownValues(LINES, routing)
    with pretended_machine(recorder_of(GIB), values, kernels="cpu"):
        boxes = torch.empty(9, 4, device="cuda")
        left = answered(values, "torchvision.nms.default", (boxes, boxes[:, 0], 0.5), {})
        assert (left.shape, left.dtype, left.is_cuda) == ((count,), torch.int64, True)


def test_what_nobody_has_set_is_not_known():
    values = KnownValues(LINES)
    with pretended_machine(recorder_of(GIB), values, kernels="cpu"):
        bare = torch.empty(4, dtype=torch.int64, device="cuda")
        assert values.of(bare) is None
        assert values.of(torch.empty_like(bare)) is None
        assert values.of(bare.fill_(3)).tolist() == [3] * 4
        bare += bare.new_empty(4)
        assert values.of(bare) is None


def test_one_operand_that_is_known_may_decide():
    values = KnownValues(LINES)
    with pretended_machine(recorder_of(GIB), values, kernels="cpu"):
        scores = torch.nn.Linear(8, 1).cuda()(torch.ones(4, 8, device="cuda"))
        unknown, full = (scores > 0.5).any(), torch.full((4, 1), True, device="cuda")
        assert values.of(unknown) is None
        assert values.of(unknown & ~full.all()).tolist() is False
        assert values.of((scores > 0.5) | full).tolist() == [[True]] * 4
        assert values.of(unknown & full.all()) is None
        assert values.of(unknown | ~full.all()) is None


def test_numbers_that_nobody_knows_are_finite_and_a_single_one_is_positive():
    values = KnownValues(LINES)
    with pretended_machine(recorder_of(GIB), values, kernels="cpu"):
        norm = torch.linalg.vector_norm(torch.nn.Linear(4, 4).cuda().weight)
        invalid = ~torch.isfinite(norm) | (norm < 0)  # as DeepSpeed asks whether a step is skipped
        assert values.of(invalid.any()).tolist() is False
        assert values.of(torch.isfinite(norm.log()).logical_not()).tolist() is False
        assert values.of(norm < 1) is None
        assert values.of(torch.full((2,), -1.0).cuda() < 0).tolist() == [True, True]
        assert values.of(torch.isfinite(torch.tensor(float("inf")).cuda())).tolist() is False


def test_a_search_along_a_line_ends_with_the_first_step_that_it_tries():
    lines, first = inspect.getsourcelines(lbfgs._strong_wolfe)
    for condition, answer in {"abs(gtd_new) <= -c2 * gtd": True, "gtd_new >= 0": False}.items():
        assert _answer(lbfgs.__file__, first + lines.index(f"        if {condition}:\n")) is answer


def test_a_parameter_that_is_held_weakly_moves_and_stays_the_same_object():
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"):
        layer = torch.nn.Linear(4, 4)
        weight = layer.weight
        weak = weakref.ref(weight)  # as DeepSpeed names its parameters
        layer.cuda()
        assert weak() is layer.weight is weight
        assert weight.is_cuda
        back = weight.detach().cpu()
        back.mul_(2)  # as offloaded gradients are clipped
        assert back.is_contiguous()


def test_a_sparse_gradient_has_no_storage_to_share_and_closeness_is_asked():
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"):
        table = torch.nn.Embedding(100, 16, sparse=True).cuda()
        optimizer = torch.optim.SparseAdam(table.parameters())
        table(torch.tensor([3, 1, 3], device="cuda")).sum().backward()
        assert table.weight.grad.is_sparse
        optimizer.step()
        assert torch.allclose(table.weight, table.weight + 1)
        assert not torch.allclose(torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"))


def test_what_a_script_asks_of_the_card_itself_is_answered():
    with pretended_runtime(recorder_of(8 * GIB)):
        assert torch.cuda.memory.get_allocator_backend() == "native"
        assert torch.cuda.device_memory_used() == 0 == torch.cuda.temperature() == torch.cuda.get_sync_debug_mode()
        assert torch.cuda.default_generators[0].initial_seed() >= 0
        assert not torch.cuda.get_device_properties(0).is_integrated


def test_attention_of_grouped_queries_is_fused_on_a_cpu_too():
    def attended(device: str) -> torch.Tensor:
        query, key, value = (torch.ones(2, heads, 64, 32, device=device, requires_grad=True) for heads in (4, 2, 2))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    assert "FlashAttentionForCpu" in type(attended("cpu").grad_fn).__name__
    recorder = recorder_of(GIB)
    with pretended_machine(recorder, KnownValues(LINES), kernels="cpu"):
        assert attended("cuda").shape == (2, 4, 64, 32)
    assert not any("softmax" in record.operation for record in recorder.records)


def test_what_comes_to_the_cpu_has_the_values_that_are_known():
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"):
        assert torch.arange(5).cuda().cpu().tolist() == list(range(5))
        assert torch.arange(5, dtype=torch.uint8).cuda().to("cpu", torch.int64).sum().item() == 10


def test_a_deep_copy_has_one_storage_which_its_views_share():
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"):
        layer = torch.nn.Linear(4, 4).cuda()
        copied = copy.deepcopy(layer).weight
        assert isinstance(copied, torch.nn.Parameter)
        assert copied.requires_grad
        assert layer.weight.data_ptr() != copied.data_ptr() == copied.detach().data_ptr()
        with pytest.raises(RuntimeError, match="leaves"):
            copy.deepcopy(layer(torch.ones(1, 4, device="cuda")))


def test_fused_norms_and_default_devices_run():
    with pretended_machine(recorder_of(GIB), KnownValues(LINES)):
        norm = torch.nn.RMSNorm(64).to(0)
        norm(torch.empty(8, 64, device="cuda")).sum().backward()
        assert norm.weight.grad.is_cuda
        with torch.device("meta"):
            assert torch.nn.Linear(2, 2).weight.is_meta


def test_loops_that_draw_or_ask_until_something_no_longer_holds_come_to_an_end():
    recorder, values = recorder_of(GIB), KnownValues(LINES)
    with pretended_machine(recorder, values, kernels="cpu"):
        weight = torch.empty(512, 64, device="cuda")
        before = recorder.allocator.requested_bytes
        torch.nn.init.trunc_normal_(weight, std=0.02, a=-0.06, b=0.06)
        peak = recorder.allocator.requested_peak_bytes - before
        assert 3 * weight.nbytes + 512 * 64 <= peak <= 3 * weight.nbytes + 3 * 512 * 64
        times = 0
        while (weight > 0).any():
            times += 1
        assert times > 1
    assert any(answer.question.endswith("again and again") for answer in values.answers.values())


def test_an_operator_of_ones_own_runs_with_a_form_of_three_lines():
    @torch.library.custom_op("mine::tripled", mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a kernel of CUDA")

    @torch.library.register_fake("mine::tripled")
    def _(x):
        return torch.empty_like(x)

    recorder = recorder_of(GIB)
    with pretended_machine(recorder, KnownValues(LINES), kernels="cpu"):
        rows = torch.empty(16, 64, device="cuda")
        before = recorder.allocator.requested_bytes
        assert tripled(rows).is_cuda
        assert recorder.allocator.requested_peak_bytes - before == rows.nbytes


def test_threads_of_a_script_find_the_same_gpu():
    moved = []
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"):
        thread = threading.Thread(target=lambda: moved.append(torch.arange(3).cuda() + 1))
        thread.start()
        thread.join()
        assert moved[0].is_cuda
        assert moved[0].tolist() == [1, 2, 3]


def test_what_only_cuda_has_does_nothing_or_is_refused():
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"):
        layer = torch.nn.Linear(4, 2)
        assert torch.nn.DataParallel(layer.cuda())(torch.ones(3, 4)).shape == (3, 2)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, with_stack=True) as profiled:
            profiled.step()
        assert profiled.key_averages().table(sort_by="cuda_time_total") == ""
        torch.cuda.memory._record_memory_history(max_entries=10)
        with torch.cuda.nvtx.range("step"):
            assert torch.cuda.memory_snapshot()[0]["total_size"] == 2 * 2**20
        with pytest.raises(RefusedError, match="CUDA graph's own handle"):
            torch.cuda.CUDAGraph().raw_cuda_graph()
        assert torch.jit.script(layer) is layer
        assert torch._C._cuda_getCurrentRawStream(torch.cuda.device("cuda:0").idx) == torch.cuda.device(0).idx == 0


def test_numbers_are_read_on_the_cpu_wherever_tensors_are_made():
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"), torch.device("cuda"):
        assert torch.randn(2**11, 2**10).cpu().numpy().shape == (2**11, 2**10)
        assert torch.randn(0, 4).tolist() == []


def test_saved_tensors_may_wait_in_pinned_memory():
    recorder = recorder_of(GIB)
    with pretended_machine(recorder, KnownValues(LINES), kernels="cpu"):
        layer = torch.nn.Linear(64, 64).cuda()
        rows = torch.rand(4096, 64, device="cuda")
        before = recorder.allocator.requested_bytes
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = torch.nn.functional.cross_entropy(
                layer(rows.exp()), torch.zeros(4096, dtype=torch.int64, device="cuda")
            )
        assert recorder.allocator.requested_bytes - before < 64 * 4096
        loss.backward()
        assert layer.weight.grad.is_cuda


def test_a_process_of_several_finds_what_torchrun_tells_it():
    ranks = Ranks(16, 11)
    assert {
        "RANK": "11",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
    }.items() <= ranks.environment.items()
    with (
        pretended_machine(recorder_of(GIB), KnownValues(LINES)),
        pytest.raises(RefusedError, match="joins a process group"),
    ):
        torch.distributed.init_process_group("nccl")
    with (
        pretended_machine(recorder_of(GIB), KnownValues(LINES)),
        pytest.raises(RefusedError, match="see: --gpus"),
    ):
        torch.distributed.device_mesh.init_device_mesh("cuda", (2,))


def test_rows_of_a_loader_are_as_long_as_asked_for():
    rows = [{"input_ids": torch.arange(5), "pixels": torch.zeros(3, 2), "label": torch.tensor(1)} for _ in range(3)]
    with data_loaders(8):
        (batch,) = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=2, timeout=60)
    assert {name: tuple(part.shape) for name, part in batch.items()} == {
        "input_ids": (4, 8),
        "pixels": (4, 3, 2),
        "label": (4,),
    }
    assert batch["input_ids"][3].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_rows_that_no_loader_gives_are_not_lengthened_in_silence():
    with pytest.raises(RefusedError, match="leave --synthetic out"), data_loaders(8):
        list(torch.utils.data.DataLoader([torch.zeros(3)]))


def test_flash_attention_keeps_and_takes_what_the_packages_kernels_do():
    recorder, notes = recorder_of(8 * GIB), list[str]()
    allocator = recorder.allocator
    with pretended_machine(recorder, KnownValues(LINES), kernels="cpu"), flash_attn_installed("9.0", notes):
        from flash_attn import flash_attn_qkvpacked_func, flash_attn_varlen_func

        # by which transformers tells what it may give them
        assert "max_seqlen_q" in signature(flash_attn_varlen_func).parameters

        bounds = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
        query = torch.empty(300, 8, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        key, value = (torch.empty(300, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in "kv")
        before = allocator.requested_bytes
        out = flash_attn_varlen_func(query, key, value, bounds, bounds, 200, 200, causal=True)
        assert allocator.requested_bytes - before == 2 * out.numel() + 4 * 8 * 300 + 16
        gradient = torch.empty_like(out)
        before = allocator.requested_bytes
        out.backward(gradient)
        padded = 300 + 2 * 128
        formed = 2 * 300 * (8 + 2 + 2) * 64
        sums, expanded = 4 * 8 * padded * (1 + 64), 2 * (2 * 300 * 8 * 64)
        assert allocator.requested_peak_bytes - before == formed + sums + expanded

        packed = torch.empty(2, 50, 3, 4, 36, dtype=torch.float16, device="cuda", requires_grad=True)
        before = allocator.requested_bytes
        whole = flash_attn_qkvpacked_func(packed, causal=True)
        assert whole.shape == (2, 50, 4, 36)
        assert allocator.requested_bytes - before == 4 * (2 * 2 * 50 * 4 * 40) + 4 * 2 * 4 * 50 + 16  # padded to 40
        whole.backward(torch.empty_like(whole))
        assert packed.grad.shape == packed.shape
    assert notes[0].startswith("flash_attn is taken for installed")


def test_padding_is_taken_out_and_put_back():
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"), flash_attn_installed("9.0", []):
        from flash_attn.bert_padding import pad_input, unpad_input

        mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).cuda()
        tokens, indices, bounds, longest, _ = unpad_input(torch.empty(2, 3, 8, device="cuda"), mask)
        assert (tokens.shape, longest, bounds.tolist(), indices.tolist()) == ((3, 8), 2, [0, 2, 3], [0, 1, 3])
        assert pad_input(tokens, indices, 2, 3).shape == (2, 3, 8)


def test_gradients_summed_in_one_order_are_refused_wherever_that_is_said():
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"), flash_attn_installed("9.0", []):
        from flash_attn import flash_attn_func, flash_attn_qkvpacked_func

        packed = torch.empty(2, 4, 3, 2, 8, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(RefusedError, match="deterministic=True"):
            flash_attn_qkvpacked_func(packed, 0.0, None, True, (-1, -1), 0.0, None, True)
        query, key, value = packed.unbind(2)
        assert flash_attn_func(causal=True, v=value, k=key, q=query).shape == query.shape


@pytest.mark.parametrize(
    ("capability", "dtype", "said"),
    [("7.5", torch.float16, "Ampere GPUs or newer"), ("8.0", torch.float32, "fp16 and bf16")],
)
def test_flash_attention_refuses_what_the_package_refuses(capability, dtype, said):
    with pretended_machine(recorder_of(GIB), KnownValues(LINES), kernels="cpu"), flash_attn_installed(capability, []):
        from flash_attn import flash_attn_func

        with pytest.raises(RuntimeError, match=said):
            flash_attn_func(*(torch.empty(1, 4, 2, 8, dtype=dtype, device="cuda") for _ in "qkv"))
        with pytest.raises(RefusedError, match=r"flash_attn\.losses is not modelled"):
            __import__("flash_attn.losses.cross_entropy")


BUDGET = "version: 1\ndefaults: {model: llama-8b, gpu: h100, config: qlora}\nbudgets:\n"


def test_a_run_is_held_against_the_job_of_its_name(tmp_path):
    file = tmp_path / "budget.yaml"
    file.write_text(
        BUDGET + "  - {name: train, limit: 2 GiB, components: {weights: 1 MiB}}\n  - {name: other, limit: 1 GiB}\n"
    )
    job = budgeted_job(file, "scripts/train.py")
    assert not findings(job, "h100", GIB, 80 * GIB, {"weights": 2**20}, fits=True)
    over = findings(job, "h100", 3 * GIB, 80 * GIB, {"weights": 2**21}, fits=True)
    assert [finding.rule for finding in over] == ["limit", "component"]
    with pytest.raises(UnknownNameError, match="did you mean 'train'"):
        budgeted_job(file, "trains.py")


@pytest.mark.parametrize("name", ["all_gather_object", "gather_object", "scatter_object_list"])
def test_objects_are_sent_by_the_names_that_torch_gives_them(name):
    from memplan.dryrun.machine.pretended_ranks import _group_calls

    given = [one for one in signature(_group_calls(Ranks(2, 1))[name]).parameters if one not in ("_", "__")]
    assert given == list(signature(getattr(torch.distributed, name)).parameters)[: len(given)]


def test_one_rank_gathers_what_all_would_give():
    from memplan.dryrun.machine.pretended_ranks import _group_calls

    parts = [None, None]
    _group_calls(Ranks(2, 1))["gather_object"](obj={"step": 1}, object_gather_list=parts, dst=0)
    assert parts == [{"step": 1}, {"step": 1}]


def test_a_collective_that_is_given_its_tensor_by_name_goes_on():
    from torch._C._distributed_c10d import Work

    from memplan.dryrun.machine.pretended_ranks import _with_result

    def broadcast(tensor, src, async_op=False):
        return Work() if async_op else None

    sent = _with_result(broadcast)
    assert sent(tensor=torch.ones(2), src=0) is None
    assert sent(tensor=torch.ones(2), src=0, async_op=True).get_future().value()[0].tolist() == [1, 1]
