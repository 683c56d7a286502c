"""What ranks of Megatron-LM logged in runs that others published, against what is planned for their flags: nothing is fitted to them."""

from pathlib import Path

import pytest
import yaml

from tests.jobs import yaml_data

TABLE = yaml_data(Path(__file__).with_name("megatron_runs.yaml"))
MIB = 2**20


@pytest.mark.parametrize("name", TABLE["runs"])
def test_what_a_rank_logged_is_what_is_planned(cli, tmp_path, name):
    run = TABLE["runs"][name]
    flags = {f"--{key}": value for key, value in {**TABLE["common"], **run["flags"]}.items() if value is not None}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"MODEL_ARGS": flags}))
    data = cli("fit", tmp_path / "run.yaml", "--gpu", run.get("gpu", "h100"), "--gpus", run["gpus"], "--json").data
    own = next(line["bytes"] for line in data["rank"]["components"] if line["name"] == "library_workspaces")
    stages = {stage["stage"]: stage for stage in data["stages"]}
    for index, logged in run["stages"].items():
        stage = stages[index]
        stays = own + stage["lasting_step_bytes"] if run.get("lasting", True) else 0
        assert (stage["persistent_bytes"] + stays) / MIB == pytest.approx(logged["allocated"], rel=run["within"])
        assert stage["persistent_bytes"] / MIB < logged["allocated"]
        if "most" in logged:
            most = stage["persistent_bytes"] + own + stage["step_bytes"]
            assert most / MIB == pytest.approx(logged["most"], rel=run["within"])
