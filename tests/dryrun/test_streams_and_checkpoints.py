"""What a script finds of CUDA's streams, graphs, counters and failures, and of the checkpoints that it saves."""

import contextlib
import copy
import io
from collections import OrderedDict

import pytest
import torch

from memplan.allocator.caching_allocator import CachingAllocator, replay
from memplan.allocator.pools import Turn
from memplan.dryrun.files.sandboxed_files import SandboxedFiles
from memplan.dryrun.machine.known_values import KnownValues
from memplan.dryrun.machine.pretended_machine import pretended_machine
from memplan.dryrun.terms.outcome import Card, RefusedError, StepsDoneError
from memplan.dryrun.terms.script_lines import ScriptLines
from memplan.dryrun.watching.live_recorder import LiveRecorder
from memplan.dryrun.watching.watched_steps import WatchedSteps
from memplan.library.answers.traced_step import replayed
from memplan.trace.recording.assembly import assembled

LINES = ScriptLines(__file__)
MIB, GIB = 2**20, 2**30


def recorder_of(card_bytes: int) -> LiveRecorder:
    return LiveRecorder(Card("card", "9.0", card_bytes, card_bytes), LINES, workspaces=False)


@contextlib.contextmanager
def machine(card_bytes: int = 8 * GIB):
    recorder, values = recorder_of(card_bytes), KnownValues(LINES)
    with pretended_machine(recorder, values, kernels="cpu"):
        yield recorder


def test_a_captured_graph_keeps_its_segments_until_it_is_gone():
    allocator = CachingAllocator()
    allocator.turn(Turn(0, "place", stream=1, pool=7))
    allocator.malloc("captured", 30 * MIB)
    allocator.free("captured")
    allocator.turn(Turn(0, "place"))
    allocator.malloc("eager", 30 * MIB)
    assert allocator.driver.reserved_bytes == 60 * MIB
    allocator.free("eager")
    allocator.release_cached()
    assert allocator.driver.reserved_bytes == 30 * MIB
    allocator.turn(Turn(0, "drop", pool=7))
    assert allocator.driver.reserved_bytes == 30 * MIB
    allocator.release_cached()
    assert allocator.driver.reserved_bytes == 0


def test_a_replay_does_what_the_program_asked_between_events():
    events = [(1, "a", 30 * MIB), (-1, "a", 30 * MIB), (1, "b", 40 * MIB)]
    assert replay(events).reserved_peak_bytes == 70 * MIB
    assert replay(events, turns=(Turn(2, "release"),)).reserved_peak_bytes == 40 * MIB
    assert replay([*events[:2], (1, "b", 20 * MIB)], turns=(Turn(2, "place", stream=3),)).segments == 2


def test_graphs_are_captured_beside_the_main_stream_and_replayed_without_a_request():
    with machine() as recorder:
        graph, weight = torch.cuda.CUDAGraph(), torch.empty(MIB, device="cuda")
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            out = weight * 2 + 1
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                out[0].item()
        requests = len(recorder.records)
        graph.replay()
        assert len(recorder.records) == requests
        assert recorder.allocator.driver.reserved_bytes == 3 * 20 * MIB - 20 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 40 * MIB
        del out, graph
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 20 * MIB
        with pytest.raises(RuntimeError, match="non-default stream"):
            torch.cuda.CUDAGraph().capture_begin()
    assert replayed(assembled(recorder, 0), "", None).reserved_peak_bytes == 40 * MIB


def test_graphed_callables_share_a_pool_and_train():
    with machine() as recorder:
        layer, given = torch.nn.Linear(512, 512).cuda(), torch.empty(512, 512, device="cuda")
        layer = torch.cuda.make_graphed_callables(layer, (given,))
        before = len(recorder.records)
        layer(torch.empty(512, 512, device="cuda")).sum().backward()
        made = {record.operation for record in recorder.records[before:]}
        assert layer.weight.grad is not None
        assert not made & {"addmm.default", "mm.default"}
    assert {turn.pool for turn in recorder.turns if turn.what == "place"} == {0, 1}


def test_a_replayed_step_counts_and_warming_up_beside_the_main_stream_does_not():
    recorder = recorder_of(8 * GIB)
    watched = WatchedSteps(recorder, 2)
    ended = 0
    with pretended_machine(recorder, KnownValues(LINES), kernels="cpu"), watched.watching():
        layer = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(layer.parameters())

        def step():
            layer(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()

        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        with contextlib.suppress(StepsDoneError):
            while ended < 9:
                graph.replay()
                ended += 1
    assert (watched.done, ended) == (3 + 1 + 2, 2)


def test_a_run_is_named_after_the_model_that_is_trained():
    class Teacher(torch.nn.Sequential):
        pass

    class Student(torch.nn.Sequential):
        pass

    recorder = recorder_of(8 * GIB)
    watched = WatchedSteps(recorder, 2)
    with pretended_machine(recorder, KnownValues(LINES), kernels="cpu"), watched.watching():
        teacher, student = Teacher(torch.nn.Linear(64, 64)).cuda(), Student(torch.nn.Linear(64, 8)).cuda()
        student(teacher.requires_grad_(False)(torch.ones(2, 64, device="cuda")))
    assert watched.model == "Student"


def test_what_is_freed_on_another_stream_serves_that_stream_only():
    with machine():
        with torch.cuda.stream(torch.cuda.Stream()) as side:
            assert side is not None
            torch.empty(8 * MIB, device="cuda")
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.empty(8 * MIB, device="cuda")
        assert torch.cuda.memory_reserved() == 64 * MIB


def test_a_script_that_handles_running_out_of_memory_is_told_and_others_go_on():
    with machine(GIB) as recorder:
        size, told = 4 * GIB, []
        while True:
            try:
                kept = torch.empty(size, dtype=torch.uint8, device="cuda")
                break
            except torch.cuda.OutOfMemoryError as error:
                told.append(str(error))
                size //= 2
        assert kept.numel() == GIB
        assert all("Tried to allocate" in text for text in told)
        assert [failed.requested_bytes for failed in recorder.handled] == [4 * GIB, 2 * GIB]
        assert torch.cuda.memory_stats()["num_ooms"] == 2
        assert recorder.runs_out is None
        try:
            torch.empty(GIB, dtype=torch.uint8, device="cuda")
        except RuntimeError:
            print("out of memory: take a smaller batch")
            raise
        assert recorder.runs_out is not None
    assert len(recorder.handled) == 2


def test_counters_and_snapshots_are_those_of_the_allocator():
    with machine() as recorder:
        kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (100, 2 * MIB, 3 * MIB)]
        del kept[1]
        stats = torch.cuda.memory_stats()
        assert (stats["allocation.all.current"], stats["allocation.all.peak"], stats["active.all.freed"]) == (2, 3, 1)
        assert stats["allocated_bytes.large_pool.current"] == 3 * MIB
        assert stats["reserved_bytes.small_pool.current"] == 2 * MIB
        assert stats["inactive_split_bytes.all.current"] == 2 * MIB - 512 + 17 * MIB
        assert "Allocated memory" in torch.cuda.memory_summary()
        segments = torch.cuda.memory_snapshot()
        assert sum(segment["total_size"] for segment in segments) == torch.cuda.memory_reserved() == 22 * MIB
        assert sum(block["requested_size"] for one in segments for block in one["blocks"]) == 3 * MIB + 100
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == recorder.allocator.allocated_bytes


def test_what_a_script_saves_it_can_load_again(tmp_path):
    files = SandboxedFiles(str(tmp_path / "scratch"), LINES, allow_writes=False)
    values = KnownValues(LINES)
    files.checkpoints.values = values.of
    with files.sandbox(), pretended_machine(recorder_of(8 * GIB), values, kernels="cpu"):
        layer = torch.nn.Linear(64, 64).cuda()
        tied = OrderedDict(a=layer.weight, b=layer.weight.T)
        counts = torch.arange(3).cuda()
        torch.save({"epoch": 4, "tied": tied, "counts": counts}, tmp_path / "last.pt")
        assert not (tmp_path / "last.pt").is_symlink()
        loaded = torch.load(tmp_path / "last.pt")
        assert (loaded["epoch"], loaded["counts"].tolist()) == (4, [0, 1, 2])
        assert loaded["tied"]["a"].is_cuda
        assert loaded["tied"]["a"].data_ptr() == loaded["tied"]["b"].data_ptr() != layer.weight.data_ptr()
        assert torch.load(tmp_path / "last.pt", map_location="cpu")["tied"]["b"].device.type == "cpu"
        stream = io.BytesIO()
        torch.save(layer.state_dict(), stream)
        stream.seek(0)
        assert torch.load(stream, map_location={"cuda:0": "cpu"})["bias"].device.type == "cpu"
    assert not (tmp_path / "last.pt").exists()


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("where", ["cuda", "cuda:0", torch.device("cuda"), lambda storage, _: storage.cuda(0)])
def test_a_checkpoint_that_is_there_is_loaded_to_the_gpu(tmp_path, where, old):
    torch.save(
        {"w": (whole := torch.ones(4, 4)), "row": whole[1]}, tmp_path / "w.pt", _use_new_zipfile_serialization=not old
    )
    files = SandboxedFiles(str(tmp_path / "scratch"), LINES, allow_writes=False)
    with files.sandbox(), pretended_machine(recorder_of(8 * GIB), KnownValues(LINES), kernels="cpu"):
        loaded = torch.load(tmp_path / "w.pt", map_location=where)
        assert loaded["w"].is_cuda
        assert loaded["row"].storage_offset() == 4
        assert loaded["row"].untyped_storage()._cdata == loaded["w"].untyped_storage()._cdata
        layer = torch.nn.Linear(4, 4)
        layer.load_state_dict({"weight": loaded["w"], "bias": loaded["row"]})
        assert torch.load(tmp_path / "w.pt", map_location=lambda storage, _: storage)["w"].sum().item() == 16


def test_modules_made_without_memory_are_made_on_the_gpu():
    with machine():
        with torch.device("meta"):
            layers = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        layers.to_empty(device="cuda")
        assert all(parameter.is_cuda and parameter.requires_grad for parameter in layers.parameters())


def test_parameters_without_a_shape_yet_go_to_the_gpu_when_they_have_one():
    with machine():
        layers = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.LazyLinear(2)).cuda()
        layers(torch.ones(4, 16, device="cuda")).sum().backward()
        assert [tuple(parameter.shape) for parameter in layers.parameters()] == [(8, 16), (8,), (2, 8), (2,)]
        assert all(parameter.grad.is_cuda for parameter in layers.parameters())


def test_older_scripts_make_tensors_by_classes():
    with machine():
        assert torch.cuda.FloatTensor(2, 3).is_cuda
        made = torch.ones(2, device="cuda")
        assert [
            tuple(one.shape) for one in (made.new(), made.new(2, 3), made.new(made.size()), made.new([1, 2, 3]))
        ] == [(0,), (2, 3), (2,), (3,)]
        assert (made.new(4, 2).zero_() @ made).is_cuda
        assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
        assert isinstance(torch.ones(2).type(torch.cuda.HalfTensor), torch.cuda.HalfTensor)
        assert torch.ones(2).type("torch.cuda.DoubleTensor").type() == "torch.cuda.DoubleTensor"
        assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)


def test_torch_is_a_build_for_cuda_to_a_script_that_asks():
    with machine():
        torch.backends.cuda.preferred_linalg_library("cusolver")
        torch.backends.cuda.preferred_blas_library("cublaslt")
        assert torch.backends.cudnn.is_available()
        assert torch.backends.cuda.is_flash_attention_available()
        assert torch.cuda.nccl.version() >= (2, 20)


def test_packed_rows_have_the_shapes_of_real_ones():
    lengths, rows = torch.tensor([4, 2, 1]), torch.ones(3, 4, 5)
    pack = torch.nn.utils.rnn.pack_padded_sequence
    real = pack(rows, lengths, batch_first=True)
    with machine():
        made = pack(rows.cuda(), lengths, batch_first=True)
        assert made.data.shape == real.data.shape
        assert made.batch_sizes.tolist() == real.batch_sizes.tolist()


def test_a_script_that_spawns_its_processes_is_one_of_them():
    def worker(rank, world_size):
        ran.append((rank, world_size))

    ran = []
    with machine():
        torch.multiprocessing.spawn(worker, args=(1,), nprocs=1)
        with pytest.raises(RefusedError, match=r"spawns 8 processes; .* --gpus"):
            torch.multiprocessing.spawn(worker, args=(8,), nprocs=8)
    assert ran == [(0, 1)]


def test_every_module_s_parameters_are_weights_be_it_one_layer_or_a_copy_that_is_never_called():
    with machine() as recorder:
        watched = WatchedSteps(recorder, steps=3)
        body, head = torch.nn.Sequential(torch.nn.Linear(64, 64)).cuda(), torch.nn.Linear(64, 8).cuda()
        average = copy.deepcopy(body).requires_grad_(requires_grad=False)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()])
        with watched.watching():
            for _ in range(2):
                head(body(torch.ones(2, 64, device="cuda"))).sum().backward()
                optimizer.step()
        weights = [record for record in recorder.records if record.component == "weights"]
        assert sum(record.bytes for record in weights) == 4 * (2 * (64 * 64 + 64) + 8 * 64 + 8)
        assert not any(record.component == "master_weights" for record in recorder.records)
        assert average[0].weight.is_cuda
