"""Every Python block of the README runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.real
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block, tmp_path):
    """Samples in a README rot first; this one is also what the forks section promises: at most 25 lines each."""
    assert len(block.splitlines()) <= 25
    script = tmp_path / "block.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{block}")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
