# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The notebook: valid and without outputs, and it runs from top to bottom against the Hub stand-in."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest

from hf_kvq.bundled import bundled_model_path, bundled_text


nbformat = pytest.importorskip("nbformat")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/hub"))

from server import Hub  # noqa: E402


NOTEBOOK = ROOT / "scripts/hf_kvq.ipynb"
_FACTS = """import json
print(json.dumps({
    "fbit": list(config.fbit), "pulled": list(pulled.config.fbit), "same": pulled.to_dict() == plan.to_dict(),
    "source": source, "lengths": [len(ordinary), len(quantized), len(planned)], "widths": [list(w) for w in widths],
    "held": held, "exact": exact, "kl": {n: f.kl for n, f in found.items()}, "bits": bits,
}))"""


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_valid_and_without_outputs(notebook):
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or not cell.outputs and cell.execution_count is None
        # No folders of one machine's.
        assert not re.search(r"""["'(\s](?:/|~/|[A-Z]:\\)\w""", cell.source), cell.source


def test_each_step_is_explained(notebook):
    headings = re.findall(
        r"^## \d. (\w+)", "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown"), re.M
    )
    assert headings == ["Install", "Generate", "Look", "Calibrate", "Push", "Compare"]
    assert "%pip" in notebook.cells[2].source and "find_spec" in notebook.cells[2].source


def run(notebook, folder: Path, **environment: str) -> dict:
    """What the facts cell says after all others."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook.cells.append(nbformat.v4.new_code_cell(_FACTS))
    manager = AsyncKernelManager()
    # The Python that runs the tests, whatever kernels are installed.
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=command, display_name="tests", language="python")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels/torch-ext"), os.environ.get("PYTHONPATH", "")])
    env = {key: value for key, value in os.environ.items() if key not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    env |= {"PYTHONPATH": path, "HF_HUB_CACHE": str(folder / "hub"), "HF_TOKEN_PATH": str(folder / "token")}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    env |= {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    client = NotebookClient(notebook, km=manager, timeout=240, resources={"metadata": {"path": str(folder)}})
    client.execute(env=env)
    return json.loads(notebook.cells[-1].outputs[0].text)


@pytest.mark.slow
def test_runs_from_top_to_bottom(notebook, tmp_path):
    pytest.importorskip("ipykernel")
    bundled_model_path()
    bundled_text()
    with Hub() as hub:
        facts = run(notebook, tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_user_me")
        # Nothing but the plan was asked for, and that from this Hub.
        assert hub.repos.keys() == {"me/smollm2-135m-kvq-demo"} and hub.repos["me/smollm2-135m-kvq-demo"].private
        assert {"README.md", "kvq_config.json"} <= hub.files(facts["source"]).keys()
    assert facts["same"] and facts["fbit"] == facts["pulled"] and len(facts["fbit"]) == 30
    assert len(set(facts["fbit"])) > 1
    assert min(facts["lengths"]) > 20
    # It begins with the model's own 16 bits and ends at the floors, in less memory than an ordinary cache.
    assert set(facts["widths"][0]) == {16} and facts["widths"][-1] == [8] * 2 + [4] * 13 + [2] * 13 + [8] * 2
    assert facts["held"][-1] < 0.6 * facts["exact"][-1]
    kl, bits = facts["kl"], facts["bits"]
    assert len(kl) == 4 and all(math.isfinite(value) and value > 0 for value in kl.values())
    assert kl["pmkvq, 8 bits"] < kl["pmkvq, 4 bits"] < kl["pmkvq, 2 bits"]
    assert 16 > bits["pmkvq, 8 bits"] > bits["pmkvq, 4 bits"] > bits["pmkvq, 2 bits"] > 2
    assert sum(o.output_type == "display_data" for c in notebook.cells for o in c.get("outputs", [])) == 3
