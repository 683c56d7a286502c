"""What ``memplan import`` makes of every file of a folder: ``python tests/trainers/survey_files.py FOLDER [--gpus N]``.

Prints exit codes, trainers, unknown keys and reasons, the commonest first; where the folder has an ``index.yaml`` that names
each file's trainer, also which were told wrongly. A traceback ends it.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import yaml

import memplan
from memplan.errors import MemplanError, normalised_name

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py")


def main() -> None:
    """Read every file and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--write", type=Path, help="a file for one JSON line per file")
    parser.add_argument("--most", type=int, default=40)
    options = parser.parse_args()
    index = options.folder / "index.yaml"
    told = (
        {}
        if not index.is_file()
        else {one["file"]: one["trainer"] for one in yaml.safe_load(index.read_text())["files"]}
    )
    paths = sorted(path for path in options.folder.rglob("*") if path.suffix in SUFFIXES and path != index)
    rows = [row_of(path, options.gpus) for path in paths]
    if options.write:
        options.write.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"{len(rows)} files: "
        + ", ".join(f"exit {code}: {count}" for code, count in sorted(Counter(row["exit"] for row in rows).items()))
    )
    print(Counter(row["trainer"] for row in rows).most_common())
    for row in rows:
        wanted = told.get(str(Path(row["file"]).relative_to(options.folder)))
        if wanted not in (None, "negative") and normalised_name(str(row["trainer"])) != normalised_name(wanted):
            print(f"told as {row['trainer']}, is {wanted}: {row['file']}: {row['answer'][:150]}")
    for title, key in (("unknown keys", "unknown"), ("not modelled", "not_modelled"), ("needs", "needs")):
        counts = Counter(f"{row['trainer']}: {one}" for row in rows for one in row[key])
        print(f"\n{title}: {sum(counts.values())} in {sum(bool(row[key]) for row in rows)} files")
        for name, count in counts.most_common(options.most):
            print(f"  {count:4} {name[:150]}")


def row_of(path: Path, gpus: int | None) -> dict[str, object]:
    """Return what came of one file."""
    empty: dict[str, object] = {"trainer": None, "role": None, "unknown": [], "not_modelled": [], "needs": []}
    try:
        document = memplan.import_file(path, gpus=gpus).document()
    except MemplanError as error:
        return {"file": str(path), "exit": error.exit_code, "answer": str(error), **empty}
    data, keys = document.data, document.data["keys"]
    return {
        "file": str(path),
        "exit": document.exit_code,
        "trainer": data["trainer"]["name"],
        "role": data["role"],
        "answer": data["answer"],
        "unknown": [one["key"] for one in keys["unknown"]],
        "not_modelled": [f"{one['key']}: {one['why']}" for one in keys["not_modelled"]],
        "needs": data["needs"],
        **{key: data[key] for key in ("model", "method", "training", "packing")},
    }


if __name__ == "__main__":
    main()
