"""``memplan run``: a script runs unchanged, what it needs is what it would need, and its failures can be read."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import memplan

SCRIPTS = Path(__file__).parent / "scripts"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memplan", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)


def written(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def test_a_loop_runs_unchanged_and_is_told_where_it_would_run_out(tmp_path):
    script = str(SCRIPTS / "nanogpt_loop.py")
    ran = run(tmp_path, script, "--gpu-memory", "0.5GiB", "--json", "--steps", "2", "--", "--dtype", "float16")
    assert ran.returncode == 1, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["steps"] == 2
    assert answer["verdict"] == "no"
    out = answer["runs_out"]
    assert out["line"].startswith("scripts/nanogpt_loop.py:")
    assert "CUDA out of memory. Tried to allocate" in out["message"]
    assert "step 1: loss" in ran.stderr
    weights = sum(size["bytes"] for size in answer["components"] if size["name"] == "weights")
    assert weights == 4 * (512 * 128 + 64 * 128 + 2 * (12 * 128 * 128 + 9 * 128) + 2 * 128)
    assert answer["persistent_bytes"] >= 4 * weights
    assert {"forward", "loss backward", "second backward", "gradient clipping", "optimizer step"} <= {
        instant["name"] for instant in answer["instants"]
    }
    assert any(file["file"] == "out/ckpt.pt" and file["bytes"] >= 3 * weights for file in answer["not_written"])
    assert not any(library in ran.stdout for library in UNCOUNTED)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_run_is_refused_before_torch_is_loaded(tmp_path):
    with pytest.raises(memplan.InvalidFileError, match="no such script"):
        memplan.run(tmp_path / "nothing.py")
    for name, said in {
        "train.ipynb": "nbconvert --to script",
        "train.sh": "a shell script: name the Python script",
    }.items():
        (tmp_path / name).touch()
        with pytest.raises(memplan.InvalidFileError, match=said):
            memplan.run(tmp_path / name)
    with pytest.raises(memplan.InvalidFileError, match="too long"):
        memplan.run("x" * 300)
    script = tmp_path / written(tmp_path, "")
    with pytest.raises(memplan.InvalidFileError, match="steps: expected at least 1"):
        memplan.run(script, steps=0)
    with pytest.raises(memplan.InvalidFileError, match="unknown setting 'foo'"):
        memplan.run(script, alloc_conf="foo:1")
    with pytest.raises(memplan.UnknownNameError, match="h100"):
        memplan.run(script, gpu="h1000")


TRAINS = """
import torch
weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(9):
    (weight @ weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FAILURES = {
    "bug": ("import torch\ntorch.zeros(2, 3, device='cuda') @ torch.zeros(2, 3, device='cuda')\n", 2, "script.py:2"),
    "syntax": ("def broken(:\n", 2, "SyntaxError"),
    "ends": ("raise SystemExit('no data')\n", 2, "no data"),
    "endless": ("while True:\n    pass\n", 3, "still running after 4 s"),
    "untrained": ("import torch\ntorch.zeros(9, device='cuda')\n", 3, "no optimizer was stepped"),
    "nothing": ("print('hello')\n", 3, "no tensor was on the GPU"),
    "unmoved": (
        "import torch\nlayer = torch.nn.Linear(2, 2)\nadam = torch.optim.Adam(layer.parameters())\n"
        "layer(torch.ones(2)).sum().backward()\nadam.step()\n",
        3,
        "it trains on the CPU: no tensor was on the GPU (optimizer steps: 1)",
    ),
    "properties": (
        "import torch\ntorch.cuda.get_device_properties(0).L2_cache_size // 4\n",
        3,
        "script.py:2: L2_cache_size of the card's properties is asked for, which is not known here",
    ),
    "plans": (
        "import torch\nplans = torch.backends.cuda.cufft_plan_cache\nplans.max_size = 32\nplans[0].clear()\n"
        "raise SystemExit(f'{plans.size} of {plans[0].max_size}')\n",
        2,
        "0 of 32",
    ),
    "compiles": (
        "import torch\ntorch.compile(torch.nn.Linear(2, 2), backend='cudagraphs')\n",
        3,
        "backend 'cudagraphs'",
    ),
    "group": ("import torch\ntorch.distributed.init_process_group('nccl')\n", 3, "joins a process group; say how many"),
    "second": (
        "import torch\ntorch.zeros(9, device='cuda:1')\n",
        3,
        "script.py:2: the script puts something on cuda:1",
    ),
    "chosen": ("import torch\ntorch.cuda.set_device(1)\n", 3, "script.py:2: the script puts something on cuda:1"),
    "around": ("import torch\nwith torch.device('cuda:1'):\n    torch.zeros(9)\n", 3, "only cuda:0 is pretended"),
    "becomes": ("import os\nos.execvp('true', ['true'])\n", 3, "starts a process of its own at"),
    "spawns": ("import os\nos.posix_spawn('/bin/true', ['true'], {})\n", 3, "starts a process of its own at"),
    "pool": ("import multiprocessing\nmultiprocessing.Pool(2).map(len, [[1]])\n", 3, "starts a process of its own"),
    "leaves": ("import os\nos._exit(5)\n", 2, "its process ended with 5"),
    "asks": ("input('which GPU? ')\n", 2, "EOFError"),
    "stuck": ("import ctypes\nctypes.CDLL(None).sleep(99)\n", 3, "still running after 4 s"),
    "forks": ("import os\nos.fork()\n", 3, "starts a process of its own"),
    "program": ("import subprocess\nsubprocess.run(['true'])\n", 3, "starts a process of its own at"),
    "graphs": ("import torch\ntorch.cuda.CUDAGraph().replay()\n", 2, "without a preceding successful capture"),
    "extension": (
        "from torch.utils.cpp_extension import load_inline\nload_inline('mine', cpp_sources='int one() { return 1; }')\n",
        3,
        "compiles an extension of its own",
    ),
    "shapes": (
        "import torch\ntorch.nn.LayerNorm(4).cuda()(torch.zeros(2, 3, device='cuda'))\n",
        2,
        "Given normalized_shape=[4]",
    ),
    "dtypes": (
        "import torch\ntorch.nn.Linear(4, 4).cuda().half()(torch.ones(2, 4, device='cuda'))\n",
        2,
        "script.py:2: RuntimeError: mat1 and mat2 must have the same dtype, but got Float and Half",
    ),
    "rows": (
        "import torch\ntorch.nn.Embedding(10, 4).cuda()(torch.tensor([3, 12]).cuda())\n",
        2,
        "script.py:2: RuntimeError: CUDA error: device-side assert triggered: number 12 where an embedding has 10 rows",
    ),
    "devices": (
        "import torch\ntorch.nn.Linear(4, 4).cuda()(torch.ones(2, 4))\n",
        2,
        "script.py:2: RuntimeError: Expected all tensors to be on the same device",
    ),
    "hub": (
        "import transformers\ntransformers.AutoConfig.from_pretrained('nobody/nothing-of-that-name')\n",
        3,
        "script.py:2: it names a model, a tokenizer or rows of the hub",
    ),
    "faked": (
        "import torch\ntorch.fake_quantize_per_tensor_affine(torch.ones(3, device='cuda'), 0.1, 0, -128, 127)\n",
        3,
        "script.py:2: aten::fake_quantize_per_tensor_affine_cachemask has no form for tensors without memory",
    ),
    "sparse": (
        "import torch\ntable = torch.nn.Embedding(9, 4, sparse=True).cuda()\nadam = torch.optim.SparseAdam(table.parameters())\n"
        "table(torch.tensor([1, 2]).cuda()).sum().backward()\nadam.step()\n",
        3,
        "script.py:5: sparse gradients (an embedding's sparse=True) are not known here",
    ),
    "rows of zeros": (
        "import torch\nedges = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2))\nedges.cuda()\n",
        3,
        "script.py:3: sparse tensors are not known on the pretended GPU",
    ),
    "address": (
        "import torch\ntorch.from_dlpack(torch.zeros(4, device='cuda'))\n",
        3,
        "script.py:2: it asks where a tensor's numbers lie",
    ),
    "unequal": (
        "import torch\nrows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)\nrows.to('cuda')\n",
        3,
        "script.py:3: rows of unequal lengths in one tensor (torch.nested) are not known here",
    ),
    "fetches": (
        "import torch\ntorch.hub.download_url_to_file('https://download.pytorch.org/models/resnet18.pth', 'weights.pth')\n",
        3,
        "script.py:2: the script fetches https://download.pytorch.org/models/resnet18.pth, and nothing is fetched here",
    ),
    "wrapper": (
        "import torch\nclass Two(torch.Tensor):\n    @staticmethod\n    def __new__(cls, codes):\n"
        "        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device)\n"
        "    @classmethod\n    def __torch_dispatch__(cls, func, types, args, kwargs=None):\n        return NotImplemented\n"
        "Two(torch.zeros(4, dtype=torch.int8))\nTwo(torch.zeros(4, dtype=torch.int8, device='cuda'))\n",
        3,
        "script.py:5: tensors of a class of their own (Two) are not known on the pretended GPU",
    ),
    "higher": (
        "import torch\nfrom torch.nn.attention.flex_attention import flex_attention\n"
        "rows = torch.zeros(1, 2, 128, 16, device='cuda')\nflex_attention(rows, rows, rows)\n",
        3,
        "script.py:4: flex_attention outside of compiled code is not known here",
    ),
    "operator": (
        "import torch\n@torch.library.custom_op('mine::double', mutates_args=())\n"
        "def double(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        "torch.ops.mine.double(torch.ones(2, device='cuda'))\n",
        3,
        "register_fake('mine::double')",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_one_readable_line(tmp_path, name):
    text, code, said = FAILURES[name]
    if name == "hub":
        pytest.importorskip("transformers")
    ran = run(tmp_path, written(tmp_path, text), "--timeout", "4" if name in ("endless", "stuck") else "60")
    assert ran.returncode == code, ran.stderr
    assert said in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr or code == 2
    assert "memplan/" not in ran.stderr
    assert "torch/_" not in ran.stderr
    assert not ran.stdout


READS = """
import pathlib, shutil
import datasets
rows = datasets.Dataset.from_dict({"length": [3, 1, 2]}).map(lambda row: {"twice": 2 * row["length"]}, num_proc=2)
print(sum(rows["twice"]), len(pathlib.Path("/proc/self/status").read_text()) > 0)
rows.save_to_disk("rows")
datasets.load_from_disk("rows").map(lambda row: {"thrice": 3 * row["length"]}).to_pandas().to_parquet("rows.parquet")
print(datasets.Dataset.from_parquet("rows.parquet").column_names)
import pyarrow.parquet
table = pyarrow.parquet.read_table("rows.parquet")
with pyarrow.parquet.ParquetWriter(where="more.parquet", schema=table.schema) as writer:
    writer.write_table(table)
import pyarrow.csv, pyarrow.dataset, pyarrow.feather, pyarrow.ipc, pyarrow.json
pyarrow.csv.write_csv(table, "rows.csv")
pyarrow.feather.write_feather(table, "rows.feather")
pyarrow.dataset.write_dataset(table, "parts", format="parquet")
with pyarrow.output_stream("rows.arrow") as stream, pyarrow.ipc.new_file(stream, table.schema) as writer:
    writer.write_table(table)
pathlib.Path("rows.json").write_text('{"length": 1}\\n')
print(
    [one.num_rows for one in (pyarrow.csv.read_csv("rows.csv"), pyarrow.feather.read_table("rows.feather"),
     pyarrow.dataset.dataset("parts").to_table(), pyarrow.ipc.open_file("rows.arrow").read_all(),
     pyarrow.json.read_json("rows.json"))], pyarrow.parquet.read_metadata("more.parquet").num_rows
)
pathlib.Path("kept/notes.txt").write_text("changed")
print(pathlib.Path("kept/notes.txt").read_text())
shutil.rmtree("kept")
pathlib.Path("made").mkdir()
"""


@pytest.mark.slow
def test_a_script_reads_what_is_there_and_changes_nothing(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("as it was")
    ran = run(tmp_path, written(tmp_path, READS + TRAINS), "--json")
    assert ran.returncode == 0, ran.stderr
    assert "12 True" in ran.stderr
    assert "['length', 'twice', 'thrice']" in ran.stderr
    assert "[3, 3, 3, 3, 1] 3" in ran.stderr
    assert "changed" in ran.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "script.py"}
    assert (tmp_path / "kept" / "notes.txt").read_text() == "as it was"


HANDLES = """
while True:
    try:
        (weight @ weight).sum().backward()
        optimizer.step()
    except BaseException as error:
        print("again", error)
"""


@pytest.mark.slow
def test_a_script_that_handles_all_exceptions_ends(tmp_path):
    ran = run(tmp_path, written(tmp_path, TRAINS + HANDLES), "--timeout", "100")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("FITS")


DRAWS = """
drawn = torch.multinomial(torch.nn.Linear(9, 9).cuda()(torch.ones(99, 9, device="cuda")).softmax(-1), 1)
if torch.isin(drawn, torch.tensor([5], device="cuda")).any():
    print("a sequence ended")
"""


@pytest.mark.slow
def test_no_token_that_nobody_knows_ends_a_sequence(tmp_path):
    ran = run(tmp_path, written(tmp_path, "import torch\n" + DRAWS + TRAINS))
    assert ran.returncode == 0, ran.stderr
    assert "a sequence ended" not in ran.stderr


COMPILED_STEP = """
import torch
layer = torch.nn.Linear(64, 64).cuda()
adam = torch.optim.Adam(layer.parameters())
layer(torch.ones(2, 64).cuda()).sum().backward()
torch.compile(adam.step)()
"""


@pytest.mark.slow
def test_a_compiled_step_of_an_optimizer_is_refused_as_one(tmp_path):
    ran = run(tmp_path, written(tmp_path, COMPILED_STEP))
    assert ran.returncode == 3
    assert "script.py:6: a compiled step of an optimizer is not known" in ran.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_script_that_runs_out_before_its_first_step_is_told_where(tmp_path):
    ran = run(tmp_path, written(tmp_path, "import torch\nlarge = torch.empty(10**12, device='cuda')\n"), "--json")
    assert ran.returncode == 1, ran.stderr
    assert json.loads(ran.stdout)["runs_out"]["line"].endswith("script.py:2")


@pytest.mark.slow
def test_a_loop_without_modules_is_told_too(tmp_path):
    ran = run(tmp_path, written(tmp_path, TRAINS), "--json", "--gpu", "rtx4090")
    answer = json.loads(ran.stdout)
    assert (answer["steps"], answer["verdict"]) == (3, "fits")


WARMS_UP = """
import torch
layer = torch.nn.Linear(64, 64)
for device in ("cpu", "cuda"):
    adam = torch.optim.Adam(layer.to(device).parameters())
    for _ in range(3):
        layer(torch.ones(2, 64, device=device)).sum().backward()
        adam.step()
"""


@pytest.mark.slow
def test_steps_on_the_cpu_are_none_of_those_on_the_card(tmp_path):
    ran = run(tmp_path, written(tmp_path, WARMS_UP), "--json")
    assert {"name": "optimizer_states", "bytes": 2 * 4 * 64 * 65} in json.loads(ran.stdout)["components"], ran.stderr


BY_HAND = {
    "zeroed": ("layer.zero_grad()", 3, 0),
    "emptied": ("for weight in layer.parameters():\n        weight.grad = None", 1, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_HAND)
def test_weights_that_a_script_updates_by_hand_are_steps_too(name, tmp_path):
    empties, steps, notes = BY_HAND[name]
    script = tmp_path / written(
        tmp_path,
        "import torch\nlayer = torch.nn.Linear(64, 64).cuda()\nfor _ in range(9):\n"
        "    loss = layer(torch.ones(8, 64).cuda()).sum()\n"
        f"    {empties}\n    loss.backward()\n    for weight in layer.parameters():\n"
        "        weight.data.add_(weight.grad, alpha=-0.1)\n",
    )
    ran = memplan.run(script, gpu="h100", quiet=True)
    assert ran.outcome.steps == steps
    assert len([note for note in ran.outcome.notes if "no optimizer was stepped" in note]) == notes


KEYS = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def folder_of_a_model(folder: Path) -> Path:
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **KEYS}))
    return folder / "m"


@pytest.mark.slow
def test_a_trainer_needs_what_its_trace_says(tmp_path):
    pytest.importorskip("transformers")
    model = folder_of_a_model(tmp_path)
    traced = memplan.trace(
        str(model), stack="transformers", config="bf16-adamw", micro_batch_size=2, sequence_length=512,
        set={"kernels.optimizer": "foreach"}, gpu="h100",
    )  # fmt: skip
    ran = memplan.run(SCRIPTS / "trainer_rows.py", [str(model)], gpu="h100", quiet=True)
    assert ran.requested_bytes == traced.requested_bytes
    assert ran.to_spare == traced.step.replayed
    assert ran.outcome.persistent_bytes == traced.step.trace.persistent_bytes


@pytest.mark.slow
def test_a_trainer_that_does_not_fit_is_told_what_to_change(tmp_path):
    pytest.importorskip("transformers")
    model = folder_of_a_model(tmp_path)
    ran = memplan.run(SCRIPTS / "trainer_rows.py", [str(model)], gpu_memory="868MiB", quiet=True)
    assert not ran.fits
    changes = {suggestion.change: suggestion for suggestion in ran.suggestions}
    assert changes["activation_checkpointing=full"].own_text == "gradient_checkpointing: true"
    assert changes["micro_batch_size=1"].saves_bytes > 20 * 2**20


KERNELS = {
    "--flash": {"kernels.attention": "flash"},
    "--liger": {
        "kernels.norm": "in-place", "kernels.rotary": "in-place", "kernels.activation": "in-place", "kernels.loss": "fused-linear",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("word", KERNELS)
def test_libraries_of_kernels_need_what_the_trace_says(word, tmp_path, caplog):
    pytest.importorskip("transformers")
    caplog.set_level("CRITICAL", "liger_kernel")  # a record of its keeps an exception, and so the tensors of its frames
    if word == "--liger":
        pytest.importorskip("liger_kernel")
        pytest.importorskip("triton")
    model = folder_of_a_model(tmp_path)
    traced = memplan.trace(
        str(model), stack="transformers", config="bf16-adamw", micro_batch_size=2, sequence_length=512, gpu="h100",
        set={"kernels.optimizer": "foreach", **KERNELS[word]},
    )  # fmt: skip
    ran = memplan.run(SCRIPTS / "trainer_rows.py", [str(model), word], gpu="h100", quiet=True)
    assert ran.requested_bytes == traced.requested_bytes
    assert any("flash_attn" in note for note in ran.outcome.notes) is (word == "--flash")


@pytest.mark.slow
def test_kernels_of_the_scripts_own_launch_nothing_compiled_or_not():
    pytest.importorskip("triton")
    ran = memplan.run(SCRIPTS / "kernels_of_its_own.py", gpu="h100", steps=4, quiet=True)
    assert ran.outcome.steps == 4, ran.outcome.message
    weights, rows = 4 * (128 * 128 + 128), 4 * 64 * 128
    assert 4 * weights <= ran.requested_bytes <= 4 * weights + 6 * rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "gpu", "peak"),  # as recorded of ``memplan trace --stack nanogpt`` in tests/step/test_compiled_model.py
    [
        ((512, 256, 1, 256, 2, 2, 1, "bfloat16"), "a100-pcie-40gb", 21_308_512),
        ((50304, 1024, 2, 768, 12, 4, 1, "bfloat16"), "h100", 2_234_192_032),
    ],
)
def test_a_compiled_model_needs_what_its_trace_says(sizes, gpu, peak):
    ran = memplan.run(SCRIPTS / "compiled_gpt.py", [str(size) for size in sizes], gpu=gpu, quiet=True)
    assert (ran.requested_bytes, ran.outcome.steps) == (peak, 3)
    assert any("Inductor" in note for note in ran.outcome.notes)


UNCOUNTED = {
    "cuDNN": "torch.conv2d(weight[None, None], weight[None, None])",
    "cuFFT": "torch.fft.rfft(weight).abs()",
    "cuSOLVER": "torch.linalg.eigvalsh(weight)",
    "nn.Bilinear": "torch.nn.functional.bilinear(weight, weight, weight[None])",
    "no library": "torch.linalg.vector_norm(weight)",
}


def test_libraries_that_take_workspaces_of_their_own_are_named(tmp_path):
    script = tmp_path / "script.py"
    losses = " + ".join(f"{call}.sum()" for call in UNCOUNTED.values())
    script.write_text(TRAINS.replace("(weight @ weight).sum()", f"({losses})"))
    notes = memplan.run(script, gpu="h100", quiet=True, steps=1).outcome.notes
    named = {name for name in UNCOUNTED if any(name in note for note in notes)}
    assert named == {*UNCOUNTED} - {"no library"}


@pytest.mark.slow
def test_compiled_layers_keep_less_and_are_told_apart():
    compiled, eager = (
        memplan.run(SCRIPTS / "compiled_layers.py", words, gpu="h100", quiet=True) for words in ([], ["--eager"])
    )
    assert compiled.requested_bytes < 0.7 * eager.requested_bytes
    assert compiled.trace.instants.keys() >= {"forward", "loss backward", "head backward", "optimizer step"}
    assert compiled.outcome.persistent_bytes == eager.outcome.persistent_bytes


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--evaluate"]])
def test_a_compiled_module_may_change_its_buffers(words):
    ran = memplan.run(SCRIPTS / "compiled_buffers.py", words, gpu="h100", quiet=True)
    assert ran.outcome.steps == 3
    assert ("evaluation" in ran.trace.instants) is bool(words)
    buffers = sum(storage.bytes for storage in ran.trace.storages if storage.component == "buffers")
    assert buffers == 4 * (2 * 128 + 64 + 256 * 64) + 8  # running statistics, and how many there were


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_one_of_eight_ranks_of_a_trainer_needs_what_its_trace_says(zero_stage, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    model = folder_of_a_model(tmp_path)
    if zero_stage:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
        monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    ran = memplan.run(SCRIPTS / "trainer_rows.py", [str(model), "--bf16"], gpu="h100", gpus=8, quiet=True)
    traced = memplan.trace(
        str(model), stack="transformers", config="bf16-adamw", micro_batch_size=2, sequence_length=512, gpu="h100",
        set={"kernels.optimizer": "foreach", "parallel.data": 8, "parallel.zero_stage": zero_stage},
    )  # fmt: skip
    assert ran.requested_bytes == traced.requested_bytes
    assert ran.outcome.persistent_bytes == traced.step.trace.persistent_bytes


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 11])
@pytest.mark.parametrize(
    "name",
    ["synchronised_norms", "fsdp2_loop", "replicas_loop", "compressed_replicas", "accelerate_fsdp2", "titan_trainer"],
)
def test_one_of_several_ranks_runs_unchanged(name, rank, tmp_path):
    pytest.importorskip("accelerate")
    script, words = SCRIPTS / f"{name}.py", [str(folder_of_a_model(tmp_path))] if "accelerate" in name else []
    ran = memplan.run(script, words, gpu="h100", gpus=16, rank=rank, quiet=True)
    assert ran.fits
    assert any(storage.component == "communication" for storage in ran.trace.storages)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 11])
def test_replicas_of_a_compiled_model_run_unchanged(rank):
    ran = memplan.run(SCRIPTS / "replicas_loop.py", ["--compile"], gpu="h100", gpus=16, rank=rank, quiet=True)
    assert ran.fits
    assert any("replicas are compiled as one graph" in note for note in ran.outcome.notes)


@pytest.mark.slow
def test_adapters_on_four_bits_need_what_their_trace_says_but_for_a_table(tmp_path):
    for package in ("trl", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    model = folder_of_a_model(tmp_path)
    traced = memplan.trace(
        str(model), stack="trl", config="qlora", micro_batch_size=1, sequence_length=512, activation_checkpointing="full",
        set={"optimizer": "adamw-8bit"}, gpu="h100",
    )  # fmt: skip
    ran = memplan.run(SCRIPTS / "trl_sft_qlora.py", [str(model)], gpu="h100", quiet=True)
    # bitsandbytes keeps the 256 codes by which it quantises scales (functional.py, ``name2qmap``), which the trace never makes.
    assert ran.requested_bytes - traced.requested_bytes == 256 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "updates"),
    [
        ("actor_critic", 3),
        ("attention_accumulated", 3),
        ("autoencoder", 3),
        ("averaged_unet", 3),
        ("averaged_weights", 3),
        ("custom_function", 3),
        ("adversarial", 6),
        ("adapters_by_hand", 3),
        ("boxes", 3),
        ("bundled_muon", 6),
        ("chosen_labels", 3),
        ("clipped_per_example", 3),
        ("codebook", 3),
        ("contrastive_pairs", 3),
        ("distilled", 3),
        ("evaluated_epochs", 3),
        ("gradient_penalty", 3),
        ("grouped_updates", 3),
        ("hooked_gradients", 3),
        ("images_and_text", 3),
        ("learning_to_learn", 3),
        ("message_passing", 3),
        ("packed_rows", 3),
        ("policy_rollouts", 3),
        ("recipe_class", 3),
        ("reloaded_states", 3),
        ("resumed_training", 3),
        ("scanned_states", 3),
        ("second_order", 3),
        ("second_order strong_wolfe", 3),
        ("sharpness_aware", 6),  # the optimizer within steps, too
        ("speech_to_text", 3),
        ("stepped_in_backward", 18),  # one optimizer for each of six weights
        ("two_networks", 5),  # the generator's third, and the critic's second
        ("vision_language", 3),
        ("weighed_losses", 3),
        ("whitened_updates", 3),
    ],
)
def test_a_script_really_executed_needs_what_the_dry_run_says(name, updates, tmp_path):
    from memplan.dryrun.script_process import run_script
    from memplan.dryrun.terms.outcome import Card, Request

    program, *words = name.split()
    script = str(SCRIPTS / f"{program}.py")
    counted = [sys.executable, str(SCRIPTS.parent / "counted_run.py"), str(updates), script, *words]
    really = subprocess.run(counted, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=True)
    peak = int(really.stdout.split()[-1])
    request = Request(script, Card("none", "9.0", 2**36, 2**36), tuple(words), kernels="cpu")
    outcome = run_script(request, quiet=True)
    assert outcome.ending == "done", outcome.message
    assert abs(max(outcome.peaks) - peak) <= peak / 1000


@pytest.mark.slow
def test_a_captured_step_is_replayed_and_keeps_its_pool():
    ran = memplan.run(SCRIPTS / "captured_steps.py", gpu="h100", quiet=True)
    weights, rows, hidden = 4 * (2 * 1024 * 4096 + 1024 + 4096), 2048 * 1024 * 4, 2048 * 4096 * 4
    assert ran.outcome.steps == 3 + 1 + 3
    assert "graph" not in ran.outcome.message
    # Weights, gradients and two states; rows, targets, output and two of what is made of it in forward; hidden states three times.
    assert ran.requested_bytes < 4 * weights + 6 * rows + 4 * hidden
    private = {turn.pool for turn in ran.trace.turns} - {0}
    assert len(private) == 1
    assert (
        ran.to_spare.reserved_peak_bytes > ran.requested_bytes + 2 * hidden
    )  # a replay uses them beside what is eager


@pytest.mark.slow
def test_a_script_that_takes_smaller_batches_is_told_where_it_ran_out():
    ran = memplan.run(SCRIPTS / "smaller_batches.py", gpu_memory="2GiB", quiet=True)
    assert ran.fits
    assert ran.outcome.steps == 3
    assert len(ran.outcome.handled) == len([note for note in ran.outcome.notes if "ran out of memory" in note]) > 0
    assert all(failed.line.startswith("scripts/smaller_batches.py:") for failed in ran.outcome.handled)
    assert ran.to_spare.reserved_peak_bytes + ran.context_bytes <= 2 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["classifier", "bundled_muon", "denoiser", "mixture_of_experts", "recipe_class", "gradient_penalty"]
)
def test_scripts_run_unchanged(name, tmp_path):
    ran = memplan.run(SCRIPTS / f"{name}.py", gpu="rtx4090", quiet=True)
    assert ran.fits
    assert ran.outcome.steps == 3
    assert any(f"/{name}.py:" in storage.line for storage in ran.trace.largest_at_peak())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate_loop", "trl_dpo", "trainer_callbacks", "reward_pairs"])
def test_scripts_of_libraries_run_unchanged(name, tmp_path):
    for package in ("accelerate", "trl", "peft"):
        pytest.importorskip(package)
    ran = memplan.run(SCRIPTS / f"{name}.py", [str(folder_of_a_model(tmp_path))], gpu="rtx4090", quiet=True)
    assert ran.fits
    assert ran.outcome.steps == 3
    assert ran.trace.peak_instant.endswith("backward")


@pytest.mark.slow
def test_inputs_of_layers_wait_in_host_memory_where_unsloth_keeps_them(tmp_path):
    if find_spec("unsloth") is None:  # which changes what is imported after it
        pytest.skip("unsloth is not installed")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = folder_of_a_model(tmp_path)
    keys = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**keys, "hidden_size": 1024, "num_hidden_layers": 8}))
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(model)
    ran = memplan.run(SCRIPTS / "unsloth_sft.py", [str(model)], gpu="rtx4090", quiet=True)
    assert ran.outcome.steps == 3
    assert ran.trace.peak_instant.endswith("backward")
    hidden = 2 * 1024 * 1024 * 2  # two rows of 1,024 tokens in 16 bits
    alive = [storage for storage in ran.trace.largest_at_peak(200) if storage.bytes == hidden]
    assert len(alive) < 8 + 6  # a layer keeps seven itself
