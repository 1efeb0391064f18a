"""Run the cells of a notebook, one after another, without Jupyter."""

import json
import sys
from pathlib import Path


def main() -> None:
    """Run the notebook that the command line names."""
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in json.loads(Path(sys.argv[1]).read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)


if __name__ == "__main__":
    main()
