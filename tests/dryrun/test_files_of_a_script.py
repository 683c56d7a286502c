"""What a script does with files and checkpoints: nothing of what is really there changes, and it finds what it has done."""

import gc
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from memplan.dryrun.files.sandboxed_files import SandboxedFiles
from memplan.dryrun.machine.known_values import KnownValues
from memplan.dryrun.machine.pretended_machine import pretended_machine
from memplan.dryrun.terms.outcome import Card
from memplan.dryrun.terms.script_lines import ScriptLines
from memplan.dryrun.watching.live_recorder import LiveRecorder

LINES = ScriptLines(__file__)


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Return a folder with files in it, which is the current one."""
    folder = tmp_path / "there"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rows.txt").write_text("rows")
    (folder / "notes.txt").write_text("as it was")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def sandbox(tmp_path, there):
    before = {path: path.read_text() for path in there.rglob("*.txt")}
    mode = (there / "notes.txt").stat().st_mode
    with SandboxedFiles(str(tmp_path / "scratch"), LINES, allow_writes=False).sandbox():
        yield
    assert {path: path.read_text() for path in there.rglob("*") if path.is_file()} == before
    assert (there / "notes.txt").stat().st_mode == mode
    assert Path.cwd() == there


def test_a_file_is_truncated_marked_and_linked_in_the_sandbox(sandbox):
    notes = Path("notes.txt")
    notes.chmod(0o400)
    os.utime(notes, (1, 1))
    os.link(notes, "again.txt")
    with open("again.txt", "a") as stream:
        stream.write("!")
    assert notes.read_text() == "as it was!"
    os.truncate(notes, 2)
    assert (notes.read_text(), Path("again.txt").read_text()) == ("as", "as")
    notes.chmod(0o600)
    assert notes.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError):
        os.truncate("nothing.txt", 0)
    with pytest.raises(FileExistsError):
        os.link(notes, "again.txt")


def test_links_that_a_script_makes_are_followed_by_their_names(sandbox):
    Path("runs").mkdir()
    Path("runs/step1.pt").write_text("one")
    os.symlink("step1.pt", "runs/last.pt")
    os.symlink(Path("data").resolve(), "runs/data")
    os.symlink("nowhere", "dangling")
    assert Path("runs/last.pt").read_text() == "one"
    assert (os.readlink("runs/last.pt"), Path("runs/last.pt").resolve().name) == ("step1.pt", "step1.pt")
    assert (os.path.islink("runs/last.pt"), os.path.exists("dangling"), os.path.lexists("dangling")) == (
        True,
        False,
        True,
    )
    assert os.listdir("runs/data") == ["rows.txt"]
    Path("runs/data/rows.txt").write_text("written through a link")
    assert Path("data/rows.txt").read_text() == "written through a link"
    shutil.move("runs", "moved")
    assert Path("moved/last.pt").read_text() == "one"
    os.unlink("moved/last.pt")
    assert not os.path.lexists("moved/last.pt")
    assert Path("moved/step1.pt").exists()


def test_folders_of_its_own_are_copied_whole(sandbox):
    Path("run").mkdir()
    Path("run/log.txt").write_text("log")
    shutil.copytree("run", "again")
    shutil.copytree("data", "rows")
    assert (Path("again/log.txt").read_text(), os.listdir("rows")) == ("log", ["rows.txt"])


def test_a_script_goes_into_folders_of_its_own_and_back(sandbox, there):
    Path("run").mkdir()
    Path("run/log.txt").write_text("log")
    os.chdir("run")
    assert (os.getcwd(), Path("log.txt").read_text(), Path("../notes.txt").read_text()) == (
        str(there / "run"), "log", "as it was",
    )  # fmt: skip
    Path("more.txt").write_text("more")
    os.chdir("..")
    assert (sorted(os.listdir("run")), Path("notes.txt").read_text()) == (["log.txt", "more.txt"], "as it was")


@dataclass
class Progress:
    step: int
    weights: dict[str, torch.Tensor]


@pytest.fixture
def recorder(tmp_path, there):
    files, values = SandboxedFiles(str(tmp_path / "scratch"), LINES, allow_writes=False), KnownValues(LINES)
    files.checkpoints.values = values.of
    recorder = LiveRecorder(Card("card", "9.0", 2**33, 2**33), LINES, workspaces=False)
    with files.sandbox(), pretended_machine(recorder, values, kernels="cpu"):
        recorder.files = files
        yield recorder


def test_saving_takes_nothing_on_the_gpu_and_keeps_nothing_alive(recorder):
    layer = torch.nn.Linear(64, 64).cuda()
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 64, device="cuda")).sum().backward()
    adam.step()
    adam.zero_grad()
    live, requests = recorder.allocator.allocated_bytes, len(recorder.records)
    for step in range(3):
        torch.save({"progress": Progress(step, layer.state_dict()), "adam": adam, "model": layer}, f"{step}.pt")
    assert (recorder.allocator.allocated_bytes, len(recorder.records)) == (live, requests)
    assert recorder.files.skipped["2.pt"] == 3 * 4 * (64 * 64 + 64) + 2 * 4
    del layer, adam
    gc.collect()
    assert recorder.allocator.allocated_bytes == 0


def test_what_is_loaded_is_what_was_saved_but_for_the_values_of_weights(recorder):
    layer = torch.nn.Linear(64, 64).cuda()
    layer.bias.requires_grad_(requires_grad=False)
    ids = torch.arange(2**17)
    torch.save(
        {"progress": Progress(7, layer.state_dict()), "model": layer, "tied": [layer.weight, layer.weight], "ids": ids},
        "last.pt",
    )
    loaded = torch.load("last.pt", weights_only=False)
    assert (loaded["progress"].step, loaded["progress"].weights["bias"].is_cuda) == (7, True)
    assert [parameter.requires_grad for parameter in loaded["model"].parameters()] == [True, False]
    assert loaded["tied"][0] is loaded["tied"][1] is loaded["model"].weight is not layer.weight
    assert torch.equal(loaded["ids"], ids)


class Job:
    """What ``torch.distributed.checkpoint`` calls stateful."""

    def __init__(self, step):
        self.step = step

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, parts):
        self.step = parts["step"]


def test_a_distributed_checkpoint_of_this_run_is_there_and_loaded(recorder, tmp_path):
    weight = torch.zeros(4, device="cuda")
    done = recorder.files.saved_parts_later(
        {"weight": weight, "job": Job(5), "rest": {"epoch": 2}}, checkpoint_id="run/1"
    )
    assert (done.result(), os.path.exists("run/1/.metadata"), recorder.files.skipped["run/1"]) == (None, True, 16)
    asked = []
    load = recorder.files.loaded_parts(lambda *_, **given: asked.append(given["checkpoint_id"]))
    job, rest = Job(0), {"epoch": 0}
    live = recorder.allocator.allocated_bytes
    load({"weight": weight, "job": job, "rest": rest}, checkpoint_id="run/1")
    assert (job.step, rest["epoch"], recorder.allocator.allocated_peak_bytes) == (5, 2, live)
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: bias"):
        load({"bias": weight}, checkpoint_id="run/1")
    load({"weight": weight}, checkpoint_id="elsewhere")
    assert asked == ["elsewhere"]


def test_what_cannot_be_pickled_cannot_be_saved(recorder):
    with pytest.raises((AttributeError, TypeError, Exception), match="lambda"):
        torch.save({"schedule": lambda step: step}, "last.pt")


def test_what_nobody_knows_of_a_card_can_be_looked_for_and_not_used(recorder):
    from memplan.dryrun.terms.outcome import RefusedError

    card = torch.cuda.get_device_properties(0)
    assert hasattr(card, "L2_cache_size")
    assert not hasattr(card, "gcnArchName")
    assert f"{card.L2_cache_size}" == "not known"
    with pytest.raises(RefusedError, match="L2_cache_size of the card's properties is asked for"):
        card.L2_cache_size // 4


def test_a_tensor_of_a_class_of_its_own_is_made_of_numbers(recorder):
    from torch.nn.attention.bias import causal_lower_right

    class Own(torch.Tensor):
        pass

    assert (type(Own([1.0, 2.0])), Own([1.0, 2.0]).sum().item()) == (Own, 3.0)
    rows = torch.ones(1, 2, 64, 32, device="cuda", dtype=torch.float16)
    assert torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, causal_lower_right(64, 64)).is_cuda
