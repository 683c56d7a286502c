"""Parameters are routed by what their modules are, and what no rule knows is refused."""

import pytest
import torch
from torch import nn

from memplan.errors import UnknownNameError
from memplan.muon import Muon, OptimizerError, split_parameters


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)


class Tiny(nn.Module):
    def __init__(self, vocabulary=32, width=32, layers=2, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def routes(groups):
    return {entry.name: (entry.algorithm, entry.role) for entry in groups.report}


def test_square_embeddings_and_heads_never_reach_muon():
    found = routes(split_parameters(Tiny()))
    assert found["embed.weight"] == ("adamw", "embedding")
    assert found["lm_head.weight"] == ("adamw", "head")
    assert found["layers.1.up.weight"] == ("muon", "hidden_matrix")
    assert found["layers.0.up.bias"] == ("adamw", "bias")
    assert found["layers.0.norm.weight"] == found["norm.weight"] == ("adamw", "norm")


def test_tied_weights_appear_once_and_are_embeddings():
    model = Tiny(tied=True)
    groups = split_parameters(model)
    assert routes(groups)["embed.weight"] == ("adamw", "embedding")
    assert "lm_head.weight" not in routes(groups)
    assert sum(p.numel() for group in groups for p in group["params"]) == sum(p.numel() for p in model.parameters())


def test_a_head_of_any_name_is_found_by_tying():
    model = Tiny(tied=True)
    model.vocabulary_projection = model.lm_head
    del model.lm_head
    assert routes(split_parameters(model))["embed.weight"][1] == "embedding"


def test_groups_go_straight_into_the_optimizer():
    model = Tiny()
    optimizer = Muon(split_parameters(model), lr=0.01, momentum_format="int8", adamw_format="int8")
    model.lm_head(model.norm(model.embed(torch.arange(4)))).sum().backward()
    optimizer.step()
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    assert optimizer.param_groups[0]["param_names"][0] == "layers.0.up.weight"


def test_the_report_prints_one_line_for_each_parameter():
    groups = split_parameters(Tiny())
    lines = str(groups).splitlines()
    assert len(lines) == len(groups.report)
    assert any("lm_head.weight" in line and "a head by its name" in line for line in lines)


def test_what_may_be_the_head_is_refused_until_assigned():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    with pytest.raises(OptimizerError, match=r"2\.weight \(50, 8\)"):
        split_parameters(model)
    assert routes(split_parameters(model, {"2.*": "adamw"}))["2.weight"] == ("adamw", None)


def test_unknown_matrices_are_refused_all_at_once_and_with_their_names():
    model = Tiny()
    model.odd = nn.Parameter(torch.zeros(3, 4))
    model.conv = nn.Conv2d(1, 1, 3)
    with pytest.raises(OptimizerError) as caught:
        split_parameters(model)
    assert "odd (3, 4)" in str(caught.value)
    assert "conv.weight" in str(caught.value)
    assert routes(split_parameters(model, {"odd": "muon", "conv.weight": "adamw"}))["odd"] == ("muon", None)


def test_assigning_an_unknown_algorithm_is_refused():
    with pytest.raises(UnknownNameError, match="adamw"):
        split_parameters(Tiny(), {"embed.weight": "adam"})


def test_routers_and_experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 16))
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 16))

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4, bias=False)
            self.experts = Experts()
            self.shared_expert_gate = nn.Linear(8, 1, bias=False)

    found = routes(split_parameters(nn.ModuleDict({"mlp": Mixture()})))
    assert found["mlp.gate.weight"] == ("adamw", "router")
    assert found["mlp.shared_expert_gate.weight"] == ("adamw", "router")
    assert found["mlp.experts.gate_up_proj"] == ("muon", "expert_matrix")
    assert found["mlp.experts.gate_up_proj_bias"] == ("adamw", "bias")


def test_a_gate_inside_a_router_is_no_hidden_matrix():
    class TokenRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4, bias=False)

    model = nn.ModuleDict({"moe": nn.ModuleDict({"router": TokenRouter(), "up": nn.Linear(8, 16, bias=False)})})
    assert routes(split_parameters(model))["moe.router.gate.weight"] == ("adamw", "router")


def test_a_gate_without_experts_is_a_hidden_matrix():
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.Linear(8, 16, bias=False)})})
    assert routes(split_parameters(model))["mlp.gate.weight"] == ("muon", "hidden_matrix")


def test_frozen_parameters_are_reported_and_left_out():
    model = Tiny()
    model.embed.weight.requires_grad_(False)
    groups = split_parameters(model)
    assert routes(groups)["embed.weight"][0] == "frozen"
    assert all(p is not model.embed.weight for group in groups for p in group["params"])


def test_a_schedule_scales_layers():
    groups = split_parameters(Tiny(layers=4), layer_scale=lambda layer, layers: 0.5 + 0.5 * layer / layers)
    scales = [group["lr_scale"] for group in groups if group["algorithm"] == "muon"]
    assert scales == [0.5, 0.625, 0.75, 0.875]
    Muon(groups, lr=0.1)
