"""What a program changes of a model, or gives its trainer, that no argument says: refused by name, never planned as if it were not there."""

import pytest

import memplan
from memplan.library.answers.planned_job import plan_by_share

PROGRAM = """import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
# first
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype=torch.bfloat16)
# loaded
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
# wrapped
trainer = Trainer(model=model, args=TrainingArguments("out", bf16=True, eval_strategy="steps"), train_dataset=rows)
trainer.train()
"""
BESIDE, LOADED = "train_dataset=rows", "dtype=torch.bfloat16"
CODES = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16"
CHANGES = [
    ("# wrapped", "for n, p in model.named_parameters():\n    p.data = p.data.to(torch.bfloat16)", "casts some of them in line 8"),
    ("# wrapped", "for n, module in model.named_modules():\n    if 'norm' in n:\n        module.to(torch.float32)", "casts some"),
    ("# loaded", "model = model.to(torch.float32)", "casts it in line 6"),
    ("# loaded", "model.to(device='cuda', dtype=torch.float32)", "casts it in line 6"),
    ("# loaded", "model.lm_head = InFloat(model.lm_head)", "replaces model.lm_head in line 6"),
    ("# loaded", "model.model.layers = model.model.layers[:2]", "replaces model.model.layers"),
    ("# first", "torch.backends.cuda.enable_flash_sdp(False)", "enable_flash_sdp switches one off"),
    ("# first", "torch.cuda.set_per_process_memory_fraction(0.5)", "allows itself a fraction"),
    ("]))", "]), autocast_adapter_dtype=False)", "autocast_adapter_dtype is false"),
    (BESIDE, f"{BESIDE}, optimizers=(torch.optim.SGD(model.parameters()), None)", "the program gives it one"),
    (BESIDE, f"{BESIDE}, optimizer_cls_and_kwargs=(torch.optim.SGD, {{}})", "the program gives it a class"),
    (BESIDE, f"{BESIDE}, compute_loss_func=loss", "compute_loss_func is the program's"),
    (BESIDE, f"{BESIDE}, compute_metrics=metrics", "collect the logits of all rows"),
    ("trainer.train()", "trainer.train()\ntrainer.predict(rows)", "collect the logits of all rows"),
    ("# loaded", "model.config.output_hidden_states = True", "sets model.config.output_hidden_states in line 6"),
    ("# first", "config = AutoConfig.from_pretrained('x')\nconfig.num_hidden_layers = 2", "sets config.num_hidden_layers in line 5"),
    (LOADED, f"{LOADED}, num_hidden_layers=2", "another number of layers"),
    (LOADED, f"{LOADED}, output_hidden_states=True", "results of all layers are kept"),
    (LOADED, f"{LOADED}, tp_plan='auto'", "weights that GPUs share"),
    (LOADED, f"{LOADED}, quantization_config={CODES}, llm_int8_skip_modules=['q_proj']), device_map='auto'", "not quantised"),
    (LOADED, f"{LOADED}, quantization_config={CODES}, llm_int8_enable_fp32_cpu_offload=True)", "modules in host memory"),
    ("r=16", "r=16, inference_mode=True", "adapters that do not train"),
    ("r=16", "r=16, lora_bias=True", "biases are trained within adapters"),
    ("r=16", "r=16, exclude_modules=['o_proj']", "all but some of the modules"),
    ("r=16", "r=16, layers_to_transform=[0]", "adapters on some layers only"),
    ("r=16", "r=16, ensure_weight_tying=True, modules_to_save=['embed_tokens']", "tied again"),
    ("r=16", "r=16, alora_invocation_tokens=[1]", "begin within a row"),
]  # fmt: skip
UNCHANGED = [
    ("# wrapped", "for p in model.parameters():\n    total += p.numel()"),
    ("# loaded", "model = model.to('cuda')"),
    (
        "# loaded",
        "model.config.use_cache = False\nmodel.config.output_hidden_states = False\nmodel.config.vocab_size = n",
    ),
    (LOADED, f"{LOADED}, max_memory={{0: '10GiB'}}, use_safetensors=True"),
    ("# first", "torch.backends.cuda.enable_flash_sdp(True)"),
    ("# first", "def unused(model):\n    model = model.to(torch.float32)\n    model.lm_head = None"),
    (BESIDE, f"{BESIDE}, compute_metrics=metrics, preprocess_logits_for_metrics=largest"),
    (BESIDE, f"{BESIDE}, optimizers=(None, None), compute_metrics=None"),
    ("r=16", "r=16, layers_to_transform=None, lora_bias=False, ensure_weight_tying=True"),
]
SHAPE = {"gpu": "a100-80gb", "sequence_length": 64}


def program(folder, before="", after=""):
    path = folder / "train.py"
    path.write_text(PROGRAM.replace(before, after, 1) if before else PROGRAM)
    return str(path)


@pytest.mark.parametrize(("before", "after", "said"), CHANGES, ids=[after[-50:] for _, after, _ in CHANGES])
def test_what_a_program_changes_itself_is_refused_by_name(before, after, said, tmp_path):
    with pytest.raises(memplan.MemplanError) as refusal:
        plan_by_share(program(tmp_path, before, after), **SHAPE)
    assert said in str(refusal.value)


@pytest.mark.parametrize(("before", "after"), UNCHANGED, ids=[after[-50:] for _, after in UNCHANGED])
def test_what_leaves_the_model_as_it_is_changes_no_answer(before, after, tmp_path):
    plain = plan_by_share(program(tmp_path), **SHAPE)
    assert (
        plan_by_share(program(tmp_path, before, after), **SHAPE).memory.requested_bytes == plain.memory.requested_bytes
    )


def test_a_program_that_calls_evaluate_is_planned_with_an_evaluation(tmp_path):
    once = program(tmp_path, ', eval_strategy="steps"', "")
    assert not plan_by_share(once, **SHAPE).training["evaluation"]
    text = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(f"{text}print(trainer.evaluate())\n")
    plan = plan_by_share(once, **SHAPE)
    assert (plan.training["evaluation"], plan.training["evaluation_batch_size"]) == (True, 8)


def test_heads_of_classes_may_be_scored_by_metrics(tmp_path):
    path = tmp_path / "train.py"
    text = PROGRAM.replace(BESIDE, f"{BESIDE}, compute_metrics=metrics")
    path.write_text(text.replace("AutoModelForCausalLM", "AutoModelForSequenceClassification"))
    assert plan_by_share(str(path), **SHAPE).training["method"]["stage"] == "classification"


@pytest.mark.parametrize("turns", ["1, 2, 3, 4", "0, 5, 0", "9" * 30, "2, 1", "'a'"])
def test_numbers_that_no_loop_goes_over_set_no_name(turns, tmp_path):
    """``range`` of too many or too large numbers ended in a traceback."""
    path = program(tmp_path, "# first", f"for number in range({turns}):\n    seed = number")
    assert plan_by_share(path, **SHAPE).memory == plan_by_share(program(tmp_path), **SHAPE).memory
