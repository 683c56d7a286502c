"""Numbers that an answer or a refusal states, and that nothing else depends on."""

import memplan


def test_a_classifier_has_at_most_so_many_labels(refused):
    given = ("fit", "gpt2", "--gpu", "h100", "--method", "classification", "--stack", "transformers")
    said = refused(*given, "--config", "bf16-adamw", "--set", "method.labels=1048577")
    assert "method.labels: expected a whole number from 1 to 1,048,576, got 1048577" in said


def test_a_grid_that_names_no_lengths_doubles_them_up_to_32_thousand():
    answer = memplan.frontier("llama-3.2-1b", gpu="h100", config="bf16-adamw").to_dict()
    assert sorted({row["sequence_length"] for row in answer["rows"]}) == [2**power for power in range(9, 16)]
