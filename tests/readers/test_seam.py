"""A reader is registered at one place, which is all that looking up a model asks."""

from memplan.library.lookup import Shapes, catalog_model, find_model
from memplan.model import readers
from memplan.model.readers import READERS, Reader, is_model_file


def test_a_reader_that_is_registered_reads_its_files(monkeypatch, tmp_path, catalog):
    added = Reader((".mine",), lambda path, layouts: catalog_model(path.read_text().strip(), catalog))
    monkeypatch.setattr(readers, "READERS", (added, *READERS))
    path = tmp_path / "model.mine"
    path.write_text("gpt2\n", encoding="utf-8")
    assert find_model(str(path), Shapes(), catalog).spec.name == "GPT-2"


def test_the_first_reader_that_takes_a_name_goes():
    endings = [ending for reader in READERS for ending in reader.endings]
    assert len(endings) == len(set(endings))
    for number, reader in enumerate(READERS):
        later = [ending for other in READERS[number + 1 :] for ending in other.endings]
        assert not [ending for ending in later if ending.endswith(reader.endings)]


def test_names_of_model_files_are_known_without_the_file():
    assert all(map(is_model_file, ("a.gguf", "a.safetensors", "a.safetensors.index.json", "config.json")))
    assert not is_model_file("llama-3.1-8b")
