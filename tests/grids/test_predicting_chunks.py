"""Multi-token prediction in a chunk of its own, and buckets as flags size them, under Megatron-LM."""

import pytest

from memplan.errors import InvalidFileError
from memplan.model.families import model_spec
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_states import MegatronSettings, megatron_states
from memplan.step.grids.megatron_tensors import MegatronBuild, chunk_tensors
from memplan.step.grids.pipeline_stages import StageSplit, chunks_of, chunks_of_layout

KEYS = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
}
SPEC = model_spec({**KEYS, "num_key_value_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False}, "small", "test")
GRID = Grid(8, pipeline=4, virtual=2, zero_stage=1)


def names_of(layout, predicted=1):
    """Return what each chunk has beside layers, in the order of layers."""
    chunks = chunks_of(7, GRID, StageSplit(predicted=predicted, layout=layout))
    build = MegatronBuild(predicted=predicted)
    order = [chunks[stage][virtual] for virtual in range(2) for stage in range(4)]
    parts = ("embedding", "decoder.final_layernorm", "mtp", "output_layer")
    return [
        [part for part in parts if any(t.name.startswith(part) for t in chunk_tensors(SPEC, GRID, chunk, build))]
        for chunk in order
    ]


def test_predicting_layers_lie_where_a_layout_has_them_and_the_final_norm_with_the_last_layer():
    assert names_of("Et|t|t|t|t|tt|m|L") == [
        ["embedding"],
        *[[]] * 4,
        ["decoder.final_layernorm"],
        ["embedding", "mtp"],
        ["output_layer"],
    ]
    assert names_of("Et|t|t|t|t|t|t|mL")[-2:] == [["decoder.final_layernorm"], ["embedding", "mtp", "output_layer"]]
    assert names_of("Et|t|t|t|t|t||tL", 0)[-1] == ["decoder.final_layernorm", "output_layer"]


def test_signs_of_a_layout_may_be_kept_from_a_shell():
    assert (
        chunks_of_layout(r"Et*3\\|\\(tt\\|\\)*2mL") == chunks_of_layout("Et*3|(tt|)*2mL") == ["Ettt", "tt", "tt", "mL"]
    )


@pytest.mark.parametrize("layout", ["Et|tt|tttt|m||||L", "Et|t|t|t|t|tt|m|mL"])
def test_they_lie_in_one_chunk_which_is_the_last_of_its_stage(layout):
    with pytest.raises(InvalidFileError, match=r"all m have to be in one chunk|expected E"):
        names_of(layout, layout.count("m"))


def test_buckets_are_as_large_as_said_and_padded_further_where_asked():
    def elements(**told):
        (stage,) = megatron_states(SPEC, Grid(16, zero_stage=1), MegatronSettings(**told))
        return stage.fullest.weights // 2

    plain = elements()
    assert elements(busy=True) == -(-plain // 65536) * 65536
    assert elements(overlap=True) == plain < elements(overlap=True, bucket_elements=10_000)
    assert elements(bucket_elements=10_000) == plain  # without --overlap-grad-reduce there is one
