"""Notebooks and Python: literals are read, nothing is run, and what only a run would tell is asked for."""

import json

import pytest

import memplan
from memplan.errors import InvalidFileError
from memplan.library.answers.planned_job import plan_by_share


def notebook(folder, *cells, name="job.ipynb", **more):
    path = folder / name
    made = [{"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": []} for cell in cells]
    path.write_text(
        json.dumps({"cells": [{"cell_type": "markdown", "source": ["# about"]}, *made], "nbformat": 4, **more})
    )
    return path


UNSLOTH = (
    "%%capture\n!pip install unsloth \\\n  trl\npip install xformers\ntorch?",
    "from unsloth import FastLanguageModel\nmax_seq_length = 2048\ndtype = None\n"
    "model, tokenizer = FastLanguageModel.from_pretrained(\n    model_name='Qwen/Qwen3-8B', max_seq_length=max_seq_length, load_in_4bit=True, dtype=dtype)",
    "model = FastLanguageModel.get_peft_model(model, r=32, target_modules=['q_proj', 'v_proj'], lora_dropout=0)",
    "%%bash\nls *.json | wc",
    "from trl import SFTTrainer, SFTConfig\ntrainer = SFTTrainer(model=model, train_dataset=data, args=SFTConfig(\n"
    "    per_device_train_batch_size=2, gradient_accumulation_steps=4, fp16=not is_bfloat16_supported(), optim='adamw_8bit'))",
    "!nvidia-smi\ntrainer.train()",
)


def test_a_notebook_of_unsloth_is_read_as_its_script_would_be(tmp_path):
    answer = memplan.import_file(notebook(tmp_path, *UNSLOTH)).to_dict()
    training = answer["training"]
    assert (answer["trainer"]["name"], answer["model"]["given"]) == ("unsloth", "Qwen/Qwen3-8B")
    assert (training["micro_batch_size"], training["sequence_length"], training["adapter"]["rank"]) == (2, 2048, 32)
    assert answer["needs"] == []
    used = {one["key"]: one["line"] for one in answer["keys"]["used"]}
    assert used["SFTConfig.per_device_train_batch_size"] == 6
    path = notebook(tmp_path, *UNSLOTH)
    assert plan_by_share(str(path), gpu="h100").training["adapter"]["rank"] == 32


TRL = (
    "from trl import SFTTrainer, SFTConfig\nfrom peft import LoraConfig\nmodel_id = 'Qwen/Qwen3-0.6B'",
    "bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16)\n"
    "model = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=bnb, dtype=torch.bfloat16, attn_implementation='flash_attention_2', device_map='auto')",
    "peft_config = LoraConfig(r=64, lora_alpha=16, lora_dropout=0.1, bias='none', target_modules='all-linear', task_type='CAUSAL_LM')",
    "args = SFTConfig(output_dir='out', max_length=1024, packing=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True, optim='adamw_torch_fused')\n"
    "trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, peft_config=peft_config)",
)


ASKS = (
    "import torch\nbase = 'Qwen/Qwen3-0.6B'\nif torch.cuda.get_device_capability()[0] >= 8:\n    attention, kind = 'flash_attention_2', 1\n"
    "    dtype = torch.bfloat16\n    attention = 'flash_attention_2'\nelse:\n    dtype = torch.float16\n    attention = 'eager'",
    "bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=getattr(torch, 'bfloat16'))\n"
    "model = AutoModelForCausalLM.from_pretrained(base, quantization_config=bnb, dtype=dtype, attn_implementation=attention)",
    "args = SFTConfig(max_length=512, per_device_train_batch_size=1, bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported())\n"
    "SFTTrainer(model=model, args=args, peft_config=LoraConfig(r=8, target_modules='all-linear'))",
)


def test_what_a_notebook_asks_its_gpu_for_is_answered_as_one_of_ampere_would(tmp_path):
    answer = memplan.import_file(notebook(tmp_path, *ASKS)).to_dict()
    training = answer["training"]
    assert (training["weights"]["default"], training["compute_dtype"]) == ("bf16", "bf16")
    assert (training["kernels"]["attention"], training["weights"]["hidden_matrix"], answer["needs"]) == (
        "flash",
        "nf4",
        [],
    )
    other = [cell.replace(">= 8", ">= 9").replace("getattr(torch, 'bfloat16')", "torch.bfloat16") for cell in ASKS]
    needs = "".join(memplan.import_file(notebook(tmp_path, *other)).to_dict()["needs"])
    assert "dtype is 'dtype'" in needs  # which GPU it will be is not known


def test_a_notebook_of_trl_says_what_its_file_would_say(tmp_path):
    answer = memplan.import_file(notebook(tmp_path, *TRL)).to_dict()
    file = tmp_path / "sft.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\nload_in_4bit: true\nuse_bnb_nested_quant: true\ndtype: bfloat16\nattn_implementation: flash_attention_2\n"
        "use_peft: true\nlora_r: 64\nlora_dropout: 0.1\nlora_target_modules: all-linear\nmax_length: 1024\npacking: true\nbf16: true\n"
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\noptim: adamw_torch_fused\n"
    )
    expected = memplan.import_file(file).to_dict()
    assert (answer["training"], answer["method"]) == (expected["training"], expected["method"])
    assert answer["keys"]["unknown"] == answer["needs"] == []


def test_a_model_that_trl_loads_by_its_name_has_trls_dtype(tmp_path):
    call = "trainer = DPOTrainer('Qwen/Qwen3-0.6B', args=DPOConfig(beta=0.1, max_length=512, model_init_kwargs={'dtype': 'bfloat16'}))"
    answer = memplan.import_file(notebook(tmp_path, call)).to_dict()
    assert (answer["method"]["stage"], answer["training"]["weights"]["default"]) == ("dpo", "bf16")
    own = "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-0.6B')\ntrainer = DPOTrainer(model, args=DPOConfig(beta=0.1, max_length=512))"
    assert memplan.import_file(notebook(tmp_path, own)).to_dict()["training"]["weights"]["default"] == "bf16"


@pytest.mark.parametrize(
    ("name", "stage"), [("SFT", "sft"), ("DPO", "dpo"), ("GRPO", "grpo"), ("KTO", "kto"), ("Reward", "reward"), ("ORPO", "orpo"), ("CPO", "cpo")]
)  # fmt: skip
def test_a_trainers_class_says_what_it_trains(tmp_path, name, stage):
    cell = f"trainer = {name}Trainer('Qwen/Qwen3-0.6B', args={name}Config(per_device_train_batch_size=8))"
    assert memplan.import_file(notebook(tmp_path, cell)).to_dict()["method"]["stage"] == stage


@pytest.mark.parametrize(
    ("cell", "asked"),
    [
        ("args = SFTConfig(per_device_train_batch_size=opts.rows, max_length=64)", "--micro-batch-size N: per_device_train_batch_size is 'opts.rows' in"),
        ("args = SFTConfig(max_length=size())", "--sequence-length N: max_length is 'size()'"),
        ("n = 4\nif x:\n    n = 8\nargs = SFTConfig(per_device_train_batch_size=n, max_length=64)", "per_device_train_batch_size is 'n'"),
        ("args = SFTConfig(max_length=64, **settings)", "what **settings gives SFTConfig"),
        ("args = SFTConfig(max_length=64, gradient_checkpointing=opts.save)", "gradient_checkpointing is 'opts.save'"),
        ("args = SFTConfig(max_length=64)\nmodel = PeftModel.from_pretrained(model, 'a/b')", "PeftModel_from_pretrained loads others"),
        ("q = BitsAndBytesConfig(load_in_4bit=True)\nargs = SFTConfig(max_length=64, model_init_kwargs={'quantization_config': q})", "bnb_4bit_compute_dtype of 16 bits"),
    ],
)  # fmt: skip
def test_what_only_a_run_would_tell_is_asked_for(tmp_path, cell, asked):
    path = notebook(tmp_path, f"{cell}\ntrainer = SFTTrainer('Qwen/Qwen3-0.6B', args=args)")
    assert asked in "".join(memplan.import_file(path).to_dict()["needs"])


def test_a_variable_of_the_environment_sets_the_allocator(tmp_path):
    cell = 'import os\nos.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"'
    cell += '\nos.environ["RUN"] = str(1)\nos.environ[name] = "expandable_segments:False"\nother["PYTORCH_CUDA_ALLOC_CONF"] = ""'
    training = memplan.import_file(notebook(tmp_path, cell, *UNSLOTH)).to_dict()["training"]
    assert training["allocator"] == "expandable"


def test_pictures_in_a_notebook_are_passed_over_and_endless_code_is_not_read(tmp_path):
    path = notebook(tmp_path, *UNSLOTH, metadata={"picture": "A" * 5_000_000})
    assert memplan.import_file(path).to_dict()["training"]["micro_batch_size"] == 2
    with pytest.raises(InvalidFileError, match=r"job\.ipynb: more than 524,288 letters of code"):
        memplan.import_file(notebook(tmp_path, "x = 1\n" * 100_000))


def test_a_notebook_of_more_cells_than_any_is_refused(tmp_path):
    path = tmp_path / "job.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": "x=1"}] * 10_001}))
    with pytest.raises(InvalidFileError, match=r"job\.ipynb: more than 10,000 cells"):
        memplan.import_file(path)


def test_what_is_loaded_behind_training_does_not_count(tmp_path):
    never = "if False:\n    model, tokenizer = FastLanguageModel.from_pretrained(model_name='lora_model', max_seq_length=1, load_in_4bit=False)\nelse:\n    pass"
    again = "model, tokenizer = FastLanguageModel.from_pretrained('lora_model', max_seq_length=1)"
    answer = memplan.import_file(notebook(tmp_path, *UNSLOTH[:2], never, *UNSLOTH[2:], again)).to_dict()
    assert (answer["model"]["given"], answer["training"]["sequence_length"]) == ("Qwen/Qwen3-8B", 2048)


def test_of_two_trainers_the_one_behind_fine_tuning_is_answered_for(tmp_path):
    cell = "GRPOTrainer(model=model, args=GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=1, num_generations=8, max_completion_length=512))"
    answer = memplan.import_file(notebook(tmp_path, *UNSLOTH, cell)).to_dict()
    assert (answer["method"]["stage"], answer["training"]["micro_batch_size"]) == ("grpo", 8)


def test_a_name_is_what_it_was_given_before_the_call(tmp_path):
    cells = (
        "n = 4",
        "args = SFTConfig(per_device_train_batch_size=n, max_length=2 * 256)\nn = 8",
        "SFTTrainer('a/b', args=args)",
    )
    training = memplan.import_file(notebook(tmp_path, *cells)).to_dict()["training"]
    assert (training["micro_batch_size"], training["sequence_length"]) == (4, 512)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", r"job\.ipynb:1: not a notebook of format 4"),
        ('{"cells": []}', "a notebook without cells of Python"),
        ('{"cells": [{"cell_type": "code", "source": "a b c"}]}', "cell 1: not Python"),
        ('{"cells": [{"cell_type": "code", "source": "import torch"}]}', "a notebook that calls neither unsloth nor a trainer of TRL|no trainer"),
        ('{"cells": [{"cell_type": "code", "source": "Trainer(model)"}]}', "a notebook that calls neither unsloth nor"),
        ('{"cells": [', r"job\.ipynb:1: not JSON"),
        ('{"cells": [7, {"cell_type": "code", "source": 3}]}', "no trainer|neither"),
    ],
)  # fmt: skip
def test_what_is_no_notebook_that_can_be_read_is_said_in_a_line(tmp_path, text, said):
    path = tmp_path / "job.ipynb"
    path.write_text(text)
    with pytest.raises(InvalidFileError, match=said):
        memplan.import_file(path)


COMMANDED = {
    "a line of a shell": (
        "rank = 16\nname = 'Qwen/Qwen3-8B'",
        "!llamafactory-cli train --stage sft --finetuning_type lora --do_train true \\\n"
        "  --model_name_or_path {name} --lora_rank $RANK --cutoff_len {length} --lora_rank {rank}",
    ),
    "a file that JSON is dumped to": (
        "import json\nargs = dict(stage='sft', finetuning_type='lora', do_train=True,\n"
        "            model_name_or_path='Qwen/Qwen3-8B', cutoff_len=LENGTH, lora_rank=16)\n"
        "json.dump(args, open('job.json', 'w'), indent=2)\n%cd /content\n!llamafactory-cli train job.json",
    ),
    "a cell that is a file": (
        "%%writefile job.yaml\nstage: sft\nfinetuning_type: lora\ndo_train: true\nmodel_name_or_path: Qwen/Qwen3-8B\n"
        "cutoff_len: ${LENGTH}\nlora_rank: 16\n",
        "%%bash\nllamafactory-cli train /content/job.yaml",
    ),
    "a text that YAML is dumped from": (
        'import yaml\ntext = """\nstage: sft\nfinetuning_type: lora\ndo_train: true\nmodel_name_or_path: Qwen/Qwen3-8B\n'
        'lora_rank: 16\ncutoff_len: ${LENGTH}\n"""\nconfig = yaml.safe_load(text)\nwith open("job.yaml", "w") as file:\n'
        "    yaml.dump(config, file)",
        "!CUDA_VISIBLE_DEVICES=0 llamafactory-cli train job.yaml",
    ),
}


@pytest.mark.parametrize("name", COMMANDED)
def test_a_notebook_that_starts_a_trainer_is_read_as_a_script_would_be(tmp_path, name):
    cells = COMMANDED[name]
    answer = memplan.import_file(notebook(tmp_path, "!pip install x", "import torch", *cells)).to_dict()
    assert (answer["trainer"]["name"], answer["model"]["given"]) == ("llamafactory", "Qwen/Qwen3-8B")
    assert answer["training"]["adapter"]["rank"] == 16
    assert any("sequence-length" in need and "job.ipynb: cell " in need for need in answer["needs"])
    assert {one["line"] for one in answer["keys"]["used"]} <= {4, 5}


def test_a_notebook_of_axolotls_own_class_is_its_configuration(tmp_path):
    cell = (
        "config = DictDefault(base_model='Qwen/Qwen3-14B', adapter='qlora', load_in_4bit=True, lora_r=32, sequence_len=4096,\n"
        "  datasets=[{'path': data, 'type': 'alpaca'}], plugins=['axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin'])"
    )
    answer = memplan.import_file(notebook(tmp_path, "data = 'a/b'", cell, "train(cfg=load_cfg(config))")).to_dict()
    training = answer["training"]
    assert (answer["trainer"]["name"], answer["method"]["tuning"], answer["needs"]) == ("axolotl", "qlora", [])
    assert (training["adapter"]["rank"], training["sequence_length"], training["kernels"]["loss"]) == (
        32,
        4096,
        "cut-cross-entropy",
    )


def test_a_notebook_that_starts_nothing_is_refused(tmp_path):
    with pytest.raises(InvalidFileError, match="calls neither unsloth nor a trainer of TRL"):
        memplan.import_file(notebook(tmp_path, "!pip install torch", "print(1)"))
    with pytest.raises(InvalidFileError, match="without cells of Python, or lines for a shell"):
        memplan.import_file(notebook(tmp_path, "%%html\n<b></b>"))
